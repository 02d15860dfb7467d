"""What nanoGPT's loop starts from, small."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from torch import Tensor, nn

from tests.frameworks.script import watch

COMPARED = ("raw_model", "optimizer", "iter_num", "best_val_loss", "X", "Y")
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
TEXT = torch.randint(0, 32, (400,), generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(32, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 32)

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        logits = self.head(self.block(self.tokens(ids), mask, is_causal=True))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(split: str) -> tuple[Tensor, Tensor]:
    text = TEXT[:300] if split == "train" else TEXT[300:]
    begins = torch.randint(len(text) - 8, (4,))
    return tuple(torch.stack([text[at + by : at + by + 8] for at in begins]) for by in (0, 1))


def made() -> dict[str, Any]:
    raw_model = Model()
    model: Any = raw_model
    if RANKS > 1:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(raw_model)
        torch.manual_seed(RANK)

    @torch.no_grad()
    def estimate_loss() -> dict[str, Tensor]:
        model.eval()
        losses = [raw_model(*get_batch("val"))[1] for _ in range(2)]
        model.train()
        return {"val": torch.stack(losses).mean()}

    optimizer = torch.optim.AdamW(raw_model.parameters(), lr=1e-2)
    watch(optimizer)
    if RANKS > 1:  # with a killed rank, no other begins the next step
        optimizer.register_step_pre_hook(lambda *_: torch.distributed.barrier())
    return {
        "torch": torch,
        "raw_model": raw_model,
        "model": model,
        "optimizer": optimizer,
        "scaler": torch.amp.GradScaler("cpu", enabled=RANKS == 1),
        "get_batch": get_batch,
        "estimate_loss": estimate_loss,
        "get_lr": lambda at: 1e-2 * (1 + math.cos(math.pi * at / 20)) / 2,
        "iter_num": 0,
        "max_iters": 12,
        "best_val_loss": 1e9,
        "eval_interval": 5,
        "gradient_accumulation_steps": 2,
        "grad_clip": 1.0,
        "ddp": RANKS > 1,
        "master_process": RANK == 0,
    }
