"""keepstep as a `Saver`, lazy and eager, with a sidecar of its own."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import ClassVar

from bench.peers import PeerMissing
from bench.processes import Sidecar, cpu_s, memory_limit_bytes, own_memory_kib
from bench.savers import Saver
from bench.state import State

_DURABLE_TIMEOUT_S = 120.0


def slots_for(size_bytes: int) -> int:
    """Three slots, the default on one machine, unless its memory has no room for them."""
    memory = memory_limit_bytes()
    shared = shutil.disk_usage("/dev/shm").free
    return 3 if 6 * size_bytes < memory and 3.1 * size_bytes < shared else 2


class KeepstepLazy(Saver):
    name = "keepstep"
    note = "every step staged and persisted, 3 slots (2 where memory has no room for 3)"
    lazy: ClassVar[bool] = True
    options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, state: State, directory: Path, *, slots: int | None = None) -> None:
        super().__init__(state, directory)
        if slots is None:
            slots = slots_for(state.size_bytes)
        self._sidecar = Sidecar(directory, slots=slots, options=self.options)
        self._peak_kib = 0
        self._unready = 0
        try:
            self._sidecar.begin()
            os.environ["KEEPSTEP_SOCKET"] = str(self._sidecar.socket)
            import keepstep

            self._checkpointer = keepstep.Checkpointer(state.components(), lazy=self.lazy)
            self._checkpointer.restore()
        except ImportError as error:
            self._sidecar.close()
            raise PeerMissing(f"keepstep does not import: {error}") from error
        except BaseException:
            self._sidecar.close()
            raise
        self._last = -1

    def save(self, step: int) -> None:
        if self._checkpointer.save(step):
            self._last = step

    def fence(self) -> None:
        # as the hook before an optimizer's step: what `fence` waits for beyond it, the device does
        self._checkpointer._fence(decided=False)

    def wait_ready(self) -> None:
        self._sidecar.wait_slots()
        # until all slots are made, saves may find none: do not count those
        self._unready = self._checkpointer.stats.skipped

    def wait_staged(self) -> None:
        self._checkpointer.wait(self._last, "staged", timeout=_DURABLE_TIMEOUT_S)

    def wait_durable(self) -> None:
        if self._last >= 0:
            self._checkpointer.wait(self._last, "durable", timeout=_DURABLE_TIMEOUT_S)
            self._peak_kib = max(self._peak_kib, own_memory_kib(self._sidecar.pid))

    def held_bytes(self) -> int:
        """Memory of the machine that keepstep takes now, outside of this process."""
        roots = (self._sidecar.memory, *filter(None, [self._sidecar.huge]))
        files = [path for root in roots for path in root.rglob("*")]
        own = own_memory_kib(self._sidecar.pid) << 10
        return own + sum(path.stat().st_blocks * 512 for path in files if path.is_file())

    def background_cpu_s(self) -> float:
        return cpu_s(self._sidecar.pid)

    def extra(self) -> dict[str, float]:
        stats = self._checkpointer.stats
        return {
            "sidecar_rss_mib": self._peak_kib / 1024,
            "skipped": float(stats.skipped - self._unready),
            "discarded": float(stats.discarded),
        }

    def restore_again(self, tier: str) -> float:
        """Close, lose the memory if `tier` is local, and restore in this process. Returns the
        seconds of `restore()`. Before it, the sidecar has time to adopt its slots, or to fetch and
        hash ahead."""
        from keepstep import Checkpointer

        self._checkpointer.close()
        # Both tiers need a new sidecar. The old one would give the rank to a second Checkpointer of
        # the same live process only after two seconds, a wait that no real restart has.
        self._sidecar.kill()
        if tier == "local":
            self._sidecar.lose_memory()
        self._sidecar.begin()
        self._sidecar.wait_sealed()
        for thread in threading.enumerate():
            if thread.name == "keepstep-unmap":  # no real restart has mapped the old slots
                thread.join()
        self._checkpointer = Checkpointer(self.state.components(), lazy=self.lazy)
        begun = time.perf_counter()
        restored = self._checkpointer.restore()
        seconds = time.perf_counter() - begun
        if restored is None or str(restored.tier) != tier:
            raise RuntimeError(f"restored {restored}, not from {tier}")
        return seconds

    def close(self) -> None:
        self._checkpointer.close()
        self._sidecar.close()
        super().close()


class KeepstepEager(KeepstepLazy):
    name = "keepstep eager"
    note = "lazy=False: copied before save() returns"
    lazy = False


class KeepstepByCost(KeepstepLazy):
    name = "keepstep by cost"
    note = "--stage-every auto: as many steps as cost 1 %"
    options = ("--stage-every", "auto")

    @property
    def interval(self) -> int:
        """Steps from one staged step to the next."""
        return int(self._sidecar.get("/v1/status")["stage_every"])


OURS: tuple[type[Saver], ...] = (KeepstepLazy, KeepstepEager)
