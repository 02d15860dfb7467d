"""Every parser, for some seconds from one seed: any bytes give a value or an error of its own."""

from __future__ import annotations

import pathlib
import time

from tests.fuzz.campaign import Campaign, escape_of
from tests.fuzz.targets import targets

TARGETS = targets()
FOUND = sorted((pathlib.Path(__file__).parents[2] / "attacks").glob("fuzz-*.bin"))


def test_every_parser_accepts_its_valid_inputs() -> None:
    """Or else all that follows would be about inputs that no parser looks into."""
    for target in TARGETS:
        for data in target.bytewise:
            if target.name != "step.json":  # has no seal yet
                target.parse(data)


def test_mutated_inputs_raise_only_defined_errors_and_cost_little() -> None:
    """Some thousand mutations, always the same ones; `make fuzz` runs as many as there is time."""
    campaign, until = Campaign(seed=20_261_122, targets=TARGETS), time.monotonic() + 20
    campaign.run(lambda: time.monotonic() < until, most=20_000)
    assert campaign.mutations >= len(TARGETS)
    assert not campaign.bad, [
        (target.name, what, data[:200]) for target, what, data in campaign.found
    ]


def test_inputs_that_fuzzing_once_found_are_refused() -> None:
    for path in FOUND:
        data = path.read_bytes()
        assert not {target.name: what for target in TARGETS if (what := escape_of(target, data))}, (
            path.name
        )
