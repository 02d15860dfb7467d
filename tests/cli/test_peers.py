"""Two machines without Kubernetes: two `keepstep run`s that keep copies for each other."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch

from tests import warm
from tests.cli.conftest import Keepstep
from tests.harness import eventually, free_port

TRAIN = """
import os, sys
import torch
import keepstep

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(rank)
model = torch.nn.Linear(64, 64)
checkpointer = keepstep.Checkpointer({f"model{rank}": model})
at = checkpointer.restore()
print("from", at.step if at else None, "sum", round(model.weight.sum().item(), 5), flush=True)
for step in range(at.step + 1 if at else 0, int(sys.argv[1])):
    with checkpointer.mutating(), torch.no_grad():
        model.weight += 1.0
    torch.distributed.barrier()
    checkpointer.save(step)
checkpointer.wait(int(sys.argv[1]) - 1, "durable", timeout=60)
torch.distributed.barrier()
os._exit(3)  # the sidecars stay
"""


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Keepstep, Keepstep]]:
    made = [Keepstep(tmp_path / name) for name in ("a", "b")]
    for command in made:
        command.home.mkdir()
        command.script("train.py", TRAIN)
    yield made[0], made[1]
    for command in made:
        command.end()


def options(secret: Path, rank: int, ports: list[int]) -> list[str]:
    return [
        *("--nodes", "2", "--node-rank", str(rank), "--leader", f"127.0.0.1:{ports[0]}"),
        *("--peer-listen", f"127.0.0.1:{ports[rank]}", "--secret-file", str(secret)),
    ]


@pytest.fixture
def secret(tmp_path: Path, machines: tuple[Keepstep, Keepstep]) -> Path:
    file = tmp_path / "secret"
    machines[0]("secret", str(file))
    return file


def train(
    machines: tuple[Keepstep, Keepstep],
    options_: list[list[str]],
    last: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    code: int = 3,
) -> list[str]:
    """Both machines, until the script ends; what each said."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    started = []
    for rank, machine in enumerate(machines):
        monkeypatch.setenv("RANK", str(rank))
        words = ("run", *options_[rank], "--", warm.python(), "train.py", str(last))
        started.append(machine.start(*words))
    ended = [(*process.communicate(timeout=120), process.returncode) for process in started]
    assert [ended_with for _, _, ended_with in ended] == [code, code], ended
    return [out.strip() for out, _, _ in ended]


TRAIN_AND_CLOSE = (
    TRAIN.partition("checkpointer.wait")[0]
    + """
checkpointer.close()
torch.distributed.destroy_process_group()
"""
)


def await_copies(machines: tuple[Keepstep, Keepstep]) -> None:
    def copied() -> bool:
        kept = [machine.directory / "train" / "peers" for machine in machines]
        name = "rank-{:05d}-of-00002.safetensors"
        return all(list(kept[1 - rank].glob(f"*-000000003/{name.format(rank)}")) for rank in (0, 1))

    eventually(copied, within_s=60, what="each keeps the other's newest shard")


@pytest.mark.timeout(300)
def test_a_machine_that_lost_its_drive_resumes_from_the_copies_of_its_peer(
    machines: tuple[Keepstep, Keepstep], secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = [free_port(), free_port()]
    options_ = [options(secret, rank, ports) for rank in (0, 1)]

    first = train(machines, options_, 4, monkeypatch)
    assert [line.split(" sum")[0] for line in first] == ["from None"] * 2

    await_copies(machines)
    lost = machines[1]
    lost("stop")
    shutil.rmtree(lost.directory)
    again = train(machines, options_, 5, monkeypatch)
    assert [line.split(" sum")[0] for line in again] == ["from 3"] * 2
    sums = [(float(a.split()[-1]), float(b.split()[-1])) for a, b in zip(first, again, strict=True)]
    for before, after in sums:
        assert after == pytest.approx(before + 4 * 64 * 64, abs=0.1)


@pytest.mark.timeout(300)
def test_export_reads_missing_shards_from_local_copies_and_from_peers(
    machines: tuple[Keepstep, Keepstep], secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = [free_port(), free_port()]
    lines = train(machines, [options(secret, rank, ports) for rank in (0, 1)], 4, monkeypatch)
    await_copies(machines)
    here, other = machines
    settings = ("--secret-file", str(secret), "--peer", f"127.0.0.1:{ports[1]}")

    def exported(rank: int, out: str) -> float:
        here("export", "3", "--only", f"model{rank}", "--to", out, *settings)
        weight = safetensors.torch.load_file(here.home / out / "model.safetensors")["weight"]
        return round(float(weight.sum()), 5)

    # what is said is the sum at the start
    sums = [float(line.split()[-1]) + 4 * 64 * 64 for line in lines]
    for rank in (0, 1):
        assert exported(rank, f"copies{rank}") == pytest.approx(sums[rank], abs=0.1)
    here("stop", code=None)
    shutil.rmtree(here.directory / "train" / "peers")
    assert exported(1, "from-peer") == pytest.approx(sums[1], abs=0.1)
    other("stop", code=None)
    words = ("export", "3", "--only", "model1", "--to", "none", *settings)
    refusal = here(*words, code=2).stderr
    assert "those of rank 1 are not on this machine's volumes" in " ".join(refusal.split())
    assert f"away: 127.0.0.1:{ports[1]}" in refusal
    assert not (here.home / "none").exists()


@pytest.mark.timeout(120)
def test_the_last_step_is_committed_on_both_machines_when_the_run_ends(
    machines: tuple[Keepstep, Keepstep], secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = [free_port(), free_port()]
    for machine in machines:
        machine.script("train.py", TRAIN_AND_CLOSE)
    train(machines, [options(secret, rank, ports) for rank in (0, 1)], 30, monkeypatch, code=0)
    for machine in machines:
        assert machine.sidecars() == []
        assert list((machine.directory / "train").glob("0*-000000029")), "where readers see it"
        newest = machine.json("steps")["steps"][-1]
        assert (newest["step"], newest["committed"]) == (29, True), "of its own half, it knows"


def test_machines_without_a_secret_are_refused_before_anything_starts(
    keepstep: Keepstep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KEEPSTEP_SECRET", raising=False)
    several = ("--nodes", "2", "--leader", "127.0.0.1:9465")
    shown = keepstep("run", *several, "--", sys.executable, "-V", code=2)
    assert "keepstep secret FILE" in " ".join(shown.stderr.split())
    assert keepstep.sidecars() == []


def test_a_sidecar_that_has_another_secret_is_replaced_by_start(
    keepstep: Keepstep, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = ("--run", "one", "--nodes", "2", "--leader", f"127.0.0.1:{free_port()}")
    found = []
    for secret in ("first", "first", "second"):
        monkeypatch.setenv("KEEPSTEP_SECRET", secret * 8)
        keepstep("start", *several)
        found.append(keepstep.sidecar().pid)
    assert found[0] == found[1] != found[2]
