"""What the page knows of a run at one moment. Values only; other code reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keepstep.core.history import Event, Goodput
from keepstep.steps import Tier
from keepstep.wire.status import RankStatus, Status, StepStatus, TierStatus, VolumeStatus


@dataclass(frozen=True, kw_only=True)
class RunPage:
    """`live`: what the sidecar says, None without a sidecar. In that case `steps`, which ascend,
    are those of the `volumes`. `events`: the run's history on this machine, oldest first.
    `problems`: what people should look at. `error`: why nothing of the run could be read.
    """

    name: str
    live: Status | None = None
    steps: tuple[StepStatus, ...] = ()
    committed: StepStatus | None = None
    newest: StepStatus | None = None
    events: tuple[Event, ...] = ()
    goodput: Goodput | None = None
    volumes: tuple[str, ...] = ()
    log: str = ""
    problems: tuple[str, ...] = ()
    error: str = ""

    @property
    def ranks(self) -> tuple[RankStatus, ...]:
        return () if self.live is None else self.live.ranks

    @property
    def drives(self) -> tuple[VolumeStatus, ...]:
        return () if self.live is None else self.live.volumes

    @property
    def tiers(self) -> Mapping[Tier, TierStatus]:
        return {} if self.live is None else self.live.tiers

    @property
    def state(self) -> str:
        """The state in a word: training | waiting | stopped | unreadable."""
        if self.error:
            return "unreadable"
        if self.live is None:
            return "stopped"
        return "training" if any(one.alive for one in self.ranks) else "waiting"

    @property
    def state_text(self) -> str:
        """The state in a sentence. Nothing in it changes at every step: it is read out loud."""
        if self.live is None or self.error:
            return {
                "unreadable": "This run cannot be read.",
                "stopped": "No sidecar runs: this is what lies on the volumes.",
            }[self.state]
        world = max((one.world for one in self.ranks), default=0)
        if not world:
            return "A sidecar runs; no trainer has connected yet."
        alive = sum(one.alive for one in self.ranks)
        if alive:
            return f"Training: {alive} of {world} ranks are connected."
        return "A sidecar runs; no trainer is connected."
