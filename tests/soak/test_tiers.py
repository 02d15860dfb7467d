"""Random faults over all tiers at once, on a kind cluster; every promise is checked after each.

Several small jobs train side by side, each with node-local drives, a buddy and an archive of its
own. After each fault: a new step within a bound; nothing older restored than the newest step that
the fault left; every loss that of every other life, team, and of a run that nothing interrupted; no
life that goes on from a dead step. At the end: the invariants of each archive.

    KEEPSTEP_SOAK_FAULTS=20 KEEPSTEP_SEED=1 python -m pytest -m soak tests/soak -s
"""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e import lineage, tiers
from tests.e2e.cluster import Cluster, run
from tests.soak import record, team
from tests.soak.faults import Fault, drawn
from tests.soak.record import Record, Struck
from tests.soak.team import Seen, Team

_TEAMS = 3
_DRIVE_MIB = 160


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_random_faults_over_all_tiers_break_no_guarantee(cluster: Cluster, tmp_path: Path) -> None:
    count = int(os.environ.get("KEEPSTEP_SOAK_FAULTS", "200"))
    seed = int(os.environ.get("KEEPSTEP_SEED", random.randrange(1 << 30)))
    print(f"KEEPSTEP_SEED={seed} KEEPSTEP_SOAK_FAULTS={count}", flush=True)
    kept = Record(team.SCRATCH / "faults.jsonl", of=count)
    with team.training(cluster, _TEAMS, small_mib=_DRIVE_MIB) as teams:
        soak = Soak(teams, kept, count=count)
        soak.run(random.Random(seed))
        for job in teams:
            tiers.ended(job.kubectl)
        archives = [_archive(cluster, job, tmp_path / job.name) for job in teams]
        trained = max(max(job.losses) for job in teams)
        expected = team.reference(cluster, teams[0].nodes[0], trained)
        for job in teams:
            assert job.losses == {step: expected[step] for step in job.losses}
    record.write(
        kept.summary(
            seed=seed,
            jobs=len(teams),
            steps_compared=sum(len(job.losses) for job in teams),
            archived_steps_verified=sum(len(archive.steps) for archive in archives),
            epochs=sum(len(archive.epochs) for archive in archives),
            broken_promises=0,
        ),
        f"tiers-{count}",
    )


def _archive(cluster: Cluster, job: Team, into: Path) -> lineage.Lineage:
    into.mkdir()
    run("docker", "cp", f"{job.nodes[0]}:{job.store}/ckpt/runs/{job.name}", str(into))
    return lineage.checked(into / job.name, job.name)


class Soak:
    """Draws faults until there were enough; each team has one at a time."""

    def __init__(self, teams: list[Team], kept: Record, *, count: int) -> None:
        self._teams, self._kept = teams, kept
        self._count, self._begun = count, 0
        self._lock = threading.Lock()
        self._halt = threading.Event()

    def run(self, dice: random.Random) -> None:
        """Raises the first broken promise."""
        with ThreadPoolExecutor(len(self._teams)) as pool:
            work = [
                pool.submit(self._torment, job, random.Random(dice.random()), small=number == 0)
                for number, job in enumerate(self._teams)
            ]
            done, _ = wait(work, return_when=FIRST_EXCEPTION)
            self._halt.set()
            _raised(done)
            _raised(set(work))

    def _torment(self, first: Team, dice: random.Random, *, small: bool) -> None:
        while not self._halt.is_set() and (number := self._number()):
            fault = drawn(dice, small=small)
            if not fault.alone:
                with first.busy:
                    self._strike(number, first, fault, dice)
                continue
            with ExitStack() as all_of_them:  # in one order, so that no two wait for each other
                for other in self._teams:
                    all_of_them.enter_context(other.busy)
                others = [other.well() for other in self._teams if other is not first]
                self._strike(number, first, fault, dice)
                rest = [other for other in self._teams if other is not first]
                for other, before in zip(rest, others, strict=True):
                    _checked(other, before, before.committed, fault)

    def _number(self) -> int:
        """Of the next fault, from 1; 0 when there were enough."""
        with self._lock:
            self._begun += 1
            return self._begun if self._begun <= self._count else 0

    def _strike(self, number: int, job: Team, fault: Fault, dice: random.Random) -> None:
        before = job.well()
        time.sleep(dice.random())  # any moment of a step
        began, at = time.monotonic(), time.time()
        floor = fault.do(job, before, dice)
        now, lost = _checked(job, before, floor, fault)
        new_life = now.life.began_at != before.life.began_at
        self._kept.add(
            Struck(
                number=number,
                team=job.name,
                fault=fault.name,
                at=at,
                step=before.life.last,
                floor=floor,
                restored=now.life.first - 1 if new_life else None,
                tier=now.life.tier if new_life else None,
                lost=lost,
                seconds=time.monotonic() - began,
            )
        )


def _checked(job: Team, before: Seen, floor: int, fault: Fault) -> tuple[Seen, int]:
    """A new step, and what must be true of the life that made it. Also: finished steps lost."""
    now = job.lives_on(before, ends=fault.ends, within_s=fault.within_s)
    if now.life.began_at == before.life.began_at:
        return now, 0
    restored = now.life.first - 1
    assert restored >= floor, (
        f"{job.name}, {fault.name}: step {restored} was restored, {floor} was there"
    )
    assert restored == floor or not fault.exact, f"{job.name}: {restored}, not {floor} as asked"
    job.check_parent()
    return now, max(0, job.ended(before).last - restored)


def _raised(done: set[Future[None]]) -> None:
    for future in done:
        future.result()
