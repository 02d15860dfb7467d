"""What a hostile header or extras may cost: memory by their size, and time that grows no faster."""

from __future__ import annotations

import contextlib
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from keepstep.errors import FormatError, KeepstepError
from keepstep.image import FlatBox, Layout, TensorRole, TensorSpec, extras_codec
from keepstep.image.strictjson import Reader
from keepstep.restore.fill_plan import IndexBuilder
from tests.harness import peak_of
from tests.image.test_attacks import make

MEBIBYTE = 1 << 20
COUNT = 1 << 20


def dense() -> bytes:
    text = b'{"__metadata__":{"format":"pt"},"a":{"dtype":"U8","shape":[' + b"[]," * COUNT
    return make.with_header_text(text + b'1],"data_offsets":[0,1]}}')


def edited(key: str, value: Any) -> Callable[[], bytes]:
    return lambda: make.with_ours(lambda ours: ours.update(world=1 << 30, **{key: value}))


def wide() -> bytes:
    return make.with_ours(lambda ours: ours.update(skeleton="a" * (12 * COUNT) + "\U0001f600"))


HOSTILE = {
    "arrays where sizes are expected": dense,
    "arrays where nothing is expected": edited("later", [[]] * COUNT),
    "a million twins": edited("twins", list(range(1, COUNT))),
    "a million parameters": edited("parameters", {"a": [["", []]] * (COUNT // 4)}),
    "a million aliases": edited("aliases", {str(i): "mask" for i in range(COUNT // 8)}),
    "one character that takes four bytes for each": wide,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_takes_no_more_memory_than_eight_times_its_size(name: str) -> None:
    data = HOSTILE[name]()
    assert len(data) > 2 * MEBIBYTE
    assert peak_of(lambda: parsed(data)) < max(8 * len(data), 64 * MEBIBYTE)


def test_a_header_of_very_many_tensors_is_read_in_memory_that_its_size_bounds() -> None:
    specs = [TensorSpec(f"t{i}", "F32", (), TensorRole.PARAMS) for i in range(10_000)]
    header = Layout.build(specs, rank=0, world=1).header
    assert peak_of(lambda: Layout.parse(header)) < 8 * len(header)
    assert len(Layout.parse(header).entries) == len(specs)


def test_memory_for_reading_a_header_of_boxes_is_bounded_by_its_size() -> None:
    flat = FlatBox((0, 0, 0, 0, 1), (3, 3, 3, 3, 3), (3, 3, 3, 3, 9))
    specs = [
        TensorSpec(f"t{i}", "F32", (241,), TensorRole.PARAMS, (1,), (243,), flat=flat)
        for i in range(10_000)
    ]
    header = Layout.build(specs, rank=0, world=1).header
    assert peak_of(lambda: Layout.parse(header)) < 8 * len(header)
    layout, builder = Layout.parse(header), IndexBuilder(1)
    assert peak_of(lambda: builder.add_image(layout)) < 8 * len(header)
    assert len(builder.build().tensors["t0"].box_rows) == 9


def test_the_number_of_names_is_bounded_by_the_length_of_the_text() -> None:
    def read(count: int) -> int:
        text = json.dumps({str(i): 0 for i in range(count)})
        return sum(
            reader.value() == 0
            for reader in [Reader(text, what="x")]
            for _ in reader.iterate_keys()
        )

    assert read(50_000) == 50_000
    with pytest.raises(FormatError, match="too many names for"):
        read(150_000)


@pytest.mark.parametrize("tag", ["!set", "!frozenset", "!dict", "!counter"])
def test_integers_that_collide_are_refused_before_they_take_quadratic_time(tag: str) -> None:
    keys: list[Any] = [{"!int": hex(i * ((1 << 61) - 1) + 7)} for i in range(20_000)]
    value = keys if "set" in tag else [[key, 0] for key in keys]
    text, began = json.dumps({tag: value}).encode(), time.process_time()
    with pytest.raises(FormatError, match="keys have one hash"):
        extras_codec.decode(text)
    assert time.process_time() - began < 2


def test_a_set_of_large_integers_survives_a_round_trip() -> None:
    value = {1 << i for i in range(1000)} | {-1, -2, 1 << 61, 0.5}
    assert extras_codec.decode(extras_codec.encode(value)) == value


def test_deep_nesting_is_refused_even_with_a_raised_recursion_limit(
    tmp_path: pathlib.Path,
) -> None:
    """In a process of its own: what overflows the stack of C ends it."""
    script = tmp_path / "deep.py"
    script.write_text(
        "import sys\n"
        "from keepstep.errors import FormatError\n"
        "from keepstep.image import extras_codec, layout\n"
        "sys.setrecursionlimit(10**6)\n"
        "deep = b'[' * 900_000\n"
        "header = bytes(8) + b'{\"a\":' + deep\n"
        "for parse, text in [(extras_codec.decode, deep), (layout.parse_header, header)]:\n"
        "    try:\n"
        "        parse(text)\n"
        "    except FormatError as error:\n"
        "        print(error)\n"
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.count("nested too deeply")) == (0, 2), ended


def parsed(data: bytes) -> None:
    with contextlib.suppress(KeepstepError):
        Layout.parse(data)
