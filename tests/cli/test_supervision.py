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
    AnnounceRestart,
    AwaitSidecar,
    Close,
    CommandEnded,
    Event,
    Exit,
    Finished,
    Flush,
    Forward,
    KillCommand,
    Phase,
    SidecarEnded,
    SidecarUp,
    Signalled,
    StartCommand,
    StartSidecar,
    Supervision,
    Sweep,
    Swept,
)

INT, TERM, USR1 = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1


def play(restarts: int, *events: Event) -> tuple[Supervision, list[Action]]:
    """The machine after `events`, and the actions of the last one."""
    state, actions = Supervision(restarts=restarts), ()
    for event in events:
        state, actions = state.step(event)
    return state, list(actions)


def test_the_command_starts_once_the_sidecar_is_up() -> None:
    assert play(0, SidecarUp())[1] == [StartCommand(0)]


def test_a_good_end_closes_the_sidecar_and_returns_0() -> None:
    until = (SidecarUp(), CommandEnded(0))
    assert play(3, *until)[1] == [Sweep()]
    assert play(3, *until, Swept())[1] == [Close()]
    assert play(3, *until, Swept(), Finished())[1] == [Exit(0)]


def test_a_failure_is_restarted_as_often_as_allowed_then_flushed() -> None:
    failure = (SidecarUp(), CommandEnded(1), Swept())
    assert play(1, *failure)[1] == [AnnounceRestart(1, 1), AwaitSidecar()]
    assert play(1, *failure, SidecarUp())[1] == [StartCommand(1)]
    assert play(1, *failure, *failure)[1] == [Flush()]
    assert play(1, *failure, *failure, Finished())[1] == [Exit(1)]


def test_a_restart_waits_for_what_the_command_left_and_for_the_sidecar() -> None:
    events = (SidecarUp(), SidecarEnded(5.0), CommandEnded(137))
    assert play(1, *events)[1] == [Sweep()]
    assert play(1, *events, Swept())[1] == [AnnounceRestart(1, 137)]
    assert play(1, *events, Swept(), SidecarUp())[1] == [StartCommand(1)]


def test_a_sidecar_whose_death_is_told_late_is_replaced_before_the_restart() -> None:
    events = (SidecarUp(), CommandEnded(137), Swept(), SidecarEnded(5.0))
    assert play(1, *events)[1] == [StartSidecar(0.0)]
    assert play(1, *events, SidecarUp())[1] == [StartCommand(1)]


def test_a_signal_is_forwarded_once_and_not_when_the_terminal_has_delivered_it() -> None:
    assert play(0, SidecarUp(), Signalled(TERM))[1] == [Forward(TERM)]
    assert play(0, SidecarUp(), Signalled(INT, delivered=True))[1] == []


@pytest.mark.parametrize("delivered", [True, False])
def test_a_second_interrupt_kills(delivered: bool) -> None:
    interrupt = Signalled(INT, delivered=delivered)
    assert play(0, SidecarUp(), interrupt, interrupt)[1] == [KillCommand()]
    assert play(0, SidecarUp(), Signalled(TERM), interrupt)[1] != [KillCommand()]


def test_a_run_that_was_told_to_stop_is_not_restarted() -> None:
    for number in (INT, TERM, signal.SIGHUP, signal.SIGQUIT):
        _, actions = play(9, SidecarUp(), Signalled(number), CommandEnded(1), Swept())
        assert actions == [Flush()]
    _, actions = play(9, SidecarUp(), Signalled(USR1), CommandEnded(1), Swept())
    assert actions == [AnnounceRestart(1, 1), AwaitSidecar()]


def test_a_stop_that_comes_while_leftovers_are_ended_prevents_the_restart() -> None:
    _, actions = play(9, SidecarUp(), CommandEnded(1), Signalled(TERM), Swept())
    assert actions == [Flush()]


def test_a_second_interrupt_hurries_the_sweep() -> None:
    until = (SidecarUp(), Signalled(INT), CommandEnded(130))
    assert play(0, *until, Signalled(INT))[1] == [Sweep(now=True)]


def test_flush_and_close_can_be_interrupted() -> None:
    for code in (0, 1):
        until = (SidecarUp(), CommandEnded(code), Swept())
        assert play(0, *until, Signalled(INT))[1] == [Exit(code, interrupted=True)]
        assert play(0, *until, Signalled(USR1))[1] == []


def test_a_sidecar_that_dies_is_started_again_at_once_then_more_and_more_slowly() -> None:
    state, delays = Supervision(restarts=0).step(SidecarUp())[0], []
    for _ in range(9):
        state, actions = state.step(SidecarEnded(1.0))
        assert isinstance(actions[0], StartSidecar)
        delays.append(actions[0].delay_s)
    assert delays[:3] == [0.0, 0.25, 0.5]
    assert delays[-1] == 30.0
    assert state.step(SidecarEnded(3600.0))[1] == (StartSidecar(0.0),)


def test_a_sidecar_that_never_comes_up_ends_the_run_before_the_command() -> None:
    assert play(3, SidecarEnded(0.1))[1] == [Exit(NOT_STARTED)]


def test_a_restart_is_given_up_when_the_sidecar_does_not_come_back() -> None:
    until = (SidecarUp(), SidecarEnded(9.0), CommandEnded(7), Swept())
    deaths = [SidecarEnded(0.1)] * (SIDECAR_ATTEMPTS - 1)
    assert play(3, *until, *deaths)[1] == [Exit(7)]


def test_an_interrupt_before_the_command_leaves_earlier_memory_alone() -> None:
    assert play(0, Signalled(INT))[1] == [Exit(130, interrupted=True)]


EVENTS = st.one_of(
    st.builds(CommandEnded, st.sampled_from([0, 1, 137])),
    st.just(Swept()),
    st.builds(Signalled, st.sampled_from([INT, TERM, USR1]), st.booleans()),
    st.just(SidecarUp()),
    st.builds(SidecarEnded, st.sampled_from([0.1, 100.0])),
    st.just(Finished()),
)


@given(st.integers(0, 3), st.lists(EVENTS, max_size=30))
def test_in_any_order_of_events_the_command_starts_at_most_restarts_plus_one_times(
    restarts: int, events: list[Event]
) -> None:
    state, starts, exits = Supervision(restarts=restarts), 0, 0
    for event in events:
        ended = state.phase is Phase.ENDED
        state, actions = state.step(event)
        starts += sum(isinstance(one, StartCommand) for one in actions)
        exits += sum(isinstance(one, Exit) for one in actions)
        assert not (ended and actions), "an ended run does nothing"
    assert starts <= restarts + 1
    assert exits == (state.phase is Phase.ENDED)
