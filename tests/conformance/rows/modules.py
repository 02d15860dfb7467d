"""Modules that do something of their own when they are saved or loaded, and modules of torch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.ao import quantization
from torch.nn.utils import parametrizations, parametrize, prune

from tests.conformance.rows.small import batch, loss_of, net, trained
from tests.conformance.table import Result, Table, Training

TABLE = Table("Modules")


# --- hooks, and methods of the module's own -----------------------------------------------------


class Standardize(nn.Module):
    """Mirrors a buffer in a Python number, which decides; `hook` renews the mirror at loading."""

    def __init__(self, hook: str, *, extra: bool = False) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self._seen, self._extra = 0, extra
        if hook == "post":
            self.register_load_state_dict_post_hook(lambda module, keys: module.renew())
        if hook == "pre":
            self.register_load_state_dict_pre_hook(self._before)

    @staticmethod
    def _before(module: Standardize, state: dict[str, Any], prefix: str, *_: Any) -> None:
        module._seen = int(state[prefix + "seen"])

    def renew(self) -> None:
        self._seen = int(self.seen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._seen < 4:
            self._seen += 1
            self.seen.fill_(self._seen)
            self.mean.lerp_(x.detach().mean(0), 1 / self._seen)
        return x - self.mean


class StandardizeWithExtra(Standardize):
    def get_extra_state(self) -> Any:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


class StandardizeInLoadFrom(Standardize):
    def _load_from_state_dict(self, *given: Any) -> None:
        super()._load_from_state_dict(*given)
        self.renew()


class StandardizeInLoad(Standardize):
    def load_state_dict(self, *given: Any, **options: Any) -> Any:
        result = super().load_state_dict(*given, **options)
        self.renew()
        return result


def _standardized(first: nn.Module) -> Training:
    model = nn.Sequential(first, net())
    return trained(model, final=lambda: first.__dict__.get("_seen"))


TABLE.add("a load post hook on a child", lambda: _standardized(Standardize("post")))
TABLE.add("a load pre hook on a child", lambda: _standardized(Standardize("pre")))
TABLE.add(
    "a load post hook beside an extra state",
    lambda: _standardized(StandardizeWithExtra("post")),
)
TABLE.add(
    "`_load_from_state_dict` of a child", lambda: _standardized(StandardizeInLoadFrom("none"))
)


@TABLE.row(
    "`load_state_dict` of a child, which torch does not call",
    control=Result.DIFFERS,
    keepstep=Result.AS_CONTROL,
    reason="`load_state_dict` of the root calls that of no child",
)
def _() -> Training:
    return _standardized(StandardizeInLoad("none"))


class Root(nn.Module):
    """A model whose root does what `Standardize` does."""

    def __init__(self, first: Standardize) -> None:
        super().__init__()
        self.first, self.rest = first, net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rest(self.first(x))


class RootThatLoads(Root):
    def load_state_dict(self, *given: Any, **options: Any) -> Any:
        result = super().load_state_dict(*given, **options)
        self.first.renew()
        return result


class RootThatWraps(Root):
    """Its own format of a state: not the names of its parameters."""

    def state_dict(self, *given: Any, **options: Any) -> Any:
        return {"inner": dict(super().state_dict(*given, **options)), "seen": self.first._seen}

    def load_state_dict(self, state: Any, *given: Any, **options: Any) -> Any:
        self.first._seen = state["seen"]
        return super().load_state_dict(state["inner"], *given, **options)


class RootThatLeavesOut(Root):
    """Its state has no `first.mean`, which it derives again."""

    def state_dict(self, *given: Any, **options: Any) -> Any:
        state = super().state_dict(*given, **options)
        state.pop("first.mean")
        state["twice"] = self.first.mean * 2
        return state

    def load_state_dict(self, state: Any, *given: Any, **options: Any) -> Any:
        state = dict(state)
        state["first.mean"] = state.pop("twice") / 2
        result = super().load_state_dict(state, *given, **options)
        self.first.renew()
        return result


def _root(kind: type[Root]) -> Training:
    model = kind(Standardize("none"))
    return trained(model, final=lambda: model.first._seen)


TABLE.add("`load_state_dict` of the root", _root, RootThatLoads)
TABLE.add(
    "`state_dict` and `load_state_dict` of the root, nested", _root, RootThatWraps, observed=False
)
TABLE.add(
    "`state_dict` of the root, which derives a tensor", _root, RootThatLeavesOut, observed=False
)


@TABLE.row("a load post hook on the root")
def _() -> Training:
    model = Root(Standardize("none"))
    model.register_load_state_dict_post_hook(lambda module, keys: module.first.renew())
    return trained(model, final=lambda: model.first._seen)


class Packed(nn.Module):
    """One weight, whose halves are in the state."""

    def __init__(self, *, interleaved: bool, private: bool = False) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(8, 6) * 0.3)
        self.interleaved = interleaved
        if private:
            self._register_state_dict_hook(lambda *given: self._split(*given))
        else:
            self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._join)

    @staticmethod
    def _split(module: Packed, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        packed = state.pop(prefix + "gate_up")
        if module.interleaved:
            state[prefix + "gate"], state[prefix + "up"] = packed[0::2], packed[1::2]
        else:
            state[prefix + "gate"], state[prefix + "up"] = packed[:4], packed[4:]

    @staticmethod
    def _join(module: Packed, state: dict[str, Any], prefix: str, *_: Any) -> None:
        gate, up = state.pop(prefix + "gate"), state.pop(prefix + "up")
        both = torch.stack([gate, up], 1) if module.interleaved else torch.stack([gate, up])
        state[prefix + "gate_up"] = both.reshape(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (x @ self.gate_up.T).chunk(2, -1)
        return gate.sigmoid() * up


def _packed(**options: Any) -> Training:
    return trained(nn.Sequential(Packed(**options), nn.Linear(4, 2)))


TABLE.add("state_dict hooks that split a weight", lambda: _packed(interleaved=False))
TABLE.add("state_dict hooks that split a weight by rows", lambda: _packed(interleaved=True))
TABLE.add(
    "`_register_state_dict_hook`, the private one", lambda: _packed(interleaved=False, private=True)
)


@TABLE.row("a state_dict pre hook that brings buffers up to date")
def _() -> Training:
    model = nn.Sequential(nn.Linear(6, 2))
    model.register_buffer("count", torch.zeros(()))
    counted = {"steps": 0}
    model.register_state_dict_pre_hook(
        lambda module, prefix, keep: module.count.fill_(counted["steps"])
    )

    def after(step: int) -> None:
        counted["steps"] += 1

    return trained(model, after=after, also={"counted": counted})


class SavesItself(nn.Module):
    """`_save_to_state_dict` and `_load_from_state_dict` with a format of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.history = nn.Parameter(torch.ones(6)), [1.0]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        scale = self.scale if keep_vars else self.scale.detach()
        destination[prefix + "scale"] = scale
        destination[prefix + "history"] = list(self.history)

    def _load_from_state_dict(self, state: Any, prefix: str, *_: Any) -> None:
        with torch.no_grad():
            self.scale.copy_(state[prefix + "scale"])
        self.history = list(state[prefix + "history"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.history.append(x.mean().item())
        return x * self.scale * self.history[-2]


TABLE.add(
    "`_save_to_state_dict` with a list of numbers",
    lambda: trained(nn.Sequential(SavesItself(), nn.Linear(6, 2))),
)


class Extra(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.weight, self.value = nn.Parameter(torch.ones(6)), value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.value["steps"] += 1
        self.value["last"] = x.detach().mean(0)
        return x * self.weight / (1 + self.value["steps"])


TABLE.add(
    "an extra state of numbers and tensors",
    lambda: trained(nn.Sequential(Extra({"steps": 0, "by": [1, ("a", None)]}), nn.Linear(6, 2))),
)


class Tensors(Extra):
    """An extra state that is one tensor, of which the module keeps another form."""

    def get_extra_state(self) -> Any:
        return torch.tensor([self.value["steps"]])

    def set_extra_state(self, state: Any) -> None:
        self.value = {"steps": int(state.item())}


TABLE.add(
    "an extra state that is a tensor made at each call",
    lambda: trained(nn.Sequential(Tensors({"steps": 0}), nn.Linear(6, 2))),
)


class Versioned(nn.Module):
    """Reads what it was by the version in the metadata of the state."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.loaded = nn.Parameter(torch.ones(6)), None

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.loaded = dict(metadata)
        if metadata.get("version") is None:  # as BatchNorm of old: another meaning of the weights
            state[prefix + "weight"] = state[prefix + "weight"] * 100
        super()._load_from_state_dict(state, prefix, metadata, *rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


TABLE.add(
    "`_version`, which the metadata of the state brings to the loader",
    lambda: trained(nn.Sequential(Versioned(), nn.Linear(6, 2))),
)


@TABLE.row("metadata that a hook adds to the state")
def _() -> Training:
    model = nn.Sequential(nn.Linear(6, 2))
    seen = {"notes": 0}

    def add(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        metadata["note"] = seen["notes"]

    def take(module: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any) -> None:
        seen["notes"] = metadata.get("note", -1)

    model[0].register_state_dict_post_hook(add)
    model[0].register_load_state_dict_pre_hook(take)

    def after(step: int) -> None:
        seen["notes"] += 1

    return trained(model, after=after, final=lambda: seen["notes"])


class ActNorm(nn.Module):
    """Initializes itself by its first batch, but not after it was loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.scale = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.ones(6))
        self.initialized = False

    def _load_from_state_dict(self, *given: Any) -> None:
        super()._load_from_state_dict(*given)
        self.initialized = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.initialized:
            with torch.no_grad():
                self.bias.copy_(-x.mean(0))
                self.scale.copy_(1 / (x.std(0) + 1e-6))
            self.initialized = True
        return (x + self.bias) * self.scale


TABLE.add(
    "ActNorm, which initializes itself by its first batch",
    lambda: trained(nn.Sequential(ActNorm(), nn.Linear(6, 2))),
)


class Codebook(nn.Module):
    """Norms of the codes are derived, and no part of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(16, 6))
        self.head = nn.Linear(6, 2)
        self.rebuild()

    def rebuild(self) -> None:
        self.squares = self.codes.square().sum(1)

    def load_state_dict(self, *given: Any, **options: Any) -> Any:
        result = super().load_state_dict(*given, **options)
        self.rebuild()
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near = (self.squares - 2 * x @ self.codes.T).argmin(1)
        return self.head(x + 0.1 * self.codes[near])


@TABLE.row("a table that `load_state_dict` of the root derives from a buffer")
def _() -> Training:
    model = Codebook()

    def after(step: int) -> None:
        if step == 1:
            model.codes.copy_(torch.randn(16, 6))
            model.rebuild()

    return trained(model, after=after, final=lambda: model.squares)


class AssignsOnLoad(nn.Module):
    """Replaces its parameter at loading, as some libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 6))

    def _load_from_state_dict(self, state: Any, prefix: str, *_: Any) -> None:
        self.weight.data = state[prefix + "weight"].clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


TABLE.add("`_load_from_state_dict` that replaces `weight.data`", lambda: trained(AssignsOnLoad()))


class Renamed(nn.Module):
    """Its state has an old name, which a load pre hook maps to the new one."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Linear(6, 2)
        self.register_state_dict_post_hook(self._old)
        self.register_load_state_dict_pre_hook(self._to_new)

    @staticmethod
    def _old(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        for key in [key for key in state if key.startswith(prefix + "new.")]:
            state[key.replace("new.", "old.")] = state.pop(key)

    @staticmethod
    def _to_new(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        for key in [key for key in state if key.startswith(prefix + "old.")]:
            state[key.replace("old.", "new.")] = state.pop(key)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.new(x)


TABLE.add("hooks that save a layer under another name", lambda: trained(Renamed()))


class CountsLoads(nn.Module):
    """Counts how often it was loaded: once for a restore, as by `load_state_dict`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.loads = nn.Linear(6, 2), 0
        self.register_buffer("seed", torch.zeros(()))
        self.register_load_state_dict_post_hook(self._count)

    @staticmethod
    def _count(module: CountsLoads, keys: Any) -> None:
        module.loads += 1
        module.seed += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (1 + self.seed)


TABLE.add(
    "a load hook that changes the weights, so that a second load would show",
    lambda: trained(CountsLoads()),
    control=Result.DIFFERS,
    keepstep=Result.AS_CONTROL,
    reason="the hook counts loads, of which an undisturbed run has none",
)


# --- kinds of tensors ---------------------------------------------------------------------------


@TABLE.row("tied weights")
def _() -> Training:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(x))

    return trained(Tied(), data=lambda: torch.randint(0, 8, (5,)))


@TABLE.row("one layer under two names")
def _() -> Training:
    layer = nn.Linear(6, 6)
    return trained(nn.ModuleDict({"a": layer, "b": layer, "c": nn.Linear(6, 2)}), loss=_through)


def _through(model: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
    for layer in model.values():
        x = layer(x)
    return (x - 1).square().mean()


@TABLE.row("one model in two components")
def _() -> Training:
    model = net()
    return trained(model, also={"first": model[0], "same": model})


@TABLE.row("parameters that are views of one flat buffer")
def _() -> Training:
    model, flat = nn.Linear(6, 2), torch.randn(14) * 0.3
    model.weight = nn.Parameter(flat[:12].view(2, 6))
    model.bias = nn.Parameter(flat[12:])
    return trained(model, final=lambda: flat)


@TABLE.row("a buffer that is a view of a parameter of another layer")
def _() -> Training:
    model = nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.Linear(6, 2)})
    model["b"].register_buffer("above", model["a"].weight.detach()[:2])
    return trained(model, loss=_through)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([torch.randn(6), torch.randn(6)])
        self.named = nn.ParameterDict({"x": torch.randn(6), "w@rank-00000": torch.randn(6)})
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for each in [*self.several, *self.named.values()]:
            x = x + each
        return self.layers[1](self.layers[0](x))


TABLE.add("ParameterList, ParameterDict, ModuleList", lambda: trained(Lists()))


@TABLE.row("parameters named `w`, `w@rank-00000` and `w@rank-00001`")
def _() -> Training:
    names = ("w", "w@rank-00000", "w@rank-00001")
    model = nn.ParameterDict({name: torch.full((2,), 6.0 + at) for at, name in enumerate(names)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return trained(
        model,
        optimizer,
        loss=lambda m, x: sum((k + 1) * p.square().sum() for k, p in enumerate(m.values())),
    )


@TABLE.row("frozen layers beside trained ones")
def _() -> Training:
    model = net()
    model[0].requires_grad_(False)
    return trained(model)


@TABLE.row("convolutions in channels_last with BatchNorm")
def _() -> Training:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    model = model.to(memory_format=torch.channels_last)
    return trained(model, data=lambda: torch.randn(3, 2, 5, 5))


@TABLE.row("a transposed weight, and one that is a slice of a larger one")
def _() -> Training:
    model, wide = nn.Linear(6, 2), torch.randn(4, 9)
    model.weight = nn.Parameter(wide[:2, :6])
    model.other = nn.Parameter(torch.randn(6, 2).t())
    return trained(model, loss=lambda m, x: loss_of(m, x) + (x @ m.other.T).square().mean())


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.register_buffer("nothing", torch.empty(0, 5))
        self.register_buffer("scalar", torch.tensor(7, dtype=torch.uint64))
        self.register_buffer("eight", torch.randn(9).to(torch.float8_e4m3fn))
        self.register_buffer("five", torch.randn(9).to(torch.float8_e5m2))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("small", torch.randn(3, dtype=torch.float16))
        self.register_buffer("none", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.complex.abs().sum()


TABLE.add("complex, float8, unsigned, boolean and empty tensors", lambda: trained(Odd()))


@TABLE.row("a float8 parameter that is not trained")
def _() -> Training:
    model = nn.Linear(6, 2)
    model.scale = nn.Parameter(torch.randn(4).to(torch.float8_e4m3fn), requires_grad=False)
    return trained(model)


class Grows(nn.Module):
    """Buffers that get their content, or their shape, from batches."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layer = how, nn.Linear(6, 2)
        if how in ("none", "none and loads itself"):
            self.register_buffer("mean", None)
        if how in ("resized", "resized and loads itself"):
            self.register_buffer("mean", torch.zeros(0))
        if how == "not persistent":
            self.register_buffer("mean", torch.zeros(6), persistent=False)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if self.how.endswith("loads itself") and prefix + "mean" in state:
            self.mean = torch.empty_like(state[prefix + "mean"])
        super()._load_from_state_dict(state, prefix, *rest)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how.startswith("new") and not hasattr(self, "mean"):
            self.register_buffer("mean", x.detach().mean(0))
        if self.mean is None or not self.mean.numel():
            self.mean = x.detach().mean(0)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.layer(x - self.mean)


_APPEARS = "a restart needs the same shapes: `latest_step()` says before `restore()` what is needed"
TABLE.add(
    "a buffer that is None until the first batch",
    lambda: trained(Grows("none")),
    control=Result.RAISES,
    keepstep=Result.NAMED_AT_SAVE,
    message="mean",
    reason=_APPEARS,
)
TABLE.add(
    "a buffer that is registered by the first batch",
    lambda: trained(Grows("new")),
    control=Result.RAISES,
    keepstep=Result.NAMED_AT_SAVE,
    message="mean",
    reason=_APPEARS,
)
TABLE.add(
    "a buffer that gets its shape by the first batch",
    lambda: trained(Grows("resized")),
    control=Result.RAISES,
    keepstep=Result.NAMED_AT_SAVE,
    message="mean",
    reason=_APPEARS,
)
TABLE.add(
    "a buffer that is None at first, in a module that loads itself",
    lambda: trained(Grows("none and loads itself")),
)
TABLE.add(
    "a buffer that gets its shape later, in a module that loads itself",
    lambda: trained(Grows("resized and loads itself")),
)
TABLE.add(
    "a buffer with persistent=False that changes",
    lambda: trained(Grows("not persistent"), final=lambda: None),
    control=Result.DIFFERS,
    keepstep=Result.AS_CONTROL,
    reason="it is in no state_dict()",
)


@TABLE.row("an embedding with max_norm, whose forward pass changes its weights")
def _() -> Training:
    model = nn.Sequential(nn.Embedding(8, 6, max_norm=1.0), net())
    return trained(model, data=lambda: torch.randint(0, 8, (5,)))


@TABLE.row("a buffer whose elements overlap (Tensor.unfold)")
def _() -> Training:
    model = nn.Linear(4, 2)
    series = torch.randn(9)
    model.register_buffer("windows", series.unfold(0, 4, 1))
    return trained(model, loss=lambda m, x: loss_of(m, m.windows) + x.mean())


@TABLE.row(
    "an expanded buffer",
    control=Result.RAISES,
    keepstep=Result.REFUSED_AT_START,
    message="wide",
    reason="its elements share memory, so nothing can be copied into it: `.clone()` it",
)
def _() -> Training:
    model = nn.Linear(6, 2)
    model.register_buffer("wide", torch.randn(3, 1).expand(3, 4))
    return trained(model)


@TABLE.row("a parameter that the loop replaces at step 3 by another one of its shape")
def _() -> Training:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def after(step: int) -> None:
        if step == 3:
            new = nn.Parameter(torch.randn_like(model[0].weight) * 0.1)
            optimizer.state[new] = optimizer.state.pop(model[0].weight)
            optimizer.param_groups[0]["params"][0] = model[0].weight = new

    return trained(model, optimizer, after=after)


@TABLE.row("weights whose `.data` the loop swaps out and back")
def _() -> Training:
    model = net()
    average = {name: p.detach().clone() for name, p in model.named_parameters()}

    def after(step: int) -> Any:
        for name, p in model.named_parameters():
            average[name].lerp_(p.detach(), 0.1)
            p.data, average[name] = average[name], p.data
        seen = model(torch.ones(1, 6)).sum().item()
        for name, p in model.named_parameters():
            p.data, average[name] = average[name], p.data
        return seen

    return trained(model, after=after, also={"average": average})


_NOT_IN_STATE = "it is in no state_dict(), so the script must set it"
TABLE.add(
    "layers that are unfrozen at step 3 by requires_grad alone",
    lambda: _flagged(lambda model: model[0].requires_grad_(True)),
    control=Result.DIFFERS,
    keepstep=Result.AS_CONTROL,
    reason=_NOT_IN_STATE,
)
TABLE.add(
    "a model that the loop puts into evaluation at step 3",
    lambda: _flagged(lambda model: model.eval()),
    control=Result.DIFFERS,
    keepstep=Result.AS_CONTROL,
    reason=_NOT_IN_STATE,
)
TABLE.add(
    "weights that the loop casts to bfloat16 at step 3",
    lambda: _flagged(lambda model: model.bfloat16()),
    control=Result.DIFFERS,
    keepstep=Result.NAMED_AT_SAVE,
    message="0.weight",
    reason="a restart must cast before the restore; with `torch.save` it trains on in float32",
)


def _flagged(change: Callable[[nn.Module], Any]) -> Training:
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def after(step: int) -> None:
        if step == 3:
            change(model)

    return trained(
        model,
        optimizer,
        after=after,
        loss=lambda m, x: loss_of(m, x.to(m[0].weight.dtype)),
    )


# --- modules of torch ---------------------------------------------------------------------------


def _wrapped(wrap: Callable[[nn.Module], nn.Module]) -> Training:
    return trained(nn.Sequential(wrap(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 2)))


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu()


def _symmetric(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Symmetric())


def _spectral_norm(layer: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        return nn.utils.spectral_norm(layer)


_WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm": parametrizations.weight_norm,
    "weight_norm, the old one": nn.utils.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "spectral_norm, the old one": _spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "a parametrization of the script": _symmetric,
    "pruning from the start": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "pruning at random, twice": lambda layer: prune.random_unstructured(
        prune.ln_structured(layer, "weight", 0.3, n=2, dim=0), "weight", 0.3
    ),
}
for _name, _wrap in _WRAPS.items():
    TABLE.add(_name, _wrapped, _wrap)


def _changes(change: Callable[[nn.Sequential, torch.optim.Optimizer], Any], *, ready: bool) -> Any:
    """Changes the model at step 3; `ready`: also before the restore of a later step."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(number: int) -> float:
        if number == 3:
            change(model, optimizer)
        loss = loss_of(model, batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def prepare(newest: int | None) -> None:
        if ready and newest is not None and newest >= 3:
            change(model, optimizer)

    return Training(components={"model": model, "optimizer": optimizer}, step=step, prepare=prepare)


def _append(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model.append(nn.Linear(6, 2))
    optimizer.add_param_group({"params": list(model[-1].parameters()), "lr": 0.05})


def _halve(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    prune.l1_unstructured(model[0], "weight", 0.5)


def _spectral(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    parametrizations.spectral_norm(model[0])


_CHANGES = {
    "a layer and a group that are added": _append,
    "pruning that begins": _halve,
    "a parametrization that begins": _spectral,
}
for _name, _change in _CHANGES.items():
    TABLE.add(
        f"{_name} at step 3",
        lambda change=_change: _changes(change, ready=False),
        kills=(2, 5),
        control=Result.RAISES,
        keepstep=Result.NAMED_AT_SAVE,
        message="latest_step",
        reason=_APPEARS,
    )
    TABLE.add(
        f"{_name} at step 3, and before the restore where `latest_step()` says so",
        lambda change=_change: _changes(change, ready=True),
    )


def _unfreezes(*, ready: bool) -> Training:
    model = nn.ModuleDict({"backbone": nn.Linear(6, 6), "head": nn.Linear(6, 2)})
    model["backbone"].requires_grad_(False)
    optimizer = torch.optim.AdamW(model["head"].parameters(), lr=1e-2)

    def unfreeze() -> None:
        model["backbone"].requires_grad_(True)
        optimizer.add_param_group({"params": list(model["backbone"].parameters()), "lr": 1e-3})

    def step(number: int) -> float:
        if number == 3:
            unfreeze()
        loss = _through(model, batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def prepare(newest: int | None) -> None:
        if ready and newest is not None and newest >= 3:
            unfreeze()

    return Training(components={"model": model, "optimizer": optimizer}, step=step, prepare=prepare)


TABLE.add(
    "unfreezing at step 3",
    lambda: _unfreezes(ready=False),
    control=Result.RAISES,
    keepstep=Result.NAMED_AT_SAVE,
    message="latest_step",
    reason=_APPEARS,
)
TABLE.add(
    "unfreezing at step 3, and before the restore where `latest_step()` says so",
    lambda: _unfreezes(ready=True),
)


@TABLE.row("lazy layers that have seen a batch before the restore")
def _() -> Training:
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyBatchNorm1d(), nn.LazyLinear(2))
    model(batch())
    return trained(model)


@TABLE.row(
    "lazy layers that have seen no batch",
    keepstep=Result.REFUSED_AT_START,
    control=Result.EQUAL,
    message="batch",
    reason="they have no tensors yet: pass one batch through them before the restore",
)
def _() -> Training:
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(2))
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.01))


def _recurrent(kind: type[nn.Module]) -> Training:
    model = nn.ModuleDict({"rnn": kind(6, 4, num_layers=2, dropout=0.1), "head": nn.Linear(4, 2)})
    model["rnn"].flatten_parameters()
    return trained(
        model,
        data=lambda: torch.randn(3, 2, 6),
        loss=lambda m, x: (m["head"](m["rnn"](x)[0]) - 1).square().mean(),
    )


for _kind in (nn.RNN, nn.GRU, nn.LSTM):
    TABLE.add(f"{_kind.__name__} with flattened weights", _recurrent, _kind)


_LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), batch),
    "BatchNorm1d(momentum=None)": (lambda: nn.BatchNorm1d(6, momentum=None), batch),
    "InstanceNorm1d(track_running_stats=True)": (
        lambda: nn.InstanceNorm1d(6, affine=True, track_running_stats=True),
        lambda: torch.randn(2, 6, 3),
    ),
    "LayerNorm, GroupNorm and RMSNorm": (
        lambda: nn.Sequential(nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.RMSNorm(6)),
        batch,
    ),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(6, 2, 8, batch_first=True),
        lambda: torch.randn(2, 3, 6),
    ),
    "RReLU, AlphaDropout and FeatureAlphaDropout": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.RReLU(), nn.AlphaDropout(0.2)),
        batch,
    ),
}
for _name, (_make, _data) in _LAYERS.items():
    TABLE.add(_name, lambda make=_make, data=_data: trained(make_trained(make), data=data))


def make_trained(make: Callable[[], nn.Module]) -> nn.Module:
    model = make()
    model.register_parameter("gain", nn.Parameter(torch.ones(())))
    model.register_forward_hook(lambda module, given, result: result * module.gain)
    return model


@TABLE.row("stochastic depth by Python's random numbers")
def _() -> Training:
    class Deep(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self[0](x)
            for layer in self[1:]:
                x = x + layer(x) if random.random() < 0.7 else x
            return x

    return trained(Deep([nn.Linear(6, 6) for _ in range(4)]))


# --- quantization of torch.ao -------------------------------------------------------------------


def _qat(scheme: str) -> Training:
    model = nn.Sequential(
        quantization.QuantStub(), nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)
    ).train()
    model.qconfig = quantization.get_default_qat_qconfig(scheme)
    quantization.prepare_qat(model, inplace=True)
    return trained(model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))


for _scheme in ("fbgemm", "qnnpack", "x86"):
    TABLE.add(f"QAT of torch.ao for {_scheme}", _qat, _scheme)


def _observed(observer: Callable[[], nn.Module]) -> Training:
    model = nn.ModuleDict({"watch": observer(), "net": net()})

    def loss(m: nn.ModuleDict, x: torch.Tensor) -> torch.Tensor:
        m["watch"](x.detach())
        return loss_of(m["net"], x)

    return trained(model, loss=loss)


for _observer in (
    quantization.MinMaxObserver,
    quantization.MovingAverageMinMaxObserver,
    quantization.PerChannelMinMaxObserver,
    quantization.MovingAveragePerChannelMinMaxObserver,
    quantization.HistogramObserver,
    quantization.FakeQuantize,
):
    TABLE.add(f"{_observer.__name__} of torch.ao", _observed, _observer)


# --- wrappers -----------------------------------------------------------------------------------


@TABLE.row("torch.compile(model, backend='eager')")
def _() -> Training:
    model = torch.compile(net(), backend="eager")
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.01))


@TABLE.row("DataParallel around a model")
def _() -> Training:
    return trained(nn.DataParallel(net()))


@TABLE.row("a copy of the weights that follows slowly (a target network)")
def _() -> Training:
    model = net()
    target = copy.deepcopy(model).requires_grad_(False)

    def after(step: int) -> Any:
        with torch.no_grad():
            for old, new in zip(target.parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.1)
        return target(torch.ones(1, 6))

    return trained(model, after=after, also={"target": target})


@TABLE.row("a target network that takes all weights at every third step")
def _() -> Training:
    model = net()
    target = copy.deepcopy(model).requires_grad_(False)

    def after(step: int) -> None:
        if step % 3 == 2:
            target.load_state_dict(model.state_dict())

    return trained(model, after=after, also={"target": target})
