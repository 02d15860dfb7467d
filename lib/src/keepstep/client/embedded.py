"""`Checkpointer(dir=...)`: the sidecar of a script that was not started with `keepstep run`."""

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
from keepstep.processes import SAFE_PATH
from keepstep.wire.trainer import SOCKET_ENV

log = logging.getLogger("keepstep")

_START_S = 90.0
_ENDED_WELL, _MISUSED = 0, 2
_STEADY_S = 60.0
_LONGEST_PAUSE_S = 30.0
_LINGER_ENV = "KEEPSTEP_LINGER"
_COMMAND = f"{SAFE_PATH}; from keepstep_sidecar.cli.main import cli; cli(prog_name='keepstep')"


class SidecarRestarter:
    """Restarts the sidecar of a script when it has died, as `keepstep run` does: at once, then less
    and less often. It blocks neither the thread that asks nor the training."""

    def __init__(self, directory: str | os.PathLike[str], run: str | None = None) -> None:
        # The script may change its working directory and environment. A new sidecar must still find
        # the same run and have the same settings.
        self._directory = os.path.abspath(directory)
        self._run = run
        self._environment = dict(os.environ)
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._tried_at = float("-inf")
        self._message = ""

    def restart_if_due(self) -> None:
        """Called when the sidecar does not answer. If an attempt is due, start the sidecar in the
        background. Returns at once."""
        if self._lock.locked() or time.monotonic() < self._tried_at + self._pause_s:
            return
        threading.Thread(target=self._revive, name="keepstep-revive", daemon=True).start()

    def _revive(self) -> None:
        if not self._lock.acquire(blocking=False):
            return
        try:
            steady = time.monotonic() - self._tried_at > _STEADY_S
            # no pause after the first death, because the training may be waiting in its restore
            self._pause_s = 0.0 if steady else min(_LONGEST_PAUSE_S, max(0.5, 2 * self._pause_s))
            self._try()
        finally:
            self._tried_at = time.monotonic()
            self._lock.release()

    def _try(self) -> None:
        try:
            _start(self._directory, self._run, self._environment)
        except (UsageError, OSError) as error:
            self._warn(f"the sidecar ended and cannot be started again: {error}")
        else:
            self._warn("")
            log.warning(
                "keepstep: the sidecar ended and was started again; training went on (why:"
                " sidecar.log of the run below %s) [sidecar.restarted]",
                self._directory,
            )

    def _warn(self, text: str) -> None:
        """Log a failure, but only once while it stays the same. '': it is over."""
        if text and text != self._message:
            log.warning(
                "keepstep: %s; keepstep tries again, and training goes on [sidecar.restart_failed]",
                text,
            )
        self._message = text


def ensure_sidecar(directory: str | os.PathLike[str] | None, run: str | None = None) -> str:
    """Path of the sidecar's socket.

    If `keepstep run` or a pod provides a sidecar for this process, its socket is returned. Else a
    sidecar that keeps this script's run below `directory` is started, or found if it already runs.
    With `directory` None the result is then ''.

    `run`: keep the run of this name below `directory` instead, with a sidecar of its own, whatever
    else provides one: one process may train several times, each time in another run.

    Every rank calls this: the first rank of a machine starts the sidecar, the others find it.
    Without `run`, the run has the name of the script's file, or `notebook`. Raises UsageError with
    the message of the command.
    """
    if run is not None and directory is None:
        raise UsageError(
            f"run={run!r} names a run below a directory: give that, too (dir=); a run that"
            " `keepstep run` or a pod provides has its name there"
        )
    inherited = os.environ.get(SOCKET_ENV, "") if run is None else ""
    return inherited if inherited or directory is None else _start(directory, run, os.environ)


def sidecar_restarter(
    directory: str | os.PathLike[str] | None, run: str | None = None
) -> SidecarRestarter | None:
    """The keeper of the sidecar that `ensure_sidecar` started. None if another process looks after
    the sidecar: one that started it in another way, or the first rank of this machine."""
    provided = run is None and os.environ.get(SOCKET_ENV)
    if directory is None or provided or os.environ.get("LOCAL_RANK", "0") != "0":
        return None
    return SidecarRestarter(directory, run)


def _start(
    directory: str | os.PathLike[str], run: str | None, environment: Mapping[str, str]
) -> str:
    script = _script()
    words = [sys.executable, "-c", _COMMAND, "start", "--dir", os.fspath(directory)]
    if run is not None:
        words += ["--run", run]
        if _LINGER_ENV not in environment:
            # the runs of one process come one after the other: each gives its memory back soon
            words += ["--linger", "1m"]
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
            "dir= starts a sidecar, which is a package of its own: pip install ./sidecar of"
            " keepstep's source, or the wheel keepstep-sidecar of a release"
        )
    # Errors of click itself follow lines of usage.
    message = re.split(r"^Error: ", done.stderr.strip(), maxsplit=1, flags=re.MULTILINE)[-1]
    raise UsageError(f"dir={os.fspath(directory)!r}: {message or f'exit code {done.returncode}'}")


def _script() -> str:
    """The file name from which the run gets its name: the script's file, `PACKAGE.py` for
    `python -m PACKAGE`, or `notebook.py`."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None) or "notebook.py"
    if os.path.basename(file) != "__main__.py":
        return file
    return f"{os.path.basename(os.path.dirname(os.path.abspath(file)))}.py"
