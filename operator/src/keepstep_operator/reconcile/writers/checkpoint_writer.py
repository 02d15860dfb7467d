"""Writes Checkpoint objects: seldom, a few at a time, and only after listing the existing ones.

Only objects with our label are looked at, so objects that others made are left alone. Only the
leading reconciler writes ours. So they are listed run by run, and now and then again, to find those
that people deleted. A watch of a hundred objects for each of a thousand runs would occupy the
process for a minute after each start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from keepstep_operator import names
from keepstep_operator.api.model import RunKey
from keepstep_operator.journal import crash, say, warn
from keepstep_operator.kube import (
    CHECKPOINTS,
    Client,
    Conflict,
    KubeError,
    NotFound,
    PatchType,
)
from keepstep_operator.reconcile.metrics import Metrics
from keepstep_operator.reconcile.ratelimit import Pacer, Throttle
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
    pack,
    seen,
    status_of,
    unpack,
)

PERIOD_S: Final = 10.0
LIST_EVERY_S: Final = 600.0
"""How often the objects are listed. Deleted ones are then made again."""
AT_ONCE: Final = 20
"""The most writes for one run in one period."""
_POLL_S: Final = 1.0
_LOGGED_EVERY_S: Final = 3600.0


@dataclass
class _Listed:
    """The objects of a run, `pack`ed, as they were listed `at` a time and written since. `owner`:
    the uid of the CheckpointRun then."""

    owner: str
    at: float
    packed: bytes

    @contextmanager
    def known(self) -> Iterator[dict[str, Seen]]:
        """The objects by name. What the block changes is kept, also if it raises."""
        known = unpack(self.packed)
        try:
            yield known
        finally:
            self.packed = pack(known)


class CheckpointWriter:
    """Writes the objects of runs that are `mark`ed, in a task, `run`."""

    def __init__(
        self,
        registry: Registry,
        client: Client,
        *,
        metrics: Metrics,
        clock: Callable[[], float],
        pacer: Pacer[RunKey] | None = None,
        list_every_s: float = LIST_EVERY_S,
    ) -> None:
        self._registry = registry
        self._client = client
        self._metrics = metrics
        self._clock = clock
        self._pacer = pacer or Pacer(least_period_s=PERIOD_S, writes_a_second=5.0)
        self._list_every_s = list_every_s
        self._listed: dict[RunKey, _Listed] = {}
        self._logged = Throttle(burst=5, refill_s=_LOGGED_EVERY_S)

    def mark(self, run: RunKey) -> None:
        """The steps that this run keeps may have changed."""
        self._pacer.mark(run, at=self._clock())

    async def run(self) -> None:
        """Write what is due, for ever."""
        while True:
            await asyncio.sleep(_POLL_S)
            for key, listed in [*self._listed.items()]:
                if self._clock() - listed.at >= self._list_every_s:
                    self.mark(key)
            for key in self._pacer.take(at=self._clock()):
                await self._look_after(key)
                await asyncio.sleep(0)  # lets others run even if nothing was written

    async def _look_after(self, key: RunKey) -> None:
        run = self._registry.runs.get(key)
        if run is None:
            self._pacer.forget(key)
            self._listed.pop(key, None)
            return
        if run.object is None or not run.object.uid:
            self._pacer.done(key, rests=False)
            self.mark(key)  # the objects' owner is not created yet
            return
        try:
            listed = await self._there(key, owner=run.object.uid)
            with listed.known() as known:
                due = changes(kept_steps(run), known, certain=is_certain(run))
                await self._write(key, known, due.first(AT_ONCE), owner=listed.owner)
        except KubeError as error:
            warn("checkpoints not written", run=str(key), reason=str(error))
            self._metrics.wrote("checkpoint", failed=True)
            self._pacer.failed(key, at=self._clock())
            return
        except Exception:  # one odd run must not end the process
            crash("checkpoints not written", run=str(key))
            self._metrics.left_out("checkpoints")
            self._pacer.failed(key, at=self._clock())
            return
        self._pacer.done(key, rests=run.finished_at is not None)
        if len(due) > AT_ONCE:
            self.mark(key)

    async def _there(self, key: RunKey, *, owner: str) -> _Listed:
        """The objects of a run. They are listed again if the owner is another, since they are
        deleted with it."""
        found = self._listed.get(key)
        if found is None or found.owner != owner or self._clock() - found.at >= self._list_every_s:
            at, known = self._clock(), dict[str, Seen]()
            labels = f"{names.RUN_KEY_LABEL}={key.name},{MANAGED_BY}={MANAGER}"
            async for body in self._client.list(
                CHECKPOINTS, namespace=key.namespace, labels=labels
            ):
                known[str(body["metadata"]["name"])] = seen(body)
            found = self._listed[key] = _Listed(owner=owner, at=at, packed=pack(known))
        return found

    async def _write(
        self, key: RunKey, known: dict[str, Seen], due: Changes, *, owner: str
    ) -> None:
        for one in due.made:
            await self._make(key, known, one, owner=owner)
        for one in due.moved:
            await self._tell(key, known, one)
        for name in due.gone:
            await self._forget(key, known, name)

    async def _make(
        self, key: RunKey, known: dict[str, Seen], one: KeptStep, *, owner: str
    ) -> None:
        run = self._registry.runs.get(key)
        if run is None:
            return
        body = body_of(measured(run, one), namespace=key.namespace, owner_uid=owner)
        try:
            made = await self._client.create(CHECKPOINTS, body, namespace=key.namespace)
        except Conflict:
            if self._logged.allows(key, one.name, period_s=_LOGGED_EVERY_S, at=self._clock()):
                reason = "an object that is not the operator's has this name: delete it"
                warn("checkpoint not made", run=str(key), checkpoint=one.name, reason=reason)
            return
        self._metrics.wrote("checkpoint")
        known[one.name] = seen(made)
        await self._tell(key, known, one)

    async def _tell(self, key: RunKey, known: dict[str, Seen], one: KeptStep) -> None:
        since = known.get(one.name, Seen()).since
        status = status_of(one, since=since, at=self._clock())
        patch = [{"op": "add", "path": "/status", "value": status}]
        try:
            told = await self._client.patch(
                CHECKPOINTS,
                one.name,
                patch,
                namespace=key.namespace,
                kind=PatchType.JSON,
                subresource="status",
            )
        except NotFound:
            known.pop(one.name, None)  # it was deleted: make it again
            self.mark(key)
            return
        self._metrics.wrote("checkpoint")
        known[one.name] = seen(told)

    async def _forget(self, key: RunKey, known: dict[str, Seen], name: str) -> None:
        uid = known.pop(name).uid
        try:
            await self._client.delete(CHECKPOINTS, name, namespace=key.namespace, uid=uid)
        except (NotFound, Conflict):
            return
        self._metrics.wrote("checkpoint")
        say("checkpoint deleted", run=str(key), checkpoint=name, reason="its step is gone")
