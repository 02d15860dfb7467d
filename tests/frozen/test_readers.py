"""Who reads a step with a base: ranks of another world, stock readers, the command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import keepstep.dcp
from tests.cli.conftest import Keepstep
from tests.frozen.models import made, train
from tests.harness import torchrun
from tests.lib.training import begun
from tests.torch_version import needs_stock_reader

RANK = Path(__file__).parent / "rank.py"


def live(sidecar, out, world, *, seed, step):
    ended = torchrun(world, RANK, seed, step, out, KEEPSTEP_SOCKET=str(sidecar.socket))
    assert ended.returncode == 0, ended.stderr[-4000:] + sidecar.text()[-2000:]
    return torch.load(out)


def same(first, other):
    return first.keys() == other.keys() and all(
        torch.equal(first[name], other[name]) for name in first
    )


@pytest.mark.parametrize("memory", ["kept", "lost"])
@pytest.mark.parametrize("worlds", [(2, 1), (1, 2), (2, 2)])
def test_frozen_values_are_restored_at_another_world_size(sidecar, tmp_path, worlds, memory):
    before, after = worlds
    saved = live(sidecar, tmp_path / "one", before, seed=0, step=3)
    (step,) = sidecar.root.glob("0*")
    assert len(list(step.glob("base-*"))) == before
    if memory == "lost":
        sidecar.kill()
        sidecar.lose_memory()
        sidecar.start()
    found = live(sidecar, tmp_path / "two", after, seed=1, step=4)
    assert found["from"] == 3
    assert same(found["begin"], saved["end"])
    again = live(sidecar, tmp_path / "three", before, seed=2, step=-1)
    assert same(again["begin"], found["end"])


@pytest.fixture
def step(sidecar):
    """The directory of a committed step with a base, and its model."""
    model, optimizer = made()
    train(model, optimizer)
    with begun(
        {"model": model, "optimizer": optimizer}, strict=True, frozen_once=True
    ) as checkpointer:
        checkpointer.save(0)
        checkpointer.wait(0)
        train(model, optimizer)
        checkpointer.save(1)
    return max(sidecar.root.glob("0*")), model


def test_stock_safetensors_finds_each_name_in_one_file(step):
    directory, model = step
    found = {}
    for path in directory.glob("*.safetensors"):
        tensors = load_file(path)
        assert not tensors.keys() & found.keys()
        found |= tensors
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[f"model.{name}"], tensor)


@needs_stock_reader
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_stock_dcp_reads_the_directory(step):
    directory, model = step
    found = {f"model.{name}": torch.zeros_like(value) for name, value in model.state_dict().items()}
    dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(str(directory)))
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[f"model.{name}"], tensor)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_keepstep_dcp_reads_the_directory(step):
    directory, model = step
    found = {f"model.{name}": torch.zeros_like(value) for name, value in model.state_dict().items()}
    dcp.load(found, storage_reader=keepstep.dcp.StorageReader(directory), no_dist=True)
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[f"model.{name}"], tensor)


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """The command beside a run that has trained three steps with a base."""
    made_here = Keepstep(tmp_path)
    made_here.script(
        "train.py",
        "import keepstep, torch\n"
        "from tests.frozen.models import made, train\n"
        "model, optimizer = made()\n"
        "parts = {'model': model, 'optimizer': optimizer}\n"
        "with keepstep.Checkpointer(parts, frozen_once=True) as checkpointer:\n"
        "    checkpointer.restore()\n"
        "    for step in range(3):\n"
        "        train(model, optimizer)\n"
        "        checkpointer.save(step)\n"
        "        checkpointer.wait(step)\n"
        "torch.save(model.state_dict(), 'model.pt')\n",
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    made_here("run", "--", sys.executable, "train.py")
    yield made_here
    made_here.end()


def test_export_can_write_only_the_adapter(trained):
    output = trained("export", "latest", "--to", "lora", "--only", "adapter").stdout
    assert "adapter_config.json" in output
    (path,) = (trained.home / "lora").iterdir()
    assert path.name == "adapter_model.safetensors"
    model = torch.load(trained.home / "model.pt")
    assert same(load_file(path), {k: v for k, v in model.items() if k.endswith(("up", "down"))})


def test_exporting_the_adapter_of_a_model_without_one_is_refused(keepstep):
    keepstep.script(
        "whole.py",
        "import keepstep, torch\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "parts = {'model': model, 'optimizer': optimizer}\n"
        "with keepstep.Checkpointer(parts) as checkpointer:\n"
        "    checkpointer.restore()\n"
        "    checkpointer.save(0)\n",
    )
    keepstep("run", "--", sys.executable, "whole.py")
    output = keepstep("export", "0", "--to", "out", "--only", "adapter", code=2).stderr
    assert "has no adapter" in output
    assert not (keepstep.home / "out").exists()


def test_the_command_exports_and_verifies_base_and_step(trained):
    output = trained("verify").stdout
    assert "every digest is right" in output
    trained("export", "latest", "--to", "out")
    found = load_file(next((trained.home / "out").glob("*.safetensors")))
    assert same(found, torch.load(trained.home / "model.pt"))
    (base,) = {path.resolve() for path in trained.home.rglob("base-*") if "-000000002" in str(path)}
    with base.open("r+b") as file:
        file.seek(base.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    assert base.name in trained("verify", code=1).stderr
