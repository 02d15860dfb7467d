"""What somebody said of the whole run, noted in the run's record: for a successor that cannot ask.

Published directories tell of commits, too; the note is for the pod that has lost its shards, and
for pins, which no shard tells of.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any

from keepstep.errors import StorageError
from keepstep_sidecar.journal import warn
from keepstep_sidecar.overview import Overview
from keepstep_sidecar.volumes import VolumeSet

_EVERY_S = 10.0
"""A new commit is noted that often; a new pin at once."""


class Notes:
    """`blocking`: runs a blocking call on the thread that changes names on the volumes."""

    def __init__(
        self,
        overview: Overview,
        volumes: VolumeSet,
        blocking: Callable[[Callable[[], None]], Coroutine[Any, Any, None]],
    ) -> None:
        """What an earlier sidecar has noted is known to `overview` afterwards."""
        overview.remember(volumes.last_commit())
        overview.pinned = volumes.pinned()
        self._overview = overview
        self._volumes = volumes
        self._blocking = blocking
        self._noted = overview.word
        self._noted_at = -_EVERY_S

    async def take(self, *, at_once: bool) -> None:
        """Note what was heard, not too often."""
        (commit, pinned), now = self._overview.word, time.monotonic()
        due = at_once or pinned != self._noted[1] or now - self._noted_at >= _EVERY_S
        if commit is None or (commit, pinned) == self._noted or not due:
            return
        self._noted, self._noted_at = (commit, pinned), now
        try:
            await self._blocking(lambda: self._volumes.save_word(commit, pinned))
        except StorageError as error:
            warn("commit not noted", step=str(commit), reason=str(error))
