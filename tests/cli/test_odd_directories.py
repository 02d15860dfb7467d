"""A run's directory that is not as keepstep made it, or that belongs to another user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Keepstep

_AS_ANOTHER_USER = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")


@pytest.fixture
def open_home() -> Iterator[Path]:
    """A directory that every user may enter."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("stop",), "belongs to user root: run this command as that user"),
        (("rm", "--yes", "5"), "belongs to user root: run this command as that user"),
        (("steps",), ""),
        (("status",), ""),
    ],
)
def test_the_error_for_a_run_of_another_user_names_its_owner(
    trained: Keepstep, open_home: Path, words: tuple[str, ...], message: str
) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv to become another user")
    shutil.copytree(trained.directory, open_home / "kept")
    for path in (open_home / "kept").rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    command = (*_AS_ANOTHER_USER, sys.executable, "-m", "keepstep_sidecar.cli", *words)
    done = subprocess.run(
        (*command, "--dir", str(open_home / "kept")), capture_output=True, text=True, timeout=60
    )
    assert "Traceback" not in done.stderr, done.stderr
    if message:
        assert message in done.stderr
    else:
        assert done.returncode == 0, done.stderr
