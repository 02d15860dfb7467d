"""A trainer's session with the sidecar: the lease, and calls from any thread. HTTP/1.1 + JSON over
its unix socket, with the standard library only.

A `SidecarClient` makes one call at a time on a connection that it keeps. A `HeldLease` is one
response that never ends. The kernel closes it when this process dies in any way, and so the sidecar
learns of the death. A forked child must not keep the descriptor: otherwise a data loader's worker
would hold the lease of its dead parent.
"""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from keepstep import processes, version
from keepstep.client.embedded import SidecarRestarter
from keepstep.errors import (
    NoMemoryError,
    NotDurableError,
    ProtocolError,
    SidecarAbsent,
    SidecarError,
    UsageError,
)
from keepstep.steps import State, StepId
from keepstep.wire.trainer import (
    RESTORE_TIMEOUT_ENV,
    LeaseGranted,
    LeaseRequest,
    LeaseStreamEvent,
    Problem,
    ReleaseSlotsRequest,
    ScriptFailedRequest,
    UnseenHugePagesRequest,
    Waited,
    WaitRequest,
    WarningRequest,
    from_json,
    to_json,
)

T = TypeVar("T")

_PAUSE_S = 0.05
_POLL_S = 30.0
_LEASE_S = 10.0
_SLACK_S = 0.5
_UNSEEN_S = 30.0
"""The call takes long, because images in a directory that the trainer does not see are made durable
before its answer."""
_FAILED_S = 2.0
_REASON = 300  # characters
_ERRORS: dict[str, type[SidecarError]] = {"protocol": ProtocolError, "no-memory": NoMemoryError}

# --- how threads wait for each other -------------------------------------------------------------
#
# A signal handler may raise at any point of the training thread (Ctrl-C, an alarm, a preemption
# notice). `threading.Condition` and `Event` are Python code: an exception inside them may leave
# their lock taken, and the save thread would wait for ever. `SimpleQueue` is C code that is safe
# against this. Here it only wakes threads; the condition itself is on plain attributes.


class ConditionNotifier:
    """Wakes the threads that wait for a condition on plain attributes."""

    def __init__(self) -> None:
        self._waiting: set[SimpleQueue[None]] = set()

    def ring(self) -> None:
        """Something changed: every waiting thread checks its condition again."""
        for bell in tuple(self._waiting):
            if bell.empty():
                bell.put(None)

    def wait_for_condition(
        self, condition: Callable[[], object], *, timeout_s: float | None
    ) -> bool:
        """Wait until the condition is true, for at most `timeout_s` (None: for any time). Returns
        whether it became true in time."""
        if condition():
            return True
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        bell: SimpleQueue[None] = SimpleQueue()
        try:
            self._waiting.add(bell)
            while not condition():
                left_s = None if deadline is None else deadline - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return False
                try:
                    bell.get(timeout=left_s)
                except Empty:
                    return bool(condition())
            return True
        finally:
            self._waiting.discard(bell)


class OneTimeEvent:
    """An event that is set once and stays set."""

    def __init__(self) -> None:
        self._open = False
        self._changes = ConditionNotifier()

    def is_set(self) -> bool:
        return self._open

    def set(self) -> None:
        self._open = True
        self._changes.ring()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the gate is set. Returns whether it was set in time."""
        return self._changes.wait_for_condition(self.is_set, timeout_s=timeout_s)


# --- calls and the lease -------------------------------------------------------------------------


class UnixConnection(http.client.HTTPConnection):
    """HTTP over the unix socket at `path`. Raises SidecarAbsent if no sidecar listens there."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(self._path)
        except OSError as error:
            self.sock.close()
            raise SidecarAbsent(
                f"no sidecar listens on {self._path} ({error.strerror or error}); start the"
                " training with `keepstep run -- ...`, or unset KEEPSTEP_SOCKET to train without",
                code="absent",
            ) from error

    def ask(self, route: str, message: Any) -> http.client.HTTPResponse:
        """POST a message, or GET if there is none. Raises the problem that the answer reports, as a
        SidecarError."""
        method, body = ("GET", None) if message is None else ("POST", to_json(message))
        self.request(method, route, body, {"Content-Type": "application/json"})
        response = self.getresponse()
        if response.status != 200:
            raise _problem(response.status, response.read())
        return response

    def make_absent_error(self, error: Exception) -> SidecarAbsent:
        """The SidecarAbsent to raise for a connection that broke with `error`."""
        silent = isinstance(error, TimeoutError)
        kind = "did not answer in time" if silent else "went away"
        code = "silent" if silent else "absent"
        return SidecarAbsent(f"the sidecar on {self._path} {kind} ({error})", code=code)


def _problem(status: int, data: bytes) -> SidecarError:
    try:
        problem = from_json(Problem, data)
    except ProtocolError:
        text = data[:200].decode(errors="replace")
        return ProtocolError(f"the sidecar answered {status}: {text}", code="protocol")
    return _ERRORS.get(problem.code, SidecarError)(problem.message, code=problem.code)


class SidecarClient:
    """One connection to the sidecar, for one thread at a time."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._connection: UnixConnection | None = None
        self._ended = False

    def call(self, route: str, message: Any, kind: type[T], *, timeout_s: float = 10.0) -> T:
        """POST `message` to `route` and decode the answer.

        Raises SidecarAbsent, ProtocolError, NoMemoryError or SidecarError (with the problem's
        code). If a kept connection breaks, the call is repeated once on a new one, because the
        sidecar may have restarted. Every route is idempotent.
        """
        while True:
            if self._ended:
                raise SidecarAbsent("the connection to the sidecar was closed", code="absent")
            kept = self._connection
            connection = self._connection = kept or UnixConnection(self.path, timeout_s)
            try:
                connection.timeout = timeout_s
                if connection.sock is not None:
                    connection.sock.settimeout(timeout_s)
                return from_json(kind, connection.ask(route, message).read())
            except (http.client.HTTPException, OSError) as error:
                self.close()
                if kept is None or isinstance(error, TimeoutError):
                    raise connection.make_absent_error(error) from error

    def get(self, route: str, kind: type[T], *, timeout_s: float = 10.0) -> T:
        """GET `route` and decode the answer. Raises as `call` does."""
        return self.call(route, None, kind, timeout_s=timeout_s)

    def close(self) -> None:
        """Close the connection. The next call opens a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def forbid_further_calls(self) -> None:
        """Allow no more calls. May be called from any thread: a thread that waits for an answer
        stops waiting."""
        self._ended = True
        # Read once, because the thread that uses the connection may close it meanwhile.
        sock = getattr(self._connection, "sock", None)
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class HeldLease:
    """The lease, held for the life of this process. `lost` is set once the sidecar is gone or the
    lease was closed."""

    def __init__(
        self,
        path: str,
        request: LeaseRequest,
        on_lost: Callable[[], None],
        *,
        warn: Callable[[str], None] = lambda text: None,
        timeout_s: float = 10.0,
    ) -> None:
        """Ask for the lease. `warn` gets what the sidecar has to tell this rank's user, from
        another thread. Raises as `SidecarClient.call` does, with code `rank-taken` if another live
        trainer holds this rank."""
        self.lost = OneTimeEvent()
        self._on_lost = on_lost
        self._warn = warn
        connection = self._connection = UnixConnection(path, timeout_s)
        try:
            self._response = connection.ask("/v1/lease", request)
            self.granted = from_json(LeaseGranted, self._response.readline())
        except (http.client.HTTPException, OSError) as error:
            connection.close()
            raise connection.make_absent_error(error) from error
        except SidecarError:
            connection.close()
            raise
        connection.sock.settimeout(None)
        _LEASES.add(self)
        threading.Thread(target=self._watch, name="keepstep-lease", daemon=True).start()

    def close(self) -> None:
        """Give the rank back."""
        _LEASES.discard(self)
        sock = self._connection.sock
        if sock is not None:
            # shutdown, not close: the watching thread is reading from this descriptor.
            with contextlib.suppress(OSError):  # the sidecar closed it first
                sock.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            while line := self._response.readline():
                self._read(line)
        _LEASES.discard(self)
        self._connection.close()
        self.lost.set()
        self._on_lost()

    def _read(self, line: bytes) -> None:
        with contextlib.suppress(ProtocolError):  # a line of a newer sidecar
            if warning := from_json(LeaseStreamEvent, line).warning:
                self._warn(warning)


_LEASES: weakref.WeakSet[HeldLease] = weakref.WeakSet()


def _forget_leases_in_child() -> None:
    for lease in list(_LEASES):
        sock = lease._connection.sock
        if sock is not None and (fd := sock.detach()) >= 0:
            # Detached, because another file may soon have this number, and the socket object must
            # not close that file.
            os.close(fd)
    _LEASES.clear()


os.register_at_fork(after_in_child=_forget_leases_in_child)


# --- a session -----------------------------------------------------------------------------------


class SidecarSession:
    """The lease of one rank. `changed` rings when the lease is lost. `archive`: the sidecar has an
    archive. `keeper`: restarts the sidecar, if no other process does. `warn`: see `HeldLease`."""

    def __init__(
        self,
        path: str,
        *,
        rank: int,
        world: int,
        changed: ConditionNotifier,
        keeper: SidecarRestarter | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.rank, self.path = rank, path
        self.run, self.archive = "", False
        self._world = world
        self._attempt = os.urandom(8).hex()
        self._changed = changed
        self._keeper = keeper
        self._warn = warn
        self._lease: HeldLease | None = None
        self._ending = threading.RLock()
        self._calls: set[SidecarClient] = set()
        self._interrupted = False

    @property
    def lease_token(self) -> str:
        """Token of the lease; '' while the sidecar is away."""
        return granted.lease if (granted := self.granted) is not None else ""

    @property
    def granted(self) -> LeaseGranted | None:
        """The lease; None while there is none."""
        lease = self._lease
        return lease.granted if lease is not None and not lease.lost.is_set() else None

    @property
    def connected(self) -> bool:
        """Whether the sidecar is there, as far as the kernel knows."""
        return bool(self.lease_token)

    def request_lease(
        self, holding: tuple[str, ...] = (), *, timeout_s: float = _LEASE_S
    ) -> LeaseGranted:
        """Ask for the lease once. Raises SidecarAbsent or SidecarError."""
        request = LeaseRequest(
            rank=self.rank,
            world=self._world,
            attempt=self._attempt,
            pid=os.getpid(),
            library=version.__version__,
            holding=holding,
            local_world=int(os.environ.get("LOCAL_WORLD_SIZE", "0")),
            ancestors=_ancestors(),
            age_s=_age_s(),
        )
        try:
            lease = HeldLease(
                self.path, request, self._changed.ring, warn=self._warn, timeout_s=timeout_s
            )
        except SidecarAbsent as error:
            if self._keeper is not None and error.code == "absent":  # "silent" is slow, not dead
                self._keeper.restart_if_due()
            raise
        self.run, self.archive = lease.granted.run, lease.granted.archive
        self._lease = lease
        self._changed.ring()
        self._require_seen(lease.granted)
        return lease.granted

    def _require_seen(self, granted: LeaseGranted) -> None:
        """Tell the sidecar if this container does not see the directory of its huge pages. Then no
        image may be kept there."""
        directory = granted.huge_pages_dir
        if directory and not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            with contextlib.suppress(SidecarError):  # asked again with the next lease
                request = UnseenHugePagesRequest(lease=granted.lease)
                self.call_apart("/v1/unseen", request, dict, timeout_s=_UNSEEN_S)

    def await_lease(self, *, timeout_s: float) -> LeaseGranted:
        """Get the lease.

        Waits up to `timeout_s` for a sidecar that is just starting, or for a predecessor of this
        rank that is just dying. A sidecar that listens but does not answer, on an overloaded
        machine, is given as long as a restore may take. Raises SidecarAbsent or SidecarError when
        the time is up.
        """
        began = time.monotonic()
        patience_s = dict.fromkeys(("absent", "rank-taken", "starting"), timeout_s)
        patience_s["silent"] = max(timeout_s, restore_timeout_s())
        while True:
            try:
                left_s = patience_s["silent"] - (time.monotonic() - began)
                return self.request_lease(timeout_s=min(max(left_s, 1.0), _LEASE_S))
            except SidecarError as error:
                if time.monotonic() - began >= patience_s.get(error.code, 0.0):
                    raise
            # Before the socket exists, there is nothing to wait on.
            time.sleep(_PAUSE_S)
            if (granted := self.granted) is not None:  # taken by a call that was interrupted
                return granted
            if self._interrupted:
                raise SidecarAbsent("the call was interrupted", code="absent")

    def call_apart(self, route: str, message: Any, kind: type[T], *, timeout_s: float) -> T:
        """Make a call on a separate connection. Raises as `SidecarClient.call` does."""
        with contextlib.closing(SidecarClient(self.path)) as client:
            self._calls.add(client)
            try:
                return client.call(route, message, kind, timeout_s=timeout_s)
            finally:
                self._calls.discard(client)

    @contextlib.contextmanager
    def interrupt_calls(self) -> Iterator[None]:
        """Within this context, no call of another thread goes on, and none waits for the lease."""
        self._interrupted = True
        for client in list(self._calls):
            client.forbid_further_calls()
        try:
            yield
        finally:
            self._interrupted = False

    def await_connection(self, *, timeout_s: float) -> None:
        """Return when the save thread has the lease again, or after `timeout_s`."""
        self._changed.wait_for_condition(lambda: self.connected, timeout_s=timeout_s)

    def wait(self, step_id: StepId, state: State, *, timeout_s: float) -> None:
        """Return when the sidecar says that `step_id` is in `state`. The step is persisted now if
        needed.

        A sidecar that restarts meanwhile is asked again. Raises NotDurableError.
        """
        deadline = time.monotonic() + timeout_s
        reason = "the sidecar is away"
        while (left_s := deadline - time.monotonic()) > 0:
            if not self.connected:
                self.await_connection(timeout_s=left_s)
                continue
            try:
                seconds = min(left_s, _POLL_S)
                request = WaitRequest(
                    lease=self.lease_token,
                    id=step_id,
                    state=str(state),
                    timeout_s=seconds,
                    flush=True,
                )
                waited = self.call_apart("/v1/wait", request, Waited, timeout_s=seconds + _SLACK_S)
            except SidecarAbsent as error:
                reason = str(error)
                time.sleep(min(left_s, 0.1))
                continue
            except SidecarError as error:
                raise NotDurableError(f"step {step_id.step} is not {state}: {error}") from error
            if waited.reached:
                return
            reason = waited.reason
            if waited.final:
                raise NotDurableError(f"step {step_id.step} is not {state}: {reason}")
        raise NotDurableError(
            f"step {step_id.step} is not {state} after {timeout_s:.0f} s: {reason}"
        )

    def report_script_failure(self, step_id: StepId, reason: str) -> None:
        """Report that the script itself failed when it had reached step `step_id`. Gives up after
        `_FAILED_S` seconds."""
        if self.connected:
            with contextlib.suppress(SidecarError):
                request = ScriptFailedRequest(
                    lease=self.lease_token, id=step_id, reason=reason[:_REASON]
                )
                self.call_apart("/v1/failed", request, dict, timeout_s=_FAILED_S)

    def report_warning(self, text: str) -> None:
        """Have this warning stand in the sidecar's status, while this lease lasts."""
        if self.connected:
            with contextlib.suppress(SidecarError):
                request = WarningRequest(lease=self.lease_token, text=text)
                self.call_apart("/v1/warning", request, dict, timeout_s=_FAILED_S)

    def release_lease(self) -> None:
        """Give up the lease, so that another can be taken."""
        lease = self._lease
        if lease is not None:
            lease.close()
            lease.lost.wait(1.0)

    def close(self, *, goodbye: bool, timeout_s: float = 2.0) -> None:
        """Give the rank back. `goodbye`: this process no longer writes into any slot."""
        with self._ending:  # a second thread must not cut off the goodbye of the first
            if goodbye and self.connected:
                with contextlib.suppress(SidecarError):
                    request = ReleaseSlotsRequest(lease=self.lease_token)
                    self.call_apart("/v1/release", request, dict, timeout_s=timeout_s)
            self.release_lease()

    def forget_lease_after_fork(self) -> None:
        """Called in a forked child: forget the lease, which is the parent's."""
        self._lease, self._ending = None, threading.RLock()


def _age_s() -> float:
    """For how many seconds this process has lived (proc(5): field 22 of stat, in ticks since the
    boot)."""
    fields = processes.process_stat("self")
    if fields is None:
        return 0.0
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)


def _ancestors() -> tuple[int, ...]:
    """Pids of the ancestors of this process, as far as they are visible, nearest first."""
    found: list[int] = []
    pid = os.getppid()
    while pid > 0 and len(found) < 32:
        found.append(pid)
        if (fields := processes.process_stat(pid)) is None:
            break
        pid = int(fields[1])
    return tuple(found)


def fetch_complete_step_numbers(path: str, *, timeout_s: float) -> set[int]:
    """Numbers of the steps that the sidecar at this socket knows to be whole: steps that are
    committed, or of which it knows an image of every rank. Waits until the sidecar has scanned its
    volumes. Raises SidecarError."""
    from keepstep.wire.status import Status  # rarely needed, and it would slow down every import

    deadline = time.monotonic() + timeout_s
    with contextlib.closing(SidecarClient(path)) as client:
        while not (status := client.get("/v1/status", Status)).scanned:
            if time.monotonic() >= deadline:
                raise SidecarError(
                    f"the sidecar is still looking at its volumes after {timeout_s:.0f} s",
                    code="starting",
                )
            time.sleep(_PAUSE_S)
    return {step.id.step for step in status.steps if step.whole and not step.dead}


RESTORE_S = 600.0


def restore_timeout_s() -> float:
    """How many seconds it may take to bring one rank's image, or one window of chunks of other
    images: from the environment of the training process. Raises UsageError."""
    text = os.environ.get(RESTORE_TIMEOUT_ENV) or str(RESTORE_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < math.inf:
        raise UsageError(f"{RESTORE_TIMEOUT_ENV}={text}: it is a number of seconds above 0")
    return seconds
