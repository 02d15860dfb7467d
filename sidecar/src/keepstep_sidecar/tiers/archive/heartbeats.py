"""Which lives of a run train now: each renews a small object beside the run's steps.

    <archive>/<run>/lives/<epoch>.json

A start that goes on from the archive, because a machine was lost, looks the same as the start of a
second run of the same name. The difference is that the first one still trains. Clocks of machines
differ, so a life is recognized by its object that changes, not by a time in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import platform
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from keepstep.errors import KeepstepError
from keepstep.image import strictjson
from keepstep.steps import Epoch, EpochId
from keepstep_sidecar.tiers.archive.store import Store, StoredObject

DIRECTORY = "lives"
RENEW_S = 10.0
WATCH_S = 25.0
"""An object that has not changed for so long is of a life that has ended."""

_POLL_S = 1.0
_END_S = 5.0
_LEFT_S = 900.0
"""An object that was renewed so long ago, by this machine's clock, need not be watched. Stores of
objects refuse clocks that differ by more."""
_MOST_BYTES = 4096


def find_heartbeats(names: Mapping[str, StoredObject]) -> dict[EpochId, StoredObject]:
    """The lives among the objects of that directory."""
    lives = dict[EpochId, StoredObject]()
    for name, stored in names.items():
        with contextlib.suppress(ValueError):
            lives[EpochId.parse(name.removesuffix(".json"))] = stored
    return lives


@dataclass
class RunHeartbeats:
    """The lives of one run in one archive. `unknown`: a message while one may train that is not of
    this run; '' if none does."""

    store: Store
    run: str
    unknown: str = ""
    _closed: bool = False
    _kept: EpochId | None = None
    _renewed_at: float = 0.0
    _seen: dict[EpochId, tuple[StoredObject, float]] = field(default_factory=dict)

    async def keep(
        self, life: Callable[[], Epoch | None], before: Callable[[], Collection[Epoch]]
    ) -> None:
        """Renew the object of the epoch that `life` names, and remove it when that life has ended,
        and those of the epochs `before` it. Runs until cancelled. What fails is tried again."""
        while True:
            epoch = None if self._closed else life()
            with contextlib.suppress(KeepstepError):  # the archive's status tells why
                if epoch is None or epoch.id != self._kept:
                    await self.end()
                if epoch is not None and time.monotonic() - self._renewed_at >= RENEW_S:
                    await self._renew(epoch.id, {epoch.id for epoch in before()})
            await asyncio.sleep(_POLL_S)

    async def _renew(self, epoch: EpochId, before: Collection[EpochId]) -> None:
        first, self._kept, self._renewed_at = self._kept is None, epoch, time.monotonic()
        content = {"epoch": str(epoch), "host": platform.node(), "at": time.time()}
        await self.store.replace(self._name(epoch), json.dumps(content).encode())
        if first:
            older = [
                epoch_id for epoch_id in self._seen if epoch_id in before and epoch_id != epoch
            ]
            await self.store.delete(map(self._name, older))

    async def end(self) -> None:
        """Say that the life which was kept has ended. Raises StorageError."""
        if (kept := self._kept) is None:
            return
        await self.store.delete([self._name(kept)])
        self._kept, self._renewed_at = None, 0.0

    async def close(self) -> None:
        """As `end`, within seconds. If that fails, a start elsewhere waits for `WATCH_S`."""
        self._closed = True
        with contextlib.suppress(KeepstepError, TimeoutError):
            async with asyncio.timeout(_END_S):
                await self.end()

    async def check_for_foreign_run(
        self, lives: Mapping[EpochId, StoredObject], known: Collection[EpochId]
    ) -> None:
        """`lives`: those that a new listing names. `known`: the epochs of this run."""
        now, before = time.monotonic(), self._seen
        self._seen = {
            epoch_id: before[epoch_id]
            if epoch_id in before and before[epoch_id][0] == stored
            else (stored, now)
            for epoch_id, stored in lives.items()
        }
        for epoch_id, (stored, since) in sorted(self._seen.items()):
            young = time.time() - stored.modified_at < _LEFT_S
            if epoch_id not in known and young and now - since < WATCH_S:
                host = await self._host(stored)
                self.unknown = (
                    f"another run named {self.run!r} trains{host} in epoch {epoch_id}, and"
                    " archives to"
                    f" {self.store.where}/{self.run}. End it first, or give this one another"
                    " name (keepstep run --run NAME): with --restore-from"
                    f" {self.run}/latest it begins from the other's newest step"
                )
                return
        self.unknown = ""

    async def _host(self, stored: StoredObject) -> str:
        """` on HOST`, as the object tells; '' if it does not."""
        data = bytearray(min(stored.bytes, _MOST_BYTES))
        try:
            await self.store.read_range(stored.name, 0, memoryview(data))
            fields = strictjson.as_mapping(json.loads(data), "life")
            host = strictjson.as_text(fields.get("host"), "host")
        except (KeepstepError, ValueError, RecursionError):
            return ""
        return f" on {host[:64]}" if host.isprintable() and host else ""

    def _name(self, epoch: EpochId) -> str:
        return f"{self.run}/{DIRECTORY}/{epoch}.json"
