"""What a soak did and what it cost: one JSON line a fault while it runs, a summary at its end."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


@dataclass(frozen=True, kw_only=True)
class Struck:
    """One fault. `restored`: the step that was restored, None where no trainer ended; `tier`: from
    where; `lost`: finished steps; `seconds`: from the fault's beginning to the first new step."""

    number: int
    team: str
    fault: str
    at: float
    step: int
    floor: int
    restored: int | None
    tier: str | None
    lost: int
    seconds: float


class Record:
    """Of all teams together. `print` is called with each line."""

    def __init__(self, path: Path, *, of: int) -> None:
        self.struck: list[Struck] = []
        self._path, self._of = path, of
        self._began = time.monotonic()
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    def add(self, fault: Struck) -> None:
        with self._lock, self._path.open("a") as file:
            self.struck.append(fault)
            file.write(json.dumps(asdict(fault)) + "\n")
            minutes = (time.monotonic() - self._began) / 60
            where = "went on" if fault.restored is None else f"from {fault.restored} ({fault.tier})"
            print(
                f"soak {minutes:5.1f} min {len(self.struck):3d}/{self._of} {fault.team}"
                f" {fault.fault}:"
                f" at {fault.step}, {where}, {fault.lost} lost, {fault.seconds:.1f} s",
                flush=True,
            )

    def summary(self, **more: object) -> dict[str, object]:
        """Counts, and what each kind of fault cost."""
        by_fault: defaultdict[str, list[Struck]] = defaultdict(list)
        for fault in self.struck:
            by_fault[fault.fault].append(fault)
        tiers: defaultdict[str, int] = defaultdict(int)
        for fault in self.struck:
            if fault.restored is not None:
                tiers[fault.tier or "none"] += 1
        return {
            "faults": len(self.struck),
            "minutes": round((time.monotonic() - self._began) / 60, 1),
            **more,
            "restored_from": dict(sorted(tiers.items())),
            "by_fault": {name: _costs(found) for name, found in sorted(by_fault.items())},
            "all": _costs(self.struck),
        }


def _costs(found: Iterable[Struck]) -> dict[str, object]:
    found = list(found)
    lost, seconds = [fault.lost for fault in found], [fault.seconds for fault in found]
    return {
        "count": len(found),
        "restores": sum(fault.restored is not None for fault in found),
        "steps_lost_median": statistics.median(lost),
        "steps_lost_max": max(lost),
        "seconds_to_a_new_step_median": round(statistics.median(seconds), 1),
        "seconds_to_a_new_step_max": round(max(seconds), 1),
    }


def write(summary: dict[str, object], name: str) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(summary, indent=1) + "\n")
