"""What all viewers look at: one reader reads the runs periodically, as long as there is a viewer.

A run that is slow to answer (a sidecar that hangs, a volume over a network) delays only itself: it
is read again once it has answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, Generic

from keepstep.errors import KeepstepError
from keepstep_page.pages import V

EVERY_S: Final = 1.0
"""The pause between two reads of a run. With the time of the read and of the page, a change is seen
within 2 s.
"""

_log = logging.getLogger("keepstep.ui")


class Board(Generic[V]):
    """The runs as they were read last.

    `names`: lists the runs. `read`: reads one run. `failed`: makes the view of a run that cannot be
    read, from its name and the reason.
    """

    def __init__(
        self,
        names: Callable[[], Awaitable[Sequence[str]]],
        read: Callable[[str], Awaitable[V]],
        failed: Callable[[str, str], V],
        *,
        every_s: float = EVERY_S,
    ) -> None:
        self.views: dict[str, V] = {}
        self.changes = 0
        self.reads = 0
        self._names, self._read, self._failed = names, read, failed
        self._every_s = every_s
        self._changed = asyncio.Condition()
        self._listed: tuple[str, ...] = ()
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._read_at: dict[str, float] = {}
        self._viewers = 0
        self._keeping: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def viewer(self) -> Iterator[None]:
        """A viewer, for as long as this context is open."""
        self._viewers += 1
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep(), name="read runs")
        try:
            yield
        finally:
            self._viewers -= 1
            if not self._viewers:
                self._keeping.cancel()
                self._keeping = None

    async def after(self, count: int, *, timeout_s: float) -> bool:
        """Wait until there were more than `count` changes; False if there were none within
        `timeout_s`.
        """
        async with self._changed:
            wait = self._changed.wait_for(lambda: self.changes != count)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(wait, timeout_s)
        return self.changes != count

    async def _keep(self) -> None:
        """Read the runs until cancelled, when there is no viewer any more."""
        while True:
            try:
                await self._list()
            except (OSError, KeepstepError) as error:  # may be away for only a moment
                _log.warning("the runs cannot be listed: %s", error)
            for name in self._listed:
                self._begin(name)
            await asyncio.sleep(self._every_s)

    async def fresh(self, *, timeout_s: float = 3.0) -> tuple[V, ...]:
        """All runs, each as recent as a viewer would see it. Runs that do not answer within
        `timeout_s` are returned as they were read last. Raises what listing the runs raises.
        """
        await self._list()
        stale = [one for one in self._listed if self._age_s(one) > self._every_s]
        if begun := [self._begin(name) for name in stale]:
            await asyncio.wait(begun, timeout=timeout_s)
        return self.all()

    def all(self) -> tuple[V, ...]:
        """All runs as they were read last, in the order of their list."""
        return tuple(self.view(name) for name in self._listed)

    def view(self, name: str) -> V:
        """One run as it was read last. Raises KeyError if there is no such run."""
        if name not in self._listed:
            raise KeyError(name)
        return self.views.get(name) or self._failed(name, "it has not answered yet")

    def gone(self, name: str) -> V:
        """The view of a run that no longer exists."""
        return self._failed(name, "it is not there any more")

    def _age_s(self, name: str) -> float:
        return time.monotonic() - self._read_at.get(name, float("-inf"))

    async def _list(self) -> None:
        listed = tuple(await self._names())
        if listed != self._listed:
            self._listed = listed
            self.views = {name: view for name, view in self.views.items() if name in listed}
            self._read_at = {name: at for name, at in self._read_at.items() if name in listed}
            await self._ring()

    async def _ring(self) -> None:
        self.changes += 1
        async with self._changed:
            self._changed.notify_all()

    def _begin(self, name: str) -> asyncio.Task[None]:
        """Begin to read the run, or return the read that is under way."""
        if (reading := self._reading.get(name)) is None:
            reading = asyncio.create_task(self._look(name), name=f"read {name}")
            self._reading[name] = reading
        return reading

    async def _look(self, name: str) -> None:
        try:
            view = await self._read(name)
        except KeepstepError as error:
            view = self._failed(name, str(error))
        except Exception as error:
            _log.exception("cannot read run %s", name)
            view = self._failed(name, f"{type(error).__name__}: {error}")
        finally:
            self._reading.pop(name, None)
        self.reads += 1
        self._read_at[name] = time.monotonic()
        if view != self.views.get(name) and name in self._listed:
            self.views[name] = view
            await self._ring()
