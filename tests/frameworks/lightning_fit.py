"""A tiny training with Lightning: `python lightning_fit.py OUT SETTINGS`; as trainer.py."""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanSquaredError

from tests.frameworks.script import (
    OUT,
    RANK,
    SETTINGS,
    digest,
    divided,
    maybe_kill,
    random_states,
    record,
    write,
)

ROWS = 60
lightning: Any = importlib.import_module(SETTINGS.get("package", "lightning.pytorch"))


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, at: int) -> torch.Tensor:
        row = torch.randn(8, generator=torch.Generator().manual_seed(at))
        # in the training process such draws are kept, too
        return row + 0.1 * torch.randn(8) if SETTINGS.get("augment") else row


class Stream(IterableDataset[Any]):
    """The same, of a length that nobody knows."""

    def __iter__(self) -> Any:
        rows = Rows()
        return (rows[int(at)] for at in torch.randperm(ROWS))


class Data(lightning.LightningDataModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def state_dict(self) -> dict[str, Any]:
        return {"made": self.made}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.made = state["made"]

    def train_dataloader(self) -> Any:
        kind: Any = StatefulDataLoader if SETTINGS.get("stateful") else DataLoader
        if SETTINGS.get("stream"):
            return kind(Stream(), batch_size=4)
        workers: dict[str, Any] = {"num_workers": SETTINGS.get("workers", 0)}
        if SETTINGS.get("persistent"):
            workers["persistent_workers"] = True
        if SETTINGS.get("generator"):
            workers["generator"] = torch.Generator().manual_seed(7)
        first = kind(Rows(), batch_size=4, shuffle=True, **workers)
        if short := SETTINGS.get("second"):
            rows = torch.utils.data.Subset(Rows(), range(4 * short))
            return [first, DataLoader(rows, batch_size=4, shuffle=True)]
        return first

    def val_dataloader(self) -> Any:
        workers: dict[str, Any] = {}
        if SETTINGS.get("persistent"):
            workers = {"num_workers": 1, "persistent_workers": True}
        return DataLoader(Rows(), batch_size=20, **workers)


class Model(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 8)
        )
        self.error = MeanSquaredError()

    def training_step(self, batch: Any, at: int) -> torch.Tensor:
        if isinstance(batch, list):
            batch = torch.cat(batch)
        output = self.net(batch)
        loss = ((output - batch) ** 2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        if at < 3:
            self.log("first", loss, on_epoch=True, on_step=False)
        self.error(output, batch)
        self.log("error", self.error, on_epoch=True, on_step=False)
        record(self.trainer.global_step, loss)
        return loss

    def on_after_backward(self) -> None:
        if not self.trainer.fit_loop._should_accumulate():
            maybe_kill(self.trainer.global_step)

    def validation_step(self, batch: torch.Tensor, at: int) -> None:
        self.log("val", ((self.net(batch) - batch) ** 2).mean() + 0 * torch.rand(()))

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.datamodule is not None:
            self.trainer.datamodule.made += 1

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if SETTINGS.get("plateau"):
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "val"},
            }
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return [optimizer], [{"scheduler": cosine, "interval": "step"}]


class Sharded(Model):
    """By FSDP2."""

    def configure_model(self) -> None:
        for module in (self.net[0], self.net[3], self.net):
            fully_shard(module, mesh=self.device_mesh["data_parallel"])


class Tensors(Model):
    """Divided by tensors; what is between the layers is whole."""

    def configure_model(self) -> None:
        plan = {
            "0": ColwiseParallel(output_layouts=Replicate()),
            "3": RowwiseParallel(input_layouts=Replicate()),
        }
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)


class Two(Model):
    """Two optimizers, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, at: int) -> None:
        for optimizer in self.optimizers():
            loss = ((self.net(batch) - batch) ** 2).mean()
            record(self.trainer.global_step, loss)
            optimizer.zero_grad()
            self.manual_backward(loss)
            maybe_kill(self.trainer.global_step)
            optimizer.step()
        self.log("loss", loss, on_step=True, on_epoch=True)

    def on_after_backward(self) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.AdamW(self.net[0].parameters(), lr=1e-2),
            torch.optim.SGD(self.net[3].parameters(), lr=1e-2, momentum=0.9),
        ]


class Backbone(Model):
    """Its first layers are frozen when training begins."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.net = self.net, nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))

    def training_step(self, batch: torch.Tensor, at: int) -> torch.Tensor:
        loss = ((self.net(self.backbone(batch)) - batch) ** 2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        record(self.trainer.global_step, loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(
            [parameter for parameter in self.parameters() if parameter.requires_grad], lr=1e-2
        )


class Bias(lightning.Callback):  # type: ignore[misc]
    """Adds a group on its way. What its state says, `on_fit_start` makes again."""

    def __init__(self) -> None:
        self.added = False

    def state_dict(self) -> dict[str, Any]:
        return {"added": self.added}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.added = state["added"]

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.net[0].bias.requires_grad = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.added:
            self._add(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            self.added = True
            self._add(trainer, pl_module)

    def _add(self, trainer: Any, pl_module: Any) -> None:
        bias = pl_module.net[0].bias
        bias.requires_grad = True
        trainer.optimizers[0].add_param_group({"params": [bias], "lr": 1e-3})


class Log(lightning.loggers.logger.Logger):  # type: ignore[misc]
    """Every line of every life."""

    name, version = "log", "0"

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        line = json.dumps(
            {"step": step, **{key: float(metric).hex() for key, metric in metrics.items()}}
        )
        with (OUT / f"log-{RANK}").open("a") as file:
            file.write(line + "\n")


class Count(lightning.Callback):  # type: ignore[misc]
    """Something with a state."""

    def __init__(self) -> None:
        self.steps = self.epochs = self.validations = 0

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("steps", "epochs", "validations")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1

    def on_train_epoch_start(self, *_: Any) -> None:
        self.epochs += 1
        torch.rand(())

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self.validations += not trainer.sanity_checking


def by_zero(config: dict[str, Any]) -> Any:
    """DeepSpeed's strategy, which takes a GPU only."""
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None

    class OnCpu(lightning.strategies.DeepSpeedStrategy):  # type: ignore[misc]
        root_device = torch.device("cpu", 0)

        def setup_environment(self) -> None:
            super(lightning.strategies.DDPStrategy, self).setup_environment()
            self.setup_distributed()

        def setup_distributed(self) -> None:
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    return OnCpu(config={"zero_allow_untested_optimizer": True, **config})


def strategy(ranks: int) -> Any:
    if zero := SETTINGS.get("zero"):
        return by_zero(zero)
    if SETTINGS.get("fsdp2") or SETTINGS.get("tensors"):
        sizes = (ranks, 1) if SETTINGS.get("fsdp2") else (1, ranks)
        return lightning.strategies.ModelParallelStrategy(*sizes)
    return "ddp" if ranks > 1 else "auto"


def main() -> None:
    lightning.seed_everything(0, verbose=False)
    count = Count()
    callbacks: list[Any] = [count]
    if SETTINGS.get("patience"):
        callbacks.append(lightning.callbacks.EarlyStopping("val", patience=SETTINGS["patience"]))
    if SETTINGS.get("average"):
        callbacks.append(lightning.callbacks.EMAWeightAveraging(decay=0.9))
    if SETTINGS.get("tuned"):
        callbacks.append(lightning.callbacks.LearningRateFinder())
    if SETTINGS.get("finetune") == "bias":
        callbacks.append(Bias())
    elif SETTINGS.get("finetune"):
        callbacks.append(
            lightning.callbacks.BackboneFinetuning(
                unfreeze_backbone_at_epoch=1, backbone_initial_ratio_lr=0.1, should_align=False
            )
        )
    if not SETTINGS.get("bare"):
        from keepstep.integrations.lightning import KeepstepCallback

        callbacks.append(KeepstepCallback())
    if every := SETTINGS.get("checkpoints"):
        folder, options_of = str(OUT / "own"), {"save_top_k": -1, "every_n_train_steps": every}
        callbacks.append(lightning.callbacks.ModelCheckpoint(folder, **options_of))
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    options: dict[str, Any] = {
        "max_epochs": 2,
        "log_every_n_steps": 3,
        "enable_checkpointing": bool(SETTINGS.get("checkpoints")),
        **SETTINGS.get("arguments", {}),
    }
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy(ranks),
        logger=[Log()],
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        default_root_dir=str(OUT),
        **options,
    )
    kinds = {"two": Two, "finetune": Backbone, "fsdp2": Sharded, "tensors": Tensors}
    kind = next((kinds[setting] for setting in kinds if SETTINGS.get(setting)), Model)
    model = kind()
    data = Data()
    trainer.fit(model, datamodule=data, ckpt_path=SETTINGS.get("resume"))
    if SETTINGS.get("checkpoint"):
        trainer.save_checkpoint(OUT / "lightning.ckpt")
    (OUT / f"groups-{RANK}").write_text(
        json.dumps([len(group["params"]) for group in trainer.optimizers[0].param_groups])
    )
    metrics = {name: float(metric).hex() for name, metric in trainer.callback_metrics.items()}
    state = {
        "weights": digest(model.state_dict()),
        "optimizer": digest([optimizer.state_dict() for optimizer in trainer.optimizers]),
    }
    if SETTINGS.get("zero"):
        state = divided(trainer.strategy.model)
    result = {
        **state,
        "sharded": any(isinstance(parameter, DTensor) for parameter in model.parameters()),
        "progress": [trainer.global_step, trainer.current_epoch],
        "metrics": metrics,
        "callbacks": count.state_dict(),
        "datamodule": data.made,
        "schedule": [[group["lr"] for group in each.param_groups] for each in trainer.optimizers],
        "random": random_states(),
    }
    write(result)


if __name__ == "__main__":
    main()
