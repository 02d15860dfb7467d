"""Helper pods as they are made, watched and deleted, against an API server that remembers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from keepstep.wire.reports import STILL_USED_EXIT
from keepstep_operator.kube import CONFIG_MAPS, PODS, Client, follow
from keepstep_operator.reconcile.helpers import cleanup
from keepstep_operator.reconcile.helpers.cleanup import RunDirectories
from keepstep_operator.reconcile.helpers.controller import (
    AGAIN_S,
    HelperController,
)
from keepstep_operator.reconcile.metrics import Metrics
from keepstep_operator.reconcile.state.registry import Registry
from tests.harness import until
from tests.operator.apiserver import ApiServer
from tests.operator.reconcile.samples import KEY, T0
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


@asynccontextmanager
async def staged(
    registry: Registry, *, before: RunDirectories | None = None, grace_s: float | None = GRACE_S
) -> AsyncIterator[Stage]:
    server = ApiServer()
    async with server.running(), Client(server.access) as client, asyncio.TaskGroup() as group:
        if before is not None:
            body = cleanup.render(before, namespace=SYSTEM)
            body["metadata"]["uid"] = "uid-of-the-record"
            server.put(CONFIG_MAPS, body)
        stage = Stage(registry, server, client, grace_s=grace_s)
        feeds = (stage.helper_controller.pods, stage.helper_controller.records)
        following = group.create_task(follow(client, feeds))
        for feed in feeds:
            await feed.loaded.wait()
        yield stage
        following.cancel()


async def test_a_run_that_is_gone_is_cleaned_after_its_time_of_grace_and_then_forgotten() -> None:
    move = Move()

    async with staged(move.registry) as stage:
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


GONE = RunDirectories(run=KEY, nodes={"node-0": (PATH,)}, gone_since=T0 - 2 * GRACE_S)


async def test_a_run_that_lived_while_the_operator_was_away_has_its_time_of_grace_anew() -> None:
    async with staged(Registry(), before=GONE) as stage:
        await stage.sync()
        (pod,) = stage.pods()
        await stage.becomes(pod["metadata"]["name"], "Failed", exits=STILL_USED_EXIT)
        await stage.sync()
        await stage.sync()
        assert (stage.pods(), stage.notes()) == ([], [replace(GONE, gone_since=T0)])
        stage.now += GRACE_S
        await stage.sync()
        assert len(stage.pods()) == 1


async def test_cleaning_can_be_switched_off_and_keeps_to_what_is_allowed() -> None:
    elsewhere = replace(GONE, nodes={"node-0": ("/etc",)})
    for before, grace_s in ((GONE, None), (elsewhere, GRACE_S)):
        async with staged(Registry(), before=before, grace_s=grace_s) as stage:
            await stage.sync()
            assert stage.pods() == []
            assert len(stage.notes()) == 1
