"""What is due, given what is there and the time. No I/O, no clock, no keys.

An authority goes through three stages, and each lasts `overlap`:

    signer                    alone; two thirds of its life long
    signer + next             the next CA is published, but signs nothing yet
    signer + previous         the next one signs now; the old one is still trusted

So a client that learns of a new bundle within one overlap trusts every leaf that it can meet.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from keepstep_operator.certificates.pki import Facts

_DUE: Final = 2 / 3
"""Of its life, then a certificate is made anew."""
_MOST_SETTLE: Final = timedelta(minutes=1)


@dataclass(frozen=True, kw_only=True)
class Lifetimes:
    """How long a CA and a leaf are valid, and how long clients need to learn of a new bundle."""

    authority: timedelta
    leaf: timedelta
    overlap: timedelta

    @property
    def settle(self) -> timedelta:
        """From a change of the signer to the first leaf by it: when a CA had to be replaced at
        once, its bundle then still reaches the API server first."""
        return min(_MOST_SETTLE, self.overlap / 4)


@dataclass(frozen=True, kw_only=True)
class Authority:
    """What is known of one. `since`: when the present stage began, that is when `next` was
    published, or when `previous` stopped to sign; None while `next` is not published yet.
    `asked`: somebody wants another CA now."""

    signer: Facts | None = None
    next: Facts | None = None
    previous: Facts | None = None
    since: datetime | None = None
    asked: bool = False


class Move(enum.Enum):
    """What to do with an authority."""

    NONE = "none"
    BEGIN = "begin"
    """There is no CA that can sign: make one, and sign with it."""
    ADD_NEXT = "add next"
    """Make the next CA, and publish it beside the signer."""
    PROMOTE = "promote"
    """Sign with the next one from now on."""
    DROP_PREVIOUS = "drop previous"
    """Nothing that it signed is in use any more."""


def due(authority: Authority, *, now: datetime, lifetimes: Lifetimes) -> Move:
    """The one thing to do with an authority now."""
    signer, overlap = authority.signer, lifetimes.overlap
    settled = authority.since is not None and now >= authority.since + overlap
    if signer is None or now >= signer.not_after:
        usable = authority.next is not None and now < authority.next.not_after
        return Move.PROMOTE if usable else Move.BEGIN
    if authority.next is not None:
        return Move.PROMOTE if settled else Move.NONE
    if authority.previous is not None:
        over = settled or authority.since is None or now >= authority.previous.not_after
        return Move.DROP_PREVIOUS if over else Move.NONE
    return Move.ADD_NEXT if authority.asked or is_due(signer, now=now) else Move.NONE


def leaf_due(
    leaf: Facts | None,
    *,
    names: tuple[str, ...],
    by_signer: bool,
    trusted: bool,
    settled: bool,
    now: datetime,
) -> str:
    """Why a new leaf is needed now; '' when it is not.

    `by_signer`: the signer signed it. `trusted`: any CA of the bundle did. `settled`: the signer
    has been published long enough.
    """
    if leaf is None:
        return "there is none"
    if not trusted:
        return "no published CA signed it"
    if now >= leaf.not_after:
        return "it has expired"
    if set(leaf.names) != set(names):
        return "its names are wrong"
    if is_due(leaf, now=now):
        return "two thirds of its life are over"
    if not by_signer and settled:
        return "another CA signs now"
    return ""


def is_due(certificate: Facts, *, now: datetime) -> bool:
    """Whether two thirds of its life are over."""
    return now >= certificate.not_before + _DUE * certificate.life
