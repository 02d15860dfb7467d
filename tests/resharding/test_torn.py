"""A restore that fails half-way leaves no mixture of steps that anybody could train on."""

from __future__ import annotations

import pytest
import torch

from keepstep.errors import RestoreError
from keepstep.restore.rank_restore import FillGuard
from tests.resharding.worlds import ID

BIG = 999
LIMIT = ("--memory-limit", "100Mi")


def damage(sidecar, step):
    """A byte in the lower rows of the last tensor: of two ranks, only the second one wants it, and
    by then both have filled nearly everything."""
    [shard] = sidecar.root.glob(f"0*-{step:09d}/rank-00000-of-00001.safetensors")
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size * 93 // 100)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    return shard


def test_all_ranks_restore_the_older_step_after_a_damaged_chunk_was_found(run_of, sidecar):
    run = run_of(BIG)
    older = run.save("plain", 1)
    shard = damage(sidecar, run.save("plain", 1, step=older + 1, scale=2))
    run.lose_memory(*LIMIT)
    for answer in run.restore("fsdp", 2, trains=True):
        assert answer == {"step": older, "tier": "local", "wrong": []}
    assert not shard.exists(), "it was read, and put aside"


def test_all_ranks_raise_without_an_older_step_and_partly_filled_tensors_are_nan(run_of, sidecar):
    run = run_of(BIG)
    damage(sidecar, run.save("plain", 1))
    run.lose_memory(*LIMIT)
    answers = run.restore("fsdp", 2)
    assert len(answers) == 2
    for answer in answers:
        assert answer["error"].startswith("RestoreError"), answer
        assert "rank-00000-of-00001" in answer["error"]
        assert "rank 1: " in answer["error"]
        assert answer["spoiled"] == answer["changed"] != []


def test_a_step_without_tensors_that_a_failed_attempt_has_changed_is_refused():
    changed, other = torch.zeros(3), torch.zeros(4)
    torn = FillGuard()
    torn.begin([changed])
    torn.check_tensors_refilled(ID, [changed, other], [changed.detach(), other])
    torn.check_tensors_refilled(ID, [other], [other])
    with pytest.raises(RestoreError, match=r"shapes \[3\]"):
        torn.check_tensors_refilled(ID, [changed, other], [other])


def fail(torn, begun):
    torn.begin(begun)
    raise RuntimeError("a peer is gone")


def test_only_partly_filled_tensors_are_set_to_nan_and_only_after_an_error():
    begun = [torch.ones(2), torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.int64)]
    other = torch.ones(2)
    with FillGuard() as torn:
        torn.begin(begun)
    assert all(bool((tensor == 1).all()) for tensor in begun)
    with pytest.raises(RuntimeError, match="a peer is gone"), FillGuard() as torn:
        fail(torn, begun)
    assert begun[0].isnan().all()
    assert begun[1].isnan().all()
    assert bool((begun[2] == 1).all())
    assert bool((other == 1).all())
