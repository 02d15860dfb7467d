"""What all ranks of a node want is read once for all of them, and a rank that dies holds up none.

The images are larger than what the sidecar may take, so everything comes through the ranks'
windows: 8 MiB chunks, each verified.
"""

from __future__ import annotations

import shutil
import time

import pytest

from keepstep.image.layout import CHUNK_BYTES
from tests.harness import files_below

BIG = 999
"""See `rank.py`: 124 MB of state."""

LIMIT = ("--memory-limit", "100Mi")
"""Two windows of 48 MiB."""


@pytest.fixture
def counters(sidecar):
    """What the sidecar counts: windows' bytes by tier, shared bytes, bytes of the archive."""

    def read():
        status = sidecar.get("/v1/status")
        archive = sum(tier["received_bytes"] for tier in status["tiers"].values())
        return status["window_bytes"], status["window_shared_bytes"], archive

    return read


def image_bytes(directory):
    return sum(path.stat().st_size for path in files_below(directory, ".safetensors"))


def test_two_ranks_with_the_same_state_fetch_it_once_from_the_archive(
    run_of, sidecar, counters, tmp_path
):
    archive = tmp_path / "archive"
    archive.mkdir()
    options = ("--archive", str(archive), "--archive-every", "1")
    run = run_of(BIG)
    run.lose_memory(*options)
    step = run.save("ddp", 1)
    assert files_below(archive, "step.json")
    size = image_bytes(archive)
    sidecar.kill()  # it writes there until then
    shutil.rmtree(sidecar.volume)
    run.lose_memory(*options, *LIMIT)
    for answer in run.restore("ddp", 2, trains=True):
        assert answer == {"step": step, "tier": "archive", "wrong": []}
    read, shared, received = counters()
    print(f"image {size}, read {read}, shared {shared}, received {received}")
    # each rank looks at the values that are no tensors before all know what they want
    assert size - CHUNK_BYTES < read["archive"] <= size + 2 * CHUNK_BYTES
    # the manifest (header, digest table, control page) passes through no window
    assert 0 <= received - read["archive"] < 1 << 20
    assert size - CHUNK_BYTES < shared <= size


def test_ranks_that_need_different_parts_do_not_wait_for_each_other(run_of, counters):
    run = run_of(BIG)
    step = run.save("plain", 1)
    run.lose_memory(*LIMIT)
    begun = time.monotonic()
    for answer in run.restore("columns", 2):
        assert (answer["step"], answer["wrong"]) == (step, [])
    for answer in run.restore("fsdp", 2):
        assert (answer["step"], answer["wrong"]) == (step, [])
    print(f"{time.monotonic() - begun:.1f} s", counters())
    assert counters()[1] > 0, "columns share every chunk"


def test_a_rank_that_dies_during_a_restore_raises_an_error_on_the_others_at_once(run_of, sidecar):
    run = run_of(BIG)
    step = run.save("ddp", 1)
    run.lose_memory(*LIMIT)
    begun = time.monotonic()
    [answer] = run.restore("ddp", 2, die=1)
    assert time.monotonic() - begun < 60
    assert "error" in answer, answer
    assert answer["spoiled"] == answer["changed"] != [], answer
    assert not list(sidecar.memory.rglob("window-*"))
    # and the next life has all of it
    for answer in run.restore("ddp", 2):
        assert (answer["step"], answer["wrong"]) == (step, [])
