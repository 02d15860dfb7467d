"""The messages between trainer and sidecar: types for HTTP/1.1 + JSON over a unix socket.

The sidecar decodes them with msgspec (strictly). The library decodes them with `from_json` below,
because the training container may have only the standard library and torch. docs/protocol.md states
the duties of each side. Within one protocol version a field may be added with a default; no field
may be removed or change its meaning.

Most messages are never compared. They have `eq=False`, so that `import keepstep` takes less time.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from dataclasses import dataclass
from typing import Any, TypeVar

from keepstep.errors import ProtocolError
from keepstep.steps import Epoch, StepId, Tier

PROTOCOL_MIN = 1
PROTOCOL_MAX = 1

SOCKET_ENV = "KEEPSTEP_SOCKET"
"""Environment variable of the training process: the path of the sidecar's unix socket."""

RESTORE_TIMEOUT_ENV = "KEEPSTEP_RESTORE_TIMEOUT"
"""Environment variable of the training process: how many seconds it may take to bring one rank's
image."""

T = TypeVar("T")


# --- lease -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class LeaseRequest:
    """POST /v1/lease. The response never ends: the open response *is* the lease. The kernel closes
    it when the process dies.

    `holding`: names of the slots that this live trainer is filling, so that a restarted sidecar
    keeps them assigned. `attempt`: random, constant for the trainer's life. `local_world`: the
    number of ranks on this machine (torchrun's LOCAL_WORLD_SIZE); 0: all ranks. `ancestors`: pids
    of the processes that this one descends from, to tell a trainer's subprocess from its successor.
    `age_s`: for how many seconds this process has lived.
    """

    rank: int
    world: int
    attempt: str
    pid: int
    library: str
    protocol_min: int = PROTOCOL_MIN
    protocol_max: int = PROTOCOL_MAX
    holding: tuple[str, ...] = ()
    local_world: int = 0
    ancestors: tuple[int, ...] = ()
    age_s: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class LeaseGranted:
    """First line of the lease stream (JSON lines; later lines are `{}` pings).

    `held`: those slots of `LeaseRequest.holding` that the trainer may still fill. `archive`: steps
    also go to an archive. `huge_pages_dir`: a second directory in which slots may be; '': there is
    none.
    """

    lease: str
    run: str
    protocol: int
    sidecar: str
    memory_dir: str
    huge_pages_dir: str = ""
    stage_every: int = 1
    held: tuple[str, ...] = ()
    archive: bool = False


@dataclass(frozen=True, kw_only=True)
class UnseenRequest:
    """POST /v1/unseen: this trainer cannot use `LeaseGranted.huge_pages_dir`, for instance because
    its container does not mount it. Answered once every image in it is also available elsewhere."""

    lease: str


# --- slots -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class LayoutRequest:
    """POST /v1/layout: this rank's images have the layout of `header` (base64 of the header
    bytes)."""

    lease: str
    header: str


@dataclass(frozen=True, kw_only=True, eq=False)
class LayoutAccepted:
    """There are `slots` slots of `slot_bytes` bytes each. They are fewer than configured if memory
    is limited."""

    layout: str
    slots: int
    slot_bytes: int
    warning: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotRequest:
    """POST /v1/slot: the next slot to fill. Waits up to `timeout_s`. At most one is unsealed."""

    lease: str
    layout: str
    timeout_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class SlotGranted:
    """`slot` None: no slot became free in time. `path`: the slot's file. `generation`: a number for
    this use of the slot."""

    slot: str | None
    path: str = ""
    generation: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedRequest:
    """POST /v1/staged: the image in `slot` is complete and sealed. The reply has the next slot.

    Times in seconds. `blocked_s`: how long this image blocked the training thread.
    """

    lease: str
    slot: str
    generation: int
    epoch: Epoch
    step: int
    copy_s: float = 0.0
    blocked_s: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class DiscardRequest:
    """POST /v1/discard: the image in `slot` is not valid. The slot goes back to the sidecar."""

    lease: str
    slot: str
    generation: int
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True, eq=False)
class SkippedRequest:
    """POST /v1/skipped: `count` steps could not be staged. `step`: the last of them."""

    lease: str
    step: int
    reason: str
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class FailedRequest:
    """POST /v1/failed: the script itself failed when it had reached step `id`. The failure is
    recorded durably before the answer."""

    lease: str
    id: StepId
    reason: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReleaseRequest:
    """POST /v1/release: this trainer no longer writes into any slot. Its process may live on."""

    lease: str


# --- restore ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class CandidatesRequest:
    """POST /v1/candidates: what this rank could restore. Answered when the scan of the volumes is
    done and the rank may vote (`core.readiness`)."""

    lease: str
    timeout_s: float = 60.0


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenRequest:
    """POST /v1/restore: bring this step's image into a slot and verify it.

    `bad`: path of a slot that an earlier answer named and that failed its verification; '': none.
    """

    lease: str
    id: StepId
    timeout_s: float = 600.0
    bad: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Opened:
    """The verified image is in this slot, which is pinned until `RestoredRequest`. `tier`: where
    the image came from."""

    slot: str
    path: str
    tier: Tier
    bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, eq=False)
class RestoredRequest:
    """POST /v1/restored: all ranks agreed on `epoch`. Its parent is the restored step, if any."""

    lease: str
    epoch: Epoch
    tier: Tier | None = None
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class SourcesRequest:
    """POST /v1/sources: where the images of all ranks that saved this step are.

    The named images stay where they are until `RestoredRequest` or the end of the lease. `bad`:
    paths of earlier answers that failed their verification. `every`: also name images whose twin is
    named.
    """

    lease: str
    id: StepId
    bad: tuple[str, ...] = ()
    every: bool = False


@dataclass(frozen=True, kw_only=True)
class Source:
    """The sealed image of `rank`, one of the ranks that saved the step (not of those that run now).

    `path`: the slot's file if the image is in this machine's shared memory, to be mapped read-only;
    '': ask for its chunks. `extras_bytes`: as in its control page. `twins`: ranks whose images hold
    the very same boxes, see `Layout.twins`.
    """

    rank: int
    tier: Tier
    bytes: int
    extras_bytes: int
    path: str = ""
    twins: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Sources:
    """One source for each of the `world` ranks whose image is available. Ranks without a source
    have a twin with one.

    `left_out`: ranks whose image is available but not named, because a twin's is.
    """

    id: StepId
    world: int
    sources: tuple[Source, ...] = ()
    left_out: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadersRequest:
    """POST /v1/headers: the headers of these saved ranks' images."""

    lease: str
    id: StepId
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Headers:
    """The headers in the order of the request, each as base64 of its zlib-compressed bytes."""

    headers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowRequest:
    """POST /v1/window: shared memory through which verified chunks come. A lease has at most one
    window, until `RestoredRequest` or the end of the lease."""

    lease: str
    frames: int = 6


@dataclass(frozen=True, kw_only=True)
class Window:
    """A file in shared memory with `frames` frames of `frame_bytes` bytes. A frame holds one
    chunk."""

    path: str
    frames: int
    frame_bytes: int


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Put chunk number `chunk` (of `CHUNK_BYTES`) of the saved rank `rank` into frame `frame`."""

    rank: int
    chunk: int
    frame: int


@dataclass(frozen=True, kw_only=True)
class ChunkRun:
    """Chunks `first` to `end` (exclusive) of the saved rank `rank`."""

    rank: int
    first: int
    end: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunksRequest:
    """POST /v1/chunks: bring these chunks into the window, verified. Requests may overlap in time
    if they use different frames.

    `announced`: all chunks of this step that this rank will ask for from now on, in the order of
    (saved rank, chunk). Chunks that several ranks of the machine announced are read once for all of
    them. Empty: the rank will ask for no chunks. None: the earlier announcement still holds.
    """

    lease: str
    id: StepId
    chunks: tuple[Chunk, ...]
    timeout_s: float = 600.0
    announced: tuple[ChunkRun, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """All requested chunks are in their frames. `tier`: the farthest tier that was read."""

    seconds: float = 0.0
    tier: Tier = Tier.MEMORY


# --- progress --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class WaitRequest:
    """POST /v1/wait: wait until step `id` itself is, or was, in `state`.

    With state `archived`: wait until the newest step that the archive's schedule wants is in the
    archive. `flush`: persist this step now, even if the schedule would not.
    """

    lease: str
    id: StepId
    state: str
    timeout_s: float = 60.0
    flush: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Waited:
    """`reached` False: the state was not reached, and `reason` says what is missing. `final`: the
    state will never be reached."""

    reached: bool
    reason: str = ""
    final: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class FlushRequest:
    """POST /v1/flush: make the newest two staged steps that all ranks have in common durable
    (SIGTERM, preStop)."""

    timeout_s: float = 25.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Flushed:
    """`steps`: those that are durable on all ranks of this machine after the flush, newest last."""

    steps: tuple[StepId, ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class StopRequest:
    """POST /v1/stop: end the sidecar. `drain`: finish writes first. `forget`: free the memory."""

    drain: bool = True
    forget: bool = True
    timeout_s: float = 60.0


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnerRequest:
    """POST /v1/owner: while the process `pid` (on the sidecar's machine) lives, the sidecar does
    not end by itself, no matter how long no trainer connects."""

    pid: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Body of every response that is not 200. `code` is stable; `message` says what to do."""

    code: str
    message: str


# --- JSON without dependencies -----------------------------------------------------------------


def to_json(value: Any) -> bytes:
    """Encode a message. Enums are strings, tuples are lists."""
    return json.dumps(dataclasses.asdict(value), separators=(",", ":")).encode()


def from_json(kind: type[T], data: bytes | str) -> T:
    """Decode a message. Unknown fields are ignored, because the peer may be newer.

    Raises ProtocolError if the text is not JSON or does not have the shape of `kind`.
    """
    try:
        return typing.cast(T, _build(kind, json.loads(data)))
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise ProtocolError(f"not a {kind.__name__}: {e}", code="protocol") from e


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """Type hints of a message's fields. They are cached, because computing them takes longer than
    decoding a small message."""
    return typing.get_type_hints(kind)


def _build(kind: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _build(next(one for one in arguments if one is not type(None)), value)
    if origin is tuple:
        return tuple(_build(arguments[0], one) for one in value)
    if origin is dict:
        return {key: _build(arguments[1], one) for key, one in value.items()}
    if dataclasses.is_dataclass(kind):
        hints = _hints(typing.cast(typing.Hashable, kind))
        known = {name: _build(hints[name], one) for name, one in value.items() if name in hints}
        return typing.cast(Any, kind)(**known)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, kind):
        return value
    if issubclass(kind, str) and isinstance(value, str):
        return kind(value)
    raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
