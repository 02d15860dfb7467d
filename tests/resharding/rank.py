"""One rank of one life: `rank.py ORDER RANK`, both in JSON. What it says is `STORE.RANK`.

A life is `save`: fill a model of some layout with known values and keep one step; or `restore`:
fill it with rubbish, bring the step back, and compare every tensor, gathered by torch's
`full_tensor`, with what it must be.
"""

import itertools
import json
import os
import random
import signal
import sys
import time
import traceback

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import keepstep
from keepstep.restore.images import WindowReader

BIG, LARGE_ROWS = 999, 9973
"""This seed's model has shards of 62 MB: seven chunks and a half."""

PARTS = {"exp_avg": 2.0, "exp_avg_sq": 0.5}
"""Optimizer state is the parameter times this: exact, and right in whatever layout."""


def shapes(seed, uniform):
    """Names, shapes and dtypes of a model: uneven, some with fewer rows than ranks."""
    generator = random.Random(seed)
    found = {}
    for number in range(generator.randrange(3, 7)):
        shape = [generator.randrange(1, 11) for _ in range(generator.randrange(1, 4))]
        dtype = torch.float32
        if not uniform:
            dtype = generator.choice([torch.float32, torch.bfloat16, torch.float64])
        found[f"p{number}"] = (tuple(shape), dtype)
    found["large"] = ((LARGE_ROWS if seed == BIG else 257, 1031), torch.float32)
    return found


def value(seed, name, shape, dtype):
    """What the tensor of that name must be."""
    generator = torch.Generator().manual_seed(random.Random(f"{seed}/{name}").randrange(1 << 30))
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)


class Model(nn.Module):
    def __init__(self, seed, uniform, only=None):
        super().__init__()
        for name, (shape, dtype) in shapes(seed, uniform).items():
            if only is None or name in only:
                self.register_parameter(name, nn.Parameter(value(seed, name, shape, dtype)))
        self.register_buffer("count", torch.zeros(()))


def placed(model, mesh, choose):
    """Parameters as DTensors, by `choose(shape)` -> placements."""
    for name, parameter in list(model.named_parameters()):
        made = distribute_tensor(parameter.detach(), mesh, choose(parameter.shape))
        model.register_parameter(name, nn.Parameter(made))
    return model


def shard(dim):
    """`Shard(dim)`, or as near as the shape allows."""
    return lambda shape: [Shard(min(dim, len(shape) - 1))]


def two(shape):
    return [Shard(0), Shard(len(shape) - 1)]


def build(layout, seed, uniform, rank, world, short=False):
    model = Model(seed, uniform)
    if layout == "plain":
        return model
    if layout == "ddp":
        return DistributedDataParallel(model)
    if layout == "stages":
        names = list(shapes(seed, uniform))[: -1 if short else None]
        return Model(seed, uniform, only=names[rank::world])
    if layout == "fsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    if layout == "hsdp":
        return fully_shard(
            model,
            mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicas", "shards")),
        )
    if layout in ("rows", "columns"):
        mesh = init_device_mesh("cpu", (world,))
        return placed(model, mesh, shard(0 if layout == "rows" else 1))
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    if layout == "grid":
        return placed(model, mesh, two)
    if layout == "fsdp+tp":
        return fully_shard(placed(model, mesh["tp"], shard(0)), mesh=mesh["dp"])
    generator = random.Random(f"{seed}/{layout}")
    return placed(
        model,
        mesh,
        lambda shape: [
            generator.choice([Replicate(), *map(Shard, range(len(shape)))]) for _ in range(2)
        ],
    )


def whole_of(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def named(model):
    model = model.module if isinstance(model, DistributedDataParallel) else model
    return dict(model.named_parameters())


def save(order, rank, world):
    model = build(order["layout"], order["seed"], order["uniform"], rank, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    optimizer.param_groups[0]["lr"] = 0.0625
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.mul_(order.get("scale", 1))
        state = {part: parameter.detach() * factor for part, factor in PARTS.items()}
        optimizer.state[parameter] = {"step": torch.tensor(3.0), **state}
    (model.module if hasattr(model, "module") else model).count.fill_(5)
    progress = {"tokens": 12345, "where": torch.arange(3)}
    parts = {"model": model, "optimizer": optimizer, "progress": progress}
    with keepstep.Checkpointer(parts) as checkpointer:
        checkpointer.restore()
        return kept_step(checkpointer, order.get("step", 7))


def kept_step(checkpointer, step):
    """Save until all ranks have kept a step, and say which: large slots are not made at once."""
    while True:
        kept = torch.tensor(int(checkpointer.save(step)))
        dist.all_reduce(kept, dist.ReduceOp.MIN)
        if kept:
            return step
        step += 1
        time.sleep(0.1)


def restore(order, rank, world):
    model = build(
        order["layout"], order["seed"], order["uniform"], rank, world, order.get("short", False)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-1)
    if order.get("misfit"):
        inner = model.module if hasattr(model, "module") else model
        inner.register_parameter("stray", nn.Parameter(torch.ones(2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    progress = {"tokens": 0}
    parts = {"model": model, "optimizer": optimizer, "progress": progress}
    if order.get("die") == rank:
        die_in_the_middle()
    checkpointer = keepstep.Checkpointer(parts, strict=True)
    try:
        at = checkpointer.restore()
    except (keepstep.KeepstepError, RuntimeError) as error:
        changed = [
            name
            for name, parameter in named(model).items()
            if name != "stray" and not bool((whole_of(parameter) == -1).all())
        ]
        if optimizer.state:
            changed.append("optimizer")
        spoiled = [
            name for name, value in named(model).items() if bool(whole_of(value).isnan().all())
        ]
        message = f"{type(error).__name__}: {error}"
        return {"error": message, "changed": changed, "spoiled": spoiled}
    finally:
        checkpointer.close()
    wrong = []
    for name, parameter in named(model).items():
        expected = value(order["seed"], name, parameter.shape, parameter.dtype)
        check(wrong, name, parameter, expected)
        state = optimizer.state[parameter]
        for part, factor in PARTS.items():
            check(wrong, f"{name}.{part}", state[part], expected * factor)
            if isinstance(parameter, DTensor) != isinstance(state[part], DTensor):
                wrong.append(f"{name}.{part} is a {type(state[part]).__name__}")
        check(wrong, f"{name}.step", state["step"], torch.tensor(3.0))
    if (model.module if hasattr(model, "module") else model).count != 5:
        wrong.append("count")
    if optimizer.param_groups[0]["lr"] != 0.0625:
        wrong.append("lr")
    if progress["tokens"] != 12345 or not torch.equal(progress["where"], torch.arange(3)):
        wrong.append("progress")
    if order.get("trains"):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return {"step": at.step if at else None, "tier": str(at.tier) if at else None, "wrong": wrong}


def die_in_the_middle():
    """Of the fifth chunk that comes through a window."""
    stream, chunks = WindowReader.iter_chunks, itertools.count(1)

    def dying(self, requests):
        for pair in stream(self, requests):
            if next(chunks) == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            yield pair

    WindowReader.iter_chunks = dying


def check(wrong, name, tensor, expected):
    found = whole_of(tensor)
    same = found.dtype == expected.dtype and found.shape == expected.shape
    if not same or not torch.equal(found, expected):
        wrong.append(name)


def rank_main(order, rank):
    world = order["world"]
    torch.set_num_threads(1)
    os.environ["KEEPSTEP_SOCKET"] = order["socket"]
    store = dist.FileStore(order["store"], world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    action = save if order["action"] == "save" else restore
    try:
        answer = action(order, rank, world)
    except BaseException:
        # said at once: the other ranks may wait for this one until they are killed
        answer = {"crash": traceback.format_exc()}
    with open(f"{order['store']}.{rank}", "w") as file:
        json.dump(answer, file)
    if not (isinstance(answer, dict) and "crash" in answer):
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    rank_main(json.loads(sys.argv[1]), int(sys.argv[2]))
