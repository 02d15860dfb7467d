"""Reports that the API accepts, each as dear as one of its kind can be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tests.operator.promises.surface import Body, epoch, held, rank, report


def a_large_world() -> Body:
    """A few KB: some steps of one rank, in a world as large as may be."""
    local = [held(number, 65_536) for number in range(40)]
    one = {"rank": 0, "world": 65_536, "alive": True, "local": local}
    return report({**one, "memory_answer": "steps", "local_answer": "steps"})


def many_steps() -> Body:
    return report(rank(0, 1, local=tuple(range(2000))))


def many_epochs() -> Body:
    """Each of them the parent of the next, and each with a step."""
    ids = [epoch(number + 1, f"{number:08x}") for number in range(1000)]
    parents = [None, *({"epoch": one, "step": 1} for one in ids)]
    epochs = [{"id": one, "parent": parent} for one, parent in zip(ids, parents, strict=False)]
    local = [held(1, 1, of=one) for one in ids]
    one = {"rank": 0, "world": 1, "alive": True, "local": local, "local_answer": "steps"}
    return report(one, epochs=epochs)


def many_warnings() -> Body:
    return report(rank(0, 1, local=(1,)), warnings=["x"] * 250_000)


def many_steps_of_many_ranks() -> Body:
    """Each rank has steps of its own, so that each step is a bitmap up to a high rank."""
    ranks = []
    for number in range(400):
        steps = range(100 * number, 100 * number + 100)
        local = [held(one, 65_536) for one in steps]
        ranks.append({"rank": 65_000 + number, "world": 65_536, "alive": True, "local": local})
    return report(*ranks)


def long_words() -> Body:
    word = "x" * 400_000
    volumes = [{"name": word, "failed": word, "engine": "direct", "used_bytes": 1, "free_bytes": 1}]
    depots = [{"tier": "peer", "where": word, "trouble": word}]
    more: Body = {"sidecar": word, "library": word, "pinned": word}
    return {**report(rank(0, 1, local=(1,)), volumes=volumes, depots=depots), **more}


REPORTS: Final[list[Callable[[], Body]]] = [
    a_large_world,
    many_steps,
    many_epochs,
    many_warnings,
    many_steps_of_many_ranks,
    long_words,
]
