"""A reader that was written from the bullets of docs/format.md alone reads an image."""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

import pytest
import xxhash

from keepstep.image import Layout, TensorRole, TensorSpec
from tests.image.images import noise, seal, stage

CHUNK = 8 << 20


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def read(data: bytes) -> tuple[dict[str, bytes], Any]:
    """The tensors and the extras; AssertionError or ValueError if a bullet is broken."""
    assert len(data) % 4096 == 0
    begin = 8 + int.from_bytes(data[:8], "little")
    assert begin % 4096 == 0
    assert begin <= min(len(data), 100_000_000)
    header = json.loads(data[8:begin], object_pairs_hook=_once)
    about = json.loads(header.pop("__metadata__")["keepstep"])
    assert about["format_version"] == 1
    assert _hash(data[-4096:-32]) == data[-32:].decode()
    page = json.loads(data[-4096:-32])
    assert page["layout"] == _hash(data[:begin])
    assert (page["rank"], page["world"]) == (about["rank"], about["world"])
    at, parts = begin, {}
    for name, entry in header.items():
        first, last = (begin + offset for offset in entry["data_offsets"])
        assert first == at
        at, parts[name] = last, (first, last)
    assert at == len(data)
    table_at, table_end = parts[f"keepstep.digests.{page['rank']}"]
    table = data[table_at:table_end]
    assert xxhash.xxh3_128_hexdigest(table) == page["root"]
    for i, chunk in enumerate(range(0, table_at, CHUNK)):
        found = xxhash.xxh3_128_digest(data[chunk : min(chunk + CHUNK, table_at)])
        assert found == table[16 * i : 16 * i + 16]
    extras_at, _ = parts[f"keepstep.extras.{page['rank']}"]
    extras = json.loads(data[extras_at : extras_at + page["extras_bytes"]])
    named = {name: data[a:b] for name, (a, b) in parts.items() if not name.startswith("keepstep.")}
    return named, extras


@pytest.fixture(scope="module")
def image() -> tuple[bytes, dict[str, bytes]]:
    specs = [
        TensorSpec("model.weight", "F32", (1100, 2048), TensorRole.PARAMS),
        TensorSpec("model.steps", "I64", (), TensorRole.REST),
        TensorSpec("model.mask", "BOOL", (3, 5), TensorRole.REST),
    ]
    layout = Layout.build(specs, rank=0, world=1)
    content = noise(layout)
    return bytes(seal(layout, stage(layout, content, kept={"epoch": 7}))), content


def test_the_example_reader_reads_the_saved_state(image: tuple[bytes, dict[str, bytes]]) -> None:
    data, content = image
    assert read(data) == (content, {"epoch": 7})


def test_the_reader_refuses_any_changed_byte(image: tuple[bytes, dict[str, bytes]]) -> None:
    data, _ = image
    chance = random.Random(0)
    for place in (0, 8, len(data) - 1, *(chance.randrange(len(data)) for _ in range(20))):
        broken = bytearray(data)
        broken[place] ^= 1 << chance.randrange(8)
        with pytest.raises((AssertionError, ValueError, KeyError)):
            read(bytes(broken))
