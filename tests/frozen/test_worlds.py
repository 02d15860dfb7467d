"""Bases in another world than the one that wrote them, after frozen weights changed in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.harness import SidecarProcess, torchrun

RANK = Path(__file__).parent / "machine_rank.py"


class Lives:
    """Lives of one run, each of which loads another base at its start."""

    def __init__(self, sidecar: SidecarProcess, out: Path, kind: str) -> None:
        self.sidecar, self._out, self._kind, self._seed = sidecar, out, kind, 0

    def train(self, world: int, last: int, **variables: str) -> list[dict]:
        """What each rank left."""
        self._seed += 1
        out = self._out / f"{self.sidecar.run}-{self._seed}"
        words = (self._kind, self._seed, last, out, self.sidecar.socket)
        done = torchrun(world, RANK, *words, WIDTH="1408", **variables)
        assert done.returncode == 0, done.stderr[-3000:] + self.sidecar.text()[-2000:]
        return [torch.load(f"{out}.{rank}") for rank in range(world)]

    def bases(self) -> int:
        """Bytes of the newest step's."""
        newest = max(self.sidecar.root.glob("0*"))
        return sum(path.stat().st_size for path in newest.glob("base-*"))

    def go_on(self, world: int, last: int, before: list[dict]) -> list[dict]:
        found = self.train(world, last)
        for record in found:
            assert record["begin"].keys() == before[0]["end"].keys()
            for name, value in before[0]["end"].items():
                assert torch.equal(record["begin"][name], value), name
        return found


@pytest.mark.parametrize(("kind", "memory"), [("ddp", "kept"), ("fsdp", "lost")])
def test_swapped_weights_are_restored_at_any_world_size(sidecar, tmp_path, kind, memory):
    lives = Lives(sidecar, tmp_path, kind)
    lives.train(2, 1)
    before = lives.bases()
    found = lives.train(2, 3, SWAP="2")
    assert 0 < lives.bases() < before, "what changed is in none"
    for world, last in ((3, 4), (1, 5)):
        if memory == "lost":
            sidecar.kill()
            sidecar.lose_memory()
            sidecar.start()
        found = lives.go_on(world, last, found)
        assert {record["from"] for record in found} == {last - 1}
    assert "discarded" not in sidecar.text()


def test_a_step_that_lost_the_base_of_one_rank_is_skipped_for_the_previous_step(sidecar, tmp_path):
    lives = Lives(sidecar, tmp_path, "fsdp")
    found = lives.train(2, 2)
    lives.train(2, 3)
    sidecar.kill()
    sidecar.lose_memory()
    next(max(sidecar.root.glob("0*")).glob("base-00001-*")).unlink()
    sidecar.start()
    assert {record["from"] for record in lives.go_on(3, 3, found)} == {2}


def test_a_fork_at_another_world_size_restores_the_swapped_weights(sidecars, tmp_path):
    archive, memory = tmp_path / "archive", tmp_path / "slots"
    archive.mkdir()
    memory.mkdir()
    often = ("--archive", str(archive), "--archive-every", "1", "--persist-every", "1")
    first = Lives(sidecars().start(*often), tmp_path, "fsdp")
    found = first.train(2, 3, SWAP="2")
    first.sidecar.terminate()
    fork = Lives(sidecars("fork", memory=memory), tmp_path, "fsdp")
    fork.sidecar.start(*often, "--restore-from", "run/3")
    found = fork.go_on(3, 4, found)
    fork.go_on(2, 5, found)
    assert fork.bases()
    first.sidecar.start(*often)
    assert first.train(1, 3)[0]["from"] == 3
