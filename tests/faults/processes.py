"""Trainers as real processes, all of one life together, and what each said."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests import warm

WORLD = 2


@dataclass(frozen=True)
class Order:
    """What a life of trainers is to do. `steps`: how many before it ends by itself with `close`.
    `waiting`: how likely it waits for a step that it saved. `width`: of the model's layer; 12,000
    make an image of 74 MB, which may lie on huge pages."""

    socket: str
    meeting: str
    seed: int
    steps: int = 1_000_000
    waiting: float = 0.0
    width: int = 512


@dataclass
class Life:
    """One life of the trainers: processes and their logs."""

    order: Order
    logs: list[Path]
    processes: list[warm.Process] = field(default_factory=list)
    _events: list[list[dict[str, Any]]] = field(default_factory=lambda: [[] for _ in range(WORLD)])
    _read: list[int] = field(default_factory=lambda: [0] * WORLD)
    _seen: list[int] = field(default_factory=lambda: [0] * WORLD)

    def start(self) -> Life:
        for rank in range(WORLD):
            log = self.logs[rank]
            words = ["-m", "tests.faults.trainer", json.dumps(asdict(self.order)), str(rank)]
            with log.with_name(log.name + ".err").open("ab") as out:
                self.processes.append(warm.Process([*words, str(log)], stdout=out))
        return self

    def events(self, rank: int, *kinds: str) -> list[dict[str, Any]]:
        """What a rank said, oldest first; of these kinds only, if any are named."""
        if self.logs[rank].exists():
            with self.logs[rank].open("rb") as log:
                log.seek(self._read[rank])
                new = log.read()
            new = new[: new.rfind(b"\n") + 1]  # a line over two pages of the file comes in parts
            self._read[rank] += len(new)
            self._events[rank] += map(json.loads, new.splitlines())
        return [event for event in self._events[rank] if not kinds or event["event"] in kinds]

    def news(self, rank: int) -> list[dict[str, Any]]:
        """What a rank said since this was last asked."""
        events = self.events(rank)[self._seen[rank] :]
        self._seen[rank] += len(events)
        return events

    def restored(self) -> list[dict[str, Any]]:
        """What each rank that came so far said of its restore."""
        return [event for rank in range(WORLD) for event in self.events(rank, "restored")]

    def steps(self, rank: int, *, kept: bool = False) -> list[int]:
        """Steps that this rank saved; only those that are kept, as it was told."""
        saved = self.events(rank, "saved")
        return [event["step"] for event in saved if event["kept"] or not kept]

    def common(self, *, kept: bool = False) -> set[int]:
        """Steps that every rank saved."""
        return set.intersection(*(set(self.steps(rank, kept=kept)) for rank in range(WORLD)))

    def kill(self, ranks: range | list[int]) -> None:
        for rank in ranks:
            self.processes[rank].kill()

    def terminate(self) -> None:
        for process in self.processes:
            process.terminate()

    def end(self) -> None:
        """Whatever still lives dies; returns when it is gone."""
        self.kill(range(WORLD))
        for process in self.processes:
            process.wait(20)

    def dump(self) -> str:
        """Where every thread of every trainer stands, and what they logged last."""
        for process in self.processes:
            process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)  # for the dump to be written: nothing says when it is
        return "\n".join(
            f"--- {path}, exit code {process.poll()}:\n{path.read_text()[-4000:]}"
            for process, log in zip(self.processes, self.logs, strict=True)
            for path in [log.with_name(log.name + ".err")]
            if path.exists()
        )
