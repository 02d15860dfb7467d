"""What a trainer's socket is sent is checked before anything is done for it."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trainer import FakeTrainer

from keepstep.client.session import UnixConnection
from keepstep.errors import SidecarError, UsageError
from keepstep.wire import trainer as protocol
from keepstep_sidecar.config.sidecar import check_run
from tests.harness import SidecarProcess

ODD = (-1, 1 << 31, 1 << 63, 1 << 70, -(1 << 70))
ROUTES = {
    "/v1/layout": protocol.LayoutRequest,
    "/v1/slot": protocol.SlotRequest,
    "/v1/staged": protocol.StagedRequest,
    "/v1/discard": protocol.DiscardSlotRequest,
    "/v1/release": protocol.ReleaseSlotsRequest,
    "/v1/skipped": protocol.SkippedRequest,
    "/v1/failed": protocol.ScriptFailedRequest,
    "/v1/refused": protocol.VoteRefusedRequest,
    "/v1/warning": protocol.WarningRequest,
    "/v1/uncaught": protocol.UncaughtRequest,
    "/v1/candidates": protocol.CandidatesRequest,
    "/v1/restore": protocol.RestoreStepRequest,
    "/v1/restored": protocol.RestoredRequest,
    "/v1/sources": protocol.SourcesRequest,
    "/v1/headers": protocol.HeadersRequest,
    "/v1/window": protocol.ChunkBufferRequest,
    "/v1/chunks": protocol.ChunksRequest,
    "/v1/owner": protocol.RegisterOwnerRequest,
}


@pytest.fixture
def sidecar(memory_dir: Path, tmp_path: Path) -> Iterator[SidecarProcess]:
    process = SidecarProcess("gpt", memory_dir, tmp_path / "volume", tmp_path / "log").start()
    yield process
    process.end()


def test_no_numeric_argument_causes_an_internal_server_error(
    sidecar: SidecarProcess, trainers: Callable[..., FakeTrainer]
) -> None:
    trainer = trainers(sidecar.socket)
    trainer.connect()
    trainer.register()
    for route, kind in ROUTES.items():
        for odd in ODD:
            status = _post(sidecar, route, _message(kind, lease=trainer.lease, number=odd))
            assert status != 500, f"{route} with {odd}"
    assert "Traceback" not in sidecar.log.read_text()


def _message(kind: Any, *, lease: str, number: int) -> Any:
    """One of its shape, every number in it the same."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        fields = {name: _message(hint, lease=lease, number=number) for name, hint in hints.items()}
        return {**fields, **({"lease": lease} if "lease" in fields else {})}
    if origin is tuple:
        return [_message(arguments[0], lease=lease, number=number)]
    if origin is dict:
        return {"x": _message(arguments[1], lease=lease, number=number)}
    if arguments:  # one of several, or None
        return _message(arguments[0], lease=lease, number=number)
    if kind is bool:
        return True
    if kind in (int, float):
        return 0.01 if kind is float and abs(number) > 1 << 64 else number
    members = list(kind) if hasattr(kind, "__members__") else []
    return members[0].value if members else "00c0ffee"


def _post(sidecar: SidecarProcess, route: str, message: Any) -> int:
    connection = UnixConnection(str(sidecar.socket), 10.0)
    try:
        connection.request("POST", route, json.dumps(message))
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def test_a_rank_outside_the_world_is_refused_and_leaves_no_files(
    sidecar: SidecarProcess, trainers: Callable[..., FakeTrainer]
) -> None:
    trainer = trainers(sidecar.socket)
    impossible = ((-1, 1), (1, 1), (1 << 31, 1 << 32), (0, 0), (0, 1 << 20), (1 << 70, 2))
    for trainer.rank, trainer.world in impossible:
        with pytest.raises(SidecarError, match=r"is invalid|Expected|range"):
            trainer.connect()
    assert not list(sidecar.memory.glob("rank-*"))
    assert sidecar.get("/v1/status")["ranks"] == []


@pytest.mark.parametrize("name", ["..", "a/b", "", ".x", "gpt\n", "\x1b[31m", "x" * 300, "\u0661"])
def test_a_run_name_must_be_a_valid_directory_name(name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a run"):
        check_run(name)
