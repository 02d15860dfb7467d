"""How much of a run one sidecar sees. Pure.

A run may span several pods, each with a sidecar of its own that sees its own ranks only. Such a
sidecar never concludes from what it lacks that the run lacks it.
"""

from __future__ import annotations

from collections.abc import Mapping

from keepstep.protocol import LeaseRequest


def local_world(request: LeaseRequest, *, environment: Mapping[str, str], alone: bool) -> int:
    """The ranks of this run that this sidecar serves; 0 when nobody can tell.

    torchrun tells its workers. Without it, a sidecar that is `alone` serves all ranks. One of many
    looks at the training container's environment, of which it has a copy (design section 8): when
    the job controller set the very rank there that the trainer has, each pod has one.
    """
    if request.local_world:
        return request.local_world
    if alone or request.world == 1:
        return request.world
    of_container = (environment.get("RANK"), environment.get("WORLD_SIZE"))
    return 1 if of_container == (str(request.rank), str(request.world)) else 0


def sees_all(request: LeaseRequest) -> bool:
    """Whether all ranks of the run are served here; `request.local_world` is settled."""
    return request.local_world == request.world
