"""What a restart cost: parts that follow each other, from a life's end to the next one's step."""

from __future__ import annotations

from keepstep.core.history import RestartCost
from keepstep.steps import EpochId, StepId
from keepstep_sidecar.history import MachineHistory, RestartTimer

STEP = StepId(EpochId(1, "00000001"), 7)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now

    def __iadd__(self, seconds: float) -> Clock:
        self.now += seconds
        return self


def life(restarts: RestartTimer, clock: Clock, attempt: str, *, age_s: float) -> Clock:
    """Comes, restores for 2 s of 3, has a step after 4 more, ends after 100."""
    restarts.connected(0, attempt, age_s=age_s)
    clock += 3.0
    restarts.restored(0, seconds=2.0)
    clock += 4.0
    restarts.staged(0, STEP)
    clock += 100.0
    restarts.staged(0, STEP)
    restarts.ended(0, attempt)
    return clock


def test_the_duration_of_a_restart_is_split_into_its_phases() -> None:
    clock = Clock()
    restarts = RestartTimer(MachineHistory(), clock)
    clock = life(restarts, clock, "a", age_s=5.0)
    assert restarts.last == {}, "nothing was there before the first life"
    clock += 20.0
    life(restarts, clock, "b", age_s=6.0)
    # ended at 1107, came at 1127; its process began at 1121, to restore at 1128
    expected = RestartCost(
        at=1107.0, detection_s=14.0, start_s=7.0, restore_s=2.0, first_step_s=4.0
    )
    assert restarts.last == {0: expected}


def test_a_broken_connection_does_not_count_as_a_restart() -> None:
    clock = Clock()
    restarts = RestartTimer(MachineHistory(), clock)
    clock = life(restarts, clock, "a", age_s=5.0)
    life(restarts, clock, "a", age_s=50.0)
    assert restarts.last == {}
    restarts.connected(0, "b", age_s=0.0)
    restarts.ended(0, "a")
    restarts.connected(0, "c", age_s=0.0)
    restarts.restored(0, seconds=1.0)
    restarts.staged(0, STEP)
    assert restarts.last == {}, "b had not ended"
