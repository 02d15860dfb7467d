"""A tiny training with torchtitan's own Trainer: `python titan.py OUT [SETTINGS as JSON]`.

As `trainer.py`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

from tests.frameworks.script import OUT, SETTINGS, digest, maybe_kill, random_states, record, write
from tests.frameworks.titan_on_cpu import Trainer, metrics

# isort: split
import torch
from torch.utils.data import IterableDataset
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models import qwen3
from torchtitan.models.common import CosSinRoPE
from torchtitan.models.common.attention import ScaledDotProductAttention

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


class Attention(ScaledDotProductAttention):
    """Without torchtitan's masks, which take a GPU, or compile; with dropout."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledDotProductAttention.Config):
        pass

    def forward(self, q_BLNH: Any, k_BLNH: Any, v_BLNH: Any, **options: Any) -> Any:  # noqa: N803
        output = super().forward(q_BLNH, k_BLNH, v_BLNH, **options)
        return torch.dropout(output, 0.2, self.training)


def decoder() -> Any:
    """torchtitan's Qwen3 with experts, but small."""
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=SETTINGS.get("layers", 1), dim=WIDTH, n_heads=2, n_kv_heads=2, head_dim=8,
        moe_hidden_dim=WIDTH, num_experts=4, top_k=2, attn_backend="flex",
        moe_comm_backend="standard", rope=CosSinRoPE.Config(dim=8, max_seq_len=LENGTH, theta=1e4),
    )  # fmt: skip
    for layer in layers:
        layer.attention.inner_attention = Attention.Config()
    spec = qwen3.model_registry("debugmodel_moe")
    model = replace(spec.model, vocab_size=VOCABULARY, dim=WIDTH, layers=layers)
    model.norm.normalized_shape = model.lm_head.in_features = WIDTH
    model.lm_head.out_features = model.tok_embeddings.num_embeddings = VOCABULARY
    model.tok_embeddings.embedding_dim = WIDTH
    return replace(spec, model=model, state_dict_adapter=None)


def optimizers() -> Any:
    """Two for each part of the model."""
    groups = [
        ParamGroupConfig(pattern=pattern, optimizer_name=name, optimizer_kwargs={"lr": 1e-3})
        for pattern, name in (("norm", "Adam"), (".", "AdamW"))
    ]
    return OptimizersContainer.Config(param_groups=groups, implementation="foreach")


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
    options = {"enable": not SETTINGS.get("bare"), **SETTINGS.get("checkpoint", {})}
    manager: Any = CheckpointManager
    if not SETTINGS.get("bare"):
        manager = importlib.import_module("keepstep.integrations.torchtitan")
        manager = manager.KeepstepCheckpointManager
    return Recorded.Config(
        model_spec=decoder(),
        dump_folder=str(OUT / "titan"),
        tokenizer=Tokenizer.Config(),
        dataloader=Loader.Config(num_workers=SETTINGS.get("workers", 0)),
        loss=CrossEntropyLoss.Config(),
        optimizer=optimizers(),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=3, decay_ratio=0.8),
        training=TrainingConfig(
            local_batch_size=SETTINGS.get("batch", 2),
            global_batch_size=SETTINGS.get("global_batch", -1),
            seq_len=LENGTH,
            steps=SETTINGS.get("steps", 20),
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            **{"spmd_backend": "full_dtensor", **SETTINGS.get("parallelism", {})}
        ),
        metrics=metrics.MetricsProcessor.Config(log_freq=1),
        checkpoint=manager.Config(**options),
    ).build()


def main() -> None:
    trainer = made()
    trainer.optimizers.optimizers[0].register_step_pre_hook(trainer.killed)
    trainer.train()
    parameters = [parameter for part in trainer.model_parts for parameter in part.parameters()]
    result = {
        "divided": [len(trainer.model_parts), len(trainer.optimizers)],
        "placements": sorted({str(getattr(each, "placements", None)) for each in parameters}),
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
