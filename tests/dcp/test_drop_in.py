"""`StorageWriter(path)`, `StorageReader(path)` where those of torch for a file system stood."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import keepstep.dcp
from keepstep.errors import UsageError
from tests.harness import ROOT

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def save(state: dict[str, Any], path: object) -> None:
    dcp.save(state, storage_writer=keepstep.dcp.StorageWriter(path), no_dist=True)


def load(path: object, size: int = 4) -> float:
    target = {"w": torch.zeros(size)}
    dcp.load(target, storage_reader=keepstep.dcp.StorageReader(path), no_dist=True)
    return float(target["w"][0])


def test_reader_and_writer_take_the_step_number_from_the_end_of_the_path(
    sidecar, tmp_path: Path
) -> None:
    paths = [tmp_path / "step-100", f"{tmp_path}/checkpoint-200/", "out/epoch_300", 400]
    for number, path in enumerate(paths):
        save({"w": torch.full((4,), float(number))}, path)
        assert load(path) == number
    assert keepstep.dcp.latest_step() == 400
    assert not (tmp_path / "step-100").exists(), "nothing is written there"


@pytest.mark.parametrize("kind", [keepstep.dcp.StorageWriter, keepstep.dcp.StorageReader])
def test_a_path_without_a_step_is_refused_with_what_to_write(kind: Any) -> None:
    with pytest.raises(UsageError, match=r"out/step-1200.*StorageWriter\(step=1200\)"):
        kind("out/checkpoint")
    with pytest.raises(UsageError, match="either a path or a step"):
        kind("out/step-1", step=1)


def test_a_step_path_is_accepted_although_the_script_already_created_that_directory(
    sidecar, tmp_path
) -> None:
    path = tmp_path / "step-7"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"of somebody else")
    save({"w": torch.ones(4)}, path)
    assert load(path) == 1


def test_the_directory_of_a_step_on_a_volume_can_be_read_directly(sidecar) -> None:
    save({"w": torch.ones(4)}, "step-7")
    [path] = sidecar.root.glob("0*-000000007")
    reader = keepstep.dcp.StorageReader(path)
    target = {"w": torch.zeros(4)}
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert target["w"].eq(1).all()
    assert reader._step is None


def test_a_wrong_path_to_a_step_directory_is_an_error_and_loads_no_other_step(sidecar) -> None:
    save({"w": torch.ones(4)}, "step-7")
    [path] = sidecar.root.glob("0*-000000007")
    with pytest.raises(CheckpointException, match="no directory of a step"):
        load(Path("/elsewhere") / path.name)


def test_a_checkpoint_of_file_system_writer_is_refused_with_a_hint(sidecar, tmp_path: Path) -> None:
    path = tmp_path / "step-7"
    dcp.save({"w": torch.ones(4)}, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    save({"w": torch.full((4,), 2.0)}, "step-7")
    with pytest.raises(CheckpointException, match="load it with FileSystemReader"):
        load(path)


@pytest.mark.parametrize("group", ["default", "own"])
def test_an_async_save_on_the_group_of_the_training_is_warned_of(
    sidecar, ranks: Callable[..., list[str]], group: str
) -> None:
    outputs = ranks(2, "async_on", group)
    warnings = [output.count('process_group=dist.new_group(backend="gloo")') for output in outputs]
    assert warnings == [1 if group == "default" else 0, 0], outputs


def test_the_error_for_a_rank_that_the_parent_process_holds_names_the_fix(sidecar) -> None:
    """As with `mp.spawn` after a look at what there is."""
    code = """
import torch, torch.distributed.checkpoint as dcp, keepstep.dcp
writer = keepstep.dcp.StorageWriter("step-1")
dcp.save({"w": torch.ones(1)}, storage_writer=writer, no_dist=True)
"""

    def child() -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        variables = {**os.environ, "PYTHONPATH": path}
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=90, check=False
        )

    assert keepstep.dcp.latest_step() is None
    refused = child()
    assert refused.returncode != 0
    assert f"call close() in pid {os.getpid()} before it starts this one" in refused.stderr
    assert "keepstep.dcp.close()" in refused.stderr
    keepstep.dcp.close()
    assert child().returncode == 0


def test_a_checkpointer_beside_an_open_dcp_session_is_refused_with_a_hint_to_close_it(
    sidecar,
) -> None:
    save({"w": torch.ones(4)}, "step-1")
    with pytest.raises(keepstep.RestoreError, match=r"\(keepstep\.dcp\.close\(\)\) first"):
        keepstep.Checkpointer({"part": {"w": torch.ones(4)}}).restore()
