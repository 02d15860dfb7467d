"""A sealed image whose tree makes no sense is refused before a single tensor is copied."""

from __future__ import annotations

import json
from collections import deque

import pytest
import torch

from keepstep.client.slot import SlotMapping
from keepstep.errors import FormatError
from keepstep.image import Layout, TensorRole, TensorSpec
from keepstep.image.codecs import ArrayForm
from keepstep.restore.images import StepImages
from keepstep.restore.loader import Loader
from keepstep.state import taken_state
from keepstep.state.capture import capture_state
from keepstep.steps import EpochId, StepId, Tier
from keepstep.wire.trainer import ImageSource, Sources


def _plan(components, path, values):
    slot = SlotMapping(str(path))
    source = ImageSource(rank=0, tier=Tier.MEMORY, bytes=0, extras_bytes=0, path=slot.path)
    step = Sources(id=StepId(EpochId(1, "00c0ffee"), 0), world=1, sources=(source,))
    images = StepImages(None, step, own=(slot,))  # type: ignore[arg-type]
    Loader(
        components, capture_state(components), images, rank=0, kept={"values": values}
    ).compare_and_plan()


@pytest.mark.parametrize("index", [1, -1, "0", True, None, 1 << 40])
def test_a_tree_that_refers_to_a_missing_value_is_refused_by_name(tmp_path, index):
    skeleton = ["d", [["progress", ["d", [["a", ["t", "progress.a"]], ["b", ["v", index]]]]]]]
    layout = Layout.build(
        [TensorSpec("progress.a", "F32", (4,), TensorRole.REST)],
        rank=0,
        world=1,
        skeleton=json.dumps(skeleton),
        extras_capacity_bytes=4096,
    )
    path = tmp_path / "slot"
    path.write_bytes(layout.header.ljust(layout.size_bytes, b"\0"))
    live = {"a": torch.ones(4), "b": 7}

    with pytest.raises(FormatError, match=r"names value .* at b, but it holds 1"):
        _plan({"progress": live}, path, [3])

    assert live["b"] == 7
    assert torch.equal(live["a"], torch.ones(4))


@pytest.mark.parametrize(
    ("form", "node"),
    [
        (ArrayForm("<f4", (5,), False), ["t", "progress.a"]),
        (ArrayForm("<f4", (1 << 40, 1 << 40), True), ["t", "progress.a"]),
        (ArrayForm("<f4", (4,), False), ["l", [["t", "progress.a"]]]),
        (deque(), ["t", "progress.a"]),
        (deque(maxlen=1), ["d", [["x", ["t", "progress.a"]]]]),
        ({}, ["d", [["x", ["t", "progress.a"]]]]),
        (3, ["l", [["t", "progress.a"]]]),
    ],
    ids=str,
)
def test_a_container_type_that_does_not_match_is_refused_before_anything_is_changed(
    tmp_path, form, node
):
    skeleton = ["d", [["progress", ["d", [["a", ["x", 0, node]], ["b", ["t", "progress.b"]]]]]]]
    specs = [TensorSpec(f"progress.{name}", "F32", (4,), TensorRole.REST) for name in "ab"]
    layout = Layout.build(
        specs, rank=0, world=1, skeleton=json.dumps(skeleton), extras_capacity_bytes=4096
    )
    path = tmp_path / "slot"
    path.write_bytes(layout.header.ljust(layout.size_bytes, b"\0"))
    live = {"a": torch.ones(4), "b": torch.ones(4)}

    with pytest.raises(FormatError, match=r"form of an array|tree of this image makes a"):
        _plan({"progress": live}, path, [form])

    assert torch.equal(live["b"], torch.ones(4))


@pytest.mark.parametrize(
    "skeleton",
    [
        "",
        "[",
        "[]",
        "5",
        '["l",[]]',
        '["d"]',
        '["d",5]',
        '["d",[5]]',
        '["d",[["a"]]]',
        '["d",[[["a"],["v",0]]]]',
        '["d",[["a",["t",5]]]]',
        '["d",[["a",["z",[]]]]]',
        '["d",[["a",["x",0]]]]',
        '["d",[["a",["l",[[]]]]]]',
        '["d",[["a",["v",0]],["a",["v",0]]]]',
        '["d",[["a",["d",[[[1],["v",0]]]]]]]',
        '["d",[["a",["d",[[{"!tuple":[[1]]},["v",0]]]]]]]',
        '["d",[["a",["d",[[{"!odd":"1"},["v",0]]]]]]]',
        '["d",[["a",["d",[[{"!tuple":[1]},["v",0]],[{"!tuple":[1]},["v",0]]]]]]]',
        '["d",[["a",' + '["l",[' * 300 + '["v",0]' + "]]" * 300 + "]]]",
        "[" * 100_000,
    ],
)
def test_a_tree_with_an_invalid_node_is_refused(skeleton: str) -> None:
    assert taken_state.parse_skeleton('["d",[["a",["u",[["v",0],["t","x"]]]]]]').keys() == {"a"}
    key = '["d",[["a",["d",[[{"!tuple":[1]},["v",0]]]]]]]'
    assert taken_state.parse_skeleton(key)["a"][1][0][0] == (1,)
    with pytest.raises(FormatError, match="the tree of this image"):
        taken_state.parse_skeleton(skeleton)


@pytest.mark.parametrize("kept", [None, [], {}, {"values": {}}, 5])
def test_extras_without_values_are_refused(kept: object) -> None:
    with pytest.raises(FormatError, match="hold no values"):
        taken_state.values_from_extras(kept)


_LONG = {"!int": "f" * 4000}
_RARE = {"!torch.Tensor": ["int7", [8], "AAAAAAAAAAA="]}


@pytest.mark.parametrize("key", [_LONG, _RARE, {"!tuple": [1, _LONG]}, {"!tuple": [_RARE]}])
def test_a_key_that_cannot_be_printed_is_refused(key):
    item = [key, ["t", "a.b"]]
    with pytest.raises(FormatError, match="tree of this image"):
        taken_state.parse_skeleton(json.dumps(["d", [["a", ["d", [item]]]]]))
    with pytest.raises(FormatError, match="tree of this image"):
        taken_state.parse_skeleton(json.dumps(["d", [item]]))


@pytest.mark.parametrize("name", [3, {"!tuple": [1]}, {"!torch.Size": [2]}])
def test_a_component_name_that_is_not_a_string_is_refused(name):
    with pytest.raises(FormatError, match="a component whose name is no text"):
        taken_state.parse_skeleton(json.dumps(["d", [[name, ["t", "a"]]]]))
