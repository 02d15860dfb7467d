"""A step that one world saved comes back in another one, bit-equal, optimizer state and all."""

from __future__ import annotations

import pytest

MOVES = [
    ("plain", 1, "rows", 2),
    ("fsdp", 1, "fsdp", 2),
    ("fsdp", 2, "plain", 1),
    ("fsdp", 2, "fsdp", 3),
    ("fsdp", 4, "fsdp", 2),
    ("grid", 4, "rows", 2),
    ("fsdp+tp", 4, "fsdp", 2),
    ("fsdp", 2, "fsdp+tp", 4),
    ("fsdp", 2, "ddp", 2),
    ("ddp", 2, "fsdp", 2),
    ("ddp", 2, "ddp", 1),
    ("ddp", 1, "ddp", 2),
    ("rows", 2, "columns", 2),
    ("columns", 2, "rows", 4),
    ("hsdp", 4, "fsdp", 2),
    ("stages", 2, "plain", 1),
    ("plain", 1, "stages", 3),
]


def name(move):
    before, saved, after, running = move
    return f"{before}-{saved}-to-{after}-{running}"


CASES = [(move, "memory") for move in MOVES[::2]] + [(move, "local") for move in MOVES[1::2]]
"""Each from one of both, as each costs seconds."""


@pytest.mark.parametrize(
    ("move", "tier"), CASES, ids=[f"{name(move)}-{tier}" for move, tier in CASES]
)
def test_a_step_is_restored_at_another_world_size_or_layout(run_of, move, tier):
    before, saved, after, running = move
    run = run_of(MOVES.index(move))
    step = run.save(before, saved)
    if tier == "local":
        run.lose_memory()
    for answer in run.restore(after, running, trains=True):
        assert answer == {"step": step, "tier": tier, "wrong": []}


@pytest.mark.parametrize("seed", range(100, 104))
def test_random_shapes_dtypes_and_placements_are_restored_at_another_world_size(run_of, seed):
    run = run_of(seed, uniform=False)
    step = run.save(f"random-{seed}", 4)
    if seed % 2:
        run.lose_memory()
    for answer in run.restore(f"random-{seed + 1}", 4 if seed % 4 else 2):
        assert (answer["step"], answer["wrong"]) == (step, [])


@pytest.mark.parametrize("before", ["columns", "fsdp"])
def test_shards_larger_than_the_memory_limit_are_restored_through_windows(run_of, sidecar, before):
    run = run_of(999)  # shards larger than what the sidecar may take
    step = run.save(before, 2)
    run.lose_memory("--memory-limit", "50Mi")
    [answer] = run.restore("plain", 1, trains=True)
    assert answer == {"step": step, "tier": "local", "wrong": []}
    assert not list(sidecar.memory.rglob("window-*"))
    assert not list(sidecar.memory.rglob("*.slot")), "something was brought whole"
