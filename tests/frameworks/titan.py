"""A tiny training with torchtitan's own Trainer: `python titan.py OUT [SETTINGS as JSON]`.

As `trainer.py`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from tests.frameworks.script import OUT, SETTINGS, digest, maybe_kill, random_states, record, write
from tests.frameworks.titan_on_cpu import Trainer, metrics

# isort: split
import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.common import Embedding, Linear
from torchtitan.protocols import BaseModel
from torchtitan.protocols.model_spec import ModelSpec

LENGTH, VOCABULARY, WIDTH = 8, 64, 16


class Rows(IterableDataset[Any]):
    """Endless text, each row from its number; a stateful source as torchtitan's own."""

    def __init__(self, first: int, stride: int) -> None:
        self.at, self.stride = first, stride

    def __iter__(self) -> Any:
        while True:
            generator = torch.Generator().manual_seed(self.at)
            ids = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=generator)
            self.at += self.stride
            yield {"input": ids[:-1]}, ids[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Loader(ParallelAwareDataloader):
    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None,
        **_: Any,
    ) -> None:
        super().__init__(
            Rows(dp_rank, dp_world_size),
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            batch_size=local_batch_size,
            num_workers=config.num_workers,
            snapshot_every_n_steps=snapshot_every_n_steps or 1,
        )


class Model(BaseModel):
    """torchtitan's own attention takes a GPU, or compiles."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        def update_from_config(self, **_: Any) -> None:
            pass

        def get_nparams_and_flops(self, model: Any, seq_len: int) -> tuple[int, int]:
            return sum(parameter.numel() for parameter in model.parameters()), 1

    def __init__(self, config: Config) -> None:
        super().__init__()
        normal = {"weight": torch.nn.init.normal_, "bias": torch.nn.init.zeros_}
        embedding = Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=normal
        )
        linear = Linear.Config(in_features=WIDTH, out_features=VOCABULARY, param_init=normal)
        self.embedding, self.head = embedding.build(), linear.build()

    def forward(self, tokens: Any, **_: Any) -> Any:
        return self.head(torch.dropout(self.embedding(tokens), 0.2, self.training))


def sharded(model: Any, *, parallel_dims: Any, **_: Any) -> Any:
    return fully_shard(model, mesh=parallel_dims.get_mesh("dp_shard"))


class Tokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Recorded(Trainer):
    """The same, which writes its losses, and is killed between backward and optimizer's step."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def forward_backward_step(self, **arguments: Any) -> Any:
        loss = super().forward_backward_step(**arguments)
        record(self.step, loss)
        return loss

    def killed(self, *_: Any) -> None:
        maybe_kill(self.step)


def made() -> Any:
    spec = ModelSpec(
        name="tiny",
        flavor="tiny",
        model=Model.Config(),
        parallelize_fn=sharded,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
    options = {"enable": not SETTINGS.get("bare"), **SETTINGS.get("checkpoint", {})}
    manager: Any = CheckpointManager
    if not SETTINGS.get("bare"):
        manager = importlib.import_module("keepstep.integrations.torchtitan")
        manager = manager.KeepstepCheckpointManager
    return Recorded.Config(
        model_spec=spec,
        dump_folder=str(OUT / "titan"),
        tokenizer=Tokenizer.Config(),
        dataloader=Loader.Config(num_workers=SETTINGS.get("workers", 0)),
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=1e-3, fused=False, foreach=True),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=3, decay_ratio=0.8),
        training=TrainingConfig(
            local_batch_size=2,
            global_batch_size=SETTINGS.get("global_batch", -1),
            seq_len=LENGTH,
            steps=SETTINGS.get("steps", 20),
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(**SETTINGS.get("parallelism", {})),
        metrics=metrics.MetricsProcessor.Config(log_freq=1),
        checkpoint=manager.Config(**options),
    ).build()


def main() -> None:
    trainer = made()
    trainer.optimizers.optimizers[0].register_step_pre_hook(trainer.killed)
    trainer.train()
    result = {
        "progress": trainer.step,
        "tokens": trainer.ntokens_seen,
        "weights": digest([part.state_dict() for part in trainer.model_parts]),
        "optimizer": digest(trainer.optimizers.state_dict()),
        "schedule": [scheduler.get_last_lr() for scheduler in trainer.lr_schedulers.schedulers],
        "random": random_states(),
    }
    trainer.close()
    write(result)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
