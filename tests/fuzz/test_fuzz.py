"""Every parser, for some seconds from one seed: any bytes give a value or an error of its own."""

from __future__ import annotations

import pathlib
import time

from tests.fuzz.campaign import Campaign, escape_of
from tests.fuzz.targets import targets

TARGETS = targets()
FOUND = sorted((pathlib.Path(__file__).parents[2] / "attacks").glob("fuzz-*.bin"))


def test_what_is_honest_is_accepted() -> None:
    """Or else all that follows would be about inputs that no parser looks into."""
    for target in TARGETS:
        for data in target.bytewise:
            if target.name != "step.json":  # has no seal yet
                target.parse(data)


def test_no_bytes_escape_the_error_tree_or_pass_for_others_or_cost_much() -> None:
    """Some thousand mutations, always the same ones; `make fuzz` runs as many as there is time."""
    campaign, until = Campaign(seed=20_261_122, targets=TARGETS), time.monotonic() + 20
    campaign.run(lambda: time.monotonic() < until, most=20_000)
    assert campaign.mutations >= len(TARGETS)
    assert not campaign.bad, [
        (target.name, what, data[:200]) for target, what, data in campaign.found
    ]


def test_what_fuzzing_once_found_is_refused() -> None:
    for path in FOUND:
        data = path.read_bytes()
        assert not {target.name: what for target in TARGETS if (what := escape_of(target, data))}, (
            path.name
        )
