"""Trains a row three times, each life a process of its own, and says what came of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests import warm
from tests.conformance.compare import Description, differences
from tests.conformance.table import Result, Row
from tests.harness import SidecarProcess

LIFE = "tests.conformance.life"
_START = f"from {LIFE} import main; main()"
_KILLED = -9
_LONGEST_S = 90.0


@dataclass(frozen=True)
class Outcome:
    """What the lives of one way recorded, said, and how each ended."""

    record: Description
    outputs: tuple[str, ...]
    codes: tuple[int, ...]
    steps: int

    @property
    def ended_well(self) -> bool:
        return self.codes[-1] == 0

    @property
    def refusal(self) -> str:
        """The UsageError, of one line or several, by which the last life ended; '' if by none."""
        if self.ended_well:
            return ""
        found = re.findall(r"^keepstep\.errors\.(UsageError: .*)", self.outputs[-1], re.M | re.S)
        return found[-1] if found else ""


class Trial:
    """One row in a directory of its own."""

    def __init__(self, row: Row, directory: Path, *, modules: tuple[str, ...] = ()) -> None:
        self.row, self.directory = row, directory
        self._modules = (LIFE, *modules, *warm.TRAINER)

    def undisturbed(self) -> Outcome:
        outcome = self._lives("undisturbed", {})
        assert outcome.ended_well, f"undisturbed: {outcome.outputs[-1][-3000:]}"
        kills = enumerate(self.row.kills, 1)
        goes_on = {f"life {number} goes on after": str(step) for number, step in kills}
        return Outcome({**goes_on, **outcome.record}, outcome.outputs, outcome.codes, outcome.steps)

    def control(self) -> Outcome:
        return self._lives("control", {})

    def keepstep(self) -> Outcome:
        with _sidecar(self.directory) as sidecar:
            return self._lives("keepstep", {"KEEPSTEP_SOCKET": str(sidecar.socket)})

    def _lives(self, how: str, environment: dict[str, str]) -> Outcome:
        codes, outputs = [], []
        lives = 1 if how == "undisturbed" else len(self.row.kills) + 1
        while len(codes) < lives and set(codes) <= {_KILLED}:
            log = self.directory / f"{how}-{len(codes)}.log"
            words = ["-c", _START, self.row.name, how, str(self.directory), str(len(codes))]
            variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
            with log.open("wb") as file:
                life = warm.Process(words, modules=self._modules, stdout=file, env=variables)
                codes.append(life.wait(_LONGEST_S))
            outputs.append(log.read_text(errors="replace"))
        record: Description = {}
        written = self.directory / f"{how}.jsonl"
        for line in written.read_text().splitlines() if written.exists() else ():
            record |= json.loads(line)
        steps = {key.partition(":")[0] for key in record if re.match(r"step \d+: ", key)}
        return Outcome(record, tuple(outputs), tuple(codes), len(steps))


@contextmanager
def _sidecar(directory: Path) -> Iterator[SidecarProcess]:
    memory = Path(tempfile.mkdtemp(prefix="keepstep-test-", dir="/dev/shm"))
    sidecar = SidecarProcess("run", memory, directory / "volume", directory / "sidecar.log")
    try:
        yield sidecar.start()
    finally:
        sidecar.end()
        shutil.rmtree(memory, ignore_errors=True)


def of_control(undisturbed: Outcome, control: Outcome) -> Result:
    if not control.ended_well:
        return Result.RAISES
    differs = differences(undisturbed.record, control.record)
    return Result.DIFFERS if differs else Result.EQUAL


def of_keepstep(row: Row, undisturbed: Outcome, control: Outcome, kept: Outcome) -> Result:
    """DIFFERS and RAISES are what no row may have."""
    if kept.ended_well:
        differs = differences(undisturbed.record, kept.record)
        if not differs:
            return Result.EQUAL
        if not control.ended_well:
            return Result.DIFFERS
        if all(kept.record.get(path) == control.record.get(path) for path in differs):
            return Result.AS_CONTROL
        less = set(differs) < set(differences(undisturbed.record, control.record))
        return Result.DIFFERS_LESS if less else Result.DIFFERS
    if len(kept.codes) > 1:
        warned = [line for output in kept.outputs[:-1] for line in _warnings(output)]
        named = bool(row.message) and any(row.message in line for line in warned)
        return Result.NAMED_AT_SAVE if named else Result.RAISES
    if not kept.refusal or row.message not in kept.refusal or kept.steps > 1:
        return Result.RAISES
    return Result.REFUSED_AT_FIRST_SAVE if kept.steps else Result.REFUSED_AT_START


def _warnings(output: str) -> list[str]:
    return [line for line in output.splitlines() if "keepstep: " in line]


def report(undisturbed: Outcome, other: Outcome) -> str:
    """What differs, and what was said, in some lines."""
    lines = []
    if not other.ended_well:
        last_lines = [line for line in other.outputs[-1].splitlines() if line.strip()]
        lines += [f"lives ended with {other.codes}", *(line[:600] for line in last_lines[-5:])]
    else:
        differs = differences(undisturbed.record, other.record)
        lines.append(f"{len(differs)} of {len(undisturbed.record)} places differ")
        for path in differs[:3]:
            lines.append(f"  {path}: undisturbed {undisturbed.record.get(path, 'missing')[:200]}")
            lines.append(f"  {path}:   restarted {other.record.get(path, 'missing')[:200]}")
    for number, output in enumerate(other.outputs):
        warned = [line for line in _warnings(output) if "restored step" not in line]
        lines += [f"  life {number} said {line[:400]}" for line in warned[:3]]
    return "\n".join(lines)
