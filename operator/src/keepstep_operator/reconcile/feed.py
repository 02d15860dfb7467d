"""Collections of the cluster, followed: every object seen, changed or gone, once each.

Our own loop over `Client.follow` and not kopf, which cannot narrow a watch by label on the server
(docs/adr/0004-watch-pods-by-label.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from keepstep_operator.bodies import Body
from keepstep_operator.journal import crash, say, warn
from keepstep_operator.kube import Change, ChangeKind, Client, KubeError, Listing, Resource
from keepstep_operator.reconcile.parsing import lean_node, lean_pod

Key = TypeVar("Key", bound=Hashable)


class PodClient(Client):
    """A client for lists of pods: each page is made lean as it comes, since thousands of whole
    pods at once are more memory than everything else here together. Pages are small, as those of
    others' jobs are whole until they are looked at."""

    _page = 50
    _lean = staticmethod(lean_pod)

    async def _call(self, *args: Any, **options: Any) -> Body:
        answer = await super()._call(*args, **options)
        if isinstance(items := answer.get("items"), list):
            answer["items"] = [lean for one in items if (lean := self._lean(one)) is not None]
        return answer


class NodeClient(PodClient):
    """The same for nodes, of which each lists all its images."""

    _lean = staticmethod(lean_node)


@dataclass(kw_only=True)
class Feed(Generic[Key]):
    """One collection. `key_of` None: not interesting. `seen` and `gone` are told of each object.

    `known`: what was seen and is not gone; a new listing tells of what went in between.
    """

    name: str
    resource: Resource
    key_of: Callable[[Body], Key | None]
    seen: Callable[[Body], None]
    gone: Callable[[Key], None]
    told: Callable[[str, bool], None]
    labels: str = ""
    namespace: str | None = None
    known: set[Key] = field(default_factory=set)
    loaded: asyncio.Event = field(default_factory=asyncio.Event)
    _works: bool = True

    async def run(self, client: Client) -> None:
        """For ever."""
        followed = client.follow(self.resource, namespace=self.namespace, labels=self.labels)
        async for item in followed:
            try:
                self._take(item)
            except Exception:  # one body that is not as expected must not end the process
                crash("object not understood", collection=self.name)

    def _take(self, item: Listing | Change | KubeError) -> None:
        if isinstance(item, KubeError):
            if self._works:
                warn("not followed", collection=self.name, reason=str(item), status=item.status)
            self._works = False
            self.told(self.name, False)
        elif isinstance(item, Listing):
            self._take_listing(item)
        elif item.kind is ChangeKind.DELETED:
            self._forget(self.key_of(item.body))
        else:
            self._see(item.body)

    def _take_listing(self, listing: Listing) -> None:
        listed = {key for one in listing.items if (key := self._see(one)) is not None}
        for key in self.known - listed:
            self._forget(key)
        if not self._works or not self.loaded.is_set():
            say("following", collection=self.name, objects=len(listed))
        self._works = True
        self.told(self.name, True)
        self.loaded.set()

    def _see(self, body: Body) -> Key | None:
        key = self.key_of(body)
        if key is None:
            return None
        self.known.add(key)
        try:
            self.seen(body)
        except Exception:
            crash("object not understood", collection=self.name)
        return key

    def shown(self, key: Key) -> None:
        """It is there, as somebody else saw; when the next listing has it no more it is gone."""
        self.known.add(key)

    def _forget(self, key: Key | None) -> None:
        if key is not None and key in self.known:
            self.known.discard(key)
            self.gone(key)
