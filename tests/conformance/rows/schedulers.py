"""Every learning rate scheduler of torch, averaged models and the gradient scaler."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim
from torch.optim import lr_scheduler, swa_utils

from tests.conformance.rows.small import batch, loss_of, net, trained
from tests.conformance.table import Result, Table, Training

TABLE = Table("Schedulers, averages and scalers of torch")

Make = Callable[[optim.Optimizer], Any]


def _scheduled(make: Make, *, of_loss: bool = False, adam: bool = False) -> Training:
    model = net()
    parameters = [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[3].parameters()}]
    optimizer = (
        optim.AdamW(parameters, lr=0.1) if adam else optim.SGD(parameters, lr=0.1, momentum=0.9)
    )
    scheduler = make(optimizer)

    def after(step: int) -> Any:
        scheduler.step(math.sin(step)) if of_loss else scheduler.step()
        return [group["lr"] for group in optimizer.param_groups]

    return trained(model, optimizer, after=after, also={"scheduler": scheduler})


class Slowly:
    """A callable object, which LambdaLR keeps in its state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, epoch: int) -> float:
        self.calls += 1
        return 1 / (1 + epoch + 0.01 * self.calls)


def _halve(epoch: int) -> float:
    return 0.5**epoch


def _sequential(o: optim.Optimizer) -> Any:
    warmup = lr_scheduler.LinearLR(o, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(o, [warmup, lr_scheduler.CosineAnnealingLR(o, 8)], [3])


def _chained(o: optim.Optimizer) -> Any:
    both = [lr_scheduler.ConstantLR(o, 0.1, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    return lr_scheduler.ChainedScheduler(both, optimizer=o)


def _nested(o: optim.Optimizer) -> Any:
    inner = lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.StepLR(o, 2)], [2]
    )
    return lr_scheduler.SequentialLR(o, [inner, lr_scheduler.OneCycleLR(o, 0.2, 20)], [5])


_SCHEDULERS: dict[str, Make] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 3, 6], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6, 0.01),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2),
    "CyclicLR(mode='exp_range')": lambda o: lr_scheduler.CyclicLR(
        o, 0.01, 0.1, 2, mode="exp_range", gamma=0.9, cycle_momentum=True
    ),
    "CyclicLR with a scale function": lambda o: lr_scheduler.CyclicLR(
        o, 0.01, 0.1, 2, scale_fn=_halve, scale_mode="cycle"
    ),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.2, 20),
    "OneCycleLR(three_phase=True)": lambda o: lr_scheduler.OneCycleLR(
        o, [0.1, 0.2], 20, three_phase=True, anneal_strategy="linear"
    ),
    "LambdaLR of functions": lambda o: lr_scheduler.LambdaLR(o, [_halve, lambda e: 0.9**e]),
    "LambdaLR of callable objects": lambda o: lr_scheduler.LambdaLR(o, [Slowly(), Slowly()]),
    "LambdaLR of one callable object for all groups": lambda o: lr_scheduler.LambdaLR(o, Slowly()),
    "MultiplicativeLR of functions": lambda o: lr_scheduler.MultiplicativeLR(o, lambda e: 0.9),
    "MultiplicativeLR of callable objects": lambda o: lr_scheduler.MultiplicativeLR(
        o, [Slowly(), Slowly()]
    ),
    "SequentialLR": _sequential,
    "SequentialLR inside SequentialLR": _nested,
    "ChainedScheduler": _chained,
    "SWALR": lambda o: swa_utils.SWALR(o, 0.01, anneal_epochs=4),
}
for _name, _make in _SCHEDULERS.items():
    TABLE.add(_name, _scheduled, _make)
TABLE.add(
    "ReduceLROnPlateau",
    lambda: _scheduled(
        lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, cooldown=1), of_loss=True
    ),
)
TABLE.add(
    "ReduceLROnPlateau(mode='max', min_lr=[...])",
    lambda: _scheduled(
        lambda o: lr_scheduler.ReduceLROnPlateau(o, "max", patience=0, min_lr=[0.01, 0.02]),
        of_loss=True,
    ),
)
TABLE.add(
    "OneCycleLR of AdamW, which cycles betas",
    lambda: _scheduled(lambda o: lr_scheduler.OneCycleLR(o, 0.2, 20), adam=True),
)


@TABLE.row("a rate that is a tensor under CosineAnnealingLR")
def _() -> Training:
    model = net()
    optimizer = optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 6)
    return trained(
        model, optimizer, after=lambda step: scheduler.step(), also={"scheduler": scheduler}
    )


class Warmup(lr_scheduler.LRScheduler):
    """Holds the scheduler that comes after it, so that its state holds an object."""

    def __init__(self, optimizer: optim.Optimizer, steps: int, after: Any) -> None:
        self.steps, self.after = steps, after
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        if self.last_epoch > self.steps:
            return [group["lr"] for group in self.optimizer.param_groups]
        return [base * (self.last_epoch + 1) / (self.steps + 1) for base in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch < self.steps:
            return super().step(epoch)
        self.after.step()
        self.last_epoch += 1
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]


TABLE.add(
    "a scheduler whose state holds another scheduler",
    _scheduled,
    lambda o: Warmup(o, 2, lr_scheduler.CosineAnnealingLR(o, 20)),
    control=Result.DIFFERS,
    keepstep=Result.REFUSED_AT_START,
    reason="the inner scheduler would come back with an optimizer of its own, so the rate would"
    " stay as it is: keep both as components",
)


class KeptWarmup(Warmup):
    """As `Warmup`, with a state_dict that keeps the inner scheduler's."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "after": self.after.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.after.load_state_dict(state["after"])
        super().load_state_dict({key: value for key, value in state.items() if key != "after"})


TABLE.add(
    "a scheduler whose state_dict() keeps that of an inner scheduler",
    _scheduled,
    lambda o: KeptWarmup(o, 2, lr_scheduler.CosineAnnealingLR(o, 20)),
)


class Rebuilds(lr_scheduler.LRScheduler):
    """Derives a table from its state when it is loaded."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.peaks = [0.1]
        self._rebuild()
        super().__init__(optimizer)

    def _rebuild(self) -> None:
        self._table = tuple(peak / 2 for peak in self.peaks)

    def get_lr(self) -> list[float]:
        return [self._table[-1] for _ in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        self.peaks.append(0.1 / (1 + len(self.peaks)))
        self._rebuild()
        super().step(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "peaks": list(self.peaks)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.last_epoch, self.peaks = state["last_epoch"], list(state["peaks"])
        self._rebuild()


TABLE.add(
    "a scheduler that rebuilds a table when it is loaded",
    _scheduled,
    Rebuilds,
)


def _averaged(**options: Any) -> Training:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    average = swa_utils.AveragedModel(model, **options)

    def after(step: int) -> None:
        if step > 1:
            average.update_parameters(model)

    return trained(model, after=after, also={"average": average})


TABLE.add("AveragedModel", _averaged)
TABLE.add("AveragedModel with its buffers", lambda: _averaged(use_buffers=True))
TABLE.add(
    "AveragedModel by get_ema_multi_avg_fn",
    lambda: _averaged(multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
)
TABLE.add(
    "AveragedModel by an avg_fn of the script",
    lambda: _averaged(avg_fn=lambda old, new, count: 0.9 * old + 0.1 * new),
)


@TABLE.row("AveragedModel with SWALR, and update_bn at the end")
def _() -> Training:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    average, rates = swa_utils.AveragedModel(model), swa_utils.SWALR(optimizer, 0.01)

    def after(step: int) -> None:
        average.update_parameters(model)
        rates.step()

    return trained(
        model,
        optimizer,
        after=after,
        also={"average": average, "rates": rates},
        ends=lambda: swa_utils.update_bn([batch()], average),
    )


@TABLE.row("GradScaler that skips steps after an overflow")
def _() -> Training:
    model = net()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)

    def step(number: int) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, batch())
        optimizer.zero_grad()
        scaler.scale(loss * (float("inf") if number == 3 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        return [loss.item(), scaler.get_scale()]

    components = {"model": model, "optimizer": optimizer, "scaler": scaler}
    return Training(components=components, step=step)


TABLE.add(
    "GradScaler(enabled=False)",
    lambda: trained(net(), also={"scaler": torch.amp.GradScaler("cpu", enabled=False)}),
)
