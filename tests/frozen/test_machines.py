"""Bases of a run of several machines: each has those of its own ranks, and keeps copies of those of
others; what a machine lost comes back with its base from where it lies."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

from tests.harness import (
    SidecarProcess,
    eventually,
    flip,
    free_port,
    inodes,
    matching,
    torchrun,
)

RANK = Path(__file__).parent / "machine_rank.py"


class Machine(SidecarProcess):
    """One of two machines of a run. `leader`: the port of node rank 0."""

    def __init__(self, number: int, memory: Path, home: Path, leader: int) -> None:
        for path in (memory, home):
            path.mkdir(parents=True)
        super().__init__("run", memory, home / "volume", home / "log")
        self.places = ("--nodes", "2", "--node-rank", str(number))
        self.places += ("--leader", f"127.0.0.1:{leader}")
        self.places += ("--peer-listen", f"127.0.0.1:{free_port() if number else leader}")

    def start(self, *options: str, **environment: str) -> SidecarProcess:
        return super().start(
            *self.places, *options, KEEPSTEP_SECRET="a secret of the tests", **environment
        )

    def steps(self) -> set[int]:
        """Steps of which its own shards lie on the drive."""
        found = matching(self.root, "0*/rank-*", "pending/0*/rank-*")
        return {int(path.parent.name.rsplit("-", 1)[1]) for path in found}

    def copies(self) -> set[int]:
        """Steps of which it keeps whole copies for the other."""
        found = matching(self.root, "peers/0*/rank-*.safetensors")
        return {int(path.parent.name.rsplit("-", 1)[1]) for path in found}


class Run:
    """Two machines with a rank each."""

    def __init__(self, machines: list[Machine], out: Path) -> None:
        self.machines, self.out, self.lives = machines, out, 0

    def start(self, *options: str) -> None:
        for machine in self.machines:
            machine.start(*options)

    def live(
        self, kind: str, last: int, machines: list[Machine], **variables: str
    ) -> tuple[Path, CompletedProcess[str]]:
        self.lives += 1
        out, sockets = self.out / f"life-{self.lives}", [machine.socket for machine in machines]
        words = (kind, self.lives, last, out, *sockets)
        return out, torchrun(len(machines), RANK, *words, **variables)

    def train(self, kind: str, last: int, machines: list[Machine] | None = None) -> list[dict]:
        """What each rank left."""
        machines = machines or self.machines
        out, done = self.live(kind, last, machines)
        text = "".join(machine.text()[-2000:] for machine in self.machines)
        assert done.returncode == 0, done.stderr[-3000:] + text
        return [torch.load(f"{out}.{rank}") for rank in range(len(machines))]

    def lose(self, number: int, *options: str, drive: bool = True) -> None:
        """The machine is gone, and another one takes its place; or its memory alone is."""
        machine = self.machines[number]
        machine.kill()
        machine.lose_memory()
        if drive:
            shutil.rmtree(machine.volume)
        machine.start(*options)


@pytest.fixture
def run(tmp_path: Path, memory_dir: Path) -> Iterator[Run]:
    leader = free_port()
    machines = [Machine(at, memory_dir / str(at), tmp_path / str(at), leader) for at in range(2)]
    yield Run(machines, tmp_path)
    for machine in machines:
        machine.end()


def same(first: dict, other: dict) -> bool:
    return first.keys() == other.keys() and all(
        torch.equal(first[name], other[name]) for name in first
    )


def bases(machine: Machine, *patterns: str) -> set[int]:
    """The files of bases on a machine's drive; each counts once, whatever names it has."""
    found = matching(machine.root, *(patterns or ("0*/base-*", "pending/0*/base-*")))
    return set(inodes(found).values())


def committed(run: Run) -> int:
    """The newest step of which both machines have their shard on the drive. A slow drive may leave
    out steps, on each machine others."""
    return max(set.intersection(*(machine.steps() for machine in run.machines)), default=-1)


def sent(machine: Machine, least: int) -> dict:
    """What it says of its copies for its peer, once so many were received."""

    def status() -> dict | None:
        peer = machine.get("/v1/status")["tiers"]["peer"]
        return peer if peer["sent"] >= least else None

    return eventually(status)


def copied(run: Run, step: int) -> None:
    """Each machine keeps a copy of the other's shard of this step. A buddy whose drive was replaced
    is looked at again after a minute."""
    eventually(
        lambda: all(step in machine.copies() for machine in run.machines),
        within_s=100,
        what="its copies",
    )


ALONE = ("--peer-replicas", "0", "--persist-every", "1")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("memory", ["kept", "lost"])
def test_each_machine_has_the_bases_of_its_ranks(run, kind, memory):
    run.start(*ALONE)
    saved = run.train(kind, 3)
    for machine in run.machines:
        assert len(bases(machine)) == 1
        assert not bases(machine, "peers/*/base-*")
    if memory == "lost":
        for number in range(2):
            run.lose(number, *ALONE, drive=False)
    found = run.train(kind, 4)
    assert [record["from"] for record in found] == [3, 3]
    assert all(
        map(same, (record["begin"] for record in found), (record["end"] for record in saved))
    )
    for machine in run.machines:
        assert len(bases(machine)) == 1, "the next life refers to it, too"


def test_a_single_rank_restores_from_the_shards_and_bases_of_two_machines(run):
    run.start(*ALONE)
    saved = run.train("fsdp", 3)
    run.lose(0, *ALONE, drive=False)  # a sidecar that starts looks at what the other has
    (found,) = run.train("fsdp", 2, run.machines[:1])
    assert found["from"] == 3
    assert same(found["begin"], saved[0]["end"])


def test_a_lost_machine_restores_base_and_step_from_its_replica(run):
    run.start(*ALONE)
    saved = run.train("ddp", 3)
    run.lose(1, *ALONE)
    found = run.train("ddp", 4)
    assert [record["from"] for record in found] == [3, 3]
    assert all(same(record["begin"], saved[0]["end"]) for record in found)


WITH_COPIES = ("--persist-every", "1")


def test_a_peer_receives_the_base_once(run, monkeypatch):
    monkeypatch.setenv("WIDTH", "2048")
    run.start(*WITH_COPIES)
    run.train("ddp", 0)
    copied(run, 0)
    first = [sent(machine, 1) for machine in run.machines]
    (base_bytes,) = {
        path.stat().st_size
        for machine in run.machines
        for path in matching(machine.root, "peers/*/base-*")
    }
    run.train("ddp", 4)
    copied(run, 4)
    for machine, before in zip(run.machines, first, strict=True):
        now = sent(machine, 2)
        assert before["sent"] == 1
        each = (now["sent_bytes"] - before["sent_bytes"]) / (now["sent"] - 1)
        assert each <= 0.02 * (each + base_bytes)
        assert len(bases(machine, "peers/*/base-*")) == 1


@pytest.mark.parametrize("lost", [0, 1])
def test_a_machine_that_lost_its_drive_restores_base_and_step_from_its_peer(run, lost):
    run.start(*WITH_COPIES)
    saved = run.train("fsdp", 3)
    copied(run, 3)
    run.lose(lost, *WITH_COPIES)
    found = run.train("fsdp", 5)
    assert [record["from"] for record in found] == [3, 3]
    assert same(found[0]["begin"], saved[0]["end"])
    assert found[lost]["tier"] == "peer"
    copied(run, 5)
    assert all(len(bases(machine)) == 1 for machine in run.machines), "it was not written again"


def test_ranks_that_change_machines_take_their_bases_with_them(run):
    run.start(*WITH_COPIES)
    saved = run.train("fsdp", 3)
    copied(run, 3)
    found = run.train("fsdp", 4, run.machines[::-1])
    assert [record["from"] for record in found] == [3, 3]
    assert same(found[0]["begin"], saved[0]["end"])


def test_a_peer_that_lost_the_base_receives_it_again(run):
    run.start(*WITH_COPIES)
    run.train("fsdp", 2)
    copied(run, 2)
    keeper = run.machines[1]
    for path in matching(keeper.root, "peers/*/base-*"):
        path.unlink(missing_ok=True)
    saved = run.train("fsdp", 3)
    copied(run, 3)
    run.lose(0, *WITH_COPIES)
    found = run.train("fsdp", 4)
    assert [record["from"] for record in found] == [3, 3]
    assert same(found[0]["begin"], saved[0]["end"])


def test_a_damaged_base_on_a_peer_is_reported_and_not_restored(run):
    run.start(*WITH_COPIES)
    run.train("fsdp", 2)
    copied(run, 2)
    newest = max(matching(run.machines[1].root, "peers/*/base-*"))
    flip(newest, newest.stat().st_size // 2)
    run.lose(0, *WITH_COPIES)
    with pytest.raises(AssertionError, match="chunk"):
        run.train("fsdp", 3)


@pytest.mark.timeout(450)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_losing_ranks_and_machines_at_random_moments_does_not_change_the_losses(
    run, kind, memory_dir
):
    generator = random.Random(memory_dir.name)
    run.start(*WITH_COPIES)
    run.train(kind, 0)
    copied(run, 0)
    killed = 0
    for _ in range(3):
        kill = f"{generator.randrange(2)}:{generator.uniform(0.0, 0.3):.3f}"
        _, done = run.live(kind, 12, run.machines, KILL=kill)
        killed += done.returncode != 0
        if generator.random() < 0.5:
            eventually(
                lambda: all(committed(run) in machine.copies() for machine in run.machines),
                within_s=100,
            )
            run.lose(generator.randrange(2), *WITH_COPIES)
    assert killed
    found = run.train(kind, 12)
    undisturbed = expected(run, kind)
    assert all(same(record["end"], undisturbed) for record in found)


def expected(run: Run, kind: str) -> dict:
    """The model after the same steps of a run that begins anew and is left alone."""
    for machine in run.machines:
        machine.kill()
        machine.lose_memory()
        shutil.rmtree(machine.volume)
        machine.start(*ALONE)
    run.lives = 0
    return run.train(kind, 12)[0]["end"]
