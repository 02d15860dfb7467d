"""Every byte of a shard is vouched for, and what is damaged is named."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from keepstep.errors import DigestError, ForeignError, TornError, VersionError
from keepstep.image import (
    ControlPage,
    Layout,
    TensorRole,
    TensorSpec,
    digest_table,
    section_digests,
)
from keepstep.image.control_page import Manifest
from keepstep.image.layout import CHUNK_BYTES
from keepstep.image.xxh3 import xxh3_128
from keepstep.steps import StepId
from tests.harness import digests, verify_image
from tests.image.images import EPOCH, noise, seal, stage

SMALL = Layout.build(
    [
        TensorSpec("moment", "F64", (3,), TensorRole.OPTIMIZER),
        TensorSpec("weight", "F32", (5,), TensorRole.PARAMS),
        TensorSpec("mask", "BOOL", (3,), TensorRole.REST),
    ],
    rank=0,
    world=1,
    extras_capacity_bytes=10,
)
LARGE = Layout.build(
    [
        TensorSpec("moment", "U8", (CHUNK_BYTES * 5 // 2,), TensorRole.OPTIMIZER),
        TensorSpec("weight", "U8", (CHUNK_BYTES,), TensorRole.PARAMS),
        TensorSpec("none", "U8", (0,), TensorRole.PARAMS),
    ],
    rank=0,
    world=1,
)


@pytest.fixture(scope="module")
def small() -> bytes:
    return bytes(seal(SMALL, stage(SMALL, noise(SMALL), kept={"epoch": 7})))


@pytest.fixture(scope="module")
def large() -> bytes:
    data = bytearray(LARGE.size_bytes)
    data[: len(LARGE.header)] = LARGE.header
    for at in range(len(LARGE.header), LARGE.extras_begin, 4099):
        data[at] = at % 251
    data[LARGE.control_begin :] = stage(SMALL, {})[SMALL.control_begin :]
    page = ControlPage.from_bytes(memoryview(data)[LARGE.control_begin :])
    data[LARGE.control_begin :] = replace(page, layout=LARGE.id).to_bytes()
    return bytes(seal(LARGE, data))


def test_a_sealed_image_passes_verification_and_returns_its_step_and_sections(small: bytes) -> None:
    control = verify_image(memoryview(small), SMALL)
    assert control.step_id == StepId(EPOCH.id, 1200)
    assert control.sections is not None
    assert control.sections.keys() == {"optimizer", "params", "rest"}


def test_one_flipped_bit_in_any_byte_is_found(small: bytes) -> None:
    regions = [
        range(0, 64),
        range(64, len(SMALL.header), 61),
        range(len(SMALL.header), SMALL.extras_begin + 40),
        range(SMALL.extras_begin + 40, SMALL.digests_begin, 61),
        range(SMALL.digests_begin, SMALL.digests_begin + 32),
        range(SMALL.digests_begin + 32, SMALL.control_begin, 61),
        range(SMALL.control_begin, SMALL.size_bytes, 61),
        [SMALL.digests_begin - 1, SMALL.control_begin - 1, SMALL.size_bytes - 1],
    ]
    for at in itertools.chain(*regions):
        data = bytearray(small)
        data[at] ^= 1 << at % 8
        with pytest.raises((DigestError, TornError)):
            verify_image(memoryview(data), SMALL)


def test_a_damaged_chunk_is_named_with_the_tensors_in_it(large: bytes) -> None:
    data = bytearray(large)
    data[2 * CHUNK_BYTES + 5] ^= 1
    with pytest.raises(DigestError, match=r"chunk 2 .*moment, weight") as caught:
        verify_image(memoryview(data), LARGE, path="shard")
    assert caught.value.chunk == 2
    assert caught.value.tensors == ("moment", "weight")
    assert str(caught.value).startswith("shard: ")


def test_the_error_for_a_damaged_chunk_names_its_first_tensors_and_counts_the_rest() -> None:
    specs = [TensorSpec(f"t{number}", "F32", (1,), TensorRole.PARAMS) for number in range(6)]
    layout = Layout.build(specs, rank=0, world=1)
    data = seal(layout, stage(layout, noise(layout)))
    data[layout.entries["t0"].begin] ^= 1
    with pytest.raises(DigestError, match=r"holds t0, t1, t2, t3 and 3 more; use another copy"):
        verify_image(memoryview(data), layout)


def test_a_sections_digest_is_that_of_its_chunks_and_fragments(large: bytes) -> None:
    view = memoryview(large)
    table = digest_table(LARGE, digests(LARGE, view))
    entry = LARGE.entries["moment"]
    pieces = [
        xxh3_128(view[entry.begin : CHUNK_BYTES]),
        table[16:32],
        xxh3_128(view[2 * CHUNK_BYTES : entry.end]),
    ]
    found = section_digests(LARGE, view, table)
    assert found["optimizer"] == xxh3_128(b"".join(pieces)).hex()
    assert found.keys() == {"optimizer", "params"}


@pytest.mark.parametrize("changed", ["moment", "weight", "mask"])
def test_a_sections_digest_changes_with_its_tensors_only(changed: str) -> None:
    content = noise(SMALL)
    before = _sections(content)
    content[changed] = bytes(len(content[changed]))
    after = _sections(content)
    section = SMALL.entries[changed].spec.section.value
    assert {name for name in before if before[name] != after[name]} == {section}


def _sections(content: dict[str, bytes]) -> dict[str, str]:
    view = memoryview(stage(SMALL, content))
    return section_digests(SMALL, view, digest_table(SMALL, digests(SMALL, view)))


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"run": "other"}, "of run demo, not of other"),
        ({"step_id": StepId(EPOCH.id, 7)}, "of step"),
    ],
)
def test_an_image_of_another_run_or_step_is_refused_as_foreign(
    small: bytes, expected, message
) -> None:
    with pytest.raises(ForeignError, match=message):
        verify_image(memoryview(small), SMALL, **expected)


def test_errors_about_files_contain_their_path(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(b"")
    with pytest.raises(TornError, match=r"/shard: truncated") as caught:
        _manifest(path)
    assert caught.value.path == path
    path.write_bytes(
        SMALL.header.replace(b'format_version\\":1', b'format_version\\":2') + bytes(9000)
    )
    with pytest.raises(VersionError, match=r"/shard: format version 2.*newer one"):
        _manifest(path)


def _manifest(path: Path) -> Manifest:
    data = path.read_bytes()
    return Manifest.read(lambda begin, end: data[begin:end], len(data), path=path)
