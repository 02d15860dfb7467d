"""The process of `keepstep run`: turns what happens into events, and actions into system calls.

The main thread takes signals with sigtimedwait(2): so no signal interrupts other work, and each
signal comes with its sender. Long work (ending leftovers, a flush) runs on another thread, which
posts an event when it is done and wakes the main thread with a SIGCHLD.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from keepstep import processes
from keepstep.errors import KeepstepError
from keepstep.processes import Process, become_subreaper
from keepstep.steps import StepId
from keepstep.warm.client import Starter
from keepstep.wire.trainer import SOCKET_ENV
from keepstep_sidecar.cli import (
    calls,
    inventory,
    launcher,
    messages,
    output,
    supervisor_state,
)
from keepstep_sidecar.cli.inventory import Holdings
from keepstep_sidecar.cli.run_dir import RunDir
from keepstep_sidecar.cli.supervisor_state import (
    Action,
    AnnounceRestart,
    CommandEnded,
    Do,
    Event,
    Exit,
    Forward,
    News,
    SidecarEnded,
    Signalled,
    StartCommand,
    StartSidecar,
    Supervision,
    Sweep,
    Swept,
)

_NUMBERS: Final = re.compile(r"\d+")
_SIGNALS: Final = frozenset({*supervisor_state.PASSED_SIGNALS, signal.SIGCHLD})
_SENT_BY_KERNEL: Final = 0x80  # SI_KERNEL: the terminal, which signals its whole foreground group
_TICK_S: Final = 0.5
_GRACE_S: Final = 5.0
_LOG_CHECK_S: Final = 10.0
_FIRST_LOOK_S: Final = 2.0
_LOOK_S: Final = 10.0
_SAY_AGAIN_S: Final = 600.0
_STILL_WAITS_S: Final = 60.0


def say(text: str) -> None:
    """Print one line on stderr. Stdout belongs to the command."""
    output.echo(f"keepstep: {text}", err=True)


def _try_to_say(text: str) -> None:
    with contextlib.suppress(OSError):
        say(text)


@contextmanager
def _blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Supervisor:
    """Runs one command beside the sidecar of `kept`.

    `path`: the program's file. `command`: its words. `adopted`: a sidecar that already runs.
    `starter`: makes warm starts.
    """

    def __init__(
        self,
        kept: RunDir,
        *,
        path: str,
        command: Sequence[str],
        restarts: int,
        adopted: Process | None = None,
        starter: Starter | None = None,
    ) -> None:
        self._kept = kept
        self._path = path
        self._command = tuple(command)
        self._state = Supervision(restarts=restarts, warming=starter is not None)
        self._starter = starter
        self._environment = {**os.environ, SOCKET_ENV: str(kept.socket)}
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._main = threading.get_ident()
        self._own_group = not _in_foreground()
        self._command_pid = 0
        self._sidecar = adopted
        self._adopted = adopted is not None
        self._sidecar_since = time.monotonic()
        self._sidecar_due: float | None = None
        self._sidecar_seen = False
        self._hurry = threading.Event()
        self._log_checked = time.monotonic()
        self._look_at = self._log_checked + _FIRST_LOOK_S
        self._looking = threading.Lock()
        self._said: dict[str, float] = {}
        self._nobody = False
        self._complete: StepId | None = None
        self._exit: int | None = None
        self._closed = self._ending = False
        self._memory: tuple[int, int] | None = None
        self._gone_since: float | None = None
        self._life_since = 0.0

    def run(self) -> int:
        """Run until the end. Returns the exit code for this process."""
        become_subreaper()
        with _blocked():
            self._start_warm()
            if self._sidecar is None:
                self._start_sidecar(0.0)
            else:
                self._await_sidecar(self._sidecar)
            while self._exit is None:
                for event in self._next():
                    self._state, actions = self._state.step(event)
                    for action in actions:
                        self._carry_out(action)
            if self._starter is not None:
                self._starter.close()
            return self._exit

    # --- events ------------------------------------------------------------------------------

    def _next(self) -> Iterator[Event]:
        """The events since the last call. Waits at most one tick."""
        due = self._sidecar_due
        wait_s = _TICK_S if due is None else max(0.0, min(_TICK_S, due - time.monotonic()))
        information = signal.sigtimedwait(_SIGNALS, wait_s)
        if information is not None and information.si_signo != signal.SIGCHLD:
            delivered = information.si_code == _SENT_BY_KERNEL and not self._own_group
            yield Signalled(signal.Signals(information.si_signo), delivered)
        yield from self._deaths()
        while not self._events.empty():
            event = self._events.get()
            if event is not News.SIDECAR_UP or self._sidecar is not None:  # else it has died since
                yield event
        self._tick()

    def _deaths(self) -> Iterator[Event]:
        for pid, code in processes.reap().items():
            if pid == self._command_pid:
                self._command_pid = 0
                yield CommandEnded(code)
        # an adopted sidecar is not a child of this process, so it must be polled
        if self._sidecar is not None and not self._sidecar.alive():
            self._sidecar = None
            yield SidecarEnded(time.monotonic() - self._sidecar_since)

    def _tick(self) -> None:
        now = time.monotonic()
        if self._sidecar_due is not None and now >= self._sidecar_due:
            self._sidecar_due = None
            self._launch_sidecar()
        if now - self._log_checked > _LOG_CHECK_S:
            self._log_checked = now
            with contextlib.suppress(OSError):  # it may grow until the next start, which says why
                launcher.bound_log(self._kept.log)
        due = now > self._look_at and (self._command_pid or self._ending)
        if due and not self._looking.locked():
            self._look_at = now + _LOOK_S
            self._in_background("look for warnings", self._look)
        self._watch_memory(now)

    def _look(self) -> None:
        """Print the sidecar's warnings and, at the end, what it waits for; each kind only once in a
        while. Note whether a trainer has connected."""
        # stderr or a volume may be gone; neither may hold up the end
        with contextlib.suppress(Exception), self._looking:
            held = self._held()
            if held is None or held.live is None:
                return
            self._nobody = messages.nobody_came(held)
            self._complete = messages.saved_nothing(held)
            for warning in held.live.warnings:
                self._say_again(f"warning: {warning}", after_s=_SAY_AGAIN_S)
            for tier, status in held.live.tiers.items() if self._ending else ():
                if status.backlog:
                    self._say_again(messages.waits_for(tier, status), after_s=_STILL_WAITS_S)

    def _say_again(self, text: str, *, after_s: float) -> None:
        """Print `text` unless it was printed in the last `after_s`. Texts that differ only in their
        numbers count as the same."""
        kind, now = _NUMBERS.sub("#", text), time.monotonic()
        if now - self._said.get(kind, -after_s) >= after_s:
            self._said[kind] = now
            say(text)

    def _watch_memory(self, now: float) -> None:
        """Report if the memory directory was removed. The sidecar makes it again. If its socket
        does not come back in time, kill the sidecar, so that another one starts."""
        if self._sidecar is None or not self._sidecar_seen or not self._command_pid:
            self._memory, self._gone_since = None, None
            return
        memory = launcher.identity(self._kept.memory)
        if self._memory is not None and memory != self._memory:
            say(messages.memory_removed(self._kept))
        self._memory = memory
        if launcher.identity(self._kept.socket) is not None:
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = now
        elif now - self._gone_since > launcher.UP_S:
            self._gone_since = None
            processes.send(self._sidecar.pid, signal.SIGKILL)  # its death becomes the event

    def _in_background(self, name: str, work: Callable[[], Event | None]) -> None:
        """Run `work` on a thread. The main thread takes the event that it returns, if any."""

        def body() -> None:
            event = work()
            if event is not None:
                self._events.put(event)
                signal.pthread_kill(self._main, signal.SIGCHLD)

        threading.Thread(target=body, name=name, daemon=True).start()

    # --- actions -----------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        match action:
            case StartCommand():
                self._start_command(action.attempt)
            case Forward(number):
                if self._command_pid:
                    processes.send(self._command_pid, number)
            case Do.KILL_COMMAND:
                for process in self._descendants():
                    processes.send(process.pid, signal.SIGKILL)
            case Sweep(now=True):
                self._hurry.set()
            case Sweep():
                self._hurry.clear()
                self._in_background("sweep", self._end_leftovers)
            case StartSidecar(delay_s):
                self._start_sidecar(delay_s)
            case Do.AWAIT_SIDECAR:
                if self._sidecar is not None:  # else its death becomes the next event
                    self._await_sidecar(self._sidecar)
            case AnnounceRestart(attempt, code):
                restarts, held = self._state.restarts, self._held()
                say(messages.restarted(held, code=code, attempt=attempt, restarts=restarts))
            case Do.FLUSH:
                self._ending = True
                self._in_background("flush", self._flush)
            case Do.CLOSE:
                self._ending = True
                self._in_background("close", self._close)
            case Exit():
                self._finish(action)

    def _start_command(self, attempt: int) -> None:
        self._life_since = time.time()
        if attempt == 0:
            say(messages.started(self._kept, self._held(), adopted=self._adopted))
        spawn = (
            functools.partial(processes.spawn_command, self._path, self._command)
            if self._starter is None
            else self._starter.spawn
        )
        try:
            self._command_pid = spawn(self._environment, own_group=self._own_group)
        except OSError as error:
            say(f"{self._command[0]}: {error.strerror}")
            self._events.put(CommandEnded(126))
        else:
            launcher.note_command(self._kept, self._command_pid)

    def _start_warm(self) -> None:
        """Prepare the fork server. The first start waits for it, because torchrun's workers come
        from one, too."""
        starter = self._starter
        if starter is None:
            return

        def wait() -> Event:
            starter.wait()
            return News.WARMED

        starter.prepare(self._environment)
        self._in_background("wait for the fork server", wait)

    def _descendants(self) -> tuple[Process, ...]:
        sidecar = () if self._sidecar is None else (self._sidecar.pid,)
        servers = () if self._starter is None else self._starter.pids
        return processes.descendants(os.getpid(), spare=(*sidecar, *servers))

    def _end_leftovers(self) -> Swept:
        """End what is left of the command, and judge whether its life is worth another one. A
        sidecar that does not say, or was started since, says nothing against it."""
        processes.end_all(self._descendants, grace_s=_GRACE_S, hurry=self._hurry)
        try:
            live = calls.status(self._kept.socket)
        except KeepstepError:
            return Swept()
        if live is None or live.started_at > self._life_since:
            return Swept()
        error = live.uncaught if live.uncaught and live.uncaught.at >= self._life_since else None
        if error is not None:
            return Swept(repeats=error.reason if error.repeats else "")
        return Swept(unleased=live.leased_at is None or live.leased_at < self._life_since)

    def _flush(self) -> Event:
        try:
            if launcher.wait_up(self._kept, None, timeout_s=_GRACE_S):
                calls.flush(self._kept.socket, timeout_s=launcher.DRAIN_S)
        except KeepstepError as error:
            _try_to_say(f"not flushed: {error}")
        return News.FINISHED

    def _close(self) -> Event:
        try:
            launcher.wait_up(self._kept, None, timeout_s=_GRACE_S)
            if not self._looking.locked():
                self._look()
            self._closed = launcher.end(self._kept) and not launcher.slots_left(self._kept)
        except KeepstepError as error:
            _try_to_say(f"not closed: {error}")
        return News.FINISHED

    def _finish(self, action: Exit) -> None:
        self._exit = action.code
        if self._state.attempt == 0 and not self._sidecar_seen:
            if not action.interrupted:
                tail = launcher.log_tail(self._kept.log)
                say(f"the sidecar does not start; the end of {self._kept.log}:\n{tail}")
            return
        if action.interrupted:
            say("interrupted: the flush was not awaited")
        held = self._held()
        if not self._closed:
            self._nobody = held is not None and messages.nobody_came(held)
        say(
            messages.ended(
                self._kept,
                held,
                code=action.code,
                freed=self._closed,
                goodput=inventory.goodput(self._kept, held),
                nobody=self._nobody,
                complete=self._complete,
            )
        )
        if action.repeats:
            say(messages.not_restarted(action.repeats))

    def _held(self) -> Holdings | None:
        """What the run holds; None if that cannot be read. An error must not stop the command."""
        try:
            return inventory.read(self._kept)
        except KeepstepError:
            return None

    # --- the sidecar -------------------------------------------------------------------------

    def _start_sidecar(self, delay_s: float) -> None:
        if self._sidecar_seen:
            say(messages.sidecar_replaced(self._kept))
        self._sidecar_due = time.monotonic() + delay_s

    def _launch_sidecar(self) -> None:
        self._sidecar_since = time.monotonic()
        try:
            process = Process.of(launcher.launch(self._kept))
        except (OSError, KeepstepError) as error:
            say(f"the sidecar cannot be started: {error}")
            process = None
        self._sidecar = process
        if process is None:
            self._events.put(SidecarEnded(0.0))
        else:
            self._await_sidecar(process)

    def _await_sidecar(self, process: Process) -> None:
        def wait() -> Event | None:
            if launcher.wait_up(self._kept, process):
                self._sidecar_seen = True
                return News.SIDECAR_UP
            processes.send(process.pid, signal.SIGKILL)  # its death becomes the event
            return None

        self._in_background("wait for the sidecar", wait)


def _in_foreground() -> bool:
    """Whether this process group is the foreground group of the terminal on stdin."""
    try:
        return sys.stdin.isatty() and os.tcgetpgrp(0) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return False
