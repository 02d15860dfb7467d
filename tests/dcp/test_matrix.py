"""Saved by stock `dcp.save`, loaded at another world size by ours and by stock readers."""

from __future__ import annotations

import os

import pytest

from tests.harness import layout_of


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (2, 3), (4, 2), (1, 2)])
def test_random_layouts_are_restored_bit_equal_at_another_world_size(
    sidecar, ranks, saved, loaded
) -> None:
    seed = 7 * saved + loaded
    ranks(saved, "save", seed, 12)
    [directory] = sidecar.root.glob("0*-000000012")
    assert len(list(directory.glob("*.safetensors"))) == saved
    ranks(loaded, "load", seed, directory, KEEPSTEP_SOCKET="")


def test_a_broken_byte_in_one_shard_stops_all_ranks_before_any_loads(sidecar, ranks) -> None:
    ranks(2, "save", 5, 12)
    [path] = sidecar.root.glob("0*-000000012/rank-00001-of-00002.safetensors")
    first = next(entry for entry in layout_of(path).entries.values() if entry.end > entry.begin)
    fd = os.open(path, os.O_RDWR)
    os.pwrite(fd, bytes([os.pread(fd, 1, first.begin)[0] ^ 1]), first.begin)
    os.close(fd)
    ranks(2, "broken", path.parent, 5, KEEPSTEP_SOCKET="")


def test_asynchronous_saves_of_two_ranks_and_a_save_by_a_single_rank_are_both_committed(
    sidecar, ranks
) -> None:
    ranks(2, "overlapped", sidecar.root)
    steps = {step["id"]["step"]: step for step in sidecar.get("/v1/status")["steps"]}
    assert steps[5]["world"] == 2
    assert steps[5]["committed"]


def test_a_save_by_a_single_rank_uses_another_epoch_than_saves_by_all_ranks(sidecar, ranks) -> None:
    ranks(2, "alone_in_between", sidecar.root)
    steps = {step["id"]["step"]: step for step in sidecar.get("/v1/status")["steps"]}
    assert steps[6]["world"] == 2
    assert steps[6]["committed"]
    worlds = {}
    for step in steps.values():
        worlds.setdefault(step["id"]["epoch"]["number"], set()).add(step["world"])
    assert all(len(each) == 1 for each in worlds.values()), worlds
