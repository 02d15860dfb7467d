"""Boxes: cut, intersected, counted, and put together again, to the last element."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from keepstep.errors import CoverageError
from keepstep.image import FlatBox
from keepstep.restore.fill_plan import (
    Box,
    Piece,
    TensorRequest,
    blocks_in_range,
    byte_range,
    count_coverage,
    make_fill_plan,
)
from keepstep.restore.images import StepImages, block_view
from keepstep.restore.images import fill_targets as fill_from
from keepstep.restore.targets import boxes_of_tensor
from tests.resharding.worlds import Step, bits, cut, some, take
from tests.torch_version import NEWER_DTYPES

DTYPES = [
    torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.int64,
    torch.float8_e4m3fn, *NEWER_DTYPES, torch.complex64, torch.complex128, torch.uint16,
]  # fmt: skip


def whole(shape):
    return Box((0,) * len(shape), tuple(shape))


def fill(step, directory, requests, targets, *, rank=0, **options):
    """Plan and run, from mapped files."""
    images = StepImages(None, step.write(directory, **options))  # type: ignore[arg-type]
    plan = make_fill_plan(requests, images.index, rank=rank, nearness=images.nearness_by_rank)
    return fill_from(plan, targets, images)


@pytest.mark.parametrize("seed", range(40))
def test_a_tensor_in_any_sharding_can_be_reassembled_into_any_other(tmp_path, seed):
    generator = random.Random(seed)
    print(f"seed {seed}")
    world = generator.randrange(1, 6)
    step, requests, targets, expected = Step(world), [], [], []
    for number in range(generator.randrange(1, 6)):
        shape = [
            generator.randrange(0 if seed % 5 == 0 else 1, 9) for _ in range(generator.randrange(4))
        ]
        tensor = some(generator, shape, generator.choice(DTYPES))
        for part, (rank, box) in enumerate(cut(generator, shape, world)):
            name = f"t{number}"
            if name in step.boxes[rank]:  # one box of a name in a rank: take the next free rank
                free = [index for index in range(step.world) if name not in step.boxes[index]]
                if not free:
                    step.world += 1
                    step.boxes.append({})
                    free = [step.world - 1]
                rank = free[part % len(free)]
            step.add(rank, name, take(tensor, box), box, shape)
        for _, box in cut(generator, shape, 1):
            data = torch.zeros(box.sizes, dtype=tensor.dtype)
            if generator.random() < 0.3 and data.dim() > 1:
                data = torch.zeros(box.sizes[::-1], dtype=tensor.dtype).permute(
                    *reversed(range(len(box.sizes)))
                )
            requests.append(TensorRequest(f"t{number}", box))
            targets.append(data)
            expected.append(take(tensor, box))
    size = fill(step, tmp_path, requests, targets, rank=generator.randrange(4))
    assert size == sum(tensor.numel() * tensor.element_size() for tensor in expected)
    for target, value in zip(targets, expected, strict=True):
        assert torch.equal(bits(target), bits(value))


@pytest.mark.parametrize("seed", range(40))
def test_any_flat_ranges_can_be_reassembled_into_any_boxes_and_ranges(tmp_path, seed):
    generator = random.Random(seed)
    print(f"seed {seed}")
    shape = tuple(generator.randrange(1, 7) for _ in range(generator.randrange(5)))
    tensor = some(generator, shape, generator.choice(DTYPES))
    saved, cuts = ranges(generator, shape), ranges(generator, shape)
    step = Step(len(saved))
    for rank, (flat, begin, end) in enumerate(saved):
        step.add_range(rank, "t", elements(tensor, flat)[begin:end], begin, flat)
    requests, targets, expected = [], [], []
    for flat, begin, end in cuts:
        vector = torch.zeros(end - begin, dtype=tensor.dtype)
        parts = list(boxes_of_tensor(vector, (begin,), flat))
        assert len(parts) < max(2 * len(shape), 2)
        requests += [TensorRequest("t", box) for _, box in parts]
        targets += [part for part, _ in parts]
        expected.append((vector, elements(tensor, flat)[begin:end]))
    for _, box in cut(generator, shape, 1):
        requests.append(TensorRequest("t", box))
        targets.append(torch.zeros(box.sizes, dtype=tensor.dtype))
        expected.append((targets[-1], take(tensor, box)))
    fill(step, tmp_path, requests, targets)
    assert all(torch.equal(bits(found), bits(value)) for found, value in expected)


def ranges(generator, shape):
    """All of a tensor, in ranges of the elements of boxes."""
    found = []
    for _, box in cut(generator, shape, 1):
        flat, length = FlatBox(*box, shape), math.prod(box.sizes)
        cuts = sorted(generator.randrange(length + 1) for _ in range(generator.randrange(4)))
        found += [(flat, *pair) for pair in itertools.pairwise([0, *cuts, length])]
    return found


def elements(tensor, flat):
    return take(tensor, Box(flat.offsets, flat.sizes)).flatten()


@pytest.mark.parametrize("seed", range(60))
def test_the_blocks_of_all_ranges_cover_each_element_exactly_once(seed):
    generator = random.Random(seed)
    print(f"seed {seed}")
    sizes = tuple(generator.randrange(1, 7) for _ in range(generator.randrange(5)))
    low = tuple(generator.randrange(size) for size in sizes)
    extent = tuple(
        generator.randrange(1, size - at + 1) for size, at in zip(sizes, low, strict=True)
    )
    element, begin = 4, 4 * generator.randrange(20)
    piece = Piece(0, begin, 0, sizes, low, extent, (0,) * len(sizes))
    image = torch.arange(begin // element + math.prod(sizes) + 5, dtype=torch.int32)
    saved = image[begin // element :][: math.prod(sizes)].view(sizes)
    expected = take(saved, Box(low, extent))
    result, times = torch.full(extent, -1, dtype=torch.int32), torch.zeros(extent)
    step = element * generator.randrange(1, 30)
    first, last = byte_range(piece, element)
    flat = image.view(torch.uint8)
    for at in range(0, len(flat), step):
        found = list(blocks_in_range(piece, element, at, at + step))
        assert not found or (at < last and at + step > first)
        assert len(found) <= 2 * max(1, len(sizes))
        for block in found:
            size = math.prod(block.sizes) * element
            assert at <= block.begin
            assert block.begin + size <= at + step
            place = tuple(slice(a, a + n) for a, n in zip(block.at, block.extent, strict=True))
            result[place] = block_view(flat, torch.int32, block, 0)
            times[place] += 1
    assert torch.equal(result, expected)
    assert bool((times == 1).all())


def test_coverage_reports_gaps_and_overlaps():
    lows = torch.tensor([[0, 0], [0, 5], [3, 2]])
    highs = torch.tensor([[4, 5], [3, 8], [4, 3]])
    found = count_coverage(lows, highs, Box((0, 0), (4, 8)))
    assert found is not None
    assert not found.complete
    assert list(found.gaps()) == [Box((3, 5), (1, 3))]
    assert list(found.find_overlapping_boxes()) == [Box((3, 2), (1, 1))]


def test_the_error_lists_every_missing_box_and_missing_file(tmp_path):
    step = Step(4)
    tensor = torch.arange(32.0).view(8, 4)
    for rank in range(4):
        box = Box((2 * rank, 0), (2, 4))
        step.add(rank, "model.w", take(tensor, box), box, (8, 4))
        step.add(rank, "model.b", take(tensor, box), box, (8, 4))
    targets = [torch.zeros(8, 4), torch.zeros(8, 4)]
    requests = [TensorRequest("model.w", whole((8, 4))), TensorRequest("model.b", whole((8, 4)))]
    with pytest.raises(CoverageError) as caught:
        fill(step, tmp_path, requests, targets, without=(1, 2))
    text = str(caught.value)
    assert "model.w: no rank holds offsets [2, 0], sizes [4, 4]" in text
    assert "model.b: no rank holds offsets [2, 0], sizes [4, 4]" in text
    assert "rank-00001-of-00004.safetensors, rank-00002-of-00004.safetensors" in text
    assert all(not target.any() for target in targets)
    # what does not need the lost images is restored all the same
    part = [torch.zeros(2, 4)]
    fill(step, tmp_path, [TensorRequest("model.w", Box((6, 0), (2, 4)))], part, without=(1, 2))
    assert torch.equal(part[0], tensor[6:])


def test_boxes_that_overlap_by_mistake_are_refused_with_both_files(tmp_path):
    step = Step(2)
    tensor = torch.arange(10.0)
    for rank, box in enumerate([Box((0,), (6,)), Box((5,), (5,))]):
        step.add(rank, "model.w", take(tensor, box), box, (10,))
    target = torch.zeros(10)
    with pytest.raises(
        CoverageError, match=r"offsets \[5\], sizes \[1\] is in .*overlap"
    ) as caught:
        fill(step, tmp_path, [TensorRequest("model.w", whole((10,)))], [target])
    assert "rank-00000-of-00002" in str(caught.value)
    assert "rank-00001-of-00002" in str(caught.value)
    assert not target.any()


def test_complete_replicas_with_different_shardings_are_accepted(tmp_path):
    step = Step(5)
    tensor = torch.arange(12.0)
    cuts = [(0, 0, 6), (1, 6, 12), (2, 0, 4), (3, 4, 8), (4, 8, 12)]
    for rank, low, high in cuts:
        box = Box((low,), (high - low,))
        step.add(rank, "model.w", take(tensor, box), box, (12,))
    target = torch.zeros(12)
    size = fill(step, tmp_path, [TensorRequest("model.w", whole((12,)))], [target])
    assert torch.equal(target, tensor)
    assert size >= 48
    # and when a node of one replica is gone, the other one serves
    target.zero_()
    fill(step, tmp_path, [TensorRequest("model.w", whole((12,)))], [target], without=(1,))
    assert torch.equal(target, tensor)


def test_a_name_with_two_dtypes_is_refused_with_both_files(tmp_path):
    step = Step(2)
    step.add(0, "model.w", torch.zeros(2), Box((0,), (2,)), (4,))
    step.add(1, "model.w", torch.zeros(2).bfloat16(), Box((2,), (2,)), (4,))
    match = r"F32\[4\] in rank-00000-of-00002.* but BF16\[4\] in rank-00001-of-00002"
    with pytest.raises(CoverageError, match=match):
        fill(step, tmp_path, [TensorRequest("model.w", whole((4,)))], [torch.zeros(4)])


def test_equal_boxes_are_read_from_different_images_by_different_ranks(tmp_path):
    step = Step(4)
    for rank in range(4):
        step.add(rank, "model.w", torch.full((3,), float(rank)), whole((3,)), (3,))
    read = []
    for rank in range(4):
        target = torch.zeros(3)
        fill(step, tmp_path, [TensorRequest("model.w", whole((3,)))], [target], rank=rank)
        read.append(target[0].item())
    assert read == [0, 1, 2, 3]
