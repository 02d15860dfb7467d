"""Random tensors, and random ways to spread them over a world: the same from every process."""

from __future__ import annotations

import random

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)
MESHES = {1: [(1,)], 2: [(2,)], 3: [(3,)], 4: [(4,), (2, 2)]}


def wholes(seed: int, count: int = 24) -> dict[str, torch.Tensor]:
    """Global tensors; some have fewer rows than any world has ranks, or none."""
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for number in range(count):
        shape = [chance.choice((1, 2, 3, 5, 7, 8)) for _ in range(chance.choice((1, 2, 2, 3)))]
        noise = torch.randint(0, 256, (*shape, 8), generator=generator, dtype=torch.uint8)
        dtype = DTYPES[number % len(DTYPES)]
        if dtype is torch.bool:
            made[f"t{number}"] = noise[..., 0] > 127
        else:
            made[f"t{number}"] = noise.view(dtype)[..., 0].contiguous()
    made["scalar"] = torch.tensor(2.5)
    made["empty"] = torch.empty(0, 3)
    return made


def spread(whole: dict[str, torch.Tensor], world: int, seed: int) -> dict[str, torch.Tensor]:
    """Each tensor sharded, replicated, or plain, by chance."""
    chance = random.Random(seed)
    meshes = [init_device_mesh("cpu", shape) for shape in MESHES[world]]
    return {name: _one(tensor, chance.choice(meshes), chance) for name, tensor in whole.items()}


def _one(tensor: torch.Tensor, mesh: DeviceMesh, chance: random.Random) -> torch.Tensor:
    choices = [Replicate(), *(Shard(dim) for dim in range(tensor.dim()))]
    placements = [chance.choice(choices) for _ in range(mesh.ndim)]
    if tensor.dim() == 0 or chance.random() < 0.15:
        return tensor.clone()
    return distribute_tensor(tensor, mesh, placements)


def blank(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same layout without the values."""
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def differing(first: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors whose local bits differ."""
    return [name for name in first if _bits(first[name]) != _bits(other[name])]


def _bits(tensor: torch.Tensor) -> bytes:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat = torch.empty(local.numel(), dtype=local.dtype)
    flat.copy_(local.detach().reshape(-1))
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""
