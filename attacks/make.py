"""Makes the hostile files of this folder, and the table in README.md: `python attacks/make.py`.

Each is a small image with one lie in it. Everything after the lie is sealed again as its author
would, so that a file is refused for the reason that the table names and for no other. The files are
checked in; `tests/image/test_attacks.py` checks that they are what this script makes, and that each
is refused with the error and the words of the table, without a large allocation.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from keepstep.errors import (
    DigestError,
    ForeignError,
    FormatError,
    ImageError,
    TornError,
    VersionError,
)
from keepstep.image import (
    ControlPage,
    Layout,
    TensorRole,
    TensorSpec,
    chunk_bounds,
    extras_codec,
    seal_for_disk,
)
from keepstep.image.layout import blake2b_digest
from keepstep.image.xxh3 import xxh3_128
from keepstep.steps import Epoch, EpochId, StepId

HERE = pathlib.Path(__file__).parent
RUN = "demo"
ID = StepId(EpochId(3, "1f9c2d7a"), 1200)

Edit = Callable[[dict[str, Any]], object]


@dataclass(frozen=True)
class Attack:
    """One file, and how a reader that expects run `RUN` and step `ID` must refuse it."""

    name: str
    error: type[ImageError]
    message: str
    data: bytes

    @property
    def path(self) -> pathlib.Path:
        return HERE / f"{self.name}.safetensors"


# --- an honest image ---------------------------------------------------------------------------


def layout(*, rank: int = 0) -> Layout:
    """Three tensors of 8, 4 and 1 bytes an element, one of them a box of something larger."""
    return Layout.build(
        [
            TensorSpec("exp_avg", "F64", (5,), TensorRole.OPTIMIZER),
            TensorSpec("weight", "F32", (2, 4), TensorRole.PARAMS, (2, 0), (4, 4)),
            TensorSpec("mask", "BOOL", (7,), TensorRole.REST),
        ],
        rank=rank,
        world=2,
        aliases={"head": "weight"},
    )


def control(layout: Layout, **changes: Any) -> ControlPage:
    """The page of an image of `ID` that was staged."""
    page = ControlPage(
        run=RUN,
        layout=layout.id,
        epoch=Epoch(ID.epoch),
        rank=layout.rank,
        world=layout.world,
        step=ID.step,
        extras_bytes=len(extras_codec.encode({"epoch": 7})),
        staged_at=1.0,
        written_at=2.0,
    )
    return replace(page, **changes)


def image(kept: bytes | None = None, *, rank: int = 0, **changes: Any) -> bytes:
    """A whole shard, sealed; `kept` in place of the extras, `changes` in the control page."""
    place = layout(rank=rank)
    kept = extras_codec.encode({"epoch": 7}) if kept is None else kept
    data = bytearray(place.size_bytes)
    data[: len(place.header)] = place.header
    for at in range(len(place.header), place.extras_begin):
        data[at] = at % 2
    data[place.extras_begin : place.extras_begin + len(kept)] = kept
    page = control(place, **{"extras_bytes": len(kept), **changes})
    view = memoryview(data)
    chunks = (chunk_bounds(place, chunk) for chunk in range(place.chunk_count))
    digests = [xxh3_128(view[begin:end]) for begin, end in chunks]
    table, sealed = seal_for_disk(place, view, page, digests=digests)
    data[place.digests_begin :] = table + sealed
    return bytes(data)


# --- lies ---------------------------------------------------------------------------------------


def with_header(edit: Edit) -> bytes:
    """The image with an edited header. Its id and its seal are those of the honest one."""
    length = len(layout().header)
    tree = json.loads(image()[8:length])
    edit(tree)
    return with_header_text(json.dumps(tree).encode())


def with_header_text(text: bytes) -> bytes:
    """The image with another text for a header, padded to whole pages."""
    padded = -(-(len(text) + 8) // 4096) * 4096 - 8
    return padded.to_bytes(8, "little") + text.ljust(padded) + image()[len(layout().header) :]


def with_ours(edit: Edit) -> bytes:
    """The image with edited metadata of ours."""

    def change(tree: dict[str, Any]) -> None:
        ours = json.loads(tree["__metadata__"]["keepstep"])
        edit(ours)
        tree["__metadata__"]["keepstep"] = json.dumps(ours)

    return with_header(change)


def with_boxes(edit: Edit) -> bytes:
    """The image with edited DCP_SHARDING_INFO."""

    def change(tree: dict[str, Any]) -> None:
        boxes = json.loads(tree["__metadata__"]["DCP_SHARDING_INFO"])
        edit(boxes)
        tree["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(boxes)

    return with_header(change)


def with_control(text: bytes) -> bytes:
    """The image with another text in its control page, validly sealed."""
    page = text.rstrip().ljust(4064)
    return image()[:-4096] + page + blake2b_digest(page).hex().encode()


def flipped(at: int) -> bytes:
    """The image with one bit changed."""
    data = bytearray(image())
    data[at] ^= 1
    return bytes(data)


def resealed_table() -> bytes:
    """A table with a wrong digest, and a root and a seal that vouch for it."""
    place, data = layout(), bytearray(image())
    data[place.digests_begin] ^= 1
    table = data[place.digests_begin : place.control_begin]
    page = ControlPage.from_bytes(memoryview(data)[place.control_begin :])
    data[place.control_begin :] = replace(page, root=xxh3_128(table).hex()).to_bytes()
    return bytes(data)


def padded_table() -> bytes:
    """A table with a byte behind its last digest, and a root and a seal that vouch for it."""
    place, data = layout(), bytearray(image())
    data[place.control_begin - 1] = 1
    table = data[place.digests_begin : place.control_begin]
    page = ControlPage.from_bytes(memoryview(data)[place.control_begin :])
    data[place.control_begin :] = replace(page, root=xxh3_128(table).hex()).to_bytes()
    return bytes(data)


def move(name: str, begin: int, end: int) -> Edit:
    """Give a tensor other bytes."""
    return lambda tree: tree[name].update(data_offsets=[begin, end])


def attacks() -> Iterator[Attack]:
    """All of them."""
    yield from truncations()
    yield from lengths()
    yield from places()
    yield from texts()
    yield from metadata()
    yield from seals()
    yield from kept()


def truncations() -> Iterator[Attack]:
    place, data = layout(), image()
    cuts = {
        "empty": 0,
        "in-length": 5,
        "in-header": 2000,
        "after-header": len(place.header),
        "in-tensors": len(place.header) + 9,
        "in-extras": place.extras_begin + 3,
        "before-digests": place.digests_begin,
        "before-control": place.control_begin,
        "in-control": place.size_bytes - 1,
    }
    for name, size in cuts.items():
        yield Attack(f"truncated-{name}", TornError, "truncated", data[:size])
    yield Attack("trailing-page", FormatError, "but the image has", data + bytes(4096))


def lengths() -> Iterator[Attack]:
    rest = image()[8:]
    for name, length, message in [
        ("2-63", 1 << 63, "at most"),
        ("2-64", (1 << 64) - 1, "at most"),
        ("100-mb", 99_999_736, "truncated|whole number of pages"),
        ("zero", 0, "whole number of pages"),
        ("unaligned", 4000, "whole number of pages"),
    ]:
        error = TornError if name == "100-mb" else FormatError
        yield Attack(f"length-{name}", error, message, length.to_bytes(8, "little") + rest)


def places() -> Iterator[Attack]:
    for name, edit in {
        "overlap": move("weight", 32, 64),
        "gap": move("weight", 48, 80),
        "reversed": move("weight", 72, 40),
        "beyond-end": move("weight", 40, 1 << 60),
        "no-size": lambda tree: tree["weight"].update(shape=[2, 3]),
        "wrong-element-size": lambda tree: tree["exp_avg"].update(dtype="F32"),
        "huge-shape": lambda tree: tree["exp_avg"].update(shape=[1 << 61]),
    }.items():
        yield Attack(f"place-{name}", FormatError, "must have", with_header(edit))
    many = with_header(lambda tree: tree["weight"].update(shape=[1] * 10_000))
    yield Attack("place-many-dimensions", FormatError, "not a row of sizes", many)
    for name, edit in {
        "negative": move("exp_avg", -40, 0),
        "negative-shape": lambda tree: tree["weight"].update(shape=[-2, -4]),
        "fraction": lambda tree: tree["weight"].update(data_offsets=[40.0, 72.0]),
    }.items():
        yield Attack(f"place-{name}", FormatError, "not a row of sizes", with_header(edit))
    unaligned = Layout.build([TensorSpec("b", "F64", (1,), TensorRole.REST)], rank=0, world=1)
    tree = json.loads(unaligned.header[8:])
    boxes = json.loads(tree["__metadata__"]["DCP_SHARDING_INFO"])
    tree["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps({"a": {"saved_offsets": [0]}, **boxes})
    first = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    text = json.dumps({"__metadata__": tree.pop("__metadata__"), **first, **tree}).encode()
    yield Attack("place-unaligned", FormatError, "does not suit F64", with_header_text(text))


def texts() -> Iterator[Attack]:
    honest = json.dumps(json.loads(image()[8 : len(layout().header)]))
    twice = honest[:-1] + ', "mask": {"dtype": "BOOL", "shape": [7], "data_offsets": [0, 7]}}'
    for name, text, message in [
        ("duplicate-key", twice, "comes twice"),
        ("deep", '{"a":' + "[" * 20_000 + "]" * 20_000 + "}", "too deeply"),
        ("array", "[" + honest + "]", "not a JSON object"),
        ("not-json", honest[:-2], "not JSON"),
        ("nan", '{"a": NaN}', "not JSON"),
        ("endless-number", '{"a": ' + "9" * 20_000 + "}", "not JSON"),
        ("plain-safetensors", '{"__metadata__": {"format": "pt"}}', "not written by keepstep"),
    ]:
        yield Attack(f"json-{name}", FormatError, message, with_header_text(text.encode()))
    latin = with_header_text(honest.replace("mask", "m\xe4sk").encode("latin-1"))
    yield Attack("json-not-utf8", FormatError, "not JSON", latin)
    surrogate = with_header_text(honest.replace("mask", "\\ud800").encode())
    yield Attack("json-surrogate", FormatError, "reserved entries|valid Unicode", surrogate)
    half = with_header_text(honest.replace('"format": "pt"', '"format": "\\ud800"').encode())
    yield Attack("json-surrogate-in-metadata", FormatError, "valid Unicode", half)


MANY = [1, 1, 1, 1, 1, 5]


def metadata() -> Iterator[Attack]:
    for name, edit, message in [
        ("future-version", lambda ours: ours.update(format_version=2), "newer one"),
        ("version-word", lambda ours: ours.update(format_version="1"), "not an integer"),
        ("rank-beyond-world", lambda ours: ours.update(rank=2), "not an integer from 0 to 1"),
        ("alias-of-nothing", lambda ours: ours.update(aliases={"a": "b"}), "no tensor"),
        ("alias-of-itself", lambda ours: ours.update(aliases={"mask": "mask"}), "and a tensor"),
    ]:
        error = VersionError if name == "future-version" else FormatError
        yield Attack(f"metadata-{name}", error, message, with_ours(edit))
    for name, tensor, row, message in [
        ("section-unknown", "mask", {"section": "heads"}, "not a section"),
        ("section-unhashable", "mask", {"section": ["params"]}, "not a section"),
        ("device-unknown", "mask", {"device": "cuda:12345"}, "not a device"),
        ("dtype-unknown", "mask", {"dtype": "F1"}, "unknown dtype"),
        ("dtype-lie", "mask", {"dtype": "C128"}, "not stored as bytes"),
        ("vector-lie", "exp_avg", {"unflattened_shape": [3, 2]}, "vector"),
        ("box-outside", "weight", {"global_shape": [3, 4]}, "outside"),
        ("box-of-no-name", "weight", {"tensor": 5}, "not a string"),
        ("flat-box-lie", "exp_avg", {"flat_box": [[0, 0], [2, 3], [4, 3]]}, "no range"),
        ("flat-box-outside", "exp_avg", {"flat_box": [[3], [5], [7]]}, "outside"),
        ("flat-box-of-many-dimensions", "exp_avg", {"flat_box": [[0] * 6, MANY, MANY]}, "no box"),
    ]:
        data = with_boxes(lambda boxes, tensor=tensor, row=row: boxes[tensor].update(row))
        yield Attack(f"metadata-{name}", FormatError, message, data)
    swapped = with_boxes(lambda boxes: boxes.update(exp_avg=boxes.pop("exp_avg")))
    yield Attack("metadata-box-order", FormatError, "in order", swapped)
    number = with_header(lambda tree: tree["__metadata__"].update(version=1))
    yield Attack("metadata-no-string", FormatError, "a string is needed", number)
    missing = with_boxes(lambda boxes: boxes.pop("mask"))
    yield Attack("metadata-box-missing", FormatError, "exactly the tensors", missing)
    flat = with_boxes(lambda boxes: boxes["weight"].update(saved_offsets=[0]))
    yield Attack("metadata-box-flat", FormatError, "do not suit", flat)
    unknown = with_header(lambda tree: tree["mask"].update(dtype="F1"))
    yield Attack("header-dtype-unknown", FormatError, "unknown dtype", unknown)
    renamed = with_header_text(image()[8 : len(layout().header)].replace(b"mask", b"keepstep.x"))
    yield Attack("header-reserved-name", FormatError, "reserved", renamed.rstrip())
    control = with_header(lambda tree: tree.pop("keepstep.control.0"))
    yield Attack("header-no-control", FormatError, "reserved entries", control)


def seals() -> Iterator[Attack]:
    place, data = layout(), image()
    torn = data[:-4096] + bytes(4096)
    yield Attack("seal-zeroed", TornError, "zeroed", torn)
    yield Attack("seal-flipped", TornError, "no valid seal", flipped(-1))
    yield Attack("seal-old-page", TornError, "no valid seal", flipped(place.control_begin + 20))
    half = data[: place.control_begin + 512] + bytes(3584)
    yield Attack("seal-half-written", TornError, "no valid seal", half)
    honest = data[place.control_begin : -32]
    future = honest.replace(b'"format_version":1', b'"format_version":2')
    yield Attack("control-future-version", VersionError, "newer one", with_control(future))
    for name, text, message in [
        ("not-json", b"x", "not JSON"),
        ("array", b"[]", "not a JSON object"),
        ("deep", b"[" * 4000, "too deeply|not JSON"),
        ("no-epoch", honest.replace(b'"epoch"', b'"epoxy"'), "epoch"),
        ("rank-beyond-world", honest.replace(b'"rank":0', b'"rank":2'), "rank 2 of 2"),
        ("huge-step", honest.replace(b'"step":1200', b'"step":' + b"9" * 40), "not an integer"),
        ("bad-root", honest.replace(b'"root":"', b'"root":"x'), "not a digest"),
        ("endless-time", honest.replace(b":1.0", b":1e999"), "not a time"),
        ("huge-time", honest.replace(b":1.0", b":1" + b"0" * 400), "not a time"),
        ("nameless-step", honest.replace(b'"step":1200', b'"step":1' + b"0" * 18), "a step has"),
        ("nameless-epoch", honest.replace(b"1f9c2d7a", b"1f9c2d7a\\n"), "not an epoch"),
        ("run-empty", honest.replace(b'"demo"', b'""'), "not the name of a run"),
        ("run-path", honest.replace(b'"demo"', b'"../../x"'), "not the name of a run"),
        ("run-line", honest.replace(b'"demo"', b'"a\\nb"'), "not the name of a run"),
    ]:
        yield Attack(f"control-{name}", FormatError, message, with_control(text))
    long = image(extras_bytes=1 << 40)
    yield Attack("control-extras-too-long", FormatError, "of extras in", long)
    yield Attack("foreign-run", ForeignError, "of run other", image(run="other"))
    yield Attack("foreign-step", ForeignError, "of step", image(step=1201))
    page = image(rank=1)[-4096:]
    yield Attack("foreign-control", ForeignError, "of layout", data[:-4096] + page)
    swapped = bytes(data).replace(b"exp_avg", b"exp_bvg")
    yield Attack("foreign-header", ForeignError, "of layout", swapped)
    yield Attack("digest-root-lies", DigestError, "table is damaged", flipped(place.digests_begin))
    padding = flipped(place.control_begin - 1)
    yield Attack("digest-padding", DigestError, "table is damaged", padding)
    yield Attack("digest-behind-table", FormatError, "behind the last digest", padded_table())
    yield Attack("digest-table-lies", DigestError, "chunk 0", resealed_table())
    yield Attack("digest-tensor", DigestError, "exp_avg, weight", flipped(len(place.header) + 41))
    yield Attack("digest-extras", DigestError, "chunk 0", flipped(place.extras_begin))
    staged = data[: place.digests_begin] + bytes(4096) + control_page(place)
    yield Attack("digest-none", TornError, "in memory only", staged)


def control_page(place: Layout) -> bytes:
    """The page that a trainer writes: a seal, no digests."""
    return control(place).to_bytes()


def kept() -> Iterator[Attack]:
    """Valid images whose extras are hostile."""
    numbers = b'[{"!numbers":["d",1]},{"!numbers":["d",1]}'
    for name, text, message in [
        ("pickle", extras_codec.encode(print, trusted=True), "trusted=True"),
        ("deep", b'{"a":' + b"[" * 1500, "too deeply"),
        ("duplicate-key", b'{"a":1,"a":2}', "comes twice"),
        ("unknown-tag", b'{"!eval":"1"}', "unknown tag"),
        ("unhashable", b'{"!set":[[]]}', "not a set"),
        ("huge-array", b'{"!numpy":["<f8",[1000000000000],""]}', "0 bytes for"),
        ("huge-tensor", b'{"!torch.Tensor":["float32",[1000000000000],""]}', "0 bytes for"),
        ("object-array", b'{"!numpy":["|O8",[1],"AAAAAAAAAAA="]}', "dtype"),
        ("not-a-dtype", b'{"!torch.dtype":"load"}', "dtype"),
        ("not-base64", b'{"!bytes":"?"}', "not a bytes"),
        ("unshowable", b'{"!path":{"!torch.Tensor":["uint7",[8],"AAAAAAAAAAA="]}}', "not a path"),
        ("multiplied-text", b'{"!numpy":["<f8",["x",1000000000],""]}', "not a row of sizes"),
        ("endless-size", b'{"!torch.Size":{"!range":[0,1000000000000]}}', "not a torch.Size"),
        ("endless-range", b'{"!range":{"!range":[0,1000000000000]}}', "not a range"),
        ("endless-zone", b'{"!timezone":{"!range":[0,1000000000000]}}', "not a timezone"),
        ("array-of-nothing", b'{"!numpy":["<U0",[100000000],""]}', "0 bytes for"),
        ("module-of-torch", b'{"!torch.dtype":"onnx"}', "dtype"),
        ("enum-to-import", b'{"!enum":["antigravity","Sky","BLUE"]}', "no class antigravity"),
        ("class-of-no-fields", b'{"!dataclass":["builtins","dict",{}]}', "no plain dataclass"),
        ("endless-deque", b'{"!deque":[99999999999999999999,[1]]}', "not a deque"),
        ("factory-of-code", b'{"!defaultdict":["eval",[]]}', "not a defaultdict"),
        ("array-of-objects", b'{"!array":["|O8",[1],"C"]}', "not a array"),
        ("array-of-no-shape", b'{"!array":["<f8",[-1],"C"]}', "not a shape"),
        ("zone-elsewhere", b'{"!zoneinfo":"../../etc/passwd"}', "not a zoneinfo"),
        ("endless-fraction", b'{"!fraction":[1,{"!int":"0x%x"}]}' % (1 << 9000), "not a fraction"),
        ("reference-to-nothing", b'[{"!def":[]},{"!ref":1}]', "names no object"),
        ("reference-to-itself", b'{"!def":[{"!ref":0}]}', "names no object"),
        ("reference-to-a-key", b'{"!def":{"!tuple":[1]}}', "is not shared"),
        ("numbers-of-nothing", b'{"!numbers":["d",1000000000000]}', "too few bytes"),
        ("numbers-read-twice", numbers + b"]\n" + bytes(8), "too few bytes"),
        ("numbers-unread", b"[]\n" + bytes(8), "that nothing names"),
        ("rows-of-no-columns", b'{"!rows":["tuple","",1000000000000]}\n' + bytes(8), "not a kind"),
        ("rows-of-one-key", b'{"!rows":[["a","a"],"dd",1]}\n' + bytes(16), "do not suit"),
        ("class-of-code", b'{"!class":["os","_Environ"]}', "no plain dataclass"),
        ("view-before", b'{"!view":["float32",-4,[1],[1]]}', "no view"),
        ("generator-of-code", b'{"!numpy.random.BitGenerator":["seed",1,null]}', "no bit gen"),
        (
            "endless-seed",
            b'{"!numpy.random.BitGenerator":["PCG64",1,[{"!int":"0x%x"},[],4,0]]}' % (1 << 9000),
            "no seed",
        ),
    ]:
        yield Attack(f"extras-{name}", FormatError, message, image(text))


# --- files --------------------------------------------------------------------------------------

README = """# Hostile files

Each is a small image with one lie in it, made by `python attacks/make.py`. A reader of run
`demo`, step `{id}` must refuse each with the error below, allocating less than a megabyte
(tests/image/test_attacks.py). Of larger files: at most 64 MiB, or eight times the bytes that are
parsed if that is more (tests/image/test_bounds.py, `make fuzz`). Only extras and skeletons, which
the library alone makes Python's own objects of, may take 40 times their text. A newer format is
left alone; everything else is quarantined.

| file | error | and says |
| --- | --- | --- |
{rows}
"""


def readme() -> str:
    """README.md of this folder."""
    rows = (
        f"| {attack.name} | {attack.error.__name__} | {attack.message.replace('|', ' or ')} |"
        for attack in attacks()
    )
    return README.format(id=ID, rows="\n".join(rows))


def main() -> None:
    """Write all files, and remove those that no longer belong."""
    made = {attack.path: attack.data for attack in attacks()}
    for path in set(HERE.glob("*.safetensors")) - made.keys():
        path.unlink()
    for path, data in made.items():
        path.write_bytes(data)
    (HERE / "README.md").write_text(readme())


if __name__ == "__main__":
    main()
