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


@pytest.fixture(scope="session")
def script() -> list[str]:
    """Checks what it restores, value by value, and makes one more step."""
    return [warm.python(), str(HERE / "training.py"), "5", "durable"]


def test_a_volume_is_restored_and_gone_on_from(
    left: Path, machine: Callable[..., Keepstep], script: list[str]
):
    one = machine("one")
    shutil.copytree(left / "alone/keepstep", one.directory)
    assert one("run", "--", *script, code=3).stdout == "from 3 local\n"
    assert one("run", "--", *script[:-2], "6", "durable", code=3).stdout == "from 4 memory\n"
    one("verify")


def test_a_memory_is_adopted(
    left: Path, sidecars: Callable[..., SidecarProcess], memory_dir: Path, script: list[str]
):
    shutil.copytree(left / "alone/memory", memory_dir, dirs_exist_ok=True)
    sidecar = sidecars(RUN).start()
    environment = {**os.environ, "KEEPSTEP_SOCKET": str(sidecar.socket)}
    ended = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=90)
    assert ended.stdout == "from 3 memory\n", ended.stderr


def test_an_archive_is_restored(left: Path, machine: Callable[..., Keepstep], script: list[str]):
    archive = ("--archive", str(left / "alone/archive"))
    ended = machine("one")("run", "--run", RUN, *archive, "--", *script, code=3)
    assert ended.stdout == "from 2 archive\n"


@pytest.mark.timeout(300)
def test_copies_at_a_peer_are_restored(
    left: Path,
    machine: Callable[..., Keepstep],
    script: list[str],
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
        started.append(one.start("run", "--run", RUN, *peers, "--", *script))
    ended = [(*one.communicate(timeout=120), one.returncode) for one in started]
    assert [code for _, _, code in ended] == [3, 3], ended
    assert [out for out, _, _ in ended] == ["from 3 local\n", "from 3 peer\n"]
