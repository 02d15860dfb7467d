"""`Checkpointer(dir=...)`: the sidecar of a script that nobody started with `keepstep run`."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

from keepstep.errors import UsageError
from keepstep.wire.trainer import SOCKET_ENV

log = logging.getLogger("keepstep")

_START_S = 90.0
_ENDED_WELL, _MISUSED = 0, 2
_STEADY_S = 60.0
_LONGEST_PAUSE_S = 30.0


class Keeper:
    """Starts the sidecar of a script again when it has died, as `keepstep run` does: at once, then
    less and less often. Never in the way of the thread that asks, nor of the training."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        # a script may change both: another sidecar is to find the same run, and be the same
        self._directory = os.path.abspath(directory)
        self._environment = dict(os.environ)
        self._lock = threading.Lock()
        self._failures = 0
        self._tried_at = float("-inf")
        self._said = ""

    def revive(self) -> None:
        """The sidecar does not answer: begin to start it, if that is due. Returns at once."""
        if self._lock.locked() or time.monotonic() < self._tried_at + self._pause_s():
            return
        threading.Thread(target=self._revive, name="keepstep-revive", daemon=True).start()

    def _pause_s(self) -> float:
        """None after the first death: the training may be waiting in its restore."""
        return 0.0 if self._failures < 1 else min(_LONGEST_PAUSE_S, 0.25 * 2.0**self._failures)

    def _revive(self) -> None:
        if not self._lock.acquire(blocking=False):
            return
        try:
            steady = time.monotonic() - self._tried_at > _STEADY_S
            self._failures = 0 if steady else self._failures + 1
            self._try()
        finally:
            self._tried_at = time.monotonic()
            self._lock.release()

    def _try(self) -> None:
        try:
            _start(self._directory, self._environment)
        except (UsageError, OSError) as error:
            self._say(f"the sidecar ended, and cannot be started again: {error}")
        else:
            self._say("")
            log.warning(
                "keepstep: the sidecar ended and was started again; training went on (why:"
                " sidecar.log of the run below %s)",
                self._directory,
            )

    def _say(self, text: str) -> None:
        """Each trouble once."""
        if text and text != self._said:
            log.warning("keepstep: %s; it is tried again, and training goes on", text)
        self._said = text


def socket(directory: str | os.PathLike[str] | None) -> str:
    """That of the sidecar which `keepstep run` or a pod has for this process; else of one that
    keeps the run of this script below `directory`, or '' where None is asked for.

    Every rank asks; the first one of a machine starts it, the others find it. The run is called as
    the script's file, or notebook. Raises UsageError with what the command said.
    """
    inherited = os.environ.get(SOCKET_ENV, "")
    return inherited if inherited or directory is None else _start(directory, os.environ)


def keeper(directory: str | os.PathLike[str] | None) -> Keeper | None:
    """Of the sidecar that `socket` started; None where another process looks after it: whoever
    started it otherwise, or the first rank of this machine."""
    if directory is None or os.environ.get(SOCKET_ENV) or os.environ.get("LOCAL_RANK", "0") != "0":
        return None
    return Keeper(directory)


def _start(directory: str | os.PathLike[str], environment: Mapping[str, str]) -> str:
    script = _script()
    words = [sys.executable, "-m", "keepstep_sidecar.cli", "start", "--dir", os.fspath(directory)]
    try:
        done = subprocess.run(
            [*words, "--", os.path.basename(script)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_START_S,
            env=environment,
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
