"""Machines without an operator: the sidecar of node rank 0 leads the run."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from machines import Machine, Run
from trainer import FakeTrainer

from tests.harness import eventually, free_port


@pytest.fixture
def run(tmp_path: Path, trainers: Callable[..., FakeTrainer]) -> Iterator[Callable[[int], Run]]:
    """Makes a run of some machines (not started); kills their sidecars at the end."""
    memory = Path(tempfile.mkdtemp(prefix="keepstep-machines-", dir="/dev/shm"))
    made: list[Machine] = []

    def make(nodes: int) -> Run:
        leader = f"127.0.0.1:{free_port()}"
        for rank in range(nodes):
            places = {"memory": memory / str(rank), "home": tmp_path / str(rank)}
            made.append(Machine(rank, **places, leader=leader))
        return Run(made[-nodes:], trainers)

    yield make
    for one in made:
        one.end()
    shutil.rmtree(memory, ignore_errors=True)


def test_a_step_is_committed_on_all_machines_soon_after_the_last_has_written_it(
    run: Callable[[int], Run],
) -> None:
    two = run(2).start("--persist-every", "1", "--keep", "1")
    two.reach(0)
    slowest = 0.0
    for step in range(1, 8):
        id = two.stage(step)
        for one in two.ranks:
            assert one.wait(id, "durable").reached
        began = time.monotonic()
        for one in two.ranks:
            assert one.wait(id, "committed").reached
        slowest = max(slowest, time.monotonic() - began)
    assert slowest < 0.3
    eventually(lambda: two.machines[1].steps() == {7}, what="older steps go on all machines")
    eventually(lambda: two.machines[0].steps() == {7}, what="older steps go on all machines")


@pytest.mark.parametrize("lost", [0, 1])
def test_a_replaced_machine_restores_from_its_buddy_and_writes_its_shard_again(
    run: Callable[[int], Run], lost: int
) -> None:
    two = run(2).start("--persist-every", "1")
    id = two.reach(3)
    for machine in two.machines:
        eventually(lambda one=machine: 3 in one.copies(), what="each keeps the other's shard")
    two.disconnect()
    machine = two.machines[lost]
    machine.kill()
    machine.lose_memory()
    shutil.rmtree(machine.volume)
    machine.start("--persist-every", "1")
    two.come_back()
    assert two.restore() == id
    eventually(lambda: machine.steps() == {3}, what="the copy on its own volume is made again")
