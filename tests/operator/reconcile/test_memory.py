"""What thousands of objects, connections and reports leave in memory, and when all of it is looked
at: in bytes and numbers, never in seconds."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import sys
import tracemalloc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kopf
import msgspec
import psutil
import pytest
from aiohttp import web
from kopf._core.reactor.inventory import ResourceMemory

from keepstep.wire.reports import Report
from keepstep_operator import names
from keepstep_operator.kube import POLICIES, Client, Feed, follow
from keepstep_operator.reconcile import gc_tuning
from keepstep_operator.reconcile.parsing import parse_pod_record
from keepstep_operator.reconcile.state.registry import Registry
from keepstep_operator.reconcile.writers.checkpoint_objects import (
    MANAGED_BY,
    MANAGER,
    pack,
    seen,
    unpack,
)
from keepstep_operator.serving import listening
from keepstep_operator.tls import ServerTls
from tests.harness import until
from tests.operator.apiserver import ApiServer
from tests.operator.injection.pods import policy_body
from tests.operator.promises.surface import Cluster, idle_connections, rank, report, still_open
from tests.operator.promises.surface import pod as surface_pod
from tests.operator.promises.surface import policy as surface_policy
from tests.operator.reconcile.pod_bodies import pod_body
from tests.operator.reconcile.samples import KEY, T0, Sidecar, pod, policy, run_object
from tests.operator.reconcile.serving import make_certificate, serving, trusting


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes that are held more at its end than at its beginning."""
    found: list[int] = []
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        yield found
        gc.collect()
        found.append(tracemalloc.get_traced_memory()[0] - before)
    finally:
        tracemalloc.stop()


async def test_a_tls_connection_holds_no_quarter_of_a_mebibyte(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    context = ServerTls(tmp_path).context
    async with listening(web.Application(), port=0, ssl_context=context) as port:
        with counted() as more:
            held = await idle_connections(f"https://127.0.0.1:{port}", 20)
            assert still_open(held) == 20
    for one in held:
        one.close()
    assert more[0] / len(held) < 128 << 10


@pytest.mark.parametrize("secured", [False, True])
async def test_a_closed_connection_is_freed_without_the_garbage_collector(
    tmp_path: Path, secured: bool
) -> None:
    def connections() -> int:
        return sum(type(one).__name__ == "_SelectorSocketTransport" for one in gc.get_objects())

    def ask(port: int) -> None:
        connection = (
            http.client.HTTPSConnection("127.0.0.1", port, context=trusting(authority))
            if secured
            else http.client.HTTPConnection("127.0.0.1", port)
        )
        connection.request("GET", "/")
        connection.getresponse().read()
        connection.close()

    authority = make_certificate(tmp_path)
    context = ServerTls(tmp_path).context if secured else None
    gc.collect()
    gc.disable()
    try:
        before = connections()
        async with listening(web.Application(), port=0, ssl_context=context) as port:
            for _ in range(3):
                await asyncio.to_thread(ask, port)
            await until(lambda: connections() <= before)
    finally:
        gc.enable()


async def test_what_kopf_leaves_of_a_listing_is_freed_when_all_is_listed(tmp_path: Path) -> None:
    def left() -> int:
        return sum(type(one) is kopf.Body for one in gc.get_objects())

    cluster = Cluster(objects=dict([surface_policy()]))
    for number in range(30):
        cluster.bind(surface_pod(number))
    gc.collect()
    gc.disable()
    try:
        async with serving(cluster, tmp_path) as served:
            await until(lambda: served.parts.pods.loaded.is_set() and left() < 5)
            assert len(served.parts.pods.known) == 30
    finally:
        gc.enable()


async def test_nothing_is_remembered_of_an_object_that_was_shown() -> None:
    feed = Feed[str](
        name="policies",
        resource=POLICIES,
        key_of=lambda body: str(body["metadata"]["name"]),
        seen=lambda body: None,
        gone=lambda name: None,
    )

    def remembered() -> int:
        gc.collect()
        return sum(type(one) is ResourceMemory for one in gc.get_objects())

    async with ApiServer().running() as server, Client(server.access) as client:
        for number in range(30):
            server.put(POLICIES, policy_body(name=f"p{number}"))
        task = asyncio.create_task(follow(client, [feed]))
        try:
            await until(feed.loaded.is_set)
            assert len(feed.known) == 30
            await until(lambda: remembered() == 0)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def test_of_a_checkpoint_object_no_more_is_held_than_is_compared() -> None:
    bodies = [checkpoint(number) for number in range(400)]
    with counted() as more:
        packed = pack({body["metadata"]["name"]: seen(body) for body in bodies})
    assert len(unpack(packed)) == len(bodies)
    assert more[0] / len(bodies) < 100


def test_what_pods_have_in_common_is_one_object() -> None:
    bodies = [json.dumps(pod_body(number)) for number in (0, 1)]
    one, other = (parse_pod_record(json.loads(body)) for body in bodies)
    assert one is not None
    assert other is not None
    for name in ("namespace", "phase", "policy", "sidecar_image", "sidecar_version"):
        assert getattr(one, name) is getattr(other, name), name
    assert one.run.name is other.run.name


def checkpoint(number: int) -> Any:
    """As the API server tells it: with who wrote which field."""
    body = {
        "metadata": {
            "name": f"{KEY.name}-0001.aaaaaaaa-{number:09d}",
            "namespace": KEY.namespace,
            "uid": f"00000000-0000-4000-8000-{number:012d}",
            "labels": {names.RUN_KEY_LABEL: KEY.name, MANAGED_BY: MANAGER},
            "managedFields": [{"fieldsV1": {f"f:{one}": {}}} for one in range(40)],
        },
        "spec": {"run": KEY.name, "step": number, "ranks": 8},
        "status": {
            "tiers": ["local", "archive"],
            "conditions": [
                {
                    "type": "Available",
                    "lastTransitionTime": "2026-11-22T10:00:00Z",
                    "status": "True",
                }
            ],
        },
    }
    return json.loads(json.dumps(body))


def test_a_hundred_archived_steps_cost_a_pod_of_eight_ranks_twenty_kilobytes() -> None:
    registry, pods = Registry(), 10
    for number in range(pods):
        registry.pod_seen(pod(number), at=T0)
    sidecars = [reports(number, world=8 * pods) for number in range(pods)]
    with counted() as more:
        for number in range(pods):
            told = msgspec.json.decode(sidecars[number], type=Report)
            registry.reported(f"pod-{number}-1", told, at=T0)
            registry.reply(f"pod-{number}-1", at=T0)
            del told
    assert len(registry.runs[KEY].ledger.archived()) == 100
    assert more[0] / pods < 20_000


def reports(number: int, *, world: int) -> bytes:
    archived = tuple(1000 * (one + 1) for one in range(100))
    told = [
        rank(8 * number + one, world, memory=(10**6,), local=(10**6,), archive=archived)
        for one in range(8)
    ]
    return json.dumps(report(*told)).encode()


def test_a_run_that_is_over_goes_with_its_last_reference() -> None:
    registry = Registry()
    registry.policy_seen(policy())
    registry.pod_seen(pod(0), at=T0)
    registry.object_seen(run_object(), at=T0)
    registry.reported("pod-0-1", Sidecar(rank=0, world=1).durable(90).report(), at=T0)
    run = weakref.ref(registry.runs[KEY])
    gc.collect()
    gc.disable()
    try:
        registry.pod_gone("pod-0-1", at=T0)
        registry.object_gone(KEY)
        assert not registry.runs
        assert run() is None
    finally:
        gc.enable()


async def test_freed_memory_goes_back_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def resident() -> int:
        return int(psutil.Process().memory_info().rss)

    large, between = [], []
    for _ in range(1500):
        large.append(bytearray(60_000))
        between.append(bytearray(1000))
    full = resident()
    large.clear()
    monkeypatch.setattr(gc_tuning, "_GIVE_BACK_S", 0.0)
    task = asyncio.create_task(gc_tuning.give_back_freed())
    try:
        await until(lambda: resident() < full - (60 << 20))
        assert between
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextmanager
def spared() -> Iterator[None]:
    before = gc.get_threshold()
    gc_tuning.spare_what_stays()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def test_what_replaces_something_is_no_reason_to_look_at_all_there_is() -> None:
    with spared():
        before = gc.get_stats()[2]["collections"]
        state = {key: [key] for key in range(20_000)}
        for _ in range(20):
            state.update({key: [key] for key in range(20_000)})
        assert gc.get_stats()[2]["collections"] == before


async def test_cycles_are_looked_for_everywhere_when_memory_has_grown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.own = self

    monkeypatch.setattr(gc_tuning, "_SETTLED_S", 0.0)
    monkeypatch.setattr(gc_tuning, "_LOOK_S", 0.0)
    task = asyncio.create_task(gc_tuning.collect_when_grown())
    gc.disable()
    try:
        left = weakref.ref(Cycle())
        await asyncio.sleep(0.01)
        assert left() is not None
        grown = [object() for _ in range(sys.getallocatedblocks() // 2)]
        await until(lambda: left() is None)
        assert grown
    finally:
        gc.enable()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_collection_that_finds_little_is_followed_by_a_longer_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large reports make memory grow for a moment, as often as a tenant likes."""
    pauses, held = list[float](), list[list[object]]()
    waits = asyncio.sleep

    async def sleep(pause_s: float) -> None:
        """Until the fifth, all that memory has grown by is still in use; then it is garbage."""
        await waits(0)
        pauses.append(pause_s)
        if len(pauses) == 7:
            raise asyncio.CancelledError
        one: list[object] = [object() for _ in range(sys.getallocatedblocks() // 2)]
        if len(pauses) == 6:
            one.append(one)
        else:
            held.append(one)

    monkeypatch.setattr(gc_tuning.asyncio, "sleep", sleep)
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(asyncio.CancelledError):
            await gc_tuning.collect_when_grown()
    finally:
        gc.enable()
    assert pauses == [gc_tuning._SETTLED_S, 1.0, 8.0, 64.0, 512.0, 600.0, 1.0]
