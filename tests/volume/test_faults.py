"""SIGKILL and errors of system calls at every fault point."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep.errors import NoSpaceError, StorageError
from keepstep_sidecar.volume import files
from keepstep_sidecar.volume.run_tree import is_step
from keepstep_sidecar.volume.volume import Volume
from tests.volume.images import RUN, empty_slot, load, make_layout, staged, step_id
from tests.volume.points import FAULT_POINTS

REPOSITORY = Path(__file__).parents[2]
WRITE_POINTS = tuple(name for name in FAULT_POINTS if name.startswith("write."))
FAILING_POINTS = tuple(name for name in WRITE_POINTS if name != "write.done")


def run_victim(root: Path, fault: str) -> tuple[int, list[str]]:
    """Exit status, and what the process had been promised before it died."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.volume.victim", str(root)],
        cwd=REPOSITORY,
        env={**os.environ, files.FAULTS_ENV: fault},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode in (0, -signal.SIGKILL), result.stderr
    return result.returncode, result.stdout.splitlines()


def check_after_death(volume: Volume, promised: list[str]) -> None:
    scan = volume.scan()
    assert scan.problems == ()
    found = {(shard.rank, shard.step_id.step): shard for shard in scan.shards}
    for (rank, step), shard in found.items():
        expected = staged(make_layout(rank=rank), step)
        view = empty_slot(expected.layout)
        load(volume, shard.path, view)
        assert (
            view[: expected.layout.digests_begin] == expected.view[: expected.layout.digests_begin]
        )
    for line in promised:
        if line.startswith("durable"):
            rank, step = map(int, line.split()[1:])
            gone = (step == 1 and "retiring" in promised) or (step == 2 and "losing" in promised)
            assert gone or (rank, step) in found, line
    for directory in volume.root.iterdir():
        if is_step(directory.name):
            assert len(list(directory.iterdir())) == 2, f"{directory.name} is incomplete"
    assert list(volume.root.rglob(".rank-*")) == []
    assert not (volume.root / "retired").exists() or not any((volume.root / "retired").iterdir())
    assert ("recorded" in promised) <= bool(volume.record.epochs)


@pytest.mark.parametrize(
    "point", [point for point in FAULT_POINTS if not point.startswith("peer.")]
)
def test_a_scan_finds_all_durable_shards_after_sigkill_at_any_point(
    tmp_path: Path, point: str
) -> None:
    root = tmp_path / RUN
    status, promised = run_victim(root, f"{point}:kill")
    assert status == -signal.SIGKILL, f"{point} is not passed by the story"
    volume = Volume(root, run=RUN)
    check_after_death(volume, promised)
    volume.close()


@pytest.mark.parametrize("point", ["write.data", "write.control", "write.rename"])
@pytest.mark.parametrize("hit", [2, 3])
def test_a_scan_finds_all_durable_shards_after_sigkill_in_a_later_write(
    tmp_path: Path, point: str, hit: int
) -> None:
    status, promised = run_victim(tmp_path / RUN, f"{point}:kill@{hit}")
    assert status == -signal.SIGKILL
    volume = Volume(tmp_path / RUN, run=RUN)
    check_after_death(volume, promised)
    volume.close()


def test_the_write_scenario_completes_without_faults(tmp_path: Path) -> None:
    status, promised = run_victim(tmp_path / RUN, "")
    assert (status, promised[-1]) == (0, "done")


@pytest.mark.parametrize("point", FAILING_POINTS)
def test_an_io_error_quarantines_the_file_and_is_not_retried(
    volume: Volume, armed: Callable[[str], None], point: str
) -> None:
    slot = staged(make_layout(), 1)
    armed(f"{point}:eio")
    with pytest.raises(StorageError, match=r"step 0001.*rank 0.*Check the drive"):
        volume.write(slot.view, slot.layout, slot.control)
    assert "injected" in volume.failed
    assert volume.scan().shards == ()
    assert volume.count_quarantined_files() == (0 if point == "write.create" else 1)
    later = staged(make_layout(), 2)
    volume.write(later.view, later.layout, later.control)
    assert volume.failed == ""
    assert [shard.step_id for shard in volume.scan().shards] == [step_id(2)]


def fail(volume: Volume, armed: Callable[[str], None], steps: range) -> None:
    for step in steps:
        slot = staged(make_layout(), step)
        armed("write.table:eio")
        with pytest.raises(StorageError, match="Check the drive"):
            volume.write(slot.view, slot.layout, slot.control)
    armed("")


def test_repeated_drive_errors_leave_only_the_newest_few_quarantined_files(
    volume: Volume, armed: Callable[[str], None]
) -> None:
    fail(volume, armed, range(1, 21))
    kept = sorted(path.name.partition(".rank")[0] for path in volume.root.glob("quarantine/*"))
    assert kept == [str(step_id(step)) for step in range(5, 21)]
    assert list(volume.root.glob("pending/*")) == []


def test_quarantined_files_are_deleted_for_new_writes_once_the_drive_works_again(
    open_volume: Callable[..., Volume], armed: Callable[[str], None]
) -> None:
    size_bytes = make_layout().size_bytes
    limit_bytes = 4 * size_bytes + (64 << 10)
    volume = open_volume(capacity_bytes=limit_bytes)
    fail(volume, armed, range(1, 9))
    assert volume.free_bytes() > 4 * size_bytes
    for step in range(11, 15):
        slot = staged(make_layout(), step)
        volume.write(slot.view, slot.layout, slot.control)
    assert len(volume.scan().shards) == 4
    taken = sum(path.lstat().st_blocks * 512 for path in volume.root.rglob("*") if path.is_file())
    assert taken <= limit_bytes


@pytest.mark.parametrize("point", FAILING_POINTS)
def test_a_full_disk_leaves_nothing_behind(
    volume: Volume, armed: Callable[[str], None], point: str
) -> None:
    slot = staged(make_layout(), 1)
    armed(f"{point}:enospc")
    with pytest.raises(NoSpaceError, match="Free space"):
        volume.write(slot.view, slot.layout, slot.control)
    assert volume.failed == ""
    assert [path for path in volume.root.rglob("*") if "rank" in path.name] == []
    volume.write(slot.view, slot.layout, slot.control)


def test_no_thread_continues_writing_after_one_has_failed(
    volume: Volume, armed: Callable[[str], None]
) -> None:
    slot = staged(make_layout(parameters=4_000_000), 1)
    armed("write.data:eio@2")
    with pytest.raises(StorageError):
        volume.write(slot.view, slot.layout, slot.control)
    assert volume.count_quarantined_files() == 1


def test_a_read_error_quarantines_the_shard(volume: Volume, armed: Callable[[str], None]) -> None:
    slot = staged(make_layout(), 1)
    path = volume.write(slot.view, slot.layout, slot.control).shard.path
    armed("load.read:eio")
    view = empty_slot(slot.layout)
    with pytest.raises(StorageError, match="use another copy"):
        load(volume, path, view)
    assert view[slot.layout.control_begin :] == bytes(4096)
    assert (volume.count_quarantined_files(), volume.scan().shards) == (1, ())


@pytest.mark.parametrize(
    ("point", "act"),
    [
        ("publish.rename", lambda volume: volume.publish_step(step_id(1))),
        ("publish.sync", lambda volume: volume.publish_step(step_id(1))),
        ("retire.rename", lambda volume: volume.delete_step(step_id(1))),
        ("retire.unlink", lambda volume: volume.delete_step(step_id(1), reuse=False)),
        ("record.data", lambda volume: volume.save_record(volume.record)),
        ("record.rename", lambda volume: volume.save_record(volume.record)),
    ],
)
def test_other_io_errors_raise_a_storage_error_that_names_the_failed_operation(
    volume: Volume,
    armed: Callable[[str], None],
    point: str,
    act: Callable[[Volume], object],
) -> None:
    slot = staged(make_layout(), 1)
    volume.write(slot.view, slot.layout, slot.control)
    armed(f"{point}:eio")
    with pytest.raises(StorageError, match=r"cannot (publish|retire|delete|write)") as caught:
        act(volume)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EIO
    act(volume)
