"""A trainer's tie to the sidecar: the lease, and calls from whichever thread."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from typing import Any, TypeVar

import keepstep
from keepstep.client import Client, Lease
from keepstep.errors import NotDurableError, SidecarAbsent, SidecarError
from keepstep.protocol import LeaseGranted, LeaseRequest, ReleaseRequest, Waited, WaitRequest
from keepstep.steps import State, StepId

T = TypeVar("T")

_PAUSE_S = 0.05
_POLL_S = 30.0


class Link:
    """`changed` is notified when the lease is lost. `archive`: the sidecar has one."""

    def __init__(self, path: str, *, rank: int, world: int, changed: threading.Condition) -> None:
        self.rank = rank
        self.run, self.archive = "", False
        self._path, self._world = path, world
        self._attempt = secrets.token_hex(8)
        self._changed = changed
        self._lease: Lease | None = None

    @property
    def lease(self) -> str:
        """Token of the lease; '' while the sidecar is away."""
        lease = self._lease
        return lease.granted.lease if lease is not None and not lease.lost.is_set() else ""

    @property
    def connected(self) -> bool:
        """Whether the sidecar is there, as far as the kernel knows."""
        return bool(self.lease)

    def take(self, holding: tuple[str, ...] = ()) -> LeaseGranted:
        """Ask for the lease once. Raises SidecarAbsent or SidecarError."""
        request = LeaseRequest(
            rank=self.rank,
            world=self._world,
            attempt=self._attempt,
            pid=os.getpid(),
            library=keepstep.__version__,
            holding=holding,
            local_world=int(os.environ.get("LOCAL_WORLD_SIZE", "0")),
        )
        lease = Lease(self._path, request, self._notify)
        self.run, self.archive = lease.granted.run, lease.granted.archive
        self._lease = lease
        return lease.granted

    def connect(self, *, timeout_s: float) -> LeaseGranted:
        """Get the lease, waiting for a sidecar that is just starting, or for a predecessor that
        is just dying. Raises SidecarAbsent or SidecarError when the time is up."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self.take()
            except SidecarError as error:
                if error.code not in ("absent", "rank-taken", "starting"):
                    raise
                if time.monotonic() >= deadline:
                    raise
            # there is nothing to wait on before the socket exists
            time.sleep(_PAUSE_S)

    def call(self, route: str, message: Any, kind: type[T], *, timeout_s: float) -> T:
        """A call on a connection of its own. Raises as `Client.call`."""
        client = Client(self._path)
        try:
            return client.call(route, message, kind, timeout_s=timeout_s)
        finally:
            client.close()

    def wait(self, id: StepId, state: State, *, timeout_s: float) -> None:
        """Return when the sidecar says that `id` is in `state`, persisting it now if need be.

        A sidecar that restarts in between is asked again. Raises NotDurableError.
        """
        deadline = time.monotonic() + timeout_s
        reason = "the sidecar is away"
        while (left_s := deadline - time.monotonic()) > 0:
            if not self.connected:
                with self._changed:
                    self._changed.wait_for(lambda: self.connected, timeout=min(left_s, 0.5))
                continue
            try:
                waited = self._ask(id, state, min(left_s, _POLL_S))
            except SidecarAbsent as error:
                reason = str(error)
                with self._changed:
                    self._changed.wait(timeout=min(left_s, 0.1))
                continue
            except SidecarError as error:
                raise NotDurableError(f"step {id.step} is not {state}: {error}") from error
            if waited.reached:
                return
            reason = waited.reason
        raise NotDurableError(f"step {id.step} is not {state} after {timeout_s:.0f} s: {reason}")

    def _ask(self, id: StepId, state: State, timeout_s: float) -> Waited:
        request = WaitRequest(
            lease=self.lease, id=id, state=str(state), timeout_s=timeout_s, flush=True
        )
        return self.call("/v1/wait", request, Waited, timeout_s=timeout_s + 5.0)

    def drop(self) -> None:
        """Let the lease go, to take another."""
        lease = self._lease
        if lease is not None:
            lease.close()
            lease.lost.wait(1.0)

    def close(self, *, goodbye: bool) -> None:
        """Give the rank back. `goodbye`: this process writes into no slot any more."""
        if goodbye and self.connected:
            with contextlib.suppress(SidecarError):
                self.call("/v1/release", ReleaseRequest(lease=self.lease), dict, timeout_s=2.0)
        if self._lease is not None:
            self._lease.close()

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()
