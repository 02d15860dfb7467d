"""A tiny loop of one's own: `python own_loop.py OUT SETTINGS`; as trainer.py otherwise."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import keepstep
from keepstep import Batches
from tests.frameworks.script import (
    SETTINGS,
    digest,
    divided,
    maybe_kill,
    random_states,
    record,
    write,
)

ROWS = 60
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
ACCUMULATE = SETTINGS.get("accumulate", 1)
"""Micro-batches of a step; also of two epochs."""


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, at: int) -> torch.Tensor:
        row = torch.randn(8, generator=torch.Generator().manual_seed(at))
        return row + 0.1 * torch.randn(8) if SETTINGS.get("augment") else row


def loader() -> Any:
    kind: Any = DataLoader
    if SETTINGS.get("stateful"):
        from torchdata.stateful_dataloader import StatefulDataLoader

        kind = StatefulDataLoader
    workers: dict[str, Any] = {"num_workers": SETTINGS.get("workers", 0)}
    if SETTINGS.get("persistent"):
        workers["persistent_workers"] = True
    sampler = SETTINGS.get("sampler") and DistributedSampler(Rows())
    return kind(Rows(), batch_size=4, shuffle=not sampler, sampler=sampler or None, **workers)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def left(batches: Batches) -> Any:
    """Undisturbed: the loader alone."""
    return batches.loader if SETTINGS.get("bare") else batches


def on_fabric() -> tuple[Any, Any]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp" if RANKS > 1 else "auto")
    fabric.launch()
    net, plain = made()
    model, optimizer = fabric.setup(net, plain)
    batches = Batches(fabric.setup_dataloaders(loader()))
    progress = {"step": 0}
    checkpointer = None
    if not SETTINGS.get("bare"):
        checkpointer = keepstep.Checkpointer(
            model=model, optimizer=optimizer, batches=batches, progress=progress
        )
        checkpointer.restore()
    done = ACCUMULATE * progress["step"]
    for _ in range(batches.epoch, 2):
        for batch in left(batches):
            done += 1
            with fabric.no_backward_sync(model, enabled=done % ACCUMULATE > 0):
                loss = ((model(batch) - batch) ** 2).mean()
                record(progress["step"], loss)
                fabric.backward(loss / ACCUMULATE)
            if done % ACCUMULATE:
                continue
            maybe_kill(progress["step"])
            optimizer.step()
            optimizer.zero_grad()
            progress["step"] += 1
            if checkpointer is not None:
                checkpointer.save(progress["step"])
    if checkpointer is not None:
        checkpointer.close()
    return net, {"progress": progress, "optimizer": digest(optimizer.state_dict())}


def by_zero(stage: int) -> Any:
    from accelerate.utils import DeepSpeedPlugin

    from tests.frameworks import accelerate_on_cpu  # noqa: F401

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage},
    }
    return DeepSpeedPlugin(hf_ds_config=config)


def by_fsdp2() -> Any:
    from accelerate.utils import FullyShardedDataParallelPlugin

    from tests.frameworks import accelerate_on_cpu  # noqa: F401

    return FullyShardedDataParallelPlugin(fsdp_version=2)


def on_accelerate() -> tuple[Any, Any]:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    config = DataLoaderConfiguration(
        use_seedable_sampler=SETTINGS.get("seedable", False),
        use_stateful_dataloader=SETTINGS.get("stateful", False),
        dispatch_batches=SETTINGS.get("dispatched"),
    )
    options: dict[str, Any] = {"cpu": True}
    if stage := SETTINGS.get("zero"):
        options = {"deepspeed_plugin": by_zero(stage)}
    elif SETTINGS.get("fsdp2"):
        options = {"fsdp_plugin": by_fsdp2()}
    accelerator = Accelerator(dataloader_config=config, gradient_accumulation_steps=2, **options)
    net, plain = made()
    if stage:  # whose engine steps within `backward`
        plain.register_step_pre_hook(lambda *_: maybe_kill(progress["step"]))
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(plain, 20)
    model, optimizer, scheduler, loading = accelerator.prepare(net, plain, cosine, loader())
    batches = Batches(loading)
    progress = {"step": 0}
    checkpointer = None
    if not SETTINGS.get("bare"):
        components = {"model": model, "optimizer": optimizer}
        if stage:
            from keepstep.integrations import deepspeed

            components = deepspeed.components(model)
        checkpointer = keepstep.Checkpointer(
            {"scheduler": scheduler, **components, "batches": batches, "progress": progress}
        )
        checkpointer.restore()
    for _ in range(batches.epoch, 2):
        for batch in left(batches):
            with accelerator.accumulate(model):
                loss = ((model(batch) - batch) ** 2).mean()
                record(progress["step"], loss)
                accelerator.backward(loss)
                if accelerator.sync_gradients and not stage:
                    maybe_kill(progress["step"])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                progress["step"] += 1
                if checkpointer is not None:
                    checkpointer.save(progress["step"])
    if checkpointer is not None:
        checkpointer.close()
    return net, {
        "progress": progress,
        **(divided(model) if stage else {"optimizer": digest(optimizer.state_dict())}),
        "schedule": scheduler.get_last_lr(),
    }


def on_ignite() -> tuple[Any, Any]:
    from ignite.engine import Engine, Events

    net, optimizer = made()
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    model = net
    if RANKS > 1:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(net)

    def update(engine: Any, batch: torch.Tensor) -> float:
        step, left = divmod(engine.state.iteration, ACCUMULATE)
        loss = ((model(batch) - batch) ** 2).mean()
        record((engine.state.iteration - 1) // ACCUMULATE, loss)
        (loss / ACCUMULATE).backward()
        if not left:
            maybe_kill(step - 1)
            optimizer.step()
            cosine.step()
            optimizer.zero_grad()
        return loss.item()

    trainer, data = Engine(update), loader()
    if isinstance(sampler := data.sampler, DistributedSampler):
        trainer.add_event_handler(
            Events.EPOCH_STARTED, lambda: sampler.set_epoch(trainer.state.epoch)
        )
    if not SETTINGS.get("bare"):
        data = Batches(data)
        checkpointer = keepstep.Checkpointer(
            model=net, optimizer=optimizer, scheduler=cosine, batches=data, trainer=trainer
        )
        checkpointer.restore()
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED(every=ACCUMULATE),
            lambda: checkpointer.save(trainer.state.iteration // ACCUMULATE),
        )
    if trainer.state.iteration < 2 * len(data):
        trainer.run(data, max_epochs=2)
    state = trainer.state
    if not SETTINGS.get("bare"):
        checkpointer.close()
    return net, {
        "progress": [state.iteration, state.epoch],
        "optimizer": digest(optimizer.state_dict()),
        "schedule": cosine.get_last_lr(),
    }


ON = {"fabric": on_fabric, "accelerate": on_accelerate, "ignite": on_ignite}


def main() -> None:
    net, others = ON[SETTINGS["on"]]()
    weights = {} if SETTINGS.get("zero") else {"weights": digest(net.state_dict())}
    write({**weights, **others, "random": random_states()})


if __name__ == "__main__":
    main()
