"""Trained by torchrun in test_replicas.py: replicas that DIVERGE in some way, or do not. Ends
without `close`, once what was found is known."""

import contextlib
import os
import sys
import time

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import keepstep

kind, steps, wait_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
torch.distributed.init_process_group("gloo")
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
torch.manual_seed(rank)
net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
parts = {}
if kind == "mesh":
    mesh = init_device_mesh("cpu", (world,))
    extra = distribute_tensor(torch.zeros(16, 4), mesh, [Replicate()])
    parts["extra"] = {"copy": extra}
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
kept = net if kind == "apart" else model
checkpointer = keepstep.Checkpointer({"model": kept, "optimizer": optimizer, **parts})
at = checkpointer.restore()


def values():
    moments = (value for state in optimizer.state.values() for value in state.values())
    return hash(
        tuple(
            value for tensor in (*net.parameters(), *moments) for value in tensor.view(-1).tolist()
        )
    )


print(f"rank {rank} begins at {at and at.step} with {values()}", flush=True)
for step in range(at.step + 1 if at else 0, steps):
    alone = kind in ("no_sync", "apart") and step % 4
    with model.no_sync() if alone else contextlib.nullcontext():
        optimizer.zero_grad()
        model(torch.randn(8, 64)).pow(2).mean().backward()
    if kind == "fault" and rank == 1 and step == 3:
        optimizer.param_groups[0]["params"][0].grad[0, 0] += 1.0
    if kind == "mesh" and rank == 2:
        extra.to_local().fill_(7.0)
    optimizer.step()
    checkpointer.save(step)
    time.sleep(0.02)
checkpointer.wait(steps - 1)
print(f"rank {rank} ends with {values()}", flush=True)
deadline = time.monotonic() + wait_s
while not checkpointer._replicas.difference and time.monotonic() < deadline:
    time.sleep(0.05)
if os.environ.get("STATUS") and rank == 0:
    from keepstep.client.session import SidecarClient
    from keepstep.wire.status import Status

    print(
        "warnings", SidecarClient(os.environ["KEEPSTEP_SOCKET"]).get("/v1/status", Status).warnings
    )
torch.distributed.barrier()
os._exit(0)
