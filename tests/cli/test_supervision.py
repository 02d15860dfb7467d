"""What `keepstep run` decides: every path through the machine, without a process."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep_sidecar.cli.supervisor_state import (
    NOT_STARTED,
    SIDECAR_ATTEMPTS,
    Action,
    ActionWithoutData,
    AnnounceRestart,
    CommandEnded,
    CommandProcessesEnded,
    EndLeftoverProcesses,
    Event,
    Exit,
    SidecarEnded,
    Signalled,
    SimpleSupervisorEvent,
    StartCommandAction,
    StartSidecar,
    Supervision,
    SupervisorPhase,
)

INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


def play(restarts: int, *events: Event) -> tuple[Supervision, list[Action]]:
    """The machine after `events`, and the actions of the last one."""
    state, actions = Supervision(restarts=restarts), ()
    for event in events:
        state, actions = state.step(event)
    return state, list(actions)


@pytest.mark.parametrize("order", [1, -1])
def test_the_first_start_waits_for_the_fork_server_too(order: int) -> None:
    state = Supervision(restarts=0, warming=True)
    first, second = (SimpleSupervisorEvent.SIDECAR_UP, SimpleSupervisorEvent.WARMED)[::order]
    state, nothing = state.step(first)
    state, started = state.step(second)
    assert (nothing, started) == ((), (StartCommandAction(0),))
    assert state.step(SimpleSupervisorEvent.WARMED)[1] == ()


def test_a_sidecar_that_was_up_is_replaced_while_the_fork_server_imports() -> None:
    state, _ = Supervision(restarts=0, warming=True).step(SimpleSupervisorEvent.SIDECAR_UP)
    state, actions = state.step(SidecarEnded(5.0))
    assert actions == (StartSidecar(0.0),)
    assert state.step(SidecarEnded(0.0))[1] == (Exit(NOT_STARTED),)


def test_a_failure_is_restarted_as_often_as_allowed_then_flushed() -> None:
    failure = (SimpleSupervisorEvent.SIDECAR_UP, CommandEnded(1), CommandProcessesEnded())
    assert play(1, *failure)[1] == [AnnounceRestart(1, 1), ActionWithoutData.AWAIT_SIDECAR]
    assert play(1, *failure, SimpleSupervisorEvent.SIDECAR_UP)[1] == [StartCommandAction(1)]
    assert play(1, *failure, *failure)[1] == [ActionWithoutData.FLUSH]
    assert play(1, *failure, *failure, SimpleSupervisorEvent.FINISHED)[1] == [Exit(1)]


def test_an_error_that_the_next_start_repeats_ends_the_run() -> None:
    events = (
        SimpleSupervisorEvent.SIDECAR_UP,
        CommandEnded(1),
        CommandProcessesEnded(repeats="MismatchError: no"),
    )
    assert play(9, *events)[1] == [ActionWithoutData.FLUSH]
    assert play(9, *events, SimpleSupervisorEvent.FINISHED)[1] == [
        Exit(1, repeats="MismatchError: no")
    ]


def test_two_equal_failures_in_a_row_before_any_lease_end_the_run() -> None:
    def life(code: int, *, unleased: bool = True) -> tuple[Event, ...]:
        return (
            SimpleSupervisorEvent.SIDECAR_UP,
            CommandEnded(code),
            CommandProcessesEnded(unleased=unleased),
        )

    assert play(9, *life(3), *life(3))[1] == [ActionWithoutData.FLUSH]
    assert "failed with 3 twice" in play(9, *life(3), *life(3))[0].repeats
    goes_on = [ActionWithoutData.AWAIT_SIDECAR]
    assert play(9, *life(3), *life(4))[1][1:] == goes_on
    assert play(9, *life(137), *life(137))[1][1:] == goes_on, "by a signal"
    assert play(9, *life(3), *life(3, unleased=False), *life(3))[1][1:] == goes_on


def test_a_restart_waits_for_leftover_processes_to_end_and_for_the_sidecar() -> None:
    events = (SimpleSupervisorEvent.SIDECAR_UP, SidecarEnded(5.0), CommandEnded(137))
    assert play(1, *events)[1] == [EndLeftoverProcesses()]
    assert play(1, *events, CommandProcessesEnded())[1] == [AnnounceRestart(1, 137)]
    assert play(1, *events, CommandProcessesEnded(), SimpleSupervisorEvent.SIDECAR_UP)[1] == [
        StartCommandAction(1)
    ]


def test_a_sidecar_whose_exit_is_reported_late_is_replaced_before_the_restart() -> None:
    events = (
        SimpleSupervisorEvent.SIDECAR_UP,
        CommandEnded(137),
        CommandProcessesEnded(),
        SidecarEnded(5.0),
    )
    assert play(1, *events)[1] == [StartSidecar(0.0)]
    assert play(1, *events, SimpleSupervisorEvent.SIDECAR_UP)[1] == [StartCommandAction(1)]


@pytest.mark.parametrize("delivered", [True, False])
def test_a_second_interrupt_kills_the_command(delivered: bool) -> None:
    interrupt = Signalled(INT, delivered=delivered)
    assert play(0, SimpleSupervisorEvent.SIDECAR_UP, interrupt, interrupt)[1] == [
        ActionWithoutData.KILL_COMMAND
    ]
    assert play(0, SimpleSupervisorEvent.SIDECAR_UP, Signalled(TERM), interrupt)[1] != [
        ActionWithoutData.KILL_COMMAND
    ]


def test_a_run_that_received_a_stop_signal_is_not_restarted() -> None:
    for number in (INT, TERM, signal.SIGHUP, signal.SIGQUIT):
        _, actions = play(
            9,
            SimpleSupervisorEvent.SIDECAR_UP,
            Signalled(number),
            CommandEnded(1),
            CommandProcessesEnded(),
        )
        assert actions == [ActionWithoutData.FLUSH]
    _, actions = play(
        9,
        SimpleSupervisorEvent.SIDECAR_UP,
        Signalled(USR1),
        CommandEnded(1),
        CommandProcessesEnded(),
    )
    assert actions == [AnnounceRestart(1, 1), ActionWithoutData.AWAIT_SIDECAR]


def test_a_stop_that_comes_while_leftovers_are_ended_prevents_the_restart() -> None:
    _, actions = play(
        9,
        SimpleSupervisorEvent.SIDECAR_UP,
        CommandEnded(1),
        Signalled(TERM),
        CommandProcessesEnded(),
    )
    assert actions == [ActionWithoutData.FLUSH]


def test_a_second_interrupt_speeds_up_the_killing_of_leftover_processes() -> None:
    until = (SimpleSupervisorEvent.SIDECAR_UP, Signalled(INT), CommandEnded(130))
    assert play(0, *until, Signalled(INT))[1] == [EndLeftoverProcesses(now=True)]


def test_flush_and_close_can_be_interrupted() -> None:
    for code in (0, 1):
        until = (SimpleSupervisorEvent.SIDECAR_UP, CommandEnded(code), CommandProcessesEnded())
        assert play(0, *until, Signalled(INT))[1] == [Exit(code, interrupted=True)]
        assert play(0, *until, Signalled(USR1))[1] == []


def test_a_sidecar_that_dies_is_started_again_at_once_then_more_and_more_slowly() -> None:
    state, delays = Supervision(restarts=0).step(SimpleSupervisorEvent.SIDECAR_UP)[0], []
    for _ in range(9):
        state, actions = state.step(SidecarEnded(1.0))
        assert isinstance(actions[0], StartSidecar)
        delays.append(actions[0].delay_s)
    assert delays[:3] == [0.0, 0.25, 0.5]
    assert delays[-1] == 30.0
    assert state.step(SidecarEnded(3600.0))[1] == (StartSidecar(0.0),)


def test_run_exits_instead_of_restarting_when_the_sidecar_keeps_failing() -> None:
    until = (
        SimpleSupervisorEvent.SIDECAR_UP,
        SidecarEnded(9.0),
        CommandEnded(7),
        CommandProcessesEnded(),
    )
    deaths = [SidecarEnded(0.1)] * (SIDECAR_ATTEMPTS - 1)
    assert play(3, *until, *deaths)[1] == [Exit(7)]


def test_an_interrupt_before_the_command_starts_does_not_free_earlier_memory() -> None:
    assert play(0, Signalled(INT))[1] == [Exit(130, interrupted=True)]


EVENTS = st.one_of(
    st.builds(CommandEnded, st.sampled_from([0, 1, 137])),
    st.builds(CommandProcessesEnded, st.sampled_from(["", "UsageError"]), st.booleans()),
    st.builds(Signalled, st.sampled_from([INT, TERM, USR1]), st.booleans()),
    st.sampled_from([SimpleSupervisorEvent.SIDECAR_UP, SimpleSupervisorEvent.WARMED]),
    st.builds(SidecarEnded, st.sampled_from([0.1, 100.0])),
    st.just(SimpleSupervisorEvent.FINISHED),
)


@given(st.integers(0, 3), st.booleans(), st.lists(EVENTS, max_size=30))
def test_in_any_order_of_events_the_command_starts_at_most_restarts_plus_one_times(
    restarts: int, warming: bool, events: list[Event]
) -> None:
    state, starts, exits = Supervision(restarts=restarts, warming=warming), 0, 0
    for event in events:
        ended = state.phase is SupervisorPhase.ENDED
        state, actions = state.step(event)
        starts += sum(isinstance(action, StartCommandAction) for action in actions)
        exits += sum(isinstance(action, Exit) for action in actions)
        assert not (ended and actions), "an ended run does nothing"
    assert starts <= restarts + 1
    assert exits == (state.phase is SupervisorPhase.ENDED)
