"""What a release is made of: locked, for two platforms, and said in the images."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import helm_python
import pytest
from packaging.requirements import Requirement

from scripts import chart_reference
from scripts.lock import PARTS, lock_of, needs


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
def test_every_locked_version_lies_within_its_required_range(part: str) -> None:
    locked = _locked(part)
    for asked in map(Requirement, needs(part)):
        assert asked.name in locked, f"{asked} is not locked: run `make lock`"
        version, _ = locked[asked.name]
        assert asked.specifier.contains(version), f"{asked} is locked at {version}: `make lock`"


@pytest.mark.parametrize("part", PARTS)
def test_every_locked_package_has_a_version_and_hashes_and_torch_is_not_locked(part: str) -> None:
    locked = _locked(part)
    assert all(version and hashes for version, hashes in locked.values())
    assert "torch" not in locked
    assert not [name for name in locked if name.startswith("keepstep")]


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
    assert {image.strip('"') for image in images} == {
        f"ghcr.io/owner/keepstep/{image}@{digest}" for image, digest in digests.items()
    }


@pytest.mark.parametrize("digest", ["", "null", "sha256:abc"])
def test_a_chart_release_with_an_invalid_image_digest_is_refused(digest: str) -> None:
    with pytest.raises(SystemExit, match="is no digest"):
        chart_reference.released("", registry="", digests={"operator": digest})
