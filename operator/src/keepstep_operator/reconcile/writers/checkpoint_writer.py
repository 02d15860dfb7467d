"""Writes Checkpoint objects, seldom, a few at a time, and only after it has seen those there are.

Objects that somebody else made are left alone: only those with our label are looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from keepstep_operator import names
from keepstep_operator.api.model import RunKey
from keepstep_operator.bodies import Body
from keepstep_operator.journal import crash, say, warn
from keepstep_operator.kube import (
    CHECKPOINTS,
    Client,
    Conflict,
    Feed,
    KubeError,
    NotFound,
    PatchType,
)
from keepstep_operator.reconcile.metrics import Metrics
from keepstep_operator.reconcile.ratelimit import Pacer
from keepstep_operator.reconcile.state.registry import Registry
from keepstep_operator.reconcile.state.run_view import (
    KeptStep,
    is_certain,
    kept_steps,
    measured,
)
from keepstep_operator.reconcile.writers.checkpoint_objects import (
    MANAGED_BY,
    MANAGER,
    Changes,
    Seen,
    body_of,
    changes,
    seen,
    status_of,
)

PERIOD_S: Final = 10.0
AT_ONCE: Final = 20
"""Writes of one run in one period, at most."""
_POLL_S: Final = 1.0


_run_key: Final = lru_cache(maxsize=4096)(RunKey)
"""One object for the hundred checkpoints of a run."""


class CheckpointWriter:
    """A task of its own: `mark` runs, and `run` writes their objects."""

    def __init__(
        self,
        registry: Registry,
        client: Client,
        *,
        metrics: Metrics,
        clock: Callable[[], float],
        pacer: Pacer[RunKey] | None = None,
    ) -> None:
        self._registry = registry
        self._client = client
        self._metrics = metrics
        self._clock = clock
        self._pacer = pacer or Pacer(least_period_s=PERIOD_S, writes_a_second=5.0)
        self._known: dict[RunKey, dict[str, Seen]] = {}
        self.feed = Feed[tuple[RunKey, str]](
            name="checkpoints",
            resource=CHECKPOINTS,
            labels=names.RUN_KEY_LABEL,
            key_of=_key_of,
            seen=self._seen,
            gone=self._gone,
            told=metrics.following,
        )

    def mark(self, run: RunKey) -> None:
        """What it keeps may have changed."""
        self._pacer.mark(run, at=self._clock())

    async def run(self) -> None:
        """For ever, from when all that is there was seen."""
        await self.feed.loaded.wait()
        while True:
            await asyncio.sleep(_POLL_S)
            for key in self._pacer.take(at=self._clock()):
                await self._look_after(key)

    async def _look_after(self, key: RunKey) -> None:
        run = self._registry.runs.get(key)
        if run is None:
            self._pacer.forget(key)
            return
        try:
            known = self._known.get(key, {})
            due = changes(kept_steps(run), known, certain=is_certain(run))
            await self._write(key, due.first(AT_ONCE))
        except KubeError as error:
            warn("checkpoints not written", run=str(key), reason=str(error))
            self._metrics.wrote("checkpoint", failed=True)
            self._pacer.failed(key, at=self._clock())
            return
        except Exception:  # one run that is not as expected must not end the process
            crash("checkpoints not written", run=str(key))
            self._metrics.left_out("checkpoints")
            self._pacer.failed(key, at=self._clock())
            return
        self._pacer.done(key, rests=run.finished_at is not None)
        if len(due) > AT_ONCE:
            self.mark(key)

    async def _write(self, key: RunKey, due: Changes) -> None:
        for one in due.made:
            await self._make(key, one)
        for one in due.moved:
            await self._tell(key, one, since=self._known[key].get(one.name, Seen()).since)
        for name in due.gone:
            await self._forget(key, name)

    async def _make(self, key: RunKey, one: KeptStep) -> None:
        run = self._registry.runs.get(key)
        if run is None or run.object is None or not run.object.uid:
            self.mark(key)  # its owner is being made
            return
        body = body_of(measured(run, one), namespace=key.namespace, owner_uid=run.object.uid)
        try:
            await self._client.create(CHECKPOINTS, body, namespace=key.namespace)
        except Conflict:
            return  # of that name, but not ours
        self._metrics.wrote("checkpoint")
        await self._tell(key, one, since="")

    async def _tell(self, key: RunKey, one: KeptStep, *, since: str) -> None:
        status = status_of(one, since=since, at=self._clock())
        patch = [{"op": "add", "path": "/status", "value": status}]
        try:
            await self._client.patch(
                CHECKPOINTS,
                one.name,
                patch,
                namespace=key.namespace,
                kind=PatchType.JSON,
                subresource="status",
            )
        except NotFound:
            return  # somebody deleted it: it is made again
        self._metrics.wrote("checkpoint")

    async def _forget(self, key: RunKey, name: str) -> None:
        try:
            uid = self._known[key][name].uid
            await self._client.delete(CHECKPOINTS, name, namespace=key.namespace, uid=uid)
        except (NotFound, Conflict):
            return
        self._metrics.wrote("checkpoint")
        say("checkpoint deleted", run=str(key), checkpoint=name, reason="its step is gone")

    def _seen(self, body: Body) -> None:
        key, name = _named(body)
        self._known.setdefault(key, {})[name] = seen(body)

    def _gone(self, which: tuple[RunKey, str]) -> None:
        key, name = which
        known = self._known.get(key, {})
        known.pop(name, None)
        if not known:
            self._known.pop(key, None)
        self.mark(key)


def _key_of(body: Body) -> tuple[RunKey, str] | None:
    labels = (body.get("metadata") or {}).get("labels") or {}
    return _named(body) if labels.get(MANAGED_BY) == MANAGER else None


def _named(body: Body) -> tuple[RunKey, str]:
    metadata = body.get("metadata") or {}
    run = str((metadata.get("labels") or {}).get(names.RUN_KEY_LABEL) or "")
    key = _run_key(str(metadata.get("namespace") or ""), run)
    return key, str(metadata.get("name") or "")
