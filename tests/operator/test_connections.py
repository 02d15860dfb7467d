"""Who gets a place on a listener while more want one than there are."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

from keepstep_operator.connections import SERVED, YOUNG_OF_A_SOURCE, Limits


@dataclass(eq=False)
class Gate:
    source: str
    begun: list[Gate] = field(repr=False)

    def begin(self) -> None:
        self.begun.append(self)


@dataclass
class Listener:
    limits: Limits = field(default_factory=lambda: Limits(asyncio.Protocol, None, one_request=True))
    begun: list[Gate] = field(default_factory=list)

    def connect(self, source: str) -> Gate:
        gate = Gate(source, self.begun)
        assert self.limits.admit(cast(Any, gate))
        return gate

    def end(self, gate: Gate) -> None:
        self.limits.grown(gate.source)
        self.limits.ended(cast(Any, gate))


def _held_by(listener: Listener, sources: int) -> None:
    for number in range(sources * 40):
        listener.connect(f"10.0.0.{number % sources}")


def test_few_sources_never_have_all_places() -> None:
    listener = Listener()
    _held_by(listener, 50)
    assert 0 < len(listener.begun) <= SERVED // 2
    for number in range(SERVED // 2):
        assert listener.connect(f"10.1.0.{number}") is listener.begun[-1]


def test_a_place_that_gets_free_goes_to_who_has_none() -> None:
    listener = Listener()
    for number in range(SERVED):
        listener.connect(f"10.0.{number >> 8}.{number & 255}")
    _held_by(listener, 50)
    late = listener.connect("10.1.0.1")
    assert late not in listener.begun
    listener.end(listener.begun[0])
    assert listener.begun[-1].source == "10.0.0.0", "it had none left, and came before"
    listener.end(listener.begun[100])
    assert listener.begun[-1] is late


def test_one_source_has_some_places_and_gives_them_to_its_next_ones() -> None:
    listener = Listener()
    gates = [listener.connect("10.0.0.1") for _ in range(100)]
    assert listener.begun == gates[:YOUNG_OF_A_SOURCE]
    for gate in gates[:YOUNG_OF_A_SOURCE]:
        listener.end(gate)
    assert listener.begun == gates[: 2 * YOUNG_OF_A_SOURCE]
