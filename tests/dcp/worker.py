"""One rank of the tests in this folder: `worker.py COMMAND RANK WORLD STORE ARGUMENTS...`."""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_leaves, tree_map

import keepstep.dcp
from keepstep.errors import DigestError
from tests.dcp import expectations, layouts

warnings.simplefilter("ignore")
torch.set_num_threads(1)


def save(seed: str, step: str) -> None:
    world = dist.get_world_size()
    state = layouts.spread(layouts.wholes(int(seed)), world, int(seed) + world)
    extra = {"epoch": 3, "names": ["a", "b"], "tensors": state}
    dcp.save(extra, storage_writer=keepstep.dcp.StorageWriter(step=int(step)))


def load(seed: str, directory: str) -> None:
    """Through the sidecar's newest step ('-'), or from a directory, by ours and by stock."""
    world = dist.get_world_size()
    for turn in range(2):
        expected = layouts.spread(layouts.wholes(int(seed)), world, 100 * turn + world)
        for reader in _readers(directory):
            target = {"tensors": layouts.blank(expected)}
            if isinstance(reader, keepstep.dcp.StorageReader):
                target |= {"epoch": 0, "names": []}
            dcp.load(target, storage_reader=reader)
            wrong = layouts.differing(expected, target["tensors"])
            assert not wrong, f"{type(reader).__name__}, turn {turn}: {wrong}"
            if isinstance(reader, keepstep.dcp.StorageReader):
                assert (target["epoch"], target["names"]) == (3, ["a", "b"])


def alone_in_between(root: str) -> None:
    """Rank 0 saves for itself in the middle; nobody loads anything in between."""
    save_rows("1", "2")
    if dist.get_rank() == 0:
        alone = {"v": torch.full((3,), 4.0)}
        dcp.save(alone, storage_writer=keepstep.dcp.StorageWriter(step=4), no_dist=True)
    dist.barrier()
    save_rows("5", "6")
    load_rows("6")


def save_rows(*steps: str) -> None:
    """Each step a tensor of its own number; that of `7+` has another one before it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for word in steps:
        step = word.rstrip("+")
        whole = torch.full((5, 3), float(step))
        state = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "step": int(step)}
        if word != step:
            state["before"] = torch.ones(1000)
        dcp.save(state, storage_writer=keepstep.dcp.StorageWriter(step=int(step)))


def load_rows(expected: str, saves: str = "") -> None:
    """The step that must come back, on every rank alike; then goes on from it, if told so."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"w": distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)]), "step": -1}
    reader = keepstep.dcp.StorageReader()
    dcp.load(state, storage_reader=reader)
    assert state["step"] == reader.loaded_step == int(expected), state["step"]
    assert state["w"].to_local().eq(float(expected)).all()
    if saves:
        dcp.save(state, storage_writer=keepstep.dcp.StorageWriter(step=int(saves)))


def _readers(directory: str) -> list[dcp.StorageReader]:
    if directory == "-":
        return [keepstep.dcp.StorageReader()]
    return [keepstep.dcp.StorageReader(directory), dcp.HuggingFaceStorageReader(directory)]


def overlapped(root: str) -> None:
    """Each state changes right after `async_save`; then rank 0 saves alone, then both again."""
    mesh = init_device_mesh("cpu", (2,))
    shards = distribute_tensor(torch.zeros(5000, 8), mesh, [Shard(0)])
    state = {"w": shards, "count": torch.zeros(())}
    for step in (1, 2, 3):
        for tensor in (state["w"].to_local(), state["count"]):
            tensor.fill_(float(step))
        writer = keepstep.dcp.StorageWriter(step=step)
        future = dcp.async_save(state, storage_writer=writer)
        for tensor in (state["w"].to_local(), state["count"]):
            tensor.fill_(-1.0)
        future.result(60)
        _holds(state, float(step))
    if dist.get_rank() == 0:
        alone = {"v": torch.full((3,), 4.0)}
        dcp.save(alone, storage_writer=keepstep.dcp.StorageWriter(step=4), no_dist=True)
    dist.barrier()
    dcp.save(state, storage_writer=keepstep.dcp.StorageWriter(step=5))
    _holds(state, -1.0)


def async_on(group: str) -> None:
    """`async_save` with the exchange of its plans on the group that the model trains on, or not."""
    own = dist.new_group(backend="gloo") if group == "own" else None
    state = {"w": torch.ones(3)}
    for step in (1, 2):
        writer = keepstep.dcp.StorageWriter(f"out/step-{step}")
        dcp.async_save(state, storage_writer=writer, process_group=own).result(60)
    dcp.save(state, storage_writer=keepstep.dcp.StorageWriter("out/step-3"))


def _holds(state: dict[str, torch.Tensor], value: float) -> None:
    target = layouts.blank(state)
    dcp.load(target, storage_reader=keepstep.dcp.StorageReader())
    assert target["count"].item() == value
    assert target["w"].to_local().eq(value).all()


def broken(directory: str, seed: str) -> None:
    """A byte of one rank's shard is wrong: every rank refuses, none has loaded anything."""
    world = dist.get_world_size()
    expected = layouts.spread(layouts.wholes(int(seed)), world, int(seed) + world)
    target = {"tensors": layouts.blank(expected)}
    try:
        dcp.load(target, storage_reader=keepstep.dcp.StorageReader(directory))
    except CheckpointException as error:
        found = [exception for exception, _ in error.failures.values()]
        assert all(isinstance(exception, DigestError) for exception in found), found
        assert all("rank-00001-of-00002.safetensors" in str(exception) for exception in found), (
            found
        )
    else:
        raise AssertionError("it was loaded")
    assert not layouts.differing(layouts.blank(expected), target["tensors"])


def model_of(kind: str) -> nn.Module:
    """Sizes that no world divides evenly; some layers have fewer rows than ranks."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 7), nn.Linear(7, 1))
    world = dist.get_world_size()
    if kind == "2d":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"])
    if kind == "hsdp":
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names)
        return fully_shard(model, mesh=mesh)
    return fully_shard(model, mesh=init_device_mesh("cpu", (world,)))


def train(kind: str, steps: str, die_at: str, log: str) -> None:
    """Goes on from the newest step; `log` gets what was loaded and what was saved, in full."""
    model = model_of(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = 0
    if log.endswith("+"):
        state = _state(model, optimizer)
        state["step"] = -1
        dcp.load(state, storage_reader=keepstep.dcp.StorageReader())
        _through_the_exit_door(state)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        first = state["step"] + 1
        _write(log, {"loaded": state["step"], "state": _full(model, optimizer)})
    for step in range(first, int(steps)):
        if step == int(die_at) and dist.get_rank() == 1:
            os.kill(os.getpid(), 9)
        optimizer.zero_grad()
        model(torch.full((4, 6), 0.5 + step)).square().mean().backward()
        optimizer.step()
        state = {**_state(model, optimizer), "step": step}
        dcp.save(state, checkpoint_id=f"step-{step}", storage_writer=keepstep.dcp.StorageWriter())
        _write(log, {"saved": step, "state": _full(model, optimizer)})


def _through_the_exit_door(state: dict[str, Any]) -> None:
    """Stock DCP reads the same directory, and gets the same bits."""
    expected = {"model": state["model"], "optim": {"state": state["optim"]["state"]}}
    target = tree_map(torch.zeros_like, expected)
    reader = dcp.HuggingFaceStorageReader(os.environ["EXIT_DOOR"])
    dcp.load(target, storage_reader=reader)
    pairs = zip(tree_leaves(expected), tree_leaves(target), strict=True)
    assert not any(layouts.differing({"": first}, {"": other}) for first, other in pairs)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    model_state, optim_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optim": optim_state}


def _full(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Every tensor in full, as text that is equal only for equal bits."""
    flat = {}
    for name, parameter in model.named_parameters():
        flat[name] = parameter.full_tensor()
        for key, value in optimizer.state[parameter].items():
            flat[f"{name}.{key}"] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return {
        name: value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes().hex()
        for name, value in flat.items()
    }


def _write(log: str, line: dict[str, object]) -> None:
    if dist.get_rank() == 0:
        with open(log.rstrip("+"), "a") as out:
            out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    command, rank, world, store, *arguments = sys.argv[1:]
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world)
    )
    (globals().get(command) or getattr(expectations, command))(*arguments)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort Python's own end
