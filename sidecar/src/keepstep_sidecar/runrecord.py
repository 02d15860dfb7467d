"""`run.json`: the one thing that shards cannot tell, which epochs there were and their parents."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep.steps import Epoch


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The run's name and the epochs it has lived through, oldest first."""

    run: str
    epochs: tuple[Epoch, ...] = ()

    def with_epoch(self, epoch: Epoch) -> RunRecord:
        """This record and `epoch`; the same record when it is known already."""
        raise NotImplementedError
