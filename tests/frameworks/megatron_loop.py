"""A tiny GPT of Megatron-core's: `python megatron_loop.py OUT SETTINGS`; as trainer.py."""

from __future__ import annotations

import inspect
import json
import math
import os
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import silu

from tests.frameworks import megatron_on_cpu  # noqa: F401  # isort: skip
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    init_num_microbatches_calculator,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model

import keepstep
from keepstep.integrations.megatron import components
from keepstep.integrations.megatron_bridge import manage
from tests.frameworks.script import (
    OUT,
    RANK,
    SETTINGS,
    digest,
    maybe_kill,
    random_states,
    record,
    write,
)

STEPS = SETTINGS.get("steps", 14)
ROWS, LENGTH, VOCABULARY = 2, 8, SETTINGS.get("vocabulary", 32)
TP, PP, EP = (SETTINGS.get(name, 1) for name in ("tp", "pp", "ep"))
EXPERTS = SETTINGS.get("experts", 4 if EP > 1 else None)
PRECISION = SETTINGS.get("precision", "bf16")
DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[PRECISION]
FLOATS = {"bf16": PRECISION == "bf16", "fp16": PRECISION == "fp16", "params_dtype": DTYPE}
DISTRIBUTED = SETTINGS.get("distributed", False)
DROPOUT = SETTINGS.get("dropout", 0.1)


def configuration() -> TransformerConfig:
    sizes = {
        "tensor_model_parallel_size": TP,
        "pipeline_model_parallel_size": PP,
        "expert_model_parallel_size": EP,
    }
    if EXPERTS:
        sizes |= {"num_moe_experts": EXPERTS, "moe_token_dispatcher_type": "allgather"}
    return TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        ffn_hidden_size=24,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        pipeline_dtype=DTYPE,
        finalize_model_grads_func=finalize_model_grads,
        hidden_dropout=DROPOUT,
        attention_dropout=DROPOUT,
        # kernels of CUDA's
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        **FLOATS,
        **sizes,
    )


def made() -> tuple[Any, Any, Any]:
    entry = "MASTER_PORT" not in os.environ  # not started by torchrun
    store = torch.distributed.TCPStore("localhost", 0, 1, is_master=True) if entry else None
    rank = {"store": store, "rank": 0, "world_size": 1} if entry else {}
    torch.distributed.init_process_group("gloo", **rank)
    mpu.initialize_model_parallel(TP, PP, expert_model_parallel_size=EP)
    torch.manual_seed(SETTINGS.get("seed", 1))
    model_parallel_cuda_manual_seed(SETTINGS.get("seed", 1))
    config = configuration()
    model: Any = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=config.num_moe_experts),
        VOCABULARY,
        LENGTH,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )
    if PRECISION != "fp32":
        model = Float16Module(config, model)
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=DISTRIBUTED, grad_reduce_in_fp32=True
    )
    model = DistributedDataParallel(config, ddp, model)
    model.broadcast_params()
    options = OptimizerConfig(
        lr=1e-2,
        min_lr=1e-3,
        weight_decay=0.1,
        use_distributed_optimizer=DISTRIBUTED,
        initial_loss_scale=1024.0,
        loss_scale_window=5,
        hysteresis=1,
        **FLOATS,
    )
    optimizer = get_megatron_optimizer(options, [model])
    ends = {"lr_warmup_steps": 8, "lr_decay_steps": 80, "wd_incr_steps": 80}
    scheduler = OptimizerParamScheduler(
        optimizer, 0.0, 1e-2, 1e-3, lr_decay_style="cosine", start_wd=0.1, end_wd=0.1,
        wd_incr_style="constant", **ends,
    )  # fmt: skip
    return model, optimizer, scheduler


def batches(progress: dict[str, int]) -> Iterator[torch.Tensor]:
    """Of what all ranks of a data parallel size read, this rank's rows."""
    while True:
        seed = progress["samples"] + mpu.get_data_parallel_rank() * ROWS
        rows = torch.Generator().manual_seed(seed)
        progress["samples"] += mpu.get_data_parallel_world_size() * ROWS
        yield torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=rows)


MASK = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
PLACES = torch.arange(LENGTH)[None].expand(ROWS, -1)


def forward(data: Iterator[torch.Tensor], model: Any) -> Any:
    rows = next(data)
    losses = model(rows[:, :-1], PLACES, MASK, labels=rows[:, 1:])
    # an overflow in float16, once: the scale falls, and the step is left out
    factor = 1e36 if forward.step == SETTINGS.get("overflow") else 1.0  # type: ignore[attr-defined]

    def loss_of(output: torch.Tensor) -> Any:
        loss = output.float().mean()
        record(forward.step, loss)  # type: ignore[attr-defined]
        return loss * factor, {}

    return losses, loss_of


def train(model: Any, optimizer: Any, scheduler: Any, progress: dict[str, int], save: Any) -> None:
    data, step = batches(progress), get_forward_backward_func()
    while progress["iteration"] < STEPS:
        forward.step = progress["iteration"]  # type: ignore[attr-defined]
        model.zero_grad_buffer()
        optimizer.zero_grad()
        step(
            forward_step_func=forward, data_iterator=data, model=[model], num_microbatches=2,
            seq_length=LENGTH, micro_batch_size=ROWS, forward_only=False,
        )  # fmt: skip
        maybe_kill(progress["iteration"])
        torch.distributed.barrier()  # with a killed rank, no other begins the next step
        stepped, _, _ = optimizer.step()
        if stepped:
            scheduler.step(increment=4)
        else:
            progress["skipped"] += 1
        progress["iteration"] += 1
        save(progress["iteration"])


def state(optimizer: Any) -> list[Any]:
    """What the optimizers hold, as they hold it."""
    found = []
    for inner in optimizer.chained_optimizers:
        for group in inner.optimizer.param_groups:
            for main in group["params"]:
                found += [main, sorted(inner.optimizer.state.get(main, {}).items())]
    return found


def parts_of_parameters(model: Any, optimizer: Any) -> list[Any]:
    """What this rank's optimizer has of each parameter: Megatron's name and size of all layers'
    together, where each element lies there, and main parameter and moments."""
    inner = unwrap_model(model)
    names, sharded = (
        {parameter: at for at, parameter in inner.named_parameters()},
        inner.sharded_state_dict(),
    )
    found = []
    pairs = (
        (optimizer, pair)
        for optimizer in optimizer.chained_optimizers
        for pair in mains_of(optimizer)
    )
    for only, (parameter, main) in pairs:
        entry = sharded[names[parameter]]
        boxes = entry.build() if hasattr(entry, "build") else [entry]
        places = torch.cat([places_of(box) for box in boxes])
        if DISTRIBUTED:
            here = only._get_model_param_range_map(parameter)["param"]
            places = places[here.start : here.end]
        moments = only.optimizer.state[main]
        values = torch.stack([main, moments["exp_avg"], moments["exp_avg_sq"]]).detach()
        found.append((entry.key, math.prod(boxes[0].global_shape), places, values.flatten(1)))
    return found


def mains_of(only: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The parameters of an optimizer, each with what is changed in its place."""
    if not DISTRIBUTED:
        pairs = [(only.float16_groups, only.fp32_from_float16_groups)]
    else:
        pairs = [
            (only.model_float16_groups, only.shard_fp32_from_float16_groups),
            (only.model_fp32_groups, only.shard_fp32_groups),
        ]
    for models, mains in pairs:
        for group, own in zip(models, mains, strict=True):
            yield from zip(group, own, strict=True)


def places_of(box: Any) -> torch.Tensor:
    sizes = (*[1] * box.prepend_axis_num, *box.local_shape)
    where = tuple(slice(a, a + n) for a, n in zip(box.global_offset, sizes, strict=True))
    return torch.arange(math.prod(box.global_shape)).view(box.global_shape)[where].flatten()


def own_checkpoint(parts: Any, progress: dict[str, int], *, load: bool) -> None:
    """Save by Megatron's own checkpoint, or load it, in whatever layout it was saved."""
    model, optimizer, scheduler = parts
    inner, path = unwrap_model(model), str(OUT.parent / "own")
    weights = inner.sharded_state_dict()
    metadata = {"distrib_optim_sharding_type": "fully_reshardable"}
    moments = optimizer.sharded_state_dict(weights, is_loading=load, metadata=metadata)
    rest = {"scheduler": scheduler.state_dict(), "progress": progress}
    if not load:
        Path(path).mkdir(exist_ok=True)
        dist_checkpointing.save({"model": weights, "optimizer": moments, **rest}, path)
        return
    read = dist_checkpointing.load({"model": weights, "optimizer": moments}, path)
    inner.load_state_dict(read["model"])
    optimizer.load_state_dict(read["optimizer"])
    scheduler.load_state_dict(read["scheduler"])
    progress.update(read["progress"])


@dataclass
class TrainState:
    """As Megatron-Bridge has it."""

    step: int = 0
    consumed_train_samples: int = 0
    skipped_train_samples: int = 0
    floating_point_operations_so_far: float = 0.0

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: torch.tensor(value) for name, value in vars(self).items()}

    def load_state_dict(self, kept: dict[str, torch.Tensor]) -> None:
        vars(self).update({name: value.item() for name, value in kept.items()})


class AsBridge:
    """Calls a checkpoint manager when and with what Megatron-Bridge's setup() and train() do."""

    def __init__(self, parts: Any, progress: dict[str, int]) -> None:
        model, self._optimizer, self._scheduler = parts
        self._model, self._progress = [model], progress
        none = {"load": None, "pretrained_checkpoint": None, "custom_manager_class": None}
        self.config = SimpleNamespace(save=str(OUT), **none)
        cfg = SimpleNamespace(
            checkpoint=self.config,
            dist=SimpleNamespace(use_decentralized_pg=SETTINGS.get("decentralized", False)),
            dataset=SimpleNamespace(),
        )
        self.state = SimpleNamespace(cfg=cfg, train_state=TrainState())
        init_num_microbatches_calculator(RANK, None, 4, ROWS, 1)
        manage(self.config)
        self.manager: Any = pkgutil.resolve_name(self.config.custom_manager_class)(self.config)
        inspect.signature(self.manager.save).bind(None, None)
        context = self.manager.checkpointing_context
        if context["local_checkpoint_manager"].find_latest() != -1 and not SETTINGS.get("peft"):
            context = self._context(strict=True, skip_load_to_model_and_opt=False)
            step, flops = self.manager.load(context)
            counts = self.state.train_state
            assert (step, flops) == (counts.step, 10 * step)
            progress |= {
                "iteration": step,
                "samples": counts.consumed_train_samples,
                "skipped": counts.skipped_train_samples,
            }

    def _context(self, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(
            state=self.state, model=self._model, optimizer=self._optimizer,
            opt_param_scheduler=self._scheduler, pg_collection=None, module_name=None, **options,
        )  # fmt: skip

    def save(self, step: int) -> None:
        counts = self.state.train_state
        counts.step, counts.consumed_train_samples = step, self._progress["samples"]
        counts.skipped_train_samples = self._progress["skipped"]
        flops = {"num_floating_point_operations_so_far": 10 * step}
        self.manager.save(
            self._context(**flops, train_data_iterator=None, non_persistent_ckpt=False), None
        )
        self.manager.finalize_async_saves(state=self.state, blocking=False)

    def end(self) -> None:
        for _ in range(2):  # in train(), and in pretrain()
            self.manager.finalize_async_saves(state=self.state, blocking=True, terminate=True)


def refusals() -> None:
    """What components() says of trainings that keepstep cannot keep; it goes into OUT."""
    model, optimizer, _ = parts = made()
    config, messages = unwrap_model(model).config, {}
    for name, place, attribute, value in (
        ("fsdp", model.ddp_config, "use_megatron_fsdp", True),
        ("fp8", config, "fp8", "hybrid"),
        ("hook", DistributedOptimizer, "_get_model_param_range_map", None),
    ):
        before = getattr(place, attribute)
        if value is None:
            delattr(place, attribute)
        else:
            setattr(place, attribute, value)
        messages[name] = refusal([model], optimizer)
        setattr(place, attribute, before)
    messages["bare model"] = refusal([unwrap_model(model)], optimizer)
    for name in ("decentralized", "peft"):
        SETTINGS[name] = True
        try:
            AsBridge(parts, {"iteration": 1, "samples": 0, "skipped": 0}).save(1)
        except keepstep.UsageError as error:
            messages[name] = str(error)
        del SETTINGS[name]
        destroy_num_microbatches_calculator()
    (OUT / "refusals").write_text(json.dumps(messages))


def refusal(chunks: Any, optimizer: Any) -> str:
    try:
        return f"taken: {sorted(components(chunks, optimizer))}"
    except keepstep.UsageError as error:
        return str(error)


def main() -> None:
    (OUT / f"losses-{RANK}").touch()  # a stage that is not the last has none
    model, optimizer, scheduler = parts = made()
    progress = {"iteration": 0, "samples": 0, "skipped": 0}
    checkpointer, save = None, lambda _: None
    if not SETTINGS.get("bare") and not SETTINGS.get("bridge"):
        kept = components([model], optimizer, scheduler)
        checkpointer = keepstep.Checkpointer({**kept, "progress": progress})
        try:
            checkpointer.restore()
        except keepstep.MismatchError as error:
            (OUT / f"refused-{RANK}").write_text(str(error))
            return
        save = checkpointer.save
    elif SETTINGS.get("own"):
        own_checkpoint(parts, progress, load=True)
    elif SETTINGS.get("bridge"):
        bridge = AsBridge(parts, progress)
        save = bridge.save
    if progress["iteration"]:
        found = [list(model.parameters()), state(optimizer)]
        (OUT / f"restored-{RANK}").write_text(digest(found))
    if torch.distributed.get_world_size() == 1:
        named = unwrap_model(model).sharded_state_dict(metadata={"non_homogeneous_layers": True})
        weights = {
            value.key: value.data
            for value in named.values()
            if isinstance(value.data, torch.Tensor)
        }
        torch.save(weights, OUT / "weights.pt")
    if progress["iteration"]:
        torch.save(parts_of_parameters(model, optimizer), OUT / f"began-with-{RANK}.pt")
    train(model, optimizer, scheduler, progress, save)
    if SETTINGS.get("bridge"):
        bridge.end()
    if checkpointer is not None:
        checkpointer.close()
        if SETTINGS.get("keep_own"):
            own_checkpoint(parts, progress, load=False)
    if DISTRIBUTED or PRECISION == "bf16":
        torch.save(parts_of_parameters(model, optimizer), OUT / f"ended-with-{RANK}.pt")
    write(
        {
            "weights": digest(list(model.parameters())),
            "optimizer": digest(state(optimizer)),
            "progress": progress,
            "scale": optimizer.get_loss_scale().item(),
            "schedule": [scheduler.state_dict(), [group["lr"] for group in optimizer.param_groups]],
            "random": [random_states(), digest(get_cuda_rng_tracker().get_states())],
        }
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    refusals() if SETTINGS.get("refusals") else main()
