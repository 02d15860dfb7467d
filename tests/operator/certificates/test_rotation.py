"""The timeline of an authority and its leaf: a clock is passed in, and whole lives go by."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from keepstep_operator.certificates.pki import Facts
from keepstep_operator.certificates.rotation import Authority, Lifetimes, Move, due, leaf_due

DAY = timedelta(days=1)
START = datetime(2026, 1, 1, tzinfo=UTC)
LIFETIMES = Lifetimes(authority=3650 * DAY, leaf=90 * DAY, overlap=30 * DAY)


def _certificate(begin: datetime, life: timedelta, *, names: tuple[str, ...] = ()) -> Facts:
    return Facts(not_before=begin, not_after=begin + life, serial=1, names=names)


def _ca(begin: datetime = START) -> Facts:
    return _certificate(begin, LIFETIMES.authority)


def _due(authority: Authority, at: datetime) -> Move:
    return due(authority, now=at, lifetimes=LIFETIMES)


def test_the_first_authority_is_made_at_once() -> None:
    assert _due(Authority(), START) is Move.BEGIN


def test_an_authority_goes_through_its_stages_and_each_lasts_an_overlap() -> None:
    moves: list[tuple[int, Move]] = []
    authority, now = Authority(signer=_ca()), START
    while len(moves) < 4:
        move = _due(authority, now)
        if move is not Move.NONE:
            moves.append(((now - START).days, move))
            authority = _after(authority, move, now)
        now += DAY
    two_thirds = 2434  # days
    assert moves == [
        (two_thirds, Move.ADD_NEXT),
        (two_thirds + 30, Move.PROMOTE),
        (two_thirds + 60, Move.DROP_PREVIOUS),
        (two_thirds * 2, Move.ADD_NEXT),
    ]


def _after(authority: Authority, move: Move, now: datetime) -> Authority:
    """What the keeper does; it publishes at once here."""
    if move is Move.ADD_NEXT:
        return replace(authority, next=_ca(now), since=now)
    if move is Move.PROMOTE:
        return Authority(signer=authority.next, previous=authority.signer, since=now)
    return replace(authority, previous=None, since=None)


def test_what_is_not_published_yet_is_not_promoted() -> None:
    authority = Authority(signer=_ca(), next=_ca(START + 2500 * DAY), since=None)
    assert _due(authority, START + 3000 * DAY) is Move.NONE


def test_an_expired_signer_is_replaced_at_once_by_the_next_or_a_new_one() -> None:
    after = START + 3651 * DAY
    assert _due(Authority(signer=_ca()), after) is Move.BEGIN
    assert _due(Authority(signer=_ca(), next=_ca(after - DAY)), after) is Move.PROMOTE
    assert _due(Authority(signer=_ca(), next=_ca()), after) is Move.BEGIN


def test_an_expired_previous_authority_is_dropped_early() -> None:
    authority = Authority(signer=_ca(START + 3649 * DAY), previous=_ca(), since=START + 3650 * DAY)
    assert _due(authority, START + 3650 * DAY) is Move.DROP_PREVIOUS


def test_somebody_may_ask_for_another_authority() -> None:
    assert _due(Authority(signer=_ca(), asked=True), START + DAY) is Move.ADD_NEXT
    rotating = Authority(signer=_ca(), next=_ca(), since=START, asked=True)
    assert _due(rotating, START + DAY) is Move.NONE


NAMES = ("a.svc", "a.svc.cluster.local")


def _leaf_due(leaf: Facts | None, at: datetime, **changes: bool) -> str:
    said = {"by_signer": True, "trusted": True, "settled": True, **changes}
    return leaf_due(leaf, names=NAMES, now=at, **said)


def test_a_leaf_is_made_anew_after_two_thirds_of_its_life() -> None:
    leaf = _certificate(START, 90 * DAY, names=NAMES)
    assert _leaf_due(leaf, START + 59 * DAY) == ""
    assert _leaf_due(leaf, START + 60 * DAY) == "two thirds of its life are over"
    assert _leaf_due(leaf, START + 90 * DAY) == "it has expired"


@pytest.mark.parametrize(
    ("leaf", "changes", "reason"),
    [
        (None, {}, "there is none"),
        (_certificate(START, 90 * DAY, names=("b.svc",)), {}, "its names are wrong"),
        (_certificate(START, 90 * DAY, names=NAMES), {"trusted": False}, "no published CA signed"),
        (_certificate(START, 90 * DAY, names=NAMES), {"by_signer": False}, "another CA signs now"),
        (_certificate(START, 90 * DAY, names=NAMES), {"by_signer": False, "settled": False}, ""),
    ],
)
def test_a_leaf_that_does_not_serve_is_made_anew_at_once(
    leaf: Facts | None, changes: dict[str, bool], reason: str
) -> None:
    said = _leaf_due(leaf, START + DAY, **changes)
    assert said.startswith(reason)
    assert bool(said) is bool(reason)


def test_a_short_overlap_leaves_time_for_the_new_leaf_to_be_loaded() -> None:
    assert LIFETIMES.settle == timedelta(minutes=1)
    short = replace(LIFETIMES, overlap=timedelta(minutes=2))
    assert short.settle == timedelta(seconds=30)
