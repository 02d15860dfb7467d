"""While a large image is copied its slot says how far: never further than the bytes are there."""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch
from torch import nn

from keepstep.client import copying
from keepstep.client.slot import SlotMapping
from tests import hugetlbfs
from tests.harness import eventually
from tests.lib.training import begun, bring_back

PIECE = 4096


@pytest.mark.parametrize("seed", range(10))
def test_what_is_announced_is_there_whatever_the_order_and_the_threads(monkeypatch, seed):
    monkeypatch.setattr(copying, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(copying, "_PARALLEL_BYTES", PIECE)
    chance = random.Random(seed)
    source = torch.randint(1, 256, (64 * PIECE,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    cuts = sorted({0, len(source), *(chance.randrange(len(source)) for _ in range(20))})
    moves, copies = [], []
    for begin, end in itertools.pairwise(cuts):
        if chance.random() < 0.1:
            copies.append(copying.Copy(target[begin:end], source[begin:end]))
        else:
            places = target.data_ptr() + begin, source.data_ptr() + begin
            moves.append(copying.Move(*places, end - begin))
    chance.shuffle(moves)
    told = [0]

    def arrived(address):
        told.append(count := address - target.data_ptr())
        assert torch.equal(target[:count], source[:count])

    copying.run(copying.Transfers(moves, copies), threads=1 + seed % 4, arrived=arrived)
    assert told == sorted(told)
    assert len(told) > 10
    assert torch.equal(target, source)


class TwoParts(nn.Module):
    """The second half of it does not lie row by row, so torch copies it, after all else."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.rand(10 << 20))
        self.b = nn.Parameter(torch.rand(1 << 10, 10 << 10).t())


@pytest.fixture
def huge(tmp_path):
    """A hugetlbfs with pages for four slots of 80 MiB and a bit."""
    with hugetlbfs.for_test(tmp_path / "huge", 5 * 42) as directory:
        yield directory


@pytest.fixture
def held(monkeypatch):
    """Between the first half and the second, a copy of `TwoParts` waits for this."""
    run, calls = copying._run_parallel, []

    def held(moves, *arguments):
        run(moves, *arguments)
        if calls and sum(move.bytes for move in moves) > 32 << 20:
            if arguments[-1] is not None:  # the first half was announced but for its last piece
                arguments[-1](moves[-1].target + moves[-1].bytes)
            calls[0]()

    monkeypatch.setattr(copying, "_run_parallel", held)
    return calls


def saved(checkpointer):
    """The first step for which there was a slot."""
    steps = itertools.count()
    eventually(lambda: checkpointer.save(next(steps)))
    return next(steps) - 1


def begun_files(sidecar):
    return list(sidecar.root.rglob(".rank-*"))


def test_the_first_half_of_a_large_image_is_on_the_drive_before_the_second_is_copied(
    sidecar, huge, held
):
    sidecar.end()
    sidecar.huge = huge
    sidecar.start()
    model, seen = TwoParts(), []

    def look():
        eventually(lambda: begun_files(sidecar), what="it is being written")
        seen.append(sidecar.published())

    held.append(look)
    with begun({"m": model}) as checkpointer:
        kept = saved(checkpointer)
        checkpointer.wait(kept, "committed")
    assert seen == [[]]
    sidecar.kill()
    sidecar.lose_memory()
    sidecar.start()
    other = TwoParts()
    restored = bring_back({"m": other})
    assert (restored.step, str(restored.tier)) == (kept, "local")
    assert torch.equal(other.a, model.a)
    assert torch.equal(other.b, model.b)


def test_on_small_pages_nothing_is_written_before_the_seal(sidecar, held):
    seen = []

    def look():
        time.sleep(1.5)  # longer than it takes to notice the first copy, which is a second
        seen.append(begun_files(sidecar))

    held.append(look)
    with begun({"m": TwoParts()}) as checkpointer:
        checkpointer.wait(saved(checkpointer), "committed")
    assert seen == [[]]


@pytest.mark.parametrize(("size", "lazy"), [(512, True), (5 << 10, False)])
def test_neither_a_small_image_nor_an_eager_one_is_announced(sidecar, monkeypatch, size, lazy):
    monkeypatch.delattr(SlotMapping, "announce")
    with begun({"m": nn.Linear(size, size)}, lazy=lazy) as checkpointer:
        checkpointer.wait(saved(checkpointer), "committed")
