"""The values that all other modules share: epochs, steps, tiers, states, tables of these.

An *epoch* is one life of a run between restores. All ranks agree on it in the collective of
`Checkpointer.restore`, and every image carries it, so no commit can mix two lives. Steps are
ordered by (epoch number, nonce, step).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

_HEX = "0123456789abcdef"
# A number that needs no padding has no leading zeros. Else one step could have two directories.
_NUMBER = r"([0-9]{4}|[1-9][0-9]{4,8})"
_EPOCH = re.compile(_NUMBER + r"\.([0-9a-f]{8})")
_STEP = re.compile(_EPOCH.pattern + r"-([0-9]{9}|[1-9][0-9]{9,17})")


@dataclass(frozen=True, order=True, slots=True)
class EpochId:
    """Names one life of a run: a number that only grows, and 8 random hex digits.

    Raises ValueError for values that `str()` cannot express, because they come in messages and
    become a path.
    """

    number: int
    nonce: str

    def __post_init__(self) -> None:
        if not 0 <= self.number < 10**9 or len(self.nonce) != 8 or self.nonce.strip(_HEX):
            raise ValueError("an epoch has a number of at most 9 digits and a nonce of 8 hex ones")

    def __str__(self) -> str:
        return f"{self.number:04d}.{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> EpochId:
        """Inverse of `str()`. Raises ValueError."""
        if not (match := _EPOCH.fullmatch(text)):
            raise ValueError(f"not an epoch: {text!r} (expected like 0003.1f9c2d7a)")
        return cls(int(match[1]), match[2])


@dataclass(frozen=True, order=True, slots=True)
class StepId:
    """One step of one epoch. `str()` is the name of the step's directory on every tier.

    Raises ValueError for a step number that this name cannot express.
    """

    epoch: EpochId
    step: int

    def __post_init__(self) -> None:
        if not 0 <= self.step < 10**18:
            raise ValueError("a step has a number of at most 18 digits, from 0 on")

    # One call instead of two, because these are most of the work of a ledger of many ranks.

    def __hash__(self) -> int:
        return hash((self.step, self.epoch.nonce))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepId):
            return NotImplemented
        mine, its = self.epoch, other.epoch
        return self.step == other.step and mine.nonce == its.nonce and mine.number == its.number

    def __str__(self) -> str:
        return f"{self.epoch}-{self.step:09d}"

    @classmethod
    def parse(cls, text: str) -> StepId:
        """Inverse of `str()`. Raises ValueError."""
        if not (match := _STEP.fullmatch(text)):
            raise ValueError(f"not a step: {text!r} (expected like 0003.1f9c2d7a-000001200)")
        return cls(EpochId(int(match[1]), match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch and the step it went on from. Steps of older epochs beyond that step are dead.

    `origin`: if this epoch began a fork, the other run, to which the parent step belongs.
    """

    id: EpochId
    parent: StepId | None = None
    origin: str = ""


def merge_epochs(epochs: Iterable[Epoch]) -> tuple[Epoch, ...]:
    """Each of these epochs once, oldest first. Of several with the same id, the last one counts."""
    known = {epoch.id: epoch for epoch in epochs}
    return tuple(known[epoch_id] for epoch_id in sorted(known))


def steps_named(word: str, ids: Iterable[StepId]) -> list[StepId]:
    """Those of `ids` that a person means by `word`: a step's full name, or its number."""
    return [
        step_id
        for step_id in ids
        if word == str(step_id) or (word.isdecimal() and int(word) == step_id.step)
    ]


class StrEnum(str, enum.Enum):
    """A state or a kind. `str()` gives the word that messages and files use."""

    def __str__(self) -> str:
        return str(self.value)


class Tier(StrEnum):
    """Where an image is, nearest first. A restore prefers the nearest tier that holds a step.

    `in_pod`: every pod has this tier, and a trainer writes there itself or its sidecar does. The
    others are configured (`tiers.RemoteTier` of the sidecar). `shared`: there is one for all pods
    of the run, and it is farther than what any pod has.
    """

    in_pod: bool
    shared: bool

    def __new__(cls, name: str, in_pod: bool = False, shared: bool = False) -> Tier:
        tier = str.__new__(cls, name)
        tier._value_, tier.in_pod, tier.shared = name, in_pod, shared
        return tier

    #         name, in_pod, shared
    MEMORY = "memory", True
    LOCAL = "local", True
    PEER = "peer"
    ARCHIVE = "archive", False, True


NEAREST_FIRST = tuple(Tier)
"""The order in which a restore prefers the tiers, which is also from the weakest to the
strongest."""

IN_POD = tuple(tier for tier in Tier if tier.in_pod)


class State(StrEnum):
    """How safe a step is. `COMMITTED`: durable on every rank, in one epoch. `ARCHIVED`: the archive
    holds all its shards and its `step.json`."""

    STAGED = "staged"
    DURABLE = "durable"
    COMMITTED = "committed"
    ARCHIVED = "archived"


class Transition(NamedTuple):
    """A row of a table: in any of `states`, `event` leads to one of `after`; `where` does it."""

    states: str
    event: str
    after: str
    where: str


def parse_transition_table(table: str) -> tuple[Transition, ...]:
    """The rows `states | event | after | where` of a table."""
    rows = table.strip().splitlines()
    return tuple(Transition(*map(str.strip, row.split("|"))) for row in rows)


class TierAnswer(StrEnum):
    """What a tier says when asked what it holds. Only `NONE` allows a start at step 0."""

    NONE = "none"
    UNKNOWN = "unknown"
    STEPS = "steps"


def sanitize_run_name(text: str) -> str:
    """The text as the name of a run; '' if nothing of it can be one."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:63]


def shard_name(rank: int, world: int) -> str:
    """File name of a rank's shard inside a step's directory."""
    return f"rank-{rank:05d}-of-{world:05d}.safetensors"


def make_base_file_name(rank: int, world: int) -> str:
    """File name of the base of a rank's shard, beside it."""
    return f"base-{rank:05d}-of-{world:05d}.safetensors"
