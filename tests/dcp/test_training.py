"""FSDP2, HSDP and 2-D trainings that are killed and go on at another world size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def lines(log: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize(
    ("kind", "world", "then", "later"),
    [("1d", 2, "1d", 3), ("2d", 4, "1d", 1), ("hsdp", 4, "1d", 2)],
)
def test_a_killed_training_resumes_from_its_newest_committed_step(
    sidecar, ranks, tmp_path, kind, world, then, later
) -> None:
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    ranks(world, "train", kind, 9, 3, first, killed=1)
    saved = {line["saved"]: line["state"] for line in lines(first)}
    assert list(saved) == [0, 1, 2]
    [directory] = sidecar.root.glob("0*-000000002")
    ranks(later, "train", then, 4, -1, f"{second}+", EXIT_DOOR=str(directory))
    loaded, *rest = lines(second)
    assert loaded["loaded"] == 2
    assert loaded["state"] == saved[2]
    assert [life["saved"] for life in rest] == [3]
    newest = max(sidecar.get("/v1/status")["steps"], key=lambda step: step["id"]["epoch"]["number"])
    assert (newest["id"]["step"], newest["world"], newest["committed"]) == (3, later, True)
    assert sidecar.get("/v1/status")["epoch"]["parent"]["step"] == 2
