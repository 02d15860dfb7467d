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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from keepstep import processes
from keepstep.errors import KeepstepError
from keepstep.processes import Process, become_subreaper
from keepstep.steps import StepId
from keepstep.warm.client import CommandStarter
from keepstep.wire.trainer import SOCKET_ENV
from keepstep_sidecar.cli import (
    calls,
    inventory,
    output,
    run_messages,
    sidecar_launcher,
    supervisor_state,
)
from keepstep_sidecar.cli.inventory import RunHoldings
from keepstep_sidecar.cli.run_dir import RunDir
from keepstep_sidecar.cli.supervisor_state import (
    Action,
    ActionWithoutData,
    AnnounceRestart,
    CommandEnded,
    CommandProcessesEnded,
    EndLeftoverProcesses,
    Event,
    Exit,
    Forward,
    SidecarEnded,
    Signalled,
    SimpleSupervisorEvent,
    StartCommandAction,
    StartSidecar,
    Supervision,
)

_NUMBERS: Final = re.compile(r"\d+")
_SIGNALS: Final = frozenset({*supervisor_state.PASSED_SIGNALS, signal.SIGCHLD})
_SENT_BY_KERNEL: Final = 0x80  # SI_KERNEL: the terminal, which signals its whole foreground group
_TICK_S: Final = 0.5
_GRACE_S: Final = 5.0
_LOG_CHECK_S: Final = 10.0
_FIRST_CHECK_S: Final = 2.0
_CHECK_S: Final = 10.0
_REPEAT_S: Final = 600.0
_STILL_WAITS_S: Final = 60.0


def note(text: str) -> None:
    """Print one line on stderr. Stdout belongs to the command."""
    output.print_line(f"keepstep: {text}", err=True)


def _try_to_note(text: str) -> None:
    with contextlib.suppress(OSError):
        note(text)


@contextmanager
def _blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _StatusPoll:
    """Looks at the sidecar from time to time. `unused`: no trainer has connected. `complete`: see
    `messages.step_without_progress`."""

    def __init__(self, kept: RunDir) -> None:
        self.unused = False
        self.complete: StepId | None = None
        self._kept = kept
        self._next_at = time.monotonic() + _FIRST_CHECK_S
        self._running = threading.Lock()
        self._reported: dict[str, float] = {}

    def due(self) -> bool:
        """Whether it is time for a look. If so, the next one is due later."""
        now = time.monotonic()
        if now <= self._next_at or self._running.locked():
            return False
        self._next_at = now + _CHECK_S
        return True

    def __call__(self, *, ending: bool) -> None:
        """Print the sidecar's warnings and, at the end, what it waits for; each kind only once in a
        while. Note whether a trainer has connected."""
        # stderr or a volume may be gone; neither may hold up the end
        with contextlib.suppress(Exception), self._running:
            held = inventory.read_holdings(self._kept)
            if held.live is None:
                return
            self.unused = run_messages.has_seen_no_trainer(held)
            self.complete = run_messages.find_stuck_restart_step(held)
            for warning in held.live.warnings:
                self._repeat(f"warning: {warning}", after_s=_REPEAT_S)
            for tier, status in held.live.tiers.items() if ending else ():
                if status.backlog:
                    self._repeat(run_messages.backlog_text(tier, status), after_s=_STILL_WAITS_S)

    def last(self) -> None:
        """The last look before the sidecar ends, unless one is under way."""
        if not self._running.locked():
            self(ending=True)

    def _repeat(self, text: str, *, after_s: float) -> None:
        """Print `text` unless it was printed in the last `after_s`. Texts that differ only in their
        numbers count as the same."""
        kind, now = _NUMBERS.sub("#", text), time.monotonic()
        if now - self._reported.get(kind, -after_s) >= after_s:
            self._reported[kind] = now
            note(text)


@dataclass
class _Sidecar:
    """The run's sidecar. `process`: None while there is none. `due`: when to start it. `seen`: it,
    or one before it, has answered."""

    kept: RunDir
    process: Process | None
    seen: bool = False
    due: float | None = None
    since: float = field(default_factory=time.monotonic)
    _memory: tuple[int, int] | None = None
    _gone_since: float | None = None

    def start(self, delay_s: float) -> None:
        """Have it started after `delay_s`."""
        if self.seen:
            note(f"the sidecar ended and is started again; training goes on (why: {self.kept.log})")
        self.due = time.monotonic() + delay_s

    def launch(self) -> Process | None:
        """Start it now, if that is possible."""
        self.due, self.since = None, time.monotonic()
        try:
            self.process = Process.of(sidecar_launcher.launch_sidecar(self.kept))
        except (OSError, KeepstepError) as error:
            note(f"the sidecar cannot be started: {error}")
            self.process = None
        return self.process

    def died(self) -> bool:
        """Whether it has died since the last call. One that was adopted is not a child of this
        process, so it must be polled."""
        if self.process is None or self.process.alive():
            return False
        self.process = None
        return True

    def answers(self, process: Process) -> bool:
        """Wait until it answers. If it does not, it is killed: its death becomes the event."""
        if sidecar_launcher.wait_for_sidecar(self.kept, process):
            self.seen = True
            return True
        processes.send_signal(process.pid, signal.SIGKILL)
        return False

    def watch_memory(self, *, running: bool) -> None:
        """Report if the memory directory was removed under a `running` command. The sidecar makes
        it again. If its socket does not come back in time, it is killed: another one starts."""
        if self.process is None or not self.seen or not running:
            self._memory, self._gone_since = None, None
            return
        memory, now = sidecar_launcher.file_identity(self.kept.memory), time.monotonic()
        if self._memory is not None and memory != self._memory:
            note(run_messages.removed_memory_text(self.kept))
        self._memory = memory
        if sidecar_launcher.file_identity(self.kept.socket) is not None:
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = now
        elif now - self._gone_since > sidecar_launcher.UP_S:
            self._gone_since = None
            processes.send_signal(self.process.pid, signal.SIGKILL)  # its death becomes the event


@dataclass(eq=False)
class Supervisor:
    """Runs one command beside the sidecar of `kept`.

    `path`: the program's file. `command`: its words. `adopted`: a sidecar that already runs.
    `starter`: makes warm starts. `variables`: for the command, besides its environment.
    """

    kept: RunDir
    _: KW_ONLY
    path: str
    command: Sequence[str]
    restarts: int
    adopted: Process | None = None
    starter: CommandStarter | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._state = Supervision(restarts=self.restarts, warming=self.starter is not None)
        self._environment = {
            **os.environ,
            **self.variables,
            SOCKET_ENV: str(self.kept.socket),
        }
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._main = threading.get_ident()
        self._own_group = not _in_foreground()
        self._command_pid = 0
        self._sidecar = _Sidecar(self.kept, self.adopted)
        self._view = _StatusPoll(self.kept)
        self._hurry = threading.Event()
        self._log_checked = self._sidecar.since
        self._exit: int | None = None
        self._closed = self._ending = False
        self._life_since = 0.0

    def run(self) -> int:
        """Run until the end. Returns the exit code for this process."""
        become_subreaper()
        with _blocked():
            self._start_warm()
            if self.adopted is None:
                self._sidecar.start(0.0)
            else:
                self._await_sidecar(self.adopted)
            while self._exit is None:
                for event in self._next():
                    self._state, actions = self._state.step(event)
                    for action in actions:
                        self._carry_out(action)
            if self.starter is not None:
                self.starter.close()
            return self._exit

    # --- events ------------------------------------------------------------------------------

    def _next(self) -> Iterator[Event]:
        """The events since the last call. Waits at most one tick."""
        due, sidecar = self._sidecar.due, self._sidecar
        wait_s = _TICK_S if due is None else max(0.0, min(_TICK_S, due - time.monotonic()))
        information = processes.take_signal(_SIGNALS, wait_s)
        if information is not None and information.si_signo != signal.SIGCHLD:
            delivered = information.si_code == _SENT_BY_KERNEL and not self._own_group
            yield Signalled(signal.Signals(information.si_signo), delivered)
        for pid, code in processes.reap_children().items():
            if pid == self._command_pid:
                self._command_pid = 0
                yield CommandEnded(code)
        if sidecar.died():
            yield SidecarEnded(time.monotonic() - sidecar.since)
        while not self._events.empty():
            event = self._events.get()
            if event is SimpleSupervisorEvent.SIDECAR_UP and sidecar.process is None:
                continue  # it has died
            yield event
        self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        if self._sidecar.due is not None and now >= self._sidecar.due:
            if (process := self._sidecar.launch()) is None:
                self._events.put(SidecarEnded(0.0))
            else:
                self._await_sidecar(process)
        if now - self._log_checked > _LOG_CHECK_S:
            self._log_checked = now
            with contextlib.suppress(OSError):  # it may grow until the next start, which says why
                sidecar_launcher.limit_log(self.kept.log)
        if (self._command_pid or self._ending) and self._view.due():
            probe = functools.partial(self._view, ending=self._ending)
            self._in_background("look for warnings", probe)
        self._sidecar.watch_memory(running=self._command_pid != 0)

    def _in_background(self, name: str, work: Callable[[], Event | None]) -> None:
        """Run `work` on a thread. The main thread takes the event that it returns, if any."""

        def body() -> None:
            event = work()
            if event is not None:
                self._events.put(event)
                signal.pthread_kill(self._main, signal.SIGCHLD)

        threading.Thread(target=body, name=name, daemon=True).start()

    def _await_sidecar(self, process: Process) -> None:
        def wait() -> Event | None:
            return SimpleSupervisorEvent.SIDECAR_UP if self._sidecar.answers(process) else None

        self._in_background("wait for the sidecar", wait)

    # --- actions -----------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        match action:
            case StartCommandAction():
                self._start_command(action.attempt)
            case Forward(number):
                if self._command_pid:
                    processes.send_signal(self._command_pid, number)
            case ActionWithoutData.KILL_COMMAND:
                for process in self._descendants():
                    processes.send_signal(process.pid, signal.SIGKILL)
            case EndLeftoverProcesses(now=True):
                self._hurry.set()
            case EndLeftoverProcesses():
                self._hurry.clear()
                self._in_background("sweep", self._end_leftovers)
            case StartSidecar(delay_s):
                self._sidecar.start(delay_s)
            case ActionWithoutData.AWAIT_SIDECAR:
                if self._sidecar.process is not None:  # else its death becomes the next event
                    self._await_sidecar(self._sidecar.process)
            case AnnounceRestart(attempt, code):
                restarts, held = self.restarts, self._held()
                note(
                    run_messages.restarted_text(held, code=code, attempt=attempt, restarts=restarts)
                )
            case ActionWithoutData.FLUSH:
                self._ending = True
                self._in_background("flush", self._flush)
            case ActionWithoutData.CLOSE:
                self._ending = True
                self._in_background("close", self._close)
            case Exit():
                self._finish(action)

    def _start_command(self, attempt: int) -> None:
        self._life_since = time.time()
        if attempt == 0:
            adopted = self.adopted is not None
            note(run_messages.started_text(self.kept, self._held(), adopted=adopted))
        spawn = (
            functools.partial(processes.start_child_process, self.path, tuple(self.command))
            if self.starter is None
            else self.starter.spawn
        )
        try:
            self._command_pid = spawn(self._environment, own_group=self._own_group)
        except OSError as error:
            note(f"{self.command[0]}: {error.strerror}")
            self._events.put(CommandEnded(126))
        else:
            sidecar_launcher.record_command_pid(self.kept, self._command_pid)

    def _start_warm(self) -> None:
        """Prepare the fork server. The first start waits for it, because torchrun's workers come
        from one, too."""
        if (starter := self.starter) is None:
            return

        def wait() -> Event:
            starter.wait_server_ready()
            return SimpleSupervisorEvent.WARMED

        starter.prepare(self._environment)
        self._in_background("wait for the fork server", wait)

    def _descendants(self) -> tuple[Process, ...]:
        sidecar = self._sidecar.process
        spared = () if sidecar is None else (sidecar.pid,)
        servers = () if self.starter is None else self.starter.server_pids
        return processes.descendants(os.getpid(), spare=(*spared, *servers))

    def _end_leftovers(self) -> CommandProcessesEnded:
        """End what is left of the command, and judge whether its life is worth another one. A
        sidecar that does not say, or was started since, says nothing against it."""
        processes.end_processes(self._descendants, grace_s=_GRACE_S, hurry=self._hurry)
        try:
            live = calls.ask_status(self.kept.socket)
        except KeepstepError:
            return CommandProcessesEnded()
        if live is None or live.started_at > self._life_since:
            return CommandProcessesEnded()
        error = live.uncaught if live.uncaught and live.uncaught.at >= self._life_since else None
        if error is not None:
            return CommandProcessesEnded(repeats=error.reason if error.repeats else "")
        return CommandProcessesEnded(
            unleased=live.leased_at is None or live.leased_at < self._life_since
        )

    def _flush(self) -> Event:
        try:
            if sidecar_launcher.wait_for_sidecar(self.kept, None, timeout_s=_GRACE_S):
                calls.ask_flush(self.kept.socket, timeout_s=sidecar_launcher.DRAIN_S)
        except KeepstepError as error:
            _try_to_note(f"not flushed: {error}")
        return SimpleSupervisorEvent.FINISHED

    def _close(self) -> Event:
        try:
            sidecar_launcher.wait_for_sidecar(self.kept, None, timeout_s=_GRACE_S)
            self._view.last()
            self._closed = sidecar_launcher.end_sidecar(
                self.kept
            ) and not sidecar_launcher.has_leftover_slots(self.kept)
        except KeepstepError as error:
            _try_to_note(f"not closed: {error}")
        return SimpleSupervisorEvent.FINISHED

    def _finish(self, action: Exit) -> None:
        self._exit = action.code
        if self._state.attempt == 0 and not self._sidecar.seen:
            if not action.interrupted:
                tail = sidecar_launcher.log_tail(self.kept.log)
                note(f"the sidecar does not start; the end of {self.kept.log}:\n{tail}")
            return
        if action.interrupted:
            note("interrupted: the flush was not awaited")
        held = self._held()
        unused = self._view.unused
        if not self._closed:
            unused = held is not None and run_messages.has_seen_no_trainer(held)
        note(
            run_messages.ended_text(
                self.kept,
                held,
                code=action.code,
                freed=self._closed,
                goodput=inventory.run_goodput(self.kept, held),
                unused=unused,
                complete=self._view.complete,
            )
        )
        if action.repeats:
            why = "not started again, because the next start would end in the same way"
            note(f"{why}: {action.repeats}")

    def _held(self) -> RunHoldings | None:
        """What the run holds; None if that cannot be read. An error must not stop the command."""
        try:
            return inventory.read_holdings(self.kept)
        except KeepstepError:
            return None


def _in_foreground() -> bool:
    """Whether this process group is the foreground group of the terminal on stdin."""
    try:
        return sys.stdin.isatty() and os.tcgetpgrp(0) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return False
