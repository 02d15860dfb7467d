"""keepstep as a `Saver`, lazy and eager, with a sidecar of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from bench.gpt import TrainingState
from bench.peers import PeerMissing
from bench.processes import Sidecar, memory_kib
from bench.savers import Saver

_DURABLE_TIMEOUT_S = 120.0


def slots_for(size_bytes: int) -> int:
    """Four slots, as by default, unless the machine's memory has no room for them."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 4 if 7 * size_bytes < pages else 2


class KeepstepLazy(Saver):
    name = "keepstep"
    note = "every step staged and persisted, 4 slots (2 where memory has no room for 4)"
    lazy: ClassVar[bool] = True

    def __init__(self, state: TrainingState, directory: Path) -> None:
        super().__init__(state, directory)
        self._sidecar = Sidecar(directory, slots=slots_for(state.size_bytes))
        self._peak_kib = 0
        try:
            self._sidecar.start()
            os.environ["KEEPSTEP_SOCKET"] = str(self._sidecar.socket)
            import keepstep

            self._checkpointer = keepstep.Checkpointer(
                state.components(), lazy=self.lazy, strict=True
            )
            self._checkpointer.restore()
        except ImportError as error:
            self._sidecar.close()
            raise PeerMissing(f"keepstep does not import: {error}") from error
        except BaseException:
            self._sidecar.close()
            raise
        self._last = -1

    def save(self, step: int) -> None:
        self._last = step
        self._checkpointer.save(step)

    def fence(self) -> None:
        self._checkpointer.fence()

    def wait_staged(self) -> None:
        self._checkpointer.wait(self._last, "staged", timeout=_DURABLE_TIMEOUT_S)

    def wait_durable(self) -> None:
        if self._last >= 0:
            self._checkpointer.wait(self._last, "durable", timeout=_DURABLE_TIMEOUT_S)
            memory = memory_kib(self._sidecar.pid)
            self._peak_kib = max(self._peak_kib, memory["RssAnon"] + memory["RssFile"])

    def background_cpu_s(self) -> float:
        return self._sidecar.cpu_s()

    def extra(self) -> dict[str, float]:
        stats = self._checkpointer.stats
        return {
            "sidecar_rss_mib": self._peak_kib / 1024,
            "skipped": float(stats.skipped),
            "discarded": float(stats.discarded),
        }

    def close(self) -> None:
        self._checkpointer.close()
        self._sidecar.close()
        super().close()


class KeepstepEager(KeepstepLazy):
    name = "keepstep eager"
    note = "lazy=False: copied before save() returns"
    lazy = False


OURS: tuple[type[Saver], ...] = (KeepstepLazy, KeepstepEager)
