"""Images for the tests of this folder."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from keepstep.image import ControlPage, Layout, extras_codec, seal_for_disk
from keepstep.steps import Epoch, EpochId, StepId
from tests.harness import digests

EPOCH = Epoch(EpochId(3, "1f9c2d7a"), StepId(EpochId(2, "00c0ffee"), 41))


def stage(layout: Layout, tensors: Mapping[str, bytes], *, kept: Any = None) -> bytearray:
    """What a trainer leaves in a slot."""
    data = bytearray(layout.size_bytes)
    data[: len(layout.header)] = layout.header
    for name, content in tensors.items():
        entry = layout.entries[name]
        assert entry.end - entry.begin == len(content)
        data[entry.begin : entry.end] = content
    values = extras_codec.encode(kept)
    data[layout.extras_begin : layout.extras_begin + len(values)] = values
    data[layout.control_begin :] = ControlPage(
        run="demo",
        layout=layout.id,
        epoch=EPOCH,
        rank=layout.rank,
        world=layout.world,
        step=1200,
        extras_bytes=len(values),
        staged_at=1.5,
    ).to_bytes()
    return data


def seal(layout: Layout, data: bytearray) -> bytearray:
    """What the sidecar makes of it on its way to disk."""
    staged = ControlPage.from_bytes(memoryview(data)[layout.control_begin :])
    view = memoryview(data)
    table, page = seal_for_disk(layout, view, staged, digests=digests(layout, view))
    data[layout.digests_begin :] = table + page
    return data


def noise(layout: Layout, *, seed: int = 0) -> dict[str, bytes]:
    """Content for every tensor; booleans only hold 0 and 1."""
    chance = random.Random(seed)
    content = {}
    for name, entry in layout.entries.items():
        size = entry.end - entry.begin
        bits = bytes(chance.getrandbits(1) for _ in range(size))
        content[name] = bits if entry.spec.dtype == "BOOL" else chance.randbytes(size)
    return content
