"""What a machine holds, for a remote tier that compares itself with it: the host's part."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from keepstep.steps import StepId
from keepstep_sidecar.tiers.remote_tier import LocalInventory, RemoteTier
from keepstep_sidecar.volume.run_tree import LocalShard


class Held:
    """`RunFacts.local` of one remote tier, which is woken whenever something changes."""

    def __init__(self) -> None:
        self.shards: dict[StepId, dict[int, LocalShard]] = {}
        self.commits: set[StepId] = set()

    def __call__(self) -> LocalInventory:
        shards = {step_id: dict(held) for step_id, held in self.shards.items()}
        return LocalInventory(shards=shards, commits=frozenset(self.commits))


def durable(remote_tier: RemoteTier, *shards: LocalShard) -> None:
    held = _held(remote_tier)
    for shard in shards:
        held.shards.setdefault(shard.step_id, {})[shard.rank] = shard
    remote_tier.wake()


def committed(remote_tier: RemoteTier, step_id: StepId, shards: Iterable[LocalShard] = ()) -> None:
    _held(remote_tier).commits.add(step_id)
    durable(remote_tier, *shards)


def gone(remote_tier: RemoteTier, ids: Collection[StepId]) -> None:
    """Dead, or deleted here."""
    held = _held(remote_tier)
    for step_id in ids:
        held.shards.pop(step_id, None)
        held.commits.discard(step_id)
    remote_tier.wake()


def _held(remote_tier: RemoteTier) -> Held:
    if not isinstance(remote_tier.facts.local, Held):
        remote_tier.set_run_facts(replace(remote_tier.facts, local=Held()))
    held = remote_tier.facts.local
    assert isinstance(held, Held)
    return held
