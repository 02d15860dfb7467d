"""Collections of the cluster, followed by kopf: every object seen, changed or gone, once each.

kopf lists and watches, and the server selects. What it does not tell (docs/adr/0004-kopf.md):

  loaded   that all there was has been shown: a list of names says what there is, and `loaded` is
           set once kopf has shown all of it
  gone     an object that vanishes while kopf lists anew: after each such listing, and every ten
           minutes, the names are listed again, and what is not among them is gone
  works    that it fails: its pauses between two tries are ours, and whoever asks for a second one
           has failed; the names are listed then, and that says why

It runs in a thread of its own: where it runs it takes the signals, and cancels every task at its
end, which it comes to by a single answer that it does not expect. Then it is begun anew.
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
"""Names that kopf has not shown after so long may have gone: they are listed again."""
_ANEW_S: Final = 5.0
_END_S: Final = 2.0
_PAUSE_S: Final = (0.5, 15.0)


@dataclass(kw_only=True)
class Feed(Generic[Key]):
    """One collection. `key_of`, a function of the metadata alone, is None for what is not
    interesting. `seen` and `gone` are told of each object, `told` whether it is followed.

    `known`: what was seen and is not gone.
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
    """The API server knows the kind, whether it may be read or not: kopf looks for it once."""
    doubted: asyncio.Event = field(default_factory=asyncio.Event)
    """Something may have been missed, or fails."""
    _works: bool = True

    def take(self, event: str | None, body: Body) -> None:
        """What kopf shows. `event`: as a watch says, None for an object of a listing."""
        try:
            key = self.key_of(body)
            if event == "DELETED":
                self.forget(key)
            elif key is not None:
                self.known.add(key)
                self.seen(body)
        except Exception:  # one body that is not as expected must not end the process
            crash("object not understood", collection=self.name)
        if event is None and self.loaded.is_set():
            self.doubted.set()

    def shown(self, key: Key) -> None:
        """It is there, as somebody else saw; when the names are listed without it, it is gone."""
        self.known.add(key)
        self.doubted.set()

    def forget(self, key: Key | None) -> None:
        """It is gone."""
        if key is not None and key in self.known:
            self.known.discard(key)
            try:
                self.gone(key)
            except Exception:  # as in `take`: what is listed anew has no other guard
                crash("end of an object not understood", collection=self.name)

    async def look_after(self, client: Client) -> None:
        """For ever: find out what kopf does not tell."""
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
                await asyncio.sleep(0)  # others have their turn between two of thousands
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
        """Until the names are to be listed again."""
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
        await asyncio.sleep(_SOON_S)  # a listing shows one object after the other


async def follow(client: Client, feeds: Sequence[Feed[Any]]) -> None:
    """For ever."""
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
    """kopf in a thread of its own; `loop` is where the feeds live."""

    def __init__(self, client: Client, feeds: Sequence[Feed[Any]], namespace: str | None) -> None:
        self._client = client
        self._feeds = feeds
        where: Any = {"namespaces": [namespace]} if namespace else {"clusterwide": True}
        # else kopf asks who runs it, and a number without a name has no answer
        self._options = {**where, "identity": MANAGER, "standalone": True}
        self._loop = asyncio.get_running_loop()
        self._login_at = 0.0
        self._ended = threading.Event()
        self._end: Callable[[], object] = lambda: None

    def run(self) -> None:
        """Until `end`."""
        logging.getLogger("kopf").setLevel(logging.CRITICAL)  # `Feed` says what goes wrong
        while not self._ended.is_set():
            try:
                asyncio.run(self._operate())
            except Exception as error:
                warn("watches begin anew", reason=f"{type(error).__name__}: {error}")
            self._doubt()
            self._ended.wait(_ANEW_S)

    def end(self) -> None:
        """From another thread."""
        self._ended.set()
        with contextlib.suppress(RuntimeError):  # it has just ended by itself
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
            await asyncio.sleep(self._login_at - time.monotonic())  # or a 401 would become a storm
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
    """Of kopf: little memory for many objects, no end by a failure, and nothing written."""
    made = kopf.OperatorSettings()
    made.peering.standalone = True
    made.posting.enabled = False
    made.scanning.disabled = True  # kinds are there before it begins: no right to list CRDs needed
    made.persistence.diffbase_storage = _NoDiffs()
    made.watching.chunk_size = 100  # a page is taken apart in one go, and nothing else runs then
    made.queueing.worker_limit = 100
    # a worker keeps its place, of those 100, and its object for so long: what is listed must not
    # come faster than workers get free, or all of it waits in memory
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
    """Between tries, for ever. kopf takes one before each try, so the second means a failure."""

    def __init__(self, failed: Callable[[], None]) -> None:
        self._failed = failed

    def __iter__(self) -> Iterator[float]:
        for failures in itertools.count():
            if failures:
                self._failed()
            yield pause_s(failures + 1)


class _Forgetful(ResourceMemories):
    """What kopf remembers of each object for handlers that we have none of: a kilobyte."""

    async def recall(self, *arguments: Any, **options: Any) -> ResourceMemory:
        return await super().recall(*arguments, **{**options, "ephemeral": True})


class _NoDiffs(kopf.DiffBaseStorage):
    """What changed in an object, which kopf else finds out for handlers that we have none of."""

    def build(self, **_: Any) -> Any:
        return {}

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None:
        return None


def pause_s(failures: int) -> float:
    """Before the next try: grows to 15 s."""
    least, most = _PAUSE_S
    longest: float = min(most, least * 2 ** min(failures - 1, 10))
    return longest * random.uniform(0.5, 1.0)
