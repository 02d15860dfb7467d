"""Decodes and checks the body of a report in small parts; the event loop answers other requests
between them. It also bounds what a pod may make us remember, compute and write.

Decoding 4 MiB takes half a second, and msgspec holds the interpreter all the while, so a thread
would not help. So any field that may be long is first left undecoded (`msgspec.Raw`) and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, TypeVar

import msgspec

from keepstep.core.commit_rule import ReportedTier
from keepstep.core.shard import Ranks, Shard
from keepstep.core.suspicion import KEPT, Failure
from keepstep.steps import Epoch, EpochId, StepId, Tier
from keepstep.wire.reports import (
    Report,
    ReportedRank,
    ReportedRestore,
    ReportedVolume,
)
from keepstep.wire.status import TierProgress
from keepstep_operator.api.run import cut
from keepstep_operator.reconcile.state.node_rank import epochs_needed, kept
from keepstep_operator.reconcile.state.run_ledger import LARGEST_WORLD, MOST_RANKS
from keepstep_operator.reconcile.token_auth import Refused
from keepstep_operator.reconcile.turns import Parts

MOST_OTHERS: Final = 8192
"""The most ranks of other pods of which one report has only archived images. A sidecar reports at
most this many copies of other pods' ranks."""
MOST_IMAGES: Final = 4096
"""The most images of one rank."""
MOST_STEPS: Final = 1024
"""The most steps of one rank on one tier. If there are more, the newest count, and the older ones
are left alone."""
_MOST_BITS: Final = 1 << 23
"""A step takes a bit for each rank up to its highest, so fewer steps count for ranks beyond
8,192."""
MOST_BITS_OF_ALL: Final = 1 << 26
"""The same for all ranks and tiers of a report together: 8 MiB. The bitmaps of all different sets
of twins must fit into as many."""
MOST_EPOCHS: Final = 1024
"""The most epochs that a step, a restore or another epoch's parent names. Further ones are dropped
and not refused, since a run may have begun any number of times."""
MOST_WARNINGS: Final = 32
MOST_RESTORES: Final = 16 * MOST_RANKS
MOST_DOUBTED: Final = KEPT * KEPT
"""The most steps that the reported failures of the script name."""
MOST_VOLUMES: Final = 64
LONGEST_ADDRESS: Final = 280
LONGEST_NAME: Final = 256
LARGEST_STEP: Final = 10**15
LARGEST_EPOCH: Final = 10**9
_HEX: Final = frozenset("0123456789abcdef")
_SMALL_BYTES: Final = 16 << 10
"""A rank of up to this size is decoded at once."""
_ALL_DOUBTED_BYTES: Final = 256 * MOST_DOUBTED
_AT_ONCE: Final = 64
"""How many items of a long list are decoded at once."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class _Outer(Report):
    """A report in which all fields that may be long are still undecoded."""

    epochs: tuple[msgspec.Raw, ...] = ()  # type: ignore[assignment]
    ranks: tuple[msgspec.Raw, ...] = ()  # type: ignore[assignment]
    restores: tuple[msgspec.Raw, ...] = ()  # type: ignore[assignment]
    volumes: tuple[msgspec.Raw, ...] = ()  # type: ignore[assignment]
    warnings: tuple[msgspec.Raw, ...] = ()  # type: ignore[assignment]
    tiers: dict[Tier, msgspec.Raw] = field(default_factory=dict)  # type: ignore[assignment]
    failures: tuple[msgspec.Raw, ...] = ()  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class _OuterTier(ReportedTier):
    """A tier in which all fields that may be long are still undecoded."""

    shards: tuple[msgspec.Raw, ...] = ()  # type: ignore[assignment]
    gone: tuple[msgspec.Raw, ...] | None = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class _OuterRank(ReportedRank):
    """A rank in which all fields that may be long are still undecoded."""

    tiers: dict[Tier, _OuterTier] = field(default_factory=dict)  # type: ignore[assignment]


class _OuterShard(msgspec.Struct, frozen=True):
    """The field of an image that is not decoded before its length is known."""

    alike: msgspec.Raw = msgspec.Raw(b"")


_outer: Final = msgspec.json.Decoder(_Outer).decode
_outer_rank: Final = msgspec.json.Decoder(_OuterRank).decode
_outer_shard: Final = msgspec.json.Decoder(_OuterShard).decode
_rank: Final = msgspec.json.Decoder(ReportedRank).decode
_shard: Final = msgspec.json.Decoder(Shard).decode
_step: Final = msgspec.json.Decoder(StepId).decode
_epoch: Final = msgspec.json.Decoder(Epoch).decode
_restore: Final = msgspec.json.Decoder(ReportedRestore).decode
_volume: Final = msgspec.json.Decoder(ReportedVolume).decode
_failure: Final = msgspec.json.Decoder(Failure).decode
_progress: Final = msgspec.json.Decoder(TierProgress).decode
_text: Final = msgspec.json.Decoder(str).decode


def read(body: bytes) -> Parts[Report]:
    """Decode the report. Raises Refused, msgspec.DecodeError, UnicodeDecodeError,
    RecursionError."""
    outer = _outer(body)
    if len(outer.ranks) > LARGEST_WORLD:
        raise Refused(400, "bad-report", "more ranks than one pod can have")
    if len(outer.restores) > MOST_RESTORES or len(outer.volumes) > MOST_VOLUMES:
        raise Refused(400, "bad-report", "more restores or volumes than one pod can have")
    if len(outer.peer_address) > LONGEST_ADDRESS:
        raise Refused(400, "bad-report", "a longer address than one pod can have")
    yield
    told: dict[str, Any] = {one.name: getattr(outer, one.name) for one in fields(Report)}
    told["epochs"] = yield from _each(outer.epochs, _epoch)
    told["restores"] = yield from _each(outer.restores, _restore)
    told["ranks"] = yield from _ranks(outer.ranks)
    told["failures"] = _failures(outer.failures)
    told["volumes"] = tuple(_short_volume(_volume(one)) for one in outer.volumes)
    told["tiers"] = {tier: _short_progress(_progress(one)) for tier, one in outer.tiers.items()}
    told["warnings"] = tuple(cut(_text(one)) for one in outer.warnings[:MOST_WARNINGS])
    for name in ("sidecar", "library"):
        told[name] = cut(told[name], longest=LONGEST_NAME)
    report = Report(**told | {"pinned": cut(outer.pinned), "refused": cut(outer.refused)})
    yield
    _check_epochs(report)
    if not all(0 <= one.rank < LARGEST_WORLD for one in report.restores):
        raise Refused(400, "bad-report", "a restore of a rank that cannot be")
    return replace(report, epochs=epochs_needed(report, most=MOST_EPOCHS))


def _each(raw: Sequence[msgspec.Raw], decode: Callable[[msgspec.Raw], T]) -> Parts[tuple[T, ...]]:
    found: list[T] = []
    for first in range(0, len(raw), _AT_ONCE):
        found += map(decode, raw[first : first + _AT_ONCE])
        yield
    return tuple(found)


def _failures(raw: Sequence[msgspec.Raw]) -> tuple[Failure, ...]:
    if len(raw) <= MOST_DOUBTED and sum(len(memoryview(one)) for one in raw) <= _ALL_DOUBTED_BYTES:
        failures = tuple(map(_failure, raw))
        doubted = [id for one in failures for id in (one.at, *one.after)]
        if len(doubted) <= MOST_DOUBTED and all(map(_is_step, doubted)):
            return failures
    raise Refused(400, "bad-report", "failures that cannot be")


def _ranks(raw: Sequence[msgspec.Raw]) -> Parts[tuple[ReportedRank, ...]]:
    found: list[ReportedRank] = []
    held = 0
    runs: set[Ranks] = set()
    for one in raw:
        told = _rank(one) if len(memoryview(one)) <= _SMALL_BYTES else (yield from _long_rank(one))
        held += bool(told.shards(Tier.PEER)) or not kept(told)
        if held > MOST_RANKS or len(found) >= held + MOST_OTHERS:
            raise Refused(400, "bad-report", "more ranks than one pod can have")
        _check_rank(told)
        runs.update(image.alike for image in told.shards())
        if sum(each.last + 1 for each in runs) > MOST_BITS_OF_ALL:
            raise Refused(400, "bad-report", "more twins than one pod can tell of")
        found.append(_newest(told))
        yield
    if (yield from _bits(found)) > MOST_BITS_OF_ALL:
        raise Refused(400, "bad-report", "more steps of more ranks than one pod can tell of")
    return tuple(found)


def _long_rank(raw: msgspec.Raw) -> Parts[ReportedRank]:
    outer = _outer_rank(raw)
    if sum(len(one.shards) + len(one.gone or ()) for one in outer.tiers.values()) > MOST_IMAGES:
        raise Refused(400, "bad-report", f"rank {outer.rank} tells of too many images")
    yield
    told: dict[str, Any] = {one.name: getattr(outer, one.name) for one in fields(ReportedRank)}
    told["tiers"] = {}
    for tier, one in outer.tiers.items():
        shards = yield from _each(one.shards, _checked_shard)
        gone = None if one.gone is None else (yield from _each(one.gone, _step))
        told["tiers"][tier] = ReportedTier(answer=one.answer, shards=shards, gone=gone)
    return ReportedRank(**told)


def _checked_shard(raw: msgspec.Raw) -> Shard:
    """Decode an image. Very long runs of twins are refused undecoded."""
    is_long = len(memoryview(raw)) > _SMALL_BYTES
    if is_long and len(memoryview(_outer_shard(raw).alike)) > _SMALL_BYTES:
        raise Refused(400, "bad-report", "more runs of twins than are read")
    return _shard(raw)


def _check_epochs(report: Report) -> None:
    epochs = [*report.epochs, *(one.epoch for one in report.restores)]
    parents = [one.parent for one in epochs if one.parent is not None]
    if not all(_is_epoch(one.id) and len(one.origin) <= LONGEST_NAME for one in epochs) or not all(
        map(_is_step, parents)
    ):
        raise Refused(400, "bad-report", "an epoch that cannot be")


def _bits(ranks: Sequence[ReportedRank]) -> Parts[int]:
    """How many bits the steps of a report take as bitmaps of ranks; an upper bound if that is below
    the limit."""
    named = [(one.rank, len(one.shards())) for one in ranks]
    most = max(named, default=(0, 0))[0] * sum(count for _, count in named)
    if most <= MOST_BITS_OF_ALL:
        return most
    highest: dict[tuple[Tier, StepId], int] = {}
    for one in ranks:
        for tier, told in one.tiers.items():
            for held in told.shards:
                at = tier, held.step_id
                highest[at] = max(one.rank, highest.get(at, 0))
        yield
    return sum(highest.values())


def _short_volume(one: ReportedVolume) -> ReportedVolume:
    if len(one.name) <= LONGEST_NAME and len(one.failed) <= LONGEST_NAME:
        return one
    return replace(one, name=cut(one.name, longest=LONGEST_NAME), failed=cut(one.failed))


def _short_progress(one: TierProgress) -> TierProgress:
    if len(one.where) <= LONGEST_NAME and len(one.trouble) <= LONGEST_NAME:
        return one
    return replace(one, where=cut(one.where, longest=LONGEST_NAME), trouble=cut(one.trouble))


def _newest(one: ReportedRank) -> ReportedRank:
    most = min(MOST_STEPS, _MOST_BITS // (one.rank + 1))
    if all(len(told.shards) <= most for told in one.tiers.values()):
        return one
    tiers = {
        tier: replace(
            told, shards=tuple(sorted(told.shards, key=lambda shard: shard.step_id)[-most:])
        )
        for tier, told in one.tiers.items()
    }
    return replace(one, tiers=tiers)


def _check_rank(one: ReportedRank) -> None:
    """Raises Refused."""
    held = one.shards()
    worlds = {one.world, *(image.world for image in held)}
    if not 0 <= one.rank < one.world or not all(0 < world <= LARGEST_WORLD for world in worlds):
        raise Refused(400, "bad-report", f"rank {one.rank} of {one.world} cannot be")
    if any(image.rank != one.rank or not image.is_possible for image in held):
        raise Refused(400, "bad-report", f"rank {one.rank} tells of another one or of twins")
    gone = [id for told in one.tiers.values() for id in told.gone or ()]
    if len(held) + len(gone) > MOST_IMAGES:
        raise Refused(400, "bad-report", f"rank {one.rank} tells of too many images")
    if not all(0 <= image.size_bytes < 1 << 62 for image in held):
        raise Refused(400, "bad-report", f"rank {one.rank} tells of a size that cannot be")
    staged = (one.staged,) if one.staged is not None else ()
    if not all(map(_is_step, (*staged, *gone, *(image.step_id for image in held)))):
        raise Refused(400, "bad-report", f"rank {one.rank} tells of a step that cannot be")


def _is_step(id: StepId) -> bool:
    return 0 <= id.step < LARGEST_STEP and _is_epoch(id.epoch)


def _is_epoch(id: EpochId) -> bool:
    """Whether `EpochId.parse` can read it back from a status or a directory's name."""
    return 0 <= id.number < LARGEST_EPOCH and len(id.nonce) == 8 and set(id.nonce) <= _HEX
