"""Starts a fork server, and asks it for processes. Imports no torch: `keepstep run` uses it."""

from __future__ import annotations

import array
import ctypes
import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Final

from keepstep.errors import KeepstepError

READY_S: Final = 120.0
"""Imports from a slow network drive; a server that takes longer is given up."""

_ANSWER_S: Final = 10.0
_LARGEST_BYTES: Final = 1 << 20
_PR_SET_CHILD_SUBREAPER: Final = 36
GO: Final = b"go"


class ColdStart(KeepstepError):
    """A process cannot be started warm; the message says why."""


def become_subreaper() -> None:
    """Inherit orphaned descendants (Linux, prctl(2)): who asks a server has to. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection to a server, neither inherited by exec."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for one in (ours, theirs):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST_BYTES)
    return ours, theirs


class ForkServer:
    """A connection to a fork server, which ends when it is closed. `pid`: the server's."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self.ready = False
        self._connection = connection

    @classmethod
    def start(
        cls, interpreter: str, environment: Mapping[str, str], modules: Sequence[str] = ()
    ) -> ForkServer:
        """Start one that imports torch and `modules`; it is not ready yet. Raises OSError."""
        ours, theirs = pair()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            words = (interpreter, "-m", "keepstep.warm.server", str(theirs.fileno()), *modules)
            try:
                pid = os.posix_spawn(interpreter, words, environment, setsigmask=())
            except OSError:
                ours.close()
                raise
        return cls(ours, pid)

    def wait_ready(self) -> None:
        """Until it has imported everything. Raises ColdStart with what is in the way."""
        self._answer(READY_S)
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
        """Start `argv` in this directory with `files` as its stdin, stdout and stderr; returns the
        pid of a child of ours: we have to be a subreaper. Raises ColdStart, after which nothing was
        started."""
        if not self.ready:
            raise ColdStart("the fork server is still importing")
        asked = {
            "argv": [os.fspath(one) for one in argv],
            "environment": dict(environment),
            "directory": os.getcwd(),
            "group": own_group,
            "session": own_session,
        }
        descriptors = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        try:
            self._connection.sendmsg([json.dumps(asked).encode()], descriptors)
            pid = int(self._answer(_ANSWER_S)["pid"])
            self._connection.send(GO)  # only now does it run what is the caller's
        except OSError as error:
            self.close()
            raise ColdStart(f"the fork server does not answer ({error})") from error
        return pid

    def _answer(self, timeout_s: float) -> dict[str, int | str]:
        self._connection.settimeout(timeout_s)
        try:
            data = self._connection.recv(_LARGEST_BYTES)
        except TimeoutError:
            # its process, if there is one, waits for a word that does not come, and ends
            self.close()
            raise ColdStart(f"the fork server does not answer within {timeout_s:g} s") from None
        except OSError as error:
            self.close()
            raise ColdStart(f"the fork server does not answer ({error})") from error
        answer: dict[str, int | str] = json.loads(data) if data else {}
        if "pid" not in answer:
            reason = str(answer.get("cold", "the fork server has died"))
            if not data:
                self.close()
            raise ColdStart(reason)
        return answer

    @property
    def closed(self) -> bool:
        return self._connection.fileno() < 0

    def close(self) -> None:
        """The server ends, and what it has started goes on."""
        self.ready = False
        self._connection.close()
