"""Workflows call make targets that exist, and the packages ask for each other's versions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml

from keepstep import __version__

ROOT = Path(__file__).resolve().parents[2]
PLACES = sorted((ROOT / ".github" / "workflows").iterdir())
PARTS = ("lib", "sidecar", "operator")


@pytest.fixture(params=PLACES, ids=lambda place: place.stem)
def place(request: pytest.FixtureRequest) -> Path:
    assert isinstance(request.param, Path)
    return request.param


@pytest.fixture
def jobs(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(place.read_text())["jobs"]
    return found


def _project(part: str) -> dict[str, Any]:
    read: dict[str, Any] = tomllib.loads((ROOT / part / "pyproject.toml").read_text())["project"]
    return read


def test_actions_are_of_a_commit_rights_are_few_and_jobs_end(
    place: Path, jobs: dict[str, Any]
) -> None:
    whole = yaml.safe_load(place.read_text())
    assert whole["permissions"] in ({}, {"contents": "read"}), "rights belong to a job"
    for name, job in jobs.items():
        assert job["timeout-minutes"] <= 120, name
        given = {right for right, how in job.get("permissions", {}).items() if how == "write"}
        assert given == ({"contents", "packages"} if name == "release" else set())
        for step in job["steps"]:
            if "uses" in step:
                assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", step["uses"])
            if str(step.get("uses")).startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False
    text = place.read_text()
    assert len(re.findall(r"@[0-9a-f]{40} # v[\d.]+$", text, re.MULTILINE)) == text.count("uses:")


@pytest.mark.parametrize("part", PARTS)
def test_what_is_built_has_one_version_and_asks_for_its_own_parts_of_it(part: str) -> None:
    project = _project(part)
    assert project["version"] == __version__
    extras = project.get("optional-dependencies", {}).values()
    asked = [*project["dependencies"], *(one for extra in extras for one in extra)]
    ours = [one for one in asked if one.startswith("keepstep")]
    assert all(one.endswith(f"=={__version__}") for one in ours)
    assert ours or part == "lib"
