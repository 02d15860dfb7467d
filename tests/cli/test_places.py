"""Names of runs, where their parts live, and how other commands find them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepstep.errors import UsageError
from keepstep_sidecar.cli import places
from keepstep_sidecar.cli.places import (
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


def test_a_run_cannot_be_a_path(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot name a run"):
        find_service(tmp_path, "../other")


def test_memory_is_private_and_never_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "SHARED_MEMORY", tmp_path)
    mine = places_of(tmp_path / "kept", "a")
    make_memory(mine)
    assert mine.memory.stat().st_mode & 0o777 == 0o700
    mine.memory.rmdir()
    (tmp_path / "elsewhere").mkdir()
    mine.memory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="belongs to somebody else"):
        make_memory(mine)
