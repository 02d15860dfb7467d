"""What is due, given the certificates and the time. No I/O, no clock, no keys.

An authority goes through three stages. The second and the third last `overlap` each:

    signer                    alone; until two thirds of its life are over
    signer + next             the next CA is published, but signs nothing yet
    signer + previous         the next CA signs now; the old one is still trusted

So a client that learns of a new bundle within one overlap trusts every leaf in use.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from keepstep_operator.certificates.pki import Facts

_DUE: Final = 2 / 3
"""After this part of its life a certificate is made anew."""
_MOST_SETTLE: Final = timedelta(minutes=1)


@dataclass(frozen=True, kw_only=True)
class Lifetimes:
    """How long a CA and a leaf are valid, and how long clients need to learn of a new bundle."""

    authority: timedelta
    leaf: timedelta
    overlap: timedelta

    @property
    def settle(self) -> timedelta:
        """The time from a change of the signer to the first leaf that it signs. So even if a CA had
        to be replaced at once, its bundle reaches the API server first."""
        return min(_MOST_SETTLE, self.overlap / 4)


@dataclass(frozen=True, kw_only=True)
class Authority:
    """The facts of an authority. `since`: when the present stage began, that is, when `next` was
    published, or when `previous` stopped signing; None while `next` is not published yet. `asked`:
    a person asks for another CA now."""

    signer: Facts | None = None
    next: Facts | None = None
    previous: Facts | None = None
    since: datetime | None = None
    asked: bool = False


class Move(enum.Enum):
    """What to do with an authority."""

    NONE = "none"
    BEGIN = "begin"
    """No CA can sign: make one, and sign with it."""
    ADD_NEXT = "add next"
    """Make the next CA, and publish it together with the signer."""
    PROMOTE = "promote"
    """Sign with the next CA from now on."""
    DROP_PREVIOUS = "drop previous"
    """Nothing that the previous CA signed is in use any more: drop it."""


def due(authority: Authority, *, now: datetime, lifetimes: Lifetimes) -> Move:
    """The one move that is due for an authority now."""
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
    """Why a new leaf is needed now; '' if none is.

    `by_signer`: the signer signed the leaf. `trusted`: some CA of the bundle did. `settled`: the
    signer has been published long enough.
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
    """Whether two thirds of the certificate's life are over."""
    return now >= certificate.not_before + _DUE * certificate.life
