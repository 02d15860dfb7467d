"""Optimizers with a state of their own kind; objects with state_dict() and load_state_dict()."""

from __future__ import annotations

import collections
import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn, optim

from tests.conformance.rows.small import batch, loss_of, net, trained
from tests.conformance.table import Result, Table, Training

TABLE = Table("Optimizers and objects of scripts")


class Simple(optim.Optimizer):
    """SGD whose state for each parameter is made by `begin` and used by `direction`."""

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, **options})

    def begin(self, p: torch.Tensor) -> dict[Any, Any]:
        return {}

    def direction(self, p: torch.Tensor, state: dict[Any, Any], group: dict[str, Any]) -> Any:
        return p.grad

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(self.begin(p))
                p.sub_(self.direction(p, state, group), alpha=group["lr"])


def _with(kind: Callable[..., Any], **options: Any) -> Training:
    model = net()
    return trained(model, kind(model.parameters(), **options))


# --- hooks and further keys ---------------------------------------------------------------------


def _chance(model: nn.Module) -> optim.Optimizer:
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer.chance = random.Random(5)

    def put(generator: Any, state: dict[str, Any]) -> None:
        state["chance"] = list(generator.chance.getstate()[1])

    def take(generator: Any, state: dict[str, Any]) -> None:
        generator.chance.setstate((3, tuple(state.pop("chance")), None))

    optimizer.register_state_dict_post_hook(put)
    optimizer.register_load_state_dict_pre_hook(take)
    return optimizer


def _sometimes(model: nn.Module, optimizer: Any) -> Training:
    def step(number: int) -> float:
        loss = loss_of(model, batch())
        optimizer.zero_grad()
        loss.backward()
        if optimizer.chance.random() < 0.6:
            optimizer.step()
        return loss.item()

    return Training(components={"model": model, "optimizer": optimizer}, step=step)


@TABLE.row("an optimizer whose hooks put a key into state_dict() and take it out")
def _() -> Training:
    model = net()
    return _sometimes(model, _chance(model))


@TABLE.row("an optimizer whose load post hook derives something")
def _() -> Training:
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer.rates = [0.05]

    def derive(value: Any) -> None:
        value.rates = [group["lr"] for group in value.param_groups]

    optimizer.register_load_state_dict_post_hook(derive)

    def after(step: int) -> Any:
        optimizer.rates = [optimizer.rates[0] * 0.9]
        optimizer.param_groups[0]["lr"] = optimizer.rates[0]
        return list(optimizer.rates)

    return trained(model, optimizer, after=after)


@TABLE.row("an optimizer whose state_dict pre hook brings its groups up to date")
def _() -> Training:
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    count = {"n": 0}
    optimizer.register_state_dict_pre_hook(
        lambda optimizer: optimizer.param_groups[0].update(counted=count["n"])
    )

    def after(step: int) -> None:
        count["n"] += 1

    return trained(model, optimizer, after=after, also={"count": count})


class Keyed(optim.SGD):
    """Further keys in its state: numbers, tensors, nested ones."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.count, self.scale = 0, torch.ones(3)

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        self.scale.mul_(0.9)
        for group in self.param_groups:
            group["lr"] = 0.05 * float(self.scale[0])
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        own = {"count": self.count, "deep": {"scale": self.scale, "at": [(self.count, "a")]}}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.scale = state["deep"]["scale"].clone()
        super().load_state_dict(state)


TABLE.add("an optimizer with further keys in state_dict()", lambda: _with(Keyed, lr=0.05))


class Strict(Keyed):
    """Refuses a state with other keys than its own."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {"state", "param_groups", "count", "deep"}:
            raise KeyError(f"the keys are {sorted(state)}")
        super().load_state_dict(state)


TABLE.add("an optimizer that refuses a state without these keys", lambda: _with(Strict, lr=0.05))


class Another(optim.SGD):
    """A state_dict of another form altogether."""

    def state_dict(self) -> dict[str, Any]:
        buffers = [
            self.state[p].get("momentum_buffer") for g in self.param_groups for p in g["params"]
        ]
        return {"buffers": buffers, "lr": self.param_groups[0]["lr"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        for p, buffer in zip(parameters, state["buffers"], strict=True):
            if buffer is not None:
                self.state[p]["momentum_buffer"] = buffer.clone()
        self.param_groups[0]["lr"] = state["lr"]


TABLE.add(
    "an optimizer whose state_dict() has another form",
    lambda: _with(Another, lr=0.05, momentum=0.9),
)


# --- keys and values of the state ---------------------------------------------------------------


class AggMo(Simple):
    def begin(self, p: torch.Tensor) -> dict[Any, Any]:
        return {"buffers": {beta: torch.zeros_like(p) for beta in (0.0, 0.9, 0.99)}}

    def direction(self, p: torch.Tensor, state: dict[Any, Any], group: dict[str, Any]) -> Any:
        for beta, buffer in state["buffers"].items():
            buffer.mul_(beta).add_(p.grad)
        return sum(state["buffers"].values()) / 3


class KeyedByAll(Simple):
    def begin(self, p: torch.Tensor) -> dict[Any, Any]:
        keys = [(0, "a"), None, True, 2.5, 7, "x.y", "", frozenset({1})]
        return {key: torch.zeros_like(p) for key in keys}

    def direction(self, p: torch.Tensor, state: dict[Any, Any], group: dict[str, Any]) -> Any:
        for key in state:
            state[key] = state[key] * 0.5 + p.grad
        return sum(state.values()) / len(state)


class Nested(Simple):
    def begin(self, p: torch.Tensor) -> dict[Any, Any]:
        return {
            "deep": [{"m": torch.zeros_like(p)}, (torch.zeros(()), [torch.zeros_like(p).double()])],
            "flags": {"warm": True, "by": "nested"},
        }

    def direction(self, p: torch.Tensor, state: dict[Any, Any], group: dict[str, Any]) -> Any:
        m, (count, [twice]) = state["deep"][0]["m"], state["deep"][1]
        count.add_(1)
        twice.add_(p.grad.double())
        return m.mul_(0.9).add_(p.grad) + (twice / count).float()


class OtherTypes(Simple):
    """State in other dtypes and shapes than the parameter's."""

    def begin(self, p: torch.Tensor) -> dict[Any, Any]:
        return {
            "half": torch.zeros_like(p, dtype=torch.bfloat16),
            "rows": torch.zeros(p.shape[0], dtype=torch.float64),
            "signs": torch.zeros(p.shape, dtype=torch.int8),
            "steps": 0,
            "norms": [],
        }

    def direction(self, p: torch.Tensor, state: dict[Any, Any], group: dict[str, Any]) -> Any:
        state["half"].mul_(0.9).add_(p.grad)
        state["rows"].add_(p.grad.reshape(p.shape[0], -1).sum(1))
        state["signs"].copy_(p.grad.sign())
        state["steps"] += 1
        state["norms"].append(p.grad.norm().item())
        return state["half"].float() + state["signs"] * 0.01 / state["steps"]


class Replaces(Simple):
    """New tensors at each step, and a list of them that grows to three."""

    def begin(self, p: torch.Tensor) -> dict[Any, Any]:
        return {"last": [], "mean": p.grad.clone()}

    def direction(self, p: torch.Tensor, state: dict[Any, Any], group: dict[str, Any]) -> Any:
        state["last"] = [*state["last"], p.grad.clone()][-3:]
        state["mean"] = sum(state["last"]) / len(state["last"])
        return state["mean"]


class Draws(Simple):
    """A generator in each group, from which noise is drawn."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, generator=torch.Generator().manual_seed(7))

    def direction(self, p: torch.Tensor, state: dict[Any, Any], group: dict[str, Any]) -> Any:
        return p.grad + 0.1 * torch.randn(p.shape, generator=group["generator"])


class Projector:
    """Plain data in an object, as GaLore has it."""

    def __init__(self, rank: int) -> None:
        self.rank, self.matrix, self.count = rank, None, 0

    def down(self, grad: torch.Tensor) -> torch.Tensor:
        if self.matrix is None or self.count % 3 == 0:
            self.matrix = torch.linalg.svd(grad, full_matrices=False)[0][:, : self.rank]
        self.count += 1
        return self.matrix.T @ grad


class Galore(Simple):
    def begin(self, p: torch.Tensor) -> dict[Any, Any]:
        return {"projector": Projector(2)} if p.dim() == 2 else {}

    def direction(self, p: torch.Tensor, state: dict[Any, Any], group: dict[str, Any]) -> Any:
        if "projector" not in state:
            return p.grad
        small = state["projector"].down(p.grad)
        state["m"] = small if "m" not in state else state["m"].lerp(small, 0.1)
        return state["projector"].matrix @ state["m"]


class Shares(Simple):
    """One tensor in the state of all parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.common = torch.zeros(())

    def begin(self, p: torch.Tensor) -> dict[Any, Any]:
        first = next(iter(self.state.values()))
        return {"common": first.get("common", self.common)}

    def direction(self, p: torch.Tensor, state: dict[Any, Any], group: dict[str, Any]) -> Any:
        state["common"].add_(1)
        return p.grad / state["common"]


class UnderNames(Simple):
    """State under keys that are no parameters."""

    def direction(self, p: torch.Tensor, state: dict[Any, Any], group: dict[str, Any]) -> Any:
        common = self.state["common"]
        common["steps"] = common.get("steps", 0) + 1
        common["mean"] = common.get("mean", torch.zeros(())) * 0.9 + p.grad.mean()
        return p.grad + common["mean"]


TABLE.add("AggMo: keys of the state that are floats", lambda: _with(AggMo))
TABLE.add("keys of the state that are tuples, None, booleans, sets", lambda: _with(KeyedByAll))
TABLE.add(
    "nested state",
    lambda: _with(Nested),
    control=Result.DIFFERS,
    reason="`Optimizer.load_state_dict` casts nested state, and makes generators of nested text",
)
TABLE.add(
    "state of other dtypes and shapes than the parameter",
    lambda: _with(OtherTypes),
    control=Result.DIFFERS,
    reason="`Optimizer.load_state_dict` casts floating point state to the parameter's dtype",
)
TABLE.add("state whose tensors are replaced, and lists of them", lambda: _with(Replaces))
TABLE.add(
    "state that all parameters share",
    lambda: _with(Shares),
)
TABLE.add("state under keys that are no parameters", lambda: _with(UnderNames))
TABLE.add(
    "a generator in a group",
    lambda: _with(Draws),
)
TABLE.add(
    "objects in the state (GaLore)",
    lambda: _with(Galore),
    keepstep=Result.REFUSED_AT_FIRST_SAVE,
    message="Projector",
    reason="an object that is no data is kept with `trusted=True` only; the first save says so",
)


@TABLE.row("objects in the state (GaLore), with trusted=True")
def _() -> Training:
    model = net()
    return trained(model, Galore(model.parameters()), options={"trusted": True})


@TABLE.row("values of all kinds in the groups")
def _() -> Training:
    return _with(
        Simple,
        betas=(0.9, 0.99),
        schedule={"at": [1, 2], "by": None},
        table=torch.arange(3.0),
        numbers=np.arange(3),
        mode="exact",
        seen=set(),
        big=1 << 70,
        order=collections.OrderedDict(b=1, a=2),
    )


# --- wrappers -----------------------------------------------------------------------------------


class Lookahead(optim.Optimizer):
    """Slow weights every three steps, in a state of its own beside the inner optimizer's."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self.inner, self.count = inner, 0
        self.param_groups, self.defaults = inner.param_groups, inner.defaults
        self.state = collections.defaultdict(dict)
        self._optimizer_step_pre_hooks = collections.OrderedDict()
        self._optimizer_step_post_hooks = collections.OrderedDict()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["slow"] = p.detach().clone()

    def step(self, closure: Any = None) -> Any:
        result = self.inner.step(closure)
        self.count += 1
        if self.count % 3 == 0:
            with torch.no_grad():
                for p, state in self.state.items():
                    p.copy_(state["slow"].lerp_(p, 0.5))
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        slow = [state["slow"] for state in self.state.values()]
        return {"inner": self.inner.state_dict(), "slow": slow, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.param_groups, self.count = self.inner.param_groups, state["count"]
        for own, slow in zip(self.state.values(), state["slow"], strict=True):
            own["slow"].copy_(slow)


@TABLE.row("Lookahead around Adam")
def _() -> Training:
    model = net()
    return trained(model, Lookahead(optim.Adam(model.parameters(), lr=0.05)))


class Sam(optim.Optimizer):
    """Sharpness aware: two passes a step, and the inner optimizer's groups are its own."""

    def __init__(self, parameters: Any, inner: type[optim.Optimizer], **options: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, **options})
        self.inner = inner(self.param_groups, **options)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["moved"] = p.grad * group["rho"]
                p.add_(self.state[p]["moved"])
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.state[p]["moved"])
        self.inner.step()
        return loss

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.inner.param_groups = self.param_groups


def _sam(*, inner_too: bool) -> Training:
    model = net()
    optimizer = Sam(model.parameters(), optim.SGD, lr=0.05, momentum=0.9)

    def step(number: int) -> float:
        x = batch()

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, x)
            loss.backward()
            return loss

        return float(optimizer.step(closure))

    components = {"model": model, "optimizer": optimizer}
    if inner_too:
        components["inner"] = optimizer.inner
    return Training(components=components, step=step)


TABLE.add("SAM around SGD, both named", lambda: _sam(inner_too=True))
TABLE.add(
    "SAM around SGD, whose state_dict() has no state of the inner one",
    lambda: _sam(inner_too=False),
    control=Result.DIFFERS,
    keepstep=Result.AS_CONTROL,
    reason="the inner optimizer's momentum is in no state_dict(): name it, too",
)


@TABLE.row(
    "PostLocalSGDOptimizer of torch, whose state has the step of its averager", observed=False
)
def _() -> Training:
    import os
    import tempfile

    from torch import distributed
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    store = tempfile.mktemp(prefix=f"keepstep-test-{os.getpid()}-")
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    model = net()
    averager = PeriodicModelAverager(period=3, warmup_steps=4)
    inner = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = PostLocalSGDOptimizer(inner, averager)
    return trained(model, optimizer, after=lambda step: averager.step)


class Plain:
    """An optimizer that is none of torch's, and derives from nothing."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)
        self.momentum = [torch.zeros_like(p) for p in self.parameters]

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for p, m in zip(self.parameters, self.momentum, strict=True):
            p.sub_(m.mul_(0.9).add_(p.grad), alpha=0.05)

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self.momentum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, kept in zip(self.momentum, state["momentum"], strict=True):
            mine.copy_(kept)


@TABLE.row("an optimizer that does not derive from torch's")
def _() -> Training:
    model = net()
    return trained(model, Plain(model.parameters()), options={"lazy": False})


def _groups(*, ready: bool) -> Training:
    model = net()
    optimizer = optim.Adam(model[0].parameters(), lr=0.01)

    def add() -> None:
        optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.05})

    if ready:
        add()

    def step(number: int) -> float:
        if number == 0 and not ready:
            add()
        loss = loss_of(model, batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Training(components={"model": model, "optimizer": optimizer}, step=step)


TABLE.add("a group added before the restore", lambda: _groups(ready=True))
TABLE.add(
    "a group added after the restore, in the first step",
    lambda: _groups(ready=False),
    control=Result.RAISES,
    keepstep=Result.NAMED_AT_SAVE,
    message="latest_step",
    reason="a restart needs the same groups: add them before the restore",
)


@TABLE.row(
    "a group that is removed at step 3",
    control=Result.RAISES,
    keepstep=Result.NAMED_AT_SAVE,
    message="latest_step",
    reason="a restart needs the same groups: remove them before the restore",
)
def _() -> Training:
    model = net()
    groups = [{"params": model[0].parameters()}, {"params": model[3].parameters()}]
    optimizer = optim.Adam(groups, lr=0.01)

    def after(step: int) -> None:
        if step == 3:
            for p in optimizer.param_groups.pop()["params"]:
                optimizer.state.pop(p)

    return trained(model, optimizer, after=after)


@TABLE.row("a state that is emptied at step 3, so that moments begin again")
def _() -> Training:
    model = net()
    optimizer = optim.Adam(model.parameters(), lr=0.01)

    def after(step: int) -> None:
        if step == 2:
            optimizer.state.clear()

    return trained(model, optimizer, after=after)


# --- objects ------------------------------------------------------------------------------------


class Counter:
    """Derives a tensor from its number when it is loaded."""

    def __init__(self) -> None:
        self.count = 0
        self.table = torch.zeros(4)

    def advance(self) -> Any:
        self.count += 1
        self.table = torch.full((4,), float(self.count))
        return self.table.clone()

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.table = torch.full((4,), float(self.count))


def _object(value: Any, use: Callable[[Any], Any], **more: Any) -> Training:
    return Training(components={"object": value}, step=lambda number: use(value), **more)


TABLE.add("an object that derives a tensor at loading", lambda: _object(Counter(), Counter.advance))


class Live(Counter):
    """Gives its own dicts and tensors, and takes over those that it is given."""

    def __init__(self) -> None:
        self.own: dict[str, Any] = {"n": 0, "all": [], "sum": torch.zeros(2)}

    def advance(self) -> Any:
        self.own["n"] += 1
        self.own["all"].append(torch.rand(2))
        self.own["sum"].add_(self.own["all"][-1])
        return [self.own["n"], self.own["sum"].clone()]

    def state_dict(self) -> dict[str, Any]:
        return self.own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own = state


TABLE.add("an object that gives live references", lambda: _object(Live(), Live.advance))


class Checks(Counter):
    """Compares what it is given with what it is: a mixture would be refused."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.count and state["count"] <= self.count:
            raise RuntimeError(f"{state['count']} after {self.count}")
        super().load_state_dict(state)


TABLE.add("an object that refuses to be loaded twice", lambda: _object(Checks(), Counter.advance))


class Nodes(Counter):
    """As `torchdata.nodes.Loader`: once it was asked for its state, it ignores what it is given."""

    def __init__(self) -> None:
        self._position: Any = None
        self._given = 0

    def _begin(self) -> None:
        if self._position is None:
            self._position = self._given

    def advance(self) -> int:
        self._begin()
        self._position += 1
        return self._position

    def state_dict(self) -> dict[str, Any]:
        self._begin()
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._position is None:
            self._given = state["position"]


TABLE.add(
    "a loader that must be loaded before it is asked for its state",
    lambda: _object(Nodes(), Nodes.advance),
)


class Asks(Counter):
    """Counts how often it is asked, which is no part of what it does."""

    def state_dict(self) -> dict[str, Any]:
        torch.ones(3).sum()
        return {"count": self.count, "made": torch.full((2,), float(self.count))}


TABLE.add(
    "an object whose state_dict() makes new tensors", lambda: _object(Asks(), Counter.advance)
)


class Flushes(Counter):
    """Takes what it has gathered into its state when it is asked for it."""

    def __init__(self) -> None:
        self.gathered: list[float] = []
        self.kept: list[float] = []

    def advance(self) -> Any:
        self.gathered.append(torch.rand(()).item())
        return [*self.kept, *self.gathered]

    def state_dict(self) -> dict[str, Any]:
        self.kept.extend(self.gathered)
        self.gathered.clear()
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = list(state["kept"])


TABLE.add(
    "an object whose state_dict() flushes what it gathered",
    lambda: _object(Flushes(), Flushes.advance),
)


class Cursor(Counter):
    """A sampler that rebuilds its order from a seed and a position."""

    def __init__(self) -> None:
        self.seed, self.at = 11, 0
        self._rebuild()

    def _rebuild(self) -> None:
        self.order = torch.randperm(9, generator=torch.Generator().manual_seed(self.seed)).tolist()

    def advance(self) -> int:
        if self.at == len(self.order):
            self.seed, self.at = self.seed + 1, 0
            self._rebuild()
        self.at += 1
        return self.order[self.at - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed, self.at = state["seed"], state["at"]
        self._rebuild()


TABLE.add("a sampler that rebuilds its order at loading", lambda: _object(Cursor(), Cursor.advance))


class ByList(Counter):
    """A state that is no dict."""

    def state_dict(self) -> Any:
        return [self.count, torch.full((2,), float(self.count))]

    def load_state_dict(self, state: Any) -> None:
        self.count = state[0]
        self.table = torch.full((4,), float(self.count))


TABLE.add("an object whose state is a list", lambda: _object(ByList(), Counter.advance))


class ByTensor(Counter):
    def state_dict(self) -> Any:
        return torch.tensor([self.count])

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict({"count": int(state.item())})


TABLE.add("an object whose state is one tensor", lambda: _object(ByTensor(), Counter.advance))


class Appears(Counter):
    """A state that gets keys and tensors, and loses them."""

    def __init__(self) -> None:
        self.own: dict[str, Any] = {}

    def advance(self) -> Any:
        n = len(self.own)
        self.own = {f"k{at}": torch.full((at + 1,), float(n)) for at in range((n + 1) % 5)}
        return n

    def state_dict(self) -> dict[str, Any]:
        return dict(self.own)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own = dict(state)


TABLE.add(
    "an object whose state gets tensors and loses them", lambda: _object(Appears(), Appears.advance)
)


class CallableThing(Counter):
    def __call__(self) -> Any:
        return self.advance()


TABLE.add("a callable object", lambda: _object(CallableThing(), lambda thing: thing()))


class Replay(Counter):
    """A replay memory: a ring of tensors, and numbers in numpy."""

    def __init__(self) -> None:
        self.ring, self.priorities, self.at = torch.zeros(5, 3), np.zeros(5), 0

    def advance(self) -> Any:
        slot = self.at % 5
        self.ring[slot] = torch.rand(3)
        self.priorities[slot] = self.at
        self.at += 1
        return [self.ring.clone(), self.priorities.copy()]

    def state_dict(self) -> dict[str, Any]:
        return {"ring": self.ring, "priorities": self.priorities, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ring.copy_(state["ring"])
        self.priorities[:] = state["priorities"]
        self.at = state["at"]


TABLE.add("a replay memory of tensors and arrays", lambda: _object(Replay(), Replay.advance))


class Ema(Counter):
    """An average of the weights that an object keeps, made at a later step."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.shadow = model, {}

    def advance(self) -> Any:
        for name, p in self.model.named_parameters():
            old = self.shadow.get(name, p.detach().clone())
            self.shadow[name] = old.lerp(p.detach(), 0.1)
        return len(self.shadow)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.shadow)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = {name: value.clone() for name, value in state.items()}


@TABLE.row("an average that begins at step 3, in an object that is there from the start")
def _() -> Training:
    model = net()
    ema = Ema(model)
    return trained(
        model, also={"ema": ema}, after=lambda step: ema.advance() if step >= 3 else None
    )


def _late_ema(*, ready: bool) -> Training:
    model = net()
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    components: dict[str, Any] = {"model": model, "optimizer": optimizer}

    def make() -> None:
        components["ema"] = optim.swa_utils.AveragedModel(
            model, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )

    def step(number: int) -> float:
        if number == 3:
            make()
        loss = loss_of(model, batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if "ema" in components:
            components["ema"].update_parameters(model)
        return loss.item()

    def prepare(newest: int | None) -> None:
        if ready and newest is not None and newest >= 3:
            make()

    return Training(components=components, step=step, prepare=prepare)


TABLE.add(
    "an average that is put into the dict of components at step 3",
    lambda: _late_ema(ready=False),
    control=Result.DIFFERS,
    keepstep=Result.NAMED_AT_SAVE,
    message="ema",
    reason="a restart must make it before the restore; with `torch.save` it is lost in silence",
)
TABLE.add(
    "an average that is put into the dict at step 3, and before the restore where `latest_step()`"
    " says so",
    lambda: _late_ema(ready=True),
)


@TABLE.row("gradients that are accumulated over steps, kept in a dict")
def _() -> Training:
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def step(number: int) -> float:
        loss = loss_of(model, batch())
        optimizer.zero_grad()
        loss.backward()
        for name, p in model.named_parameters():
            sums[name] += p.grad
            p.grad = sums[name].clone()
        if number % 3 == 2:
            optimizer.step()
            for tensor in sums.values():
                tensor.zero_()
        return loss.item()

    return Training(components={"model": model, "optimizer": optimizer, "sums": sums}, step=step)


@TABLE.row("bfloat16 under autocast, with master weights in an object")
def _() -> Training:
    master = net()
    working = copy.deepcopy(master).to(torch.bfloat16)
    optimizer = optim.AdamW(master.parameters(), lr=0.01)

    def step(number: int) -> float:
        loss = loss_of(working, batch().bfloat16())
        loss.backward()
        for p, w in zip(master.parameters(), working.parameters(), strict=True):
            p.grad, w.grad = w.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for p, w in zip(master.parameters(), working.parameters(), strict=True):
                w.copy_(p)
        return loss.item()

    components = {"master": master, "working": working, "optimizer": optimizer}
    return Training(components=components, step=step)


class Trainer:
    """Model, optimizer and scheduler in one object, as applications of DCP have it."""

    def __init__(self) -> None:
        self.model = net()
        self.optimizer = optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.seen = 0

    def step(self) -> float:
        loss = loss_of(self.model, batch())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.seen += 5
        return loss.item()

    def state_dict(self) -> dict[str, Any]:
        parts = ("model", "optimizer", "scheduler")
        return {"seen": self.seen} | {name: getattr(self, name).state_dict() for name in parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]
        for name in ("model", "optimizer", "scheduler"):
            getattr(self, name).load_state_dict(state[name])


TABLE.add(
    "one object with model, optimizer and scheduler", lambda: _object(Trainer(), Trainer.step)
)


class Typed(dict[str, Any]):
    """A dict of its own kind."""


class OfItsOwnKind(Counter):
    def state_dict(self) -> dict[str, Any]:
        return Typed(count=self.count)


TABLE.add(
    "an object whose state is a dict of its own kind",
    lambda: _object(OfItsOwnKind(), Counter.advance),
    keepstep=Result.REFUSED_AT_START,
    message="Typed",
    reason="an object that is no data: return `dict(state)`",
)


class WithGenerator(Counter):
    """A generator in the state, as it is."""

    def __init__(self) -> None:
        self.chance = torch.Generator().manual_seed(3)

    def advance(self) -> Any:
        return torch.rand(2, generator=self.chance)

    def state_dict(self) -> dict[str, Any]:
        return {"chance": self.chance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.chance.set_state(state["chance"].get_state())


TABLE.add(
    "an object whose state holds a generator",
    lambda: _object(WithGenerator(), WithGenerator.advance),
)


class Empty(Counter):
    """Nothing in its state, at first or ever."""

    def state_dict(self) -> dict[str, Any]:
        return {} if self.count < 2 else {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state.get("count", 1)


TABLE.add("an object whose state is empty at first", lambda: _object(Empty(), Counter.advance))
