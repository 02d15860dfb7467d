"""`run.json`, `step.json` and messages that no keepstep wrote are refused, whatever they say."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepstep.core.shard import Shard
from keepstep.errors import FormatError, ImageError, TornError, VersionError
from keepstep.steps import Epoch, EpochId, StepId, shard_name
from keepstep_sidecar.tiers.archive import step_record as records
from keepstep_sidecar.tiers.archive.step_record import StepRecord
from keepstep_sidecar.volume.run_record import RunRecord
from tests.harness import peak_of

ID = StepId(EpochId(3, "1f9c2d7a"), 1200)
MEBIBYTE = 1 << 20
RUN = {"format_version": 1, "run": "demo", "epochs": [{"id": str(ID.epoch), "parent": None}]}


def read_run(data: bytes) -> RunRecord:
    return RunRecord.from_json(data, path=Path("run.json"))


def read_step(data: bytes) -> StepRecord:
    return StepRecord.from_json(data, path="step.json")


def step(**changes: Any) -> bytes:
    """A record, sealed as its author would."""
    shard = {"rank": 0, "name": shard_name(0, 1), "bytes": 5, "root": "0" * 32, "params": None}
    body = {
        "format_version": 1,
        "keepstep": "0.1.0",
        "run": "demo",
        "step": str(ID),
        "world": 1,
        "written_at": 1.0,
        "epochs": [{"id": str(ID.epoch), "parent": None}],
        "shards": [shard],
        **changes,
    }
    return json.dumps({**body, "seal": records._seal(body)}).encode()


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({**RUN, "format_version": 1e999}),
        '{"format_version":1e999,"run":"demo","epochs":[]}',
        json.dumps({**RUN, "format_version": "1"}),
        json.dumps({**RUN, "epochs": [{"id": 5, "parent": None}]}),
        json.dumps({**RUN, "epochs": ["x"]}),
        json.dumps({**RUN, "epochs": 5}),
        json.dumps({**RUN, "pinned": [[]]}),
        json.dumps({**RUN, "committed": []}),
        json.dumps({**RUN, "run": ["demo"]}),
        json.dumps(RUN)[:-1] + ', "run": "other"}',
        '{"format_version":' + "9" * 5000 + "}",
        '{"run":' + "[" * 100_000,
        "[]",
        "",
        "{}",
        "\ud800",
    ],
)
def test_an_invalid_run_record_is_refused_with_the_fix(text: str) -> None:
    with pytest.raises(FormatError, match=r"run\.json: not a run record .*; delete it"):
        read_run(text.encode(errors="surrogatepass"))


def test_a_run_record_survives_a_round_trip_and_a_newer_format_is_refused() -> None:
    record = RunRecord(
        run="demo",
        epochs=(Epoch(EpochId(1, "0badcafe")), Epoch(ID.epoch, ID, "other")),
        committed=ID,
        pinned=frozenset({ID}),
    )
    assert read_run(record.to_json()) == record
    assert read_run(json.dumps({**RUN, "later": [1]}).encode()).epochs == (Epoch(ID.epoch),)
    with pytest.raises(VersionError, match="newer one"):
        read_run(b'{"format_version": 2, "epochs": "told otherwise"}')


@pytest.mark.parametrize(
    "changes",
    [
        {"world": float("inf")},
        {"world": -1},
        {"world": 10**9},
        {"world": "1"},
        {"written_at": 10**400},
        {"written_at": float("nan")},
        {"format_version": float("inf")},
        {"shards": [{"rank": float("inf"), "name": "x", "bytes": 1, "root": "", "params": None}]},
        {
            "shards": [
                {"rank": 0, "name": shard_name(0, 1), "bytes": -5, "root": "", "params": None}
            ]
        },
        {
            "shards": [
                {"rank": 0, "name": shard_name(0, 1), "bytes": 1 << 70, "root": "", "params": 7}
            ]
        },
        {"shards": [5]},
        {"shards": {}},
        {"epochs": [{"id": "0001.00000000", "parent": None, "origin": []}]},
        {"epochs": [5]},
        {"step": str(ID) + "\n"},
        {"run": None},
    ],
)
def test_a_hostile_record_of_a_step_is_refused_though_its_seal_fits(
    changes: dict[str, Any],
) -> None:
    assert read_step(step()).world == 1
    with pytest.raises(FormatError, match=r"step\.json: not the record of a step"):
        read_step(step(**changes))


@pytest.mark.parametrize("read", [read_run, read_step])
def test_an_oversized_record_is_refused_before_it_allocates_much_memory(
    read: Callable[[bytes], object],
) -> None:
    data = b'{"format_version":1,"shards":[' + b"[]," * MEBIBYTE + b"0]}"
    assert peak_of(lambda: refused(read, data)) < 48 * MEBIBYTE


def test_the_record_of_a_step_of_many_ranks_is_read_back() -> None:
    world = 5_000
    like = Shard(
        step_id=ID, rank=0, world=world, size_bytes=1 << 40, root="0" * 32, params_digest="0" * 32
    )
    shards = tuple(replace(like, rank=rank) for rank in range(world))
    record = StepRecord(
        run="demo", id=ID, world=world, epochs=(), shards=shards, written_at=time.time()
    )
    data = record.to_json()
    assert peak_of(lambda: read_step(data)) < max(64 * MEBIBYTE, 8 * len(data))
    assert read_step(data) == record
    with pytest.raises(TornError):
        read_step(data.replace(b"1099511627776", b"1099511627777", 1))


def refused(read: Callable[[bytes], object], data: bytes) -> None:
    with pytest.raises(ImageError):
        read(data)
