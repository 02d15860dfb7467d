"""Trained by torchrun in test_lending.py: each rank has the sidecar of its machine.

Arguments: the state (ddp, fsdp, hsdp), the last step, ranks of a machine, the machines' sockets.
"""

import os
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

kind, last, local = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ["KEEPSTEP_SOCKET"] = sys.argv[4 + rank // local]
os.environ["LOCAL_WORLD_SIZE"] = str(local)

import keepstep  # noqa: E402

torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 8))
if kind == "ddp":
    model = DistributedDataParallel(net)
else:
    shape = (world,) if kind == "fsdp" else (2, world // 2)
    names = ("shard",) if kind == "fsdp" else ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = fully_shard(net, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
counter = {"seen": 0}
parts = {"model": model, "optimizer": optimizer, "counter": counter}
checkpointer = keepstep.Checkpointer(parts)
if os.environ.get("PREVIEW"):
    print(f"rank {rank} previews {checkpointer.preview('counter')}", flush=True)
asked = os.environ.get("ASKED")
at = checkpointer.restore(step=int(asked) if asked else None)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def values():
    moments = (value for state in optimizer.state.values() for value in state.values())
    tensors = [*model.parameters(), *moments]
    return hash(tuple(value for tensor in tensors for value in whole(tensor).reshape(-1).tolist()))


begun = f"{at.step} from {at.tier}" if at else "None"
print(f"rank {rank} begins at {begun} with {values()} {counter['seen']}", flush=True)
first = at.step + 1 if at else 0
for step in range(first, last + 1):
    optimizer.zero_grad()
    torch.manual_seed(step)
    model(torch.randn(8, 32)).pow(2).mean().backward()
    optimizer.step()
    counter["seen"] = step
    checkpointer.save(step)
if first <= last:
    checkpointer.wait(last, "durable")
print(f"rank {rank} ends with {values()} {counter['seen']}", flush=True)
torch.distributed.barrier()
os._exit(0)
