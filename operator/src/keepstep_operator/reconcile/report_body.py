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
from keepstep.core.suspicion import Failure
from keepstep.errors import UsageError
from keepstep.leader.bounds import (
    LONGEST_ADDRESS,
    LONGEST_NAME,
    MOST_BITS_OF_ALL,
    MOST_DOUBTED,
    MOST_EPOCHS,
    MOST_IMAGES,
    MOST_OTHERS,
    MOST_RESTORES,
    MOST_VOLUMES,
    MOST_WARNINGS,
    check_epochs,
    check_rank,
    is_step,
    newest,
)
from keepstep.leader.node_rank import epochs_needed, kept
from keepstep.leader.run_ledger import LARGEST_WORLD, MOST_RANKS
from keepstep.steps import Epoch, StepId, Tier
from keepstep.wire.reports import (
    Report,
    ReportedRank,
    ReportedRestore,
    ReportedVolume,
)
from keepstep.wire.status import TierProgress
from keepstep_operator.api.run import cut
from keepstep_operator.reconcile.token_auth import Refused
from keepstep_operator.reconcile.turns import Parts

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
    try:
        return (yield from _read(body))
    except UsageError as error:
        raise Refused(400, "bad-report", str(error)) from error


def _read(body: bytes) -> Parts[Report]:
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
    check_epochs(report)
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
        if len(doubted) <= MOST_DOUBTED and all(map(is_step, doubted)):
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
        check_rank(told)
        runs.update(image.alike for image in told.shards())
        if sum(each.last + 1 for each in runs) > MOST_BITS_OF_ALL:
            raise Refused(400, "bad-report", "more twins than one pod can tell of")
        found.append(newest(told))
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
