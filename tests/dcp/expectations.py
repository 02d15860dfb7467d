"""What PyTorch's own tests ask of a DCP storage, as commands of `worker.py`: each rank checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from keepstep.dcp import StorageReader, StorageWriter
from keepstep.state.taken_state import CODE_OF


class App:
    """A Stateful, as the tutorials have it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.loads = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loads += 1
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def made(kind: str, seed: int) -> App:
    torch.manual_seed(seed)
    world = dist.get_world_size()
    model: Any = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
    return App(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def trained(app: App, *steps: int) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        app.optimizer.zero_grad()
        loss = app.model(torch.randn(4, 5, generator=generator)).square().mean()
        loss.backward()
        app.optimizer.step()
        losses.append(loss.item())
    return losses


def failure_of(call: Callable[[], object]) -> str:
    try:
        call()
    except CheckpointException as error:
        return str(error)
    raise AssertionError("nothing was refused")


def end_to_end(kind: str, how: str) -> None:
    """Trained, kept, and gone on with in objects made anew: bit for bit as without a break."""
    app = made(kind, seed=1)
    trained(app, 0, 1)
    state = {"app": app, "step": 2, "names": ["a", "b"]}
    writer = StorageWriter("out/step-2")
    if how == "sync":
        dcp.save(state, storage_writer=writer)
        expected = trained(app, 2, 3)
    else:
        options = {
            "thread": None,
            "stager": DefaultStager(StagingOptions(False, False, False, False)),
            "async-stager": DefaultStager(StagingOptions(False, False, True, False)),
        }
        group, stager = dist.new_group(backend="gloo"), options[how]
        found = dcp.async_save(
            state, storage_writer=writer, process_group=group, async_stager=stager
        )
        if hasattr(found, "staging_completion"):
            found.staging_completion.result(60)
        expected = trained(app, 2, 3)
        getattr(found, "upload_completion", found).result(60)
        if stager is not None:
            stager.close()
    again = made(kind, seed=2)
    target = {"app": again, "step": 0, "names": []}
    dcp.load(target, storage_reader=StorageReader("out/step-2"))
    assert again.loads == 1
    assert (target["step"], target["names"]) == (2, ["a", "b"])
    assert trained(again, 2, 3) == expected


def casting() -> None:
    """A tensor comes as the dtype that it is loaded into, as `copy_` makes it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.linspace(-3, 3, 15).view(5, 3)
    pairs = {"wide": (torch.float32, torch.float64), "narrow": (torch.float32, torch.bfloat16)}
    pairs |= {"from-half": (torch.float16, torch.float32), "int": (torch.int32, torch.int64)}
    state = {
        name: distribute_tensor(whole.to(saved), mesh, [Shard(0)])
        for name, (saved, _) in pairs.items()
    }
    state |= {f"plain {name}": whole.to(saved) for name, (saved, _) in pairs.items()}
    dcp.save(state, storage_writer=StorageWriter("step-1"))
    target = {
        name: torch.zeros_like(tensor).to(pairs[name.split()[-1]][1])
        for name, tensor in state.items()
    }
    dcp.load(target, storage_reader=StorageReader("step-1"))
    for name, tensor in target.items():
        saved, dtype = pairs[name.split()[-1]]
        assert tensor.dtype == dtype
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(full, whole.to(saved).to(dtype)), name


def partial_load() -> None:
    """Some keys; keys that were not kept; keys that the step has and this state has not."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    w = distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [Shard(0)])
    state = {"model": {"w": w, "b": torch.ones(3)}, "optim": {"lr": 0.5, "m": torch.ones(4)}}
    dcp.save(state, storage_writer=StorageWriter("step-1"))
    target = {"model": {"w": torch.zeros_like(w)}}
    dcp.load(target, storage_reader=StorageReader("step-1"))
    assert torch.equal(target["model"]["w"].full_tensor(), w.full_tensor())
    loaded_into = {"model": {"b": torch.zeros(3)}, "new": torch.full((2,), 7.0)}
    assert "new" in failure_of(
        lambda: dcp.load(loaded_into, storage_reader=StorageReader("step-1"))
    )
    assert not loaded_into["model"]["b"].any()
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(loaded_into, storage_reader=StorageReader("step-1"), planner=planner)
    assert loaded_into["model"]["b"].eq(1).all()
    assert loaded_into["new"].eq(7).all()
    for keys in ("optim", {"optim.lr", "optim.m"}):
        found = _load_state_dict_from_keys(keys, storage_reader=StorageReader("step-1"))
        assert found.keys() == {"optim"}
        assert found["optim"]["lr"] == 0.5
        assert found["optim"]["m"].eq(1).all()


def other_shape() -> None:
    """A tensor of another size is an error that names it, and changes nothing."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"w": distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)]), "v": torch.ones(2)}
    dcp.save(state, storage_writer=StorageWriter("step-1"))
    target = {"w": distribute_tensor(torch.zeros(7, 2), mesh, [Shard(0)]), "v": torch.zeros(2)}
    assert "for w" in failure_of(lambda: dcp.load(target, storage_reader=StorageReader("step-1")))
    assert not target["v"].any()


def saved_again() -> None:
    """No step is written over; what was kept stays."""
    dcp.save({"w": torch.ones(4)}, storage_writer=StorageWriter("out/step-5"))
    assert "steps only grow" in failure_of(
        lambda: dcp.save({"w": torch.zeros(4)}, storage_writer=StorageWriter("elsewhere/step-5"))
    )
    target = {"w": torch.zeros(4)}
    dcp.load(target, storage_reader=StorageReader("out/step-5"))
    assert target["w"].eq(1).all()
    dcp.save({"w": torch.zeros(4)}, storage_writer=StorageWriter("out/step-6"))


def odd_dtypes() -> None:
    """Every dtype that an image has, sharded, without elements and without dimensions."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {}
    for dtype in CODE_OF:
        size = dtype.itemsize
        data = (torch.arange(8 * size) % 2).to(torch.uint8)
        whole = data.view(dtype) if dtype is not torch.bool else data.bool()
        name = str(dtype)
        state[name] = DTensor.from_local(whole, mesh, [Shard(0)], run_check=False)
        state[f"{name} point"] = whole[1].clone()
        state[f"{name} empty"] = whole[:0].clone()
    dcp.save(state, storage_writer=StorageWriter("step-1"))
    target: dict[str, Any] = {}
    for name, tensor in state.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        raw = torch.zeros(local.numel() * local.itemsize, dtype=torch.uint8).view(local.dtype)
        raw = raw.view(local.shape)
        target[name] = DTensor.from_local(raw, mesh, [Shard(0)]) if tensor is not local else raw
    dcp.load(target, storage_reader=StorageReader("step-1"))
    for name, value in state.items():
        pair = [
            each.to_local() if isinstance(each, DTensor) else each for each in (value, target[name])
        ]
        left, right = (each.reshape(-1).view(torch.uint8) for each in pair)
        assert torch.equal(left, right), name


def sharded() -> None:
    """ShardedTensor: saved in chunks of one dimension, loaded in those of another."""
    world = dist.get_world_size()
    specs = [
        ChunkShardingSpec(dim=dim, placements=[f"rank:{rank}/cpu" for rank in range(world)])
        for dim in (0, 1)
    ]
    saved = sharded_tensor.rand(specs[0], 5, 6)
    dcp.save({"s": saved, "t": torch.ones(2)}, storage_writer=StorageWriter("step-1"))
    for spec in specs:
        target = {"s": sharded_tensor.zeros(spec, 5, 6), "t": torch.zeros(2)}
        dcp.load(target, storage_reader=StorageReader("step-1"))
        assert torch.equal(gathered(target["s"]), gathered(saved))
    loaded_into = {
        "s": distribute_tensor(torch.zeros(5, 6), init_device_mesh("cpu", (world,)), [Replicate()])
    }
    dcp.load(loaded_into, storage_reader=StorageReader("step-1"))
    assert torch.equal(loaded_into["s"].to_local(), gathered(saved))


def gathered(value: Any) -> torch.Tensor:
    whole = torch.zeros(5, 6)
    for shard in value.local_shards():
        (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        whole[row : row + rows, column : column + columns] = shard.tensor
    dist.all_reduce(whole)
    return whole


def other_order() -> None:
    """The keys come in another order on each rank, at the save and at the load."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def state(value: float, *, turn: int) -> dict[str, Any]:
        names = [f"k{number}" for number in range(6)]
        odd = (dist.get_rank() + turn) % 2
        made = {
            name: distribute_tensor(torch.full((4, 2), value * (at + 1)), mesh, [Shard(0)])
            for at, name in enumerate(names)
        } | {"plain": torch.full((3,), value), "text": str(value)}
        return dict(sorted(made.items(), reverse=bool(odd)))

    dcp.save(state(1.0, turn=0), storage_writer=StorageWriter("step-1"))
    target = state(0.0, turn=1)
    dcp.load(target, storage_reader=StorageReader("step-1"))
    for at in range(6):
        assert target[f"k{at}"].to_local().eq(at + 1).all()
    assert target["plain"].eq(1).all()
    assert target["text"] == "1.0"


class Counter:
    """A Stateful without a tensor."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def mixed() -> None:
    """Objects with a state_dict beside plain values, and at a load only those that are there."""
    rank = dist.get_rank()
    model = nn.Linear(2, 2)
    state = {"counter": Counter(4), "model": model, "plain": {"x": torch.ones(2), "y": 3}}
    state |= {"of one rank": Counter(rank)} if rank else {}
    dcp.save(state, storage_writer=StorageWriter("step-1"))
    other, counter = nn.Linear(2, 2), Counter(0)
    target = {"model": other, "counter": counter, "plain": {"x": torch.zeros(2), "y": 0}}
    dcp.load(target, storage_reader=StorageReader("step-1"))
    if rank == 0:
        assert torch.equal(other.weight, model.weight)
    assert counter.value == 4
    assert target["plain"]["x"].eq(1).all()
    assert target["plain"]["y"] == 3
