"""`Checkpointer(dir=...)`: the sidecar of a script that nobody started with `keepstep run`."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from keepstep.errors import UsageError
from keepstep.wire.trainer import SOCKET_ENV

_START_S = 90.0
_ENDED_WELL, _MISUSED = 0, 2


def socket(directory: str | os.PathLike[str] | None) -> str:
    """That of the sidecar which `keepstep run` or a pod has for this process; else of one that
    keeps the run of this script below `directory`, or '' where None is asked for.

    Every rank asks; the first one of a machine starts it, the others find it. The run is called as
    the script's file, or notebook. Raises UsageError with what the command said.
    """
    inherited = os.environ.get(SOCKET_ENV, "")
    return inherited if inherited or directory is None else _start(directory)


def _start(directory: str | os.PathLike[str]) -> str:
    script = _script()
    words = [sys.executable, "-m", "keepstep_sidecar.cli", "start", "--dir", os.fspath(directory)]
    try:
        done = subprocess.run(
            [*words, "--", os.path.basename(script)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_START_S,
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(
            f"dir={os.fspath(directory)!r}: no sidecar after {_START_S:g} s"
        ) from error
    printed = done.stdout.strip()
    if done.returncode == _ENDED_WELL and printed:
        return printed
    missing = "No module named" in done.stderr and "keepstep_sidecar" in done.stderr
    if missing and done.returncode not in (_ENDED_WELL, _MISUSED):
        raise UsageError(
            "dir= starts a sidecar, which is a package of its own: pip install 'keepstep[local]'"
        )
    # click's own errors come behind lines of usage
    said = re.split(r"^Error: ", done.stderr.strip(), maxsplit=1, flags=re.MULTILINE)[-1]
    raise UsageError(f"dir={os.fspath(directory)!r}: {said or f'exit code {done.returncode}'}")


def _script() -> str:
    """What names the run: the script's file, the package of `python -m PACKAGE`, or notebook."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None) or "notebook.py"
    if os.path.basename(file) != "__main__.py":
        return file
    return f"{os.path.basename(os.path.dirname(os.path.abspath(file)))}.py"
