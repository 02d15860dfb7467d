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


def start(directory: str | os.PathLike[str]) -> str:
    """The socket of a sidecar that keeps the run of this script below `directory`.

    Every rank asks; the first one of a machine starts it, the others find it. The run is called as
    the script's file, or notebook. Raises UsageError with what the command said.
    """
    if inherited := os.environ.get(SOCKET_ENV):
        return inherited  # of `keepstep run`, or a pod's
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
    socket = done.stdout.strip()
    if done.returncode == _ENDED_WELL and socket:
        return socket
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
