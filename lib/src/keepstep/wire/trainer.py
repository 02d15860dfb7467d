"""The messages between trainer and sidecar: types for HTTP/1.1 + JSON over a unix socket.

The sidecar decodes them with msgspec (strictly). The library decodes them with `from_json` below,
because the training container may have only the standard library and torch. docs/protocol.md states
the duties of each side. Within one protocol version a field may be added with a default; no field
may be removed or change its meaning.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from keepstep.errors import ProtocolError
from keepstep.steps import Epoch, StepId, Tier

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:  # `typing` has it from Python 3.11 on, and only type checkers need it

    def dataclass_transform(**_: bool) -> Any:
        return lambda kind: kind


PROTOCOL = 1

SOCKET_ENV = "KEEPSTEP_SOCKET"
"""Environment variable of the training process: the path of the sidecar's unix socket."""

RESTORE_TIMEOUT_ENV = "KEEPSTEP_RESTORE_TIMEOUT"
"""Environment variable of the training process: how many seconds it may take to bring one rank's
image."""

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Message:
    """A value, as if each subclass were a `dataclass(frozen=True, kw_only=True)`.

    All messages share these methods. Methods that `dataclass` generates for each of them would take
    a quarter of the time of `import keepstep`.
    """

    if TYPE_CHECKING:  # else it would be a hint of every message
        __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls) -> None:
        dataclasses.dataclass(kw_only=True, init=False, repr=False, eq=False)(cls)

    def __init__(self, **values: Any) -> None:
        fields = self.__dataclass_fields__
        made = {name: values.get(name, field.default) for name, field in fields.items()}
        if unknown := [name for name in values if name not in fields]:
            raise TypeError(f"{type(self).__name__}() got an unexpected argument {unknown[0]!r}")
        if missing := [name for name, value in made.items() if value is dataclasses.MISSING]:
            raise TypeError(f"{type(self).__name__}() is missing the argument {missing[0]!r}")
        self.__dict__.update(made)

    def __setattr__(self, name: str, value: object) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.__dict__ == self.__dict__

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.values()))

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__qualname__}({values})"


# --- lease -----------------------------------------------------------------------------------


class LeaseRequest(Message):
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
    protocol: int = PROTOCOL
    holding: tuple[str, ...] = ()
    local_world: int = 0
    ancestors: tuple[int, ...] = ()
    age_s: float = 0.0


class LeaseGranted(Message):
    """First line of the lease stream (JSON lines; each later line is a `LeaseStreamEvent`).

    `held`: those slots of `LeaseRequest.holding` that the trainer may still fill. `archive`: steps
    also go to an archive. `huge_pages_dir`: a directory on huge pages in which slots may be; '':
    there is none. `stage_every`: see `SlotGranted`. `stage_trials`: some steps are left out to
    learn what a save costs (`core.staging_interval`).
    """

    lease: str
    run: str
    huge_pages_dir: str = ""
    stage_every: int = 1
    stage_trials: bool = False
    held: tuple[str, ...] = ()
    archive: bool = False


class LeaseStreamEvent(Message):
    """A later line of the lease stream. `warning`: for this rank's log; '': the line is a ping."""

    warning: str = ""


class UnderLease(Message):
    """A request of the trainer that holds this lease."""

    lease: str


class UnseenHugePagesRequest(UnderLease):
    """POST /v1/unseen: this trainer cannot use `LeaseGranted.huge_pages_dir`, for instance because
    its container does not mount it. Answered once every image in it is also available elsewhere."""


# --- slots -----------------------------------------------------------------------------------


class LayoutRequest(UnderLease):
    """POST /v1/layout: this rank's images have the layout of `header` (base64 of the header
    bytes). `filling`: an image of the former layout is still on its way. If not, a slot of that
    layout that this trainer was given is free. `base`: the header of the base to which they refer;
    '': none. `base_step`: the first step that referred to it; None: this trainer has still to fill
    it."""

    header: str
    filling: bool = True
    base: str = ""
    base_step: StepId | None = None


class LayoutAccepted(Message):
    """There are `slots` slots of `slot_bytes` bytes each. They are fewer than configured if memory
    is limited."""

    layout: str
    slots: int
    slot_bytes: int
    warning: str = ""


class SlotRequest(UnderLease):
    """POST /v1/slot: the next slot to fill. Waits up to `timeout_s`. At most one is unsealed."""

    layout: str
    timeout_s: float = 30.0


class SlotGranted(Message):
    """`slot` None: no slot became free in time. `path`: the slot's file. `generation`: a number for
    this use of the slot. `others`: the files of the layout's other slots, which may be granted
    later. `base`: the file of the base to which the image is to refer. Unless it is sealed, the
    trainer fills it first. `stage_every`: from now on, multiples of it are staged; 0: as before."""

    slot: str | None
    path: str = ""
    generation: int = 0
    others: tuple[str, ...] = ()
    base: str = ""
    stage_every: int = 0


class StagedRequest(UnderLease):
    """POST /v1/staged: the image in `slot` is complete and sealed. The reply has the next slot.

    Times in seconds. `blocked_s`: how long this image blocked the training thread. `cost`: what
    staging adds to a step, as a part of it (`StageCost.added_fraction`); None: not yet known.
    """

    slot: str
    generation: int
    epoch: Epoch
    step: int
    copy_s: float = 0.0
    blocked_s: float = 0.0
    cost: float | None = None


class DiscardSlotRequest(UnderLease):
    """POST /v1/discard: the image in `slot` is not valid. The slot goes back to the sidecar."""

    slot: str
    generation: int
    step: int
    reason: str


class SkippedRequest(UnderLease):
    """POST /v1/skipped: `count` steps could not be staged. `step`: the last of them. `unkeepable`:
    the state itself cannot be kept, now and at the next save."""

    step: int
    reason: str
    count: int = 1
    unkeepable: bool = False


class ScriptFailedRequest(UnderLease):
    """POST /v1/failed: the script itself failed when it had reached step `id`. The failure is
    recorded durably before the answer."""

    id: StepId
    reason: str = ""


class WarningRequest(UnderLease):
    """POST /v1/warning: `text` stands among the warnings of the status while this lease lasts."""

    text: str


class UncaughtRequest(Message):
    """POST /v1/uncaught: an error ends the process `pid`. Needs no lease. `repeats`: if this
    process kept no step, its next start ends in the same error."""

    reason: str
    pid: int
    repeats: bool = False


class VoteRefusedRequest(UnderLease):
    """POST /v1/refused: the ranks found steps, but their vote refused to go on or to begin
    again. `reason`: the text of its error."""

    reason: str


class ReleaseSlotsRequest(UnderLease):
    """POST /v1/release: this trainer no longer writes into any slot. Its process may live on."""


# --- restore ---------------------------------------------------------------------------------


class CandidatesRequest(UnderLease):
    """POST /v1/candidates: what this rank could restore. Answered when the scan of the volumes is
    done and the rank may vote (`core.readiness`)."""

    timeout_s: float = 60.0


class RestoreStepRequest(UnderLease):
    """POST /v1/restore: bring this step's image into a slot and verify it.

    `bad`: path of a slot that an earlier answer named and that failed its verification; '': none.
    """

    id: StepId
    timeout_s: float = 600.0
    bad: str = ""


class OpenedStep(Message):
    """The verified image is in the slot at `path`, which is pinned until `RestoredRequest`. `tier`:
    where the image came from. `base`: the file of the base to which it refers; '': none."""

    path: str
    tier: Tier
    base: str = ""


class RestoredRequest(UnderLease):
    """POST /v1/restored: all ranks agreed on `epoch`. Its parent is the restored step, if any.

    `asked`: the step that the script itself named (`restore(step=...)`); None: it named none.
    """

    epoch: Epoch
    tier: Tier | None = None
    seconds: float = 0.0
    asked: int | None = None


class SourcesRequest(UnderLease):
    """POST /v1/sources: where the images of all ranks that saved this step are.

    The named images stay where they are until `RestoredRequest` or the end of the lease. `bad`:
    paths of earlier answers that failed their verification. `every`: also name images whose twin is
    named.
    """

    id: StepId
    bad: tuple[str, ...] = ()
    every: bool = False


class ImageSource(Message):
    """The sealed image of `rank`, one of the ranks that saved the step (not of those that run now).
    The base to which the image of rank r of n refers has the number n + r, here and in the
    requests for headers and chunks.

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


class Sources(Message):
    """One source for each of the `world` ranks whose image is available. Ranks without a source
    have a twin with one.

    `left_out`: ranks whose image is available but not named, because a twin's is.
    """

    id: StepId
    world: int
    sources: tuple[ImageSource, ...] = ()
    left_out: tuple[int, ...] = ()


class HeadersRequest(UnderLease):
    """POST /v1/headers: the headers of these saved ranks' images."""

    id: StepId
    ranks: tuple[int, ...]


class Headers(Message):
    """The headers in the order of the request, each as base64 of its zlib-compressed bytes."""

    headers: tuple[str, ...] = ()


class ChunkBufferRequest(UnderLease):
    """POST /v1/window: shared memory through which verified chunks come. A lease has at most one
    window, until `RestoredRequest` or the end of the lease."""

    frames: int = 6


class SharedChunkBuffer(Message):
    """A file in shared memory with `frames` frames of `frame_bytes` bytes. A frame holds one
    chunk."""

    path: str
    frames: int
    frame_bytes: int


class ChunkReadRequest(Message):
    """Put chunk number `chunk` (of `CHUNK_BYTES`) of the saved rank `rank` into frame `frame`."""

    rank: int
    chunk: int
    frame: int


class ChunkRun(Message):
    """Chunks `first` to `end` (exclusive) of the saved rank `rank`."""

    rank: int
    first: int
    end: int


class ChunksRequest(UnderLease):
    """POST /v1/chunks: bring these chunks into the window, verified. Requests may overlap in time
    if they use different frames.

    `announced`: all chunks of this step that this rank will ask for from now on, in the order of
    (saved rank, chunk). Chunks that several ranks of the machine announced are read once for all of
    them. Empty: the rank will ask for no chunks. None: the earlier announcement still holds.
    """

    id: StepId
    chunks: tuple[ChunkReadRequest, ...]
    timeout_s: float = 600.0
    announced: tuple[ChunkRun, ...] | None = None


class ChunksReady(Message):
    """All requested chunks are in their frames. `tier`: the farthest tier that was read."""

    tier: Tier = Tier.MEMORY


# --- progress --------------------------------------------------------------------------------


class WaitRequest(UnderLease):
    """POST /v1/wait: wait until step `id` itself is, or was, in `state`.

    With state `archived`: wait until the newest step that the archive's schedule wants is in the
    archive. `flush`: persist this step now, even if the schedule would not.
    """

    id: StepId
    state: str
    timeout_s: float = 60.0
    flush: bool = False


class Waited(Message):
    """`reached` False: the state was not reached, and `reason` says what is missing. `final`: the
    state will never be reached."""

    reached: bool
    reason: str = ""
    final: bool = False


class FlushRequest(Message):
    """POST /v1/flush: make the newest staged steps, at most two, that all ranks have in common
    durable (SIGTERM, preStop)."""

    timeout_s: float = 25.0


class Flushed(Message):
    """`steps`: those that are durable on all ranks of this machine after the flush, newest last."""

    steps: tuple[StepId, ...] = ()
    reason: str = ""


class StopSidecarRequest(Message):
    """POST /v1/stop: end the sidecar. `drain`: finish writes first. `forget`: free the memory; with
    `drain`, not where a step lies in it that no volume has taken."""

    drain: bool = True
    forget: bool = True
    timeout_s: float = 60.0


class RegisterOwnerRequest(Message):
    """POST /v1/owner: while the process `pid` (on the sidecar's machine) lives, the sidecar does
    not end by itself, no matter how long no trainer connects."""

    pid: int


class PinRequest(Message):
    """POST /v1/pin: this step stays until it is unpinned (`pinned` false), on the volumes of all
    machines and in the archive."""

    id: StepId
    pinned: bool = True


class PinnedStepsReply(Message):
    """All pinned steps, oldest first."""

    steps: tuple[StepId, ...] = ()


class Problem(Message):
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
        return _build(next(argument for argument in arguments if argument is not type(None)), value)
    if origin is tuple:
        return tuple(_build(arguments[0], item) for item in value)
    if origin is dict:
        named = arguments[0] if issubclass(arguments[0], str) else str
        return {named(key): _build(arguments[1], value) for key, value in value.items()}
    if dataclasses.is_dataclass(kind):
        hints = _hints(typing.cast(typing.Hashable, kind))
        known = {name: _build(hints[name], value) for name, value in value.items() if name in hints}
        return typing.cast(Any, kind)(**known)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, kind):
        return value
    if issubclass(kind, str) and isinstance(value, str):
        return kind(value)
    raise TypeError(f"expected {kind.__name__}, got {type(value).__name__}")
