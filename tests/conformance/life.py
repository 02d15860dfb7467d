"""One life of a training of the table: `main` with `ROW HOW DIRECTORY LIFE`.

HOW is `undisturbed`, `control` (`torch.save` and `load_state_dict`) or `keepstep`. A life that is
not the last one ends by SIGKILL after its step. What is to be compared goes, line by line, into
`DIRECTORY/HOW.jsonl`.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import keepstep
from tests.conformance import wrong
from tests.conformance.compare import describe
from tests.conformance.rows import every_row
from tests.conformance.table import Life, Row, Training


class Plain:
    """Neither keeps nor restores anything."""

    checkpointer: Any = None

    def __init__(self, training: Training, file: Path) -> None:
        self.training, self.file = training, file

    def newest(self) -> int | None:
        return None

    def restore(self) -> int | None:
        return None

    def keep(self, step: int, *, last: bool) -> bool:
        return True

    def close(self) -> None:
        pass


class Control(Plain):
    """What a careful script does without keepstep."""

    def newest(self) -> int | None:
        return self._kept()["step"] if self.file.exists() else None

    def _kept(self) -> Any:
        return torch.load(self.file, weights_only=False)

    def restore(self) -> int | None:
        if not self.file.exists():
            return None
        kept = self._kept()
        for name, component in self.training.components.items():
            _load(component, kept["components"][name])
        torch.set_rng_state(kept["torch"])
        np.random.set_state(kept["numpy"])
        random.setstate(kept["random"])
        return kept["step"]

    def keep(self, step: int, *, last: bool) -> bool:
        if last:
            components = self.training.components
            kept = {
                "step": step,
                "components": {name: _state(component) for name, component in components.items()},
                "torch": torch.get_rng_state(),
                "numpy": np.random.get_state(),
                "random": random.getstate(),
            }
            torch.save(kept, self.file)
        return True


class Keepstep(Plain):
    def __init__(self, training: Training, file: Path) -> None:
        super().__init__(training, file)
        self.checkpointer = keepstep.Checkpointer(training.components, **training.options)

    def newest(self) -> int | None:
        return self.checkpointer.latest_step()

    def restore(self) -> int | None:
        at = self.checkpointer.restore(rng="later" if self.training.rng_later else "now")
        if (saver := self.checkpointer._saver) is not None:
            saver._patience_s = lambda: 60.0  # no step is left out because the drive is slow
        return at.step if at else None

    def keep(self, step: int, *, last: bool) -> bool:
        kept = self.checkpointer.save(step)
        if last:
            with contextlib.suppress(keepstep.NotDurableError):
                self.checkpointer.wait(step, "staged", timeout=20)
        return kept

    def close(self) -> None:
        self.checkpointer.close(timeout=30)


WAYS = {"undisturbed": Plain, "control": Control, "keepstep": Keepstep}


def _state(component: Any) -> Any:
    if isinstance(component, torch.Generator):
        return component.get_state()
    if isinstance(component, np.random.Generator):
        return component.bit_generator.state
    if isinstance(component, np.random.RandomState):
        return component.get_state()
    if isinstance(component, random.Random):
        return component.getstate()
    return component.state_dict() if hasattr(component, "state_dict") else component


def _load(component: Any, state: Any) -> None:
    if isinstance(component, torch.Generator):
        component.set_state(state)
    elif isinstance(component, np.random.Generator):
        component.bit_generator.state = state
    elif isinstance(component, np.random.RandomState):
        component.set_state(state)
    elif isinstance(component, random.Random):
        component.setstate(state)
    elif hasattr(component, "load_state_dict"):
        component.load_state_dict(state)
    else:
        component.clear()
        component.update(state)


def _seen(component: Any) -> Any:
    """What is compared of a component. Beside its state: which tensors an optimizer steps."""
    if isinstance(component, torch.nn.Module):
        return component
    if isinstance(component, torch.optim.Optimizer):
        groups = [group["params"] for group in component.param_groups]
        return {"state_dict": component.state_dict(), "parameters": groups}
    return component.state_dict() if hasattr(component, "state_dict") else component


def _everything(training: Training) -> dict[str, str]:
    named = training.components.items()
    components = {
        name: _seen(component) for name, component in named if name not in training.uncompared
    }
    return describe({**components, "also": training.final()})


def _steps(training: Training, life: Life) -> Iterator[Any]:
    if training.loop is not None:
        yield from training.loop(life)
    else:
        assert training.step is not None
        for step in range(life.first, life.steps):
            yield training.step(step)


def _train(row: Row, how: str, directory: Path, number: int) -> None:
    torch.set_num_threads(1)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(number)  # what is not restored differs from the life before
    training = row.make()
    kept = WAYS[how](training, directory / f"{how}.pt")
    with (directory / f"{how}.jsonl").open("a") as file:

        def note(what: dict[str, str]) -> None:
            file.write(json.dumps(what) + "\n")
            file.flush()

        training.prepare(kept.newest())
        at = kept.restore()
        if at is not None:
            note({f"life {number} goes on after": str(at)})
            training.restored()
            if row.observed:
                note(_under(f"after step {at}", _everything(training)))
        life = Life(
            first=0 if at is None else at + 1, steps=row.steps, checkpointer=kept.checkpointer
        )
        dies_after = row.kills[number] if how != "undisturbed" and number < len(row.kills) else None
        for step, seen in enumerate(_steps(training, life), life.first):
            note(_under(f"step {step}", describe(seen, "loss")))
            if not kept.keep(step, last=step == dies_after):
                note({f"step {step} is kept": "no"})
            if step == dies_after:
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "undisturbed" and step in row.kills and row.observed:
                note(_under(f"after step {step}", _everything(training)))
        training.ends()
        final = _everything(training)
        draws = [torch.rand(2), np.random.random(2), random.random()]
        note(_under("at the end", {**final, **describe(draws, "drawn")}))
        kept.close()


def _under(place: str, described: dict[str, str]) -> dict[str, str]:
    return {f"{place}: {path}": text for path, text in described.items()}


def main() -> None:
    name, how, directory, number = sys.argv[1:]
    warnings.simplefilter("ignore")
    row = next(row for row in (*every_row(), *wrong.TABLE.rows) if row.name == name)
    _train(row, how, Path(directory), int(number))
