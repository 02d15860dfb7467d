"""The demo's verdict is only worth something if it can be "not bit-equal"."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).parents[2] / "examples" / "demo_report.py"
STEPS = 30


@pytest.fixture(scope="module")
def demo_report() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_report", SOURCE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def start(wall: float, first: int = 0, tier: str | None = None) -> dict[str, object]:
    return {"first": first, "tier": tier, "restore_s": tier and 0.02, "pid": 1, "wall": wall}


def step(number: int, wall: float, loss: float | None = None) -> dict[str, object]:
    value = 5.0 - number / STEPS if loss is None else loss
    hexadecimal = value.hex()
    return {"step": number, "loss": value, "loss_hex": hexadecimal, "seconds": 0.1, "wall": wall}


def journal(report: ModuleType, path: Path, events: list[dict[str, object]]) -> object:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return report.Journal(path)


def uninterrupted() -> list[dict[str, object]]:
    return [start(100.0)] + [step(n, 100.1 + n / 10) for n in range(STEPS)]


def interrupted() -> list[dict[str, object]]:
    """Killed after step 9 at 101.05; back at 104 with step 8 restored, so step 9 is done again."""
    before = [start(100.0)] + [step(n, 100.1 + n / 10) for n in range(10)]
    after = [start(104.0, first=9, tier="memory")]
    return before + after + [step(n, 103.2 + n / 10) for n in range(9, STEPS)]


def report_of(report: ModuleType, folder: Path, killed: list[dict[str, object]]) -> object:
    return report.Report(
        steps=STEPS,
        start_s=4.0,
        plain=journal(report, folder / "plain", uninterrupted()),
        kept=journal(report, folder / "kept", uninterrupted()),
        killed=journal(report, folder / "killed", killed),
        deaths=(report.Death(victim="one trainer", step=9, wall=101.05),),
    )


def test_a_run_that_was_killed_and_did_a_step_again_is_bit_equal(
    demo_report: ModuleType, tmp_path: Path
) -> None:
    assert report_of(demo_report, tmp_path, interrupted()).bit_equal


ONE_BIT = step(27, 105.9, loss=math.nextafter(5.0 - 27 / STEPS, 9.0))
AGAIN = step(9, 104.1, loss=1.0)


@pytest.mark.parametrize(
    ("killed", "differing"),
    [
        pytest.param([*interrupted()[:-3], ONE_BIT, *interrupted()[-2:]], 27, id="one bit"),
        pytest.param([*interrupted()[:12], AGAIN, *interrupted()[13:]], 9, id="a step done again"),
        pytest.param([e for e in interrupted() if e.get("step") != 20], 20, id="never finished"),
    ],
)
def test_a_loss_that_is_another_or_missing_is_a_difference(
    demo_report: ModuleType, tmp_path: Path, killed: list[dict[str, object]], differing: int
) -> None:
    assert report_of(demo_report, tmp_path, killed).differing == [differing]
