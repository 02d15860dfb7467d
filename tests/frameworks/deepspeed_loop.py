"""A tiny loop with DeepSpeed's engine: `python deepspeed_loop.py OUT SETTINGS`; as trainer.py.

Its accelerator is the CPU (DS_ACCELERATOR), on which torch can
compute in float16 though DeepSpeed does not think so.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import keepstep
from keepstep.integrations.deepspeed import components, stepped
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

ROWS, EPOCHS = 56, SETTINGS.get("epochs", 2)
SIZES = 272, 25
"""Of the groups of parameters that are trained."""
DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, at: int) -> torch.Tensor:
        row = torch.randn(8, generator=torch.Generator().manual_seed(at))
        # a gradient of this one is beyond float16, whatever its scale
        return row * 1e4 if at == SETTINGS.get("overflow") else row


class Scale(nn.Module):
    """A buffer that the forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += batch.detach().float().mean(0)
        return batch + 0.01 * self.seen.to(batch.dtype)


def net() -> nn.Module:
    """Of odd sizes, so that partitions are padded and cut through parameters; one is frozen."""
    layers = (nn.Linear(8, 17), nn.LayerNorm(17, bias=False), nn.Dropout(0.2), nn.Linear(17, 8))
    made = nn.Sequential(Scale(), *layers)
    made[1].bias.requires_grad_(False)
    return made


def config() -> dict[str, Any]:
    precision = SETTINGS.get("precision", "bf16")
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": SETTINGS.get("accumulation", 1),
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": SETTINGS["stage"], **SETTINGS.get("zero", {})},
        **SETTINGS.get("config", {}),
    }
    if precision != "fp32":
        found[precision] = {"enabled": True}
    if precision == "fp16":
        found[precision] |= {"initial_scale_power": 10, "loss_scale_window": 5, "hysteresis": 1}
    return found


def began() -> None:
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    type(get_accelerator()).is_fp16_supported = lambda _: True
    if "MASTER_PORT" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        store = torch.distributed.TCPStore("localhost", 0, 1, is_master=True)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def made() -> Any:
    began()
    torch.manual_seed(SETTINGS.get("seed", 0))
    model = net()
    decayed = [
        parameter
        for parameter in model.parameters()
        if parameter.dim() > 1 and parameter.requires_grad
    ]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    kind = deepspeed.ops.adam.DeepSpeedCPUAdam if SETTINGS.get("own") else torch.optim.AdamW
    optimizer = kind(groups, lr=1e-2)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=config(),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
    )
    return engine


def batches() -> keepstep.Batches:
    sampler = DistributedSampler(Rows(), WORLD, RANK, shuffle=True) if WORLD > 1 else None
    options: dict[str, Any] = {"shuffle": sampler is None, "sampler": sampler}
    return keepstep.Batches(
        DataLoader(Rows(), batch_size=4, num_workers=SETTINGS.get("workers", 0), **options)
    )


def train(engine: Any, left: keepstep.Batches, checkpointer: Any) -> None:
    dtype = DTYPE[SETTINGS.get("precision", "bf16")]
    for _ in range(left.epoch, EPOCHS):
        for batch in left.loader if checkpointer is None else left:
            target = batch.to(dtype)
            loss = ((engine(target) - target) ** 2).float().mean()
            record(engine.global_steps, loss)
            engine.backward(loss)
            if engine.is_gradient_accumulation_boundary():
                maybe_kill(engine.global_steps)
            engine.step()
            if checkpointer is not None and (stepped(engine) or SETTINGS.get("always")):
                checkpointer.save(engine.global_steps)


def masters(engine: Any) -> list[torch.Tensor]:
    """Weights and moments in full precision, of all ranks and without padding."""
    keys = ("exp_avg", "exp_avg_sq")
    if SETTINGS["stage"] == 3:
        trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
        moments = [
            safe_get_full_optimizer_state(parameter, key) for parameter in trained for key in keys
        ]
        return [safe_get_full_fp32_param(parameter) for parameter in trained] + moments
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    if not SETTINGS["stage"]:
        found = [param for group in inner.param_groups for param in group["params"]]
        return found + [inner.state[parameter][key] for parameter in found for key in keys]
    found = []
    for group, size in zip(inner.param_groups, SIZES, strict=True):
        (master,) = group["params"]
        found += [whole(tensor, size) for tensor in (master, *map(inner.state[master].get, keys))]
    return found


def whole(partition: torch.Tensor, size: int) -> torch.Tensor:
    parts = [torch.empty_like(partition) for _ in range(WORLD)]
    torch.distributed.all_gather(parts, partition.detach())
    return torch.cat(parts)[:size]


def weights(engine: Any) -> list[torch.Tensor]:
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        parameters = [
            parameter.detach().float().clone() for parameter in engine.module.parameters()
        ]
    return parameters + [buffer.float() for buffer in engine.module.buffers()]


def refusals() -> None:
    """Engines that cannot be kept, one after the other; what is said goes into OUT."""
    began()
    deepspeed.init_distributed("gloo")
    plain = {"model": net(), "optimizer": torch.optim.AdamW, "config": config()}
    offload = {"stage": 3, "offload_param": {"device": "cpu"}}
    pipeline = PipelineModule(layers=[nn.Linear(8, 8)], num_stages=1)
    engines = {
        "offload": {**plain, "config": config() | {"zero_optimization": offload}},
        "data": {**plain, "config": config() | {"data_efficiency": {"enabled": True}}},
        "pipeline": {**plain, "model": pipeline},
        "no optimizer": {"model": nn.Linear(8, 8), "config": {"train_batch_size": 4}},
    }
    messages = {name: refusal(options) for name, options in engines.items()}
    (OUT / "refusals").write_text(json.dumps(messages))


def refusal(options: dict[str, Any]) -> str:
    engine, *_ = deepspeed.initialize(**options)
    try:
        return f"taken: {sorted(components(engine))}"
    except keepstep.UsageError as error:
        return str(error)


def main() -> None:
    engine = made()
    left, checkpointer = batches(), None
    if not SETTINGS.get("bare"):
        checkpointer = keepstep.Checkpointer(components(engine), batches=left)
        try:
            at = checkpointer.restore()
        except keepstep.MismatchError as error:
            (OUT / f"refused-{RANK}").write_text(str(error))
            return
        if at is not None:
            (OUT / f"restored-{RANK}").write_text(digest(masters(engine)))
            (OUT / f"weights-{RANK}").write_text(digest(weights(engine)))
    train(engine, left, checkpointer)
    if checkpointer is not None:
        checkpointer.close()
    if SETTINGS.get("stock"):
        engine.save_16bit_model(str(OUT), "stock.bin")
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    write(
        {
            "weights": digest(weights(engine)),
            "masters": (both := digest(masters(engine))),
            "optimizer": both,
            "progress": [
                engine.global_steps, engine.micro_steps, engine.skipped_steps, engine.global_samples
            ],
            "scale": None if scaler is None else scaler.cur_scale,
            "schedule": engine.get_lr(),
            "random": random_states(),
        }
    )  # fmt: skip
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    refusals() if SETTINGS.get("refusals") else main()
