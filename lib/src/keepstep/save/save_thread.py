"""The save thread of a trainer: keeps a slot at hand, copies, seals, and talks to the sidecar.

An image goes through the states of `IMAGE`, first as the slot that is to have it (`HeldSlot`), then
as the `PendingImage` that `save` submits:

- `none`: no slot. `at hand`: one waits to be filled. `taken`: the training thread fills it.
- `open`: the slot has what changes soon; the save thread copies the rest.
- `valid`: no tensor changed until it was copied. `sealed`: the control page is written, too.
- `mutated`: a tensor changed. `lost`: the image cannot be finished. Both are counted and reported.
- `staged`: the sidecar has taken the sealed image.

The training thread takes slots, submits images, and may decide them at the fence
(`await_free_tensors`); the save thread does the rest. While the sidecar is gone, it keeps trying to
reconnect, and `await_slot` fails at once. `HeldSlot` is replaced in one step, so an exception
leaves a state from which `repair_after_error` goes on.

What may never happen, and the test that would fail:

- A torn image is sealed: `test_a_change_between_save_and_copy_discards_the_image`.
- A slot is filled twice: `test_a_slot_that_is_being_filled_is_never_handed_out_a_second_time`.
- An error costs two steps: `test_an_error_at_any_line_of_save_loses_only_that_step`.
- A step is lost uncounted: `test_any_sequence_of_faults_loses_no_step_silently`.
- Training waits for a sidecar again:
  `test_a_hung_sidecar_delays_training_once_and_not_at_every_step`.
- An image moves otherwise than `IMAGE` says: `watched_save_thread`.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from keepstep.client.embedded import SidecarRestarter
from keepstep.client.session import ConditionNotifier, SidecarClient, SidecarSession
from keepstep.client.slot import GrantedSlot, SlotMapping, unmap_in_background
from keepstep.errors import (
    FormatError,
    NoMemoryError,
    SidecarAbsent,
    SidecarError,
    SlotUnavailable,
)
from keepstep.image import Layout
from keepstep.save.frozen_parameters import FrozenBase
from keepstep.save.mutation_guard import MutationGuard
from keepstep.save.snapshot import ImageOutcome, PendingImage
from keepstep.state import accelerator
from keepstep.steps import parse_transition_table
from keepstep.wire.trainer import (
    DiscardSlotRequest,
    LayoutAccepted,
    LayoutRequest,
    LeaseGranted,
    SkippedRequest,
    SlotGranted,
    SlotRequest,
    StagedRequest,
)

IMAGE = parse_transition_table("""
none                  | the sidecar grants a slot              | at hand | SaveThread._keep
at hand               | save() takes it                        | taken   | SaveThread.await_slot
at hand               | another layout, or the lease is lost   | none    | SaveThread._drop_ready
taken                 | save() has copied what changes soon    | open    | SaveThread.submit
taken                 | save() has copied all                  | sealed, mutated | SaveThread.submit
taken                 | save() fails                           | at hand | SaveThread.put_back_slot
open                  | copied, and no tensor has changed      | valid   | PendingImage._decide
open                  | a tensor changed before it was copied  | mutated | PendingImage._decide
open | no copy, or none in time | lost | SaveThread._copy, SaveThread.await_free_tensors
valid                 | the control page is written            | sealed  | PendingImage.seal
valid                 | the control page cannot be written     | lost    | SaveThread._copy
sealed                | the sidecar takes it                   | staged  | SaveThread._report_staged
sealed, mutated       | the sidecar refuses it, or is not asked | lost    | SaveThread._lose
staged, mutated, lost | the outcome is counted                 | none    | SaveThread._clear
any | fork() | none | SaveThread.forget_in_child
""")

log = logging.getLogger("keepstep")

_RETRY_S = 0.2
_MOST_RETRY_S = 2.0
_SLOT_WAIT_S = 20.0
_LARGE_BYTES = 64 << 20
_MADE_S = 60.0
"""The longest wait for the first slot of a layout: its memory is being made."""
_NOTED_S = 1.0
_REFUSED_S = 10.0
_REPEAT_S = 60.0
_KNOWN_STEPS = 10_000
_KINDS = 100
_OTHERS = "other reasons"
_EAGER_WITHIN = 100
_HOW = (
    ": from now on every step is copied before save() returns. An optimizer that is no"
    " torch.optim.Optimizer needs `with checkpointer.mutating():` around its step to be copied"
    " beside it"
)
_DRAIN_S = 2.0
_COPY_S = 60.0
_ASK_AGAIN = ("starting", "stopping", "no-lease")
"""Error codes of a sidecar that is starting or stopping: the same request goes to the next one."""


@dataclass
class Stats:
    """Counters of one trainer. Seconds are sums, except those named `last`.

    `saves`: steps that `save` was to keep. Once no step is on its way, each of them was `staged`,
    `skipped` (nothing was written) or `discarded` (its image was begun, and is lost). `reasons`
    counts the reasons of skipped and discarded steps. `staging_cost`: what staging adds to a
    step, as a part of it; None: not yet known. `unkept`: how many saves were not kept since a step
    was staged; `why_unkept`: the reason of the last one.
    """

    saves: int = 0
    staged: int = 0
    skipped: int = 0
    discarded: int = 0
    blocked_s: float = 0.0
    last_blocked_s: float = 0.0
    copy_s: float = 0.0
    last_copy_s: float = 0.0
    staging_cost: float | None = None
    unkept: int = 0
    why_unkept: str = ""
    reasons: dict[str, int] = field(default_factory=dict)

    def count_reason(self, reason: str) -> str:
        """Count a reason. Returns the name that it is counted under: the number of kinds is
        limited."""
        if reason not in self.reasons and len(self.reasons) >= _KINDS:
            reason = _OTHERS
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        return reason

    def why_not(self) -> str:
        """Why steps were not kept, as text for an error message."""
        reasons = [f"{count} x {reason}" for reason, count in self.reasons.items()]
        return "; ".join(reasons) or "nothing was saved"


class HeldSlot(NamedTuple):
    """The slot that this process may fill, and the image on its way; see the module."""

    slot: GrantedSlot
    taken: bool = False
    pending: PendingImage | None = None


class SkippedSteps(NamedTuple):
    """Steps that were skipped for one reason, of which the sidecar does not know yet: the last one,
    and how many. `unkeepable`: the state itself cannot be kept."""

    step: int
    times: int
    unkeepable: bool


class SaveThread:
    """Owns the lease, the layout, and the slot at hand or the image on its way.

    `closed`: the rank was given back, or (in a forked child) never was this process's. `refusal`:
    why there can be no slot, because memory is too small; '' if there can be one.

    `eager_next`: the last image was discarded, so the next one must be copied at once.
    `mutated_step`: the newest step that was discarded because its tensors changed. `trains`: the
    thread in which an optimizer was seen to step, if any.
    """

    def __init__(
        self, socket_path: str, *, rank: int, world: int, keeper: SidecarRestarter | None = None
    ) -> None:
        """`keeper`: starts the sidecar again, if nothing else does."""
        self.stats = Stats()
        self.staged_step: PendingImage | None = None
        self.eager_next = False
        self.trains: int | None = None
        self.mutated_step: int | None = None
        self._eager = False
        self._doubted: MutationGuard | None = None
        self._discarded_at: int | None = None
        # `with` on a Lock is C code, so no exception can come between acquiring it and holding it
        # Reentrant: a signal handler may call close() while this thread holds it
        self._lock = threading.RLock()
        self._changed = ConditionNotifier()
        self.session = SidecarSession(
            socket_path,
            rank=rank,
            world=world,
            changed=self._changed,
            keeper=keeper,
            warn=lambda text: self.warn("save.ranks_diverged", text, per=text),
        )
        self._client = SidecarClient(socket_path)
        self._layout: Layout | None = None
        self._base: FrozenBase | None = None
        self._registered: Layout | None = None
        self.refusal = ""
        self._refused_at = 0.0
        self._asked = self._served = False
        self._held: HeldSlot | None = None
        self._mappings: dict[str, SlotMapping] = {}
        self._skips: dict[str, SkippedSteps] = {}
        self._outcomes: dict[int, str] = {}
        self._retry_at = 0.0
        self._failures = 0
        self._patient = True
        self.stage_every, self.stage_trials = 1, False
        self._warned: set[str] = set()
        self._unkept_at = self._repeated_at = 0.0
        self._unkept_step = -1
        self.closed = False
        self._thread: threading.Thread | None = None
        self._device: int | None = None
        self._mapping = threading.Lock()
        self._preparing: threading.Thread | None = None

    # --- called by the training thread -------------------------------------------------------

    def acquire_lease(self, *, timeout_s: float) -> LeaseGranted:
        """Get the lease now; see `SidecarSession.await_lease`. Starts the save thread.

        Raises SidecarError `rank-taken` at once if this very process already holds the rank.
        """
        if self._is_second():
            gc.collect()  # an exception may have left the other one behind in a cycle
        if self._is_second():
            raise SidecarError(
                f"rank {self.session.rank} belongs to another Checkpointer (or keepstep.dcp"
                f" session) of this process (pid {os.getpid()}): call its close()"
                " (keepstep.dcp.close()) first, or delete all references to it",
                code="rank-taken",
            )
        granted = self.session.await_lease(timeout_s=timeout_s)
        self.stage_every, self.stage_trials = granted.stage_every, granted.stage_trials
        _SAVERS.add(self)
        self._ensure_thread()
        return granted

    def _is_second(self) -> bool:
        mine = self.session.path, self.session.rank
        return any(
            saver is not self and (saver.session.path, saver.session.rank) == mine
            for saver in list(_SAVERS)
        )

    def _ensure_thread(self) -> None:
        if self.closed or (self._thread is not None and self._thread.is_alive()):
            return
        self._thread = threading.Thread(target=self._work, name="keepstep-save", daemon=True)
        self._thread.start()

    @property
    def pending_image(self) -> PendingImage | None:
        """The image on its way, if any."""
        held = self._held
        return None if held is None else held.pending

    @property
    def waiting_slot(self) -> GrantedSlot | None:
        """The slot that waits to be filled, if any."""
        held = self._held
        return held.slot if held and not held.taken and held.pending is None else None

    @property
    def taken_slot(self) -> GrantedSlot | None:
        """The slot that was taken and is neither submitted nor put back, if any."""
        held = self._held
        return held.slot if held is not None and held.taken else None

    @property
    def copies_eagerly(self) -> bool:
        """Whether the next image must be copied at once, because tensors change without a fence."""
        return self.eager_next or self._eager

    def use_layout(self, layout: Layout, base: FrozenBase | None = None) -> None:
        """Use this layout for all images from now on; its slots are made in the background. `base`:
        to what they refer."""
        with self._lock:
            if self._layout is not None and self._layout.id == layout.id and self._base is base:
                return
            self._layout, self._base, self._registered = layout, base, None
            self._device = accelerator.current_accelerator().current_device()
            self.refusal = ""
            self._drop_ready()
            unmap_in_background([self._mappings])
            self._mappings = {}
            self._patient, self._served = True, False
        self._changed.ring()

    def await_slot(self, *, timeout_s: float | None, must_keep: bool = False) -> GrantedSlot:
        """The slot at hand, as soon as there is one. Raises SlotUnavailable when the time is up, or
        if there can be no slot.

        `timeout_s=None` is for callers that can skip a step. Such a call waits for the first slot
        of a layout, of which the memory is being made, and otherwise only a little. It then waits
        again only after a slot has come: a slow sidecar costs one wait in total, not one per step.
        With `must_keep` each waits as long as for the first slot.
        """
        if not self._asked:
            self._asked = True
            self._changed.ring()
        pending = self.pending_image
        if pending is not None and pending.fenced.is_set():
            # the device has not come to the fence yet: training runs ahead of it by one step only
            pending.judged.wait(_COPY_S if timeout_s is None else timeout_s)
        may_skip = timeout_s is None
        if timeout_s is None:
            patient = self.session.connected and (self._patient or must_keep)
            timeout_s = (_MADE_S if must_keep else self._patience_s()) if patient else 0.0

        def is_known() -> bool:
            away = may_skip and not (self._served or self.session.connected)
            return self.waiting_slot is not None or bool(self.refusal) or self.closed or away

        began = time.monotonic()
        self._changed.wait_for_condition(is_known, timeout_s=timeout_s)
        if (waited_s := time.monotonic() - began) > _NOTED_S:
            log.warning(
                "keepstep: rank %d: save() waited %.1f s for memory for its image"
                " [save.memory_awaited]",
                *(self.session.rank, waited_s),
            )
        with self._lock:
            if (slot := self.waiting_slot) is not None:
                self._held = HeldSlot(slot, taken=True)
                return slot
        self._patient = False
        if self.closed:
            raise SlotUnavailable("this process has given its rank back")
        if self.refusal:
            raise SlotUnavailable(self.refusal)
        away = not self.session.connected
        raise SlotUnavailable("the sidecar is away" if away else "no slot is free yet")

    def _patience_s(self) -> float:
        """How long to wait for a slot, in seconds. Without the first slot of a layout no step can
        be kept. Later ones are written to the drive: small ones within milliseconds, which are
        worth a wait."""
        if not self._served:
            return _MADE_S
        return 1.0 if self._layout is None or self._layout.size_bytes < _LARGE_BYTES else 0.1

    def submit(self, pending: PendingImage) -> None:
        """Hand over an image, copied or not. The save thread does the rest."""
        with self._lock:
            if self.closed:
                raise SlotUnavailable("this process gave its rank back before the step was staged")
            self._held = HeldSlot(pending.slot, pending=pending)
        self._changed.ring()

    def put_back_slot(self) -> None:
        """Return the taken slot without submitting it: its contents are no image.

        Copies into it that are queued on an accelerator must end first, because another image comes
        next.
        """
        accelerator.current_accelerator().wait_for_copies()
        with self._lock:
            taken = self.taken_slot
            if taken is not None:
                taken.mapping.erase()
                self._held = HeldSlot(taken)
        self._changed.ring()

    def repair_after_error(self) -> None:
        """Called before a save: repair what an exception interrupted in an earlier save.

        The exception may have come in the training thread (a signal handler may raise anywhere) or
        in the save thread.
        """
        while self._lock._is_owned():  # type: ignore[attr-defined]  # this thread is in no `with`
            self._lock.release()
        if self.taken_slot is not None:
            self.put_back_slot()
        self._ensure_thread()

    def await_free_tensors(self, *, decided: bool) -> None:
        """The fence: return when the pending image no longer reads the live tensors.

        `decided=False`: an accelerator may come to the comparison of the fingerprints later. What
        this thread's streams do after this call waits for it.
        """
        self._learn()
        pending = self.pending_image
        if pending is None or pending.judged.is_set():
            return
        if pending.is_judged_on_device:
            if accelerator.current_accelerator().is_capturing():
                return  # nothing runs during a capture; the docs cover the graph's replay
            pending.fence()
            if decided:
                self._ensure_thread()
                pending.judged.wait(_COPY_S)
            return
        if not self._await_copy(pending, _COPY_S):
            self.warn("save.copy_slow", f"step {pending.step}: the copy takes over {_COPY_S:.0f} s")
            pending.finish_with_outcome(ImageOutcome.LOST, f"the copy took over {_COPY_S:.0f} s")
            return
        pending.decide_outcome()

    def watch_eager_copy(self, guard: MutationGuard | None) -> None:
        """The image before was discarded, so this one was copied at once: `await_free_tensors`
        finds out whether it would have been discarded, too."""
        self._doubted = guard

    def _learn(self) -> None:
        if self._doubted is None or accelerator.current_accelerator().is_capturing():
            return
        guard, self._doubted = self._doubted, None
        if culprit := guard.find_changed_tensor():
            self.copy_all_eagerly(f"{culprit} has changed again after a save{_HOW}")

    def copy_all_eagerly(self, why: str) -> None:
        """Copy all images at once from now on. Says so once."""
        if not self._eager:
            self._eager = True
            self.warn("save.copies_eager", why)

    def reads(self, storage: torch.UntypedStorage) -> bool:
        """Whether a copy, or the comparison after it, may still read this memory."""
        pending = self.pending_image
        return pending is not None and pending.is_reading_storage(storage)

    def _await_copy(self, pending: PendingImage, timeout_s: float) -> bool:
        if not pending.copied.is_set():
            self._ensure_thread()
            self._changed.ring()  # an exception in `submit` may have come before its ring
        return pending.copied.wait(timeout_s)

    def drain(self, *, timeout_s: float) -> bool:
        """Wait until no image is on its way. False when the time is up."""
        deadline = time.monotonic() + timeout_s
        pending = self.pending_image
        if pending is not None and (
            pending.is_judged_on_device or self._await_copy(pending, timeout_s)
        ):
            self.await_free_tensors(decided=False)
        left_s = max(0.0, deadline - time.monotonic())
        return self._changed.wait_for_condition(
            lambda: self.pending_image is None, timeout_s=left_s
        )

    def skip(self, step: int | None, reason: str, *, unkeepable: bool = False) -> None:
        """Count a step that could not be staged; None for what is no step. The sidecar learns of it
        with the next call. `unkeepable`: the state itself cannot be kept."""
        self.stats.skipped += 1
        if step is None:
            self.stats.count_reason(reason)
            self.warn("save.step_skipped", f"nothing is kept: {reason}", per=reason)
            return
        self._note(step, reason, unkeepable=unkeepable)
        self.warn("save.step_skipped", f"step {step} is not kept: {reason}", per=reason)
        self._changed.ring()

    def is_known_step(self, step: int) -> bool:
        """Whether this step is on its way, or has an outcome."""
        pending = self.pending_image
        return step in self._outcomes or (pending is not None and pending.step == step)

    def find_staging_error(self, step: int) -> str | None:
        """'' for a step that was staged, the reason for a step that was not staged. None for a step
        that is on its way, was never saved here, or is older than the last 10,000."""
        return self._outcomes.get(step)

    def _note(
        self, step: int, reason: str, *, notify: bool = True, unkeepable: bool = False
    ) -> None:
        with self._lock:
            self._end(step, reason)
            reason = self.stats.count_reason(reason)
            if notify:
                before = self._skips.get(reason)
                count = before.times if before is not None else 0
                self._skips[reason] = SkippedSteps(step, count + 1, unkeepable)
        self._repeat(step, reason)

    def _repeat(self, step: int, reason: str) -> None:
        """While no step is staged, say so once a minute."""
        stats, now = self.stats, time.monotonic()
        if not stats.unkept:
            self._unkept_at = self._repeated_at = now
        stats.unkept, stats.why_unkept = stats.unkept + 1, reason
        self._unkept_step = step
        if now - self._repeated_at >= _REPEAT_S:
            self._repeated_at = now
            log.warning(
                "keepstep: rank %d: no step was staged for %.0f s; the last %d saves are not kept,"
                " step %d: %s [save.no_step_staged]",
                *(self.session.rank, now - self._unkept_at, stats.unkept, step, reason),
            )

    def _end(self, step: int, outcome: str) -> None:
        self._outcomes[step] = outcome
        while len(self._outcomes) > _KNOWN_STEPS:
            del self._outcomes[next(iter(self._outcomes))]

    def warn(self, event: str, message: str, *, per: str = "", traceback: bool = False) -> None:
        """Log a warning once per event, or once for each `per`. Repetitions are not logged."""
        key = per or event
        if key not in self._warned and len(self._warned) < _KINDS:
            self._warned.add(key)
            text = f"keepstep: rank {self.session.rank}: {message} [{event}]"
            log.warning("%s", text, exc_info=traceback)

    def warn_in_log_and_status(self, text: str) -> None:
        """Log a warning once, and have it stand in the sidecar's status while this lease lasts. For
        threads that may wait for the sidecar."""
        self.warn("replica.mismatch_found", text, per=text)
        self.session.report_warning(text)

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Give the lease back and end the thread; wait at most `timeout_s` for the thread."""
        deadline = time.monotonic() + timeout_s
        self._begin_closing()
        # the save thread may still write an image: then only the end of this process ends the
        # lease
        self.session.close(goodbye=self.pending_image is None, timeout_s=min(2.0, timeout_s))
        self._client.forbid_further_calls()
        for thread in (self._thread, self._preparing):
            if thread is not None and thread is not threading.current_thread():
                thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def _begin_closing(self) -> None:
        self.closed = True
        _SAVERS.discard(self)
        self._changed.ring()

    def shut_down_at_exit(self) -> None:
        """At the end of the process or of the Checkpointer: stage the image on its way if that is
        quick, then let go.

        The thread must end before the interpreter does. The interpreter would otherwise abort the
        thread in the middle of a copy, and the process with it.
        """
        if self.closed or self._thread is None:
            return
        if self._thread is threading.current_thread():  # garbage-collected in the save thread
            self._begin_closing()
            return
        try:
            self.drain(timeout_s=_DRAIN_S)
        finally:
            self.close(timeout_s=_COPY_S)

    def forget_in_child(self) -> None:
        """In a forked child: drop everything. Nothing here belongs to this process, and no lock can
        be trusted."""
        self.closed = True
        self._lock, self._mapping, self._thread = threading.RLock(), threading.Lock(), None
        self._held = None
        self._mappings = {}
        self.session.forget_lease_after_fork()

    # --- the save thread --------------------------------------------------------------------

    def _work(self) -> None:
        while not (self.closed and self.pending_image is None):
            # how long until the sidecar may be asked again; None if it may be asked now
            left_s = self._retry_at - time.monotonic()
            self._changed.wait_for_condition(
                lambda: self.closed or self._next() is not None,
                timeout_s=left_s if left_s > 0 else None,
            )
            task = self._next()
            if task is None:
                continue
            try:
                task()
            except SidecarError as error:
                self._failed(error)
            except BaseException as error:  # of any kind: without this thread nothing is kept
                self._stumbled(task, error)
        if self.closed:
            self.session.close(goodbye=True)  # the loop ended, so no image is on its way
            self._client.close()

    def _next(self) -> Callable[[], None] | None:
        """The most urgent thing to do, or None to sleep."""
        pending = self.pending_image
        if pending is not None and not pending.is_settled:
            return self._copy
        if self.closed:
            return None if pending is None else self._abandon
        if time.monotonic() < self._retry_at:
            return None
        if not self.session.connected:
            return self._reconnect
        is_registered = self._registered is self._layout  # the sidecar knows the current layout
        # memory may have become free since it was refused
        waits = self.refusal and time.monotonic() - self._refused_at <= _REFUSED_S
        if not is_registered and not waits:
            return self._register
        if pending is not None:
            return self._report
        if self._registered is not None and is_registered and self._asked and self._held is None:
            return self._fetch
        return self._report_skips if self._skips else None

    def _copy(self) -> None:
        pending = self.pending_image
        assert pending is not None
        try:
            if not pending.copied.is_set():
                pending.copy_in_save_thread(lambda: self.closed)
            pending.judge_after_progress(lambda: self.closed)
            if not pending.judged.is_set():
                pending.finish_with_outcome(
                    ImageOutcome.LOST, "the trainer ended before it was certain to be whole"
                )
            if pending.verdict is ImageOutcome.VALID and not pending.sealed:
                pending.seal()
        except BaseException as error:
            pending.finish_with_outcome(ImageOutcome.LOST, f"it could not be copied: {error!r}")
            self.warn("save.copy_failed", f"step {pending.step} was not copied", traceback=True)
        finally:
            pending.copied.set()

    def _report(self) -> None:
        pending = self.pending_image
        assert pending is not None
        if pending.verdict is ImageOutcome.VALID:
            granted = self._report_staged(pending)
        else:
            granted = self._report_discarded(pending)
        self._clear(pending)
        self._failures, self._retry_at = 0, 0.0
        if granted is not None:
            self._keep(granted)

    def _clear(self, pending: PendingImage) -> None:
        """Forget this image: none is on its way any more."""
        with self._lock:
            if self.pending_image is pending:
                self._held = None
        self._changed.ring()

    def _report_staged(self, pending: PendingImage) -> SlotGranted | None:
        grant = pending.slot.grant
        request = StagedRequest(
            lease=self.session.lease_token,
            slot=str(grant.slot),
            generation=grant.generation,
            epoch=pending.control.epoch,
            step=pending.step,
            copy_s=pending.copy_s,
            blocked_s=pending.blocked_s,
            cost=self.stats.staging_cost,
        )
        try:
            granted = self._client.call("/v1/staged", request, SlotGranted)
        except SidecarAbsent:
            raise
        except SidecarError as error:
            if error.code in _ASK_AGAIN:
                raise
            self._lose(pending, f"the sidecar did not take it ({error.code}): {error}")
            self._registered = None
            return None
        self.stats.staged += 1
        pending.counted = True
        if pending.step > self._unkept_step:  # a later save may have been refused meanwhile
            self.stats.unkept, self.stats.why_unkept = 0, ""
        self.stats.copy_s += pending.copy_s
        self.stats.last_copy_s = pending.copy_s
        with self._lock:
            self._end(pending.step, "")
        pending.finish_with_outcome(ImageOutcome.STAGED)
        self.staged_step = pending
        return granted

    def _report_discarded(self, pending: PendingImage) -> SlotGranted:
        reason = pending.loss_text()
        if self._count_lost(pending, "is discarded", reason, notify=False):
            pending.slot.mapping.erase()
            if pending.verdict is ImageOutcome.MUTATED:
                self.mutated_step = pending.step
                self._be_eager(pending)
            pending.finish_with_outcome(pending.verdict)
        grant = pending.slot.grant
        request = DiscardSlotRequest(
            lease=self.session.lease_token,
            slot=str(grant.slot),
            generation=grant.generation,
            step=pending.step,
            reason=reason,
        )
        return self._client.call("/v1/discard", request, SlotGranted)

    def _lose(self, pending: PendingImage, reason: str) -> None:
        """Give up an image of which the sidecar learns only as a skipped step; count and report the
        step."""
        pending.finish_with_outcome(ImageOutcome.LOST, reason)
        self._count_lost(pending, "is lost", reason, notify=True)

    def _count_lost(self, pending: PendingImage, what: str, reason: str, *, notify: bool) -> bool:
        """Count a lost image once. Returns whether it was not counted yet: after a lost connection,
        the same image may be reported again."""
        if pending.counted:
            return False
        pending.counted = True
        self.stats.discarded += 1
        self._note(pending.step, reason, notify=notify)
        self.warn("save.step_discarded", f"step {pending.step} {what}: {reason}", per=reason)
        return True

    def _be_eager(self, pending: PendingImage) -> None:
        """Copy the next image at once. Copy all images at once if changed tensors are frequent, as
        with an optimizer that is not one of torch's and so runs no hook."""
        self.eager_next = True
        saves, before = self.stats.saves, self._discarded_at
        self._discarded_at = saves
        if before is not None and saves - before <= _EAGER_WITHIN:
            self.copy_all_eagerly(
                f"step {pending.step} is the second of {saves - before} saves that changed before"
                f" it was copied{_HOW}"
            )

    def _refuse(self, layout: Layout, reason: str) -> None:
        """There is no memory for images of this layout."""
        with self._lock:
            if self._layout is layout:
                self.refusal, self._refused_at = reason, time.monotonic()
                self._registered = None
        self._changed.ring()

    def _fetch(self) -> None:
        layout = self._layout
        assert layout is not None
        request = SlotRequest(
            lease=self.session.lease_token, layout=layout.id, timeout_s=_SLOT_WAIT_S
        )
        seconds = _SLOT_WAIT_S + 10
        try:
            granted = self._client.call("/v1/slot", request, SlotGranted, timeout_s=seconds)
        except NoMemoryError as error:
            self._refuse(layout, str(error))
            return
        self._keep(granted)

    def _keep(self, granted: SlotGranted) -> None:
        """Map a granted slot and put it at hand."""
        self.stage_every = granted.stage_every or self.stage_every
        layout, base = self._layout, self._base
        if granted.slot is None or layout is None:
            return
        try:
            mapping = self._mapped(granted.path, layout)
            under = None if base is None else self._mapped(granted.base, base.layout)
        except (OSError, FormatError) as error:
            if self._registered is not self._layout:
                # granted for the previous layout; registration of the new layout comes next
                log.debug("slot %s: %s", granted.path, error)
                return
            raise SidecarError(f"slot {granted.path} cannot be mapped: {error}") from error
        with self._lock:
            if self._layout is not layout or self._base is not base:
                return  # the training thread changed it while the slot was mapped
            self._mappings[granted.path] = mapping
            if under is not None:
                self._mappings[granted.base] = under
            self._held = HeldSlot(GrantedSlot(granted, mapping, under))
            self._patient = self._served = True
        self._failures, self._retry_at = 0, 0.0
        self._changed.ring()
        others = [path for path in granted.others if path not in self._mappings]
        if self._device is not None and others:
            self._prepare(others, layout)

    def _mapped(self, path: str, layout: Layout) -> SlotMapping:
        """The mapping of the slot at `path`. A sidecar that lost its memory makes new files of the
        same name, so a replaced file is mapped again."""
        with self._mapping:  # or another thread maps it just now
            mapping = self._mappings.get(path)
            if mapping is not None and not mapping.is_replaced():
                return mapping
            for known, old in list(self._mappings.items()):
                if old.is_replaced():
                    self._mappings.pop(known, None)
            mapping = SlotMapping(path, layout)
            mapping.populate_pages()
            mapping.pin(self._device)
            return mapping

    def _prepare(self, paths: Sequence[str], layout: Layout) -> None:
        """Map slots that will be granted later, in a thread of its own: to pin one for an
        accelerator takes as long as several steps, which would find no slot."""

        def work() -> None:
            for path in paths:
                if self.closed:
                    return
                with contextlib.suppress(OSError, FormatError):  # it is gone, or of another layout
                    mapping = self._mapped(path, layout)
                    with self._lock:
                        if self.closed or self._layout is not layout:
                            return
                        self._mappings.setdefault(path, mapping)

        if self._preparing is None or not self._preparing.is_alive():
            self._preparing = threading.Thread(target=work, name="keepstep-map", daemon=True)
            self._preparing.start()

    def _register(self) -> None:
        layout, base = self._layout, self._base
        assert layout is not None
        request = LayoutRequest(
            lease=self.session.lease_token,
            header=base64.b64encode(layout.header).decode(),
            filling=self._held is not None,
            base="" if base is None else base64.b64encode(base.layout.header).decode(),
            base_step=None if base is None or base.ref is None else base.ref.step,
        )
        try:
            accepted = self._client.call("/v1/layout", request, LayoutAccepted)
        except NoMemoryError as error:
            self._refuse(layout, str(error))
            return
        except SidecarError as error:
            if error.code != "memory-busy":
                raise
            self._retry_at = time.monotonic() + _RETRY_S  # images are on their way to the drive
            return
        if accepted.warning:
            self.warn("save.slots_reduced", accepted.warning, per=accepted.warning)
        with self._lock:
            if self._base is base:
                self._registered, self.refusal = layout, ""

    def _report_skips(self) -> None:
        with self._lock:
            reason, skips = next(iter(self._skips.items()))
        request = SkippedRequest(
            lease=self.session.lease_token,
            step=skips.step,
            reason=reason,
            count=skips.times,
            unkeepable=skips.unkeepable,
        )
        self._client.call("/v1/skipped", request, dict)
        with self._lock:
            now = self._skips.pop(reason)
            if now.times > skips.times:
                self._skips[reason] = now._replace(times=now.times - skips.times)

    def _reconnect(self) -> None:
        held = self._held
        mine = held.slot.grant.slot if held is not None else None
        granted = self.session.request_lease(() if mine is None else (mine,))
        self.stage_every, self.stage_trials = granted.stage_every, granted.stage_trials
        with self._lock:
            if mine not in granted.held:
                self._drop_ready()
            self._registered, self.refusal = None, ""
        log.info("keepstep: rank %d: the sidecar is back [sidecar.connected]", self.session.rank)
        self._warned.discard("the sidecar is away")
        self._patient = True

    def _drop_ready(self) -> None:
        """Give up the slot at hand. A slot that is being filled is left to the thread that fills
        it."""
        if self.waiting_slot is not None:
            self._held = None

    def _failed(self, error: SidecarError) -> None:
        absent = isinstance(error, SidecarAbsent)
        self._failures = 0 if absent or error.code in _ASK_AGAIN else min(self._failures + 1, 10)
        pause_s = min(_RETRY_S * 2.0**self._failures, _MOST_RETRY_S)
        self._retry_at = time.monotonic() + pause_s
        if not absent:
            self.warn("sidecar.request_refused", str(error), per=error.code)
            self.session.release_lease()  # the sidecar and this saver disagree: begin anew

    def _stumbled(self, task: Callable[[], None], error: BaseException) -> None:
        """Handle an unforeseen exception: it costs the step that it struck, and no other step."""
        text = f"the thread that saves failed, which costs one step: {error!r}"
        self.warn("save.thread_failed", text, per=repr(error), traceback=True)
        pending = self.pending_image
        if pending is not None and task == self._report:
            if pending.verdict is not ImageOutcome.STAGED:
                self._lose(pending, f"it could not be reported: {error!r}")
                pending.slot.mapping.erase()
            self._clear(pending)
        if self._failures:  # repeated: begin anew, after a pause
            self._failed(SidecarError(str(error)))
        self._failures += 1

    def _abandon(self) -> None:
        pending = self.pending_image
        if pending is not None:
            self._lose(pending, "the trainer ended before it was reported")
            self._clear(pending)


_SAVERS: weakref.WeakSet[SaveThread] = weakref.WeakSet()
"""The agents of this process that hold a rank."""


def _disown_in_child() -> None:
    for saver in list(_SAVERS):
        saver.forget_in_child()
    _SAVERS.clear()


os.register_at_fork(after_in_child=_disown_in_child)
