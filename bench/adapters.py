"""What an adapter of `keepstep.integrations` adds to a step, beyond what `save` itself costs.

    python -m bench.adapters [--rounds 3] [--steps 60] [--only NAME ...] [--write]

Run it in the environment of the frameworks, which `make test-frameworks` makes. The trainings are
those of `tests/frameworks`, on one rank. A step waits 100 ms in its forward pass, as for an
accelerator. It is kept either by the adapter, or by the lines that any script can use. These lines
keep the same model, optimizer and scheduler, but neither the position in the data nor the counters
of the framework. The difference is the cost of the adapter: its hooks, and a `save` that has more
to gather.

The figure is the CPU time of the training thread. Other load on the machine lengthens the wall time
of a step, but its CPU time only through shared caches and cores. Both trainings run at once, each
in its own process with its own sidecar, so that load affects both alike. Each round compares
medians over steps, and the median of the rounds' differences counts. CPU time would not show an
adapter that waits. So the wall time of the same steps is shown, too; it only means something on a
quiet machine. Bar: at most 1 % of the step.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from bench import machine
from bench.processes import ROOT, Sidecar, environment
from bench.report import table

STEP_S, BAR = 0.1, 0.01
_WARM_STEPS, _LIMIT_S = 10, 300.0
_RESULTS = ROOT / "bench" / "results"
_PACKAGES = ("torch", "transformers", "accelerate", "lightning", "torchtitan", "deepspeed")
_PACKAGES += ("pytorch-ignite",)


@dataclass(frozen=True)
class Case:
    """A training: the name of a function of this module, and the settings of `tests/frameworks`."""

    name: str
    train: str
    settings: dict[str, Any] = field(default_factory=dict)


CASES = (
    Case("Trainer", "on_trainer"),
    Case("Trainer, 2 workers", "on_trainer", {"arguments": {"dataloader_num_workers": 2}}),
    Case("Trainer, 10,000 entries in its log", "on_trainer", {"log": 10_000}),
    Case("Lightning", "on_lightning"),
    Case("Lightning, 2 workers", "on_lightning", {"workers": 2}),
    Case("torchtitan", "on_torchtitan"),
    Case("torchtitan, 2 workers", "on_torchtitan", {"workers": 2}),
    Case("DeepSpeed, ZeRO-1", "on_deepspeed", {"stage": 1}),
    Case("DeepSpeed, ZeRO-3", "on_deepspeed", {"stage": 3}),
    Case("accelerate", "on_accelerate"),
    Case("accelerate, 2 workers", "on_accelerate", {"workers": 2}),
    Case("Fabric, 2 workers", "on_fabric", {"workers": 2}),
    Case("Ignite", "on_ignite"),
)


@dataclass(frozen=True)
class Steps:
    """Seconds of one step, as medians over the steps of a process: CPU time of the training thread,
    the part of it inside `save`, and wall time."""

    cpu_s: float
    save_s: float
    wall_s: float


Round = tuple[Steps, Steps]
"""The figures of `save` alone, and those of the adapter."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="that count, of each process")
    names = [one.name for one in CASES]
    parser.add_argument("--only", nargs="+", default=names, choices=names)
    parser.add_argument("--write", action="store_true", help="into bench/results")
    options = parser.parse_args()
    cases = [one for one in CASES if one.name in options.only]
    found: dict[str, list[Round]] = {one.name: [] for one in cases}
    about = machine.describe(Path(tempfile.gettempdir()))
    about["command"] = " ".join(["python -m bench.adapters", *sys.argv[1:]])
    about |= {one: metadata.version(one) for one in _PACKAGES}
    for _ in range(options.rounds):
        for case in cases:
            found[case.name].append(measured(case, options.steps))
            print(case.name, _row(found[case.name][-1:]), file=sys.stderr, flush=True)
    text = report(found, about)
    print(text)
    if options.write:
        path = _RESULTS / f"{machine.slug()}-adapters"
        path.with_suffix(".md").write_text(text)
        samples = {
            name: [[asdict(one) for one in both] for both in rounds]
            for name, rounds in found.items()
        }
        path.with_suffix(".json").write_text(
            json.dumps({"machine": about, "samples": samples}, indent=1) + "\n"
        )


def report(found: dict[str, list[Round]], about: dict[str, str]) -> str:
    """The whole page."""
    rows = [[name, *_row(rounds)] for name, rounds in found.items()]
    heads = ["", "`save` alone: CPU of a step", "the adapter adds", "of it inside `save`"]
    heads += [f"against {STEP_S * 1e3:g} ms", f"bar {BAR:.0%}", "wall adds"]
    parts = [
        "# Adapters, measured",
        f"Made by `{about['command']}`; how, says `bench/adapters.py`.",
        table(["machine", ""], list(about.items())),
        "CPU of the training thread in a step, medians; [least, most] of the rounds' medians.",
        table(heads, rows),
    ]
    return "\n\n".join(parts) + "\n"


def _row(rounds: list[Round]) -> list[str]:
    adds = [adapter.cpu_s - plain.cpu_s for plain, adapter in rounds]
    saves = [adapter.save_s - plain.save_s for plain, adapter in rounds]
    walls = [adapter.wall_s - plain.wall_s for plain, adapter in rounds]
    added = statistics.median(adds) / STEP_S
    return [
        _ms([plain.cpu_s for plain, _ in rounds]),
        _ms(adds),
        _ms(saves),
        f"{added:.2%}",
        "pass" if added <= BAR else "**FAIL**",
        _ms(walls),
    ]


def _ms(seconds: list[float]) -> str:
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    spread = f" [{low * 1e3:.2f}, {high * 1e3:.2f}]" if len(seconds) > 1 else ""
    return f"{middle * 1e3:.2f} ms{spread}"


def measured(case: Case, steps: int) -> Round:
    """Run both trainings at once. Raises RuntimeError if one fails."""
    home = Path(tempfile.mkdtemp(prefix="keepstep-bench-"))
    kinds = [
        Training(case, home / kind, steps, bare=kind == "save") for kind in ("save", "adapter")
    ]
    try:
        for one in kinds:
            one.begin()
        plain, adapter = (one.end() for one in kinds)
        return plain, adapter
    finally:
        for one in kinds:
            one.close()
        shutil.rmtree(home)


class Training:
    """One process that trains, with a sidecar of its own."""

    def __init__(self, case: Case, home: Path, steps: int, *, bare: bool) -> None:
        self._home, self._name = home, case.train
        self._settings = {"steps": steps + _WARM_STEPS + 1, "bare": bare, **case.settings}
        self._sidecar = Sidecar(home / "volume")
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        self._sidecar.start()
        extra = {"KEEPSTEP_SOCKET": str(self._sidecar.socket), "OMP_NUM_THREADS": "1"}
        extra |= {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
        program = "import sys; from bench import adapters; adapters.train(sys.argv.pop(3))"
        words = [str(self._home), json.dumps(self._settings), self._name]
        with (self._home / "out").open("w") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, *words],
                env=environment(**extra),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def end(self) -> Steps:
        assert self._process is not None
        if self._process.wait(_LIMIT_S):
            raise RuntimeError((self._home / "out").read_text()[-3000:] + self._sidecar.log_tail())
        return Steps(**json.loads((self._home / "steps").read_text()))

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._sidecar.close()


# --- in the process that trains: `tests.frameworks.script` reads sys.argv ------------------------


class Clock:
    """Notes the times of the training thread as each step begins, then waits."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float, float]] = []
        self.in_save_s = 0.0
        self.kept = 0

    def begin(self, *_: Any) -> None:
        self.marks.append((time.thread_time(), self.in_save_s, time.perf_counter()))
        time.sleep(STEP_S)

    def around(self, save: Callable[..., bool]) -> Callable[..., bool]:
        def timed(*args: Any, **options: Any) -> bool:
            begun = time.thread_time()
            kept = save(*args, **options)
            self.in_save_s += time.thread_time() - begun
            self.kept += kept
            return kept

        return timed

    def medians(self) -> Steps:
        """The medians over the steps. Raises RuntimeError if too many steps were not kept, because
        they would not measure a save."""
        if self.kept < 0.9 * len(self.marks):
            raise RuntimeError(f"{self.kept} of {len(self.marks)} steps were kept")
        marks = self.marks[_WARM_STEPS:]
        taken = [
            [after - before for before, after in zip(one, other, strict=True)]
            for one, other in itertools.pairwise(marks)
        ]
        return Steps(*(statistics.median(column) for column in zip(*taken, strict=True)))


_clock = Clock()


def train(name: str) -> None:
    """Train as `sys.argv` says, and write the figures beside the output."""
    import keepstep

    keepstep.Checkpointer.save = _clock.around(keepstep.Checkpointer.save)  # type: ignore[method-assign]
    from tests.frameworks.script import OUT, SETTINGS

    globals()[name](SETTINGS)
    (OUT / "steps").write_text(json.dumps(asdict(_clock.medians())))


def _timed(model: Any) -> None:
    model.register_forward_pre_hook(_clock.begin)


def _begun(**components: Any) -> Any:
    """Keep the components by the lines that any script can use."""
    import keepstep

    checkpointer = keepstep.Checkpointer(components)
    checkpointer.restore()
    return checkpointer


def on_trainer(settings: dict[str, Any]) -> None:
    arguments = settings.setdefault("arguments", {})
    arguments["max_steps"] = settings["steps"]
    from transformers import TrainerCallback

    from tests.frameworks import trainer as script

    script.ROWS = 10**6

    class Begun(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            entry = {"loss": 0.123456789, "grad_norm": 1.23456789, "learning_rate": 1e-4}
            state.log_history += [
                {**entry, "epoch": 0.1, "step": at} for at in range(settings.get("log", 0))
            ]

    class Alone(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **given: Any) -> None:
            named = {"model": "model", "optimizer": "optimizer", "scheduler": "lr_scheduler"}
            parts = {name: given[key] for name, key in named.items()}
            parts["optimizer"] = parts["optimizer"].optimizer  # in AcceleratedOptimizer
            self.checkpointer = _begun(**parts)

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            self.checkpointer.save(state.global_step)

        def on_train_end(self, *_: Any, **__: Any) -> None:
            self.checkpointer.close()

    trainer = script.made()
    trainer.add_callback(Begun())
    if settings["bare"]:
        trainer.add_callback(Alone())
    _timed(trainer.model)
    trainer.train()


def on_lightning(settings: dict[str, Any]) -> None:
    from keepstep.integrations.lightning import KeepstepCallback
    from tests.frameworks import lightning_fit as script

    lightning = script.lightning
    script.ROWS = 10**6

    class Alone(lightning.Callback):  # type: ignore[misc, name-defined]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            (optimizer,), (schedule,) = trainer.optimizers, trainer.lr_scheduler_configs
            parts = {"model": module, "optimizer": optimizer, "scheduler": schedule.scheduler}
            self.checkpointer = _begun(**parts)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            self.checkpointer.save(trainer.global_step)

        def on_train_end(self, *_: Any) -> None:
            self.checkpointer.close()

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=settings["steps"],
        limit_val_batches=0,
        log_every_n_steps=10,
        logger=[script.Log()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Alone() if settings["bare"] else KeepstepCallback()],
    )
    model = script.Model()
    _timed(model.net)
    trainer.fit(model, datamodule=script.Data())


def on_torchtitan(settings: dict[str, Any]) -> None:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port = str(one.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    settings["checkpoint"] = {"enable": not settings["bare"]}
    from tests.frameworks import titan as script

    trainer = script.made()
    (model,), (optimizer,) = trainer.model_parts, trainer.optimizers.optimizers
    _timed(model)
    if settings["bare"]:
        (scheduler,) = trainer.lr_schedulers.schedulers
        checkpointer = _begun(model=model, optimizer=optimizer, scheduler=scheduler)
        save = trainer.checkpointer.save
        trainer.checkpointer.save = lambda step, *args, **options: (
            checkpointer.save(step) and save(step, *args, **options)
        )
    trainer.train()
    trainer.close()
    if settings["bare"]:
        checkpointer.close()


def on_deepspeed(settings: dict[str, Any]) -> None:
    import keepstep
    from keepstep.integrations.deepspeed import components, stepped
    from tests.frameworks import deepspeed_loop as script

    script.ROWS = 10**6
    engine, batches = script.made(), script.batches()
    _timed(engine.module)
    if settings["bare"]:
        checkpointer = _begun(**_parts_of(engine))
    else:
        checkpointer = keepstep.Checkpointer(components(engine), batches=batches)
        checkpointer.restore(rng="later")
    left = batches.loader if settings["bare"] else batches.left(checkpointer)
    for _, batch in zip(range(settings["steps"]), left, strict=False):
        target = batch.to(script.DTYPE["bf16"])
        engine.backward(((engine(target) - target) ** 2).float().mean())
        engine.step()
        if stepped(engine):
            checkpointer.save(engine.global_steps)
    checkpointer.close()


def _parts_of(engine: Any) -> dict[str, Any]:
    """The tensors of the engine, without the adapter's knowledge of DeepSpeed: a restore would not
    notice another world or another order of parameters."""
    from torch import nn
    from torch.optim import SGD

    zero = engine.optimizer
    flats = getattr(zero, "fp32_partitioned_groups_flat", None)
    flats = flats or [group["params"][0] for group in zero.optimizer.param_groups]
    masters = nn.ParameterList(flats)
    optimizer = SGD(masters, lr=1.0)
    optimizer.state.update(
        {one: zero.optimizer.state[flat] for one, flat in zip(masters, flats, strict=True)}
    )
    found = {"model": engine.module, "masters": masters, "optimizer": optimizer}
    return {**found, "scheduler": engine.lr_scheduler}


def on_accelerate(settings: dict[str, Any]) -> None:
    from accelerate import Accelerator

    from tests.frameworks import own_loop as script

    script.ROWS = 10**6
    net, plain = script.made()
    model, optimizer, loader = Accelerator(cpu=True).prepare(net, plain, script.loader())
    _loop(settings, model, optimizer, loader)


def on_fabric(settings: dict[str, Any]) -> None:
    from lightning.fabric import Fabric

    from tests.frameworks import own_loop as script

    script.ROWS = 10**6
    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(*script.made())
    _loop(settings, model, optimizer, fabric.setup_dataloaders(script.loader()))


def _loop(settings: dict[str, Any], model: Any, optimizer: Any, loader: Any) -> None:
    import keepstep
    from keepstep.integrations.loaders import Batches

    batches, progress = Batches(loader), {"step": 0}
    parts = {"model": model, "optimizer": optimizer, "progress": progress}
    _timed(model)
    if settings["bare"]:
        checkpointer = _begun(**parts)
    else:
        checkpointer = keepstep.Checkpointer(parts, batches=batches)
        checkpointer.restore(rng="later")
    left = loader if settings["bare"] else batches.left(checkpointer)
    for _, batch in zip(range(settings["steps"]), left, strict=False):
        ((model(batch) - batch) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        progress["step"] += 1
        checkpointer.save(progress["step"])
    checkpointer.close()


def on_ignite(settings: dict[str, Any]) -> None:
    from ignite.engine import Engine, Events

    import keepstep
    from keepstep.integrations.loaders import Batches
    from tests.frameworks import own_loop as script

    script.ROWS = 10**6
    net, optimizer = script.made()
    _timed(net)

    def update(_: Any, batch: Any) -> float:
        loss = ((net(batch) - batch) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    trainer, data = Engine(update), script.loader()
    if settings["bare"]:
        checkpointer = _begun(model=net, optimizer=optimizer)
    else:
        batches = Batches(data)
        parts = {"model": net, "optimizer": optimizer, "batches": batches, "trainer": trainer}
        checkpointer = keepstep.Checkpointer(parts)
        checkpointer.restore(rng="later")
        data = script.Left(batches, checkpointer)

    def keep() -> None:
        checkpointer.save(trainer.state.iteration)
        if trainer.state.iteration >= settings["steps"]:
            trainer.terminate()

    trainer.add_event_handler(Events.ITERATION_COMPLETED, keep)
    trainer.run(data)
    checkpointer.close()


if __name__ == "__main__":
    main()
