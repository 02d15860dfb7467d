"""`python -m keepstep.warm -- COMMAND`: the entry point of a training container.

The container outlives its trainer, so a restart needs neither the kubelet's back-off nor imports.
If restarts do not help, this process ends with the command's exit code, and the kubelet's rules
apply.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from typing import Final

from keepstep import processes
from keepstep.client.session import SidecarClient
from keepstep.errors import KeepstepError
from keepstep.steps import StepId
from keepstep.warm.client import CommandStarter
from keepstep.wire.status import Status
from keepstep.wire.trainer import SOCKET_ENV

_STOP: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
_TAKEN: Final = _STOP | {signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD}
_GRACE_S: Final = 5.0
_NOT_EXECUTABLE, _NOT_FOUND = 126, 127


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m keepstep.warm",
        description="Run COMMAND, and start it again at once when it fails: from a process that has"
        " imported torch. For a pod's training container, beside keepstep's sidecar.",
        epilog="example: python -m keepstep.warm --preload transformers -- torchrun train.py",
    )
    parser.add_argument(
        "--preload", action="append", default=[], metavar="MODULE", help="import this one too"
    )
    parser.add_argument(
        "--fruitless",
        type=_count,
        default=3,
        metavar="N",
        help="after N lives in a row that finish no step, end with COMMAND's exit code, so that the"
        " kubelet goes on (default: 3)",
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    return parser.parse_args(words)


def _count(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def print_note(text: str) -> None:
    """Print one line on stderr; stdout belongs to the command."""
    print(f"keepstep: {text}", file=sys.stderr, flush=True)


class RestartingCommand:
    """Runs one command, and starts it again as long as its lives finish steps."""

    def __init__(self, path: str, command: Sequence[str], modules: Sequence[str]) -> None:
        self._starter = CommandStarter(path, command, modules, print_note)
        self._stopped = False

    def run(self, fruitless: int) -> int:
        """Run the command. Returns the exit code for this process. Raises OSError if there is no
        such command.

        `fruitless`: end after this many lives in a row that finish no step.
        """
        processes.become_subreaper()
        signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN)
        code, failed, before = 0, 0, _staged()
        while failed < fruitless:
            code = self._live()
            self._end_leftovers()
            if code == 0 or self._stopped:
                break
            after = _staged()
            if signal.sigpending() & _STOP:  # a stop signal came between two lives
                break
            # a sidecar that is away, or has forgotten its steps, reports no new step
            failed = 0 if after - before else failed + 1
            before |= after
            print_note(
                f"the command ended with {code}"
                + (
                    "; it starts again"
                    if failed < fruitless
                    else f", and {failed} lives have finished no step: the kubelet goes on"
                )
            )
        self._starter.close()
        processes.reap_children()
        return code

    def _live(self) -> int:
        """Run one life; returns its exit code."""
        # the first life is cold: it does not wait for a server
        pid = self._starter.spawn(os.environ, own_group=True)
        while True:
            information = processes.take_signal(_TAKEN, _GRACE_S)
            if information is not None and information.si_signo != signal.SIGCHLD:
                number = signal.Signals(information.si_signo)
                self._stopped |= number in _STOP
                processes.send_signal(pid, number)
            if (code := processes.reap_children().get(pid)) is not None:
                return code

    def _end_leftovers(self) -> None:
        """End the workers of a killed torchrun: they would keep their ranks from their
        successors."""
        processes.end_processes(
            lambda: processes.descendants(os.getpid(), spare=self._starter.server_pids),
            grace_s=_GRACE_S,
        )


def _staged() -> frozenset[StepId]:
    """The newest step of each rank of this pod, according to its sidecar; empty without a
    sidecar."""
    path = os.environ.get(SOCKET_ENV, "")
    try:
        status = SidecarClient(path).get("/v1/status", Status)
    except KeepstepError:
        return frozenset()
    return frozenset(rank.staged for rank in status.ranks if rank.staged is not None)


def main() -> int:
    """Run the command line. Returns the exit code: the command's, 128 + n if signal n ended it, or
    126 or 127 as a shell does."""
    asked = _arguments(sys.argv[1:])
    path = shutil.which(asked.command[0])
    if path is None:
        print_note(f"{asked.command[0]}: command not found")
        return _NOT_FOUND
    try:
        return RestartingCommand(path, asked.command, asked.preload).run(asked.fruitless)
    except OSError as error:
        print_note(f"{path}: {error.strerror}")
        return _NOT_EXECUTABLE


if __name__ == "__main__":
    sys.exit(main())
