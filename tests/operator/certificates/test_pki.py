"""Certificates that real TLS clients accept, and nothing else."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta

import pytest

from keepstep_operator.certificates.pki import (
    Pair,
    facts,
    fits,
    is_signed_by,
    make_authority,
    sign_leaf,
    split,
)
from tests.operator.certificates.handshake import shakes_hands

DAY = timedelta(days=1)
NAMES = ("keepstep-reports.keepstep-system.svc",)


def _now() -> datetime:
    return datetime.now(UTC)


@pytest.fixture(scope="module")
def authority() -> Pair:
    return make_authority("keepstep-reports", now=_now(), life=3650 * DAY)


@pytest.fixture(scope="module")
def leaf(authority: Pair) -> Pair:
    return sign_leaf(authority, names=NAMES, now=_now(), life=90 * DAY)


def test_a_client_accepts_a_leaf_of_its_authority(authority: Pair, leaf: Pair) -> None:
    assert shakes_hands(leaf, bundle=authority.certificate, name=NAMES[0]) == ""


def test_the_strictest_verification_accepts_it_too(authority: Pair, leaf: Pair) -> None:
    """Python 3.13 verifies so by default (RFC 5280: key identifiers, critical extensions)."""
    said = shakes_hands(
        leaf, bundle=authority.certificate, name=NAMES[0], flags=ssl.VERIFY_X509_STRICT
    )
    assert said == ""


def test_another_name_or_another_authority_is_refused(authority: Pair, leaf: Pair) -> None:
    said = shakes_hands(leaf, bundle=authority.certificate, name="kubernetes.default.svc")
    assert "Hostname mismatch" in said
    other = make_authority("keepstep-reports", now=_now(), life=DAY)
    assert shakes_hands(leaf, bundle=other.certificate, name=NAMES[0]) != ""


def test_a_leaf_cannot_sign(authority: Pair, leaf: Pair) -> None:
    forged = sign_leaf(leaf, names=("evil.svc",), now=_now(), life=DAY)
    assert shakes_hands(forged, bundle=authority.certificate, name="evil.svc") != ""


def test_an_expired_leaf_is_refused(authority: Pair) -> None:
    old = sign_leaf(authority, names=NAMES, now=_now() - 2 * DAY, life=DAY)
    assert "expired" in shakes_hands(old, bundle=authority.certificate, name=NAMES[0])


def test_a_clock_that_is_an_hour_behind_accepts_a_new_leaf(leaf: Pair) -> None:
    assert facts(leaf.certificate).not_before < _now() - timedelta(hours=1)


def test_a_leaf_does_not_outlive_its_authority() -> None:
    authority = make_authority("short", now=_now(), life=DAY)
    leaf = sign_leaf(authority, names=NAMES, now=_now(), life=90 * DAY)
    assert facts(leaf.certificate).not_after <= facts(authority.certificate).not_after


def test_authorities_of_one_name_are_told_apart() -> None:
    one, two = (make_authority("same", now=_now(), life=DAY) for _ in range(2))
    leaf = sign_leaf(one, names=NAMES, now=_now(), life=DAY)
    assert is_signed_by(leaf.certificate, one.certificate)
    assert not is_signed_by(leaf.certificate, two.certificate)
    bundle = two.certificate + one.certificate
    assert shakes_hands(leaf, bundle=bundle, name=NAMES[0]) == ""
    assert split(bundle) == (two.certificate, one.certificate)


def test_a_pair_fits_only_with_its_own_key(authority: Pair, leaf: Pair) -> None:
    assert fits(leaf)
    assert not fits(Pair(certificate=leaf.certificate, key=authority.key))
    assert not fits(Pair(certificate=b"", key=leaf.key))
    assert not fits(Pair(certificate=leaf.certificate, key=b"nonsense"))


def test_what_cannot_be_read_is_no_certificate() -> None:
    assert split(b"nonsense") == ()
    assert split(b"") == ()
    assert not is_signed_by(b"", b"")
    with pytest.raises(ValueError, match="PEM"):
        facts(b"nonsense")
