"""The agent thread of a trainer: keeps a slot at hand, copies, seals, and talks to the sidecar.

Everything here happens beside the training thread. When the sidecar is gone the thread keeps
trying to come back to it; until then `take_slot` answers None at once and the step is skipped.
Invariant: at most one image is unsealed, and no slot is asked for before the last one was reported.
"""

from __future__ import annotations

import base64
import logging
import threading
import time
from collections.abc import Callable

import torch

from keepstep.client import Client
from keepstep.errors import (
    FormatError,
    NoMemoryError,
    SidecarAbsent,
    SidecarError,
)
from keepstep.image import Layout
from keepstep.link import Link
from keepstep.mapping import SlotMapping
from keepstep.pending import Pending, Verdict
from keepstep.protocol import (
    DiscardRequest,
    LayoutAccepted,
    LayoutRequest,
    LeaseGranted,
    SkippedRequest,
    SlotGranted,
    SlotRequest,
    StagedRequest,
)
from keepstep.stats import Stats

log = logging.getLogger("keepstep")

_RETRY_S = 0.2
_SLOT_WAIT_S = 20.0
_LARGE_BYTES = 64 << 20


class Stager:
    """Owns the lease, the layout, the slot at hand and the image on its way."""

    def __init__(self, socket_path: str, *, rank: int, world: int) -> None:
        self.stats = Stats()
        self.staged_step: Pending | None = None
        self.eager_next = False
        self._changed = threading.Condition()
        self.link = Link(socket_path, rank=rank, world=world, changed=self._changed)
        self._client = Client(socket_path)
        self._layout: Layout | None = None
        self._accepted: str = ""
        self._refused: str = ""
        self._ready: tuple[SlotGranted, SlotMapping] | None = None
        self._taken: tuple[SlotGranted, SlotMapping] | None = None
        self._mappings: dict[str, SlotMapping] = {}
        self._pending: Pending | None = None
        self._skips: list[tuple[int, str]] = []
        self._retry_at = 0.0
        self._patient = True
        self._warned: set[str] = set()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._device: int | None = None

    # --- called by the training thread -------------------------------------------------------

    def connect(self, *, timeout_s: float) -> LeaseGranted:
        """Get the lease now; see `Link.connect`. Starts the agent thread."""
        granted = self.link.connect(timeout_s=timeout_s)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="keepstep-agent", daemon=True)
            self._thread.start()
        return granted

    @property
    def pending(self) -> Pending | None:
        """The image on its way, if any."""
        return self._pending

    @property
    def taken(self) -> tuple[SlotGranted, SlotMapping] | None:
        """The slot that was taken and is neither submitted nor put back, if any."""
        return self._taken

    def use_layout(self, layout: Layout) -> None:
        """From now on images look like this; slots for it are made in the background."""
        with self._changed:
            if self._layout is not None and self._layout.id == layout.id:
                return
            self._layout = layout
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                self._device = torch.cuda.current_device()
            self._accepted = self._refused = ""
            self._ready = None
            self._mappings.clear()
            self._patient = True
            self._changed.notify_all()

    def take_slot(self) -> tuple[SlotGranted, SlotMapping] | str:
        """The slot at hand, or why there is none. May wait a little, but does so again only
        after a slot came: a slow sidecar costs one wait, not one a step."""
        with self._changed:
            patience_s = self._patience_s() if self._patient and self.link.connected else 0.0
            self._changed.wait_for(
                lambda: (self._ready and not self._pending) or self._refused, timeout=patience_s
            )
            if self._ready and not self._pending:
                # named until it is submitted: the agent must not ask for it a second time
                self._taken, self._ready = self._ready, None
                return self._taken
            self._patient = False
            if self._refused:
                return self._refused
            return "no slot is free yet" if self.link.connected else "the sidecar is away"

    def await_slot(self, *, timeout_s: float) -> tuple[SlotGranted, SlotMapping] | str:
        """`take_slot` for whoever cannot skip a step: waits until there is one, or none can be."""
        with self._changed:
            self._changed.wait_for(
                lambda: (self._ready and not self._pending) or self._refused, timeout=timeout_s
            )
        return self.take_slot()

    def _patience_s(self) -> float:
        """Small slots are made in milliseconds, and worth a wait; large ones take seconds."""
        return 1.0 if self._layout is None or self._layout.size_bytes < _LARGE_BYTES else 0.1

    def submit(self, pending: Pending) -> None:
        """Hand over an image: copied or not, the agent does the rest."""
        with self._changed:
            self._pending, self._taken = pending, None
            self._changed.notify_all()

    def put_back(self) -> None:
        """The slot that was taken will not be submitted: whatever was written is no image."""
        with self._changed:
            if self._taken is not None:
                self._taken[1].erase()
            self._ready, self._taken = self._taken, None
            self._changed.notify_all()

    def settle(self, *, timeout_s: float = 60.0) -> None:
        """The fence: return when the pending image no longer reads the live tensors."""
        pending = self._pending
        if pending is None or pending.judged.is_set():
            return
        if pending.cuda_done is not None and pending.guard is not None:
            torch.cuda.current_stream().wait_event(pending.cuda_done)
        elif not pending.copied.wait(timeout_s):
            self.warn("slow-copy", f"step {pending.id.step}: the copy takes over {timeout_s:.0f} s")
            pending.finish(Verdict.LOST)
            return
        pending.judge()

    def drain(self, *, timeout_s: float) -> bool:
        """Wait until no image is on its way. False when the time is up."""
        self.settle()
        with self._changed:
            return self._changed.wait_for(lambda: self._pending is None, timeout=timeout_s)

    def skip(self, step: int, reason: str) -> None:
        """Count a step that could not be staged; the sidecar hears of it with the next call."""
        self.stats.skipped += 1
        self.stats.reasons[reason] = self.stats.reasons.get(reason, 0) + 1
        self.warn(reason, f"step {step} is not kept: {reason}")
        with self._changed:
            self._skips = [*self._skips[-99:], (step, reason)]
            self._changed.notify_all()

    def warn(self, key: str, message: str) -> None:
        """Log a warning once per kind; repetitions are only counted."""
        if key not in self._warned:
            self._warned.add(key)
            log.warning("keepstep: rank %d: %s", self.link.rank, message)

    def close(self) -> None:
        """Give the lease back and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        # with an image on its way the agent thread may still write: then only our death counts
        self.link.close(goodbye=self._pending is None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
        self._client.close()

    # --- the agent thread --------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closing or self._next() is not None, timeout=self._nap()
                )
                task = self._next()
                if self._closing and self._pending is None:
                    return
            if task is None:
                continue
            try:
                task()
            except SidecarError as error:
                self._failed(error)
            except Exception as error:
                log.exception("keepstep: rank %d: the agent thread failed", self.link.rank)
                self._failed(SidecarError(str(error)))

    def _nap(self) -> float | None:
        return None if self.link.connected else max(0.01, self._retry_at - time.monotonic())

    def _next(self) -> Callable[[], None] | None:
        """The most urgent thing to do, or None to sleep."""
        if self._pending is not None and not self._pending.copied.is_set():
            return self._copy
        if self._closing:
            return None if self._pending is None else self._abandon
        if not self.link.connected:
            return self._reconnect if time.monotonic() >= self._retry_at else None
        if self._layout is not None and not self._accepted and not self._refused:
            return self._register
        if self._pending is not None:
            return self._report
        if self._accepted and self._ready is None and self._taken is None:
            return self._fetch
        return self._tell_skips if self._skips else None

    def _copy(self) -> None:
        pending = self._pending
        assert pending is not None
        try:
            pending.copy()
        except Exception:
            log.exception(
                "keepstep: rank %d: step %d was not copied", self.link.rank, pending.id.step
            )
            pending.finish(Verdict.LOST)
            pending.copied.set()
            return
        pending.judge_after_progress(lambda: self._closing)
        if pending.verdict is Verdict.VALID:
            pending.slot.seal(pending.control)

    def _report(self) -> None:
        pending = self._pending
        assert pending is not None
        if pending.verdict is Verdict.VALID:
            self._report_staged(pending)
        else:
            self._report_discarded(pending)
        with self._changed:
            self._pending = None
            self._changed.notify_all()

    def _report_staged(self, pending: Pending) -> None:
        request = StagedRequest(
            lease=self.link.lease,
            slot=str(pending.grant.slot),
            generation=pending.grant.generation,
            epoch=pending.epoch,
            step=pending.id.step,
            copy_s=pending.copy_s,
            blocked_s=pending.blocked_s,
        )
        try:
            granted = self._client.call("/v1/staged", request, SlotGranted)
        except SidecarAbsent:
            raise
        except SidecarError as error:
            self.warn(error.code, f"step {pending.id.step} is lost: {error}")
            self._accepted = ""
            pending.finish(Verdict.LOST)
            return
        self.stats.staged += 1
        self.stats.copy_s += pending.copy_s
        self.stats.last_copy_s = pending.copy_s
        pending.finish(Verdict.STAGED)
        self.staged_step = pending
        self._keep(granted)

    def _report_discarded(self, pending: Pending) -> None:
        reason = pending.why_lost()
        if not pending.counted:  # a lost connection may bring us here again
            pending.counted = self.eager_next = True
            self.stats.discarded += 1
            pending.slot.erase()
            self.warn(reason, f"step {pending.id.step} is discarded: {reason}")
            pending.finish(pending.verdict)
        request = DiscardRequest(
            lease=self.link.lease,
            slot=str(pending.grant.slot),
            generation=pending.grant.generation,
            step=pending.id.step,
            reason=reason,
        )
        self._keep(self._client.call("/v1/discard", request, SlotGranted))

    def _fetch(self) -> None:
        assert self._layout is not None
        request = SlotRequest(lease=self.link.lease, layout=self._layout.id, timeout_s=_SLOT_WAIT_S)
        self._keep(self._client.call("/v1/slot", request, SlotGranted, timeout_s=_SLOT_WAIT_S + 10))

    def _keep(self, granted: SlotGranted) -> None:
        """Map a granted slot and put it at hand."""
        layout = self._layout
        if granted.slot is None or layout is None:
            return
        mapping = self._mappings.get(granted.path)
        if mapping is None:
            try:
                mapping = SlotMapping(granted.path, layout)
            except (OSError, FormatError) as error:
                # granted for the layout before; the registration of the new one comes next
                log.debug("slot %s: %s", granted.path, error)
                return
            mapping.populate()
            if self._device is not None:
                # this thread has no current device of its own: it would take the first GPU
                with torch.cuda.device(self._device):
                    mapping.register()
        with self._changed:
            if self._layout is not layout:
                return  # the training thread changed it while the slot was mapped
            self._mappings[granted.path] = mapping
            self._ready = (granted, mapping)
            self._patient = True
            self._changed.notify_all()

    def _register(self) -> None:
        layout = self._layout
        assert layout is not None
        header = base64.b64encode(layout.header).decode()
        try:
            accepted = self._client.call(
                "/v1/layout", LayoutRequest(lease=self.link.lease, header=header), LayoutAccepted
            )
        except NoMemoryError as error:
            self._refused = str(error)
            return
        if accepted.warning:
            self.warn(accepted.warning, accepted.warning)
        with self._changed:
            if self._layout is layout:
                self._accepted = accepted.layout

    def _tell_skips(self) -> None:
        step, reason = self._skips[0]
        self._client.call(
            "/v1/skipped", SkippedRequest(lease=self.link.lease, step=step, reason=reason), dict
        )
        self._skips = self._skips[1:]

    def _holding(self) -> tuple[str, ...]:
        """Slots that are ours to fill, as far as we know."""
        pending, ready, taken = self._pending, self._ready, self._taken
        grants = (pending and pending.grant, ready and ready[0], taken and taken[0])
        return tuple(grant.slot for grant in grants if grant and grant.slot)

    def _reconnect(self) -> None:
        try:
            granted = self.link.take(self._holding())
        except SidecarError:
            self._retry_at = time.monotonic() + _RETRY_S
            raise
        with self._changed:
            if self._ready and self._ready[0].slot not in granted.held:
                self._ready = None
        log.info("keepstep: rank %d: the sidecar is back", self.link.rank)
        self._warned.discard("the sidecar is away")
        self._accepted = ""
        self._patient = True

    def _failed(self, error: SidecarError) -> None:
        self._retry_at = time.monotonic() + _RETRY_S
        if not isinstance(error, SidecarAbsent):
            self.warn(error.code, str(error))
            self.link.drop()  # whatever we disagree about: begin anew

    def _abandon(self) -> None:
        pending = self._pending
        if pending is not None:
            pending.finish(Verdict.LOST)
        self._pending = None
