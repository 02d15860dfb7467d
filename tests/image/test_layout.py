"""Layouts: what is built is what is read, and bytes lie where torch can view them."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keepstep.errors import FormatError, TornError
from keepstep.image import HUGE_PAGE_BYTES, PAGE_BYTES, Layout, TensorRole, TensorSpec
from keepstep.image.layout import CHUNK_BYTES, LEAST_ON_HUGE_PAGES_BYTES, blake2b_digest
from keepstep.image.xxh3 import DIGEST_BYTES
from tests.image.strategies import tensor_lists

WEIGHT = TensorSpec("weight", "F32", (2, 3), TensorRole.PARAMS)


def build(*specs: TensorSpec, **options: object) -> Layout:
    return Layout.build(specs, **{"rank": 0, "world": 1, **options})


@settings(max_examples=150)
@given(tensor_lists, st.integers(0, 3), st.integers(0, 20_000), st.text(max_size=8))
def test_a_layout_reads_back_as_it_was_built(specs, rank, capacity, skeleton) -> None:
    layout = build(*specs, rank=rank, world=4, skeleton=skeleton, extras_capacity_bytes=capacity)
    read = Layout.parse(layout.header + b"and the data", size_bytes=layout.size_bytes)
    assert {entry.spec for entry in read.entries.values()} == set(specs)
    assert (read.rank, read.world, read.skeleton) == (rank, 4, skeleton)
    assert read.id == blake2b_digest(layout.header).hex()
    assert read == layout


@settings(max_examples=150)
@given(st.integers(0, 4 << 30), st.integers(0, 3 << 20), st.text(max_size=8))
@example(size=2**31 - 3 * 4096, capacity=0, skeleton="")
def test_the_size_of_an_image_of_at_least_64_mib_is_a_multiple_of_huge_pages(
    size, capacity, skeleton
) -> None:
    tensor = TensorSpec("weight", "U8", (size,), TensorRole.PARAMS)
    layout = build(tensor, extras_capacity_bytes=capacity, skeleton=skeleton)
    least = size + capacity
    assert layout.size_bytes < least + 2 * HUGE_PAGE_BYTES + (least >> 15)
    if layout.size_bytes >= LEAST_ON_HUGE_PAGES_BYTES + HUGE_PAGE_BYTES:
        assert layout.size_bytes % HUGE_PAGE_BYTES == 0
    assert Layout.parse(layout.header, size_bytes=layout.size_bytes) == layout


def test_a_small_image_is_not_padded_to_huge_pages() -> None:
    layout = build(TensorSpec("weight", "U8", (1 << 20,), TensorRole.PARAMS))
    assert layout.size_bytes < (1 << 20) + 8 * PAGE_BYTES


@settings(max_examples=150)
@given(tensor_lists, st.integers(0, 20_000))
def test_tensors_tile_the_data_and_every_start_suits_its_dtype(specs, capacity) -> None:
    layout = build(*specs, extras_capacity_bytes=capacity)
    at = len(layout.header)
    for entry in layout.entries.values():
        assert entry.begin == at
        assert entry.begin % min(entry.spec.element_bytes, 8) == 0
        at = entry.end
    assert layout.extras_begin == at
    assert layout.extras_capacity_bytes >= capacity
    for begin in (len(layout.header), layout.digests_begin, layout.control_begin):
        assert begin % PAGE_BYTES == 0
    assert layout.size_bytes == layout.control_begin + PAGE_BYTES


@settings(max_examples=100)
@given(tensor_lists)
def test_the_extents_of_each_section_cover_exactly_its_tensors(specs) -> None:
    layout = build(*specs)
    for section in TensorRole:
        extents = layout.section_extents.get(section, ())
        covered = {at for begin, end in extents for at in range(begin, end)}
        entries = [entry for entry in layout.entries.values() if entry.spec.section is section]
        assert covered == {at for entry in entries for at in range(entry.begin, entry.end)}
        assert all(a[1] < b[0] for a, b in itertools.pairwise(extents))


@pytest.mark.parametrize("gibibytes", [1, 2, 2.01, 5, 4000])
def test_the_digest_table_grows_with_the_image(gibibytes: float) -> None:
    layout = build(TensorSpec("w", "U8", (int(gibibytes * (1 << 30)),), TensorRole.PARAMS))
    assert layout.chunk_count == -(-layout.digests_begin // CHUNK_BYTES)
    spare = layout.control_begin - layout.digests_begin - layout.chunk_count * DIGEST_BYTES
    assert 0 <= spare < PAGE_BYTES


def test_the_order_in_which_tensors_are_named_does_not_change_the_layout() -> None:
    specs = [WEIGHT._replace(name=str(i), dtype=d) for i, d in enumerate(["F32", "C128", "I8"])]
    assert build(*specs) == build(*reversed(specs))
    assert [entry.spec.dtype for entry in build(*specs).entries.values()] == ["C128", "F32", "I8"]


def test_the_header_contains_no_step_or_digest_and_lists_every_key_for_dcp() -> None:
    tree = json.loads(build(WEIGHT).header[8:])
    metadata = tree.pop("__metadata__")
    assert set(metadata) == {"format", "DCP_VERSION", "DCP_SHARDING_INFO", "keepstep"}
    assert json.loads(metadata["DCP_SHARDING_INFO"]).keys() == tree.keys()
    assert json.loads(metadata["keepstep"]).keys() == {
        "format_version",
        "rank",
        "world",
        "aliases",
        "skeleton",
    }


def test_readers_ignore_unknown_fields_in_the_metadata() -> None:
    layout = build(WEIGHT)
    text = layout.header[8:].replace(b'\\"skeleton\\"', b'\\"later\\":[1],\\"skeleton\\"')
    header = layout.header[:8] + text[: len(layout.header) - 8]
    assert Layout.parse(header).entries == layout.entries


@pytest.mark.parametrize(
    ("specs", "options", "message"),
    [
        ([WEIGHT, WEIGHT], {}, "two tensors are named 'weight'"),
        ([WEIGHT._replace(name="keepstep.extras.0")], {}, "reserved"),
        ([WEIGHT._replace(name="__metadata__")], {}, "reserved"),
        ([WEIGHT._replace(name="\ud800")], {}, "valid Unicode"),
        ([WEIGHT._replace(dtype="F1")], {}, "unknown dtype 'F1'"),
        ([WEIGHT._replace(offsets=(1, 0))], {}, "outside of its global shape"),
        ([WEIGHT._replace(global_shape=(2,))], {}, "outside of its global shape"),
        ([WEIGHT], {"aliases": {"head": "body"}}, "means no tensor"),
        ([WEIGHT], {"rank": 1}, "rank: 1 is not an integer from 0 to 0"),
    ],
)
def test_a_layout_that_readers_would_refuse_cannot_be_built(specs, options, message) -> None:
    with pytest.raises(FormatError, match=message):
        build(*specs, **options)


def test_a_file_of_another_size_is_refused() -> None:
    layout = build(WEIGHT)
    with pytest.raises(TornError, match="truncated"):
        Layout.parse(layout.header, size_bytes=layout.size_bytes - 1)
    with pytest.raises(FormatError, match="but the image has"):
        Layout.parse(layout.header, size_bytes=layout.size_bytes + 1)


def test_headers_of_two_ranks_share_only_the_keys_of_common_tensors() -> None:
    keys = [set(json.loads(build(WEIGHT, rank=rank, world=2).header[8:])) for rank in (0, 1)]
    assert keys[0] & keys[1] == {"__metadata__", "weight"}
