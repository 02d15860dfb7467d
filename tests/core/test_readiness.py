"""When a rank may vote: a table of what its sidecar knows, what it waits for, and until when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.core.restore_vote import NEVER, Ready, VoteFacts, Wait, vote_readiness

BEGAN = 1000.0
ALONE = VoteFacts(scanned_at=0.0, replied_at=-NEVER)
LISTED = replace(ALONE, tiers=True, listed_at=BEGAN)
AWAY = replace(LISTED, unknown="the archive is away")
UNNAMED = replace(AWAY, introduced=False, unknown="not all pods are known")

# Each row: a name, the time, and what the sidecar knows; then until when the rank waits (None: it
# may vote), and whether the tiers are asked again meanwhile.
TABLE = [
    ("nothing but this machine", 0, ALONE, None, False),
    ("before the scan", 500, replace(ALONE, scanned_at=NEVER), NEVER, False),
    ("the scan ended only now", 500, replace(ALONE, scanned_at=BEGAN + 500), None, False),
    ("no word of the operator yet", 0, replace(ALONE, replied_at=NEVER), 3, False),
    ("the scan ended later", 9, replace(ALONE, replied_at=NEVER, scanned_at=1008.0), 11, False),
    ("an operator that is silent", 3, replace(ALONE, replied_at=NEVER), None, False),
    ("everything is known", 0, LISTED, None, False),
    ("tiers were never asked", 5, replace(LISTED, listed_at=NEVER), 300, False),
    ("never asked, but held", 0, replace(LISTED, listed_at=NEVER, held=True), 5, False),
    ("held: enough of it", 5, replace(LISTED, listed_at=NEVER, held=True), None, False),
    ("asked long ago", 0, replace(LISTED, listed_at=BEGAN - 6), 20, True),
    ("asked long ago, and again for long", 20, replace(LISTED, listed_at=BEGAN - 6), None, False),
    ("held: what was listed counts", 0, replace(LISTED, listed_at=0.0, held=True), None, False),
    ("a tier is away", 0, AWAY, 6, True),
    ("a tier stays away", 6, AWAY, None, False),
    ("a tier is away, another one has a step", 0, replace(AWAY, known=True), None, False),
    ("a tier is away, but held", 0, replace(AWAY, held=True), None, False),
    ("pods were named a moment ago", 100, replace(AWAY, named_at=BEGAN + 99), 105, True),
    ("pods were just named", 0, replace(LISTED, pods_unasked=True), 300, False),
    ("pods were just named, but held", 0, replace(LISTED, pods_unasked=True, held=True), 5, False),
    ("not all pods are known, no operator", 0, UNNAMED, 60, True),
    ("not all pods are known, it is there", 60, replace(UNNAMED, led=True), 300, True),
    ("nobody ever names them", 300, replace(UNNAMED, led=True), None, False),
    ("something, maybe not newest", 0, replace(UNNAMED, led=True, known=True), 60, False),
    ("something, long enough", 60, replace(UNNAMED, led=True, known=True), None, False),
    ("not all pods are known, but held", 0, replace(UNNAMED, held=True), None, False),
    ("shards become reachable", 0, replace(AWAY, awaits="node b", held=True), 60, False),
    ("said later", 50, replace(LISTED, awaits="node b", named_at=BEGAN + 40), 100, False),
    ("they never do", 60, replace(LISTED, awaits="node b"), None, False),
    ("another run may train", 0, replace(LISTED, contested="on b", held=True), 40, False),
    ("another run trains", 40, replace(LISTED, contested="on b", known=True), None, False),
    ("no certificate yet", 1, replace(AWAY, known=True, uncertified=True, held=True), 6, True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("at", "view", "until", "ask"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_a_restore_vote_waits_until_its_deadline_or_until_all_sources_have_answered(
    at: float, view: VoteFacts, until: float | None, ask: bool
) -> None:
    answer = vote_readiness(BEGAN + at, view, BEGAN)
    if until is None:
        assert answer == Ready()
    else:
        assert isinstance(answer, Wait)
        assert (answer.until - BEGAN, answer.ask) == (until, ask)
        assert answer.why, "status tells it"


def test_every_wait_except_the_one_for_the_volume_scan_has_a_deadline() -> None:
    views = [row[2] for row in TABLE if row[2].scanned_at != NEVER]
    assert all(vote_readiness(BEGAN + 900.0, view, BEGAN) == Ready() for view in views)


def test_a_waiting_vote_names_what_it_waits_for() -> None:
    for view, why in (
        (replace(ALONE, scanned_at=NEVER), "scanned"),
        (replace(ALONE, replied_at=NEVER), "leader of the run has not answered"),
        (AWAY, "the archive is away"),
        (UNNAMED, "not all machines of the run have reported"),
        (replace(LISTED, awaits="shards lie on node b"), "node b"),
    ):
        answer = vote_readiness(BEGAN, view, BEGAN)
        assert isinstance(answer, Wait)
        assert why in answer.why
