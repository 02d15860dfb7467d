"""The layouts that test_layouts.py keeps and restores: what each rank trains.

    python layouts.py DIRECTORY LIFE      with RANK and WORLD_SIZE, as torchrun sets them

In life 1 every layout is trained for two steps, its tensors are written down, and the process kills
itself. In life 2 fresh components restore, and each rank writes down what came back.
"""

import json
import os
import sys
from pathlib import Path

import torch
from matrix import STAGED_ONLY, WORLDS
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import keepstep
from keepstep.state import sharding
from keepstep.state.capture import capture_state
from keepstep.state.taken_state import leaves_of

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def mesh(*sizes, names):
    return device_mesh.init_device_mesh("cpu", sizes, mesh_dim_names=names)


def mlp(width, hidden=8):
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, width))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def shard_all(model, **options):
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def trained(model):
    return {"model": model, "optimizer": adamw(model)}


def fsdp():
    return trained(shard_all(mlp(5, hidden=7), mesh=mesh(WORLD, names=("dp",))))


def empty():
    return trained(shard_all(mlp(3, hidden=3), mesh=mesh(WORLD, names=("dp",))))


def tensor_parallel():
    return trained(columns_and_rows(mlp(6), mesh(WORLD, names=("tp",))))


def columns_and_rows(model, tp):
    return parallelize_module(model, tp, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def two_dimensions():
    both = mesh(2, 2, names=("dp", "tp"))
    model = columns_and_rows(mlp(6, hidden=6), both["tp"])
    return trained(shard_all(model, mesh=both["dp"]))


def hybrid():
    return trained(shard_all(wide(), mesh=mesh(2, 2, names=("replicate", "shard"))))


def wide():
    return nn.Sequential(nn.Linear(4, 200), nn.ReLU(), nn.Linear(200, 60))


def pipeline():
    stage = nn.Linear(4, 4)
    stage.register_buffer("seen", torch.zeros(3))
    return trained(nn.ModuleDict({f"layer{RANK}": stage, "norm": nn.LayerNorm(4)}))


def replicas():
    model = nn.Sequential(nn.Linear(4, 200), nn.BatchNorm1d(200), nn.Linear(200, 60))
    return nn.parallel.DistributedDataParallel(model)


def ddp():
    return trained(replicas())


def zero():
    model = replicas()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    }


def own_optimizers():
    model = replicas()
    owners = [at % WORLD for at, _ in enumerate(model.parameters())]
    mine = [
        parameter
        for parameter, owner in zip(model.parameters(), owners, strict=True)
        if owner == RANK
    ]
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(mine, lr=1e-2),
        "owners": dict(enumerate(owners)),
    }


def ddp_and_compiled():
    """Each rank has compiled something else."""
    try:
        from torch.compiler._cache import CacheArtifactManager as artifacts  # noqa: N813
    except ImportError:  # torch 2.6
        return ddp()
    artifacts._ensure_cache_artifacts_registered()
    artifacts.record_artifact("autotune", f"rank-{RANK}", {"rank": RANK})
    return {**ddp(), "compiled": keepstep.CompileCache()}


# name -> what it makes, and the options of its Checkpointer
LAYOUTS = {
    2: {
        "fsdp": (fsdp, {}),
        "tensor-parallel": (tensor_parallel, {}),
        "pipeline": (pipeline, {}),
        "ddp": (ddp, {}),
        "ddp-spread": (ddp, {"replicated": "Spread"}),
        "zero": (zero, {}),
        "own-optimizers": (own_optimizers, {}),
    },
    4: {
        "two-dimensions": (two_dimensions, {}),
        "hybrid": (hybrid, {}),
        "empty-shards": (empty, {}),
        "ddp-on-two-nodes": (ddp_and_compiled, {}),
        "hybrid-on-two-nodes": (hybrid, {}),
        "ddp-spread-over-nodes": (ddp, {"replicated": "Spread"}),
    },
}


def train(components, step):
    torch.manual_seed(100 * step + (0 if "tp" in str(components) else RANK))
    model, optimizer = components["model"], components["optimizer"]
    optimizer.zero_grad()
    value = torch.randn(16, 4)
    if isinstance(model, nn.ModuleDict):
        for layer in model.values():
            value = layer(value)
    else:
        value = model(value)
    value.square().mean().backward()
    optimizer.step()
    if "owners" in components:
        for parameter, owner in zip(model.parameters(), components["owners"].values(), strict=True):
            torch.distributed.broadcast(parameter.detach(), owner)
    if "scheduler" in components:
        components["scheduler"].step()


def tensors(components):
    """All that lies on this rank, by component and path."""
    taken = capture_state(components)
    leaves = {leaf.name: leaf for leaf in taken.tensors}
    return {
        repr(path): leaves[taken.aliases.get(leaf[1], leaf[1])]
        for path, leaf in leaves_of(taken.skeleton)
        if leaf[0] == "t"
    }


def groups(components):
    optimizer = components["optimizer"]
    return [
        {key: value for key, value in group.items() if key not in ("params", "foreach")}
        for group in optimizer.param_groups
    ]


def first_life(name, directory):
    make, options = LAYOUTS[WORLD][name]
    torch.manual_seed(7 + (RANK if name == "pipeline" else 0))
    components = make()
    checkpointer = keepstep.Checkpointer(components, strict=True, **options)
    assert checkpointer.restore() is None
    for step in (0, 1):
        train(components, step)
        checkpointer.save(step)
    checkpointer.wait(1, "durable")
    kept = {path: leaf.whole.clone() for path, leaf in tensors(components).items()}
    torch.save((kept, repr(groups(components))), directory / f"{name}.{RANK}.pt")
    # what the joined boxes must be: a collective for sharded tensors
    leaves = capture_state(components).tensors
    full = {
        leaf.name: leaf.live.full_tensor() if isinstance(leaf.live, DTensor) else leaf.live.clone()
        for leaf in leaves
    }
    torch.save(
        {key: tensor.detach() for key, tensor in full.items()}, directory / f"{name}.full.{RANK}"
    )
    return checkpointer


def second_life(name, directory):
    make, options = LAYOUTS[WORLD][name]
    torch.manual_seed(99)
    components = make()
    checkpointer = keepstep.Checkpointer(components, strict=True, **options)
    restored = checkpointer.restore()
    kept, kept_groups = torch.load(directory / f"{name}.{RANK}.pt")
    here = {path: leaf.whole for path, leaf in tensors(components).items()}
    wrong = [str(path) for path in kept.keys() ^ here.keys()]
    wrong += [path for path in kept.keys() & here.keys() if not same(kept[path], here[path])]
    answer = {
        "step": restored.step,
        "wrong": wrong,
        "tensors": len(kept),
        "groups": kept_groups == repr(groups(components)),
    }
    train(components, 2)  # and it goes on
    checkpointer.save(2)
    checkpointer.wait(2, "staged")
    (directory / f"{name}.{RANK}.json").write_text(json.dumps(answer))
    return checkpointer


def same(first, other):
    return first.dtype == other.dtype and first.shape == other.shape and torch.equal(first, other)


def random_boxes(directory):
    """Tensors of random shapes and placements: is the box that we name the one that is here?"""
    both, seed = mesh(2, 2, names=("a", "b")), 20
    dice = torch.Generator().manual_seed(seed)
    wrong = []
    for _ in range(40):
        shape = torch.randint(1, 7, (int(torch.randint(1, 4, (), generator=dice)),), generator=dice)
        whole = torch.rand(shape.tolist(), generator=dice)
        kinds = [Replicate(), *(Shard(dim) for dim in range(whole.dim()))]
        chosen = torch.randint(0, len(kinds), (2,), generator=dice).tolist()
        placed = distribute_tensor(whole, both, [kinds[name] for name in chosen])
        box = sharding.sharing_of(placed, "random")
        local = placed.to_local()
        place = tuple(slice(at, at + n) for at, n in zip(box.offsets, local.shape, strict=True))
        if not torch.equal(whole[place], local):
            wrong.append(f"{placed.placements} of {shape.tolist()} (seed {seed})")
    wrong += strided_boxes(both)
    (directory / f"boxes.{RANK}.json").write_text(json.dumps(wrong))


def strided_boxes(both):
    """FSDP over tensor parallel, with rows that do not divide evenly."""
    wrong = []
    uneven = (6, 10, 14) if torch.__version__ >= (2, 7) else ()  # not in FSDP2 of torch 2.6
    for rows in (4, *uneven):
        torch.manual_seed(rows)
        model = nn.Sequential(nn.Linear(3, rows))
        plain = [parameter.detach().clone() for parameter in model.parameters()]
        parallelize_module(model, both["b"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=both["a"])
        for whole, parameter in zip(plain, model.parameters(), strict=True):
            box = sharding.sharing_of(parameter, "strided")
            local = parameter.to_local()
            place = tuple(slice(at, at + n) for at, n in zip(box.offsets, local.shape, strict=True))
            if not torch.equal(whole[place], local):
                wrong.append(f"{parameter.placements} of {list(whole.shape)}")
    return wrong


def main():
    directory, life = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/store.{life}", rank=RANK, world_size=WORLD
    )
    if life == 1 and WORLD == 4:
        random_boxes(directory)
    open_ones = []
    for name in WORLDS[WORLD]:
        if life == 2 and name in STAGED_ONLY:
            continue
        node = RANK * WORLDS[WORLD][name] // WORLD
        os.environ["KEEPSTEP_SOCKET"] = str(directory / f"{name}.{node}.sock")
        open_ones.append((first_life if life == 1 else second_life)(name, directory))
    torch.distributed.barrier()
    (directory / f"done.{life}.{RANK}").touch()
    os.kill(os.getpid(), 9)


main()
