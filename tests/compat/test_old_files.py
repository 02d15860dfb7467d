"""What older keepsteps left behind is restored exactly by this one (`files/`, made by make.py)."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import warm
from tests.cli.conftest import Keepstep
from tests.cli.test_peers import free_port, options
from tests.harness import SidecarProcess
from tests.peer.authority import Authority

HERE = Path(__file__).resolve().parent
RUN = "training"


@pytest.fixture(params=["e774dd7"])
def left(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What a keepstep of the commit `param` left."""
    with tarfile.open(HERE / "files" / f"{request.param}.tar.xz") as tar:
        tar.extractall(tmp_path / "left", filter="tar")
    return tmp_path / "left"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[[str], Keepstep]]:
    made: list[Keepstep] = []

    def make(name: str) -> Keepstep:
        made.append(Keepstep(tmp_path / name))
        made[-1].home.mkdir()
        return made[-1]

    yield make
    for one in made:
        one.end()


def script(left: Path, steps: int = 5) -> list[str]:
    """Trains up to `steps`, and compares what it restores, value by value, with that in `left`."""
    return [warm.python(), str(HERE / "training.py"), str(steps), "durable", str(left / "values")]


def test_a_volume_is_restored_and_gone_on_from(left: Path, machine: Callable[..., Keepstep]):
    one = machine("one")
    shutil.copytree(left / "alone/keepstep", one.directory)
    first, then = script(left / "alone"), script(left / "alone", 6)
    assert one("run", "--", *first, code=3).stdout == "from 3 local\n"
    assert one("run", "--", *then, code=3).stdout == "from 4 memory\n"
    one("verify")


def test_a_memory_is_adopted(left: Path, sidecars: Callable[..., SidecarProcess], memory_dir: Path):
    shutil.copytree(left / "alone/memory", memory_dir, dirs_exist_ok=True)
    sidecar = sidecars(RUN).start()
    environment = {**os.environ, "KEEPSTEP_SOCKET": str(sidecar.socket)}
    command = script(left / "alone")
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    assert ended.stdout == "from 3 memory\n", ended.stderr


def test_an_archive_is_restored(left: Path, machine: Callable[..., Keepstep]):
    archive = ("--archive", str(left / "alone/archive"))
    command = script(left / "alone")
    ended = machine("one")("run", "--run", RUN, *archive, "--", *command, code=3)
    assert ended.stdout == "from 2 archive\n"


@pytest.mark.timeout(300)
def test_copies_at_a_peer_are_restored(
    left: Path,
    machine: Callable[..., Keepstep],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    machines = [machine("a"), machine("b")]
    shutil.copytree(left / "pair/a", machines[0].directory)
    authority, ports = Authority(tmp_path), [free_port(), free_port()]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    started = []
    for rank, one in enumerate(machines):
        monkeypatch.setenv("RANK", str(rank))
        peers = options(authority, rank, ports, run=RUN)
        started.append(one.start("run", "--run", RUN, *peers, "--", *script(left / "pair")))
    ended = [(*one.communicate(timeout=120), one.returncode) for one in started]
    assert [code for _, _, code in ended] == [3, 3], ended
    assert [out for out, _, _ in ended] == ["from 3 local\n", "from 3 peer\n"]
