"""Of twins one image is read; all of them only where these seem not to make up the tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from keepstep.core.restore_vote import Decision
from keepstep.errors import CoverageError
from keepstep.restore import rank_restore
from keepstep.restore.fill_plan import IndexBuilder
from keepstep.steps import EpochId, StepId, Tier

ID = StepId(EpochId(1, "aaaaaaaa"), 4)


def plan(monkeypatch: pytest.MonkeyPatch, *, left_out: tuple[int, ...]) -> list[bool]:
    """Whether every image was asked for, each time that a plan is made; the first one fails."""
    asked: list[bool] = []

    def find(*_: object, every: bool) -> Any:
        asked.append(every)
        index = IndexBuilder(2).build(() if every else left_out)
        return SimpleNamespace(
            requested=(), index=index, skeleton=lambda _: "[]", choose_source_rank=lambda _: 0
        )

    class Loader:
        targets = ()

        def __init__(self, *_: object, **__: object) -> None: ...

        def compare_and_plan(self, *, whole: bool = True) -> None:
            if len(asked) == 1:
                raise CoverageError("w: these boxes overlap")

        def compress_unused_names(self) -> bytes:
            return b""

    monkeypatch.setattr(rank_restore.StepImages, "locate_step", find)
    monkeypatch.setattr(rank_restore, "Loader", Loader)
    attempt = rank_restore.RankRestore(
        {},
        None,  # type: ignore[arg-type]
        Decision(ID, (Tier.PEER,), 2, direct=(False,), world=2),
        rank=0,
        take=lambda: SimpleNamespace(by_path={}),  # type: ignore[arg-type,return-value]
        rng=False,
        trusted=False,
        partial=rank_restore.FillGuard(),
    )
    attempt._plan(())
    return asked


def test_skipped_replica_shards_are_read_before_a_step_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert plan(monkeypatch, left_out=(1,)) == [False, True]


def test_a_step_with_overlaps_is_refused_once_all_shards_were_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(CoverageError, match="overlap"):
        plan(monkeypatch, left_out=())


def test_skipped_shards_are_not_listed_as_absent() -> None:
    index = IndexBuilder(4).build((1, 3))
    assert (index.absent, index.left_out) == ((0, 2), (1, 3))
