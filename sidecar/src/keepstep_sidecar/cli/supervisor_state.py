"""What `keepstep run` decides, as a state machine: events go in, actions come out.

It has no I/O, clock or process. `supervisor.py` turns what happens into events and carries out the
actions. The life of a run:

    WAITING --sidecar up--> RUNNING --command ended--> SWEEPING --nothing is left of it-->
        CLOSING    the command ended with 0: flush, stop the sidecar, free its memory
        FLUSHING   it failed and is not restarted: flush, memory stays
        WAITING    it failed: restart, once the sidecar answers
    CLOSING, FLUSHING --done, or interrupted--> ENDED

Sweeping ends the processes that the command left behind. For example, torchrun killed by SIGKILL
leaves its workers, which would keep the leases of their ranks from their successors.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, replace
from typing import Final

STOP_SIGNALS: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
"""A run that received one of these signals is not restarted."""

PASSED_SIGNALS: Final = STOP_SIGNALS | {signal.SIGUSR1, signal.SIGUSR2}
"""The signals that are forwarded to the command."""

SIDECAR_ATTEMPTS: Final = 5
"""After so many failed starts of the sidecar in a row, a command that waits for it is given up."""

NOT_STARTED: Final = 125
"""Exit code when the command never ran; env(1), timeout(1) and docker run use the same."""

_OF_SIGNALS: Final = 128
"""Exit codes above this one are those of signals."""

_STEADY_S: Final = 60.0
"""When a sidecar dies that lived this long, the count of its failures starts anew."""

_LONGEST_DELAY_S: Final = 30.0


class SupervisorPhase(enum.Enum):
    """The state of the run; the module's docstring shows the transitions."""

    WAITING = "waiting"
    RUNNING = "running"
    SWEEPING = "sweeping"
    FLUSHING = "flushing"
    CLOSING = "closing"
    ENDED = "ended"


# --- events ----------------------------------------------------------------------------------


class SimpleSupervisorEvent(enum.Enum):
    """Events without data."""

    SIDECAR_UP = "the sidecar answers"
    WARMED = "the fork server can be asked, or never will be"
    FINISHED = "the flush or the close is done, well or not"


@dataclass(frozen=True)
class CommandEnded:
    """The command ended. `code` is as in a shell: 128 + n for a command that died of signal n."""

    code: int


@dataclass(frozen=True)
class CommandProcessesEnded:
    """Nothing is left of the command. `repeats`: the error that ended it, if the next start must
    end in it, too; '' otherwise. `unleased`: no trainer took its rank, and no error that another
    start may avoid is known."""

    repeats: str = ""
    unleased: bool = False


@dataclass(frozen=True)
class Signalled:
    """A signal came. `delivered`: the command already has it from the terminal, because it is in
    the process group of `keepstep run`."""

    number: signal.Signals
    delivered: bool = False


@dataclass(frozen=True)
class SidecarEnded:
    """The sidecar died, or did not come up. `lived_s`: seconds since it was launched or adopted; 0
    if it could not be launched."""

    lived_s: float


Event = SimpleSupervisorEvent | CommandEnded | CommandProcessesEnded | Signalled | SidecarEnded


# --- actions ---------------------------------------------------------------------------------


class ActionWithoutData(enum.Enum):
    """Actions without data."""

    KILL_COMMAND = "SIGKILL to the command and to everything that it started"
    AWAIT_SIDECAR = "make sure that it answers; then comes SIDECAR_UP or SidecarEnded"
    FLUSH = "make the newest two steps durable; the sidecar and its memory stay"
    CLOSE = "flush, stop the sidecar, free its memory"


@dataclass(frozen=True)
class StartCommandAction:
    """Start the command. `attempt` counts from 0."""

    attempt: int


@dataclass(frozen=True)
class Forward:
    """Send the signal to the command."""

    number: signal.Signals


@dataclass(frozen=True)
class EndLeftoverProcesses:
    """End the processes that the command left behind: SIGTERM, then SIGKILL. `now`: SIGKILL at
    once."""

    now: bool = False


@dataclass(frozen=True)
class StartSidecar:
    """Start the sidecar after `delay_s`; then comes SIDECAR_UP or SidecarEnded."""

    delay_s: float


@dataclass(frozen=True)
class AnnounceRestart:
    """Tell the user that the command ended with `code` and starts again."""

    attempt: int
    code: int


@dataclass(frozen=True)
class Exit:
    """Report and end with `code`. `interrupted`: the flush or close was not awaited. `repeats`: why
    the command was not started again although it might have been; '' if it might not."""

    code: int
    interrupted: bool = False
    repeats: str = ""


Action = (
    ActionWithoutData
    | StartCommandAction
    | Forward
    | EndLeftoverProcesses
    | StartSidecar
    | AnnounceRestart
    | Exit
)


# --- the machine -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """The state. `stopping`: a stop signal came. `interrupts`: the number of SIGINTs so far.
    `warming`: the first start still waits for the fork server. `unleased`: how the life before
    ended, if it ended by itself and no trainer took its rank. `repeats`: as in `Exit`."""

    restarts: int
    phase: SupervisorPhase = SupervisorPhase.WAITING
    attempt: int = 0
    code: int = NOT_STARTED
    stopping: bool = False
    interrupts: int = 0
    sidecar_up: bool = False
    warming: bool = False
    unleased: int | None = None
    repeats: str = ""
    sidecar_failures: int = 0

    def step(self, event: Event) -> tuple[Supervision, tuple[Action, ...]]:
        """The state after `event`, and the actions in order. An event that no longer matters has no
        effect, because signals and deaths race with each other."""
        if isinstance(event, Signalled):
            return self._signalled(event)
        if event is SimpleSupervisorEvent.SIDECAR_UP:
            return replace(self, sidecar_up=True)._start()
        if event is SimpleSupervisorEvent.WARMED:
            return replace(self, warming=False)._start()
        if isinstance(event, SidecarEnded):
            return self._sidecar_ended(event)
        if isinstance(event, CommandEnded) and self.phase is SupervisorPhase.RUNNING:
            return replace(self, phase=SupervisorPhase.SWEEPING, code=event.code), (
                EndLeftoverProcesses(),
            )
        if isinstance(event, CommandProcessesEnded) and self.phase is SupervisorPhase.SWEEPING:
            return self._swept(event)
        if event is SimpleSupervisorEvent.FINISHED and self.phase in (
            SupervisorPhase.FLUSHING,
            SupervisorPhase.CLOSING,
        ):
            return replace(self, phase=SupervisorPhase.ENDED), (
                Exit(self.code, repeats=self.repeats),
            )
        return self, ()

    def _swept(self, event: CommandProcessesEnded) -> tuple[Supervision, tuple[Action, ...]]:
        if self.code == 0:
            return replace(self, phase=SupervisorPhase.CLOSING), (ActionWithoutData.CLOSE,)
        if self.stopping or self.attempt >= self.restarts:
            return replace(self, phase=SupervisorPhase.FLUSHING), (ActionWithoutData.FLUSH,)
        unleased = self.code if event.unleased and self.code < _OF_SIGNALS else None
        if repeats := event.repeats or self._of_two_lives(unleased):
            return replace(self, phase=SupervisorPhase.FLUSHING, repeats=repeats), (
                ActionWithoutData.FLUSH,
            )
        attempt = self.attempt + 1
        announce = AnnounceRestart(attempt, self.code)
        waiting = replace(self, phase=SupervisorPhase.WAITING, attempt=attempt, unleased=unleased)
        # What killed the command may have killed the sidecar, too, and the event of its death may
        # come later. Only an answer proves that a restore will find the sidecar.
        return waiting, (announce, ActionWithoutData.AWAIT_SIDECAR) if self.sidecar_up else (
            announce,
        )

    def _of_two_lives(self, unleased: int | None) -> str:
        if unleased is None or unleased != self.unleased:
            return ""
        return f"it failed with {unleased} twice in a row before any trainer took its rank"

    def _signalled(self, event: Signalled) -> tuple[Supervision, tuple[Action, ...]]:
        interrupts = self.interrupts + (event.number is signal.SIGINT)
        stopping = self.stopping or event.number in STOP_SIGNALS
        after = replace(self, interrupts=interrupts, stopping=stopping)
        if self.phase is SupervisorPhase.RUNNING:
            if event.number is signal.SIGINT and interrupts > 1:
                return after, (ActionWithoutData.KILL_COMMAND,)
            return after, () if event.delivered else (Forward(event.number),)
        if event.number not in STOP_SIGNALS:
            return after, ()
        if self.phase is SupervisorPhase.SWEEPING:
            return after, (EndLeftoverProcesses(now=True),) if interrupts > 1 else ()
        if self.phase is SupervisorPhase.WAITING:
            return after._give_up_waiting(event.number)
        if self.phase in (SupervisorPhase.FLUSHING, SupervisorPhase.CLOSING):
            return replace(after, phase=SupervisorPhase.ENDED), (Exit(self.code, interrupted=True),)
        return after, ()

    def _give_up_waiting(self, number: signal.Signals) -> tuple[Supervision, tuple[Action, ...]]:
        if self.attempt == 0:  # the command never ran: keep what earlier lives left in memory
            after = replace(self, phase=SupervisorPhase.ENDED, code=128 + number)
            return after, (Exit(after.code, interrupted=True),)
        return replace(self, phase=SupervisorPhase.FLUSHING), (ActionWithoutData.FLUSH,)

    def _start(self) -> tuple[Supervision, tuple[Action, ...]]:
        """Start the command if it waits and nothing is missing any more."""
        if self.phase is SupervisorPhase.WAITING and self.sidecar_up and not self.warming:
            return replace(self, phase=SupervisorPhase.RUNNING), (StartCommandAction(self.attempt),)
        return self, ()

    def _sidecar_ended(self, event: SidecarEnded) -> tuple[Supervision, tuple[Action, ...]]:
        failures = 1 if event.lived_s >= _STEADY_S else self.sidecar_failures + 1
        after = replace(self, sidecar_up=False, sidecar_failures=failures)
        if self.phase in (SupervisorPhase.FLUSHING, SupervisorPhase.CLOSING, SupervisorPhase.ENDED):
            return after, ()
        # A sidecar that never came up for the first start has wrong options: a retry does not help.
        # If it was up and died while the fork server imported, its options were right.
        allowed = 1 if self.attempt == 0 and not self.sidecar_up else SIDECAR_ATTEMPTS
        if self.phase is SupervisorPhase.WAITING and failures >= allowed:
            return replace(after, phase=SupervisorPhase.ENDED), (Exit(self.code),)
        # no delay after the first death: a trainer may wait for this sidecar in its restore
        delay_s = 0.0 if failures < 2 else min(_LONGEST_DELAY_S, 0.25 * 2.0 ** (failures - 2))
        return after, (StartSidecar(delay_s),)
