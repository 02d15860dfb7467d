"""What proves single chunks of a shard: its seal and its digest table, read and checked once.

A seal vouches for the table and the table for every chunk, so whoever keeps a `Proof` can believe
any chunk on its own, from whatever place it comes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from keepstep.errors import TornError
from keepstep.image import ControlPage, Layout, check_table
from keepstep_sidecar.scan import opened, read_sealed


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Of one shard. `table`: its digest table, believed because `control` vouches for it."""

    layout: Layout
    control: ControlPage
    table: bytes


def prove(path: Path, *, run: str) -> Proof:
    """The proof that a file carries. Raises ImageError and its kin, OSError."""
    with opened(path) as fd:
        layout, control = read_sealed(fd, path, run=run)
        size = layout.control_begin - layout.digests_begin
        table = os.pread(fd, size, layout.digests_begin)
    if len(table) < size:
        raise TornError("truncated: it ends in its digest table", path=path)
    check_table(control, layout, table, path=path)
    return Proof(layout=layout, control=control, table=table)
