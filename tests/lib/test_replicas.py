"""Replicas that have diverged are noticed and named, and a restore that mixes them says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from keepstep.save import replica_check
from keepstep.save.replica_check import differing_ranks
from keepstep.state.capture import capture_state
from keepstep.steps import EpochId
from tests.harness import eventually, torchrun

SCRIPT = Path(__file__).parent / "replicas_script.py"


def warned(text: str) -> list[str]:
    return [line for line in text.splitlines() if "with the same replica" in line]


def test_diverging_replicas_are_reported_on_every_rank_and_at_the_restore(sidecar):
    done = torchrun(2, SCRIPT, "no_sync", 12, 20.0, STATUS="1")
    assert done.returncode == 0, done.stderr
    lines = warned(done.stderr)
    assert sorted(line.partition(": ranks")[0][-6:] for line in lines) == ["rank 0", "rank 1"]
    assert all("ranks 0, 1 hold other values" in line for line in lines)
    assert len(warned(done.stdout)) == 1, "and it stands in the status"
    done = torchrun(2, SCRIPT, "no_sync", 13, 0.0)
    assert "rank 0 begins at 11" in done.stdout
    [line] = [line for line in done.stderr.splitlines() if "was saved while its replicas" in line]
    assert "step 11 was saved while its replicas differed, so what is restored mixes them" in line


def test_a_rank_with_wrong_results_is_reported(sidecar):
    done = torchrun(3, SCRIPT, "fault", 12, 20.0)
    lines = warned(done.stderr)
    assert len(lines) == 3, done.stderr
    assert all("rank 1 holds other values" in line for line in lines)


def test_a_differing_replicated_tensor_of_a_device_mesh_is_reported(sidecar):
    done = torchrun(3, SCRIPT, "mesh", 6, 20.0)
    lines = warned(done.stderr)
    assert len(lines) == 3, done.stderr
    assert all("rank 2 holds other values" in line for line in lines)


def test_unwrapped_models_are_restored_with_the_values_of_their_own_rank(sidecar):
    done = torchrun(2, SCRIPT, "apart", 12, 1.0)
    assert warned(done.stderr) == [], done.stderr
    ends = dict(re.findall(r"rank (\d) ends with (-?\d+)", done.stdout))
    done = torchrun(2, SCRIPT, "apart", 12, 0.0)
    begins = dict(re.findall(r"rank (\d) begins at 11 with (-?\d+)", done.stdout))
    assert begins == ends, done.stderr
    assert ends["0"] != ends["1"]


class _Run:
    """Replicas of several ranks in one process, over one store."""

    def __init__(self, monkeypatch, world, *, within_s=1.0):
        store = torch.distributed.HashStore()
        monkeypatch.setattr(replica_check, "_store", lambda: store)
        monkeypatch.setattr(replica_check, "_WITHIN_S", within_s)
        self.store, self.texts = store, {rank: [] for rank in range(world)}
        self.ranks = [
            replica_check.ReplicaCheck(
                rank=rank, epoch=EpochId(1, "00000001"), warn=self.texts[rank].append, world=world
            )
            for rank in range(world)
        ]
        self.taken = capture_state({"model": nn.Linear(2, 2)})

    def save(self, step, *ranks):
        for rank in ranks:
            self.ranks[rank].sample_replicas(self.taken, step)

    def close(self):
        for rank in self.ranks:
            rank.close()


def test_a_rank_on_another_node_that_does_not_save_is_reported(monkeypatch):
    run = _Run(monkeypatch, 3)
    for step in range(3):
        run.save(step, 0, 2)
    for rank in (0, 2):
        eventually(lambda rank=rank: run.texts[rank], what="the warning")
        assert "rank 1 has not saved step 1, which rank 0 saved a minute ago" in run.texts[rank][0]
    run.close()
    assert [len(texts) for texts in run.texts.values()] == [1, 0, 1], "once"


@pytest.mark.parametrize(
    ("digests", "ranks"),
    [
        ("aaaa", ()),
        ("aaba", (2,)),
        ("ab", (0, 1)),
        ("aabb", (0, 1, 2, 3)),
        ("aabc", (0, 1, 2, 3)),
        ("aaabc", (3, 4)),
    ],
)
def test_the_ranks_that_differ_from_the_majority_are_reported(digests, ranks):
    assert differing_ranks(dict(enumerate(digest.encode() for digest in digests))) == ranks
