"""`make bench-gpu`: trains a bf16 GPT on a GPU and saves every step, in under eight minutes.

Needs one CUDA device, torch, and this repository (library and sidecar); no network. `--device cpu
--smoke` runs the same code at a tiny size without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import re
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

from bench import machine
from bench.ours import KeepstepEager, KeepstepLazy
from bench.peers import DcpAsyncReused, LmResiliency, PeerMissing, TorchCheckpointing
from bench.processes import ROOT, memory_limit_bytes
from bench.report import table
from bench.savers import Saver

Figures = dict[str, float | str]
_WARM_STEPS = 3
SAVERS: tuple[type[Saver], ...] = (
    KeepstepLazy,
    LmResiliency,
    KeepstepEager,
    DcpAsyncReused,
    TorchCheckpointing,
)


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
TINY = (Shape("tiny", layers=2, width=64, heads=2, vocabulary=512, context=32, batch=2),)


class Gpt(nn.Module):
    """Token embeddings, blocks of attention and a perceptron, head. Its value is the loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        block = nn.TransformerEncoderLayer(
            shape.width, shape.heads, 4 * shape.width, dropout=0.0, activation="gelu",
            batch_first=True, norm_first=True,
        )  # fmt: skip
        self.blocks = nn.TransformerEncoder(block, shape.layers, enable_nested_tensor=False)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        mask = nn.Transformer.generate_square_subsequent_mask(shape.context)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks(self.embedding(tokens), mask=self.mask, is_causal=True)
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


def synchronize(device: str) -> None:
    """Wait for the device; returns at once on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()


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


def _measure_shape(
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


# --- the report ----------------------------------------------------------------------------------


def main() -> None:
    options = _options()
    deadline = time.monotonic() + options.minutes * 60
    directory = options.dir / f"keepstep-bench-gpu-{os.getpid()}"
    directory.mkdir(parents=True)
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu smoke"
    name = options.name or re.sub(r"[^a-z0-9]+", "-", f"gpu-{device}".lower()).strip("-")
    results: dict[str, Any] = {
        "machine": {"gpu": device} | machine.describe(directory),
        "name": name,
        "training": {},
    }
    try:
        for shape in TINY if options.smoke else SHAPES:
            if options.shapes not in shape.name:
                continue
            # `figures` is filled during the measurement, so that a failure keeps earlier figures
            figures: dict[str, Figures] = {}
            results["training"][shape.name] = figures
            if why := obstacle(shape, options.device, directory):
                figures["-"] = {"skipped": why}
                continue
            print(f"{shape.name}: {shape.parameters / 1e9:.2f} billion parameters", flush=True)
            steps = 5 if options.smoke else 12
            _measure_shape(
                shape, options.device, directory, figures, steps=steps, deadline=deadline
            )
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    options.out.mkdir(parents=True, exist_ok=True)
    text = _markdown(results)
    (options.out / f"{name}.json").write_text(json.dumps(results, indent=1))
    (options.out / f"{name}.md").write_text(text)
    print(text)


def _markdown(results: dict[str, Any]) -> str:
    parts = ["# keepstep on a GPU, measured", "Made by `make bench-gpu`: every step is saved."]
    parts.append(table(("", ""), results["machine"].items()))
    for name, subjects in results["training"].items():
        columns = list(dict.fromkeys(key for of in subjects.values() for key in of))
        rows = [[one, *(_show(of.get(c, "-")) for c in columns)] for one, of in subjects.items()]
        parts += [f"## {name}", table(("", *columns), rows)]
    return "\n\n".join(parts) + "\n"


def _show(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else value


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--smoke", action="store_true", help="tiny: does the code run?")
    parser.add_argument("--shapes", default="", help="only those whose names have this in them")
    parser.add_argument("--minutes", type=float, default=7.0, help="time budget")
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="on the disk to measure")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--name", help="of the result files; default: from the GPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
