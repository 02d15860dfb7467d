"""`status`, `steps`, `verify`, `inspect`, `rm`, `stop` on what a real run has left."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepstep.image.layout import CHUNK_BYTES
from keepstep.steps import shard_name
from tests import warm
from tests.cli.conftest import TRAIN, Keepstep
from tests.harness import control_of, eventually, flip, layout_of


def shard_of(keepstep: Keepstep, step: int) -> Path:
    (path,) = (keepstep.directory / "train").glob(f"*-{step:09d}/{shard_name(0, 1)}")
    return path


# --- steps and status ------------------------------------------------------------------------


def test_the_steps_command_reads_the_volumes_when_no_sidecar_is_running(trained: Keepstep) -> None:
    document = trained.json("steps")
    assert document["run"] == "train"
    first, last = document["steps"]
    assert (first["step"], last["step"]) == (4, 5)
    assert last["committed"] is True
    assert last["dead"] is False
    assert last["tiers"] == ["local"]
    assert last["ranks"] == [0]
    assert last["bytes"] == shard_of(trained, 5).stat().st_size
    assert last["path"] == str(shard_of(trained, 5).parent)
    assert last["id"] == f"{last['epoch']}-000000005"


def test_status_and_steps_include_steps_in_memory_while_a_sidecar_is_running(
    keepstep: Keepstep,
) -> None:
    keepstep.script("train.py", TRAIN)
    keepstep("run", "--", warm.python(), "train.py", "6", "3", code=137)
    document = keepstep.json("status")
    assert document["running"] is True
    assert document["newest"]["tiers"] == ["memory", "local"], "a failure flushes the newest two"
    assert document["newest"]["committed"] is True
    assert document["sidecar"]["ranks"][0]["alive"] is False
    assert "0 of 1" in keepstep("status").stdout
    assert "memory, local" in keepstep("steps").stdout


def test_steps_beyond_the_parent_of_a_later_epoch_are_shown_as_dead(copied: Keepstep) -> None:
    root = copied.directory / "train"
    record = root / "run.json"
    epoch = copied.json("steps")["steps"][0]["epoch"]
    text = record.read_text().rstrip().removesuffix("]\n}").rstrip()
    later = f'{{"id": "0009.aaaaaaaa", "parent": "{epoch}-000000004"}}'
    record.write_text(f"{text}, {later}]\n}}")
    assert [step["dead"] for step in copied.json("steps")["steps"]] == [False, True]
    assert copied.json("status")["committed"]["id"].endswith("-000000004")


def test_status_and_steps_include_steps_in_the_archive(keepstep: Keepstep) -> None:
    archive = keepstep.home / "shared"
    archive.mkdir()
    keepstep.script("train.py", TRAIN)
    run = ("run", "--archive", str(archive), "--archive-every", "2", "--", warm.python())
    keepstep(*run, "train.py", "6", "3", code=137)

    def archived() -> list[Any]:
        return [step for step in keepstep.json("steps")["steps"] if "archive" in step["tiers"]]

    eventually(lambda: 2 in [step_row["step"] for step_row in archived()], within_s=30, every_s=0.3)
    # where a step that was due was left out, the one after it is there, too
    step = next(step_row for step_row in archived() if step_row["step"] == 2)
    assert (step["ranks_by_tier"]["archive"], "peer" in step["tiers"]) == ([0], False)
    assert step["tiers"][-1] == "archive"
    shown = keepstep("steps").stdout
    assert "ARCHIVE" in shown
    assert "PEER" not in shown, "there is none"

    def is_known() -> bool:
        tiers = keepstep.json("status")["sidecar"]["tiers"]
        assert list(tiers) == ["archive"]
        return (tiers["archive"]["backlog"], tiers["archive"]["sent"]) == (0, len(archived()))

    eventually(is_known, every_s=0.3)
    (row,) = _rows(keepstep("status").stdout, "archive")
    assert str(archive) in row
    assert row.endswith("none")

    archive.rename(keepstep.home / "elsewhere")  # as if it were not mounted any more
    keepstep(*run, "train.py", "9", "5", code=137)
    eventually(
        lambda: not _rows(keepstep("status").stdout, "archive")[0].endswith("none"),
        within_s=60,
        every_s=0.3,
        what="the trouble with the archive is shown",
    )


def _rows(shown: str, tier: str) -> list[str]:
    """Of the table of tiers."""
    return [line.rstrip() for line in shown.splitlines() if line.lstrip().startswith(tier)]


# --- verify ----------------------------------------------------------------------------------


def test_verify_reads_all_committed_steps(trained: Keepstep) -> None:
    document = trained.json("verify")
    assert document["verified"] is True
    assert len(document["steps"]) == 2
    assert "2 steps, 2 shards" in trained("verify").stdout
    assert "step 5, 1 shard," in trained("verify", "5").stdout


def test_verify_names_file_chunk_and_tensor_of_a_bad_byte(copied: Keepstep) -> None:
    path = shard_of(copied, 5)
    name, entry = next(iter(layout_of(path).entries.items()))
    flip(path, entry.begin)
    failed = copied("verify", code=1)
    assert str(path) in failed.stderr
    assert f"chunk {entry.begin // CHUNK_BYTES}" in failed.stderr
    assert name in failed.stderr
    document = copied.json("verify", "5", code=1)
    assert document["path"] == str(path)
    assert document["chunk"] == 0
    assert name in document["tensors"]
    copied("verify", "4")


# --- inspect ---------------------------------------------------------------------------------


def test_inspect_shows_control_page_layout_sections_and_tensors(trained: Keepstep) -> None:
    path = shard_of(trained, 5)
    document = trained.json("inspect", str(path))
    assert document["sealed"] is True
    assert document["control"]["run"] == "train"
    assert document["control"]["step"] == 5
    assert document["layout"]["bytes"] == path.stat().st_size
    weight = next(
        tensor for tensor in document["tensors"] if tensor["name"].endswith("model.weight")
    )
    assert (weight["dtype"], weight["shape"], weight["section"]) == ("F32", [64, 64], "params")
    shown = trained("inspect", str(path)).stdout
    for word in (
        "train",
        "5 of epoch",
        "SECTION",
        "optimizer",
        "64 x 64",
        document["layout"]["id"],
    ):
        assert word in shown


# --- rm and stop -----------------------------------------------------------------------------


def test_rm_deletes_a_step_only_after_confirmation(copied: Keepstep) -> None:
    copied("rm", "4", code=1, input="n\n")
    assert len(copied.json("steps")["steps"]) == 2
    copied("rm", "4", input="y\n")
    assert [step["step"] for step in copied.json("steps")["steps"]] == [5]


def test_rm_keeps_the_only_committed_step_unless_forced(copied: Keepstep) -> None:
    assert "--force" in copied("rm", "--yes", "4", "5", code=2).stderr
    copied("rm", "--yes", "4")
    assert "--force" in copied("rm", "--yes", "5", code=2).stderr
    document = copied.json("rm", "--yes", "--force", "5")
    assert document["freed_bytes"] > 0
    assert copied.json("steps")["steps"] == []


def test_rm_refuses_steps_of_a_running_sidecar_and_stop_frees_its_memory(
    keepstep: Keepstep,
) -> None:
    keepstep.script("train.py", TRAIN)
    keepstep("run", "--", warm.python(), "train.py", "6", "3", code=137)
    assert "keepstep stop" in keepstep("rm", "--yes", "2", code=2).stderr
    document = keepstep.json("stop")
    assert document["stopped"] is True
    assert document["committed"]["id"].endswith("-000000003")
    assert keepstep.family() == []
    assert not keepstep.memory("train").exists()
    assert "was not running" in keepstep("stop").stdout


def test_stop_writes_the_steps_that_a_killed_sidecar_left_in_memory(keepstep: Keepstep) -> None:
    keepstep.script("train.py", TRAIN)
    command = ("--", warm.python(), "train.py", "6", "3")
    keepstep("run", "--persist-every", "1000", *command, code=137)
    keepstep.sidecar().kill()
    eventually(lambda: not keepstep.sidecars(), what="its end")
    assert list(keepstep.memory("train").glob("rank-*"))
    assert keepstep.json("stop")["committed"]["id"].endswith("-000000003")
    assert not keepstep.memory("train").exists()


# --- a copy, a move --------------------------------------------------------------------------


@pytest.fixture
def backup(trained: Keepstep, tmp_path: Path) -> Keepstep:
    """A copy of `trained` as `cp -r` makes it."""
    shutil.copytree(trained.home, tmp_path / "backup", symlinks=True)
    return Keepstep(tmp_path / "backup")


def test_commands_on_a_copied_directory_do_not_reach_the_original_sidecar(
    keepstep: Keepstep,
) -> None:
    keepstep.script("train.py", TRAIN)
    # no step is removed while the directory is copied
    keepstep("run", "--keep", "9", "--", warm.python(), "train.py", "6", "3", code=137)
    sidecar = keepstep.sidecar().pid
    there = keepstep.home / "there"
    shutil.copytree(keepstep.directory, there, symlinks=True)
    copy = ("--dir", str(there))
    assert keepstep.json("status", *copy)["running"] is False
    paths = [Path(step["path"]) for step in keepstep.json("steps", *copy)["steps"]]
    assert paths
    assert all(path.is_relative_to(there) for path in paths)
    assert keepstep.json("verify", *copy)["verified"] is True
    assert keepstep.json("stop", *copy)["stopped"] is False
    keepstep("rm", "--yes", "--force", *copy, paths[0].name)
    assert keepstep.sidecar().pid == sidecar
    assert keepstep.json("status")["newest"]["tiers"] == ["memory", "local"]


def test_a_moved_directory_can_be_listed_verified_and_resumed(
    backup: Keepstep, tmp_path: Path
) -> None:
    backup.home.rename(tmp_path / "moved")
    moved = Keepstep(tmp_path / "moved")
    assert [step["step"] for step in moved.json("steps")["steps"]] == [4, 5]
    assert str(moved.directory) in moved("steps").stdout
    assert len(moved.json("verify")["steps"]) == 2
    assert moved.json("status")["committed"]["id"].endswith("-000000005")
    shown = moved("run", "--", warm.python(), "train.py", "7", "-1").stdout
    assert "from 5" in shown


# --- what files say --------------------------------------------------------------------------


def _hostile_name(shard: Path) -> None:
    layout = layout_of(shard)
    with shard.open("r+b") as file:
        page = replace(control_of(shard), run="\x1b]0;owned\x07\x1b[31m[red]x").to_bytes()
        os.pwrite(file.fileno(), page, layout.control_begin)


def _hostile_record(shard: Path) -> None:
    record = shard.parents[1] / "sidecar.toml"
    record.write_text(
        'run = "\\u001b[31m"\nvolumes = ["/\\u001b[1m"]\nmemory_dir = "/\\u001b[3m"\n'
    )


def _hostile_directory(shard: Path) -> None:
    (shard.parents[1] / f"{shard.parent.name}\x1b[31m").mkdir()


@pytest.mark.parametrize("make", [_hostile_name, _hostile_record, _hostile_directory])
def test_escape_sequences_in_files_are_not_printed_to_the_terminal(
    backup: Keepstep, make: Callable[[Path], None]
) -> None:
    shard = shard_of(backup, 5)
    make(shard)
    for words in (("inspect", str(shard)), ("steps",), ("verify",), ("status",), ("rm", "77")):
        shown = backup(*words, code=None)
        assert "\x1b" not in shown.stdout + shown.stderr


# --- no run ----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["status", "steps", "verify", "stop"])
def test_every_command_explains_how_to_select_a_run_when_none_is_found(
    keepstep: Keepstep, command: str
) -> None:
    assert "--dir DIR" in keepstep(command, code=2).stderr
