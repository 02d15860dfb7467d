"""What trainer and sidecar say to each other: types of HTTP/1.1 + JSON over a unix socket.

The sidecar decodes them with msgspec (strictly), the library with `from_json` below, because the
training image has the standard library only. Duties of each side: docs/protocol.md. A field may be
added with a default; nothing may be removed or change its meaning within `PROTOCOL`.

`eq=False`: nobody compares most messages, and what a dataclass does not need is time that
`import keepstep` does not take.
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
"""Path of the sidecar's unix socket, in the training process's environment."""

RESTORE_TIMEOUT_ENV = "KEEPSTEP_RESTORE_TIMEOUT"
"""Seconds that bringing one rank's image may take, in the training process's environment."""

T = TypeVar("T")


# --- lease -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class LeaseRequest:
    """POST /v1/lease. The response never ends: it *is* the lease, the kernel closes it at death.

    `holding`: slots (by name) that this live trainer is filling, so that a sidecar that was
    restarted in between keeps them assigned. `attempt`: chance, constant for the trainer's life.
    `local_world`: ranks on this machine (torchrun's LOCAL_WORLD_SIZE), 0: all of them.
    `ancestors`: processes that this one was started by, to tell a trainer's subprocess from its
    successor. `age_s`: for how long this process has lived.
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

    `held`: those of `LeaseRequest.holding` that are still this trainer's to fill. `archive`: steps
    go to an archive, too. `huge_pages_dir`: where slots may be besides, '' for nowhere.
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
    """POST /v1/unseen: this trainer cannot use `LeaseGranted.huge_pages_dir`, as in a container
    that does not mount it. Answered when all that is there can be had from elsewhere."""

    lease: str


# --- slots -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class LayoutRequest:
    """POST /v1/layout: this rank's images look like `header` (base64 of the header bytes)."""

    lease: str
    header: str


@dataclass(frozen=True, kw_only=True, eq=False)
class LayoutAccepted:
    """`slots` images of `slot_bytes` each; fewer than asked for when memory is limited."""

    layout: str
    slots: int
    slot_bytes: int
    warning: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotRequest:
    """POST /v1/slot: the next slot to fill. Waits up to `timeout_s`; at most one unsealed."""

    lease: str
    layout: str
    timeout_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class SlotGranted:
    """`slot` None: none became free in time. `path`: the slot's file, `generation`: its use."""

    slot: str | None
    path: str = ""
    generation: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class StagedRequest:
    """POST /v1/staged: the image in `slot` is complete and sealed. The reply has the next slot.

    Times in seconds. `blocked_s`: what the training thread paid for this image.
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
    """POST /v1/skipped: `count` steps, the last of them `step`, could not be staged."""

    lease: str
    step: int
    reason: str
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class FailedRequest:
    """POST /v1/failed: the script itself failed when it had come to `id`. Durable when answered."""

    lease: str
    id: StepId
    reason: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReleaseRequest:
    """POST /v1/release: this trainer writes into no slot any more. Its process may live on."""

    lease: str


# --- restore ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class CandidatesRequest:
    """POST /v1/candidates: what could this rank restore? Answers when the scan is done."""

    lease: str
    timeout_s: float = 60.0


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenRequest:
    """POST /v1/restore: bring this step's image into a slot and verify it.

    `bad`: path of a slot that an earlier answer named and that did not verify; '' for none.
    """

    lease: str
    id: StepId
    timeout_s: float = 600.0
    bad: str = ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Opened:
    """The verified image: a slot's path, pinned until `RestoredRequest`. `tier` it came from."""

    slot: str
    path: str
    tier: Tier
    bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, eq=False)
class RestoredRequest:
    """POST /v1/restored: all ranks agreed on `epoch`; its parent is what was restored, if any."""

    lease: str
    epoch: Epoch
    tier: Tier | None = None
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class SourcesRequest:
    """POST /v1/sources: where are the images of this step, of all ranks that were there then?

    What it names stays where it is until `RestoredRequest` or the end of the lease. `bad`: paths of
    earlier answers that did not verify. `every`: also those whose twin is named.
    """

    lease: str
    id: StepId
    bad: tuple[str, ...] = ()
    every: bool = False


@dataclass(frozen=True, kw_only=True)
class Source:
    """The sealed image of the saved rank `rank` (not one of the ranks that run now).

    `path`: the slot's file if it lies in this machine's shared memory, to be mapped read-only;
    '': ask for its chunks. `extras_bytes` as in its control page. `twins`: ranks whose images hold
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
    """One source for each rank of `world` that has one; the missing ones have twins here.

    `left_out`: ranks that have one, of which it is not named, as a twin is.
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
    """In the order of the request: base64 of zlib of each header's bytes."""

    headers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowRequest:
    """POST /v1/window: shared memory through which verified chunks come; one a lease, until
    `RestoredRequest` or its end."""

    lease: str
    frames: int = 6


@dataclass(frozen=True, kw_only=True)
class Window:
    """A file in shared memory of `frames` frames of `frame_bytes`; a frame holds one chunk."""

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
    """Chunks `first` to `end` (which is not one of them) of the saved rank `rank`."""

    rank: int
    first: int
    end: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunksRequest:
    """POST /v1/chunks: bring these chunks into the window, verified. Requests may overlap in time,
    as long as they use other frames.

    `announced`: all that this rank will ask for of this step from now on, in the order of (saved
    rank, chunk); what other ranks of the machine announced, too, is read once for all of them.
    Empty: it will ask for nothing; None: what was announced still holds.
    """

    lease: str
    id: StepId
    chunks: tuple[Chunk, ...]
    timeout_s: float = 600.0
    announced: tuple[ChunkRun, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Chunks:
    """All of them are in their frames. `tier`: the farthest one that was read."""

    seconds: float = 0.0
    tier: Tier = Tier.MEMORY


# --- progress --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class WaitRequest:
    """POST /v1/wait: until `id` itself is, or was, in `state`. `archived`: until the newest step
    that the archive's schedule wants is there. `flush`: persist this step now even when the
    schedule would not.
    """

    lease: str
    id: StepId
    state: str
    timeout_s: float = 60.0
    flush: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Waited:
    """`reached` False: the time ran out, `reason` says what is missing. `final`: it will be missing
    for ever."""

    reached: bool
    reason: str = ""
    final: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class FlushRequest:
    """POST /v1/flush: make the newest two common staged steps durable (SIGTERM, preStop)."""

    timeout_s: float = 25.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Flushed:
    """Steps that are durable on every local rank after the flush, newest last."""

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
    """POST /v1/owner: while the process `pid` (of the sidecar's machine) lives, the sidecar does
    not end by itself, however long no trainer comes."""

    pid: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Body of every response that is not 200. `code` is stable, `message` says what to do."""

    code: str
    message: str


# --- JSON without dependencies -----------------------------------------------------------------


def to_json(value: Any) -> bytes:
    """Encode a message. Enums are strings, tuples are lists."""
    return json.dumps(dataclasses.asdict(value), separators=(",", ":")).encode()


def from_json(kind: type[T], data: bytes | str) -> T:
    """Decode a message; unknown fields are ignored (the peer may be newer).

    Raises ProtocolError when the text is not JSON or does not have `kind`'s shape.
    """
    try:
        return typing.cast(T, _build(kind, json.loads(data)))
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise ProtocolError(f"not a {kind.__name__}: {e}", code="protocol") from e


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """Of a message's fields; to work them out takes longer than a small message."""
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
