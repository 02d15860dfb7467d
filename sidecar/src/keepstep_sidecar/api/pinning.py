"""Steps that a person has pinned: they stay on the volumes and in the archive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from keepstep.steps import StepId
from keepstep.wire.trainer import PinnedStepsReply, PinRequest
from keepstep_sidecar.commit.node_host import NodeHost
from keepstep_sidecar.concurrency import ChangeNotifier
from keepstep_sidecar.error_responses import refusal_error

_SHARED_S = 8.0
"""How long the leader may take to say that it has the pins."""


@dataclass(eq=False)
class PinHandlers:
    """`share`: hands the pins to the run's leader. `operator`: an operator says what is pinned."""

    node_host: NodeHost
    changes: ChangeNotifier
    share: Callable[[frozenset[StepId]], None]
    operator: bool

    async def pin(self, request: PinRequest) -> PinnedStepsReply:
        """Pin or unpin a step. Raises SidecarError `pins`."""
        node, step_id = self.node_host.node, request.id
        if self.operator:
            raise refusal_error(
                "pins", "the operator says what is pinned: spec.pins of the CheckpointRun"
            )
        known = {*self.node_host.local_shards.shards, *self.node_host.remotes.step_ids}
        if request.pinned and step_id not in known:
            raise refusal_error("pins", f"step {step_id} is not here, and in no archive")
        now = (
            node.last_reply.pinned | {step_id}
            if request.pinned
            else node.last_reply.pinned - {step_id}
        )
        self.share(now)
        if not await self.changes.until(lambda: node.last_reply.pinned == now, timeout_s=_SHARED_S):
            raise refusal_error("pins", "the leader of the run does not answer; try again")
        await self.node_host.notes.take(at_once=True)
        return PinnedStepsReply(steps=tuple(sorted(now)))
