"""The steps at which the script failed by itself, and in which epochs: these make a step suspect.

The failures are recorded on the volumes because shards do not tell them. The life that looks for a
way out of a crash loop may have another sidecar than the lives that failed. If it also has other
volumes, the operator remembers the failures that were reported to it.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from keepstep.core.ledger import Ledger, Standing
from keepstep.core.suspicion import KEPT, Failure, newest
from keepstep.errors import StorageError
from keepstep.steps import StepId
from keepstep_sidecar.log import warn
from keepstep_sidecar.volume.volume_set import VolumeSet


class ScriptFailures:
    """`blocking`: runs a blocking call on the thread that changes names on the volumes."""

    def __init__(
        self,
        volumes: VolumeSet,
        blocking: Callable[[Callable[[], None]], Coroutine[Any, Any, None]],
    ) -> None:
        self._volumes = volumes
        self._blocking = blocking
        self._noted = frozenset(sorted(volumes.failures())[-KEPT:])
        self._told: tuple[Failure, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._noted or self._told)

    async def note(self, at: StepId) -> None:
        """Record that the script failed at this step. On return the record is durable, if any
        volume can be written."""
        if at in self._noted:
            return
        self._noted = noted = frozenset(sorted({*self._noted, at})[-KEPT:])
        try:
            await self._blocking(lambda: self._volumes.save_failures(noted))
        except StorageError as error:
            warn("failure of the script not noted", step=str(at), reason=str(error))

    def hear(self, told: Iterable[Failure]) -> None:
        """Add the failures that the operator knows from all pods. They stay known here even if the
        operator forgets them."""
        self._told = newest((*self._told, *told))

    def known(self, ledger: Ledger) -> tuple[Failure, ...]:
        """All known failures, each with the steps that it casts doubt on."""

        def alive(id: StepId) -> bool:
            return ledger.lineage.standing(id) is Standing.LIVE

        told = (Failure(at=one.at, after=tuple(filter(alive, one.after))) for one in self._told)
        noted = (Failure.of(at, ledger.parent, alive) for at in self._noted)
        return tuple(one for one in newest((*told, *noted)) if one.after)
