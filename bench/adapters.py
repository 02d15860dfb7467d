"""What an adapter of `keepstep.integrations` adds to a step, beyond what `save` itself costs.

    python -m bench.adapters [--rounds 5] [--steps 60] [--only NAME ...] [--write]

Run it in the environment of the frameworks (`make test-frameworks`). The trainings are those of
`tests/frameworks`, on one rank; each step waits 100 ms before the optimizer's, as for an
accelerator. Two processes train at once, so that other load affects both alike, each with a
sidecar of its own: one by the adapter; the other saves model and optimizer after each optimizer's
step, and nothing of the framework's. The figure is the difference of the CPU time of the training
thread, of medians over steps; then the median over the rounds. An adapter that waits would show in
the wall time alone, which says something on a quiet machine only. Bar: 1 % of a step of 100 ms.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from bench import machine
from bench.processes import ROOT, Sidecar, environment
from bench.report import table

STEP_S, BAR, WARM_STEPS, LIMIT_S = 0.1, 0.01, 10, 600.0
PACKAGES = ("transformers", "peft", "trl", "lightning", "deepspeed", "accelerate", "torchtitan")
PACKAGES += ("megatron-core", "torch")
LONG = {"arguments": {"max_steps": 10_000}, "steps": 10_000}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Trainer": ("trainer", LONG),
    "Trainer, LoRA": ("trainer", {**LONG, "lora": True}),
    "Lightning": ("lightning_fit", LONG),
    "DeepSpeed, ZeRO-1": ("deepspeed_loop", {"stage": 1}),
    "accelerate": ("own_loop", {"on": "accelerate"}),
    "torchtitan": ("titan", LONG),
    "Megatron-core": ("megatron_loop", {**LONG, "distributed": True}),
    "TRL, SFT": ("trl_trainer", {**LONG, "kind": "SFT", "lora": True}),
}
"""By name: the script of `tests/frameworks`, and its settings."""

Figures = list[float]
"""Seconds of one step: CPU of the training thread, the part of it inside `save`, and wall."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="that count, of each process")
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--write", action="store_true", help="into bench/results")
    options = parser.parse_args()
    about = machine.describe(Path(tempfile.gettempdir()))
    about |= {"command": " ".join(["python -m bench.adapters", *sys.argv[1:]])}
    about |= {"date": time.strftime("%Y-%m-%d")} | {
        package: metadata.version(package) for package in PACKAGES
    }
    found: dict[str, list[tuple[Figures, Figures]]] = {name: [] for name in options.only}
    for _ in range(options.rounds):
        for name in options.only:
            found[name].append(measured(name, options.steps))
            print(name, *row(found[name][-1:]), file=sys.stderr, flush=True)
        text = report(found, about)
        if options.write:
            path = ROOT / "bench" / "results" / f"{machine.slug()}-adapters"
            path.with_suffix(".md").write_text(text + "\n")
            samples = json.dumps({"machine": about, "samples": found})
            path.with_suffix(".json").write_text(samples + "\n")
    print(text)


def report(found: dict[str, list[tuple[Figures, Figures]]], about: dict[str, str]) -> str:
    """The whole page."""
    heads = [
        "",
        "`save` alone",
        "the adapter adds",
        "of it inside `save`",
        "of 100 ms",
        "wall adds",
    ]
    return "\n\n".join(
        [
            "# Adapters, measured",
            "CPU of the training thread in a step: medians [least, most] of the rounds' medians.",
            table(heads, [[name, *row(rounds)] for name, rounds in found.items()]),
            table(["machine", ""], list(about.items())),
        ]
    )


def row(rounds: list[tuple[Figures, Figures]]) -> list[str]:
    cpu, in_save, wall = ([adapter[at] - plain[at] for plain, adapter in rounds] for at in range(3))
    share = statistics.median(cpu) / STEP_S
    verdict = f"{share:.2%}, {'pass' if share <= BAR else '**FAIL**'}"
    plain = [alone[0] for alone, _ in rounds]
    return [_ms(plain), _ms(cpu), _ms(in_save), verdict, _ms(wall)]


def _ms(seconds: Figures) -> str:
    least, middle, most = (1e3 * f(seconds) for f in (min, statistics.median, max))
    return f"{middle:.2f} ms" + f" [{least:.2f}, {most:.2f}]" * (len(seconds) > 1)


def measured(name: str, steps: int) -> tuple[Figures, Figures]:
    """`save` alone, and by the adapter, at once. Raises RuntimeError if a training fails."""
    home = Path(tempfile.mkdtemp(prefix="keepstep-bench-"))
    sidecars = [Sidecar(home / kind) for kind in ("alone", "adapter")]
    processes = []
    try:
        for kind, sidecar in zip(("alone", "adapter"), sidecars, strict=True):
            (home / kind).mkdir()
            sidecar.start()
            processes.append(_begun(name, home / kind, sidecar, steps, bare=kind == "alone"))
        for process, kind in zip(processes, ("alone", "adapter"), strict=True):
            if process.wait(LIMIT_S):
                raise RuntimeError(f"{name}, {kind}: {(home / kind / 'said').read_text()[-3000:]}")
        alone, adapter = (
            json.loads((home / kind / "figures").read_text()) for kind in ("alone", "adapter")
        )
        return alone, adapter
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for sidecar in sidecars:
            sidecar.close()
        shutil.rmtree(home, ignore_errors=True)


def _begun(
    name: str, home: Path, sidecar: Sidecar, steps: int, *, bare: bool
) -> subprocess.Popen[bytes]:
    script, settings = CASES[name]
    extra = {"KEEPSTEP_SOCKET": str(sidecar.socket), "OMP_NUM_THREADS": "1"}
    extra |= {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    if script == "titan":  # as torchrun starts it
        with socket.socket() as connection:
            connection.bind(("localhost", 0))
            extra |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(connection.getsockname()[1])}
        extra |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    program = f"from bench.adapters import train; train({script!r}, {steps}, bare={bare})"
    words = [sys.executable, "-c", program, str(home), json.dumps({"bare": bare, **settings})]
    with (home / "said").open("wb") as output:
        return subprocess.Popen(words, env=environment(**extra), stdout=output, stderr=output)


# --- in the process that trains: `tests.frameworks.script` reads sys.argv ------------------------


def train(script: str, steps: int, *, bare: bool) -> None:
    """Train until so many steps were measured, and write the figures."""
    import torch
    from torch.nn.modules.module import register_module_forward_pre_hook
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    import keepstep

    marks: list[tuple[float, float, float]] = []
    spent = {"in_save_s": 0.0, "kept": 0.0}
    optimizers: list[Any] = []
    alone: list[keepstep.Checkpointer] = []
    save = keepstep.Checkpointer.save

    def timed(*args: Any, **options: Any) -> bool:
        begun = time.thread_time()
        kept = save(*args, **options)
        spent["in_save_s"] += time.thread_time() - begun
        spent["kept"] += kept
        return kept

    def before(optimizer: Any, *_: object) -> None:
        if optimizers:  # DeepSpeed's steps once for each group
            return
        optimizers.append(optimizer)
        marks.append((time.thread_time(), spent["in_save_s"], time.perf_counter()))
        if len(marks) > steps + WARM_STEPS:
            if spent["kept"] < 0.9 * len(marks):
                raise RuntimeError(f"{spent['kept']} of {len(marks)} steps were kept")
            taken = [
                [after - at for at, after in zip(first, other, strict=True)]
                for first, other in itertools.pairwise(marks[WARM_STEPS:])
            ]
            figures = [statistics.median(column) for column in zip(*taken, strict=True)]
            (Path(sys.argv[1]) / "figures").write_text(json.dumps(figures))
            os._exit(0)
        time.sleep(STEP_S)

    def forward(model: torch.nn.Module, *_: object) -> None:
        """The outermost module begins: the step before is over."""
        first.remove()
        model.register_forward_pre_hook(begin, prepend=True)  # before FSDP gathers the weights
        begin(model)

    def begin(model: Any, *_: object) -> None:
        if bare and optimizers:
            if not alone:
                alone.append(keepstep.Checkpointer(_parts(model, optimizers[0])))
                alone[0].restore()
            alone[0].save(len(marks))
        optimizers.clear()

    keepstep.Checkpointer.save = timed  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(before)
    first = register_module_forward_pre_hook(forward)
    module = importlib.import_module(f"tests.frameworks.{script}")
    if hasattr(module, "ROWS") and script != "megatron_loop":
        module.ROWS = 100_000
    module.main()
    raise RuntimeError(f"the training ended after {len(marks)} steps")


def _parts(model: Any, optimizer: Any) -> dict[str, Any]:
    """What a script would name. Of DeepSpeed's engine: the tensors, and no knowledge of them."""
    import torch

    if "deepspeed" not in type(model).__module__:
        return {"model": model, "optimizer": optimizer}
    flats = model.optimizer.single_partition_of_fp32_groups
    masters = torch.nn.ParameterList(flats)
    alike = torch.optim.SGD(masters, lr=1.0)
    for master, flat in zip(masters, flats, strict=True):
        alike.state[master] = optimizer.state[flat]
    return {"model": model.module, "masters": masters, "optimizer": alike}


if __name__ == "__main__":
    main()
