"""Watches collections of the cluster through kopf: one call for each object seen, changed or gone.

kopf lists and watches; the server selects. Three things it does not tell (docs/adr/0004-kopf.md):

  loaded   when all existing objects were shown. So their names are listed, and `loaded` is set once
           kopf has shown all of them
  gone     that an object was deleted while kopf listed anew. So after each such listing, and every
           ten minutes, the names are listed again; an object that is not among them is gone
  works    that it fails. It takes its pauses between two tries from us, so when it takes a second
           one, it has failed. Then the names are listed, and the error of that says why

kopf runs in its own thread, because it takes over signals, and cancels every task of its event
loop when it ends. It ends at a single answer that it does not expect. Then it is started anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import kopf
from kopf._core.reactor.inventory import ResourceMemories, ResourceMemory

from keepstep_operator.bodies import Body
from keepstep_operator.journal import crash, say, warn
from keepstep_operator.kube.client import MANAGER, Client
from keepstep_operator.kube.errors import Denied, KubeError
from keepstep_operator.kube.resources import Resource

Key = TypeVar("Key", bound=Hashable)

SWEEP_S: Final = 600.0
_SOON_S: Final = 1.0
_SHOWN_S: Final = 10.0
"""How long to wait for kopf to show all listed names. After that some may be gone, so they are
listed again."""
_ANEW_S: Final = 5.0
_END_S: Final = 2.0
_PAUSE_S: Final = (0.5, 15.0)


@dataclass(kw_only=True)
class Feed(Generic[Key]):
    """One collection. `key_of`: the key of an object, by its metadata alone; None for objects that
    are not interesting. `seen`, `gone`: called for each object. `told`: called with whether the
    watch works.

    `known`: the keys of objects that were seen and are not gone.
    """

    name: str
    resource: Resource
    key_of: Callable[[Body], Key | None]
    seen: Callable[[Body], None]
    gone: Callable[[Key], None]
    told: Callable[[str, bool], None] = lambda name, works: None
    labels: str = ""
    namespace: str | None = None
    known: set[Key] = field(default_factory=set)
    loaded: asyncio.Event = field(default_factory=asyncio.Event)
    served: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the API server is known to serve the kind, even if we may not read it. kopf looks
    for the kind only once, and so starts after this."""
    doubted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when something may have been missed, or fails."""
    _works: bool = True

    def take(self, event: str | None, body: Body) -> None:
        """Take in an object that kopf shows. `event`: as the watch names it; None for an object of
        a listing."""
        try:
            key = self.key_of(body)
            if event == "DELETED":
                self.forget(key)
            elif key is not None:
                self.known.add(key)
                self.seen(body)
        except Exception:  # one odd body must not end the process
            crash("object not understood", collection=self.name)
        if event is None and self.loaded.is_set():
            self.doubted.set()

    def shown(self, key: Key) -> None:
        """Another part of the program saw this object. If it is missing when the names are listed,
        it is gone."""
        self.known.add(key)
        self.doubted.set()

    def forget(self, key: Key | None) -> None:
        """The object is gone."""
        if key is not None and key in self.known:
            self.known.discard(key)
            try:
                self.gone(key)
            except Exception:  # as in `take`
                crash("end of an object not understood", collection=self.name)

    async def look_after(self, client: Client) -> None:
        """Find out what kopf does not tell, for ever."""
        failures = 0
        while True:
            self.doubted.clear()
            before = frozenset(self.known)
            try:
                listed = await self._names(client)
            except KubeError as error:
                failures += 1
                self._failed(error)
                await asyncio.sleep(max(pause_s(failures), error.retry_after_s))
                continue
            failures = 0
            for key in before - listed:
                self.forget(key)
                await asyncio.sleep(0)  # others run in between, as there may be thousands
            await self._listed(listed)

    async def _names(self, client: Client) -> set[Key]:
        names = client.names(self.resource, namespace=self.namespace, labels=self.labels)
        return {key async for one in names if (key := self.key_of(one)) is not None}

    def _failed(self, error: KubeError) -> None:
        if isinstance(error, Denied):
            self.served.set()
        if self._works:
            warn("not followed", collection=self.name, reason=str(error), status=error.status)
        self._works = False
        self.told(self.name, False)

    async def _listed(self, listed: set[Key]) -> None:
        """Wait until the names are to be listed again."""
        self.served.set()
        if not self.loaded.is_set():
            try:
                async with asyncio.timeout(_SHOWN_S):
                    while not listed <= self.known:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
            except TimeoutError:
                return
        if not self._works or not self.loaded.is_set():
            say("following", collection=self.name, objects=len(listed))
        self._works = True
        self.told(self.name, True)
        self.loaded.set()
        try:
            async with asyncio.timeout(SWEEP_S):
                await self.doubted.wait()
        except TimeoutError:
            return
        await asyncio.sleep(_SOON_S)  # objects of a listing come one after the other


async def follow(client: Client, feeds: Sequence[Feed[Any]]) -> None:
    """Watch these collections, for ever."""
    async with asyncio.TaskGroup() as group:
        for feed in feeds:
            group.create_task(feed.look_after(client), name=f"look after {feed.name}")
        for namespace in {feed.namespace for feed in feeds}:
            found = [feed for feed in feeds if feed.namespace == namespace]
            group.create_task(_watch(client, found, namespace), name=f"watch {namespace or 'all'}")


async def _watch(client: Client, feeds: Sequence[Feed[Any]], namespace: str | None) -> None:
    for feed in feeds:
        await feed.served.wait()
    watches = _Watches(client, feeds, namespace)
    thread = threading.Thread(target=watches.run, name="kopf", daemon=True)
    thread.start()
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        watches.end()
        await asyncio.to_thread(thread.join, _END_S)


class _Watches:
    """kopf in its own thread. The feeds are called in the event loop that creates this object."""

    def __init__(self, client: Client, feeds: Sequence[Feed[Any]], namespace: str | None) -> None:
        self._client = client
        self._feeds = feeds
        where: Any = {"namespaces": [namespace]} if namespace else {"clusterwide": True}
        # otherwise kopf looks up the user's name, and a user id without a name has none
        self._options = {**where, "identity": MANAGER, "standalone": True}
        self._loop = asyncio.get_running_loop()
        self._login_at = 0.0
        self._ended = threading.Event()
        self._end: Callable[[], object] = lambda: None

    def run(self) -> None:
        """Run until `end`."""
        logging.getLogger("kopf").setLevel(logging.CRITICAL)  # `Feed` logs what fails
        while not self._ended.is_set():
            try:
                asyncio.run(self._operate())
            except Exception as error:
                warn("watches begin anew", reason=f"{type(error).__name__}: {error}")
            self._doubt()
            self._ended.wait(_ANEW_S)

    def end(self) -> None:
        """End the thread; called from another one."""
        self._ended.set()
        with contextlib.suppress(RuntimeError):  # its loop has just ended
            self._end()

    async def _operate(self) -> None:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        self._end = lambda: loop.call_soon_threadsafe(stop.set)
        if self._ended.is_set():
            return
        await kopf.operator(
            registry=self._registry(),
            settings=settings(self._feeds, self._doubt),
            memories=_Forgetful(),
            stop_flag=stop,
            **self._options,
        )

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> kopf.AiohttpSession:
            await asyncio.sleep(self._login_at - time.monotonic())  # limits logins after a 401
            self._login_at = time.monotonic() + _ANEW_S
            return kopf.AiohttpSession(
                server=self._client.server, aiohttp_session=self._client.session()
            )

        for feed in self._feeds:
            at = feed.resource
            kopf.on.event(at.group, at.version, at.plural, id=feed.name, registry=registry)(
                self._shower(feed)
            )
        return registry

    def _shower(self, feed: Feed[Any]) -> Any:
        async def show(event: Any, **_: Any) -> None:
            self._tell(feed.take, event["type"], event["object"])

        return show

    def _doubt(self) -> None:
        for feed in self._feeds:
            self._tell(feed.doubted.set)

    def _tell(self, what: Callable[..., None], *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(what, *arguments)


def settings(feeds: Sequence[Feed[Any]], failed: Callable[[], None]) -> kopf.OperatorSettings:
    """Settings of kopf: little memory for many objects, no end after a failure, and no writes."""
    made = kopf.OperatorSettings()
    made.peering.standalone = True
    made.posting.enabled = False
    made.scanning.disabled = True  # the kinds exist by now; needs no right to list CRDs
    made.persistence.diffbase_storage = _NoDiffs()
    made.watching.chunk_size = 100  # a page is decoded in one go, which blocks the loop
    made.queueing.worker_limit = 100
    # An idle worker keeps one of the 100 places, and its object, for this time. Objects must not be
    # listed faster than workers become free, or all of them wait in memory.
    made.queueing.idle_timeout = 0.01
    made.networking.request_timeout = 60.0
    made.networking.connect_timeout = 10.0
    made.networking.error_backoffs = _Pauses(failed)
    for feed in feeds:
        at = feed.resource
        if feed.labels:
            made.watching.label_selectors[at.group, at.version, at.plural] = feed.labels
    return made


class _Pauses:
    """The pauses between tries, without end. kopf takes one before each try, so the second one
    means a failure."""

    def __init__(self, failed: Callable[[], None]) -> None:
        self._failed = failed

    def __iter__(self) -> Iterator[float]:
        for failures in itertools.count():
            if failures:
                self._failed()
            yield pause_s(failures + 1)


class _Forgetful(ResourceMemories):
    """Keeps nothing of objects. kopf would keep a kilobyte of each, for kinds of handlers that we
    do not have."""

    async def recall(self, *arguments: Any, **options: Any) -> ResourceMemory:
        return await super().recall(*arguments, **{**options, "ephemeral": True})


class _NoDiffs(kopf.DiffBaseStorage):
    """Computes no differences. kopf would, for kinds of handlers that we do not have."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


def pause_s(failures: int) -> float:
    """Seconds before the next try; they grow to 15 s."""
    least, most = _PAUSE_S
    longest: float = min(most, least * 2 ** min(failures - 1, 10))
    return longest * random.uniform(0.5, 1.0)
