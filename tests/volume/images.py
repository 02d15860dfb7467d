"""Small images as a trainer leaves them in a slot: sealed, without digests."""

from __future__ import annotations

import mmap
import random
from dataclasses import dataclass
from pathlib import Path

from keepstep.core.shard import Shard
from keepstep.image import ControlPage, Layout, TensorRole, TensorSpec
from keepstep.steps import Epoch, EpochId, StepId, Tier
from keepstep_sidecar.tiers import verified_chunks
from keepstep_sidecar.tiers.source import FileSource
from keepstep_sidecar.volume.run_tree import ShardName
from keepstep_sidecar.volume.volume import Volume, VolumeSet

RUN = "gpt"
EPOCH = Epoch(EpochId(1, "1f9c2d7a"))
CHUNK = 8 << 20


@dataclass(frozen=True)
class Slot:
    """One staged image. `view` is page aligned, as O_DIRECT wants it."""

    view: memoryview
    layout: Layout
    control: ControlPage

    @property
    def id(self) -> StepId:
        return self.control.step_id


def step_id(step: int) -> StepId:
    return StepId(EPOCH.id, step)


def make_layout(*, rank: int = 0, world: int = 2, parameters: int = 6000) -> Layout:
    """`parameters` in F32, as many again in the optimizer, and a counter."""
    tensors = [
        TensorSpec("model.weight", "F32", (parameters,), TensorRole.PARAMS),
        TensorSpec("optimizer.exp_avg", "F32", (parameters,), TensorRole.OPTIMIZER),
        TensorSpec("progress.batches", "I64", (), TensorRole.REST),
    ]
    return Layout.build(tensors, rank=rank, world=world)


def empty_slot(layout: Layout) -> memoryview:
    return memoryview(mmap.mmap(-1, layout.size_bytes))


def write_noise(view: memoryview, seed: str) -> None:
    """Fill it with bytes that depend on `seed`, of which no MiB is like another."""
    noise = random.Random(seed).randbytes(1 << 20)
    for number, begin in enumerate(range(0, len(view), len(noise))):
        part = view[begin : begin + len(noise)]
        part[:] = (noise[number:] + noise[:number])[: len(part)]


def staged(
    layout: Layout, step: int, *, run: str = RUN, seed: int | None = None, epoch: Epoch = EPOCH
) -> Slot:
    """The image of `step`: bytes that depend on rank, step and `seed`."""
    view = empty_slot(layout)
    view[: len(layout.header)] = layout.header
    write_noise(view[len(layout.header) : layout.digests_begin], f"{layout.rank}/{step}/{seed}")
    control = ControlPage(
        run=run,
        layout=layout.id,
        epoch=epoch,
        rank=layout.rank,
        world=layout.world,
        step=step,
        extras_bytes=100,
        staged_at=1.7e9 + step,
    )
    view[layout.control_begin :] = control.to_bytes()
    return Slot(view, layout, control)


def load(volumes: Volume | VolumeSet, path: Path, view: memoryview) -> ControlPage:
    """A shard's image into a slot, as a restore brings it there."""
    each = volumes if isinstance(volumes, VolumeSet) else VolumeSet([volumes])
    name = ShardName.parse(path)
    source = FileSource(
        shard=Shard(
            step_id=name.id, rank=name.rank, world=name.world, size_bytes=path.stat().st_size
        ),
        tier=Tier.LOCAL,
        where=str(path),
        run=each.volumes[0].record.run,
        open=lambda: each.open_shard_file(path),
    )
    return verified_chunks.load_image(source, view)
