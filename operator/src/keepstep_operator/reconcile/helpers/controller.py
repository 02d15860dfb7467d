"""Creates and deletes helper pods, so that they are those that `helper_plan` and `cleanup` want.

Level-triggered, once a second: it remembers nothing that it cannot see again, except when to retry
a pod that failed. No step of training or restore waits for any of this.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from keepstep.wire.reports import STILL_USED_EXIT
from keepstep_operator.api.model import RunKey
from keepstep_operator.bodies import Body
from keepstep_operator.journal import crash, say, warn
from keepstep_operator.kube import (
    CONFIG_MAPS,
    PODS,
    Client,
    Conflict,
    Feed,
    KubeError,
    NotFound,
)
from keepstep_operator.reconcile.helpers import cleanup, pod_spec
from keepstep_operator.reconcile.helpers.cleanup import Cleaning, RunDirectories
from keepstep_operator.reconcile.helpers.pod_spec import CLEANS, HelperDefaults
from keepstep_operator.reconcile.metrics import Metrics
from keepstep_operator.reconcile.ratelimit import Throttle
from keepstep_operator.reconcile.state import helper_plan
from keepstep_operator.reconcile.state.actions import Action
from keepstep_operator.reconcile.state.registry import Registry

EVERY_S: Final = 1.0
AGAIN_S: Final = 60.0
"""After how long a pod that failed, or could not be created, is created again, and a record that
could not be written is written again."""
PENDING_S: Final = 1800.0
"""A cleaning pod that is pending for so long makes room for others, for the same time."""
MOST_CLEANERS: Final = 8
"""The most cleaning pods at a time."""
_OVER: Final = ("Succeeded", "Failed")
_CRASH_LOGGED_S: Final = 600.0
_NO_RUN: Final = RunKey("", "")
_AT_ONCE: Final = 100
"""How many runs of a round are looked at before others have their turn."""

T = TypeVar("T")


class HelperController:
    """One task, `run`, and two feeds. `grace_s`: how long a run must be gone before its directories
    are removed; None: they are never removed."""

    def __init__(
        self,
        registry: Registry,
        client: Client,
        defaults: HelperDefaults,
        *,
        carry_out: Callable[[Iterable[Action]], None],
        metrics: Metrics,
        clock: Callable[[], float],
        host_paths: tuple[str, ...],
        grace_s: float | None,
    ) -> None:
        self._registry = registry
        self._client = client
        self._defaults = defaults
        self._carry_out = carry_out
        self._metrics = metrics
        self._clock = clock
        self._host_paths = host_paths
        self._grace_s = grace_s
        self.pods_by_name: dict[str, Body] = {}
        self._graves: dict[RunKey, RunDirectories] = {}
        self._written: dict[RunKey, RunDirectories] = {}
        self._uids: dict[RunKey, str] = {}
        self._not_before: dict[str, float] = {}
        self._pending_since: dict[str, float] = {}
        self._left_out: set[RunKey] = set()
        self._crashes = Throttle(burst=5, refill_s=_CRASH_LOGGED_S)
        self.pods = Feed[str](
            name="helper pods",
            resource=PODS,
            labels=pod_spec.LABEL,
            key_of=_name,
            seen=self._pod_seen,
            gone=self._pod_gone,
            namespace=defaults.namespace,
            told=metrics.following,
        )
        self.records = Feed[str](
            name="directories of runs",
            resource=CONFIG_MAPS,
            labels=cleanup.LABEL,
            key_of=_name,
            seen=self._grave_seen,
            gone=self._grave_gone,
            namespace=defaults.namespace,
            told=metrics.following,
        )

    # --- what is seen ------------------------------------------------------------------------

    def _pod_seen(self, body: Body) -> None:
        name, before = _name(body), self.pods_by_name.get(_name(body))
        if before is not None and before["metadata"]["uid"] != body["metadata"]["uid"]:
            self._pod_gone(name)
        self.pods_by_name[name] = body
        helper = pod_spec.record(body)
        if helper is not None:
            self._registry.helper_seen(helper)
        else:
            self._carry_out(self._registry.helper_gone(body["metadata"]["uid"], at=self._clock()))

    def _pod_gone(self, name: str) -> None:
        body = self.pods_by_name.pop(name, None)
        self._pending_since.pop(name, None)
        if body is not None:
            self._carry_out(self._registry.helper_gone(body["metadata"]["uid"], at=self._clock()))

    def _grave_seen(self, body: Body) -> None:
        """Take over an entry that an earlier reconciler wrote. From then on only this one writes
        it."""
        grave = cleanup.parse(body)
        if grave is None or body["metadata"]["name"] != grave.name:
            return
        self._uids[grave.run] = str(body["metadata"].get("uid") or "")
        if grave.run not in self._graves:
            self._graves[grave.run] = self._written[grave.run] = grave

    def _grave_gone(self, name: str) -> None:
        """An entry was deleted. If its run is gone, the directories stay where they are."""
        for run, grave in list(self._graves.items()):
            if grave.name == name and run not in self._registry.runs:
                del self._graves[run]
                self._written.pop(run, None)
                self._uids.pop(run, None)
                say("directories of a run are left alone", run=str(run), reason="record deleted")

    # --- working -----------------------------------------------------------------------------

    async def run(self, seen: Iterable[asyncio.Event]) -> None:
        """Do a round each second, for ever. `seen`: set once all existing objects are listed.
        Before that, an object that was not seen is not known to be gone."""
        for event in (*seen, self.pods.loaded, self.records.loaded):
            await event.wait()
        while True:
            with self._guarded(_NO_RUN):
                await self.sync()
            await asyncio.sleep(EVERY_S)

    @contextmanager
    def _guarded(self, run: RunKey) -> Iterator[None]:
        """Leave a run that raises out of this round; the error does not end the process."""
        try:
            yield
        except Exception:
            self._left_out.add(run)
            self._metrics.left_out("helpers")
            if self._crashes.allows(run, "helpers", period_s=_CRASH_LOGGED_S, at=self._clock()):
                crash("helper pods not looked after", run=str(run))

    async def sync(self) -> None:
        """One round."""
        self._left_out.clear()
        now = self._clock()
        self._not_before = {name: at for name, at in self._not_before.items() if at > now}
        await self._bury()
        wanted = {**await self._serving(), **self._cleaning()}
        there = dict(self.pods_by_name)
        for name, body in there.items():
            if _phase(body) in _OVER or not (name in wanted or self._stays(body)):
                with self._guarded(_run_of(body)):
                    await self._end(name, body)
        for name, body in wanted.items():
            # a pod that was there a moment ago is made in the next round, if it is still wanted
            if name not in {*there, *self.pods_by_name} and self._may(name):
                with self._guarded(_run_of(body)):
                    await self._make(name, body)

    def _stays(self, body: Body) -> bool:
        """Whether to keep a pod that is not wanted. If its run was left out, it is not known what
        the run wants; in doubt shards are served, and not removed."""
        told = pod_spec.about(body)
        return told is not None and told[0] != CLEANS and told[1] in self._left_out

    def _may(self, name: str) -> bool:
        """Whether enough time has passed since this pod or record failed."""
        return self._clock() >= self._not_before.get(name, 0.0)

    async def _serving(self) -> dict[str, Body]:
        found: dict[str, Body] = {}
        async for key, run in _unhurried([*self._registry.runs.items()]):
            with self._guarded(key):
                wanted = helper_plan.wanted(run)
                found |= {one.name: pod_spec.serving(one, self._defaults) for one in wanted}
        return found

    def _cleaning(self) -> dict[str, Body]:
        found: list[Cleaning] = []
        for key, grave in self._graves.items():
            if key not in self._left_out:
                with self._guarded(key):
                    found += self._due(grave)
        return {one.name: pod_spec.cleaning(one, self._defaults) for one in found[:MOST_CLEANERS]}

    def _due(self, grave: RunDirectories) -> Iterator[Cleaning]:
        now, nodes = self._clock(), self._registry.nodes
        if self._grace_s is None:
            return
        for one in cleanup.due(grave, nodes, grace_s=self._grace_s, at=now):
            allowed = set(one.paths) == set(helper_plan.allowed(one.paths, self._host_paths))
            # one that has failed or cannot start must not take the place of another
            if allowed and self._may(one.name) and not self._stuck(one.name):
                yield one

    def _stuck(self, name: str) -> bool:
        """Whether the pod is pending for so long that its node may never take it."""
        body = self.pods_by_name.get(name)
        if body is None or _phase(body) != "Pending":
            return False
        return self._clock() - self._pending_since.setdefault(name, self._clock()) > PENDING_S

    # --- graves ------------------------------------------------------------------------------

    async def _bury(self) -> None:
        """Note which nodes runs are on, and since when runs are gone; write the changed records."""
        now = self._clock()
        async for key, run in _unhurried([*self._registry.runs.items()]):
            with self._guarded(key):
                known = self._graves.get(key) or RunDirectories(run=key)
                found = cleanup.visited(known, iter(run.pods.values()))
                if found.nodes:
                    self._graves[key] = found
        async for key in _unhurried([*self._graves]):
            if key not in self._graves:
                continue  # its record was deleted meanwhile
            with self._guarded(key):
                grave = cleanup.judged(self._graves[key], self._registry.runs, at=now)
                self._graves[key] = cleanup.without_lost_nodes(grave, self._registry.nodes, at=now)
                if self._graves[key] != self._written.get(key) and self._may(grave.name):
                    await self._write(self._graves[key])

    async def _write(self, grave: RunDirectories) -> None:
        """Write an entry. One without nodes is deleted; it is made again once the run is on a
        node."""
        namespace = self._defaults.namespace
        body = cleanup.render(grave, namespace=namespace)
        try:
            if not grave.nodes:
                uid = self._uids.get(grave.run, "")
                await self._client.delete(CONFIG_MAPS, grave.name, namespace=namespace, uid=uid)
            elif grave.run in self._written:
                await self._client.replace(CONFIG_MAPS, body, namespace=namespace)
            else:
                await self._client.create(CONFIG_MAPS, body, namespace=namespace)
        except Conflict:  # not listed yet: the next round replaces it
            self._written[grave.run] = RunDirectories(run=grave.run)
            return
        except NotFound as error:
            if grave.nodes and self._written.pop(grave.run, None) is None:
                self._not_noted(grave, error)  # there is no such namespace
            if grave.nodes:
                return
        except KubeError as error:
            self._not_noted(grave, error)
            return
        self._metrics.wrote("other")
        self._written[grave.run] = grave
        if not grave.nodes:
            for known in (self._graves, self._written):  # the feed may have been faster
                known.pop(grave.run, None)
            self._uids.pop(grave.run, None)
            say("directories of a run are gone", run=str(grave.run))

    def _not_noted(self, grave: RunDirectories, error: KubeError) -> None:
        """Retry later, since all records may fail for the same reason."""
        self._not_before[grave.name] = self._clock() + AGAIN_S
        warn("directories of a run not noted", run=str(grave.run), reason=str(error))
        self._metrics.wrote("other", failed=True)

    # --- pods --------------------------------------------------------------------------------

    async def _make(self, name: str, body: Body) -> None:
        try:
            made = await self._client.create(PODS, body, namespace=self._defaults.namespace)
        except Conflict:
            return  # the watch will show it
        except KubeError as error:
            self._not_before[name] = self._clock() + AGAIN_S
            warn("helper pod not made", pod=name, reason=str(error))
            self._metrics.wrote("other", failed=True)
            return
        self._metrics.wrote("other")
        command = body["spec"]["containers"][0]["command"]
        say("helper pod made", pod=name, does=" ".join(command[1:]))
        if name not in self.pods_by_name:
            self._pod_seen(made)  # its first report may be faster than the watch

    async def _end(self, name: str, body: Body) -> None:
        """Delete a pod, and note what a cleaning pod has done. A pod that failed is retried
        later."""
        if _phase(body) == "Succeeded":
            self._note_cleaned(body)
        elif _exit_status(body) == STILL_USED_EXIT:
            self._note_still_used(body)
        elif _phase(body) == "Failed":
            self._not_before[name] = self._clock() + AGAIN_S
            warn("helper pod failed", pod=name, reason=_last_words(body))
        elif self._stuck(name):
            self._not_before[name] = self._clock() + PENDING_S
            warn("helper pod did not begin", pod=name, reason=_last_words(body))
        if (body["metadata"]).get("deletionTimestamp"):
            return
        try:
            uid = str(body["metadata"].get("uid") or "")
            await self._client.delete(PODS, name, namespace=self._defaults.namespace, uid=uid)
            say("helper pod deleted", pod=name)
        except NotFound:
            self._pod_gone(name)
        except Conflict:  # another one of that name: the watch shows it
            return
        except KubeError as error:
            warn("helper pod not deleted", pod=name, reason=str(error))

    def _note_cleaned(self, body: Body) -> None:
        if (told := self._gone(body)) is not None:
            run, node = told
            self._graves[run] = cleanup.cleaned(self._graves[run], node)

    def _note_still_used(self, body: Body) -> None:
        if (told := self._gone(body)) is not None:
            run, node = told
            self._graves[run] = cleanup.still_used(self._graves[run], at=self._clock())
            say("run was alive while nobody watched", run=str(run), node=node)

    def _gone(self, body: Body) -> tuple[RunKey, str] | None:
        """The run and the node of a cleaning pod, if the run is still gone."""
        told = pod_spec.about(body)
        if told is None or told[0] != CLEANS:
            return None
        _, run, node = told
        return (run, node) if run in self._graves and run not in self._registry.runs else None


async def _unhurried(found: Iterable[T]) -> AsyncIterator[T]:
    """Iterate, and let others run now and then: each second, a round goes over all runs of the
    cluster."""
    for number, one in enumerate(found, 1):
        yield one
        if number % _AT_ONCE == 0:
            await asyncio.sleep(0)


def _name(body: Body) -> str:
    return str((body.get("metadata") or {}).get("name") or "")


def _run_of(body: Body) -> RunKey:
    told = pod_spec.about(body)
    return _NO_RUN if told is None else told[1]


def _phase(body: Body) -> str:
    return str((body.get("status") or {}).get("phase") or "Pending")


def _ended(body: Body) -> Body:
    """The state of the pod's container if it has terminated; otherwise empty."""
    statuses = (body.get("status") or {}).get("containerStatuses") or [{}]
    found: Body = (statuses[0].get("state") or {}).get("terminated") or {}
    return found


def _exit_status(body: Body) -> int:
    return int(_ended(body).get("exitCode") or 0)


def _last_words(body: Body) -> str:
    status = body.get("status") or {}
    if message := _ended(body).get("message"):
        return str(message)[-300:]
    return str(status.get("message") or status.get("reason") or "no reason given")
