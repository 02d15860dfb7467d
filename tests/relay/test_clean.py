"""A gone run's directory goes, whole or not at all, and nothing else does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.errors import StorageError, UsageError
from keepstep.wire.reports import STILL_USED_EXIT
from keepstep_sidecar.relay.directories import StillUsedError, clean
from keepstep_sidecar.volume.volume import Ownership


def _run(tmp_path: Path, name: str = "gpt") -> Path:
    """`<volume>/<namespace>/<run>` with two node ranks; returns the run's directory."""
    for rank in ("0", "1"):
        step = tmp_path / "team" / name / rank / name / "0001.aaaaaaaa-000000040"
        step.mkdir(parents=True)
        (step / "rank-00000-of-00002.safetensors").write_bytes(b"x")
        Ownership(step.parent / ".lock").release()
    return tmp_path / "team" / name


def test_all_of_one_run_goes_and_its_neighbour_stays(tmp_path: Path) -> None:
    run, other = _run(tmp_path), _run(tmp_path, "gpt-2")
    assert clean(run) == 4
    assert sorted(run.parent.iterdir()) == [other]
    assert len(list(other.rglob("*.safetensors"))) == 2
    assert clean(run) == 0, "clean already"
    assert clean(tmp_path / "nobody" / "gpt") == 0


def test_a_run_that_a_sidecar_uses_is_left_whole(tmp_path: Path) -> None:
    run = _run(tmp_path)
    lock = Ownership(run / "1" / "gpt" / ".lock")
    with pytest.raises(StorageError, match=r"1/gpt: a sidecar uses it.*nothing was removed"):
        clean(run)
    assert len(list(run.rglob("*.safetensors"))) == 2
    lock.release()
    clean(run)
    assert not run.exists()


def test_a_run_that_wrote_anything_since_it_was_taken_for_gone_is_left_whole(
    tmp_path: Path,
) -> None:
    run = _run(tmp_path)
    gone = time.time() + 3600.0
    (run / "0" / "gpt" / "run.json").write_text("{}")
    for path in (run / "1" / "gpt", run / "0" / "gpt" / "run.json"):
        os.utime(path, (gone + 900.0, gone + 900.0))
        with pytest.raises(StillUsedError, match="written to after the run was gone"):
            clean(run, gone_since=gone)
        os.utime(path, (gone + 300.0, gone + 300.0))  # clocks of two machines may differ so much
    assert clean(run, gone_since=gone) == 5


def test_no_link_is_followed_neither_on_the_way_nor_within(tmp_path: Path) -> None:
    run, precious = _run(tmp_path), tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_bytes(b"x")
    (run / "0" / "gpt" / "link").symlink_to(precious)
    (run / "1" / "gpt" / "0001.aaaaaaaa-000000040" / "link").symlink_to(precious)
    clean(run)
    assert not run.exists()
    assert (precious / "file").exists()
    (tmp_path / "elsewhere").symlink_to(tmp_path / "team")
    other = _run(tmp_path, "gpt-2")
    with pytest.raises(StorageError, match="cannot be removed"):
        clean(tmp_path / "elsewhere" / "gpt-2")
    assert other.exists()


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Path]:
    """A run with a tree of 2,000 levels, which pytest itself could not remove."""
    run = _run(tmp_path)
    fd = os.open(run / "0" / "gpt", os.O_RDONLY)
    for depth in range(2000):
        os.mkdir("0", dir_fd=fd)
        if depth % 500 == 0:
            os.close(os.open("file", os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=fd))
        deeper = os.open("0", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = deeper
    os.close(fd)
    yield run
    subprocess.run(["rm", "-rf", str(tmp_path)], check=True)


def test_a_tree_of_any_depth_goes(deep: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    assert clean(deep) == 4 + 4
    assert list(deep.parent.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_attempt_that_was_cut_short_is_finished(tmp_path: Path) -> None:
    run = _run(tmp_path)
    run.rename(run.with_name(".gpt.removed"))
    assert clean(run) == 0
    assert list(run.parent.iterdir()) == []


def test_a_volume_is_no_run() -> None:
    with pytest.raises(UsageError, match="whole volume"):
        clean(Path("/proc"))


@pytest.mark.parametrize("name", ["A..b", ".gpt", "gpt_2", "x" * 64])
def test_only_what_can_be_the_name_of_a_run_is_removed(tmp_path: Path, name: str) -> None:
    run = _run(tmp_path, name)
    with pytest.raises(UsageError, match="<volume>/<namespace>/<run>"):
        clean(run)
    assert len(list(run.rglob("*.safetensors"))) == 2


def test_a_namespace_is_no_run_and_its_runs_stay_whole_locked_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = tmp_path / "volume"
    run = _run(volume)
    with pytest.raises(StorageError, match=r"gpt is no node rank's directory.*nothing was removed"):
        clean(run.parent)
    monkeypatch.setattr("keepstep_sidecar.relay.directories.mount_of", lambda directory: volume)
    with pytest.raises(UsageError, match="no directory of a run"):
        clean(Path(f"{run.parent}/"))  # what an empty name of a run comes to, below a hostPath
    assert len(list(run.rglob("*.safetensors"))) == 2


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        *((place, kind) for place in ("file", "2", "0/gpt-2") for kind in ("file", "link", "pipe")),
        *((place, "directory") for place in ("others", "0/gpt-2")),
    ],
)
def test_what_others_keep_beside_the_node_ranks_stays_and_the_run_with_it(
    tmp_path: Path, place: str, kind: str
) -> None:
    run, precious = _run(tmp_path), tmp_path / "precious"
    precious.mkdir()
    match kind:
        case "file":
            (run / place).write_bytes(b"a data set of others")
        case "link":
            (run / place).symlink_to(precious)
        case "pipe":
            os.mkfifo(run / place)
        case _:
            (run / place).mkdir()
    with pytest.raises(StorageError, match=rf"/gpt/{place} is no.*nothing was removed"):
        clean(run)
    assert (run / place).lstat()
    assert len(list(run.rglob("*.safetensors"))) == 2


def test_numeric_names_of_runs_and_namespaces_do_not_pass_one_level_for_another(
    tmp_path: Path,
) -> None:
    run = _run(tmp_path / "volume", "0")
    for directory in (run / "0", run.parent):
        with pytest.raises(StorageError, match="nothing was removed"):
            clean(directory)
    assert len(list(run.rglob("*.safetensors"))) == 2


def test_a_rank_with_files_and_without_a_lock_is_not_understood_and_stays(tmp_path: Path) -> None:
    run = _run(tmp_path)
    (run / "1" / "gpt" / ".lock").unlink()
    with pytest.raises(StorageError, match=r"1/gpt.*no \.lock.*nothing was removed"):
        clean(run)
    assert len(list(run.rglob("*.safetensors"))) == 2


def test_the_command_says_what_went_and_needs_to_be_told_what(tmp_path: Path) -> None:
    run = _run(tmp_path)
    program = (sys.executable, "-m", "keepstep_sidecar")
    done = subprocess.run([*program, "clean", str(run)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{run}: 4 files removed\n")
    late = [*program, "clean", "--gone-since", "1000", str(_run(tmp_path))]
    done = subprocess.run(late, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (STILL_USED_EXIT, "")
    assert "nothing was removed" in done.stderr
    done = subprocess.run([*program, "clean"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Missing argument 'DIR...'" in done.stderr
