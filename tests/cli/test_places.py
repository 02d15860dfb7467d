"""Names of runs, where their parts live, and how other commands find them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from keepstep.errors import UsageError
from keepstep_sidecar.cli import run_dir
from keepstep_sidecar.cli.run_dir import (
    Options,
    Service,
    find_service,
    make_memory,
    places_of,
    run_name,
    save_service,
)


def _keep(directory: Path, run: str, *volumes: Path) -> Service:
    service = Service(
        places=places_of(directory, run, volumes), options=Options(slots=3, linger_s=90.0)
    )
    service.places.home.mkdir(parents=True)
    save_service(service)
    return service


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
    assert run_name(command) == name


def test_a_command_without_a_usable_name_asks_for_one() -> None:
    with pytest.raises(UsageError, match="--run NAME"):
        run_name(["(((.py"])


def test_memory_depends_on_directory_and_run_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    relative = places_of(Path("kept"), "a", [tmp_path / "v"])
    assert relative.memory == places_of(tmp_path / "kept", "a").memory
    assert relative.memory != places_of(tmp_path / "kept", "b").memory
    assert relative.memory != places_of(tmp_path / "other", "a").memory
    assert len(str(relative.socket)) < 100  # sun_path


def test_a_run_is_found_again_as_it_was_recorded(tmp_path: Path) -> None:
    service = _keep(tmp_path, "a", tmp_path / "v0", tmp_path / "v1")
    assert find_service(tmp_path, None) == service
    assert service.places.roots == (tmp_path / "v0" / "a", tmp_path / "v1" / "a")


def test_options_of_a_newer_version_are_ignored(tmp_path: Path) -> None:
    service = _keep(tmp_path, "a")
    body = json.loads(service.places.record.read_text())
    body["options"]["from_the_future"] = 1
    service.places.record.write_text(json.dumps(body))
    assert find_service(tmp_path, "a") == service


def test_several_runs_have_to_be_told_apart(tmp_path: Path) -> None:
    _keep(tmp_path, "a")
    _keep(tmp_path, "b")
    with pytest.raises(UsageError, match="choose one with --run: a, b"):
        find_service(tmp_path, None)
    with pytest.raises(UsageError, match=r"no run 'c' in .*; it keeps: a, b"):
        find_service(tmp_path, "c")


def test_an_empty_directory_says_how_to_name_another(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--dir DIR"):
        find_service(tmp_path, None)


def test_a_copy_of_a_directory_has_volumes_and_memory_of_its_own(tmp_path: Path) -> None:
    original = _keep(tmp_path / "kept", "a").places
    shutil.copytree(tmp_path / "kept", tmp_path / "copy")
    found = find_service(tmp_path / "copy", None).places
    assert found == places_of(tmp_path / "copy", "a")
    assert found.memory != original.memory
    assert find_service(tmp_path / "kept", None).places == original


def test_a_moved_directory_takes_its_volumes_along(tmp_path: Path) -> None:
    _keep(tmp_path / "kept", "a", tmp_path / "kept" / "inside", tmp_path / "nvme")
    (tmp_path / "kept").rename(tmp_path / "moved")
    found = find_service(tmp_path / "moved", None).places
    assert found.volumes == (tmp_path / "moved" / "inside", tmp_path / "nvme")
    assert found.memory == places_of(tmp_path / "moved", "a").memory


def test_a_copy_does_not_reach_the_originals_other_volumes(tmp_path: Path) -> None:
    _keep(tmp_path / "kept", "a", tmp_path / "nvme")
    shutil.copytree(tmp_path / "kept", tmp_path / "copy")
    with pytest.raises(
        UsageError, match=rf"copy of {tmp_path}/kept/a, whose volume {tmp_path}/nvme"
    ):
        find_service(tmp_path / "copy", None)


def test_a_link_to_a_directory_is_that_directory(tmp_path: Path) -> None:
    original = _keep(tmp_path / "kept", "a", tmp_path / "nvme").places
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    found = find_service(tmp_path / "link", None).places
    assert (found.memory, found.volumes) == (original.memory, original.volumes)


def test_a_copy_under_another_name_is_refused(tmp_path: Path) -> None:
    _keep(tmp_path, "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with pytest.raises(UsageError, match=f"{tmp_path}/b holds run 'a'"):
        find_service(tmp_path, "b")


@pytest.mark.parametrize("volume", ["kept", "nvme"])
def test_a_record_of_an_older_keepstep_is_told_from_a_copy_of_it(
    tmp_path: Path, volume: str
) -> None:
    run_dir = _keep(tmp_path / "kept", "a", tmp_path / volume).places
    body = json.loads(run_dir.record.read_text())
    del body["home"]
    run_dir.record.write_text(json.dumps(body))
    assert find_service(tmp_path / "kept", None).places == run_dir
    shutil.copytree(tmp_path / "kept", tmp_path / "copy")
    if volume == "kept":
        assert find_service(tmp_path / "copy", None).places == places_of(tmp_path / "copy", "a")
    else:
        with pytest.raises(UsageError, match="is a copy"):
            find_service(tmp_path / "copy", None)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
_WORDS = ("run", "volumes", "memory", "options", "home", "slots", "archive", "peers", "retention")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    data=st.binary()
    | _json.map(lambda value: json.dumps(value).encode())
    | st.tuples(st.sampled_from(_WORDS), _json)
)
@example(data=b"[" * 100_000)
@example(data=b'{"run": 1e999}')
@example(data=b"9" * 5000)
@example(data=("archive", 5))
@example(data=("archive", {"url": "s3://b", "retention": {"last": 10**400}}))
@example(data=("peers", {"files": [], "peers": 5}))
@example(data=("volumes", ["/a\0b"]))
@example(data=("volumes", ["relative"]))
@example(data=("slots", float("inf")))
def test_any_record_is_read_or_refused_by_name(
    tmp_path: Path, data: bytes | tuple[str, object]
) -> None:
    home = tmp_path / "a"
    shutil.rmtree(home, ignore_errors=True)
    run_dir = _keep(tmp_path, "a").places
    if isinstance(data, tuple):
        body = json.loads(run_dir.record.read_text())
        (body if data[0] in body else body["options"])[data[0]] = data[1]
        data = json.dumps(body).encode()
    run_dir.record.write_bytes(data)
    told = ""
    try:
        find_service(tmp_path, "a")
    except UsageError as error:
        told = str(error)
    assert not told or str(home) in told


def test_a_run_cannot_be_a_path(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot name a run"):
        find_service(tmp_path, "../other")


def test_memory_is_private_and_never_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dir, "SHARED_MEMORY", tmp_path)
    mine = places_of(tmp_path / "kept", "a")
    make_memory(mine)
    assert mine.memory.stat().st_mode & 0o777 == 0o700
    mine.memory.rmdir()
    (tmp_path / "elsewhere").mkdir()
    mine.memory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="belongs to somebody else"):
        make_memory(mine)
