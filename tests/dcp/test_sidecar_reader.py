"""`StorageReader()` brings a step from wherever the sidecars of all ranks can: no directory of the
step is on this machine any more."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import keepstep.dcp
from keepstep.image.layout import CHUNK_BYTES
from tests.harness import SidecarProcess, eventually, flip, free_port, matching

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.timeout(300),
]


@pytest.fixture
def archive(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "archive").mkdir()
    options = ("--archive", str(tmp_path / "archive"), "--archive-keep", "9")
    return (*options, "--archive-every")


def lose(sidecar: SidecarProcess) -> None:
    """As with a node: its memory and its drive are gone."""
    sidecar.kill()
    shutil.rmtree(sidecar.memory)
    sidecar.memory.mkdir()
    shutil.rmtree(sidecar.volume)


def until_archived(sidecar: SidecarProcess, step: int) -> None:
    def archived() -> bool:
        mark = sidecar.get("/v1/status")["watermarks"].get("archive")
        return bool(mark and mark["step"] >= step)

    eventually(archived, what=f"step {step} in the archive")


def test_a_step_of_two_ranks_is_loaded_from_the_archive_at_any_world_size(
    sidecars: Callable[..., SidecarProcess], ranks: Callable[..., list[str]], archive
) -> None:
    sidecar = sidecars().start(*archive, "1")
    named = {"KEEPSTEP_SOCKET": str(sidecar.socket)}
    ranks(2, "save", 11, 12, **named)
    until_archived(sidecar, 12)
    for world in (1, 2, 3):
        lose(sidecar)
        sidecar.start(*archive, "1")
        ranks(world, "load", 11, "-", **named)


def test_a_step_of_two_ranks_is_loaded_from_a_peer_at_any_world_size(
    sidecars: Callable[..., SidecarProcess], ranks: Callable[..., list[str]], tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of the tests")
    secret.chmod(0o600)
    ports = [free_port(), free_port()]
    lost, buddy = (
        sidecars(),
        SidecarProcess(
            "run", tmp_path / "buddy-memory", tmp_path / "buddy-volume", tmp_path / "buddy-log"
        ),
    )
    buddy.memory.mkdir()
    options = [peer_options(secret, number, ports) for number in range(2)]
    named = {"KEEPSTEP_SOCKET": str(lost.socket)}
    try:
        buddy.start(*options[1])
        lost.start(*options[0])
        ranks(2, "save", 12, 12, **named)
        copies = tmp_path / "buddy-volume" / "run" / "peers"
        eventually(lambda: len(matching(copies, "*-000000012/rank-*.safetensors")) == 2)
        for world in (1, 2, 3):
            lose(lost)
            lost.start(*options[0])
            ranks(world, "load", 12, "-", **named)
    finally:
        buddy.end()


def peer_options(secret: Path, number: int, ports: list[int]) -> list[str]:
    return [
        *("--nodes", "2", "--node-rank", str(number), "--leader", f"127.0.0.1:{ports[0]}"),
        *("--peer-listen", f"127.0.0.1:{ports[number]}", "--secret-file", str(secret)),
    ]


@pytest.mark.parametrize("newest", ["7", "7+"], ids=["alike", "of-another-layout"])
def test_ranks_with_different_steps_load_the_newest_step_that_all_can_read(
    sidecars, ranks, archive, tmp_path: Path, newest: str
) -> None:
    """Step 5 is in the archive, step 7 only on the machine of rank 0."""
    sidecar = sidecars().start(*archive, "5")
    named = {"KEEPSTEP_SOCKET": str(sidecar.socket)}
    ranks(2, "save_rows", "5", newest, **named)
    until_archived(sidecar, 5)
    other = SidecarProcess("run", tmp_path / "memory-2", tmp_path / "volume-2", tmp_path / "log-2")
    other.memory.mkdir()
    try:
        other.start(*archive, "5")
        ranks(2, "load_rows", "5", sockets=[sidecar.socket, other.socket])
    finally:
        other.end()


# --- one process -----------------------------------------------------------------------------


def save(state: dict[str, Any], step: int) -> None:
    dcp.save(state, storage_writer=keepstep.dcp.StorageWriter(step=step), no_dist=True)


def load(state: dict[str, Any], **options: Any) -> None:
    dcp.load(state, storage_reader=keepstep.dcp.StorageReader(**options), no_dist=True)


def archived(sidecar: SidecarProcess, archive: tuple[str, ...], monkeypatch: Any) -> list[Path]:
    """Steps 1 and 2 in the archive and nowhere else; their shards."""
    monkeypatch.setenv("KEEPSTEP_SOCKET", str(sidecar.socket))
    sidecar.start(*archive, "1")
    for step in (1, 2):
        save({"w": torch.full((4 << 20,), float(step)), "step": step}, step)
        until_archived(sidecar, step)
    keepstep.dcp.close()
    lose(sidecar)
    return sorted(Path(archive[1]).rglob("*.safetensors"))


def test_a_step_that_is_damaged_on_every_tier_is_an_error_and_the_next_load_skips_it(
    sidecars, archive, monkeypatch
) -> None:
    sidecar = sidecars()
    _, newest = archived(sidecar, archive, monkeypatch)
    flip(newest, CHUNK_BYTES + 77)
    sidecar.start(*archive, "1")
    until_archived(sidecar, 2)  # it has looked, and fetches nothing ahead
    state = {"w": torch.zeros(4 << 20), "step": 0}
    with pytest.raises(CheckpointException, match="not read to the end") as caught:
        load(state)
    assert "call dcp.load again" in str(caught.value)
    assert state["step"] == 0
    load(state)
    assert state["step"] == 1
    assert state["w"].eq(1.0).all()


def test_a_step_with_a_damaged_header_is_skipped(sidecars, archive, monkeypatch) -> None:
    sidecar = sidecars()
    _, newest = archived(sidecar, archive, monkeypatch)
    flip(newest, 8)
    sidecar.start(*archive, "1")
    until_archived(sidecar, 2)  # it has looked, and fetches nothing ahead
    state = {"w": torch.zeros(4 << 20), "step": 0}
    load(state)
    assert state["step"] == 1
    with pytest.raises(CheckpointException, match="step 2"):
        load(state, step=2)


def test_an_older_step_can_be_loaded_by_number_and_the_run_continues_from_it(
    sidecars, archive, monkeypatch
) -> None:
    sidecar = sidecars()
    archived(sidecar, archive, monkeypatch)
    sidecar.start(*archive, "1")
    assert keepstep.dcp.latest_step() == 2
    state = {"w": torch.zeros(4 << 20), "step": 0}
    load(state, step=1)
    assert state["step"] == 1
    save(state, 2)
    status = sidecar.get("/v1/status")
    assert status["epoch"]["parent"]["step"] == 1
    assert not list(sidecar.memory.rglob("window-*")), "the window is given back"


def test_a_load_converts_values_to_the_dtype_of_the_target_tensor(sidecar) -> None:
    """As stock readers convert them."""
    save({"w": torch.arange(5.0)}, 1)
    target = {"w": torch.zeros(5, dtype=torch.float64)}
    load(target)
    assert torch.equal(target["w"], torch.arange(5.0, dtype=torch.float64))


def test_a_missing_archive_is_an_error_and_not_a_fresh_start(
    sidecars, archive, monkeypatch
) -> None:
    sidecar = sidecars()
    archived(sidecar, archive, monkeypatch)
    shutil.rmtree(archive[1])
    sidecar.start(*archive, "1")
    with pytest.raises(keepstep.errors.RestoreError, match="bring that storage back"):
        keepstep.dcp.latest_step()
    with pytest.raises(CheckpointException, match="bring that storage back"):
        load({"w": torch.zeros(4 << 20)})
