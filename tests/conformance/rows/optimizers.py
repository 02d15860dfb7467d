"""Every optimizer of torch.optim, with its variants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim

from tests.conformance.rows.small import batch, loss_of, net, trained
from tests.conformance.table import Result, Table, Training

TABLE = Table("Optimizers of torch")


def _plain(make: Callable[[nn.Module], optim.Optimizer]) -> Training:
    model = net()
    return trained(model, make(model))


def _of(kind: type[optim.Optimizer], **options: Any) -> Training:
    return _plain(lambda model: kind(model.parameters(), **options))  # type: ignore[call-arg]


_KINDS: dict[type[optim.Optimizer], list[dict[str, Any]]] = {
    optim.ASGD: [{}, {"t0": 3, "foreach": True}],
    optim.Adadelta: [{}, {"foreach": True, "maximize": True}],
    optim.Adafactor: [{}, {"weight_decay": 0.1}],
    optim.Adagrad: [{}, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}, {"fused": True}],
    optim.Adam: [
        {},
        {"amsgrad": True},
        {"foreach": True},
        {"fused": True},
        {"maximize": True},
        {"capturable": False, "differentiable": False, "decoupled_weight_decay": True},
    ],
    optim.AdamW: [{}, {"amsgrad": True, "foreach": True}, {"fused": True, "amsgrad": True}],
    optim.Adamax: [{}, {"foreach": True, "maximize": True}],
    optim.NAdam: [{}, {"decoupled_weight_decay": True}, {"foreach": True}],
    optim.RAdam: [{}, {"decoupled_weight_decay": True}, {"foreach": True}],
    optim.RMSprop: [{}, {"centered": True, "momentum": 0.9}, {"foreach": True}],
    optim.Rprop: [{}, {"foreach": True, "maximize": True}],
    optim.SGD: [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.9, "dampening": 0.1, "fused": True},
        {"momentum": 0.9, "foreach": True, "maximize": True},
    ],
}
for _kind, _variants in _KINDS.items():
    for _options in _variants:
        _words = ", ".join(f"{key}={value}" for key, value in _options.items())
        TABLE.add(
            f"{_kind.__name__}({_words})",
            lambda kind=_kind, options=_options: _of(kind, **{"lr": 1e-2, **options}),
            kills=(3,) if _options else (2, 5),
            optimizer=_kind.__name__,
        )


@TABLE.row("Muon of the matrices beside AdamW of the rest", optimizer="Muon")
def _() -> Training:
    model = net()
    flat = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    muon, adam = optim.Muon(flat, lr=1e-2), optim.AdamW(rest, lr=1e-2)

    def step(number: int) -> float:
        loss = loss_of(model, batch())
        for each in (muon, adam):
            each.zero_grad()
        loss.backward()
        muon.step()
        adam.step()
        return loss.item()

    return Training(components={"model": model, "muon": muon, "adam": adam}, step=step)


@TABLE.row("SparseAdam of an embedding with sparse gradients", optimizer="SparseAdam")
def _() -> Training:
    model = nn.Embedding(10, 4, sparse=True)
    return trained(
        model,
        optim.SparseAdam(model.parameters(), lr=1e-2),
        data=lambda: torch.randint(0, 10, (6,)),
    )


def _lbfgs(**options: Any) -> Training:
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=2, **options)

    def step(number: int) -> float:
        x = batch()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss

        return float(optimizer.step(closure))

    return Training(components={"model": model, "optimizer": optimizer}, step=step)


TABLE.add("LBFGS whose history grows", _lbfgs, optimizer="LBFGS")
TABLE.add(
    "LBFGS whose history is full, with a line search",
    lambda: _lbfgs(history_size=3, line_search_fn="strong_wolfe"),
)


@TABLE.row("a learning rate that is a tensor")
def _() -> Training:
    return _of(optim.Adam, lr=torch.tensor(1e-2), foreach=False)


@TABLE.row("a learning rate that is a tensor, changed in place by the loop")
def _() -> Training:
    model, rate = net(), torch.tensor(1e-2)
    optimizer = optim.AdamW(model.parameters(), lr=rate, foreach=False)
    return trained(model, optimizer, after=lambda step: optimizer.param_groups[0]["lr"].mul_(0.9))


@TABLE.row("betas that are tensors")
def _() -> Training:
    betas = (torch.tensor(0.9), torch.tensor(0.99))
    return _of(optim.Adam, betas=betas, foreach=False, lr=torch.tensor(1e-2))


@TABLE.row("several groups with options of their own")
def _() -> Training:
    return _plain(
        lambda model: optim.SGD(
            [
                {"params": [model[0].weight, model[3].weight], "lr": 0.1, "weight_decay": 0.1},
                {"params": [model[0].bias, model[3].bias], "momentum": 0.5, "name": "biases"},
            ],
            lr=0.01,
            momentum=0.9,
        )
    )


@TABLE.row("groups whose options the loop changes")
def _() -> Training:
    model = net()
    optimizer = optim.Adam([{"params": [p]} for p in model.parameters()], lr=0.01)

    def after(step: int) -> None:
        group = optimizer.param_groups[step % 4]
        group["lr"] *= 0.5
        group["betas"] = (0.8, 0.95)
        group["changed"] = {"at": [step], "by": "the loop"}

    return trained(model, optimizer, after=after)


@TABLE.row("named parameters")
def _() -> Training:
    return _plain(lambda model: optim.AdamW(model.named_parameters(), lr=1e-2))


@TABLE.row("named parameters in two groups")
def _() -> Training:
    def make(model: nn.Module) -> optim.Optimizer:
        named = list(model.named_parameters())
        return optim.SGD([{"params": named[:2]}, {"params": named[2:], "lr": 0.1}], momentum=0.9)

    return _plain(make)


@TABLE.row("parameters in the reverse order of the module")
def _() -> Training:
    return _plain(lambda model: optim.Adam(list(model.parameters())[::-1], lr=1e-2))


@TABLE.row("no state before the fourth step, as the loop accumulates gradients", kills=(1, 4))
def _() -> Training:
    model = net()
    optimizer = optim.Adam(model.parameters(), lr=1e-2)

    def step(number: int) -> float:
        loss = loss_of(model, batch())
        if number % 4 == 3:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()

    return Training(components={"model": model, "optimizer": optimizer}, step=step)


@TABLE.row("a parameter that never gets a gradient")
def _() -> Training:
    model = nn.ModuleDict({"used": nn.Linear(6, 2), "unused": nn.Linear(3, 3)})
    return trained(
        model,
        optim.Adam(model.parameters(), lr=1e-2),
        loss=lambda m, x: loss_of(m["used"], x),
    )


@TABLE.row("a parameter that gets its first gradient later", kills=(2, 6))
def _() -> Training:
    model = nn.ModuleDict({"early": nn.Linear(6, 2), "late": nn.Linear(6, 2)})
    count = {"steps": 0}

    def loss(m: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
        count["steps"] += 1
        return loss_of(m["late" if count["steps"] > 4 else "early"], x)

    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    return trained(model, optimizer, loss=loss, also={"count": count})


@TABLE.row(
    "parameters in no module, but in a dict of the Checkpointer",
    control=Result.DIFFERS,
    reason="`torch.load` makes new tensors, which the optimizer does not step",
)
def _() -> Training:
    loose = [torch.randn(6, 2).requires_grad_(), torch.zeros(2).requires_grad_()]
    optimizer = optim.Adam(loose, lr=1e-2)

    def step(number: int) -> float:
        loss = loss_of(lambda x: x @ loose[0] + loose[1], batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Training(components={"loose": dict(enumerate(loose)), "optimizer": optimizer}, step=step)


@TABLE.row("bfloat16 weights under AdamW")
def _() -> Training:
    model = net().to(torch.bfloat16)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    return trained(model, optimizer, data=lambda: batch().bfloat16())


@TABLE.row("float64 weights, and complex ones, under Adam with amsgrad")
def _() -> Training:
    model = nn.ParameterDict(
        {
            "real": torch.randn(4, 4, dtype=torch.float64),
            "complex": torch.randn(4, 4, dtype=torch.complex64),
        }
    )

    def loss(m: nn.ParameterDict, x: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_real(m["complex"] @ m["complex"].conj().T)
        return turned.square().mean() + m["real"].square().mean() * x.mean()

    return trained(model, optim.Adam(model.parameters(), lr=1e-2, amsgrad=True), loss=loss)


@TABLE.row("the optimizer's step inside the backward pass, by a hook on each gradient")
def _() -> Training:
    model = net()
    optimizers = {
        name: optim.SGD([p], lr=0.1, momentum=0.9) for name, p in model.named_parameters()
    }
    for name, p in model.named_parameters():

        def act(p: torch.Tensor, name: str = name) -> None:
            optimizers[name].step()
            optimizers[name].zero_grad()

        p.register_post_accumulate_grad_hook(act)

    def step(number: int) -> float:
        loss = loss_of(model, batch())
        loss.backward()
        return loss.item()

    named = {f"of {name}".replace(".", " "): optimizer for name, optimizer in optimizers.items()}
    return Training(components={"model": model, **named}, step=step)
