"""Train a small byte-level GPT on the Python standard library, and keep every step.

This file is meant to be copied. It runs as one process, or under torchrun as several (DDP):

    python examples/train_gpt.py --no-keepstep                            # plain PyTorch
    keepstep run -- python examples/train_gpt.py                          # every step is kept
    keepstep run --restarts 3 -- torchrun --nproc-per-node 2 examples/train_gpt.py

Kill it at any time and run the same command again: it goes on after the last finished step. On CPU
its losses are bit-equal to those of a run that was never killed. The lines marked "keepstep" are
all that keepstep adds. It asks one thing of the script: `state` below must hold everything that
the next step depends on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import keepstep  # keepstep

VOCABULARY = 256  # bytes
WARMUP_STEPS = 10
PEAK_LR = 4e-3


# --- model -----------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer block: causal self-attention and an MLP, both behind a LayerNorm."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        return x + self.dropout(self.contract(functional.gelu(self.expand(self.norm_mlp(x)))))

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.projection(mixed.transpose(1, 2).reshape(x.shape))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out. Input embedding and output layer are tied."""

    def __init__(self, *, layers: int, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        heads = max(1, width // 32)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self._initialise)
        self.head.weight = self.embedding.weight

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.blocks(self.embedding(inputs) + self.position(positions))
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


# --- data ------------------------------------------------------------------------------------


def standard_library_text() -> Tensor:
    """The top-level modules of this Python's standard library as one uint8 tensor."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"".join(module.read_bytes() for module in modules)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Random windows of the text. A batch depends only on its index and on the fields below. So
    one restored number restores the data order: no batch is repeated, and none is left out."""

    text: Tensor
    size: int
    context: int
    seed: int
    rank: int
    world: int

    def __call__(self, index: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets), both int64 of shape (size, context); targets are one byte ahead."""
        number = self.seed * 1_000_003 + index * self.world + self.rank
        generator = torch.Generator().manual_seed(number % 2**32)  # on CPU it uses 32 bits
        last = len(self.text) - self.context - 1
        starts = torch.randint(last, (self.size, 1), generator=generator)
        windows = self.text[starts + torch.arange(self.context + 1)].long()
        return windows[:, :-1], windows[:, 1:]


# --- rank, world and device ---------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Which process this is: as torchrun's environment says, or the only one."""

    rank: int
    world: int
    device: torch.device


@contextmanager
def joined_processes() -> Iterator[Place]:
    """Join torchrun's process group if it has several processes: NCCL with GPUs, else gloo."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else "cpu"
    if gpu:
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if gpu else "gloo")
    yield Place(rank, world, torch.device(device))
    if world > 1:  # not in a `finally`: after an error, the other ranks may be gone
        dist.barrier()
        dist.destroy_process_group()


def mean_over_ranks(loss: Tensor, world: int) -> float:
    """The mean loss over the batches of all ranks; the same number on every rank."""
    total = loss.detach().clone()
    if world > 1:
        dist.all_reduce(total)
    return total.item() / world


class Log:
    """Appends one JSON line per event to a file, or to standard output if the path is `-`. Only
    rank 0 writes. A restarted run appends to the same file."""

    def __init__(self, path: Path | None, rank: int) -> None:
        self._file: TextIO | None = None
        if path and rank == 0:
            self._file = sys.stdout if str(path) == "-" else path.open("a", buffering=1)

    def write(self, **event: Any) -> None:
        if self._file:
            self._file.write(json.dumps({**event, "wall": time.time()}) + "\n")
            self._file.flush()


# --- training --------------------------------------------------------------------------------


def learning_rate(steps: int) -> Any:
    """A function from the step to a factor of the peak rate: the product of a linear warm-up and
    of half a cosine, which falls from 1 to a tenth."""

    def factor(step: int) -> float:
        done = min(1.0, step / steps)
        return min(1.0, (step + 1) / WARMUP_STEPS) * (0.55 + 0.45 * math.cos(math.pi * done))

    return factor


def train(args: argparse.Namespace, place: Place) -> None:
    torch.manual_seed(args.seed)  # the same weights on every rank ...
    model: nn.Module = GPT(
        layers=args.layers, width=args.width, context=args.context, dropout=args.dropout
    )
    model.to(place.device)
    if place.world > 1:
        model = DistributedDataParallel(model)
    torch.manual_seed(args.seed + 1 + place.rank)  # ... but other dropout masks

    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate(args.steps))
    progress = {"batches": 0}
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "progress": progress}
    batches = Batches(
        text=standard_library_text(),
        size=args.batch,
        context=args.context,
        seed=args.seed,
        rank=place.rank,
        world=place.world,
    )

    checkpointer = None if args.no_keepstep else keepstep.Checkpointer(state)  # keepstep
    at = checkpointer.restore() if checkpointer else None  # keepstep
    first = at.step + 1 if at else 0  # keepstep

    log = Log(args.log_file, place.rank)
    log.write(first=first, tier=at and str(at.tier), restore_s=at and at.seconds, pid=os.getpid())
    for step in range(first, args.steps):
        started = time.perf_counter()
        inputs, targets = batches(progress["batches"])
        loss = model(inputs.to(place.device), targets.to(place.device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        progress["batches"] += 1
        if checkpointer:
            checkpointer.save(step)  # keepstep: after all that changes the state; returns at once

        time.sleep(max(0.0, args.step_seconds - (time.perf_counter() - started)))
        value = mean_over_ranks(loss, place.world)
        seconds = time.perf_counter() - started
        log.write(step=step, loss=value, loss_hex=value.hex(), seconds=seconds)
        if place.rank == 0 and step % 10 == 0:
            print(f"step {step:5d}  loss {value:.4f}  {1e3 * seconds:6.1f} ms", flush=True)
    if checkpointer:
        checkpointer.close()  # keepstep: makes the last step durable, or raises an error


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=24, help="windows per rank and step")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--context", type=int, default=64, help="bytes per window")
    # dropout draws from torch's generator in every step. The losses can only be bit-equal because
    # keepstep restores the generator, too.
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-file", type=Path, help="append a JSON line a step; - prints")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="least time of a step")
    parser.add_argument("--no-keepstep", action="store_true", help="plain PyTorch, for comparison")
    return parser.parse_args()


if __name__ == "__main__":
    # By default the first process of a container ignores SIGTERM, so a deleted pod would wait for
    # the end of its grace period. It is safe to exit at once: the sidecar has the saved steps.
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    with joined_processes() as here:
        train(parse(), here)
    # DDP keeps gloo's threads until the interpreter shuts down. A thread that releases the last
    # loss at that moment may abort the process. All files are written: exit without the shutdown.
    sys.stdout.flush()
    os._exit(0)
