"""Locks the dependencies of the images: each in one version, with hashes.

`make lock` reads the ranges of dependencies in the pyproject.toml of operator and sidecar. In the
library's it reads the build requirements, by which all three are built. It writes a
requirements.lock beside each pyproject.toml, and refuses a package without a wheel for one of a
release's platforms. A test compares ranges and locks. Needs `uv` on the PATH and a package index.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import tomllib

ROOT = Path(__file__).resolve().parents[1]
PARTS: Final = ("lib", "operator", "sidecar")
PYTHON: Final = "3.11"
"""The version of Python in the images."""
PLATFORMS: Final = ("x86_64-manylinux_2_28", "aarch64-manylinux_2_28")
"""The platforms of a release. Debian bookworm has glibc 2.36."""

_HEAD: Final = """\
# Made by `make lock` from the ranges of pyproject.toml: what the image of a release is made of.
"""


def needs(part: str) -> list[str]:
    """The requirements in the pyproject.toml of `part`, without keepstep's own packages, which are
    built from source. For the library these are its build requirements, because its dependency
    torch is in no image."""
    asked = tomllib.loads((ROOT / part / "pyproject.toml").read_text())
    if part == "lib":
        return list(asked["build-system"]["requires"])
    return [
        dependency
        for dependency in asked["project"]["dependencies"]
        if not dependency.startswith("keepstep")
    ]


def lock_of(part: str) -> Path:
    return ROOT / part / "requirements.lock"


def lock(part: str) -> None:
    """Lock `part` to the newest versions within its ranges."""
    options = ("--python-version", PYTHON, "--python-platform", PLATFORMS[0], "--no-annotate")
    text = _uv("pip", "compile", "-", "--generate-hashes", "--no-header", *options, part=part)
    lock_of(part).write_text(_HEAD + text)


def check_wheels(part: str) -> None:
    """Exits if a locked package has no wheel for a platform."""
    for platform in PLATFORMS:
        where = ("--python-version", PYTHON, "--python-platform", platform)
        how = ("--dry-run", "--no-deps", "--require-hashes", "--only-binary", ":all:")
        target = ("--target", str(ROOT / "build" / "lock" / platform))
        _uv("pip", "install", *how, *where, *target, "-r", str(lock_of(part)), part=part)
        print(f"{part}: all locked packages have wheels for {platform}")


def _uv(*arguments: str, part: str) -> str:
    done = subprocess.run(
        ("uv", *arguments), input="\n".join(needs(part)), capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{part}: uv {' '.join(arguments[:2])}: {done.stderr}")
    return done.stdout


if __name__ == "__main__":
    for name in PARTS:
        if sys.argv[1:] != ["--check"]:
            lock(name)
        check_wheels(name)
