"""Decides what one machine of a run does: facts in, actions out.

A step on this machine goes through the states of `STEP`:

- `absent`: no image of it is here. `staged`: a rank has one in a slot.
- `writing`: a rank's slot is pinned for a `Write`. `durable`: a shard of it lies on the volumes.
- `committed`: every rank of the run has it durable. `published`: readers see it.
- `retiring`: it is being deleted, until a listing shows that it is gone.

The host feeds events and carries out actions: the sidecar's `NodeHost`, or a model in tests. `Node`
decides by slots (`slot_table`), what is due (`schedule`), committed (`ledger`) and deletable
(`retention`), without I/O and clock. An action that was not carried out is returned again.

What may never happen, and the test that would fail:

- A slot is assigned while its image is written: `_begin_write` of the model check.
- A step is shown that some rank lacks, or deleted although it is read, or although some rank might
  complete it: `_feed` of the model check.
- The newest commit is deleted: `the_newest_commit_is_never_retired`.
- A pinned step is deleted:
  `test_pinned_steps_are_kept_although_the_leader_orders_their_retirement`.
- A step moves otherwise than `STEP` says: `watched_node`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from keepstep.core.commit_rule import RankReport, StepLiveness, combine_rank_reports
from keepstep.core.ledger import (
    Alarm,
    EpochStarted,
    Ledger,
    LedgerConfig,
    Reported,
    StepCommittedOnTier,
)
from keepstep.core.retention import (
    Retention,
    droppable_steps,
    filter_allowed_deletions,
    hopeless_steps,
    steps_to_evict,
)
from keepstep.core.schedule import (
    PersistCostMeasurements,
    PersistCounts,
    PersistInterval,
    PersistPlanner,
    StepGrid,
    Write,
)
from keepstep.core.slot_table import RankMemory, SlotTable, newest_common_step, steps_to_protect
from keepstep.steps import IN_POD, Epoch, StepId, Tier, parse_transition_table

STEP = parse_transition_table("""
absent                  | Sealed                                | staged    | Node._plan
absent, staged, durable | RanksServed, ImagesSettled, Sealed, EpochStarted | writing   | Node._begin
absent, staged, durable | Overwritten, WriteEnded, TrainerDied, Flush | writing   | Node._begin
writing                 | WriteEnded                            | durable   | Node._wrote
any                     | Listed, Reported, LastReply, EpochStarted | committed | Node.commits
any                     | Listed                                | published | Node._report
durable, committed      | Listed, Reported, LastReply, EpochStarted | retiring  | Node._conclude
published               | Listed, Reported, LastReply, EpochStarted | retiring  | Node._conclude
absent, staged          | Listed                                | retiring  | Node._conclude
durable, committed      | VolumeFull                            | retiring  | Node._least_valuable
published               | VolumeFull                            | retiring  | Node._least_valuable
any                     | Listed                                | absent, staged | Node._report
any                     | Listed                                | durable   | Node._report
committed               | Reported, LastReply, EpochStarted     | durable   | Node.commits
writing                 | WriteEnded                            | committed, published | Node._wrote
writing                 | WriteEnded                            | absent, staged | Node._wrote
staged                  | Overwritten, EpochStarted             | absent    | SlotTable.assign
any                     | StepReadEvent                         | any       | Node.must_stay
any                     | Scanned                               | any       | Node._never_whole
""")

SILENT_AFTER_S = 60.0
"""After so long without an answer the leader counts as silent: six usual report intervals."""

_MOST_ALARMS = 100

FEW_SLOTS = 2
"""With at most this many slots per rank, every due staged step waits until it is persisted."""


class RankSlotTables(Protocol):
    """The slots of one rank.

    `settled`: the rank's trainer has said which slots it holds, or the rank has no trainer. Until
    then no other part reads an image found at start, because the trainer may overwrite it.
    """

    @property
    def settled(self) -> bool: ...

    def slot_tables(self) -> Sequence[SlotTable]: ...


# --- events --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RanksServed:
    """The ranks of this machine. Each has at least `slots` slots. Not before the first `Listed`."""

    ranks: frozenset[int]
    slots: int


@dataclass(frozen=True)
class ImagesSettled:
    """It is now known which images of this rank stay, so they may be written."""

    rank: int


@dataclass(frozen=True)
class Sealed:
    """The image of this step is complete in a slot of the rank."""

    rank: int
    id: StepId


@dataclass(frozen=True)
class Overwritten:
    """The slot that held this step was assigned again."""

    rank: int
    id: StepId


@dataclass(frozen=True)
class WriteEnded:
    """A `Write` ended. Not `ok`: it failed and is not tried again. Otherwise `size_bytes` were
    written in `seconds` to `drive`."""

    rank: int
    id: StepId
    ok: bool = True
    drive: int = 0
    seconds: float = 0.0
    size_bytes: int = 0


@dataclass(frozen=True)
class TrainerDied:
    """The rank's trainer has ended. The images that it sealed stay."""

    rank: int


@dataclass(frozen=True)
class Flush:
    """Persist these steps, or the `newest` ones that all ranks hold, whatever the grid says; those
    also if they could not be written before."""

    ids: Collection[StepId] | None = None
    newest: int = 2


@dataclass(frozen=True)
class StepReadEvent:
    """A read of this step from the volumes begins, or ends. The step is not retired meanwhile."""

    id: StepId
    begins: bool


@dataclass(frozen=True, kw_only=True)
class Scanned:
    """The volumes were scanned. `in_doubt`: they may hold more than will be listed. `drive_bytes`:
    the size of their drives, None if unknown."""

    in_doubt: bool
    drive_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Listed:
    """Everything that this machine holds, or sees on remote tiers, of every rank that it knows.

    `published`: steps that this machine has ever shown to readers. `shown`: steps that this process
    has shown.
    """

    ranks: Mapping[int, RankReport]
    published: Collection[StepId] = ()
    shown: Collection[StepId] = ()


@dataclass(frozen=True, kw_only=True)
class LastReply:
    """What the leader says of the whole run; see `wire.member_reports.ReportReply`.

    `commit`: the newest committed step. `commits`: the committed steps that this machine holds.
    """

    commit: StepId | None = None
    commits: frozenset[StepId] = frozenset()
    memory: StepId | None = None
    plan: StepId | None = None
    pinned: frozenset[StepId] = frozenset()
    retire: frozenset[StepId] = frozenset()


@dataclass(frozen=True)
class VolumeFull:
    """A volume has no room for a shard. `missing_bytes` are missing; `sizes`: bytes that each step
    takes there now."""

    missing_bytes: int
    sizes: Mapping[StepId, int]


Event = (
    RanksServed | ImagesSettled | Sealed | Overwritten | WriteEnded | TrainerDied | Flush
    | Scanned | StepReadEvent | Listed | Reported | EpochStarted | LastReply | VolumeFull
)  # fmt: skip


# --- actions -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Publish:
    """Show this committed step to readers. Repeated until `Listed.shown` contains the step."""

    id: StepId


@dataclass(frozen=True)
class Retire:
    """Delete these ranks' shards of this step here. Repeated until a listing shows that they are
    gone."""

    id: StepId
    ranks: tuple[int, ...]


Action = Write | Publish | Retire | StepCommittedOnTier | Alarm | PersistInterval
"""A `PersistInterval`: from now on, steps are persisted so far apart."""


# --- the node ------------------------------------------------------------------------------------


@dataclass
class LeaderView:
    """What the run's leader has said of the whole run, beyond the ranks of this machine.

    The leader names commits to publish and the step to fetch ahead of time, and allows deletion. A
    restore does not need it (the ranks' vote decides), nor does training. While it is silent, a
    machine deletes only the steps between the last known commit and its own newest steps and, when
    a volume is full, older steps.

    `alone`: the run has no other machine. `commit`: the newest commit heard of, in this or an
    earlier life of this sidecar.
    """

    alone: bool = False
    commit: StepId | None = None
    replied_at: float | None = None
    last_reply: LastReply = field(default_factory=LastReply)
    began: float = 0.0

    @property
    def pins_known(self) -> bool:
        """Whether it is known which steps are pinned: the leader has answered in this life of the
        sidecar."""
        return self.replied_at is not None

    def is_leader_silent(self, now: float) -> bool:
        """Whether the leader has not answered for more than `SILENT_AFTER_S`."""
        return now - (self.began if self.replied_at is None else self.replied_at) > SILENT_AFTER_S

    def remember(self, reply: LastReply) -> None:
        """Take in what an earlier sidecar wrote down, or what the leader says. Either may know
        less than this machine, so `commit` never becomes older."""
        self.last_reply = reply
        if reply.commit is not None:
            self.commit = max(reply.commit, self.commit or reply.commit)

    def update(self, reply: LastReply, now: float) -> None:
        """Take in an answer of the leader, received at `now`."""
        self.replied_at = now
        self.remember(reply)


class Node:
    """One machine of a run. `step` takes in a fact and returns what to do. The other methods only
    answer questions."""

    def __init__(
        self,
        slots: Mapping[int, RankSlotTables],
        *,
        grid: StepGrid,
        tiers: tuple[Tier, ...] = IN_POD,
        keep: Retention | None = None,
        alone: bool = False,
        began: float = 0.0,
        pacing: PersistCostMeasurements | None = None,
        epochs: Callable[[], Iterable[Epoch]] = tuple,
        in_use: Callable[[StepId], bool] = lambda step_id: False,
        may_write: Callable[[StepId], bool] = lambda step_id: True,
    ) -> None:
        """`slots`: the slots of this machine's ranks, a live view. `alone`: see `LeaderView`.
        `pacing`: None when a person chose which steps are persisted. `epochs`: returns those of
        this run, by which failures are counted. `in_use`: whether another part reads or needs the
        shards of this step now. `may_write`: whether an image in memory is this run's own."""
        self.keep = keep or Retention()
        self.ledger = Ledger(LedgerConfig(tiers=tiers))
        self.planner = PersistPlanner((), grid)
        self.pacing = pacing
        self.alarms: dict[str, None] = {}
        """The texts of the alarms so far, of this machine's ledger and of the leader's, in their
        order."""
        self.short = False
        """Whether the volumes have no room for all steps that the policy keeps."""
        self.leader_view = LeaderView(alone=alone, began=began)
        self.deferred: tuple[StepId, ...] = ()
        """Steps that would have been retired if they were not being written or used."""
        self._slots = slots
        self._serves = RanksServed(frozenset(), 0)
        self._reads: Counter[StepId] = Counter()
        self._in_use = in_use
        self._epochs = epochs
        self._may_write = may_write
        self._in_doubt = False
        self._durable: dict[int, set[StepId]] = {}
        self._ended: set[int] = set()
        """Ranks whose trainer is gone, until the next one comes."""
        self._published: frozenset[StepId] = frozenset()
        self._shown: frozenset[StepId] = frozenset()
        self._writing: dict[tuple[int, StepId], tuple[SlotTable, int]] = {}
        """For each write in progress, the slot that is pinned for it."""
        self._grown = False

    def step(self, event: Event, now: float = 0.0) -> tuple[Action, ...]:
        """Take in one fact. Returns the actions that follow from it. After a report or an answer of
        the leader these include every action that was not carried out yet."""
        match event:
            case Listed() | Reported() | EpochStarted():
                actions = self._report(event)
                return (*self._forget_dead(event), *actions, *self._conclude(now))
            case LastReply():
                self.leader_view.update(event, now)
                return self._conclude(now)
            case Scanned():
                self._in_doubt = event.in_doubt
                if self.pacing is not None:
                    self.pacing.drive_bytes = event.drive_bytes
                return ()
            case StepReadEvent(step_id, begins):
                self._reads[step_id] += 1 if begins else -1
                self._reads += Counter()  # keeps only those that are still read
                return ()
            case VolumeFull():
                doomed = self._least_valuable(event)
                self.short = self.short or not self.surplus.issuperset(doomed)
                return tuple(map(self._retire, doomed))
            case WriteEnded():
                return (*self._begin(self._plan(event)), *self._pace(event))
            case _:
                if self.pacing is not None and isinstance(event, Sealed):
                    self.pacing.sealed(event.id, now)
                return self._begin(self._plan(event))

    # --- asking --------------------------------------------------------------------------

    @property
    def has_no_pending_writes(self) -> bool:
        """Whether no sealed image is being written or waits for it."""
        return not self._writing and self.planner.has_no_pending_writes

    @property
    def persist_counts(self) -> PersistCounts:
        """What became of the steps that were due."""
        return self.planner.counts

    def persist_every(self, step: int) -> int:
        """How many steps apart the persisted steps are at this step."""
        return self.planner.grid.interval(step)

    @property
    def last_reply(self) -> LastReply:
        """What the leader said last."""
        return self.leader_view.last_reply

    @property
    def shortage_text(self) -> str:
        """A warning for people; '' while everything that the policy keeps fits on the volumes."""
        if not self.short:
            return ""
        return (
            f"the volumes are full: not all committed steps that the policy keeps ({self.keep}) fit"
            " on them, the oldest go early. Raise the capacity or keep fewer steps"
        )

    @property
    def surplus(self) -> set[StepId]:
        """Steps that the policy does not keep, as far as this machine's ledger shows: the leader is
        about to name them."""
        policy = replace(self.keep, pinned=self.leader_view.last_reply.pinned)
        return {*self.ledger.expendable(Tier.LOCAL, policy)}

    @property
    def has_single_slot(self) -> bool:
        """Whether an image in memory is overwritten as soon as it is durable on every rank here."""
        return self._serves.slots == 1

    def missed(self, step: int) -> None:
        """A rank had no slot for this step. With a single slot it was still being written."""
        if self.has_single_slot:
            self.planner.missed(step)

    def is_dead(self, step_id: StepId) -> bool:
        """Whether a later epoch went on from before this step."""
        return self.ledger.is_dead(step_id)

    def is_step_being_written(self, step_id: StepId) -> bool:
        """Whether this step is being written to the volumes, or is the planner's target."""
        return step_id == self.planner.step_in_flight or any(
            writing == step_id for _, writing in self._writing
        )

    def must_stay(self, step_id: StepId) -> bool:
        """Whether this step is being written, read, or is one to go back to."""
        return (
            self.is_step_being_written(step_id) or step_id in self._reads or self._in_use(step_id)
        )

    def commits(self) -> list[StepId]:
        """Steps that are known to be committed, oldest first.

        A step is known to be committed if this machine's ledger says so. If there are other
        machines: also if the leader said so, or if an earlier sidecar showed it to readers.
        """
        view, steps = self.leader_view, set[StepId]()
        if not view.alone:
            steps |= view.last_reply.commits | self._published
        if not view.alone and view.commit is not None:
            steps.add(view.commit)
        beyond = {step_id for step_id in steps if self.ledger.lineage.is_restorable(step_id)}
        return sorted({*self.ledger.committed(Tier.LOCAL), *beyond})

    def last_commit(self) -> StepId | None:
        """The newest step that is known to be committed and is not dead."""
        return max(self.commits(), default=None)

    def _last_whole(self) -> StepId | None:
        """The last commit, or the step that all ranks restored since: it may be all that the run
        has, although nothing says that it was committed."""
        current = self.ledger.lineage.current_epoch
        parent = None if current is None else self.ledger.find_parent_step(current)
        return max(
            (step_id for step_id in (self.last_commit(), parent) if step_id is not None),
            default=None,
        )

    def find_newest_common_step(self) -> StepId | None:
        """The newest step that every rank here has in a slot."""
        return newest_common_step(self._memories())

    def list_steps_held_by_local_ranks(self) -> list[StepId]:
        """Steps that every rank here holds in memory or has written, oldest first."""
        return self.planner.list_common_steps()

    def _memories(self) -> list[RankMemory]:
        """Of the ranks here that have slots."""
        tables = {
            rank: self._slots[rank].slot_tables()
            for rank in self._serves.ranks & self._slots.keys()
        }
        return [
            RankMemory(
                frozenset(step_id for table in found for step_id in table.list_sealed_steps()),
                rank in self._ended,
            )
            for rank, found in tables.items()
            if found
        ]

    def newest_unwritten_step(self) -> StepId | None:
        """The newest step that every rank here has in a slot, where it should be durable and is
        not."""
        step_id = self.find_newest_common_step()
        if (
            step_id is None
            or not self._may_write(step_id)
            or self.planner.is_written_by_all(step_id)
        ):
            return None
        return step_id

    def _protect(self) -> None:
        if self.has_single_slot:
            kept = self.planner.pending_steps
        else:
            kept = steps_to_protect(self._memories())
        for slots in self._slots.values():
            for table in slots.slot_tables():
                table.protect_steps(kept)

    # --- writing -------------------------------------------------------------------------

    def _plan(
        self,
        event: RanksServed
        | ImagesSettled
        | Sealed
        | Overwritten
        | WriteEnded
        | TrainerDied
        | Flush,
    ) -> Iterable[Write]:
        match event:
            case RanksServed():
                return self._serve(event)
            case ImagesSettled(rank):
                self._ended.discard(rank)
                return self._settle(rank)
            case Sealed(rank, step_id):
                self._ended.discard(rank)
                return self.planner.sealed(rank, step_id) if self._may_write(step_id) else ()
            case Overwritten(rank, step_id):
                return self.planner.on_overwritten(rank, step_id)
            case WriteEnded(rank, step_id, ok):
                return self._wrote(rank, step_id, ok=ok)
            case TrainerDied(rank):
                self._ended.add(rank)
                return self.planner.record_trainer_death(rank)
            case Flush(ids, newest):
                # all that matters is to be made durable: there may be room for what failed by now,
                # and nothing comes after it
                for rank in self._serves.ranks & self._slots.keys() if ids is None else ():
                    if self._slots[rank].settled:
                        self.planner.retry_writes(rank, self._writable(rank))
                return self.planner.flush(ids, newest=newest)

    def _serve(self, serves: RanksServed) -> Iterator[Write]:
        """When the ranks changed, make a new planner and tell it what they hold."""
        served, before = self._serves, self.planner
        self._serves = serves
        waits, waited = serves.slots <= FEW_SLOTS, served.slots <= FEW_SLOTS
        if (serves.ranks, waits) == (served.ranks, waited):
            return
        self.planner = PersistPlanner(serves.ranks, before.grid, slots=serves.slots)
        self.planner.counts = before.counts
        self.planner.set_least_interval(before.least)
        for rank in sorted(serves.ranks & self._ended):
            yield from self.planner.record_trainer_death(rank)
        for rank in sorted(serves.ranks):
            for step_id in sorted(self._durable.get(rank, ())):
                yield from self.planner.on_write_end(rank, step_id)
            if rank in self._slots and self._slots[rank].settled:
                yield from self._settle(rank)

    def _settle(self, rank: int) -> Iterator[Write]:
        for step_id in sorted(self._writable(rank)):
            yield from self.planner.sealed(rank, step_id)

    def _writable(self, rank: int) -> set[StepId]:
        held = {
            step_id
            for table in self._slots[rank].slot_tables()
            for step_id in table.list_sealed_steps()
        }
        return {
            step_id
            for step_id in held
            if self._may_write(step_id) and not self.ledger.is_dead(step_id)
        }

    def _wrote(self, rank: int, step_id: StepId, *, ok: bool) -> Iterable[Write]:
        table, index = self._writing.pop((rank, step_id))
        table.unpin(index)
        if ok:
            self._durable.setdefault(rank, set()).add(step_id)
            self._grown = True
        return self.planner.on_write_end(rank, step_id, ok=ok)

    def _pace(self, wrote: WriteEnded) -> tuple[PersistInterval, ...]:
        """Learn from the write. If the step is durable now, choose the interval to the next one."""
        if (pacing := self.pacing) is None:
            return ()
        if wrote.size_bytes:
            pacing.wrote(wrote.id, wrote.drive, seconds=wrote.seconds, size_bytes=wrote.size_bytes)
        pacing.on_write_ended()
        if not self.planner.is_written_by_all(wrote.id):
            return ()
        before, interval = pacing.interval, pacing.record_durable_step(wrote.id, self._epochs())
        if interval is None or (before is not None and before.steps == interval.steps):
            return ()
        self.planner.set_least_interval(interval.steps)
        return (interval,)

    def _begin(self, writes: Iterable[Write]) -> tuple[Write, ...]:
        """Pin the slots of these writes before anything else can happen, so that none of them is
        assigned."""
        waiting, begun = list(writes), list[Write]()
        while waiting:
            write = waiting.pop(0)
            key = (write.rank, write.id)
            if key in self._writing:
                continue
            if (found := self._find(*key)) is not None:
                table, index = self._writing[key] = found
                table.pin(index)
            else:
                waiting += self.planner.on_write_end(*key, ok=False)
                continue
            begun.append(write)
            if self.pacing is not None:
                self.pacing.on_write_began()
        self._protect()
        return tuple(begun)

    def _find(self, rank: int, step_id: StepId) -> tuple[SlotTable, int] | None:
        for table in self._tables(rank):
            if (index := table.find_slot(step_id)) is not None:
                return table, index
        return None

    # --- committing and retiring -----------------------------------------------------------

    def _report(self, event: Listed | Reported | EpochStarted) -> tuple[Action, ...]:
        if isinstance(event, Listed):
            for rank, report in event.ranks.items():
                if (held := report.get(Tier.LOCAL)) is not None:
                    self._durable[rank] = {shard.step_id for shard in held.shards}
            self._published, self._shown = frozenset(event.published), frozenset(event.shown)
            event = Reported(ranks=combine_rank_reports(event.ranks))
        actions = self.ledger.apply(event)
        return tuple(
            action
            for action in actions
            if not isinstance(action, Alarm) or self.record_alarm(action)
        )

    def record_alarm(self, alarm: Alarm) -> bool:
        """Remember an alarm. Returns whether it is a new one: both ledgers may raise it."""
        if alarm.text in self.alarms:
            return False
        self.alarms[alarm.text] = None
        while len(self.alarms) > _MOST_ALARMS:
            del self.alarms[next(iter(self.alarms))]
        return True

    def _forget_dead(self, event: Event) -> tuple[Write, ...]:
        """When a new epoch starts, its dead steps are the first to be overwritten and are not
        written any more."""
        if not isinstance(event, EpochStarted):
            return ()
        for slots in self._slots.values():
            for table in slots.slot_tables():
                table.mark_dead_images(self.ledger.is_dead)
        writes = self.planner.forget_dead_steps(self.ledger.is_dead)
        return self._begin((*writes, *self._healed(event.epoch.parent)))

    def _healed(self, parent: StepId | None) -> Iterable[Write]:
        """Write the parent of a new epoch where it is missing on the volumes: if it is a commit, or
        if no commit is whole here. It may lie in memory only, or with others, and the next loss
        would take that. Even a parent that was written before may be missing, because newer steps
        may have taken its place."""
        held = [self._durable.get(rank, set()) for rank in self._serves.ranks]
        commits = self.commits()
        whole = any(all(step_id in steps for steps in held) for step_id in commits)
        if parent is None or (whole and parent not in commits):
            return ()
        writes: list[Write] = []
        for rank in sorted(self._serves.ranks):
            if parent not in self._durable.get(rank, ()):
                self.planner.on_shard_removed(rank, parent)
                if rank in self._slots and parent in self._writable(
                    rank
                ):  # also one that was fetched
                    writes += self.planner.sealed(rank, parent)
        return (*writes, *self.planner.flush((parent,)))

    def _conclude(self, now: float) -> tuple[Action, ...]:
        here = self._here()
        commits = [step_id for step_id in self.commits() if step_id in here]
        if len(commits) > self.keep.last and self.keep.kept_interval_text is None:
            self.short = False  # where more than the last steps stay, it soon comes back
        shown = [Publish(step_id) for step_id in commits if step_id not in self._shown]
        doomed = [step_id for step_id in self._doomed(here, now) if step_id in here]
        free = [step_id for step_id in doomed if not self.must_stay(step_id)]
        self.deferred = tuple(step_id for step_id in doomed if step_id not in free)
        return (*shown, *map(self._retire, free))

    def _here(self) -> set[StepId]:
        """Steps of which at least one shard lies on this machine's volumes."""
        return set().union(*self._durable.values())

    def _doomed(self, here: Collection[StepId], now: float) -> list[StepId]:
        """Steps that may be deleted, oldest first: the leader decides, because it sees the whole
        run; while it is silent, `droppable_steps` decides. What will never be whole is known to a
        machine that is alone."""
        view, pinned = self.leader_view, self.leader_view.last_reply.pinned
        grown, self._grown = self._grown, False
        if view.is_leader_silent(now):
            live = self._live(here) if grown else ()
            return droppable_steps(live, last_commit=self._last_whole(), pinned=pinned)
        dismissed_steps = filter_allowed_deletions(
            view.last_reply.retire, last_commit=view.commit, pinned=pinned
        )
        lost = {*self._never_whole(here)} - pinned if view.alone else set()
        return sorted({*dismissed_steps, *lost})

    def _never_whole(self, here: Collection[StepId]) -> list[StepId]:
        """Steps that certainly will never be whole, without the newest few."""
        commits = {*self.ledger.committed(Tier.LOCAL)}
        unfinished = [step_id for step_id in self._live(here) if step_id not in commits]
        if self._in_doubt or not hopeless_steps(unfinished):
            return []
        whole = self.ledger.list_reachable_steps()
        return hopeless_steps(
            step_id
            for step_id in unfinished
            if step_id not in whole and not self._may_be_whole(step_id)
        )

    def _may_be_whole(self, step_id: StepId) -> bool:
        """Whether every rank of this machine has this step anywhere, or may still get it. A slot
        that was assigned but not yet zeroed still has its image."""
        held = 0
        for tier in Tier:
            held |= self.ledger.compute_rank_mask_on_tier(step_id, tier)
        return all(
            held >> rank & 1
            or self.planner.can_have(rank, step_id)
            or any(slot.id == step_id for table in self._tables(rank) for slot in table.slots)
            or not self.ledger.have_all_tiers_reported(rank)
            for rank in self._serves.ranks
        )

    def _tables(self, rank: int) -> Sequence[SlotTable]:
        return self._slots[rank].slot_tables() if rank in self._slots else ()

    def _retire(self, step_id: StepId) -> Retire:
        ranks = tuple(sorted(rank for rank, held in self._durable.items() if step_id in held))
        return Retire(step_id, ranks)

    def _live(self, here: Iterable[StepId]) -> list[StepId]:
        """Those of these steps that are live: the newest epoch goes on from them."""
        return [
            step_id
            for step_id in here
            if self.ledger.lineage.step_liveness(step_id) is StepLiveness.LIVE
        ]

    def _least_valuable(self, full: VolumeFull) -> tuple[StepId, ...]:
        """The fewest steps that make room, the least wanted first; at least one if any may go.

        The ledger says which steps may go. If it names none and there are other machines, the last
        known commit decides (`droppable_steps`). The newest commit never goes. The file system may
        count bytes differently: a writer that still finds no room asks again.
        """
        pinned = self.leader_view.last_reply.pinned
        commits = self.ledger.committed(Tier.LOCAL)
        surplus = {*self.ledger.expendable(Tier.LOCAL, Retention(last=1, pinned=pinned))}
        surplus |= {*self._live(commits)[:-1]} - pinned  # including the proven step
        unfinished = surplus.difference(commits)
        if not surplus and not self.leader_view.alone:
            live = self._live(self._here())
            known = self.last_commit()
            surplus = {*droppable_steps(live, last_commit=known, pinned=pinned, full=True)}
        free = {step_id for step_id in surplus if not self.must_stay(step_id)}
        return steps_to_evict(
            full.sizes,
            replace(self.keep, pinned=frozenset(full.sizes.keys() - free)),
            limit_bytes=sum(full.sizes.values()) - max(1, full.missing_bytes),
            unfinished=unfinished,
            written_at=self.ledger.written_at(full.sizes),
        )
