"""Names of runs, where their parts live, and how other commands find them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from keepstep.errors import UsageError
from keepstep_sidecar.cli import run_dir, sidecar_launcher
from keepstep_sidecar.cli.run_dir import (
    RunDir,
    create_run_directory,
    derive_name_from_command,
    find_run,
    make_memory,
    memory_directory,
    save_record,
)
from keepstep_sidecar.config.settings import toml_value
from keepstep_sidecar.config.sidecar import SETTINGS


def _keep(directory: Path, run: str, *volumes: Path) -> RunDir:
    chosen = {"volumes": volumes} if volumes else {}
    kept = RunDir.of(directory, run, slots=3, linger_s=90.0, **chosen)
    kept.home.mkdir(parents=True)
    save_record(kept)
    return kept


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "train.py"], "train"),
        (
            ["torchrun", "--nproc-per-node", "8", "src/train_gpt.py", "--config", "x.py"],
            "train_gpt",
        ),
        (["/usr/bin/bash", "-c", "true"], "bash"),
        (["python", "my run (2).py"], "my-run-2"),
    ],
)
def test_a_run_is_named_by_its_script(command: list[str], name: str) -> None:
    assert derive_name_from_command(command) == name


def test_a_command_without_a_usable_run_name_fails_and_names_the_run_option() -> None:
    with pytest.raises(UsageError, match="--run NAME"):
        derive_name_from_command(["(((.py"])


def test_the_path_of_the_shared_memory_depends_only_on_directory_and_run_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    memory = memory_directory(Path("kept"), "a")
    assert memory == memory_directory(tmp_path / "kept", "a")
    assert memory not in (
        memory_directory(tmp_path / "kept", "b"),
        memory_directory(tmp_path / "other", "a"),
    )
    assert len(str(memory / "sidecar.sock")) < 100  # sun_path


def test_a_run_is_found_again_as_it_was_recorded(tmp_path: Path) -> None:
    kept = _keep(tmp_path, "a", tmp_path / "v0", tmp_path / "v1")
    assert find_run(tmp_path, None) == kept
    assert kept.roots == (tmp_path / "v0" / "a", tmp_path / "v1" / "a")


def test_a_stored_run_record_provides_storage_settings_but_no_connection_settings(
    tmp_path: Path,
) -> None:
    kept = RunDir.of(
        tmp_path, "a", slots=3, keep=9, archive="s3://b/x", archive_endpoint="https://e",
        restore_from="7", owner_pid=1, report_url="https://r", report_ca="ca",
        report_token_file=Path("/token"), leader="h:2", peer_listen="h:1",
    )  # fmt: skip
    kept.home.mkdir(parents=True)
    save_record(kept)
    elsewhere = tmp_path / "elsewhere"
    text = kept.record.read_text().replace(str(kept.memory), str(elsewhere))
    kept.record.write_text(text)
    assert find_run(tmp_path, "a") == RunDir.of(tmp_path, "a", slots=3, keep=9)


@pytest.mark.parametrize("path", [".", "{home}", "/proc/self/cwd/a"])
def test_a_run_record_from_an_unpacked_archive_cannot_name_paths_outside_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    kept = _keep(tmp_path, "a", tmp_path.parent / "private")
    head = kept.record.read_text().partition("[home]")[0]
    value = toml_value(path.format(home=kept.home))
    kept.record.write_text(f"{head}[home]\npath = {value}\ndevice = 1\ninode = 1\n")
    with pytest.raises(UsageError, match="is not touched from here"):
        find_run(tmp_path, "a")


def test_a_symbolic_link_is_refused_as_a_volume_of_a_copied_directory(tmp_path: Path) -> None:
    _keep(tmp_path / "kept", "a", tmp_path / "kept" / "inside")
    (tmp_path / "copy").mkdir()
    shutil.copytree(tmp_path / "kept" / "a", tmp_path / "copy" / "a")
    (tmp_path / "copy" / "inside").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="is a link"):
        find_run(tmp_path / "copy", "a")


@pytest.mark.parametrize("mode", [0o777, 0o757])
def test_a_world_writable_directory_is_refused_unless_explicitly_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    kept = _keep(tmp_path, "a")
    kept.home.chmod(mode)
    with pytest.raises(UsageError, match="all users of this machine may write"):
        create_run_directory(kept)
    with pytest.raises(UsageError, match="all users"), sidecar_launcher.hold_supervision(kept):
        pass
    monkeypatch.setenv("KEEPSTEP_SHARED_DIR", "1")
    create_run_directory(kept)
    assert find_run(tmp_path, "a") == kept


def test_a_directory_of_another_user_is_refused_by_that_users_name(tmp_path: Path) -> None:
    kept = _keep(tmp_path, "a")
    os.chown(kept.home, 65534, -1)
    with pytest.raises(UsageError, match="belongs to user nobody"):
        create_run_directory(kept)
    with (
        pytest.raises(UsageError, match="belongs to user nobody"),
        sidecar_launcher.hold_supervision(kept),
    ):
        pass
    assert find_run(tmp_path, "a").home == kept.home, "it may be looked at"


@pytest.mark.parametrize(
    ("archive", "volumes"),
    [
        ("{0}", ()),
        ("{0}/far", ()),
        ("{0}/a/far", ()),
        ("{0}/..", ()),
        ("{0}/link", ()),
        ("{0}", ("{0}/v",)),
        ("{0}/v/far", ("{0}/v",)),
        ("", ("{0}/v", "{0}/v")),
        ("", ("{0}/v", "{0}/link")),
        ("", ("{0}", "{0}/a")),
    ],
)
def test_nested_volume_and_archive_directories_are_refused_at_the_start(
    tmp_path: Path, archive: str, volumes: tuple[str, ...]
) -> None:
    place = tmp_path / "kept"
    (place / "v").mkdir(parents=True)
    (place / "link").symlink_to(place / "v")
    given: dict[str, Any] = {"volumes": tuple(Path(volume.format(place)) for volume in volumes)}
    if archive:
        given["archive"] = os.path.normpath(archive.format(place))
    with pytest.raises(UsageError, match=r"one in the other|lies in the other"):
        RunDir.of(place, "a", **{name: value for name, value in given.items() if value})


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount")
@pytest.mark.parametrize(
    ("archive", "volumes"), [("", ()), ("far", ()), ("", ("v",)), (None, ("v", "../bound/v"))]
)
def test_a_bind_mount_of_a_volume_is_refused_as_a_second_volume_or_archive(
    tmp_path: Path, archive: str | None, volumes: tuple[str, ...]
) -> None:
    place, bound = tmp_path / "kept", tmp_path / "bound"
    (place / "v").mkdir(parents=True)
    bound.mkdir()
    given: dict[str, Any] = (
        {"volumes": tuple(place / volume for volume in volumes)} if volumes else {}
    )
    if archive is not None:
        given["archive"] = str(bound / archive)
    RunDir.of(place, "a", **given)
    subprocess.run(["mount", "--bind", str(place), str(bound)], check=True)
    try:
        with pytest.raises(UsageError, match=r"one in the other|lies in the other"):
            RunDir.of(place, "a", **given)
    finally:
        subprocess.run(["umount", str(bound)], check=True)


def test_a_directory_with_several_runs_requires_the_run_option(tmp_path: Path) -> None:
    _keep(tmp_path, "a")
    _keep(tmp_path, "b")
    with pytest.raises(UsageError, match="choose one with --run: a, b"):
        find_run(tmp_path, None)
    with pytest.raises(UsageError, match=r"no run 'c' in .*; it keeps: a, b"):
        find_run(tmp_path, "c")


def test_a_copied_directory_uses_its_own_volumes_and_memory(tmp_path: Path) -> None:
    original = _keep(tmp_path / "kept", "a")
    shutil.copytree(tmp_path / "kept", tmp_path / "copy")
    found = find_run(tmp_path / "copy", None)
    assert found == RunDir.of(tmp_path / "copy", "a", slots=3, linger_s=90.0)
    assert found.memory != original.memory
    assert find_run(tmp_path / "kept", None) == original


def test_volumes_inside_a_moved_directory_are_found_at_their_new_path(tmp_path: Path) -> None:
    _keep(tmp_path / "kept", "a", tmp_path / "kept" / "inside", tmp_path / "nvme")
    (tmp_path / "kept").rename(tmp_path / "moved")
    found = find_run(tmp_path / "moved", None)
    assert found.config.volumes == (tmp_path / "moved" / "inside", tmp_path / "nvme")
    assert found.memory == memory_directory(tmp_path / "moved", "a")


def test_a_copied_directory_does_not_use_the_external_volumes_of_the_original(
    tmp_path: Path,
) -> None:
    _keep(tmp_path / "kept", "a", tmp_path / "nvme")
    shutil.copytree(tmp_path / "kept", tmp_path / "copy")
    with pytest.raises(
        UsageError, match=rf"copy of {tmp_path}/kept/a, whose volume {tmp_path}/nvme"
    ):
        find_run(tmp_path / "copy", None)


def test_a_copied_run_directory_with_another_name_is_refused(tmp_path: Path) -> None:
    _keep(tmp_path, "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with pytest.raises(UsageError, match=f"{tmp_path}/b holds run 'a'"):
        find_run(tmp_path, "b")


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    data=st.binary()
    | st.tuples(st.sampled_from(["home", *(setting.name for setting in SETTINGS)]), _json)
)
@example(data=b"a = " + b"[" * 100_000)
@example(data=b"slots = " + b"9" * 5000)
@example(data=("linger", float("inf")))
@example(data=("volumes", ["/a\0b"]))
@example(data=("home", {"path": "\0", "device": 1, "inode": 1}))
def test_any_run_record_is_either_read_or_refused_with_its_path(
    tmp_path: Path, data: bytes | tuple[str, object]
) -> None:
    shutil.rmtree(tmp_path / "a", ignore_errors=True)
    kept = _keep(tmp_path, "a")
    if isinstance(data, tuple):
        name, value = data
        lines = kept.record.read_text().partition("[home]")[0].splitlines()
        others = [line for line in lines if not line.startswith(f"{name} = ")]
        data = "\n".join([*others, f"{name} = {_toml(value)}"]).encode(errors="replace")
    kept.record.write_bytes(data)
    _read_or_refused(kept)


def _toml(value: object) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{_toml(name)} = {_toml(value)}" for name, value in value.items())
        return f"{{{inner}}}"
    return toml_value(tuple(value) if isinstance(value, list) else value)


def _read_or_refused(kept: RunDir) -> None:
    value = ""
    try:
        find_run(kept.home.parent, "a")
    except UsageError as error:
        value = str(error)
    assert not value or str(kept.home) in value


def test_a_run_name_that_is_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot name a run"):
        find_run(tmp_path, "../other")


def test_the_memory_directory_is_private_and_never_a_symbolic_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dir, "SHARED_MEMORY", tmp_path)
    mine = memory_directory(tmp_path / "kept", "a")
    make_memory(mine)
    assert mine.stat().st_mode & 0o777 == 0o700
    mine.rmdir()
    (tmp_path / "elsewhere").mkdir()
    for target in ("elsewhere", "nothing", mine.name):
        mine.symlink_to(tmp_path / target)
        with pytest.raises(UsageError, match=f"{mine} is a file or link of user root"):
            make_memory(mine)
        mine.unlink()
    mine.write_bytes(b"")
    with pytest.raises(UsageError, match="is a file or link of user root"):
        make_memory(mine)
    os.chown(mine.parent, 65534, -1)
    with pytest.raises(UsageError, match=f"{mine.parent} is a directory of user nobody"):
        make_memory(mine)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_the_error_for_unwritable_shared_memory_names_its_path(tmp_path: Path) -> None:
    command = f"{sys.executable} -m keepstep_sidecar.cli start --run a --dir {tmp_path}"
    script = f"mount -t tmpfs -o ro none /dev/shm && exec {command}"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("unshare cannot make mount namespaces here")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "no slots can be kept in shared memory (/dev/shm/keepstep-0: Read-only" in done.stderr
    assert "Traceback" not in done.stderr
