"""Kubernetes Events on the root job (or on the run, while no job is known): said seldom, said once.

core/v1, as `kubectl describe` of any version shows them. An event that cannot be written in three
tries is dropped: the run's status says the same.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Final

from keepstep_operator import names
from keepstep_operator.api.run import cut, utc
from keepstep_operator.bodies import Body
from keepstep_operator.journal import say, warn
from keepstep_operator.kube import EVENTS, Client, Denied, KubeError, NotFound, Rejected
from keepstep_operator.reconcile.metrics import Metrics
from keepstep_operator.reconcile.ratelimit import Throttle
from keepstep_operator.reconcile.state.actions import EmitEvent

COMPONENT: Final = "keepstep"
_LONGEST_MESSAGE: Final = 1000
_LONGEST_NAME: Final = 200
_WAITING: Final = 1000
_TRIES: Final = 3
_PAUSE_S: Final = 2.0


class EventWriter:
    """A task of its own: `tell` events, and `run` writes them."""

    def __init__(self, client: Client, *, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._client = client
        self._metrics = metrics
        self._clock = clock
        self._throttle = Throttle()
        self._waiting: asyncio.Queue[EmitEvent] = asyncio.Queue(_WAITING)

    def tell(self, event: EmitEvent) -> None:
        """Write it, unless the same was said lately or too much was."""
        now, thing = self._clock(), (event.reason, event.topic)
        if not self._throttle.allows(event.run, thing, period_s=event.period_s, at=now):
            return
        say("event", run=str(event.run), reason=event.reason, message=event.message)
        try:
            self._waiting.put_nowait(event)
        except asyncio.QueueFull:
            warn("event dropped", run=str(event.run), reason=event.reason)

    async def run(self) -> None:
        """For ever."""
        while True:
            await self._write(await self._waiting.get())

    async def _write(self, event: EmitEvent) -> None:
        body = event_body(event, at=self._clock())
        for attempt in range(1, _TRIES + 1):
            if await self._try(event, body):
                return
            await asyncio.sleep(_PAUSE_S * attempt)
        warn("event dropped", run=str(event.run), reason=event.reason)

    async def _try(self, event: EmitEvent, body: Body) -> bool:
        """Whether it is settled: written, or never to be."""
        try:
            await self._client.create(EVENTS, body, namespace=event.run.namespace)
        except KubeError as error:
            warn("event not written", run=str(event.run), reason=str(error))
            self._metrics.wrote("event", failed=True)
            return isinstance(error, NotFound | Denied | Rejected)
        self._metrics.wrote("event")
        return True


def event_body(event: EmitEvent, *, at: float) -> Body:
    """The Event object."""
    involved: Body = {
        "apiVersion": names.API_VERSION,
        "kind": "CheckpointRun",
        "name": event.run.name,
    }
    if event.about is not None:
        involved = {
            "apiVersion": event.about.api_version,
            "kind": event.about.kind,
            "name": event.about.name,
            "uid": event.about.uid,
        }
    when = utc(at)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{involved['name'][:_LONGEST_NAME]}.{secrets.token_hex(8)}",
            "namespace": event.run.namespace,
        },
        "involvedObject": {**involved, "namespace": event.run.namespace},
        "type": "Warning" if event.warning else "Normal",
        "reason": event.reason,
        "message": cut(event.message, longest=_LONGEST_MESSAGE),
        "source": {"component": COMPONENT},
        "reportingComponent": COMPONENT,
        "reportingInstance": COMPONENT,
        "firstTimestamp": when,
        "lastTimestamp": when,
        "count": 1,
    }
