"""Machines without an operator: the sidecar of node rank 0 leads the run."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import psutil
import pytest
from machines import Machine, Run
from trainer import FakeTrainer, make_layout

from keepstep.core.restore_vote import choose_step
from keepstep.errors import SidecarError
from keepstep.steps import StepId
from keepstep.wire.trainer import PinnedStepsReply
from keepstep_sidecar.cli import calls
from tests.harness import SidecarProcess, eventually, free_port, matching


def test_a_step_is_committed_on_all_machines_soon_after_the_last_has_written_it(
    run: Callable[[int], Run],
) -> None:
    two = run(2).start("--persist-every", "1", "--keep", "1")
    two.reach(0)
    waits = []
    for step in range(1, 8):
        step_id = two.stage(step)
        for rank in two.ranks:
            assert rank.wait(step_id, "durable").reached
        began = time.monotonic()
        for rank in two.ranks:
            assert rank.wait(step_id, "committed").reached
        waits.append(time.monotonic() - began)
    assert median(waits) < 2, "at once, and not with the next of the reports that always come"
    eventually(lambda: two.machines[1].steps() == {7}, what="older steps go on all machines")
    eventually(lambda: two.machines[0].steps() == {7}, what="older steps go on all machines")


@pytest.mark.parametrize("ahead_s", [600, -600])
def test_a_clock_skew_of_ten_minutes_does_not_affect_a_run(
    run: Callable[[int], Run], tmp_path: Path, ahead_s: int
) -> None:
    two = run(2)
    here, there = two.machines
    there.program = ("env", *there.program)  # an interpreter of its own
    (tmp_path / "sitecustomize.py").write_text(
        f"import time\nreal = time.time\ntime.time = lambda: real() + {ahead_s}\n"
    )
    options = ("--persist-every", "1", "--keep", "1")
    here.start(*options)
    there.start(*options, PYTHONPATH=str(tmp_path))
    for first in two.come_back():
        first.restored(first.epoch)
        first.register()
    for step in range(6):
        two.reach(step)
    eventually(lambda: 5 in here.copies(), what="the buddy has the newest step")
    two.disconnect()
    there.kill()
    there.lose_memory()
    shutil.rmtree(there.volume)
    there.start(*options, PYTHONPATH=str(tmp_path))
    two.come_back()
    assert two.restore().step == 5
    two.reach(6)
    for machine in two.machines:
        eventually(lambda machine=machine: machine.steps() == {6}, what="older steps go")
        assert not machine.warnings()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_replaced_machine_restores_from_its_peer_and_writes_its_shard_again(
    run: Callable[[int], Run], lost: int
) -> None:
    two = run(2).start("--persist-every", "1")
    step_id = two.reach(3)
    for machine in two.machines:
        eventually(
            lambda machine=machine: 3 in machine.copies(), what="each keeps the other's shard"
        )
    two.disconnect()
    machine = two.machines[lost]
    machine.kill()
    machine.lose_memory()
    shutil.rmtree(machine.volume)
    machine.start("--persist-every", "1")
    two.come_back()
    assert two.restore() == step_id
    eventually(lambda: machine.steps() == {3}, what="the copy on its own volume is made again")


@pytest.mark.parametrize("address", ["the same", "another"])
def test_shards_listed_by_a_replaced_machine_do_not_prevent_a_restore_from_replicas(
    run: Callable[[int], Run], address: str
) -> None:
    options = ("--persist-every", "1", "--peer-replicas", "0", "--keep", "10")
    two = run(2)
    two.start_sidecars(*options)

    def train(ranks: list[FakeTrainer]) -> None:
        for rank in ranks:
            rank.layout = make_layout(rank.rank, 2, twins=(1 - rank.rank,))

    train(two.come_back())
    for rank in two.ranks:
        rank.restored(rank.epoch)
        rank.register()
    two.reach(0)
    two.disconnect()
    here, there = two.machines
    here.kill()
    here.start(*options)  # it asks what the other one holds
    train(two.come_back())
    assert two.restore().step == 0
    last = [two.reach(step) for step in range(1, 6)][-1]
    two.disconnect()
    there.kill()
    there.lose_memory()
    shutil.rmtree(there.volume)
    if address == "another":
        there.port = free_port()
    there.start(*options)
    zero, rank = (two._trainers(machine.socket, at, 2) for at, machine in enumerate(two.machines))
    zero.connect(local_world=1)  # it votes before the other one comes
    eventually(
        lambda: not any(1 in offer.images for offer in zero.candidates().offers),
        what="what it held is gone",
    )
    vote = zero.candidates()
    rank.connect(local_world=1)
    assert choose_step([vote, rank.candidates()]).id == last


def test_a_second_sidecar_with_the_same_node_rank_is_refused_and_both_sides_report_it(
    run: Callable[[int], Run], tmp_path: Path
) -> None:
    two = run(2).start("--persist-every", "1", "--keep", "1")
    two.reach(1)
    here, there = two.machines
    for rank in (0, 1):
        home = tmp_path / f"second-{rank}"
        second = Machine(rank, memory=home / "m", home=home, leader=here.leader)
        second.port = free_port()
        try:
            second.start("--persist-every", "1")
            for first in (second, here):
                eventually(
                    lambda machine=first, rank=rank: (
                        f"DuplicateNodeRank: two sidecars have node rank {rank}"
                        in machine.warnings()
                    ),
                    what="both say so",
                )
        finally:
            second.end()
    two.reach(2)
    for first in (here, there):
        eventually(lambda machine=first: machine.steps() == {2}, what="the run goes on as before")


@pytest.mark.parametrize(
    ("options", "environment", "here_message", "there_message"),
    [
        (("--nodes", "3"), {}, "node rank 1 of 3 nodes asks to join a run of 2", "a run of 2"),
        (("--run", "other"), {}, "was refused", "the secret and the run's name must be the same"),
        (
            (),
            {"KEEPSTEP_SECRET": "quite another secret"},
            "was refused",
            "the secret and the run's name must be the same",
        ),
    ],
    ids=["another-world", "another-run", "another-secret"],
)
def test_a_machine_of_another_run_is_refused_and_both_sides_report_the_reason(
    run: Callable[[int], Run],
    options: tuple[str, ...],
    environment: dict[str, str],
    here_message: str,
    there_message: str,
) -> None:
    here, there = run(2).machines
    here.start()
    there.start(*options, **environment)
    eventually(lambda: there_message in there.warnings(), what="it says why")
    eventually(lambda: here_message in here.warnings(), what="the leader says why")


def test_a_warning_that_only_the_leader_can_detect_is_logged_once(
    run: Callable[[int], Run],
) -> None:
    """The model does not change, on any machine."""
    two = run(2).start("--persist-every", "1", "--peer-replicas", "0")
    for step in range(8):
        for rank in two.ranks:
            rank.begin()
            rank.copy(0, 0, rank.layout.size_bytes)
            rank.seal(rank.control(step))
            rank.report(step)
        for rank in two.ranks:
            assert rank.wait(StepId(rank.epoch.id, step), "committed").reached
    here, text = two.machines[0], "the parameters of all ranks were the same in the last 6 commits"
    eventually(lambda: text in here.warnings(), what="the leader says so")
    assert here.warnings().count(text) == here.text().count(text) == 1


def test_committed_steps_stay_and_nothing_is_retired_while_a_machine_is_disconnected(
    run: Callable[[int], Run],
) -> None:
    two = run(2).start("--persist-every", "1", "--keep", "1")
    two.reach(1)
    here, there = two.machines
    there.kill()
    later = two.ranks[0].stage(2)
    assert two.ranks[0].wait(later, "durable").reached
    assert not two.ranks[0].wait(later, "committed", timeout_s=2.0).reached
    assert here.steps() == {1, 2}
    text = "no connection from node ranks 1"
    eventually(lambda: text in here.warnings(), what="who is missing is said")


@pytest.fixture
def archive(tmp_path: Path) -> tuple[str, ...]:
    """Options with an archive that all runs of a test share."""
    (tmp_path / "far").mkdir()
    return ("--persist-every", "1", "--archive", str(tmp_path / "far"), "--archive-every", "1")


def archived(options: tuple[str, ...], what: str = "0*/step.json") -> list[Path]:
    return matching(Path(options[3], "run"), what)


def archiving(run: Callable[[int], Run], archive: tuple[str, ...]) -> tuple[Run, StepId]:
    """Two machines with a step and a sign of life in the archive."""
    two = run(2).start(*archive)
    step_id = two.reach(1)
    eventually(lambda: archived(archive) and archived(archive, "lives/*"), what="its life is told")
    return two, step_id


def test_a_second_run_of_machines_is_refused_while_the_first_one_trains_over_its_archive(
    run: Callable[[int], Run], archive: tuple[str, ...]
) -> None:
    first, step_id = archiving(run, archive)
    second = run(2)
    second.start_sidecars(*archive)
    leader, member = second.come_back()
    member.candidates(timeout_s=60.0)  # the leader decides
    with pytest.raises(SidecarError, match="another run named 'run' trains on "):
        leader.candidates(timeout_s=60.0)
    for machine in first.machines:
        machine.kill()
    first.disconnect()
    assert archived(archive, "lives/*"), "nobody said that it ended"
    began = time.monotonic()
    assert step_id in [candidate.id for candidate in leader.candidates(timeout_s=60.0).candidates]
    assert time.monotonic() - began < 45.0
    assert second.restore() == step_id
    assert {path.parent.name[:5] for path in archived(archive)} == {"0001."}


def test_a_replaced_leader_recognises_the_archive_heartbeat_as_its_own_run(
    run: Callable[[int], Run], archive: tuple[str, ...]
) -> None:
    two, step_id = archiving(run, archive)
    two.disconnect()
    machine = two.machines[0]
    machine.kill()
    machine.lose_memory()
    shutil.rmtree(machine.volume)
    machine.start(*archive)
    began = time.monotonic()
    two.come_back()[0].candidates(timeout_s=60.0)
    assert two.restore() == step_id
    assert time.monotonic() - began < 45.0


@pytest.mark.parametrize("lost", [0, 1])
def test_commits_resume_within_seconds_after_a_sidecar_was_killed(
    run: Callable[[int], Run], lost: int
) -> None:
    two = run(2).start("--persist-every", "1", "--keep", "1")
    two.reach(1)
    two.disconnect()
    machine = two.machines[lost]
    machine.kill()
    machine.start("--persist-every", "1", "--keep", "1")
    two.come_back()
    assert two.restore().step == 1
    began = time.monotonic()
    two.reach(2)
    assert time.monotonic() - began < 15
    for member in two.machines:
        eventually(lambda machine=member: machine.steps() == {2}, what="older steps go again")


@pytest.mark.parametrize("at", [0, 1])
def test_a_pinned_step_is_kept_on_all_machines_across_restarts_until_it_is_unpinned(
    run: Callable[[int], Run], at: int
) -> None:
    options = ("--persist-every", "1", "--keep", "1")
    two = run(2).start(*options)
    pinned = two.reach(1)
    answer = calls.ask_pin(two.machines[at].socket, pinned, pinned=True)
    assert answer is not None
    assert answer.steps == (pinned,)
    two.reach(2)
    newest = two.reach(3)
    for machine in two.machines:
        eventually(
            lambda machine=machine: machine.steps() == {1, 3}, what="it stays on all machines"
        )
    two.disconnect()
    for machine in two.machines:
        machine.kill()
    two.start_sidecars(*options)
    two.come_back()
    assert two.restore() == newest
    two.reach(4)
    for machine in two.machines:
        eventually(
            lambda machine=machine: machine.steps() == {1, 4}, what="it stays after a restart"
        )
    assert calls.ask_pin(two.machines[1 - at].socket, pinned, pinned=False) == PinnedStepsReply()
    for machine in two.machines:
        eventually(
            lambda machine=machine: machine.steps() == {4}, what="it goes when it is unpinned"
        )


@pytest.mark.parametrize("at", [0, 1])
def test_a_pinned_step_is_kept_in_the_archive_across_restarts_until_it_is_unpinned(
    run: Callable[[int], Run], tmp_path: Path, at: int
) -> None:
    """The sidecar of rank 0 deletes there, whichever machine was told of the pin."""
    archive = tmp_path / "archive"
    archive.mkdir()
    kept = ("--keep", "1", "--archive-every", "1", "--archive-keep", "1")
    options = ("--persist-every", "1", "--archive", str(archive), *kept)

    def has(*steps: int) -> bool:
        found = archive.glob("run/*/step.json")
        return {int(path.parent.name.rsplit("-", 1)[1]) for path in found} == set(steps)

    two = run(2).start(*options)
    pinned = two.reach(1, "archived")
    assert calls.ask_pin(two.machines[at].socket, pinned, pinned=True) is not None
    two.reach(2, "archived")
    newest = two.reach(3, "archived")
    eventually(lambda: has(1, 3), what="the pinned step stays, the other one goes")
    two.disconnect()
    for machine in two.machines:
        machine.kill()
    two.start_sidecars(*options)
    two.come_back()
    assert two.restore() == newest
    two.reach(4, "archived")
    eventually(lambda: has(1, 4), what="it stays after a restart")
    assert calls.ask_pin(two.machines[1 - at].socket, pinned, pinned=False) == PinnedStepsReply()
    two.reach(5, "archived")
    eventually(lambda: has(5), what="it goes when it is unpinned")


def test_a_single_machine_is_its_own_leader_without_port_and_secret(
    sidecars: Callable[..., SidecarProcess],
    trainers: Callable[..., FakeTrainer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KEEPSTEP_SECRET", raising=False)
    sidecar = sidecars().start("--persist-every", "1", "--keep", "1")
    trainer = trainers(sidecar.socket).begin_run()
    for step in (1, 2):
        assert trainer.wait(trainer.stage(step), "committed").reached
    eventually(lambda: sidecar.published() == [2], what="it lets the older step go")
    assert "this sidecar" in sidecar.text(), "to which it reports"
    assert sidecar.process is not None
    assert psutil.Process(sidecar.process.pid).net_connections("inet") == []


def test_a_pinned_step_is_kept_on_a_single_machine(
    sidecars: Callable[..., SidecarProcess], trainers: Callable[..., FakeTrainer]
) -> None:
    options = ("--persist-every", "1", "--keep", "1")
    sidecar = sidecars().start(*options)
    trainer = trainers(sidecar.socket).begin_run()
    ids = [trainer.stage(step) for step in range(2)]
    assert trainer.wait(ids[1], "committed").reached
    assert calls.ask_pin(sidecar.socket, ids[1], pinned=True) == PinnedStepsReply(steps=(ids[1],))
    for step in (2, 3):
        assert trainer.wait(trainer.stage(step), "committed").reached
    eventually(lambda: sidecar.published() == [1, 3], what="the pinned step stays")
    sidecar.kill()
    sidecar.start(*options)
    eventually(lambda: sidecar.published() == [1, 3], what="also after a restart")
    calls.ask_pin(sidecar.socket, ids[1], pinned=False)
    eventually(lambda: sidecar.published() == [3], what="it goes when it is unpinned")


def _is_committed(two: Run, there: Machine, step_id: StepId) -> bool:
    """Wait until the step is committed, or `there` has no room for it."""
    for _ in range(60):
        if all(
            rank.wait(step_id, "committed", flush=True, timeout_s=0.5).reached for rank in two.ranks
        ):
            return True
        if f"step {step_id}, rank 1: no space" in there.text():
            return False
    raise AssertionError(f"step {step_id} is neither committed nor given up")


def test_a_full_volume_on_one_machine_skips_single_steps_without_a_long_gap(
    run: Callable[[int], Run],
) -> None:
    two = run(2)
    here, there = two.machines
    here.start("--persist-every", "1")
    there.start("--persist-every", "1", "--capacity", "320Ki")
    for first in two.come_back():
        first.restored(first.epoch)
        first.register()
    committed, pauses, since = 0, [0.0], time.monotonic()
    for step in range(30):
        if _is_committed(two, there, two.stage(step)):
            pauses.append(time.monotonic() - since)
            committed, since = committed + 1, time.monotonic()
    pauses.append(time.monotonic() - since)
    assert committed >= 10, "there may be no room for a step while copies come in"
    assert max(pauses) < 20
    scarce = committed < 30 or '"step.evicted"' in there.text()
    assert scarce, "four shards fit: not two steps, one more, and copies"
