"""DeepSpeed's engine: every step is kept, including the state that its ranks have divided.

    checkpointer = keepstep.Checkpointer(components(engine), batches=batches)

and in the loop, after `engine.step()`:

    if stepped(engine):
        checkpointer.save(engine.global_steps)

These rules must hold:

- Every tensor is the one that DeepSpeed trains with: nothing is copied on the way to a save.
- A restore fills tensors in place, because the model's parameters are views of flat buffers.
- What all ranks have alike is declared as replicated.
- What the ranks divide is kept as boxes of vectors, so that another world finds its own parts: one
  vector for each group of parameters (ZeRO-1 and 2), or for each parameter (ZeRO-3).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from keepstep.errors import MismatchError, UsageError, WithinStepError
from keepstep.integrations import require_framework_hooks, require_torch_optimizer
from keepstep.integrations._training_identity import is_quantized
from keepstep.state import sharding
from keepstep.state.wrappers import Replicated, ShardedParameterModule, copy_param_group_options

require_framework_hooks(
    "deepspeed",
    importlib.metadata.version("deepspeed"),
    hooks={
        "deepspeed.runtime.engine:DeepSpeedEngine": (
            *("global_steps", "global_samples", "micro_steps", "skipped_steps", "param_names"),
            *("_is_gradient_accumulation_boundary", "mp_world_size", "seq_data_parallel_group"),
        ),
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer": (
            *("round_robin_bit16_groups", "round_robin_bit16_offsets", "round_robin_bit16_meta"),
            "loss_scaler",
        ),
        "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": (
            *("fp32_partitioned_groups_flat", "fp16_groups", "sub_group_to_group_id"),
            *("grad_position", "get_param_id", "persistent_parameters"),
            *("_partition_all_parameters", "_reassign_or_swap_out_partitioned_parameters"),
        ),
    },
)

_OPTIMIZERS = (
    "DeepSpeedZeroOptimizer",
    "DeepSpeedZeroOptimizer_Stage3",
    "BF16_Optimizer",
    "FP16_Optimizer",
    "FP16_UnfusedOptimizer",
)
"""DeepSpeed's own optimizers that were examined. Others derive from these and keep state
elsewhere."""

_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What a loss scaler changes; everything else in it is configuration."""


def components(engine: Any) -> dict[str, Any]:
    """The components of an engine, for `Checkpointer`: `model`, `optimizer`, `engine`, and, if the
    engine has them, `master` and `scheduler`.

    `master` are the weights in full precision; under ZeRO-3, these are in `model`. Call this right
    after `deepspeed.initialize()`. Raises UsageError for engines that were never tested, or that
    keepstep does not support.
    """
    _refuse(engine)
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    inner = getattr(optimizer, "optimizer", optimizer)
    ranks = tuple(range(distributed.get_world_size()))
    found: dict[str, Any] = {"model": Replicated(engine.module, ranks), "optimizer": inner}
    then: Callable[[], None] = _nothing
    if stage == 3:
        parts = _parts_of_parameters(engine)
        found["model"] = _Model(engine.module, parts)
        found["optimizer"] = partitions = _Partitions(inner, _by_group(optimizer, parts))
        then = partial(_spread, optimizer, partitions)
    elif stage:
        flats = _parts_of_groups(engine)
        found["optimizer"] = partitions = _Partitions(inner, [[part] for part in flats])
        found["master"] = _Tensors(_by_number(optimizer, flats))
        then = partitions.settle
    elif inner is not optimizer:
        found["master"] = Replicated(_Tensors(_by_parameter(engine)), ranks)
    if engine.lr_scheduler is not None:
        found["scheduler"] = engine.lr_scheduler
    found["engine"] = _Counters(engine, then)
    return found


def _nothing() -> None: ...


def stepped(engine: Any) -> bool:
    """Whether the last `engine.step()` was an optimizer step, and not only an accumulation of
    gradients. Then there are no gradients, so a step can be kept."""
    set_by_script = engine._is_gradient_accumulation_boundary
    if set_by_script is not None:
        return bool(set_by_script)
    if not engine.managed_gradient_accumulation():
        return bool(engine._unmanaged_backward_count == 0)
    return bool(engine.micro_steps % engine.gradient_accumulation_steps() == 0)


class _Tensors(nn.Module):
    """Presents tensors of an optimizer as a module's parameters, without copying them. So they are
    copied late, filled in place, and their optimizer state is named after them."""

    def __init__(self, named: dict[str, Tensor]) -> None:
        super().__init__()
        self._parameters.update(named)  # type: ignore[arg-type]  # past the check for a Parameter


class _Part:
    """This rank's part of a vector: `vector`, which lies in `flat` from `begin` on.

    `shape`: of the whole vector. The ranks of `mesh` divide its first dimension as torch.chunk
    does, so `vector` is a DTensor sharded by that dimension.
    """

    def __init__(self, flat: Tensor, shape: tuple[int, ...], mesh: DeviceMesh, begin: int = 0):
        self.flat, self._shape, self._mesh, self._begin = flat, torch.Size(shape), mesh, begin
        self._views: dict[str, tuple[Tensor, int, Tensor]] = {}
        self.vector = self._of(flat)

    def _of(self, flat: Tensor) -> Tensor:
        local, stride = self.within(flat), torch.empty(self._shape, device="meta").stride()
        return DTensor.from_local(
            local, self._mesh, [Shard(0)], run_check=False, shape=self._shape, stride=stride
        )

    def within(self, flat: Tensor) -> Tensor:
        """The same part of a tensor like `flat`, not copied. Padding behind the vector is left out;
        it is zero in every world."""
        rows, *rest = self._shape
        _, here = sharding.find_chunk_begin_and_length(
            rows, self._mesh.size(), self._mesh.get_rank()
        )
        size = here * math.prod(rest)
        return flat.detach()[self._begin : self._begin + size].view(here, *rest)

    def view(self, flat: Tensor, key: str) -> Tensor:
        """A DTensor like `vector`, over a tensor like `flat`.

        It is made once, because an optimizer fills its state in place, and making a DTensor takes
        longer than everything else that a save does with it.
        """
        of, pointer, view = self._views.get(key, (None, 0, flat))
        if of is not flat or pointer != flat.data_ptr():
            view = self._of(flat)
            self._views[key] = flat, flat.data_ptr(), view
        return view


def _mesh(engine: Any, like: Tensor) -> DeviceMesh:
    return DeviceMesh.from_group(engine.seq_data_parallel_group, like.device.type)


def _parts_of_groups(engine: Any) -> list[_Part]:
    """The parts of ZeRO-1 and 2. They make one vector of each group of parameters, pad it to a
    multiple of `2 * world` and cut it into equal parts. torch.chunk cuts it in the same way if it
    has rows of two elements."""
    flats = [group["params"][0] for group in engine.optimizer.optimizer.param_groups]
    mesh = _mesh(engine, flats[0])
    sizes = _flat_sizes(engine.optimizer)
    return [_Part(flat, (-(-size // 2), 2), mesh) for flat, size in zip(flats, sizes, strict=True)]


def _parts_of_parameters(engine: Any) -> dict[Tensor, _Part]:
    """The parts of ZeRO-3, which pads each parameter to a multiple of `world` and cuts it into
    equal parts. The masters of several parameters lie in one tensor (a setting says how many). A
    parameter without a master is not trained."""
    zero = engine.optimizer
    flats = zero.fp32_partitioned_groups_flat
    meshes: dict[str, DeviceMesh] = {}  # offloaded, what is trained is on another device
    parts = {}
    for parameter in engine.module.parameters():
        flat, begin = parameter.ds_tensor, 0
        if (place := zero.grad_position.get(zero.get_param_id(parameter))) is not None:
            flat, begin = flats[place[0]], place[1]
        if flat.device.type not in meshes:
            meshes[flat.device.type] = _mesh(engine, flat)
        parts[parameter] = _Part(flat, (parameter.ds_numel,), meshes[flat.device.type], begin)
    return parts


class _Model(ShardedParameterModule):
    """The module under ZeRO-3, which has its whole parameters only while it computes with them.
    This module has this rank's part of each parameter, in full precision if it is trained, and the
    buffers."""

    def __init__(self, module: nn.Module, parts: dict[Tensor, _Part]) -> None:
        named: dict[str, Any] = dict(module.named_parameters(remove_duplicate=False))
        super().__init__({name: tuple(value.ds_shape) for name, value in named.items()})
        self._of = [module]  # in a list, so that it does not become a submodule
        vectors = {name: parts[value].vector for name, value in named.items()}
        self._parameters.update(vectors)  # type: ignore[arg-type]  # as in _Tensors

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        return self._of[0].named_buffers(*args, **options)

    def state_dict(self, *_: Any, **__: Any) -> Any:
        return {**self._of[0].state_dict(), **self._parameters}

    def load_state_dict(self, state_dict: Any, *_: Any, **__: Any) -> Any:
        """Load what is not a tensor, namely `_extra_state`. Everything else is filled in place."""
        rest = {name: value for name, value in state_dict.items() if name not in self._parameters}
        return self._of[0].load_state_dict(rest, strict=False)


class _Partitions(torch.optim.Optimizer):
    """The optimizer inside ZeRO, with its flat tensors presented as this rank's parts of vectors,
    which another world divides otherwise."""

    def __init__(self, inner: torch.optim.Optimizer, groups: list[list[_Part]]) -> None:
        self._inner = inner
        self._parts = [part for group in groups for part in group]
        pairs = zip(inner.param_groups, groups, strict=True)
        super().__init__(
            [{**group, "params": [part.vector for part in parts]} for group, parts in pairs], {}
        )

    def state_dict(self) -> dict[str, Any]:
        copy_param_group_options(self._inner, self)
        self.state.clear()
        for part in self._parts:
            for key, value in self._inner.state.get(part.flat, {}).items():
                like = isinstance(value, Tensor) and value.shape == part.flat.shape
                self.state[part.vector][key] = part.view(value, key) if like else value
        return super().state_dict()

    def settle(self) -> None:
        """Hand the optimizer inside what a restore gave to this one."""
        copy_param_group_options(self, self._inner)
        for part in self._parts:
            state = self._inner.state[part.flat]
            for key, value in self.state.get(part.vector, {}).items():
                if not isinstance(value, DTensor):
                    state[key] = value
                    continue
                local = sharding.local_tensor_of(value)
                if key not in state or state[key].dtype != local.dtype:
                    state[key] = torch.zeros_like(part.flat, dtype=local.dtype, requires_grad=False)
                here = part.within(state[key])
                if here.data_ptr() != local.data_ptr():
                    here.copy_(local)


def _flat_sizes(zero: Any) -> list[int]:
    """The elements of each group's flat vector, without the padding behind the last parameter."""
    if hasattr(zero, "bf16_groups"):
        return [sum(parameter.numel() for parameter in group) for group in zero.bf16_groups]
    ends = zip(zero.round_robin_bit16_offsets, zero.round_robin_bit16_meta, strict=True)
    return [offsets[-1] + metas[-1].numel() for offsets, metas in ends]


class _Counters:
    """The counters of an engine, and its loss scale."""

    def __init__(self, engine: Any, then: Callable[[], None]) -> None:
        """`then`: called after a restore, once everything else is in place."""
        self._engine, self._then = engine, then
        optimizer = engine.optimizer
        self._scaler = getattr(optimizer, "loss_scaler", None) or getattr(
            optimizer, "loss_scale_config", None
        )
        self._parameters = _digest(engine)
        self._restored_at: int | None = None

    def state_dict(self) -> dict[str, Any]:
        engine = self._engine
        if not stepped(engine) and engine.micro_steps != self._restored_at:
            raise WithinStepError(
                "gradients are being accumulated, which no step holds: save where"
                " keepstep.integrations.deepspeed.stepped(engine) is true"
            )
        scaler = {} if self._scaler is None else vars(self._scaler)
        return {
            "global_steps": engine.global_steps,
            "global_samples": engine.global_samples,
            "micro_steps": engine.micro_steps,
            "accumulation": engine.gradient_accumulation_steps(),
            "skipped_steps": engine.skipped_steps,
            "scaler": {name: scaler[name] for name in _SCALER if name in scaler},
            "parameters": self._parameters,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        engine = self._engine
        if state["parameters"] != self._parameters:
            raise MismatchError(
                "the parameters of this engine's optimizer, their shapes or their order are not"
                " those of the restored step, so its partitions are others: train with the code"
                " that saved it, or start a new run (keepstep run --run NAME)"
            )
        for name in ("global_steps", "global_samples", "skipped_steps"):
            setattr(engine, name, state[name])
        accumulation = engine.gradient_accumulation_steps()
        engine.micro_steps = state["micro_steps"]
        if accumulation != state["accumulation"]:
            # another world may accumulate over another number of batches; a step begins at its
            # multiples
            engine.micro_steps = state["micro_steps"] // state["accumulation"] * accumulation
        self._restored_at = engine.micro_steps
        for name, value in state["scaler"].items():
            setattr(self._scaler, name, value)
        self._then()
        _multiply_again(getattr(engine.optimizer, "optimizer", engine.optimizer))


def _multiply_again(optimizer: Any) -> None:
    """Bring DeepSpeed's Adam of the CPU to its step. It multiplies powers of its betas from step to
    step, which has other roundings than a power, and keeps them in C++."""
    if (native := getattr(optimizer, "ds_opt_adam", None)) is None:
        return
    steps = max((int(state["step"]) for state in optimizer.state.values()), default=0)
    betas, nothing = [group["betas"] for group in optimizer.param_groups], [torch.empty(0)] * 4
    for step in range(1, steps + 1):
        for pair in betas:
            native.adam_update(optimizer.opt_id, step, 0.0, *pair, 1e-8, 0.0, True, *nothing)


@torch.no_grad()
def _spread(zero: Any, partitions: _Partitions) -> None:
    """Update the weights that ZeRO-3 trains with from their masters, as at the end of its step."""
    partitions.settle()
    zero._partition_all_parameters()
    for number in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(number)
    if zero.persistent_parameters:
        zero.persistent_parameters[0].all_gather(zero.persistent_parameters)


# --- names ---------------------------------------------------------------------------------------


def _by_number(zero: Any, parts: list[_Part]) -> dict[str, Tensor]:
    """The masters of ZeRO-1 and 2, one per group, named by number."""
    order = ""
    if getattr(zero, "round_robin_gradients", False):  # the order depends on the world size
        order = f".round_robin_of_{distributed.get_world_size()}"
    return {f"zero.group.{at}{order}": part.vector for at, part in enumerate(parts)}


def _by_group(zero: Any, parts: dict[Tensor, _Part]) -> list[list[_Part]]:
    """What ZeRO-3 trains, in the groups of its optimizer."""
    groups: list[list[_Part]] = [[] for _ in zero.optimizer.param_groups]
    for number, members in enumerate(zero.fp16_groups):
        groups[zero.sub_group_to_group_id[number]] += [parts[member] for member in members]
    return groups


def _groups(engine: Any) -> list[list[Any]]:
    """The model's parameters in the order and groups of the optimizer."""
    optimizer = engine.optimizer
    for name in ("round_robin_bit16_groups", "fp16_groups", "bf16_groups"):
        if hasattr(optimizer, name):
            return [list(group) for group in getattr(optimizer, name)]
    return [list(group["params"]) for group in optimizer.param_groups]


def _by_parameter(engine: Any) -> dict[str, Tensor]:
    """The masters of an optimizer that divides nothing. Names begin with numbers, because DeepSpeed
    goes by numbers, so another order is another model."""
    named = {}
    for number, group in enumerate(engine.optimizer.optimizer.param_groups):
        masters, models = group["params"], _groups(engine)[number]
        if len(masters) != len(models):  # one for all of them, flat
            named[f"group.{number}"] = masters[0]
            continue
        for at, (master, model) in enumerate(zip(masters, models, strict=True)):
            named[f"group.{number}.{at}.{engine.param_names[model]}"] = master
    return named


def _digest(engine: Any) -> str:
    """A digest of the parameters. It is equal if flat tensors hold the same parameters in the same
    places, or, for state kept by name, if each name has the same shape."""
    three = engine.zero_optimization_stage() == 3  # ZeRO-3 keeps everything by name
    groups = [list(engine.module.parameters())] if three else _groups(engine)
    named = [
        [
            [
                engine.param_names.get(parameter, ""),
                list(getattr(parameter, "ds_shape", parameter.shape)),
            ]
            for parameter in group
        ]
        for group in groups
    ]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:32]


# --- checks of the engine ------------------------------------------------------------------------


def _refuse(engine: Any) -> None:
    if type(engine) is not DeepSpeedEngine:
        raise UsageError(
            f"a {type(engine).__name__} was never tried: components() takes a DeepSpeedEngine, as"
            " deepspeed.initialize() makes it of a model without pipeline stages"
        )
    if engine.optimizer is None:
        raise UsageError("this engine has no optimizer: there is no step to keep")
    for what, instead in _unsupported(engine):
        raise UsageError(
            f"keepstep cannot keep what DeepSpeed does with {what}: {instead}, or leave keepstep"
            " out and keep engine.save_checkpoint()"
        )
    optimizer = engine.optimizer
    kind = type(optimizer).__name__
    if kind not in _OPTIMIZERS and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"a {kind} was never tried; take a configuration that gives one of these:"
            f" {', '.join(_OPTIMIZERS)}"
        )
    inner = getattr(optimizer, "optimizer", optimizer)
    require_torch_optimizer(inner)
    module = type(inner).__module__
    if "onebit" in module or "muon" in module:
        raise UsageError(
            f"a {type(inner).__name__} keeps more state than keepstep can name: take"
            " torch.optim.AdamW, FusedAdam or another one of torch's kind"
        )


def _unsupported(engine: Any) -> Iterator[tuple[str, str]]:
    """What this engine uses that keepstep does not support, each with what to do."""
    ranks = distributed.get_world_size(engine.seq_data_parallel_group)
    if ranks != distributed.get_world_size() or engine.mp_world_size > 1:
        yield "tensor, expert or pipeline parallelism", "use data parallelism over all ranks"
    if is_quantized(engine.module):
        yield "the quantised layers of bitsandbytes", "use one rank, or DDP"
    if engine.has_moe_layers:
        yield "MoE layers", "use a dense model"
    optimizer, parameters = engine.zero_offload_optimizer(), engine.zero_offload_param()
    if optimizer is not None and optimizer.device not in ("none", "cpu"):
        yield "zero_optimization.offload_optimizer to a drive", 'set its device to "cpu"'
    if optimizer is not None and optimizer.device == "cpu" and optimizer.ratio != 1.0:
        yield "zero_optimization.offload_optimizer.ratio", "set it to 1.0"
    if parameters is not None and parameters.device != "none":
        yield "zero_optimization.offload_param", "leave offload_param out of the configuration"
    if engine.zero_hpz_partition_size() > 1:
        yield "zero_hpz_partition_size", "leave it out of the configuration"
    for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights"):
        if getattr(engine, name)():
            yield name, "leave it out of the configuration"
    if engine.is_deepcompile_enabled():
        yield "deepcompile", "leave it out of the configuration"
    scalers = (
        (engine, "torch_autocast_z0_gradscaler"),
        (engine.optimizer, "torch_autocast_gradscaler"),
    )
    if any(getattr(scaler, name, None) is not None for scaler, name in scalers):
        yield "torch_autocast in float16", "use bfloat16, or fp16.enabled"
    if engine.data_efficiency_enabled():
        yield "data_efficiency", "leave it out of the configuration"
