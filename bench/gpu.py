"""`make bench-gpu`: trains a bf16 GPT on a GPU and saves every step, in under eight minutes.

Needs one CUDA device, torch, and this repository (library and sidecar); no network. `TRAIN_ON=cpu
make bench-gpu` runs the same code at a tiny size without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from bench import machine, measures
from bench.ours import KeepstepByCost, KeepstepEager, KeepstepLazy
from bench.peers import DcpAsyncReused, LmResiliency, PeerMissing, TorchCheckpointing
from bench.processes import ROOT
from bench.report import table
from bench.savers import Saver
from bench.state import Gpt, Shape, State

Figures = dict[str, float | str]
ON = os.environ.get("TRAIN_ON", "cuda")
_WARM_STEPS = 3
_UNTIL_STEADY = 300


SHAPES = (
    # a step shorter than the launches of a save, one that hides a copy, and one of a large state
    Shape("0.1B, batch 4", layers=12, width=640, heads=10),
    Shape("0.4B, batch 32", layers=24, width=1024, heads=16, batch=32),
    Shape("1.3B, batch 32", layers=24, width=2048, heads=16, batch=32),
)
TINY = (Shape("tiny", layers=2, width=64, heads=2, vocabulary=512, context=32, batch=2),)


class Training(State):
    """Model, optimizer and data on a device."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(7)
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(ON):
                model = Gpt(shape)
        finally:
            torch.set_default_dtype(previous)
        super().__init__(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
        self.tokens = torch.randint(shape.vocabulary, (shape.batch, shape.context), device=ON)
        self.loss = torch.zeros(())
        self.compute()
        self.update(0)

    def compute(self) -> None:
        """Forward and backward."""
        self.loss = self.model(self.tokens)
        self.loss.backward()

    def update(self, step: int) -> None:
        super().update(step)
        self.optimizer.zero_grad(set_to_none=False)
        # like a script that reads its loss: here the CPU waits for the GPU, not for the saver
        self.loss.item()
        if ON == "cuda":
            torch.cuda.synchronize()


class NoSaver(Saver):
    """Plain steps."""

    name = "plain"

    def save(self, step: int) -> None:
        pass


def _measure_shape(
    shape: Shape,
    directory: Path,
    results: dict[str, Figures],
    *,
    steps: int,
    deadline: float,
) -> None:
    """Measure plain steps, then every saver, then a restore, into `results` by subject.

    `deadline` is by the monotonic clock. Savers for which there is no time are skipped.
    """
    training = Training(shape)
    for kind in SAVERS:
        figures: Figures = {}
        results[kind.name] = figures
        left_s, needed_s = deadline - time.monotonic(), 8.0 + 6e-9 * training.size_bytes
        if left_s < needed_s:
            figures["skipped"] = f"needs about {needed_s:.0f} s, {left_s:.0f} s are left"
            continue
        try:
            saver = kind(training, directory / "saver")
            try:
                _measure_saver(training, saver, figures, steps=steps, patience_s=left_s / 6)
            finally:
                saver.close()
        except PeerMissing as error:
            figures["missing"] = str(error)
        except Exception as error:  # one peer's failure must not cost the others' figures
            figures["error"] = f"{type(error).__name__}: {str(error)[-300:]}"
        if "step_s" in figures:
            figures["inflation"] = float(figures["step_s"]) / float(results["plain"]["step_s"])
    results["plain"]["state_bytes"] = float(training.size_bytes)
    del training
    gc.collect()
    if ON == "cuda":
        torch.cuda.empty_cache()


def _measure_saver(
    training: Training, saver: Saver, figures: Figures, *, steps: int, patience_s: float
) -> None:
    """Medians over steps that are all saved. Stops early if a saver is too slow."""
    numbers = measures.Steps()
    if not isinstance(saver, NoSaver):
        measures.warm_up(saver, numbers, saves=2)
    if isinstance(saver, KeepstepByCost):
        figures |= _by_cost(training, saver, numbers, patience_s=patience_s)
        return
    if isinstance(saver, KeepstepLazy):
        for _ in range(5):  # until all slots are registered
            measures.timed_step(saver, numbers, training.compute)
            saver.fence()
            saver.wait_staged()
        saver.wait_durable()
    end = time.perf_counter() + patience_s
    times: list[tuple[float, float]] = []
    for number in range(steps + _WARM_STEPS):
        times.append(measures.timed_step(saver, numbers, training.compute))
        if time.perf_counter() > end and number >= 2:
            break
    # a slow saver may not have made enough steps to drop the warm-up: then its last two count
    measured = times[min(_WARM_STEPS, len(times) - 2) :]
    figures["step_s"], figures["blocked_s"] = map(statistics.median, zip(*measured, strict=True))
    figures["steps"] = float(len(measured))
    if isinstance(saver, NoSaver):
        return
    saver.wait_durable()
    saver.fence()
    durable = measures.durable(saver, numbers, size_bytes=training.size_bytes, repeats=1)
    figures |= {name: durable[name] for name in ("staged_s", "durable_s")} | saver.extra()
    if type(saver) is KeepstepLazy:
        figures["restore_memory_s"] = saver.restore_again("memory")
        figures["restore_local_s"] = saver.restore_again("local")


def _by_cost(
    training: Training, saver: KeepstepByCost, numbers: measures.Steps, *, patience_s: float
) -> Figures:
    """Means over steps of which some are staged, once their interval is chosen."""
    end = time.perf_counter() + patience_s / 2
    for _ in range(_UNTIL_STEADY):
        measures.timed_step(saver, numbers, training.compute)
        if time.perf_counter() > end:
            break
    interval = saver.interval
    steps = 2 * max(interval, 16)
    times = [measures.timed_step(saver, numbers, training.compute) for _ in range(steps)]
    step_s, blocked_s = map(statistics.mean, zip(*times, strict=True))
    staged = {"step_s": step_s, "blocked_s": blocked_s, "one in": float(interval)}
    return {**staged, "steps": float(steps), **saver.extra()}


SAVERS: tuple[type[Saver], ...] = (
    NoSaver,
    KeepstepLazy,
    KeepstepByCost,
    LmResiliency,
    KeepstepEager,
    DcpAsyncReused,
    TorchCheckpointing,
)


# --- the report ----------------------------------------------------------------------------------


def main() -> None:
    options = _options()
    deadline = time.monotonic() + options.minutes * 60
    directory = options.dir / f"keepstep-bench-gpu-{os.getpid()}"
    directory.mkdir(parents=True)
    device = torch.cuda.get_device_name() if ON == "cuda" else "cpu smoke"
    name = options.name or re.sub(r"[^a-z0-9]+", "-", f"gpu-{device}".lower()).strip("-")
    results: dict[str, Any] = {
        "machine": {"gpu": device} | machine.describe(directory),
        "name": name,
        "training": {},
    }
    try:
        for shape in SHAPES if ON == "cuda" else TINY:
            if options.shapes not in shape.name:
                continue
            # `figures` is filled during the measurement, so that a failure keeps earlier figures
            figures: dict[str, Figures] = {}
            results["training"][shape.name] = figures
            print(f"{shape.name}: {shape.parameters / 1e9:.2f} billion parameters", flush=True)
            steps = 12 if ON == "cuda" else 5
            try:
                _measure_shape(shape, directory, figures, steps=steps, deadline=deadline)
            except torch.OutOfMemoryError as error:
                figures["-"] = {"skipped": str(error)}
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
        rows = [
            [subject, *(_show(of.get(c, "-")) for c in columns)] for subject, of in subjects.items()
        ]
        parts += [f"## {name}", table(("", *columns), rows)]
    return "\n\n".join(parts) + "\n"


def _show(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else value


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--shapes", default="", help="only those whose names have this in them")
    parser.add_argument("--minutes", type=float, default=7.0, help="time budget")
    parser.add_argument("--dir", type=Path, default=ROOT / "build", help="on the disk to measure")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--name", help="of the result files; default: from the GPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
