"""Decides which command lines can be started warm, starts a fork server, and asks it for processes.
Does not import torch, because `keepstep run` uses it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from keepstep.errors import KeepstepError
from keepstep.processes import SAFE_PATH, Process, send_signal, start_child_process, wait_gone

TORCHRUN: Final = "torch.distributed.run"

_PYTHON = re.compile(r"python(3(\.\d+)?)?")

_LATE: Final = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|OMP_NUM_THREADS"
    r"|(TORCHELASTIC|TORCH_NCCL|NCCL|KEEPSTEP)_\w+"
)
"""Variables that torchrun gives each worker. No import reads them, or what was read is set again
after the fork. Imports may have read any other variable, so a difference in one means a cold start.
"""


@dataclass(frozen=True)
class PythonCommand:
    """A command line of Python. `what`: the path of a script, or the name of a module."""

    kind: Literal["script", "module"]
    what: str
    arguments: tuple[str, ...]
    unbuffered: bool = False

    @property
    def is_torchrun(self) -> bool:
        return self.kind == "module" and self.what == TORCHRUN


def parse_python_command(argv: Sequence[str]) -> PythonCommand | None:
    """What a command line asks of Python; None if only exec can run it."""
    words = list(argv[1:])
    if os.path.basename(argv[0]) == "torchrun":
        return PythonCommand("module", TORCHRUN, tuple(words))
    if not _PYTHON.fullmatch(os.path.basename(argv[0])):
        return None
    unbuffered = words[:1] == ["-u"]
    words = words[unbuffered:]
    if words[:1] == ["-m"] and len(words) > 1:
        return PythonCommand("module", words[1], tuple(words[2:]), unbuffered)
    if words and not words[0].startswith("-"):
        return PythonCommand("script", words[0], tuple(words[1:]), unbuffered)
    return None


def find_program_interpreter(path: str) -> str | None:
    """The Python that runs the program file `path`: the file itself, or the one that its first line
    names. None if there is none."""
    if _PYTHON.fullmatch(os.path.basename(path)):
        return path
    try:
        with Path(path).open("rb") as file:
            first = file.readline(4096).decode(errors="replace")
    except OSError:
        return None
    words = shlex.split(first[2:]) if first.startswith("#!") else []
    found = words[0] if len(words) == 1 and os.path.isabs(words[0]) else ""
    return found if _PYTHON.fullmatch(os.path.basename(found)) else None


def late_differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names of variables that differ and that an import may have read."""
    changed = {name for name, _ in before.items() ^ now.items()}
    return sorted(name for name in changed if not _LATE.fullmatch(name))


# --- the server, from outside --------------------------------------------------------------------


READY_S: Final = 120.0
"""Imports from a slow network drive take long. A caller that waits for them gives up after this
time."""

_ANSWER_S: Final = 10.0
LARGEST_BYTES: Final = 1 << 20
"""The maximum size of a request: arguments and environment."""
GO: Final = b"go"


class ColdStart(KeepstepError):
    """A process cannot be started warm; the message says why. `for_good`: later processes cannot
    either."""

    def __init__(self, message: str, *, for_good: bool = False) -> None:
        super().__init__(message)
        self.for_good = for_good


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection to a server. Exec inherits neither."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST_BYTES)
    return ours, theirs


_NAME: Final = "keepstep.warm.server"
_ROOM: Final = " " * 4096
"""Makes the server's command line long, so that those of its processes fit in its place."""
_SERVER: Final = f"{SAFE_PATH}; from {_NAME} import run_server; run_server(){_ROOM}"


class ForkServer:
    """A connection to a fork server; closing it ends the server. `pid`: of the server."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self.ready = False
        self._refused = ""
        self._process = Process.of(pid)
        self._connection = connection

    @classmethod
    def start(
        cls, interpreter: str, environment: Mapping[str, str], modules: Sequence[str] = ()
    ) -> ForkServer:
        """Start a server that imports torch and `modules`; it is not ready yet. Raises OSError."""
        ours, theirs = socket_pair()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            words = (interpreter, "-c", _SERVER, _NAME, str(theirs.fileno()), *modules)
            try:
                pid = os.posix_spawn(interpreter, words, environment, setsigmask=())
            except OSError:
                ours.close()
                raise
        return cls(ours, pid)

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Wait until the server has imported everything. Raises ColdStart with the reason if it has
        not."""
        if self.ready:
            return
        if self._refused:
            raise ColdStart(self._refused, for_good=True)
        poll = select.poll()  # select(2) takes no descriptor above 1023
        poll.register(self._connection, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            raise ColdStart("the fork server is still importing")
        try:
            self._answer()
        except ColdStart as error:
            # a later server could not import this either, or would die of it as well
            self._refused = str(error)
            self.close()
            raise ColdStart(self._refused, for_good=True) from None
        self.ready = True

    def spawn(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        own_group: bool = False,
        own_session: bool = False,
        files: Sequence[int] = (0, 1, 2),
    ) -> int:
        """Start `argv` in this directory, with `files` as its stdin, stdout and stderr.

        Returns the pid. The new process is a child of this one, which must be a subreaper. Raises
        ColdStart; then nothing was started.
        """
        if self.closed and not self._refused:
            raise ColdStart("the fork server has died")
        self.wait_ready(0)
        try:
            directory = os.getcwd()
        except OSError as error:
            raise ColdStart(f"the working directory: {error.strerror}") from None
        asked = {
            "argv": [os.fspath(word) for word in argv],
            "environment": dict(environment),
            "directory": directory,
            "group": own_group,
            "session": own_session,
            "ignored": [
                number
                for number in signal.valid_signals()
                if signal.getsignal(number) is signal.SIG_IGN
            ],
        }
        request = json.dumps(asked).encode()
        if len(request) > LARGEST_BYTES:
            raise ColdStart("arguments and environment are too long", for_good=True)
        try:
            socket.send_fds(self._connection, [request], list(files))
            pid = int(self._answer()["pid"])
            self._connection.send(GO)  # only now does it run the caller's program
        except OSError as error:
            self.close()
            raise ColdStart(f"the fork server has died ({error.strerror})") from error
        return pid

    def _answer(self) -> dict[str, int | str]:
        try:
            self._connection.settimeout(_ANSWER_S)
            data = self._connection.recv(LARGEST_BYTES)
        except TimeoutError:
            # a process that it may have forked waits for GO, which does not come, and ends
            self.close()
            raise ColdStart("the fork server does not answer") from None
        except OSError as error:
            self.close()
            raise ColdStart(f"the fork server has died ({error.strerror})") from error
        if not data:
            self.close()
            raise ColdStart("the fork server has died")
        answer: dict[str, int | str] = json.loads(data)
        if "pid" not in answer:
            raise ColdStart(str(answer.get("cold")))
        return answer

    @property
    def closed(self) -> bool:
        return self._connection.fileno() < 0

    def close(self) -> None:
        """End the server, even one that still imports. The processes that it started go on."""
        self.ready = False
        self._connection.close()
        if self._process is not None and self._process.alive():
            send_signal(self.pid, signal.SIGKILL)
            wait_gone(self._process, timeout_s=_ANSWER_S)


class CommandStarter:
    """Starts one command again and again, warm if possible. `report` is told why a start is cold.

    `path`: the program's file. `command`: its words. `modules`: further modules to import for it. A
    server that has died, or whose imported files have changed on disk, is replaced for the next
    start.
    """

    def __init__(
        self,
        path: str,
        command: Sequence[str],
        modules: Sequence[str],
        report: Callable[[str], None],
    ) -> None:
        self._argv = (path, *command[1:])
        self._command = tuple(command)
        self._modules = tuple(modules)
        self._report = report
        self._server: ForkServer | None = None
        self._cold_for_good = False

    @property
    def server_pids(self) -> tuple[int, ...]:
        """Processes that do not belong to the command."""
        return () if self._server is None else (self._server.pid,)

    def prepare(self, environment: Mapping[str, str]) -> None:
        """Start a server for the next start, if the command can be started warm."""
        if self._cold_for_good or (self._server is not None and not self._server.closed):
            return
        if None in (sys.stdin, sys.stdout, sys.stderr):
            self._cold("stdin, stdout or stderr is closed")
            return
        path = self._argv[0]
        found = find_program_interpreter(path)
        if found is None or parse_python_command(self._argv) is None:
            self._cold(f"only `python FILE`, `python -m` and torchrun can start warm, not {path}")
            return
        try:
            self._server = ForkServer.start(found, environment, self._modules)
        except OSError as error:
            self._cold(f"{found}: {error.strerror}")

    def wait_server_ready(self) -> None:
        """Wait until the server can be asked, or there is none to wait for."""
        if self._server is not None:
            with contextlib.suppress(ColdStart):  # the next start reports the reason
                self._server.wait_ready()

    def spawn(self, environment: Mapping[str, str], *, own_group: bool) -> int:
        """Start the command. Returns the pid of a child of this process, which must be a subreaper.
        Raises OSError if exec would fail."""
        if self._server is not None:
            try:
                return self._server.spawn(self._argv, environment, own_group=own_group)
            except ColdStart as error:
                if error.for_good:
                    self._cold(str(error))
                else:
                    self._report(f"a cold start this time: {error}")
                    if self._server.ready:  # stale: no use for later starts either
                        self._server.close()
        pid = start_child_process(self._argv[0], self._command, environment, own_group=own_group)
        self.prepare(environment)
        return pid

    def _cold(self, reason: str) -> None:
        self._cold_for_good = True
        self._server = None
        self._report(f"starts are cold, not warm: {reason}")

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.close()
