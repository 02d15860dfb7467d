"""Every layout comes back bit-equal after a kill, and its boxes make up each tensor exactly."""

from __future__ import annotations

import json
import math

import pytest
import torch

from keepstep.image import Layout
from keepstep.state.taken_state import DTYPE_OF
from tests.layouts.matrix import STAGED_ONLY, WORLDS

EVERY = [(world, name) for world, names in WORLDS.items() for name in names]
pytestmark = pytest.mark.timeout(300)


def with_lives(cases):
    """Each case in the lives of its world."""
    params = [pytest.param(world, name, id=name) for world, name in cases]
    return pytest.mark.parametrize(("world", "name"), params)


def shards(lives, name):
    """Layout and bytes of every rank's image of step 1, in rank order."""
    found = {}
    for path in (lives.directory / "kept" / name).glob("*.safetensors"):
        data = path.read_bytes()
        layout = Layout.parse(data, size_bytes=len(data))
        found[layout.rank] = layout, data
    return [found[rank] for rank in sorted(found)]


def boxes(images):
    """Name -> the distinct boxes that are saved: offsets, global shape, tensor."""
    found = {}
    for layout, data in images:
        for name, entry in layout.entries.items():
            spec = entry.spec
            flat = (
                torch.frombuffer(bytearray(data[entry.begin : entry.end]), dtype=torch.uint8)
                if entry.end > entry.begin
                else torch.empty(0, dtype=torch.uint8)
            )
            tensor = flat.view(DTYPE_OF[spec.dtype]).view(spec.shape)
            offsets = spec.offsets or (0,) * len(spec.shape)
            key = offsets, tuple(spec.shape)
            found.setdefault(name, {})[key] = (spec.global_shape or spec.shape, tensor)
    return found


@with_lives([layout for layout in EVERY if layout[1] not in STAGED_ONLY])
def test_all_tensors_are_restored_bit_equal_after_a_kill(lives, name):
    answers = [
        json.loads(path.read_text()) for path in sorted(lives.directory.glob(f"{name}.*.json"))
    ]
    assert answers
    for answer in answers:
        assert answer["step"] == 1
        assert answer["wrong"] == []
        assert answer["tensors"] > 2
        assert answer["groups"], "learning rates and the like"


@with_lives(EVERY)
def test_the_saved_boxes_cover_each_tensor_exactly_once(lives, name):
    images = shards(lives, name)
    expected = {}
    for path in sorted(lives.directory.glob(f"{name}.full.*"), reverse=True):
        expected |= torch.load(path)
    joined = boxes(images)
    nodes = len(lives.sidecars[name]) if "spread" not in name else 1
    for stored, parts in joined.items():
        if "@rank-" in stored:
            continue
        shape = next(iter(parts.values()))[0]
        assert all(each[0] == shape for each in parts.values())
        whole, held = torch.zeros(shape), torch.zeros(shape, dtype=torch.int32)
        for (offsets, sizes), (_, tensor) in parts.items():
            place = tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
            whole[place] = tensor.float()
            held[place] += 1
        assert (held == 1).all(), f"{stored}: {held.unique().tolist()}"
        if stored in expected and "running" not in stored and "num_batches" not in stored:
            assert torch.equal(whole, expected[stored].float()), stored
    assert nodes == 1 or any(layout.twins for layout, _ in images)


def staged_bytes(layout):
    """Of what ranks share: parameters and their optimizer's state."""
    return sum(
        math.prod(entry.spec.shape) * entry.spec.element_bytes
        for name, entry in layout.entries.items()
        if "@rank-" not in name and "1.running" not in name and "num_batches" not in name
    )


@with_lives([(2, "ddp"), (2, "ddp-spread"), (4, "ddp-on-two-nodes"), (4, "ddp-spread-over-nodes")])
def test_replicas_are_staged_in_equal_parts(lives, name):
    images = shards(lives, name)
    sizes = [staged_bytes(layout) for layout, _ in images]
    assert max(sizes) <= 1.05 * sum(sizes) / len(sizes)
    whole = sum(parameter.numel() * 4 * 3 for parameter in parameters())
    copies = 2 if name == "ddp-on-two-nodes" else 1
    assert abs(sum(sizes) - copies * whole) < 1000, "each node has one whole copy, or all together"


def parameters():
    """As many as layouts.replicas() has."""
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 60)
    )
    return list(model.parameters())


@with_lives([(4, "ddp-on-two-nodes"), (4, "hybrid-on-two-nodes")])
def test_each_part_has_its_replica_on_the_other_node(lives, name):
    images = shards(lives, name)
    assert [layout.twins for layout, _ in images] == [(2,), (3,), (0,), (1,)]


@with_lives([(4, "ddp-spread-over-nodes"), (4, "hybrid"), (2, "fsdp")])
def test_a_tensor_that_only_one_rank_holds_has_no_replica(lives, name):
    assert [layout.twins for layout, _ in shards(lives, name)] == [()] * len(shards(lives, name))


@with_lives([(2, "pipeline")])
def test_pipeline_stages_keep_their_names_and_duplicate_names_get_a_rank_suffix(lives, name):
    names = [set(layout.entries) for layout, _ in shards(lives, name)]
    assert {"model.layer0.weight", "optimizer.state.model.layer0.weight.exp_avg"} < names[0]
    assert {"model.layer1.weight", "optimizer.state.model.layer1.weight.exp_avg"} < names[1]
    assert "model.norm.weight" in names[0]
    assert "model.norm.weight@rank-00001" in names[1]
    assert "optimizer.state.model.norm.weight.exp_avg@rank-00001" in names[1]


@with_lives([(2, "zero"), (2, "own-optimizers")])
def test_each_part_of_a_sharded_optimizer_is_staged_by_the_rank_that_holds_it(lives, name):
    states = [
        {entry for entry in layout.entries if entry.endswith("exp_avg")}
        for layout, _ in shards(lives, name)
    ]
    assert not states[0] & states[1]
    assert len(states[0] | states[1]) == len(parameters())


def test_boxes_of_random_placements_match_the_local_rows(four_ranks):
    answers = [json.loads(path.read_text()) for path in four_ranks.directory.glob("boxes.*.json")]
    assert answers == [[]] * 4
