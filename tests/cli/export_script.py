"""Trained by torchrun in test_export.py: `export_script.py LAYOUT STEPS`, with FSDP2 and others.

Rank 0 leaves in `trained.pt` what a state dict of the whole model would hold at the end.
"""

import os
import sys

import torch
from torch import nn
from torch.distributed import device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import keepstep

LAYOUT, STEPS = sys.argv[1], int(sys.argv[2])
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


class Model(nn.Module):
    """Tied weights, a counter, and rows that no world divides evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(101, 24)
        self.up = nn.Linear(24, 50)
        self.down = nn.Linear(50, 24)
        self.head = nn.Linear(24, 101, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.head(self.down(self.up(self.embedding(rows)).relu()))


def laid_out(model: nn.Module) -> nn.Module:
    if LAYOUT == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if LAYOUT == "fsdp":
        return fully_shard(model)
    if LAYOUT == "2d":
        both = device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fully_shard(model, mesh=both["dp"])
    return model


if WORLD > 1:
    torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
plain = Model()
model = laid_out(plain)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
checkpointer = keepstep.Checkpointer({"model": model, "optimizer": optimizer})
at = checkpointer.restore()
for step in range(at.step + 1 if at else 0, STEPS):
    optimizer.zero_grad()
    rows = torch.arange(8) + step
    nn.functional.cross_entropy(model(rows), rows).backward()
    optimizer.step()
    checkpointer.save(step)
checkpointer.close()
whole = {
    name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
    for name, tensor in plain.state_dict().items()
}
if int(os.environ.get("RANK", "0")) == 0:
    torch.save(whole, "trained.pt")
if WORLD > 1:
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
os._exit(0)  # gloo's threads may abort Python's own end
