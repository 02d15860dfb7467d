"""Megatron-core: every step is kept, in a loop of your own.

    checkpointer = keepstep.Checkpointer(
        {**components(model_chunks, optimizer, scheduler), "progress": progress}
    )

and in the loop, after `optimizer.step()` and `scheduler.step(...)`:

    checkpointer.save(iteration)

These rules must hold:

- Weights are kept once, in full precision: as the main parameters that the optimizer changes. What
  Megatron computes with is made of them after a restore, as after each of its steps.
- Every tensor is the one that the optimizer changes: nothing is copied on the way to a save.
- Names and boxes are those of `sharded_state_dict`, so that layers and experts have the same name
  on whatever rank they are, and another layout finds its own parts.
- The distributed optimizer cuts parameters anywhere. So its part of one is a range of the elements
  of a box.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
)
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from keepstep.errors import UsageError
from keepstep.image import FlatBox
from keepstep.integrations import require_torch_optimizer
from keepstep.state import sharding
from keepstep.state.sharding import Sharing
from keepstep.state.wrappers import ShardedParameterModule, copy_param_group_options


def components(model_chunks: Any, optimizer: Any, scheduler: Any = None) -> dict[str, Any]:
    """The components of a training, for `Checkpointer`: `model`, `optimizer` (and `optimizer_1` and
    so on, if there are several in a chain), `megatron`, and `scheduler` if there is one.

    `model_chunks`: the modules of this rank inside Megatron's DistributedDataParallel, as
    `forward_backward_func` takes them. `scheduler`: an `OptimizerParamScheduler`. `megatron` holds
    the loss scale and the states of the RNG tracker. Call it on all ranks once the optimizer is
    made, since it is a collective. Raises UsageError for what keepstep cannot keep.
    """
    chunks = list(model_chunks) if isinstance(model_chunks, list | tuple) else [model_chunks]
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    _refuse(chunks, parts)
    models = [_inside(chunk) for chunk in chunks]
    names = [_Names(model, f"chunk.{at}." if at else "") for at, model in enumerate(models)]
    boxes = _boxes(names)
    pieces: dict[Tensor, _Piece] = {}
    for part in parts:
        for main, parameter, begin in _mains(part):
            pieces[main] = _Piece(boxes[parameter], main, begin)
    trained = {id(parameter) for part in parts for parameter in _parameters(part)}
    others = [_Piece(box, tensor) for tensor, box in boxes.items() if id(tensor) not in trained]
    found: dict[str, Any] = {"model": _Model(names, [*pieces.values(), *others])}
    shards = [_Shards(part.optimizer, pieces) for part in parts]
    for at, shard in enumerate(shards):
        found[f"optimizer_{at}" if at else "optimizer"] = shard
    if scheduler is not None:
        found["scheduler"] = _Scheduler(scheduler)
    found["megatron"] = _State(chunks, parts, shards)
    return found


# --- where the parameters are in the whole model -------------------------------------------------


class _Box(NamedTuple):
    """The part of a parameter that this rank computes with.

    `shape`: of the whole parameter, as its user knows it. `global_shape`, `offsets`, `sizes`: its
    box in the whole parameter, which may have one dimension more: both halves of a gated layer are
    cut. `members`, `replicas`: the ranks that have a part of it, or this one.
    """

    name: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    members: tuple[int, ...]
    replicas: tuple[int, ...]
    tensor_parallel: tuple[int, int]

    def part(self, begin: int) -> Sharing:
        """That of a vector of its elements, from `begin` on, which only this rank has."""
        mine, length = (distributed.get_rank(),), math.prod(self.sizes)
        if self.sizes[1:] == self.global_shape[1:]:  # it is of one piece in the whole parameter
            begin += self.offsets[0] * math.prod(self.sizes[1:]) if self.sizes else 0
            flat = FlatBox((0,) * len(self.sizes), self.global_shape, self.global_shape)
            return Sharing((begin,), (math.prod(flat.sizes),), mine, self.members, flat)
        rank, ranks = self.tensor_parallel  # a row of each rank for readers that know no FlatBox
        flat = FlatBox(self.offsets, self.sizes, self.global_shape)
        return Sharing((rank, begin), (ranks, length), mine, self.members, flat)


class _Names:
    """The names in the whole model of what is in a chunk of it. `prefix`: before the names that
    Megatron does not give."""

    def __init__(self, model: Any, prefix: str) -> None:
        self.model, self._prefix = model, prefix
        named = model.named_parameters(remove_duplicate=False)
        self._parameters = {name for name, _ in named}
        self.sharded = model.sharded_state_dict(metadata={"singleton_local_shards": True})

    def __getitem__(self, local: str) -> str:
        sharded = self.sharded.get(local)
        return str(sharded.key) if hasattr(sharded, "key") else self._prefix + local

    def rest(self) -> Iterator[tuple[str, str, Any]]:
        """What its state dict has beside parameters: name, name in the chunk, value."""
        for local, value in self.model.state_dict().items():
            if local not in self._parameters:
                yield self[local], local, value


def _boxes(chunks: Sequence[_Names]) -> dict[Tensor, _Box]:
    """The box of each parameter. A collective."""
    ranks = _ranks()
    found: dict[Tensor, _Box] = {}
    for names in chunks:
        for local, parameter in names.model.named_parameters():
            here = ranks[bool(getattr(parameter, "allreduce", True))]
            box = _box(names.sharded.get(local), parameter, here)
            if box is None:
                shape = tuple(parameter.shape)
                whole = (shape, shape, (0,) * len(shape), shape)
                box = _Box(names[local], *whole, here.replicas, here.replicas, (0, 1))
            found[parameter] = box
    return found


def _box(sharded: Any, parameter: Tensor, here: _Ranks) -> _Box | None:
    """What Megatron says of a parameter. None if it says nothing that is a box, so that the
    parameter is kept as what it is on this pipeline stage and tensor parallel rank."""
    gated = False
    if isinstance(sharded, ShardedTensorFactory):
        halves = sharded.build()
        if not isinstance(halves, list) or len(halves) != 2:
            return None
        key, gated, sharded = sharded.key, True, halves[0]
        if (2 * sharded.local_shape[0], *sharded.local_shape[1:]) != tuple(parameter.shape):
            return None
    elif isinstance(sharded, ShardedTensor) and sharded.local_shape == tuple(parameter.shape):
        key = sharded.key
    else:
        return None
    axes = sharded.prepend_axis_num
    name = ".".join([key, *map(str, sharded.global_offset[:axes])])
    shape, offsets = sharded.global_shape[axes:], sharded.global_offset[axes:]
    whole, sizes = tuple(shape), tuple(sharded.local_shape)
    replicas = here.members if sizes == whole else here.replicas
    if gated:
        doubled = (2 * whole[0], *whole[1:])
        box = doubled, (2, *whole), (0, *offsets), (2, *sizes)
    else:
        box = whole, whole, tuple(offsets), sizes
    return _Box(name, *box, here.members, replicas, here.tensor_parallel)


class _Ranks(NamedTuple):
    """`replicas`: the ranks with this rank's part of a parameter. `members`: with any part."""

    replicas: tuple[int, ...]
    members: tuple[int, ...]
    tensor_parallel: tuple[int, int]


def _ranks() -> dict[bool, _Ranks]:
    """The ranks of this pipeline stage, for the experts that this rank has (False), and for all
    other parameters. A collective."""
    groups = {
        True: (
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            parallel_state.get_tensor_model_parallel_group(),
        ),
        False: (
            parallel_state.get_expert_data_parallel_group(),
            parallel_state.get_expert_tensor_parallel_group(),
        ),
    }
    mine = {
        kind: sorted(distributed.get_process_group_ranks(group))
        for kind, (group, _) in groups.items()
    }
    gathered: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gathered, mine)
    found = {}
    for kind, (_, group) in groups.items():
        peers = distributed.get_process_group_ranks(group)
        members = sorted({rank for peer in peers for rank in gathered[peer][kind]})
        place = distributed.get_rank(group), distributed.get_world_size(group)
        found[kind] = _Ranks(tuple(mine[kind]), tuple(members), place)
    return found


def _inside(chunk: Any) -> Any:
    """The model inside DistributedDataParallel and Float16Module."""
    while isinstance(getattr(chunk, "module", None), nn.Module):
        chunk = chunk.module
    return chunk


# --- what is kept of a parameter -----------------------------------------------------------------


class _Piece:
    """A tensor that an optimizer changes, or a parameter that none changes: `vector` is a DTensor
    over it."""

    def __init__(self, box: _Box, main: Tensor, begin: int | None = None) -> None:
        """`begin`: the element of the box where `main` begins; None if it is all of the box."""
        self.box, self.main = box, main
        if begin is None:
            self._sizes: tuple[int, ...] = box.sizes
            self._sharing = Sharing(box.offsets, box.global_shape, box.replicas, box.members)
        else:
            self._sharing = box.part(begin)
            self._sizes = (*[1] * (len(self._sharing.offsets) - 1), main.numel())
        self._views: dict[str, tuple[Tensor, int, Tensor]] = {}
        self.vector = self._of(main)

    def _of(self, tensor: Tensor) -> Tensor:
        local = tensor.detach().view(self._sizes)
        return sharding.dtensor_of_box(local, _mesh(local.device.type), self._sharing)

    def view(self, tensor: Tensor, key: str) -> Tensor:
        """A DTensor like `vector`, over state of the same shape. It is made once."""
        of, pointer, view = self._views.get(key, (None, 0, tensor))
        if of is not tensor or pointer != tensor.data_ptr():
            view = self._of(tensor)
            self._views[key] = tensor, tensor.data_ptr(), view
        return view


@functools.cache
def _mesh(device_type: str) -> DeviceMesh:
    """Any mesh of all ranks; a box is not cut by it."""
    ranks = list(range(distributed.get_world_size()))
    return DeviceMesh(device_type, ranks, _init_backend=False)


def _mains(part: Any) -> Iterator[tuple[Tensor, Tensor, int | None]]:
    """The tensors that an optimizer changes, each with its parameter, and where it begins in that,
    if it may be only a part."""
    if isinstance(part, FP32Optimizer):
        for group in part.optimizer.param_groups:
            yield from ((param, param, None) for param in group["params"])
    elif _is_distributed(part):
        for models, mains in (
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            (part.model_fp32_groups, part.shard_fp32_groups),
        ):
            for parameters, shards in zip(models, mains, strict=True):
                for parameter, shard in zip(parameters, shards, strict=True):
                    begin = part._get_model_param_range_map(parameter)["param"].start
                    yield shard, parameter, begin
    else:
        for parameters, mains in zip(
            part.float16_groups, part.fp32_from_float16_groups, strict=True
        ):
            yield from ((main, of, None) for main, of in zip(mains, parameters, strict=True))
        for parameters in part.fp32_from_fp32_groups:
            yield from ((parameter, parameter, None) for parameter in parameters)


def _parameters(part: Any) -> Iterator[Tensor]:
    """The parameters that an optimizer changes, on whatever rank."""
    if _is_distributed(part):
        for buffer in part.buffers:
            yield from buffer.param_index_map
    else:
        yield from (parameter for _, parameter, _ in _mains(part))


def _is_distributed(part: Any) -> bool:
    return isinstance(part, DistributedOptimizer)


# --- components ----------------------------------------------------------------------------------


class _Model(ShardedParameterModule):
    """The parameters of all chunks in full precision, and whatever else their state dicts have."""

    def __init__(self, chunks: list[_Names], pieces: Sequence[_Piece]) -> None:
        super().__init__(
            {
                piece.box.name: piece.box.shape
                for piece in pieces
                if piece.box.shape != piece.box.global_shape
            }
        )
        vectors: dict[str, Any] = {piece.box.name: piece.vector for piece in pieces}
        if len(vectors) < len(pieces):
            raise UsageError("two parameters of this model have the same name")
        self._parameters.update(vectors)  # past the check for a Parameter
        self._chunks = chunks  # in a list, so that no chunk becomes a submodule

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        for names in self._chunks:
            for local, buffer in names.model.named_buffers(*args, **options):
                yield names[local], buffer

    def state_dict(self, *_: Any, **__: Any) -> Any:
        rest = {name: value for chunk in self._chunks for name, _, value in chunk.rest()}
        return {**rest, **self._parameters}

    def load_state_dict(self, state_dict: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        """Load what is no parameter. These are filled in place."""
        for names in self._chunks:
            rest = {
                local: state_dict[name] for name, local, _ in names.rest() if name in state_dict
            }
            names.model.load_state_dict(rest, strict=False)


class _Shards(torch.optim.Optimizer):
    """The optimizer inside one of Megatron's, with what it changes presented as boxes."""

    def __init__(self, inner: torch.optim.Optimizer, pieces: Mapping[Tensor, _Piece]) -> None:
        self._inner = inner
        groups = [[pieces[param] for param in group["params"]] for group in inner.param_groups]
        self._pieces = [piece for group in groups for piece in group]
        pairs = zip(inner.param_groups, groups, strict=True)
        super().__init__([{**group, "params": [p.vector for p in own]} for group, own in pairs], {})

    def state_dict(self) -> dict[str, Any]:
        copy_param_group_options(self._inner, self)
        self.state.clear()
        for piece in self._pieces:
            for key, value in self._inner.state.get(piece.main, {}).items():
                if isinstance(value, Tensor) and value.shape == piece.main.shape:
                    value = piece.view(value, key)
                elif isinstance(value, Tensor) and value.dim() == 0:
                    value = value.item()  # a count: not of all ranks that have the parameter
                self.state[piece.vector][key] = value
        return super().state_dict()

    def settle(self) -> None:
        """Hand the optimizer inside what a restore gave to this one."""
        copy_param_group_options(self, self._inner)
        for piece in self._pieces:
            state = self._inner.state[piece.main]
            for key, value in self.state.get(piece.vector, {}).items():
                if isinstance(value, DTensor):
                    local = sharding.local_tensor_of(value).view(piece.main.shape)
                    if key not in state or state[key].data_ptr() != local.data_ptr():
                        state[key] = local
                else:
                    state[key] = torch.tensor(value) if isinstance(value, float) else value


class _Scheduler:
    """An `OptimizerParamScheduler`, whose own `load_state_dict` adds to its count of steps."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> Any:
        return self._scheduler.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._scheduler.num_steps = 0
        self._scheduler.load_state_dict(state)


class _State:
    """The loss scales and the states of the RNG tracker. It is loaded last."""

    def __init__(self, chunks: Sequence[Any], parts: Sequence[Any], shards: Sequence[_Shards]):
        self._chunks, self._parts, self._shards = chunks, parts, shards

    @property
    def _scalers(self) -> list[Any]:
        scalers = [getattr(part, "grad_scaler", None) for part in self._parts]
        return [scaler for scaler in scalers if scaler is not None]

    def state_dict(self) -> dict[str, Any]:
        states = get_cuda_rng_tracker().get_states()
        return {
            "scalers": [scaler.state_dict() for scaler in self._scalers],
            "rng_tracker": {name: _bytes(state) for name, state in states.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for scaler, kept in zip(self._scalers, state["scalers"], strict=True):
            scaler.load_state_dict(kept)
        _set_tracker(state["rng_tracker"])
        with torch.no_grad():
            for shards in self._shards:
                shards.settle()
            for part in self._parts:
                if not isinstance(part, FP32Optimizer):
                    part._copy_main_params_to_model_params()
            if any(map(_is_distributed, self._parts)):
                for chunk in self._chunks:
                    chunk.start_param_sync(force_sync=True)


def _bytes(state: Any) -> bytes:
    """The state of a generator, which the tracker gives as a tensor, or as the generator."""
    tensor = state.get_state() if isinstance(state, torch.Generator) else state
    return bytes(tensor.cpu().numpy())


def _set_tracker(kept: Mapping[str, bytes]) -> None:
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()
    for name, chunk in kept.items():
        tensor = torch.frombuffer(bytearray(chunk), dtype=torch.uint8)
        if isinstance(states.get(name), torch.Generator):
            states[name].set_state(tensor)
        else:
            states[name] = tensor
    tracker.set_states(states)


# --- checks --------------------------------------------------------------------------------------


def _refuse(chunks: Sequence[Any], parts: Sequence[Any]) -> None:
    """Raise UsageError for what keepstep cannot keep."""
    for part in parts:
        kinds = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)
        if type(part) not in kinds:
            raise UsageError(
                f"a {type(part).__name__} was never tried: components() takes what"
                " get_megatron_optimizer() makes for Adam or SGD"
            )
        needed = [] if type(part) is FP32Optimizer else ["_copy_main_params_to_model_params"]
        if _is_distributed(part):
            needed += ["_get_model_param_range_map", "shard_fp32_from_float16_groups"]
        if missing := [hook for hook in needed if not hasattr(part, hook)]:
            raise UsageError(
                f"this megatron-core has no {', '.join(missing)} in its {type(part).__name__},"
                " which keepstep needs: take megatron-core 0.16"
            )
        if part.is_stub_optimizer:
            raise UsageError("a rank whose parameters are all frozen was never tried")
        require_torch_optimizer(part.optimizer)
    for what, instead in _unsupported(chunks, parts):
        raise UsageError(f"keepstep cannot keep what Megatron does with {what}: {instead}")


def _unsupported(chunks: Sequence[Any], parts: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """What this training uses that keepstep does not support, each with what to do."""
    for chunk in chunks:
        if not hasattr(chunk, "start_param_sync"):
            yield f"a {type(chunk).__name__}", "wrap it in Megatron's DistributedDataParallel"
        elif getattr(chunk.ddp_config, "use_megatron_fsdp", False):
            yield "use_megatron_fsdp", "take use_distributed_optimizer"
        config = _inside(chunk).config
        if getattr(config, "fp8", None) or getattr(config, "fp4", None):
            yield "weights in FP8 or FP4", "take bf16"
    for part in parts:
        if getattr(part.config, "use_precision_aware_optimizer", False):
            yield "use_precision_aware_optimizer", "leave it out"
        if type(part.optimizer).__name__ == "HybridDeviceOptimizer":
            yield "optimizer_cpu_offload", "leave it out"
