"""What `keepstep run` decides, as a state machine: events go in, actions come out.

No I/O, no clock, no process here; `supervisor.py` turns what happens into events and carries the
actions out. The life of a run:

    WAITING --sidecar up--> RUNNING --command ended--> SWEEPING --nothing is left of it-->
        CLOSING    the command ended with 0: flush, stop the sidecar, free its memory
        FLUSHING   it failed and no restart is left: flush, memory stays
        WAITING    it failed: restart, once the sidecar answers
    CLOSING, FLUSHING --done, or interrupted--> ENDED

Sweeping ends what the command left behind (torchrun killed by SIGKILL leaves its workers, which
would hold their ranks' leases against their successors).
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, replace
from typing import Final

STOP_SIGNALS: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT})
"""A run that got one of these is not restarted."""

PASSED_SIGNALS: Final = STOP_SIGNALS | {signal.SIGUSR1, signal.SIGUSR2}
"""What is forwarded to the command."""

SIDECAR_ATTEMPTS: Final = 5
"""Failed starts in a row after which a command that waits for its sidecar is given up."""

NOT_STARTED: Final = 125
"""Exit code when the command never ran (that of env(1), timeout(1) and docker run)."""

_STEADY_S: Final = 60.0
"""A sidecar that lived this long starts the count of its failures anew."""

_LONGEST_DELAY_S: Final = 30.0


class Phase(enum.Enum):
    """Where the run is; see the module's picture."""

    WAITING = "waiting"
    RUNNING = "running"
    SWEEPING = "sweeping"
    FLUSHING = "flushing"
    CLOSING = "closing"
    ENDED = "ended"


# --- events ----------------------------------------------------------------------------------


class News(enum.Enum):
    """What happened, where there is nothing else to say of it."""

    SIDECAR_UP = "the sidecar answers"
    WARMED = "the fork server can be asked, or never will be"
    SWEPT = "nothing is left of the command"
    FINISHED = "the flush or the close is done, well or not"


@dataclass(frozen=True)
class CommandEnded:
    """`code` as a shell gives it: 128 + n for a command that died of signal n."""

    code: int


@dataclass(frozen=True)
class Signalled:
    """`delivered`: the terminal gave the signal to the command already (it is in our group)."""

    number: signal.Signals
    delivered: bool = False


@dataclass(frozen=True)
class SidecarEnded:
    """It died, or did not come up. `lived_s`: how long it had been up."""

    lived_s: float


Event = News | CommandEnded | Signalled | SidecarEnded


# --- actions ---------------------------------------------------------------------------------


class Do(enum.Enum):
    """What to do, where there is nothing else to say of it."""

    KILL_COMMAND = "SIGKILL to the command and to everything that it started"
    AWAIT_SIDECAR = "make sure that it answers; then comes SIDECAR_UP or SidecarEnded"
    FLUSH = "make the newest two steps durable; the sidecar and its memory stay"
    CLOSE = "flush, stop the sidecar, free its memory"


@dataclass(frozen=True)
class StartCommand:
    """`attempt` counts from 0."""

    attempt: int


@dataclass(frozen=True)
class Forward:
    """Send the signal to the command."""

    number: signal.Signals


@dataclass(frozen=True)
class Sweep:
    """End what the command left behind: SIGTERM, then SIGKILL; `now` without the first."""

    now: bool = False


@dataclass(frozen=True)
class StartSidecar:
    """Start it after `delay_s`; then comes SIDECAR_UP or SidecarEnded."""

    delay_s: float


@dataclass(frozen=True)
class AnnounceRestart:
    """Tell the user that the command ended with `code` and starts again."""

    attempt: int
    code: int


@dataclass(frozen=True)
class Exit:
    """Report and end with `code`. `interrupted`: the flush or close was not awaited."""

    code: int
    interrupted: bool = False


Action = Do | StartCommand | Forward | Sweep | StartSidecar | AnnounceRestart | Exit


# --- the machine -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """The state. `stopping`: a stop signal came. `interrupts`: how many SIGINT came. `warming`:
    the first start waits for the fork server."""

    restarts: int
    phase: Phase = Phase.WAITING
    attempt: int = 0
    code: int = NOT_STARTED
    stopping: bool = False
    interrupts: int = 0
    sidecar_up: bool = False
    warming: bool = False
    sidecar_failures: int = 0

    def step(self, event: Event) -> tuple[Supervision, tuple[Action, ...]]:
        """The state after `event`, and what to do, in order. Events that no longer matter are
        taken without effect, as signals and deaths race with each other."""
        if isinstance(event, Signalled):
            return self._signalled(event)
        if event is News.SIDECAR_UP:
            return replace(self, sidecar_up=True)._start()
        if event is News.WARMED:
            return replace(self, warming=False)._start()
        if isinstance(event, SidecarEnded):
            return self._sidecar_ended(event)
        if isinstance(event, CommandEnded) and self.phase is Phase.RUNNING:
            return replace(self, phase=Phase.SWEEPING, code=event.code), (Sweep(),)
        if event is News.SWEPT and self.phase is Phase.SWEEPING:
            return self._swept()
        if event is News.FINISHED and self.phase in (Phase.FLUSHING, Phase.CLOSING):
            return replace(self, phase=Phase.ENDED), (Exit(self.code),)
        return self, ()

    def _swept(self) -> tuple[Supervision, tuple[Action, ...]]:
        if self.code == 0:
            return replace(self, phase=Phase.CLOSING), (Do.CLOSE,)
        if self.stopping or self.attempt >= self.restarts:
            return replace(self, phase=Phase.FLUSHING), (Do.FLUSH,)
        attempt = self.attempt + 1
        announce = AnnounceRestart(attempt, self.code)
        waiting = replace(self, phase=Phase.WAITING, attempt=attempt)
        # what killed the command may have killed the sidecar as well, and its death may be told
        # a moment later: only an answer proves that a restore will find it
        return waiting, (announce, Do.AWAIT_SIDECAR) if self.sidecar_up else (announce,)

    def _signalled(self, event: Signalled) -> tuple[Supervision, tuple[Action, ...]]:
        interrupts = self.interrupts + (event.number is signal.SIGINT)
        stopping = self.stopping or event.number in STOP_SIGNALS
        after = replace(self, interrupts=interrupts, stopping=stopping)
        if self.phase is Phase.RUNNING:
            if event.number is signal.SIGINT and interrupts > 1:
                return after, (Do.KILL_COMMAND,)
            return after, () if event.delivered else (Forward(event.number),)
        if event.number not in STOP_SIGNALS:
            return after, ()
        if self.phase is Phase.SWEEPING:
            return after, (Sweep(now=True),) if interrupts > 1 else ()
        if self.phase is Phase.WAITING:
            return after._give_up_waiting(event.number)
        if self.phase in (Phase.FLUSHING, Phase.CLOSING):
            return replace(after, phase=Phase.ENDED), (Exit(self.code, interrupted=True),)
        return after, ()

    def _give_up_waiting(self, number: signal.Signals) -> tuple[Supervision, tuple[Action, ...]]:
        if self.attempt == 0:  # nothing ran: what earlier lives left in memory is not ours to end
            after = replace(self, phase=Phase.ENDED, code=128 + number)
            return after, (Exit(after.code, interrupted=True),)
        return replace(self, phase=Phase.FLUSHING), (Do.FLUSH,)

    def _start(self) -> tuple[Supervision, tuple[Action, ...]]:
        """Start the command, if it waited for no more than what has come."""
        if self.phase is Phase.WAITING and self.sidecar_up and not self.warming:
            return replace(self, phase=Phase.RUNNING), (StartCommand(self.attempt),)
        return self, ()

    def _sidecar_ended(self, event: SidecarEnded) -> tuple[Supervision, tuple[Action, ...]]:
        failures = 1 if event.lived_s >= _STEADY_S else self.sidecar_failures + 1
        after = replace(self, sidecar_up=False, sidecar_failures=failures)
        if self.phase in (Phase.FLUSHING, Phase.CLOSING, Phase.ENDED):
            return after, ()
        # before the first start it is a mistake in the options, which trying again does not mend
        # (one that was up and died while the fork server imported was none)
        allowed = 1 if self.attempt == 0 and not self.sidecar_up else SIDECAR_ATTEMPTS
        if self.phase is Phase.WAITING and failures >= allowed:
            return replace(after, phase=Phase.ENDED), (Exit(self.code),)
        return after, (StartSidecar(_delay_s(failures)),)


def _delay_s(failures: int) -> float:
    """None after the first death: a trainer may be waiting for this sidecar in its restore."""
    return 0.0 if failures < 2 else min(_LONGEST_DELAY_S, 0.25 * 2.0 ** (failures - 2))
