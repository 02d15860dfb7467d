"""A rank of a job that trains adapters, on several machines with a sidecar each, or on one:
`machine_rank.py KIND SEED LAST OUT SOCKET...` restores, trains and saves each step up to LAST, and
leaves what it went on from, and the whole model as it was then and is at the end, in OUT.<rank>.
KILL=RANK:SECONDS in the environment: this rank is killed so long after its restore. SWAP=STEP:
before this step, the first two layers change their frozen weights with one another."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

rank = int(os.environ["RANK"])
if len(sockets := sys.argv[5:]) > 1:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
os.environ["KEEPSTEP_SOCKET"] = sockets[rank if len(sockets) > 1 else 0]

import keepstep  # noqa: E402
from tests.frozen.models import made  # noqa: E402

WIDTH = int(os.environ.get("WIDTH", "1024"))


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The values of a model, or of one that is sharded."""
    values = model.state_dict().items()
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
        for name, value in values
    }


def main() -> None:
    kind, seed, last, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    dist.init_process_group("gloo")
    model, _ = made(seed, width=WIDTH)
    wrapped: torch.nn.Module = model
    if kind == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    checkpointer = keepstep.Checkpointer(
        {"model": wrapped, "optimizer": optimizer}, strict=True, frozen_once=True
    )
    at = checkpointer.restore()
    begin = whole(model)
    victim, _, seconds = os.environ.get("KILL", "-1:0").partition(":")
    if rank == int(victim):
        threading.Timer(float(seconds), os.kill, (os.getpid(), signal.SIGKILL)).start()
    for step in range(at.step + 1 if at else 0, last + 1):
        if step == int(os.environ.get("SWAP", "-1")):
            with torch.no_grad():
                first, other = (layer.base.weight for layer in model.layers[:2])
                before = first.clone()
                first.copy_(other)
                other.copy_(before)
        torch.manual_seed(step)
        optimizer.zero_grad()
        wrapped(torch.randn(8, WIDTH)).square().mean().backward()
        optimizer.step()
        checkpointer.save(step)
        checkpointer.wait(step, "durable")
    end = whole(model)
    found = {"from": at and at.step, "tier": at and str(at.tier), "begin": begin, "end": end}
    torch.save(found, f"{out}.{rank}")
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
