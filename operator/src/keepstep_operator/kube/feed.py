"""Follows a collection for admission: one call for each object seen, changed or gone.

A listing, then a watch from there. When the watch ends by an error, the collection is listed again;
what is missing from the listing is gone. (Reconcile follows objects by kopf.)
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Hashable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from keepstep_operator.bodies import Body
from keepstep_operator.journal import crash, say, warn
from keepstep_operator.kube.client import Client
from keepstep_operator.kube.errors import KubeError
from keepstep_operator.kube.resources import Resource

Key = TypeVar("Key", bound=Hashable)

_LONGEST_PAUSE_S: Final = 15.0


@dataclass(kw_only=True)
class Feed(Generic[Key]):
    """One collection. `key_of`: the key of an object. `seen`, `gone`: called for each object.
    `loaded`: set once all objects were seen; it stays when the API server goes away."""

    name: str
    resource: Resource
    key_of: Callable[[Body], Key]
    seen: Callable[[Body], None]
    gone: Callable[[Key], None]
    known: set[Key] = field(default_factory=set)
    loaded: asyncio.Event = field(default_factory=asyncio.Event)

    async def follow(self, client: Client) -> None:
        """Follow it, for ever."""
        failures = 0
        while True:
            try:
                version = await self._list(client)
                if failures or not self.loaded.is_set():
                    say("following", collection=self.name, objects=len(self.known))
                failures = 0
                self.loaded.set()
                while version:
                    version = await self._watch(client, version)
            except KubeError as error:  # noqa: PERF203
                failures += 1
                if failures == 1:
                    warn("not followed", collection=self.name, reason=str(error))
                await asyncio.sleep(max(pause_s(failures), error.retry_after_s))

    async def _list(self, client: Client) -> str:
        """See all objects; returns the version from which to watch."""
        found, version = set[Key](), ""
        async for listed, body in client.listed(self.resource):
            version = listed
            if body is not None:
                self._take("ADDED", body)
                found.add(self.key_of(body))
        for key in self.known - found:
            self._forget(key)
        return version

    async def _watch(self, client: Client, version: str) -> str:
        """Returns the version from which to go on; '' if all is to be listed again."""
        async with aclosing(client.watch(self.resource, version)) as events:
            async for event in events:
                kind, body = event.get("type"), event.get("object") or {}
                if kind == "ERROR":
                    return ""
                version = str((body.get("metadata") or {}).get("resourceVersion") or version)
                if kind != "BOOKMARK":
                    self._take(str(kind), body)
        return version

    def _take(self, kind: str, body: Body) -> None:
        try:
            key = self.key_of(body)
            if kind == "DELETED":
                self._forget(key)
            else:
                self.known.add(key)
                self.seen(body)
        except Exception:  # one odd body must not end the process
            crash("object not understood", collection=self.name)

    def _forget(self, key: Key) -> None:
        if key in self.known:
            self.known.discard(key)
            self.gone(key)


async def follow(client: Client, feeds: Sequence[Feed[Any]]) -> None:
    """Follow these collections, for ever."""
    async with asyncio.TaskGroup() as group:
        for feed in feeds:
            group.create_task(feed.follow(client), name=f"follow {feed.name}")


def pause_s(failures: int) -> float:
    """Seconds before the next try; they grow to 15 s."""
    return min(_LONGEST_PAUSE_S, 0.5 * 2.0 ** min(failures - 1, 10)) * random.uniform(0.5, 1.0)
