"""The durable shards of this machine, by step and rank, and which steps readers see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from keepstep.image import ControlPage, Layout
from keepstep.ledger import Held
from keepstep.steps import StepId
from keepstep_sidecar.scan import Found
from keepstep_sidecar.volume import Written

_PAST_STEPS = 10_000

Known = Mapping[tuple[StepId, int], Found]


class Stock:
    """What the last scan found, and what was written, shown and deleted since."""

    def __init__(self) -> None:
        self.shards: dict[StepId, dict[int, Found]] = {}
        self.published: dict[StepId, str] = {}
        self._past: dict[StepId, tuple[frozenset[int], bool]] = {}

    # --- changing ----------------------------------------------------------------------------

    def known(self) -> Known:
        """What is here as a scan begins."""
        return {(one.id, one.rank): one for one in self.all()}

    def replace(self, found: Iterable[Found], *, before: Known) -> None:
        """A scan that began with `before` has found these, and nothing else. What was written,
        shown or deleted meanwhile is known better than the scan can."""
        now, scanned = self.known(), {(one.id, one.rank): one for one in found}
        newer = {key: one for key, one in now.items() if before.get(key) is not one}
        gone = before.keys() - now.keys()
        self.shards.clear()
        for key, one in {**scanned, **newer}.items():
            if key not in gone or key in newer:
                self.add(one)
        for id in self.published.keys() - self.shards.keys():
            del self.published[id]

    def add(self, one: Found) -> None:
        self.shards.setdefault(one.id, {})[one.rank] = one

    def show(self, id: StepId, path: Path) -> None:
        """Readers see the step in this directory; its shards moved there."""
        self.published[id] = str(path)
        self.shards[id] = {
            rank: _as_published(found) for rank, found in self.shards.get(id, {}).items()
        }

    def drop(self, id: StepId) -> None:
        """The step is about to be deleted. What it was is remembered for those who ask late."""
        self._past[id] = frozenset(self.shards.pop(id, ())), id in self.published
        self.published.pop(id, None)
        while len(self._past) > _PAST_STEPS:
            del self._past[next(iter(self._past))]

    # --- asking ------------------------------------------------------------------------------

    def all(self) -> list[Found]:
        return [one for held in self.shards.values() for one in held.values()]

    def holds(self, rank: int, id: StepId) -> Found | None:
        """This rank's durable shard of the step."""
        return self.shards.get(id, {}).get(rank)

    def of_rank(self, rank: int) -> tuple[Held, ...]:
        """What the ledger hears of a rank, oldest first."""
        return tuple(_held(held[rank]) for _, held in sorted(self.shards.items()) if rank in held)

    def world(self, rank: int) -> int:
        """The world size that the rank's newest shard names, 0 for none."""
        newest = max((id for id, held in self.shards.items() if rank in held), default=None)
        return self.shards[newest][rank].world if newest is not None else 0

    def was_durable(self, rank: int, id: StepId) -> bool:
        """Whether this step is durable for the rank, or was until it was deleted."""
        return rank in self.shards.get(id, ()) or rank in self._past.get(id, ((), False))[0]

    def was_published(self, id: StepId) -> bool:
        """Whether readers see this step, or saw it until it was deleted."""
        return id in self.published or self._past.get(id, ((), False))[1]

    def ever_published(self) -> set[StepId]:
        """Steps that were committed, whether or not all of their shards are still there."""
        return {id for id, held in self.shards.items() if any(f.published for f in held.values())}


def as_found(written: Written, layout: Layout, control: ControlPage) -> Found:
    """A shard that was just made durable, as a scan would find it."""
    return Found(
        path=written.path,
        id=written.id,
        rank=written.rank,
        world=control.world,
        run=control.run,
        bytes=written.bytes,
        layout=layout,
        root=written.root,
        params_digest=written.sections.get("params"),
        published=False,
        written_at=written.written_at,
    )


def _held(found: Found) -> Held:
    return Held(
        id=found.id,
        world=found.world,
        root=found.root,
        params_digest=found.params_digest,
        written_at=found.written_at,
        twins=found.layout.twins,
        bytes=found.bytes,
    )


def _as_published(found: Found) -> Found:
    """The same shard where `publish` moved it: out of `pending/`."""
    directory = found.path.parent
    if directory.parent.name != "pending":
        return replace(found, published=True)
    return replace(
        found, path=directory.parent.parent / directory.name / found.path.name, published=True
    )
