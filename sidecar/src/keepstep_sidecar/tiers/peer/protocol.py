"""The protocol between pods of a run: HTTPS, JSON about shards, plain bytes of shards.

    GET  /v1/shards                       Listing: all sealed shards here, own ones and copies
    GET  /v1/shards/<step>/<shard>        the file; `Range: bytes=a-b` for a part of it. <shard> may
                                          be the base beside a shard, here and below
    POST /v1/copies/<step>/<shard>        header, digest table and control page -> Begun; of a base
                                          before those of its shard
    PUT  /v1/copies/<step>/<shard>/<n>    chunk n, checked against the table
    POST /v1/copies/<step>/<shard>/seal   -> SealedCopy; durable there when this is answered
    PUT  /v1/wanted                       Wanted: what the sender still wants kept

Every refusal is a `keepstep.wire.trainer.Problem`. A field may be added with a default. Impossible
values are refused when a message is decoded, because a receiver remembers and allocates according
to these messages.
"""

from __future__ import annotations

import io
import socket
from dataclasses import dataclass, field
from typing import Final

from keepstep.core.shard import MOST_RANKS, Shard
from keepstep.image.strictjson import MAX_BYTES, quote_text
from keepstep.steps import Epoch, StepId

SHARDS: Final = "/v1/shards"
COPIES: Final = "/v1/copies"
NEEDED: Final = "/v1/wanted"
LARGEST_JSON_BYTES: Final = 16 << 20
LARGEST_NEEDED_BYTES: Final = 4 << 20
STREAMS: Final = 4
"""Connections of one transfer. Some wait for a drive or hash while the others move bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedShard(Shard):
    """A shard, as `Shard.to_send`. `copy`: kept for another pod."""

    copy: bool = False

    @classmethod
    def from_shard(cls, shard: Shard, *, copy: bool) -> ListedShard:
        return cls(**shard.to_send().base_fields, copy=copy)

    def __post_init__(self) -> None:
        Shard.__post_init__(self)
        if not self.is_well_formed:
            raise ValueError(
                f"rank {quote_text(self.rank)} of {quote_text(self.world)}, or its twins"
            )
        if self.root is None:
            raise ValueError("a sealed shard without a root")
        if not 0 < self.size_bytes <= MAX_BYTES:
            raise ValueError(f"a shard of {quote_text(self.size_bytes)} bytes")
        if (base := self.base) is not None:
            alike = (base.rank, base.world) == (self.rank, self.world) and base.base is None
            if not alike or base.root is None or not 0 < base.size_bytes <= MAX_BYTES:
                raise ValueError("a base that no shard has")


@dataclass(frozen=True, kw_only=True)
class PodShardListing:
    """All that a pod holds of the run. `ready`: its volumes could be read."""

    run: str
    epochs: tuple[Epoch, ...] = ()
    shards: tuple[ListedShard, ...] = ()
    ready: bool = True
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class MissingChunks:
    """What a copy lacks. `missing`: chunk numbers. `sealed`: nothing is missing, the copy is
    durable there."""

    missing: tuple[int, ...] = ()
    sealed: bool = False


@dataclass(frozen=True, kw_only=True)
class SealedCopy:
    """The copy is durable. `root`: that of the digest table that lies there now."""

    root: str


@dataclass(frozen=True, kw_only=True)
class CopiesToKeep:
    """The steps to be kept, by rank. The message is whole: it replaces the one before.

    `committed`: the newest step that the sender knows to be committed.
    """

    committed: StepId | None = None
    ranks: dict[int, tuple[StepId, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.ranks) > MOST_RANKS or any(not 0 <= rank < MOST_RANKS for rank in self.ranks):
            raise ValueError(f"more ranks than {MOST_RANKS}, or an invalid rank")


# --- bytes of a body ------------------------------------------------------------------------------
#
# They move from a TLS connection straight into the buffer where they are needed, past the layers of
# `http.client`, `http.server` and `io`. A record is 16 KiB, and for each record these layers cost
# as much as its decryption.


def receive_into(buffered: io.BufferedReader, secure: socket.socket, into: memoryview) -> int:
    """Fill `into`, all of which must belong to the body: first with what was read ahead with the
    head, then from the connection itself. Returns the number of bytes; fewer only if the connection
    ended."""
    done = min(len(buffered.peek()), len(into))
    into[:done] = buffered.read(done)
    while done < len(into):
        with into[done:] as rest:
            count = secure.recv_into(rest, len(rest))
        if not count:
            break
        done += count
    return done
