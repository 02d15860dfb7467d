"""Popular packages. Each is imported where its row is made, so that the table can be read without
them."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

from tests.conformance.rows.small import batch, loss_of, net, trained
from tests.conformance.table import Life, Result, Table, Training

TABLE = Table("Packages")


def _add(package: str, what: str, make: Callable[..., Training], *given: Any, **more: Any) -> None:
    TABLE.add(f"{package}: {what}", make, *given, packages=(package,), **more)


def _of(package: str, name: str, make: Callable[..., Training], *given: Any, **more: Any) -> None:
    """A row of an optimizer."""
    _add(package, name, make, *given, optimizer=name, **more)


UNTRIED = {
    ("torchao", "CPUOffloadOptimizer"): "needs a GPU: it asserts that one is there",
}
"""Optimizers without a row, by package and name, and why."""


def _uncompiled() -> None:
    """What a package compiles is not what is tested here, and takes minutes."""
    torch.compile = lambda function=None, **options: function or (lambda function: function)


# --- optimizers ---------------------------------------------------------------------------------


def _torchao(name: str) -> Training:
    import torchao.optim

    _uncompiled()
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    optimizer = getattr(torchao.optim, name)(model.parameters(), lr=1e-2)
    return trained(model, optimizer, data=lambda: batch(64))


for _name in ("AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit", "Adam4bit", "AdamFp8"):
    _of("torchao", _name, _torchao, _name)


def _bits(name: str, **options: Any) -> Training:
    import bitsandbytes

    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    kind = getattr(bitsandbytes.optim, name)
    return trained(model, kind(model.parameters(), lr=1e-2, **options), data=lambda: batch(64))


_PAGED = "nothing is paged on a CPU; not tried on a GPU"
for _name in (
    *("Adam8bit", "AdamW8bit", "Lion8bit", "SGD8bit", "AdEMAMix8bit", "RMSprop8bit"),
    *("Adagrad8bit", "LAMB8bit"),
    *("PagedAdam8bit", "PagedAdamW8bit", "PagedLion8bit", "PagedAdEMAMix8bit"),
):
    _options = {"momentum": 0.9} if _name == "SGD8bit" else {}
    if _name != "LAMB8bit":
        _options["min_8bit_size"] = 0
    _paged = {"reason": _PAGED} if _name.startswith("Paged") else {}
    _of("bitsandbytes", _name, functools.partial(_bits, _name, **_options), **_paged)
_of("bitsandbytes", "AdamW", _bits, "AdamW")
for _name in ("PagedAdam", "PagedAdamW", "PagedLion", "PagedAdEMAMix"):
    _of("bitsandbytes", _name, _bits, _name, reason=_PAGED)


EXTENSIONS = Path(os.environ.get("TORCH_EXTENSIONS_DIR", f"{sys.prefix}/extensions"))
"""Where `make test-frameworks` compiles what DeepSpeed compiles at its first use."""


@functools.partial(_of, "deepspeed", "DeepSpeedCPUAdam")
def _() -> Training:
    os.environ |= {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(EXTENSIONS)}
    os.environ["PATH"] = os.pathsep.join([f"{sys.prefix}/bin", os.environ["PATH"]])  # of ninja
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    model = net()
    return trained(model, DeepSpeedCPUAdam(model.parameters(), lr=1e-2))


class QLora(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.base = kind()
        self.a, self.b = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def _quantized(name: str, **options: Any) -> Training:
    import bitsandbytes

    def kind() -> nn.Module:
        layer = getattr(bitsandbytes.nn, name)(64, 64, bias=False, **options)
        with torch.random.fork_rng():  # a base model is the same in each life
            torch.manual_seed(1)
            plain = nn.Linear(64, 64, bias=False)
        layer.load_state_dict(plain.state_dict())
        return layer

    model = nn.Sequential(QLora(kind), nn.Tanh(), QLora(kind)).to("cpu")
    for part in (model[0], model[2]):
        part.base.weight = part.base.weight.to("cpu")
        part.base.weight.requires_grad_(False)
    with torch.no_grad():
        model(batch(64))
    return trained(model, data=lambda: batch(64))


_add(
    "bitsandbytes",
    "Linear4bit under LoRA (QLoRA)",
    lambda: _quantized("Linear4bit", compute_dtype=torch.float32, quant_type="nf4"),
    control=Result.RAISES,
    keepstep=Result.REFUSED_AT_START,
    message="base",
    reason="Linear4bit does not load what it saves: keep the adapter alone",
)
_add(
    "bitsandbytes",
    "Linear8bitLt under LoRA",
    lambda: _quantized("Linear8bitLt", has_fp16_weights=False, threshold=6.0),
    control=Result.RAISES,
    keepstep=Result.RAISES,
    message="Linear8bitLt",
    reason="on a CPU, Linear8bitLt does not load what it saves: keep the adapter alone. Its hook"
    " reads a table of its module, so it is not rehearsed before the first step",
)


def _schedulefree(name: str, *, after_save: bool) -> Training:
    import schedulefree

    model = net()
    optimizer = getattr(schedulefree, name)(model.parameters(), lr=1e-2, warmup_steps=3)
    optimizer.train()

    def evaluate(step: int) -> Any:
        if step % 3 != 2:
            return None
        optimizer.eval()
        seen = model[0].weight.detach().clone()
        optimizer.train()
        return seen

    def step(number: int) -> Any:
        seen = evaluate(number - 1) if after_save else None
        loss = loss_of(model, batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return [loss.item(), seen if after_save else evaluate(number)]

    return Training(components={"model": model, "optimizer": optimizer}, step=step)


for _name in ("AdamWScheduleFree", "SGDScheduleFree"):
    _of("schedulefree", _name, lambda name=_name: _schedulefree(name, after_save=False))
_add(
    "schedulefree",
    "AdamWScheduleFree that evaluates after the save",
    lambda: _schedulefree("AdamWScheduleFree", after_save=True),
)


def _heavyball(name: str) -> Training:
    import heavyball

    heavyball.utils.compile_mode = None
    _uncompiled()
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    kind = getattr(heavyball, name)
    return trained(model, kind(model.parameters(), lr=1e-2), data=lambda: batch(8))


for _name in (
    *("SOAP", "AdamW", "Muon", "PSGDKron", "ADOPT", "SFAdamW", "KLShampoo", "MuonAdamW"),
):
    _of(
        "heavyball",
        _name,
        _heavyball,
        _name,
        control=Result.DIFFERS,
        keepstep=Result.AS_CONTROL,
        reason="a step count that group and state share is two after `load_state_dict`, alike",
    )


def _galore(name: str, **options: Any) -> Training:
    import galore_torch

    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))
    low = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    groups = [
        {"params": rest},
        {"params": low, "rank": 4, "update_proj_gap": 3, "scale": 0.25, "proj_type": "std"},
    ]
    optimizer = getattr(galore_torch, name)(groups, lr=1e-2, **options)
    return trained(model, optimizer, data=lambda: batch(16))


_add(
    "galore-torch",
    "GaLoreAdamW",
    _galore,
    "GaLoreAdamW",
    keepstep=Result.REFUSED_AT_FIRST_SAVE,
    message="GaLoreProjector",
    reason="an object that is no data is kept with `trusted=True` only; the first save says so",
)


def _trusted(make: Callable[..., Training], *given: Any) -> Training:
    training = make(*given)
    training.options = {"trusted": True}
    return training


_of("galore-torch", "GaLoreAdamW, with trusted=True", _trusted, _galore, "GaLoreAdamW")


def _of_many(name: str) -> Training:
    import pytorch_optimizer

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = pytorch_optimizer.load_optimizer(name)(model.parameters(), lr=1e-2)
    return trained(model, optimizer, data=lambda: batch(8))


for _name in (
    *("lion", "adabelief", "prodigy", "adan", "lamb", "stablespam", "soap", "shampoo"),
    *("came", "aggmo", "ademamix", "mars", "tiger", "adopt", "kron"),
):
    _of("pytorch_optimizer", _name, _of_many, _name)


def _groups(name: str, *, of_matrices: dict[str, Any], of_rest: dict[str, Any]) -> Training:
    import pytorch_optimizer

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    kinds = {True: of_matrices, False: of_rest}
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() == 2) is matrix], **options}
        for matrix, options in kinds.items()
    ]
    optimizer = pytorch_optimizer.load_optimizer(name)(groups, lr=1e-2)
    return trained(model, optimizer, data=lambda: batch(8))


for _name in ("muon", "adamuon"):
    _of(
        "pytorch_optimizer",
        _name,
        functools.partial(
            _groups, _name, of_matrices={"use_muon": True}, of_rest={"use_muon": False}
        ),
    )
_low_rank = {"rank": 4, "update_proj_gap": 3, "scale": 0.25, "projection_type": "std"}
_low = functools.partial(_groups, of_matrices=_low_rank, of_rest={})
for _name, _make in {
    **{name: functools.partial(_low, name) for name in ("galore", "fira", "apollo")},
    "scalableshampoo": functools.partial(_of_many, "scalableshampoo"),
}.items():
    _of("pytorch_optimizer", f"{_name}, with trusted=True", _trusted, _make)


def _wrapped(name: str) -> Training:
    import pytorch_optimizer

    model = net()
    optimizer = getattr(pytorch_optimizer, name)(optim.AdamW(model.parameters(), lr=1e-2))
    if name == "ScheduleFreeWrapper":
        optimizer.train()
    return trained(model, optimizer)


for _name in ("Lookahead", "ScheduleFreeWrapper", "TRAC"):
    _add("pytorch_optimizer", f"{_name} around AdamW", _wrapped, _name)


# --- metrics, averages, layers ------------------------------------------------------------------


def _metric(make: Callable[[Any], nn.Module], *, persistent: bool = True) -> Training:
    import torchmetrics

    model = nn.ModuleDict({"net": nn.Linear(6, 2), "metric": make(torchmetrics)})
    for metric in [module for module in model.modules() if isinstance(module, torchmetrics.Metric)]:
        metric.persistent(persistent)

    def loss(m: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
        y = (x[:, 0] > 1).long()
        out = m["net"](x)
        m["metric"].update(out.detach().softmax(1)[:, 1], y)
        return nn.functional.cross_entropy(out, y)

    return trained(model, loss=loss, after=lambda step: model["metric"].compute())


_METRICS: dict[str, Callable[[Any], nn.Module]] = {
    "Accuracy, whose state is sums": lambda m: m.Accuracy(task="binary"),
    "AUROC, whose state is lists that grow": lambda m: m.AUROC(task="binary"),
    "AUROC by thresholds": lambda m: m.AUROC(task="binary", thresholds=5),
    "ConfusionMatrix": lambda m: m.ConfusionMatrix(task="binary"),
    "MetricCollection": lambda m: m.MetricCollection(
        [m.Accuracy(task="binary"), m.F1Score(task="binary"), m.AUROC(task="binary")]
    ),
}
for _name, _make in _METRICS.items():
    _add("torchmetrics", _name, _metric, _make)
_add(
    "torchmetrics",
    "MeanMetric whose state is not persistent",
    lambda: _metric(lambda m: m.Accuracy(task="binary"), persistent=False),
    control=Result.DIFFERS,
    keepstep=Result.AS_CONTROL,
    reason="it is in no state_dict(): call `metric.persistent(True)`",
)


def _ema(name: str, **options: Any) -> Training:
    import ema_pytorch

    model = net()
    ema = getattr(ema_pytorch, name)(model, **options)
    return trained(model, also={"ema": ema}, after=lambda step: ema.update())


_add(
    "ema-pytorch",
    "EMA that begins after three steps",
    lambda: _ema("EMA", beta=0.9, update_after_step=3, update_every=2, include_online_model=False),
)
_add("ema-pytorch", "EMA that holds the model, too", lambda: _ema("EMA", beta=0.9, update_every=1))


def _codes(**options: Any) -> Training:
    from vector_quantize_pytorch import VectorQuantize

    model = nn.ModuleDict(
        {
            "enc": nn.Linear(8, 8),
            "vq": VectorQuantize(dim=8, codebook_size=8, decay=0.8, **options),
            "dec": nn.Linear(8, 8),
        }
    )
    return trained(model, loss=_through_codes, data=lambda: torch.randn(2, 8, 8))


def _through_codes(model: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    quantized, _, extra = model["vq"](model["enc"](x))
    return (model["dec"](quantized) - x).square().mean() + extra.sum()


_add(
    "vector-quantize-pytorch",
    "VectorQuantize by k-means at the first batch",
    lambda: _codes(kmeans_init=True, threshold_ema_dead_code=1),
)
_add("vector-quantize-pytorch", "VectorQuantize by averages", _codes)


@functools.partial(_add, "vector-quantize-pytorch", "ResidualVQ")
def _() -> Training:
    from vector_quantize_pytorch import ResidualVQ

    parts = {"enc": nn.Linear(8, 8), "vq": ResidualVQ(dim=8, codebook_size=8, num_quantizers=2)}
    model = nn.ModuleDict({**parts, "dec": nn.Linear(8, 8)})
    return trained(model, loss=_through_codes, data=lambda: torch.randn(2, 8, 8))


def _peft(config: Callable[[Any], Any]) -> Training:
    import peft

    with torch.random.fork_rng():
        torch.manual_seed(1)
        base = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    model = peft.get_peft_model(base, config(peft))
    return trained(model)


_CONFIGS: dict[str, Callable[[Any], Any]] = {
    "LoRA": lambda p: p.LoraConfig(r=2, target_modules=["0", "2"], lora_dropout=0.1),
    "DoRA": lambda p: p.LoraConfig(r=2, target_modules=["0", "2"], use_dora=True),
    "LoRA with modules_to_save": lambda p: p.LoraConfig(
        r=2, target_modules=["0"], modules_to_save=["2"]
    ),
    "LoHa": lambda p: p.LoHaConfig(r=2, target_modules=["0", "2"]),
    "IA3": lambda p: p.IA3Config(target_modules=["0", "2"], feedforward_modules=["2"]),
    "VeRA": lambda p: p.VeraConfig(r=2, target_modules=["0", "2"]),
    "OFT": lambda p: p.BOFTConfig(boft_block_size=2, target_modules=["0"]),
}
for _name, _config in _CONFIGS.items():
    _add("peft", _name, _peft, _config)


# --- torchdata ----------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.tensor([float(at), 1.0])


def _loop(model: nn.Module, loader: Any, *, epochs: int, **more: Any) -> Training:
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    progress = {"epoch": 0}
    later = more.get("rng_later", False)

    def loop(life: Life) -> Iterator[Any]:
        while progress["epoch"] < epochs:
            for x in loader:
                if life.checkpointer is not None and later:
                    life.checkpointer.restore_rng()
                x = torch.as_tensor(x, dtype=torch.float32).reshape(-1, 2)
                loss = loss_of(model, x)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                yield [x, loss.item()]
            progress["epoch"] += 1

    components = {
        "model": model,
        "optimizer": optimizer,
        "loader": loader,
        "progress": progress,
    }
    return Training(components=components, loop=loop, uncompared=("loader",), **more)


def _stateful(*, dropout: float, **options: Any) -> Training:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(Numbers(), batch_size=2, **options)
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(dropout), nn.Linear(4, 1))
    return _loop(model, loader, epochs=2, rng_later=True)


_DRAWS = "a new iterator draws after `load_state_dict` has set the random state"
_add(
    "torchdata",
    "StatefulDataLoader in order",
    lambda: _stateful(dropout=0.0),
    kills=(2, 8),
    control=Result.DIFFERS,
    reason=_DRAWS,
)
_add(
    "torchdata",
    "StatefulDataLoader(shuffle=True) with dropout, killed in mid-epoch",
    lambda: _stateful(dropout=0.3, shuffle=True),
    kills=(2,),
    control=Result.DIFFERS,
    reason=_DRAWS,
)
_add(
    "torchdata",
    "StatefulDataLoader with two workers",
    lambda: _stateful(dropout=0.0, shuffle=True, num_workers=2),
    kills=(2, 8),
    control=Result.DIFFERS,
    reason=_DRAWS,
)


def _nodes(make: Callable[[Any], Any]) -> Training:
    import torchdata.nodes

    loader = torchdata.nodes.Loader(make(torchdata.nodes))
    return _loop(nn.Linear(2, 1), loader, epochs=2)


_add(
    "torchdata",
    "nodes.Loader",
    _nodes,
    lambda n: n.Batcher(n.IterableWrapper(range(24)), 4),
    kills=(2, 8),
)
_add(
    "torchdata",
    "nodes.Loader of a mapper and a sampler",
    _nodes,
    lambda n: n.Batcher(
        n.Mapper(n.MapStyleWrapper({at: at for at in range(24)}, list(range(24))), float), 4
    ),
    kills=(2, 8),
)
