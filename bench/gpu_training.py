"""Trains a bf16 GPT and saves every step: measures the cost, and the restore."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.gpu_copies import synchronize
from bench.ours import KeepstepEager, KeepstepLazy
from bench.peers import DcpAsyncReused, PeerMissing, TorchCheckpointing
from bench.processes import memory_limit_bytes
from bench.savers import Saver

Figures = dict[str, float | str]
_WARM_STEPS = 3
SAVERS: tuple[type[Saver], ...] = (KeepstepLazy, KeepstepEager, DcpAsyncReused, TorchCheckpointing)


@dataclass(frozen=True)
class Shape:
    """A GPT. A step has `batch` sequences of `context` tokens."""

    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int = 32768
    context: int = 1024
    batch: int = 4

    @property
    def parameters(self) -> int:
        """The approximate number of weights."""
        return self.layers * 12 * self.width**2 + 2 * self.vocabulary * self.width

    @property
    def state_bytes(self) -> int:
        """bf16 weights and AdamW's two moments."""
        return 6 * self.parameters


SHAPES = (
    # a step shorter than the launches of a save, one that hides a copy, and one of a large state
    Shape("0.1B, batch 4", layers=12, width=640, heads=10),
    Shape("0.4B, batch 32", layers=24, width=1024, heads=16, batch=32),
    Shape("1.3B, batch 32", layers=24, width=2048, heads=16, batch=32),
)
TINY = (
    dataclasses.replace(
        Shape("tiny", layers=2, width=64, heads=2), vocabulary=512, context=32, batch=2
    ),
)


class Block(nn.Module):
    """Attention and a perceptron, pre-norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        y: Tensor = self.down(functional.gelu(self.up(self.norm_2(x))))
        return x + y


class Gpt(nn.Module):
    """Token embeddings, blocks, head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


class Training:
    """Model, optimizer and data on a device; a `bench.savers.Savable`."""

    def __init__(self, shape: Shape, device: str) -> None:
        torch.manual_seed(7)
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                self.model = Gpt(shape)
        finally:
            torch.set_default_dtype(previous)
        self.device = device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(shape.vocabulary, (shape.batch, shape.context), device=device)
        self.progress: dict[str, Any] = {"step": -1}
        self.loss = torch.zeros(())
        self.compute()
        self.update(0)

    def compute(self) -> None:
        """Forward and backward."""
        self.loss = self.model(self.tokens)
        self.loss.backward()

    def update(self, step: int) -> None:
        """Optimizer step."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        self.progress["step"] = step

    def step_off_cpu(self, step: int) -> None:
        self.compute()
        self.update(step)

    @property
    def size_bytes(self) -> int:
        return sum(one.nbytes for one in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        flat = {f"model.{name}": one for name, one in self.model.state_dict().items()}
        for i, (_, values) in enumerate(self.optimizer.state.items()):
            flat |= {f"optimizer.{i}.{key}": value for key, value in values.items()}
        return flat

    def nested(self) -> dict[str, Any]:
        return {
            # a plain dict: torch 2.11's stager fails on the class of an OrderedDict
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "progress": dict(self.progress),
        }

    def components(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}


def obstacle(shape: Shape, device: str, directory: Path) -> str:
    """Why this size cannot run here; empty if it can."""
    need = shape.state_bytes
    shared, disk = shutil.disk_usage("/dev/shm").free, shutil.disk_usage(directory).free
    memory = memory_limit_bytes()
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 2.2 * need + (4 << 30):
        return f"needs about {(2.2 * need + (4 << 30)) / 1e9:.0f} GB of free GPU memory"
    if shared < 2.2 * need or memory < 3 * need:
        return f"two slots need {2.2 * need / 1e9:.0f} GB in /dev/shm, it has {shared / 1e9:.0f} GB"
    return f"needs {4 * need / 1e9:.0f} GB on {directory}" if disk < 4 * need else ""


def measure(
    shape: Shape,
    device: str,
    directory: Path,
    results: dict[str, Figures],
    *,
    steps: int,
    deadline: float,
) -> None:
    """Measure plain steps, then every saver, then a restore, into `results` by subject.

    `deadline` is by the monotonic clock. Savers for which there is no time are skipped.
    """
    training = Training(shape, device)
    plain = _loop(training, None, steps=steps, patience_s=20.0)
    results["plain"] = {**plain, "state_bytes": float(training.size_bytes)}
    for kind in SAVERS:
        figures: Figures = {}
        results[kind.name] = figures
        left_s, needed_s = deadline - time.monotonic(), 8.0 + 6e-9 * training.size_bytes
        if left_s < needed_s:
            figures["skipped"] = f"needs about {needed_s:.0f} s, {left_s:.0f} s are left"
            continue
        try:
            with _saver(kind, training, directory / "saver") as saver:
                _measure_saver(training, saver, figures, steps=steps, patience_s=left_s / 6)
        except PeerMissing as error:
            figures["missing"] = str(error)
        except Exception as error:  # one peer's failure must not cost the others' figures
            figures["error"] = f"{type(error).__name__}: {str(error)[-300:]}"
        if "step_s" in figures:
            figures["inflation"] = float(figures["step_s"]) / float(plain["step_s"])
    del training
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _measure_saver(
    training: Training, saver: Saver, figures: Figures, *, steps: int, patience_s: float
) -> None:
    _warm(training, saver)
    figures |= _loop(training, saver, steps=steps, patience_s=patience_s)
    figures |= _durable(training, saver)
    figures |= saver.extra()
    if type(saver) is KeepstepLazy:
        figures["restore_memory_s"] = saver.restore_again("memory")
        figures["restore_local_s"] = saver.restore_again("local")


@contextlib.contextmanager
def _saver(kind: type[Saver], training: Training, directory: Path) -> Iterator[Saver]:
    saver = kind(training, directory)
    try:
        yield saver
    finally:
        saver.close()


def _warm(training: Training, saver: Saver) -> None:
    """Save until all slots are made and registered, buffers pinned and processes started."""
    for _ in range(2):
        _step(training, saver)
        saver.wait_durable()
        saver.wait_ready()
    if isinstance(saver, KeepstepLazy):
        for _ in range(5):
            _step(training, saver)
            saver.fence()
            saver.wait_staged()
        saver.wait_durable()


def _loop(training: Training, saver: Saver | None, *, steps: int, patience_s: float) -> Figures:
    """Medians over steps that are all saved. Stops early if a saver is too slow."""
    end = time.perf_counter() + patience_s
    times: list[tuple[float, float]] = []
    for number in range(steps + _WARM_STEPS):
        times.append(_step(training, saver))
        if time.perf_counter() > end and number >= 2:
            break
    # a slow saver may not have made enough steps to drop the warm-up: then its last two count
    measured = times[min(_WARM_STEPS, len(times) - 2) :]
    figures: Figures = {
        "step_s": statistics.median(step for step, _ in measured),
        "steps": float(len(measured)),
    }
    if saver is not None:
        figures["blocked_s"] = statistics.median(blocked for _, blocked in measured)
        saver.wait_durable()
    return figures


def _step(training: Training, saver: Saver | None) -> tuple[float, float]:
    """(seconds of the whole step, seconds that the saver held up the training thread)."""
    begun = time.perf_counter()
    training.compute()
    before_fence = time.perf_counter()
    if saver is not None:
        saver.fence()
    fenced = time.perf_counter()
    step = training.progress["step"] + 1
    training.update(step)
    # like a script that reads its loss: here the CPU waits for the GPU, not for the saver
    training.loss.item()
    synchronize(training.device)
    before_save = time.perf_counter()
    if saver is not None:
        saver.save(step)
    ended = time.perf_counter()
    return ended - begun, fenced - before_fence + ended - before_save


def _durable(training: Training, saver: Saver) -> Figures:
    training.compute()
    saver.fence()
    step = training.progress["step"] + 1
    training.update(step)
    synchronize(training.device)
    begun = time.perf_counter()
    saver.save(step)
    saver.fence()
    synchronize(training.device)
    saver.wait_staged()
    staged = time.perf_counter()
    saver.wait_durable()
    ended = time.perf_counter()
    return {"staged_s": staged - begun, "durable_s": ended - begun}
