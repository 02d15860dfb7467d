"""What a release is made of: locked, for two platforms, and said in the images."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import helm_python
import pytest
import yaml
from packaging.requirements import Requirement

from scripts import chart_reference
from scripts.lock import PARTS, PLATFORMS, ROOT, lock_of, needs

DOCKERFILE = (ROOT / "Dockerfile").read_text()
WORKFLOW = ROOT / ".github" / "workflows" / "release.yaml"


def _locked(part: str) -> dict[str, tuple[str, int]]:
    """Version and number of hashes by package."""
    text = lock_of(part).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = {}
    for line in lines:
        name, _, version = line.split()[0].partition("==")
        found[name] = version, len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", line))
    return found


@pytest.mark.parametrize("part", PARTS)
def test_every_range_is_locked_within_it(part: str) -> None:
    locked = _locked(part)
    for asked in map(Requirement, needs(part)):
        assert asked.name in locked, f"{asked} is not locked: run `make lock`"
        version, _ = locked[asked.name]
        assert asked.specifier.contains(version), f"{asked} is locked at {version}: `make lock`"


@pytest.mark.parametrize("part", PARTS)
def test_every_locked_package_has_a_version_and_hashes_and_torch_is_none_of_them(part: str) -> None:
    locked = _locked(part)
    assert all(version and hashes for version, hashes in locked.values())
    assert "torch" not in locked
    assert not [name for name in locked if name.startswith("keepstep")]


def test_a_locked_image_installs_by_hashes_and_builds_with_what_is_locked() -> None:
    script = (ROOT / "scripts" / "install_into_image.sh").read_text()
    assert "--require-hashes" in script
    assert "${LOCKED:+--no-build-isolation}" in script
    assert "--require-hashes -r lib/requirements.lock" in DOCKERFILE


def test_images_say_where_they_are_from() -> None:
    for label in ("source", "revision", "version", "licenses", "base.name"):
        assert f"org.opencontainers.image.{label}=" in DOCKERFILE


def test_a_release_is_for_the_platforms_that_were_checked_and_of_a_base_by_digest() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    steps = {one.get("name", ""): one for one in workflow["jobs"]["release"]["steps"]}
    build = steps["Images"]["run"]
    (platforms,) = re.findall(r"--platform (\S+)", build)
    linux = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}
    assert platforms.split(",") == [linux[one.partition("-")[0]] for one in PLATFORMS]
    for argument in ("PYTHON_IMAGE=${{ steps.base.outputs.image }}", "LOCKED=1", "REVISION="):
        assert argument in build
    assert "@$digest" in steps["The base's digest"]["run"]
    base = re.search(r"^ARG PYTHON_IMAGE=(\S+)", DOCKERFILE, re.MULTILINE)
    assert base is not None
    assert workflow["env"]["PYTHON"] == base[1]


def test_the_packaged_chart_of_a_release_pulls_the_images_of_that_release_by_digest(
    tmp_path: Path,
) -> None:
    digests = {"operator": f"sha256:{'a' * 64}", "sidecar": f"sha256:{'b' * 64}"}
    packed = chart_reference.package(registry="ghcr.io/owner/keepstep", digests=digests)
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path, filter="data")
    packed.unlink()
    with helm_python.Chart.load(tmp_path / "keepstep") as chart:
        rendered = chart.render({}, name="keepstep", namespace="keepstep-system")
    images = set(re.findall(r"(?:image: |--sidecar-image=)(\S+)", "\n".join(rendered.values())))
    assert {one.strip('"') for one in images} == {
        f"ghcr.io/owner/keepstep/{image}@{digest}" for image, digest in digests.items()
    }


def test_a_release_gives_the_chart_its_registry_and_digests_and_no_password_to_a_process() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    (chart,) = [one["run"] for one in workflow["jobs"]["release"]["steps"]
                if one.get("name") == "Chart"]  # fmt: skip
    assert "--registry $REGISTRY" in chart
    for image in chart_reference.IMAGES:
        assert f"""--{image} $(jq -r '."containerimage.digest"' build-{image}.json)""" in chart
    assert "--password-stdin" in chart
    assert " -p " not in chart


@pytest.mark.parametrize("digest", ["", "null", "sha256:abc"])
def test_what_is_no_digest_makes_no_chart(digest: str) -> None:
    with pytest.raises(SystemExit, match="is no digest"):
        chart_reference.released("", registry="", digests={"operator": digest})


def test_the_tools_of_a_release_are_locked_with_hashes() -> None:
    """The job that runs them may publish."""
    makefile = (ROOT / "Makefile").read_text()
    for target in ("build/lock/.ready", "build/dist-tools/.ready"):
        _, _, recipe = makefile.partition(f"\n{target}:")
        installs = re.findall(r"pip install .*", recipe.partition("\n\n")[0])
        assert installs
        assert all("--require-hashes -r " in one for one in installs)
    locked = (ROOT / "scripts" / "tools.lock").read_text()
    for tool in (ROOT / "scripts" / "tools.in").read_text().split():
        assert re.search(rf"^{tool}==\S+ \\\n    --hash=sha256:", locked, re.MULTILINE)
