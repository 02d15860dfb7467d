"""A sealed image whose tree makes no sense is refused before a single tensor is copied."""

from __future__ import annotations

import json

import pytest
import torch

from keepstep import loading
from keepstep.errors import FormatError
from keepstep.image import Layout, Section, TensorSpec
from keepstep.mapping import SlotMapping


@pytest.mark.parametrize("index", [1, -1, "0", True, None, 1 << 40])
def test_a_value_that_the_image_does_not_hold_is_named(tmp_path, index):
    skeleton = ["d", [["progress", ["d", [["a", ["t", "progress.a"]], ["b", ["v", index]]]]]]]
    layout = Layout.build(
        [TensorSpec("progress.a", "F32", (4,), Section.REST)],
        rank=0,
        world=1,
        skeleton=json.dumps(skeleton),
        extras_capacity_bytes=4096,
    )
    path = tmp_path / "slot"
    path.write_bytes(layout.header.ljust(layout.size_bytes, b"\0"))
    live = {"a": torch.ones(4), "b": 7}

    with pytest.raises(FormatError, match=r"names value .* at b, but it holds 1"):
        loading.plan({"progress": live}, SlotMapping(str(path)), [3])

    assert live["b"] == 7
    assert torch.equal(live["a"], torch.ones(4))
