"""Helper pods as they are made, watched and deleted, against an API server that remembers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from keepstep.wire.reports import STILL_USED_EXIT
from keepstep_operator.api.model import RunKey
from keepstep_operator.kube import CONFIG_MAPS, PODS, Client, follow
from keepstep_operator.reconcile.helpers import cleanup
from keepstep_operator.reconcile.helpers.cleanup import RunDirectories
from keepstep_operator.reconcile.helpers.controller import (
    AGAIN_S,
    MOST_CLEANERS,
    PENDING_S,
    HelperController,
)
from keepstep_operator.reconcile.metrics import Metrics
from keepstep_operator.reconcile.state import helper_plan
from keepstep_operator.reconcile.state.helper_plan import Helper
from keepstep_operator.reconcile.state.registry import Registry
from keepstep_operator.reconcile.state.run import Run
from tests.harness import until
from tests.operator.apiserver import ApiServer
from tests.operator.reconcile.samples import KEY, T0, pod, run_object
from tests.operator.reconcile.test_helpers import DEFAULTS, PATH, Move

SYSTEM = DEFAULTS.namespace
GRACE_S = 100.0


class Stage:
    """One `Helping` on a book whose time stands still."""

    def __init__(
        self, registry: Registry, server: ApiServer, client: Client, *, grace_s: float | None
    ):
        self.server, self.registry, self.now = server, registry, T0
        self.helper_controller = HelperController(
            registry,
            client,
            DEFAULTS,
            carry_out=lambda actions: None,
            metrics=Metrics(registry),
            clock=lambda: self.now,
            host_paths=(PATH,),
            grace_s=grace_s,
        )

    def pods(self) -> list[dict[str, Any]]:
        return [one for path, one in self.server.objects.items() if "/pods/" in path]

    def notes(self) -> list[RunDirectories | None]:
        found = [one for path, one in self.server.objects.items() if "/configmaps/" in path]
        return [cleanup.parse(one) for one in found]

    async def sync(self) -> None:
        """One round, and what it did is seen."""
        await self.helper_controller.sync()
        names = {one["metadata"]["name"] for one in self.pods()}
        await until(lambda: set(self.helper_controller.pods.known) == names)

    async def becomes(self, name: str, phase: str, *, exits: int = 0) -> None:
        body = self.server.take(PODS, name, namespace=SYSTEM)
        ended = {"state": {"terminated": {"exitCode": exits}}}
        status = {"phase": phase, "containerStatuses": [ended]}
        self.server.put(PODS, {**body, "status": status})
        await until(lambda: self._phase(name) == phase)

    def _phase(self, name: str) -> str:
        return str(self.helper_controller.pods_by_name[name].get("status", {}).get("phase"))


def play(
    story: Callable[[Stage], Coroutine[Any, Any, None]],
    registry: Registry,
    *,
    before: RunDirectories | Sequence[RunDirectories] = (),
    grace_s: float | None = GRACE_S,
) -> None:
    async def whole() -> None:
        async with _stage(registry, before, grace_s) as stage:
            await story(stage)

    asyncio.run(whole())


@asynccontextmanager
async def _stage(
    registry: Registry, before: RunDirectories | Sequence[RunDirectories], grace_s: float | None
) -> AsyncIterator[Stage]:
    server = ApiServer()
    async with server.running(), Client(server.access) as client, asyncio.TaskGroup() as group:
        for grave in (before,) if isinstance(before, RunDirectories) else before:
            body = cleanup.render(grave, namespace=SYSTEM)
            body["metadata"]["uid"] = "uid-of-the-record"
            server.put(CONFIG_MAPS, body)
        stage = Stage(registry, server, client, grace_s=grace_s)
        feeds = (stage.helper_controller.pods, stage.helper_controller.records)
        following = group.create_task(follow(client, feeds))
        for feed in feeds:
            await feed.loaded.wait()
        yield stage
        following.cancel()


def test_a_helper_pod_is_made_once_and_deleted_when_nobody_needs_it() -> None:
    move = Move()

    async def story(stage: Stage) -> None:
        await stage.sync()
        assert stage.pods() == []
        move.move()
        await stage.sync()
        await stage.sync()
        (made,) = stage.pods()
        uid = made["metadata"]["uid"]
        assert move.registry.helpers[uid].node == "node-1", "its reports are taken at once"
        back = pod(1, life=3, node="node-1", host_paths=(PATH,))
        move.lose(move.moved)
        move.see(back)
        await stage.sync()
        assert stage.pods() == []
        assert uid not in move.registry.helpers

    play(story, move.registry)


def test_a_helper_pod_that_failed_is_made_again_later() -> None:
    move = Move()
    move.move()

    async def story(stage: Stage) -> None:
        await stage.sync()
        (made,) = stage.pods()
        await stage.becomes(made["metadata"]["name"], "Failed")
        assert move.registry.helpers == {}
        await stage.sync()
        await stage.sync()
        assert stage.pods() == []
        stage.now += AGAIN_S
        await stage.sync()
        assert len(stage.pods()) == 1

    play(story, move.registry)


def test_a_run_that_is_gone_is_cleaned_after_its_time_of_grace_and_then_forgotten() -> None:
    move = Move()

    async def story(stage: Stage) -> None:
        await stage.sync()
        (noted,) = stage.notes()
        assert noted == RunDirectories(run=KEY, nodes={"node-0": (PATH,), "node-1": (PATH,)})
        move.lose(move.first)
        move.lose(move.second)
        await stage.sync()
        assert stage.notes() == [noted], "its object is there"
        move.note(move.registry.object_gone(KEY))
        await stage.sync()
        assert stage.notes() == [replace(noted, gone_since=T0)]
        assert stage.pods() == []
        stage.now += GRACE_S
        await stage.sync()
        first, second = sorted(one["metadata"]["name"] for one in stage.pods())
        await stage.becomes(first, "Succeeded")
        await stage.sync()
        await stage.becomes(second, "Failed")
        await stage.sync()
        (left,) = stage.notes()
        assert left is not None
        assert len(left.nodes) == 1, "the node that failed is not forgotten"
        stage.now += AGAIN_S
        await stage.sync()
        (again,) = stage.pods()
        await stage.becomes(again["metadata"]["name"], "Succeeded")
        await stage.sync()
        await stage.sync()
        assert (stage.notes(), stage.pods()) == ([], [])

    play(story, move.registry)


GONE = RunDirectories(run=KEY, nodes={"node-0": (PATH,)}, gone_since=T0 - 2 * GRACE_S)


def test_a_run_that_went_while_nobody_watched_is_cleaned_too() -> None:
    async def story(stage: Stage) -> None:
        await stage.sync()
        assert len(stage.pods()) == 1

    play(story, Registry(), before=GONE)


def test_a_record_is_deleted_by_its_uid() -> None:
    async def story(stage: Stage) -> None:
        await stage.sync()
        (made,) = stage.pods()
        await stage.becomes(made["metadata"]["name"], "Succeeded")
        await stage.sync()
        await stage.sync()
        (asked,) = stage.server.asked("DELETE", "/configmaps/")
        assert asked.body["preconditions"]["uid"] == "uid-of-the-record"

    play(story, Registry(), before=GONE)


def test_a_run_that_came_back_under_its_name_is_not_cleaned_any_more() -> None:
    registry = Registry()

    async def story(stage: Stage) -> None:
        await stage.sync()
        assert len(stage.pods()) == 1
        registry.object_seen(run_object(), at=stage.now)
        await stage.sync()
        assert stage.pods() == []
        assert stage.notes() == [replace(GONE, gone_since=None)]

    play(story, registry, before=GONE)


def test_a_run_that_lived_while_the_operator_was_away_has_its_time_of_grace_anew() -> None:
    async def story(stage: Stage) -> None:
        await stage.sync()
        (pod,) = stage.pods()
        await stage.becomes(pod["metadata"]["name"], "Failed", exits=STILL_USED_EXIT)
        await stage.sync()
        await stage.sync()
        assert (stage.pods(), stage.notes()) == ([], [replace(GONE, gone_since=T0)])
        stage.now += GRACE_S
        await stage.sync()
        assert len(stage.pods()) == 1

    play(story, Registry(), before=GONE)


def test_what_a_person_took_from_the_list_is_left_where_it_lies() -> None:
    before = RunDirectories(run=KEY, nodes={"node-0": (PATH,)}, gone_since=T0)

    async def story(stage: Stage) -> None:
        await stage.sync()
        stage.server.delete(CONFIG_MAPS, before.name, namespace=SYSTEM)
        await until(lambda: not stage.helper_controller.records.known)
        stage.now += GRACE_S + 1
        await stage.sync()
        assert stage.pods() == []
        assert stage.notes() == []

    play(story, Registry(), before=before)


def test_cleaners_that_get_nowhere_keep_no_place_for_ever() -> None:
    registry, many = Registry(), MOST_CLEANERS + 3
    known = [
        RunDirectories(
            run=RunKey("team", f"run-{number}"), nodes={"node-0": (PATH,)}, gone_since=T0
        )
        for number in range(many)
    ]

    async def story(stage: Stage) -> None:
        await until(lambda: len(stage.helper_controller.records.known) == many)
        stage.now += GRACE_S + 1
        await stage.sync()
        first = {one["metadata"]["name"] for one in stage.pods()}
        assert len(first) == MOST_CLEANERS
        failed, pending = sorted(first)[:4], sorted(first)[4:]
        for name in failed:
            await stage.becomes(name, "Failed")
        await stage.sync()  # they are seen, and deleted
        await stage.sync()
        assert len({one["metadata"]["name"] for one in stage.pods()} - first) == 3
        stage.now += PENDING_S + 1
        await stage.sync()
        await stage.sync()
        assert not {one["metadata"]["name"] for one in stage.pods()} & set(pending)

    play(story, registry, before=known)


def test_cleaning_can_be_switched_off_and_keeps_to_what_is_allowed() -> None:
    async def nothing(stage: Stage) -> None:
        await stage.sync()
        assert stage.pods() == []
        assert len(stage.notes()) == 1

    play(nothing, Registry(), before=GONE, grace_s=None)
    play(nothing, Registry(), before=replace(GONE, nodes={"node-0": ("/etc",)}))


def test_an_api_server_that_is_away_costs_nothing_but_time() -> None:
    move = Move()

    async def story(stage: Stage) -> None:
        stage.server.down = True
        move.move()
        await stage.helper_controller.sync()
        stage.server.down = False
        stage.now += AGAIN_S
        await stage.sync()
        assert (len(stage.pods()), len(stage.notes())) == (1, 1)

    play(story, move.registry)


def test_a_run_that_raises_has_its_helpers_left_alone_and_others_get_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    move, true, raised = Move(), helper_plan.wanted, set[RunKey]()
    move.move()
    other = RunKey(KEY.namespace, "another")
    # the first of all runs
    move.registry.runs = {other: Run(other), **move.registry.runs}

    def wanted(run: Run) -> Iterator[Helper]:
        if run.key in raised:
            raise ValueError(run.key)
        return iter(true(run))

    monkeypatch.setattr(helper_plan, "wanted", wanted)

    async def story(stage: Stage) -> None:
        raised.add(other)
        await stage.sync()
        (made,) = stage.pods()
        raised.add(KEY)
        await stage.sync()
        assert stage.pods() == [made], "what the run wants is not known"
        raised.clear()
        move.lose(move.moved)
        move.see(pod(1, life=3, node="node-1", host_paths=(PATH,)))
        await stage.sync()
        assert stage.pods() == []

    play(story, move.registry)


@pytest.mark.parametrize("status", [403, 404])
def test_a_record_that_cannot_be_written_is_tried_once_a_minute_and_not_each_second(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each run there is one; a quota may refuse them, or their namespace is not there."""
    move = Move()

    def refuse(path: str, body: dict[str, Any]) -> web.Response:
        return web.json_response({"message": "not here"}, status=status)

    def to_write(server: ApiServer) -> int:
        return len(server.asked("POST", "/configmaps"))

    async def story(stage: Stage) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(stage.server, "_create", refuse)
            for _ in range(3):
                await stage.sync()
                stage.now += 1.0
        assert to_write(stage.server) == 1
        stage.now += AGAIN_S
        await stage.sync()
        assert to_write(stage.server) == 2
        assert len(stage.notes()) == 1
        assert stage.helper_controller._not_before == {}, "what is over is not remembered"

    play(story, move.registry)


def test_a_round_over_many_runs_lets_others_have_their_turn() -> None:
    registry, turns = Registry(helper_paths=(PATH,)), 0
    for number in range(250):
        key = RunKey(KEY.namespace, f"run-{number}")
        registry.pod_seen(pod(0, uid=f"uid-{number}", run=key), at=T0)

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def story(stage: Stage) -> None:
        await stage.helper_controller.sync()
        meanwhile = asyncio.create_task(others())
        await asyncio.sleep(0)
        before = turns
        await stage.helper_controller.sync()  # nothing is to be written
        assert turns - before >= 4
        meanwhile.cancel()

    play(story, registry)
