"""Tensors cut into boxes, and the images of all saved ranks as files, as their slots would be."""

from __future__ import annotations

import math
import random
from pathlib import Path

import torch

from keepstep.image import ControlPage, FlatBox, Layout, TensorRole, TensorSpec
from keepstep.restore.fill_plan import Box
from keepstep.state.taken_state import CODE_OF
from keepstep.steps import Epoch, EpochId, StepId, Tier
from keepstep.wire.trainer import ImageSource, Sources

EPOCH = Epoch(EpochId(3, "1f9c2d7a"))
ID = StepId(EPOCH.id, 7)


def some(generator: random.Random, shape, dtype) -> torch.Tensor:
    """A tensor of random bytes (random truth values for bool)."""
    count = torch.Size(shape).numel() * dtype.itemsize
    limit = 2 if dtype is torch.bool else 256
    seed = torch.Generator().manual_seed(generator.randrange(1 << 30))
    raw = torch.randint(0, limit, (count,), dtype=torch.uint8, generator=seed)
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else tensor.flatten()


def cut(generator: random.Random, shape, ranks: int) -> list[tuple[int, Box]]:
    """Boxes that tile `shape`, dealt out to ranks: a random grid, uneven, some boxes empty."""
    parts = [(Box((0,) * len(shape), tuple(shape)))]
    for dim in range(len(shape)):
        if generator.random() < 0.6:
            edges = sorted(
                generator.randrange(shape[dim] + 1) for _ in range(generator.randrange(3))
            )
            parts = [
                Box(
                    (*part.offsets[:dim], low, *part.offsets[dim + 1 :]),
                    (*part.sizes[:dim], high - low, *part.sizes[dim + 1 :]),
                )
                for part in parts
                for low, high in zip([0, *edges], [*edges, shape[dim]], strict=True)
            ]
    return [(generator.randrange(ranks), part) for part in parts]


def take(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """A copy of a box of a tensor."""
    for dim, (at, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        tensor = tensor.narrow(dim, at, size)
    return tensor.clone()


class Step:
    """Collects boxes per rank; `write` makes a file a rank and says where they are.

    A name has at most one box in a rank, as in images: a second one replaces it nowhere, so `add`
    refuses it.
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self.boxes: list[dict[str, tuple[torch.Tensor, Box, tuple[int, ...]]]] = [
            {} for _ in range(world)
        ]
        self.flats: dict[tuple[int, str], FlatBox] = {}

    def add(self, rank: int, name: str, data: torch.Tensor, box: Box, shape) -> None:
        assert name not in self.boxes[rank]
        self.boxes[rank][name] = (data, box, tuple(shape))

    def add_range(
        self, rank: int, name: str, data: torch.Tensor, begin: int, flat: FlatBox
    ) -> None:
        """A vector: a range of the elements of a box."""
        length = math.prod(flat.sizes)
        self.add(rank, name, data, Box((rank, begin), (1, len(data))), (self.world, length))
        self.flats[rank, name] = flat

    def write(self, directory: Path, *, without=(), twins=None) -> Sources:
        found = (
            self._image(directory, rank, (twins or {}).get(rank, ()))
            for rank in range(self.world)
            if rank not in without
        )
        return Sources(id=ID, world=self.world, sources=tuple(found))

    def _image(self, directory: Path, rank: int, twins) -> ImageSource:
        held = self.boxes[rank]
        layout = Layout.build(
            [
                TensorSpec(
                    name,
                    CODE_OF[data.dtype],
                    box.sizes,
                    TensorRole.REST,
                    box.offsets,
                    shape,
                    flat=self.flats.get((rank, name)),
                )
                for name, (data, box, shape) in held.items()
            ],
            rank=rank,
            world=self.world,
            twins=twins,
        )
        image = bytearray(layout.header.ljust(layout.size_bytes, b"\0"))
        for name, (data, _, _) in held.items():
            entry = layout.entries[name]
            image[entry.begin : entry.end] = bytes(bits(data).tolist())
        control = ControlPage(
            run="run", layout=layout.id, epoch=EPOCH, rank=rank, world=self.world, step=ID.step,
            extras_bytes=2, staged_at=1.0,
        )  # fmt: skip
        image[layout.extras_begin : layout.extras_begin + 2] = b"{}"
        image[layout.control_begin :] = control.to_bytes()
        path = directory / f"rank-{rank}"
        path.write_bytes(image)
        return ImageSource(
            rank=rank, tier=Tier.MEMORY, bytes=len(image), extras_bytes=2, path=str(path),
            twins=tuple(twins),
        )  # fmt: skip
