"""What is fuzzed: each parser with honest inputs, ways to change them, and what it may raise.

A structural change is *resealed*: whoever made it also made the digests and the seal that vouch for
it, so that the parser behind them is reached.
"""

from __future__ import annotations

import datetime
import functools
import json
import pathlib
import random
import tempfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import msgspec
import numpy
import safetensors
import torch

from keepstep.core import restore_vote
from keepstep.core.history import EventKind, HistoryTotals
from keepstep.core.shard import Shard
from keepstep.dcp.session import SavedStateTree
from keepstep.errors import FormatError, ImageError, KeepstepError, ProtocolError, UsageError
from keepstep.image import ControlPage, FlatBox, Layout, TensorRole, TensorSpec, extras_codec
from keepstep.image.codecs import (
    ClassForm,
    RequiresGradForm,
    SharedAgain,
    SharedDefinitionForm,
    ViewForm,
)
from keepstep.image.control_page import PAGE_BYTES, Manifest, seal_for_disk
from keepstep.image.layout import blake2b_digest
from keepstep.image.xxh3 import DIGEST_BYTES, xxh3_128
from keepstep.state.taken_state import build_tree, check_values_exist, leaves_of
from keepstep.state.taken_state import parse_skeleton as parse_tree
from keepstep.steps import Epoch, EpochId, StepId, Tier, make_base_file_name, shard_name
from keepstep.wire import trainer
from keepstep.wire.member_reports import Report, ReportReply
from keepstep.wire.run_reports import LeaderAnswer, RunReport
from keepstep_operator.reconcile.reports_api import check_bounds
from keepstep_operator.reconcile.token_auth import RequestRefused
from keepstep_sidecar.api import server
from keepstep_sidecar.cli import run_dir
from keepstep_sidecar.history import MachineHistory
from keepstep_sidecar.tiers.archive import step_record as records
from keepstep_sidecar.tiers.archive.step_record import StepRecord, twin_delta_name
from keepstep_sidecar.tiers.peer import handlers
from keepstep_sidecar.tiers.peer import protocol as wire
from keepstep_sidecar.tiers.peer.member_frames import FrameKind, FrameParser, pack_frame
from keepstep_sidecar.tiers.peer.peer_list import KnownPeer, PeerList
from keepstep_sidecar.tiers.peer.tls import PodIdentity
from keepstep_sidecar.volume.history_file import HistoryFile
from keepstep_sidecar.volume.run_record import RunRecord
from keepstep_sidecar.volume.run_tree import ShardName, is_temporary, quarantine_name
from tests.fuzz import mutate
from tests.harness import digests, verify_image
from tests.image.test_attacks import make

Mutate = Callable[[random.Random], bytes]

DECODING = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises; `except` clauses beside each decoder name the same."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """`parse` gives a value, or raises one of `refusals`. `reseal`: a structural change, sealed;
    None where there is nothing structural. `bytewise`: what byte changes are made of. `sealed`:
    without a seal of its own nothing but `bytewise` is accepted. `times`: what memory may be, as a
    multiple of the input."""

    name: str
    parse: Callable[[bytes], object]
    refusals: tuple[type[BaseException], ...]
    bytewise: tuple[bytes, ...]
    reseal: Mutate | None = None
    sealed: bool = False
    times: int = 8


# --- images --------------------------------------------------------------------------------------


ID: StepId = make.ID
SKELETON = json.dumps(
    [
        "d",
        [
            ["model", ["d", [["weight", ["t", "weight"]], ["n", ["v", 0]]]]],
            ["list", ["x", 0, ["l", [["t", "mask"], ["u", [["v", 4]]]]]]],
            [
                "more",
                [
                    "l",
                    [
                        ["v", 1],
                        ["x", 2, ["t", "mask"]],
                        ["x", 6, ["t", "mask"]],
                        ["x", 3, ["d", [["epoch", ["v", 4]], ["step", ["v", 4]]]]],
                    ],
                ],
            ],
        ],
    ]
)
VALUES = [
    *(
        SharedDefinitionForm(0),
        SharedAgain(0),
        ViewForm("float32", 4, (2,), (1,)),
        ClassForm(StepId),
    ),
    *(OrderedDict(), deque(maxlen=3), RequiresGradForm(True)),
]
DCP = {"dcp": 1, "values": ["step"], "boxes": {"w@0": "w"}, "paths": {"w": ["model", "w", 0]}}
SHARED: list[Any] = [1, {"x": numpy.arange(2)}]
KEPT: dict[str, Any] = {
    "values": [7, [1, (2, {3}), frozenset({b"x"})], {1: 2.5, "!": None}, float("inf"), 1 << 70],
    "rng": {"path": pathlib.PurePosixPath("a"), "c": 1j, "b": bytearray(b"yz")},
    "kinds": [
        *(OrderedDict(a=1), defaultdict(list, a=[1]), Counter("aab"), deque([1, 2], 3)),
        *(range(1, 9, 2), Decimal("1.50"), Fraction(1, 3), Tier.PEER),
        *(datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc), datetime.timedelta(1)),
        *(numpy.arange(3.0), numpy.float32(2), torch.arange(3), torch.Size([2]), torch.float32),
        *(torch.Generator(), numpy.random.default_rng(1), random.Random(1), numpy.dtype("f4")),
        *(SimpleNamespace(a=1), slice(1, 2), ..., UUID(int=1)),
        *(
            ViewForm("float32", 4, (2,), (1,)),
            SharedDefinitionForm(0),
            SharedAgain(0),
            ClassForm(StepId),
        ),
    ],
    "shared": [SHARED, (SHARED, {"again": SHARED})],
    "numbers": [[0.5] * 64, [(1, 2.0)] * 64, [{"a": n, "b": 0.5} for n in range(64)], {*range(70)}],
}


FLAT = FlatBox((0, 2), (4, 2), (4, 6))


def rich_layout(rank: int = 0) -> Layout:
    """Every kind of thing that a header can say."""
    specs = [
        TensorSpec("exp_avg", "F64", (5,), TensorRole.OPTIMIZER),
        TensorSpec("weight", "F32", (2, 4), TensorRole.PARAMS, (2, 0), (4, 4), (1, 0)),
        TensorSpec("mask", "BOOL", (7,), TensorRole.REST),
        TensorSpec("spectrum", "C128", (1, 2), TensorRole.REST),
        TensorSpec("range", "F32", (1, 5), TensorRole.PARAMS, (1, 2), (2, 8), flat=FLAT),
        TensorSpec("tiny", "F8_E8M0", (3,), TensorRole.PARAMS),
        TensorSpec("scalar", "BF16", (), TensorRole.PARAMS),
        TensorSpec("empty", "I64", (0, 3), TensorRole.REST, (4, 0), (4, 3)),
        TensorSpec("näme", "U8", (1,), TensorRole.REST),
    ]
    return Layout.build(
        [spec._replace(device="cuda:1" if spec.dtype == "F32" else "cpu") for spec in specs],
        rank=rank,
        world=4,
        aliases={"head": "weight"},
        skeleton=SKELETON,
        extras_capacity_bytes=32 << 10,
        twins=(2,),
        parameters={"optimizer": (("weight", (4, 4)), ("scalar", ()))},
    )


def seal(layout: Layout, kept: bytes, page: Mapping[str, Any]) -> bytes:
    """An image of this layout with these extras, and with `page` instead of the control page's."""
    data = bytearray(layout.size_bytes)
    data[: len(layout.header)] = layout.header
    data[layout.extras_begin : layout.extras_begin + len(kept)] = kept
    control = ControlPage(
        run="demo", layout=layout.id, epoch=Epoch(ID.epoch), rank=layout.rank, world=layout.world,
        step=ID.step, extras_bytes=len(kept), staged_at=1.0, written_at=2.0,
    )  # fmt: skip
    view = memoryview(data)
    table, sealed = seal_for_disk(layout, view, control, digests=digests(layout, view))
    data[layout.digests_begin :] = table + sealed
    return bytes(data)


def honest_images() -> tuple[bytes, ...]:
    return make.image(), seal(rich_layout(), extras_codec.encode(KEPT), {})


def read_image(data: bytes) -> object:
    """Everything that a reader of a shard does, and stock safetensors must see the same."""
    layout = Layout.parse(data, size_bytes=len(data))
    control = verify_image(memoryview(data), layout, run="demo")
    stock = {
        name: (entry["dtype"], entry["shape"]) for name, entry in safetensors.deserialize(data)
    }
    for name, entry in layout.entries.items():
        seen = entry.spec.stored_dtype, list(entry.spec.stored_shape)
        if stock[name] != seen:
            raise AssertionError(f"{name}: {seen}, but stock safetensors sees {stock[name]}")
    return extras_codec.decode(memoryview(data)[layout.extras_begin :][: control.extras_bytes])


def read_page(data: bytes) -> ControlPage:
    """What lies behind the page is no part of it."""
    if len(data) != PAGE_BYTES:
        raise FormatError("no page")
    return ControlPage.from_bytes(data)


def reseal_header(rng: random.Random) -> bytes:
    """A change of the header, or of the JSON in it; then all digests anew where it can be."""
    layout = rng.choice((make.layout(), rich_layout()))
    tree = json.loads(layout.header[8:])
    grow = rng.random() < 0.001
    which = rng.randrange(5)
    if which < 2:
        tree = mutate.of_tree(tree, rng, grow=grow)
    else:
        key = "keepstep" if which < 4 else "DCP_SHARDING_INFO"
        inner = mutate.of_tree(json.loads(tree["__metadata__"][key]), rng, grow=grow)
        tree["__metadata__"][key] = mutate.text(inner, rng).decode("utf-8", "surrogatepass")
    text = mutate.text(tree, rng)
    padded = -(-(len(text) + 8) // 4096) * 4096 - 8
    header = padded.to_bytes(8, "little") + text.ljust(padded)
    rest = honest_bytes(layout)[len(layout.header) :]
    try:
        changed = Layout.parse(header)
        if changed.size_bytes < 1 << 22:
            return seal(changed, b"{}", {})
    except KeepstepError:
        pass
    return header + rest


@functools.cache
def _sealed(key: str) -> bytes:
    layout = make.layout() if key == make.layout().id else rich_layout()
    return seal(layout, extras_codec.encode({"epoch": 7}), {})


def honest_bytes(layout: Layout) -> bytes:
    return _sealed(layout.id)


def reseal_table(rng: random.Random) -> bytes:
    """Other digests, or bytes behind them, with a root that vouches for them."""
    layout, data = make.layout(), bytearray(make.image())
    at = layout.digests_begin + rng.choice((rng.randrange(DIGEST_BYTES), rng.randrange(4096)))
    data[at] ^= 1 << rng.randrange(8)
    table = data[layout.digests_begin : layout.control_begin]
    page = ControlPage.from_bytes(memoryview(data)[layout.control_begin :])
    data[layout.control_begin :] = replace(page, root=xxh3_128(table).hex()).to_bytes()
    return bytes(data)


def reseal_page(rng: random.Random) -> bytes:
    tree = json.loads(make.image()[-4096:-32])
    text = mutate.text(mutate.of_tree(tree, rng), rng)[:4064].ljust(4064)
    return text + blake2b_digest(text).hex().encode()


def reseal_extras(rng: random.Random) -> bytes:
    text, line, numbers = extras_codec.encode(KEPT).partition(b"\n")
    tree = mutate.of_tree(json.loads(text), rng, grow=rng.random() < 0.0005)
    return mutate.text(tree, rng) + line + numbers


# --- records, messages, names --------------------------------------------------------------------

RUN_RECORD = RunRecord(
    run="demo", epochs=(Epoch(EpochId(1, "0badcafe")), Epoch(ID.epoch, ID, "other")),
    committed=ID, pinned=frozenset({ID}), failures=frozenset({ID}),
).to_json()  # fmt: skip
BASE = {"step": str(ID), "name": make_base_file_name(0, 3), "bytes": 9, "root": "0" * 32}
TWIN = {"twin_of": 0, "stored_bytes": 4}
SHARDS = [
    {"rank": rank, "name": shard_name(rank, 3), "bytes": 5, "root": "0" * 32, "params": None,
     **({"base": BASE} if rank == 0 else {})}
    for rank in range(2)
] + [
    {"rank": 2, "name": twin_delta_name(2, 3, 0), "bytes": 5, "root": "0" * 32,
     "params": None, **TWIN,
     "base": {**BASE, "name": twin_delta_name(2, 3, 0, is_base=True), **TWIN}}
]  # fmt: skip
STEP_RECORD = {
    "format_version": 1, "keepstep": "0", "run": "demo", "step": str(ID), "world": 3,
    "written_at": 1.0, "epochs": [{"id": str(ID.epoch), "parent": None}], "shards": SHARDS,
}  # fmt: skip


def reseal_step_record(rng: random.Random) -> bytes:
    text = mutate.text(mutate.of_tree(STEP_RECORD, rng, grow=rng.random() < 0.0005), rng)
    try:
        body = json.loads(text)
        seal = records._seal(body)
    except (ValueError, RecursionError, TypeError):
        return text
    return text[:-1] + b', "seal": "' + seal.encode() + b'"}' if isinstance(body, dict) else text


def _of_json(tree: Any, rng: random.Random) -> bytes:
    return mutate.text(mutate.of_tree(tree, rng, grow=rng.random() < 0.0005), rng)


def reseal_json(tree: Any) -> Mutate:
    return functools.partial(_of_json, tree)


_EPOCH = {"number": 3, "nonce": "1f9c2d7a"}
_ID = {"epoch": _EPOCH, "step": 1200}
_LEASE = {"lease": "x" * 22}
REQUESTS: dict[type[Any], dict[str, Any]] = {
    trainer.LeaseRequest: {"rank": 0, "world": 2, "attempt": "a", "pid": 1, "library": "0.1"},
    trainer.LayoutRequest: {**_LEASE, "header": "AAAA"},
    trainer.SlotRequest: {**_LEASE, "layout": "0" * 32, "timeout_s": 1.0},
    trainer.StagedRequest: {
        **_LEASE, "slot": "s", "generation": 1, "step": 1200,
        "epoch": {"id": _EPOCH, "parent": _ID, "origin": ""},
    },
    trainer.RestoreStepRequest: {**_LEASE, "id": _ID},
    trainer.ChunksRequest: {
        **_LEASE, "id": _ID, "chunks": [{"rank": 0, "chunk": 1, "frame": 2}],
        "announced": [{"rank": 0, "first": 0, "end": 2}],
    },
    trainer.WaitRequest: {**_LEASE, "id": _ID, "state": "durable"},
}  # fmt: skip
_CANDIDATE = {"id": _ID, "tier": "local", "world": 2}
ANSWERS: dict[type[Any], dict[str, Any]] = {
    restore_vote.Candidates: {"answer": "steps", "candidates": [_CANDIDATE], "plan": _ID},
    trainer.OpenedStep: {"path": "/x", "tier": "memory"},
    trainer.Sources: {
        "id": _ID, "world": 2,
        "sources": [{"rank": 0, "tier": "peer", "bytes": 5, "extras_bytes": 1, "twins": [1]}],
    },
    trainer.Problem: {"code": "internal", "message": "x"},
}  # fmt: skip
_RUNS = {"runs": [[0, 1, 1]]}
LISTING = {
    "run": "demo", "ready": True, "epochs": [{"id": _EPOCH, "parent": None}],
    "shards": [
        {"step_id": _ID, "rank": 0, "world": 2, "size_bytes": 5, "root": "0" * 32},
        {"step_id": _ID, "rank": 1, "world": 2, "size_bytes": 5, "root": "0" * 32, "alike": _RUNS},
    ],
}  # fmt: skip
NEEDED = {"committed": _ID, "ranks": {"0": [_ID]}}
_HELD = {
    "step_id": _ID, "world": 2, "sizes": [5, 5], "roots": ["0" * 32, None],
    "alike": [_RUNS, _RUNS], "written_at": 1.0,
}  # fmt: skip
_ID = {"epoch": {"number": 1, "nonce": "aaaaaaaa"}, "step": 100}
RUN_REPORT = {
    "leader": "a1b2", "sequence": 3, "world": 2, "settled": True, "committed": _ID,
    "watermarks": {"local": _ID}, "epochs": [{"id": _ID["epoch"], "parent": None}],
    "kept": [{"step": "0001.aaaaaaaa-000000100", "ranks": 2, "tiers": ["archive"]}],
    "nodes": [{"node_rank": 0, "pod": "u", "node": "n", "warnings": ["slow"]}],
    "doubts": [{"kind": "CommitStalled", "text": "no step"}],
    "recent": [{"time": "2026-11-27T10:00:00Z", "type": "Restored", "step": 90}],
    "record": {"restarts": 1, "holders": [{"node": "n", "node_ranks": "0-3"}]},
}  # fmt: skip
REQUESTED = {
    "members": [{"node_rank": 0, "pod": "u", "name": "p", "node": "n", "address": "10.0.0.1"}],
    "policy": {"keep": {"last": 2}, "outlives_pod": True}, "pins": [_ID], "complete": True,
}  # fmt: skip


def read_run_report(data: bytes) -> None:
    check_bounds(msgspec.json.decode(data, type=RunReport))


REPORT = {
    "sidecar": "0.1", "started_at": 1.0, "sequence": 1, "ready": True,
    "epochs": [{"id": _EPOCH, "parent": None}],
    "ranks": [{
        "ranks": _RUNS, "world": 2, "alive": True, "staged": _ID,
        "tiers": {
            "memory": {"answer": "steps", "shards": [_HELD]},
            "local": {"answer": "steps", "shards": [_HELD], "gone": [_ID]},
        },
    }],
    "restores": [{
        "rank": 0, "epoch": {"id": _EPOCH, "parent": _ID}, "tier": "local",
        "seconds": 1.0, "at": 2.0,
    }],
    "volumes": [{"name": "/v", "engine": "direct", "used_bytes": 1, "free_bytes": 2}],
    "warnings": ["x"], "tiers": {"peer": {"where": "x"}},
}  # fmt: skip
REPLY = {
    "committed": {"local": _ID}, "plan": _ID, "retire": [_ID], "pinned": [_ID],
    "failures": [{"at": _ID, "after": [_ID]}],
    "peers": [{"node_rank": 1, "address": "a:1", "buddy": True}],
}  # fmt: skip


def read_skeleton(data: bytes) -> object:
    """As a restore walks it, with a value of each form."""
    trees = parse_tree(data.decode("utf-8", "replace"))
    shared: dict[int, Any] = {}
    for node in trees.values():
        check_values_exist(node, count=len(VALUES))
        list(leaves_of(node))
        build_tree(node, lambda _: torch.zeros(4), VALUES.__getitem__, shared)
    return trees


def read_skeleton_of_dcp(data: bytes) -> object:
    return SavedStateTree.parse(data.decode("utf-8", "replace"))


def read_run_record(data: bytes) -> object:
    return RunRecord.from_json(data, path=pathlib.Path("x"))


class _Request:
    """As much of a request as the reading of its body needs."""

    path = "/v1/fuzz"

    def __init__(self, data: bytes) -> None:
        self._data = data

    async def read(self) -> bytes:
        return self._data


def read_request(kind: type[Any], data: bytes) -> object:
    reading: Any = server._read(_Request(data), msgspec.json.Decoder(kind))  # type: ignore[arg-type]
    try:
        reading.send(None)
    except StopIteration as read:
        return read.value
    raise AssertionError("it waits")


def read_listing(data: bytes) -> object:
    """As a sidecar takes it: decoded, then put together with what else is known."""
    directory = PeerList(complete=True)
    directory.known["a:1"] = KnownPeer(address="a:1")
    directory.record_pod_answer("a:1", msgspec.json.decode(data, type=wire.PodShardListing))
    return directory.combine_inventories([])


def read_frames(data: bytes) -> object:
    """In two pieces, as a connection may deliver it."""
    parser, half = FrameParser(), len(data) // 2
    return [*parser.feed(data[:half]), *parser.feed(data[half:])]


def read_name(data: bytes) -> object:
    """Whatever is a name is the only one of what it names."""
    text = data.decode("utf-8", "surrogateescape")
    kinds: tuple[tuple[Callable[[str], object], Callable[[Any], str]], ...] = (
        (StepId.parse, str),
        (EpochId.parse, str),
        (
            lambda text: ShardName.parse(pathlib.Path(str(ID)) / text),
            lambda name: shard_name(name.rank, name.world),
        ),
        (PodIdentity.parse, lambda identity: identity.uri),
    )
    for parse, name in kinds:
        try:
            parsed = parse(text)
        except ValueError:
            continue
        if name(parsed) != text:
            raise AssertionError(f"{text!r} is read as {name(parsed)!r}")
        return parsed
    is_temporary(text)
    quarantine_name(pathlib.Path("x") / (text.replace("/", "") or "y"), text, 1)
    raise FormatError("no name")


_FOLDER = tempfile.TemporaryDirectory(prefix="keepstep-fuzz-")
_HOME = pathlib.Path(_FOLDER.name)


def _record() -> bytes:
    kept = run_dir.RunDir.of(_HOME, "demo", keep_every="60s", archive="s3://b")
    kept.home.mkdir(parents=True)
    run_dir.save_record(kept)
    return kept.record.read_bytes()


RECORD = _record()


def read_record(data: bytes) -> object:
    """`sidecar.toml`, from a file."""
    (_HOME / "demo" / "sidecar.toml").write_bytes(data)
    return run_dir.load_record(_HOME, "demo")


def read_manifest(data: bytes) -> object:
    shard = Shard(step_id=ID, rank=0, world=2)
    return Manifest.parse(memoryview(data), run="demo", shard=shard, path=pathlib.Path("x"))


def manifest() -> bytes:
    layout, data = make.layout(), make.image()
    return data[: len(layout.header)] + data[layout.digests_begin :]


# --- the history of a run ------------------------------------------------------------------------


_NOW = 1_790_000_000.0
_OF_HISTORY = _HOME / "history.jsonl"


def _history() -> list[Any]:
    """The lines of a file, parsed: two lives, of two ranks, beyond a tally of others."""
    now, file = _NOW - 5000.0, HistoryFile(_OF_HISTORY, run="run")

    def clock() -> float:
        return now

    history, known = MachineHistory(clock=clock), HistoryTotals()
    for life in (1, 2, 3):
        epoch = EpochId(life, f"{life:08x}")
        parent = StepId(EpochId(life - 1, f"{life - 1:08x}"), 10 * life) if life > 1 else None
        for rank in (0, 1):
            now += 3.0
            history.note(EventKind.CONNECTED, rank=rank, seconds=2.0, attempt="a")
        for rank in (0, 1):
            now += 1.1
            history.note(
                EventKind.RESTORED,
                rank=rank,
                epoch=Epoch(epoch, parent),
                seconds=1.0,
                tier=Tier.LOCAL,
            )
        for number in range(10 * life + 1, 10 * life + 15):
            now += 0.7
            history.staged(StepId(epoch, number), blocked_s=0.1)
            history.committed(StepId(epoch, number))
        history.record_lost_saves(EventKind.SKIPPED, rank=1, step=10 * life + 9, reason="no slot")
        history.record_warning_changes([f"warning {life}"])
        history.note(EventKind.INTERVAL, count=life)
        now += 0.3
        history.note(EventKind.FAILED, rank=0, step=StepId(epoch, 10 * life + 14))
        history.note(EventKind.ENDED, rank=1, text="killed")
        if life == 1:
            known, history = known.after(history.all()), MachineHistory(clock=clock)
    file.append(history.all(), known)
    return [json.loads(line) for line in _OF_HISTORY.read_bytes().splitlines()]


HISTORY = _history()


def _lines(lines: list[Any], rng: random.Random | None = None) -> bytes:
    rng = rng or random.Random(0)
    return b"".join(mutate.text(line, rng) + b"\n" for line in lines)


def reseal_history(rng: random.Random) -> bytes:
    """Lines that are changed, left out, doubled or moved; and some that are honest."""
    lines = list(HISTORY)
    for _ in range(rng.choice((0, 1, 2, 5, 40))):
        at, kind = rng.randrange(len(lines)), rng.randrange(6)
        if kind == 0 and at and len(lines) > 2:
            del lines[at]
        elif kind == 1:
            lines.insert(rng.randrange(1, len(lines) + 1), lines[at])
        else:
            lines[at] = mutate.of_tree(lines[at], rng, grow=rng.random() < 0.0005)
    if rng.random() < 0.7:  # else most of what was moved is passed over
        for number, line in enumerate(lines[1:], 1):
            if isinstance(line, dict):
                lines[number] = {**line, "sequence": number}
    return _lines(lines, rng)


def read_history(data: bytes) -> object:
    """As a sidecar and the commands take it up, and as the sidecar writes it again. Time that is
    in two buckets, a tally that the next sidecar would not believe: wrong."""
    _OF_HISTORY.write_bytes(data)
    file = HistoryFile(_OF_HISTORY, run="run")
    _, events, before = file._read(_OF_HISTORY, _NOW)
    if (events, before) != file.read(now=_NOW):
        raise AssertionError("read otherwise a second time")
    history = MachineHistory(events, before, clock=lambda: _NOW)
    tally = before.after(events)
    for now in (_NOW, events[-1].until if events else 0.0):
        goodput = tally.goodput(now)
        if goodput is None:
            continue
        seconds = [*goodput.seconds.values(), goodput.ratio]
        if not all(0.0 <= second < 1e10 for second in seconds) or goodput.ratio > 1.0:
            raise AssertionError(f"seconds that cannot be: {goodput}")
        until = max(now, tally.mark, tally.ended or 0.0)
        if before == HistoryTotals() and goodput.wall_s > until - goodput.since + 1e-3:
            raise AssertionError(f"of {until - goodput.since} s: {goodput}")
    if not tally.is_sane:
        raise AssertionError(f"not believed: {tally}")
    msgspec.json.encode(history.history_page("run", 0))
    _OF_HISTORY.unlink()
    HistoryFile(_OF_HISTORY, run="run").append(history.all(), history.before)
    again = HistoryFile(_OF_HISTORY, run="run").read(now=_NOW)
    if again != (history.all(), history.before):
        raise AssertionError("not read as it was written")
    return goodput


def targets() -> tuple[Target, ...]:
    """All of them."""
    image, page = honest_images(), make.image()[-4096:]
    kept, name = extras_codec.encode(KEPT), str(ID).encode()
    json_of = lambda tree: json.dumps(tree).encode()  # noqa: E731
    made = [
        Target(name="header", parse=read_image, refusals=(ImageError,), bytewise=image,
               reseal=reseal_header, sealed=True),
        Target(name="digest-table", parse=read_image, refusals=(ImageError,), bytewise=image,
               reseal=reseal_table, sealed=True),
        Target(name="control-page", parse=read_page, refusals=(ImageError,),
               bytewise=(page,), reseal=reseal_page, sealed=True),
        Target(name="extras", parse=extras_codec.decode, refusals=(FormatError,), bytewise=(kept,),
               reseal=reseal_extras, times=40),
        Target(name="manifest", parse=read_manifest, refusals=(ImageError,),
               bytewise=(manifest(),)),
        Target(name="run.json", parse=read_run_record,
               refusals=(ImageError,), bytewise=(RUN_RECORD,),
               reseal=reseal_json(json.loads(RUN_RECORD))),
        Target(name="step.json", parse=lambda data: StepRecord.from_json(data, path="x"),
               refusals=(ImageError,), bytewise=(json_of(STEP_RECORD),), reseal=reseal_step_record),
        Target(name="history.jsonl", parse=read_history, refusals=(ImageError,),
               bytewise=(_lines(HISTORY),), reseal=reseal_history, times=40),
        Target(name="sidecar.toml", parse=read_record, refusals=(UsageError,),
               bytewise=(RECORD,)),
        Target(name="skeleton", parse=read_skeleton,
               refusals=(FormatError,), bytewise=(SKELETON.encode(),),
               reseal=reseal_json(json.loads(SKELETON)), times=40),
        Target(name="skeleton of DCP", parse=read_skeleton_of_dcp,
               refusals=(FormatError,),
               bytewise=(json_of(DCP),), reseal=reseal_json(DCP), times=40),
        Target(name="peer's listing", parse=read_listing, refusals=DECODING,
               bytewise=(json_of(LISTING),), reseal=reseal_json(LISTING)),
        Target(name="peer's wishes", parse=lambda data: handlers._decode(data, wire.CopiesToKeep),
               refusals=(UsageError,), bytewise=(json_of(NEEDED),), reseal=reseal_json(NEEDED)),
        Target(name="frames of a member", parse=read_frames, refusals=(ProtocolError,),
               bytewise=(pack_frame(FrameKind.HELLO, bytes(16))
                         + pack_frame(FrameKind.MESSAGE, b"x"),)),
        Target(name="report", parse=msgspec.json.Decoder(Report).decode,
               refusals=DECODING, bytewise=(json_of(REPORT),), reseal=reseal_json(REPORT)),
        Target(name="report of a leader", parse=read_run_report,
               refusals=(*DECODING, RequestRefused), bytewise=(json_of(RUN_REPORT),),
               reseal=reseal_json(RUN_REPORT)),
        Target(name="answer to a leader", parse=msgspec.json.Decoder(LeaderAnswer).decode,
               refusals=DECODING, bytewise=(json_of(REQUESTED),), reseal=reseal_json(REQUESTED)),
        Target(name="reply to a report", parse=msgspec.json.Decoder(ReportReply).decode,
               refusals=DECODING, bytewise=(json_of(REPLY),), reseal=reseal_json(REPLY)),
        Target(name="names", parse=read_name, refusals=(FormatError,),
               bytewise=(name, shard_name(0, 2).encode(), b"keepstep://ns/run/0")),
    ]  # fmt: skip
    for kind, tree in REQUESTS.items():
        made.append(
            Target(name=f"socket: {kind.__name__}", parse=functools.partial(read_request, kind),
                   refusals=(KeepstepError,), bytewise=(json_of(tree),), reseal=reseal_json(tree))
        )  # fmt: skip
    for kind, tree in ANSWERS.items():
        made.append(
            Target(name=f"answer: {kind.__name__}",
                   parse=functools.partial(trainer.from_json, kind),
                   refusals=(ProtocolError,), bytewise=(json_of(tree),), reseal=reseal_json(tree),
                   times=40)
        )  # fmt: skip
    return tuple(made)
