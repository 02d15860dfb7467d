"""Which rank of which world this process is, as far as DCP tells a storage plugin."""

from __future__ import annotations

import torch


def group_place(*, is_coordinator: bool, rank: int | None) -> tuple[int, int]:
    """This process's rank and world as far as a storage plugin can know them before the plans of
    all ranks are seen: DCP tells the rank in its group (since torch 2.7), and nothing of its size.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    own, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if rank is None:
        rank = 0 if is_coordinator else own
    # a coordinator that is not rank 0 of the job: `no_dist`, or a group of its own
    return (0, 1) if is_coordinator and own != 0 else (rank, world)
