"""Leases, slots and images, over the real socket of a real sidecar."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from trainer import FakeTrainer, make_layout

from keepstep.errors import SidecarError
from keepstep.image import ControlPage
from tests.harness import SidecarProcess, eventually

Trainers = Callable[..., FakeTrainer]


def slots_of(sidecar: SidecarProcess, rank: int = 0) -> list[dict[str, object]]:
    return next(r for r in sidecar.get("/v1/status")["ranks"] if r["rank"] == rank)["slots"]


def test_a_save_report_that_is_sent_twice_is_counted_once(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    trainer = trainers(sidecar.socket).begin_run()
    eventually(lambda: len(slots_of(sidecar)) == 2)
    trainer.begin()
    trainer.fill(0)
    granted = trainer.slot
    first = trainer.report(0)
    trainer.slot = granted
    assert trainer.report(0) == first
    assert sidecar.get("/v1/status")["ranks"][0]["saves"] == 1


def test_a_save_report_for_an_unsealed_slot_is_refused(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    trainer = trainers(sidecar.socket).begin_run()
    trainer.begin()
    with pytest.raises(SidecarError, match="does not seal step 0001") as error:
        trainer.report(0)
    assert error.value.code == "bad-image"


def test_a_second_running_trainer_of_a_rank_is_refused_with_the_pid_of_the_first(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    trainers(sidecar.socket).begin_run()
    with pytest.raises(SidecarError, match=f"pid {os.getpid()}") as error:
        trainers(sidecar.socket).connect()
    assert error.value.code == "rank-taken"


@pytest.mark.parametrize(("until", "left"), [("filling", [0, 1]), ("sealed", [0, 1, 2])])
def test_only_sealed_slots_of_a_killed_trainer_are_kept(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers, until: str, left: list[int]
) -> None:
    sidecar = sidecars().start("--keep", "9")
    with subprocess.Popen(
        [sys.executable, "-m", "tests.sidecar.trainer", str(sidecar.socket), "2", until],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    eventually(lambda: all(slot["state"] != "assigned" for slot in slots_of(sidecar)))
    successor = trainers(sidecar.socket)
    successor.connect()
    found = successor.candidates()
    assert [candidate.id.step for candidate in found.candidates] == left
    opened = successor.open(found.candidates[-1].id)
    assert ControlPage.from_bytes(Path(opened.path).read_bytes()[-4096:]).step == left[-1]


def test_a_trainer_that_lost_its_connection_continues_with_its_slot(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    trainer = trainers(sidecar.socket).begin_run()
    path = trainer.begin()
    trainer.disconnect()
    assert trainer.slot is not None
    granted = trainer.connect(holding=(str(trainer.slot.slot),))
    assert granted.held == (trainer.slot.slot,)
    trainer.register()
    trainer.fill(3)
    trainer.report(3)
    assert ControlPage.from_bytes(path.read_bytes()[-4096:]).step == 3


def test_a_slot_that_a_surviving_process_may_still_fill_is_not_given_to_the_next_trainer(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    straggler = trainers(sidecar.socket).begin_run()
    path = straggler.begin()
    straggler.disconnect()  # its process, this one, lives on
    successor = trainers(sidecar.socket).begin_run()
    assert not path.exists() or not os.path.samefile(path, successor.begin())
    straggler.disconnect()


def test_the_number_of_slots_is_reduced_to_the_memory_limit_with_a_warning(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    size = make_layout().size_bytes
    sidecar = sidecars().start("--memory-limit", str(2 * 2 * size))
    trainer = trainers(sidecar.socket, 0, 2)
    trainer.connect()
    accepted = trainer.register()
    assert accepted.slots == 2
    assert "raise --memory-limit" in accepted.warning
    eventually(lambda: len(slots_of(sidecar)) == 2)
    other = trainers(sidecar.socket, 1, 2)
    other.connect()
    assert other.register().slots == 2


@pytest.mark.parametrize(("here", "slots"), [(2, 3), (1, 4)])
def test_ranks_of_a_run_on_several_machines_get_one_more_slot(
    sidecar: SidecarProcess, trainers: Trainers, here: int, slots: int
) -> None:
    trainer = trainers(sidecar.socket, 0, 2)
    trainer.connect(local_world=here)
    accepted = trainer.register()
    assert (accepted.slots, accepted.warning) == (slots, "")


def test_the_last_slot_is_made_when_a_reader_is_in_the_way_of_the_next_step(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    sidecar = sidecars().start("--persist-every", "1000")
    trainer = trainers(sidecar.socket).begin_run()
    for step in range(1, 9):
        trainer.stage(step)
    assert len(slots_of(sidecar)) == 2
    trainer.open(trainer.id_of(8))
    for step in range(9, 12):
        trainer.stage(step)
    assert len(slots_of(sidecar)) == 3


def test_a_single_slot_is_filled_again_once_its_step_is_durable_on_every_rank(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    sidecar = sidecars().start("--slots", "1")
    ranks = [trainers(sidecar.socket, rank, 2).begin_run(local_world=2) for rank in (0, 1)]
    for step in range(1, 6):
        first = ranks[0].stage(step)
        assert ranks[0].take_slot(timeout_s=0.2).slot is None, "rank 1 has not even sealed it"
        ranks[1].stage(step)
        for rank in ranks:
            rank.begin()
        assert ranks[0].wait(first, "committed").reached
        assert sidecar.published()[-1:] == [step]
    assert [len(slots_of(sidecar, rank)) for rank in (0, 1)] == [1, 1]


def test_with_a_single_slot_only_durable_steps_are_staged(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    sidecar = sidecars().start("--slots", "1", "--persist-every", "5")
    trainer = trainers(sidecar.socket).begin_run()
    trainer.begin()
    trainer.fill(5)
    assert trainer.report(5).stage_every == 5
    assert sidecar.get("/v1/status")["stage_every"] == 5


def test_where_memory_has_room_for_one_image_steps_are_kept_all_the_same(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    sidecar = sidecars().start("--memory-limit", str(make_layout().size_bytes))
    trainer = trainers(sidecar.socket)
    trainer.connect()
    trainer.restored(trainer.epoch)
    accepted = trainer.register()
    assert accepted.slots == 1
    assert "once the one before it is durable" in accepted.warning
    for step in range(1, 4):
        assert trainer.wait(trainer.stage(step), "committed", flush=True).reached


def test_the_sidecar_uses_little_memory_beside_its_slots(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    trainer = trainers(sidecar.socket, size=16 << 20).begin_run()
    for step in range(6):
        trainer.stage(step)
    assert sidecar.process is not None
    fields = Path(f"/proc/{sidecar.process.pid}/status").read_text().split("\n")
    kib = {line.split(":")[0]: line.split()[1] for line in fields if "kB" in line}
    assert int(kib["RssAnon"]) + int(kib["RssFile"]) < 80 * 1024


def test_all_ranks_of_a_machine_use_the_stage_interval_of_the_rank_with_the_highest_cost(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    sidecar = sidecars().start("--stage-every", "auto")
    ranks = [trainers(sidecar.socket, rank=rank, world=2).begin_run() for rank in (0, 1)]
    for rank in ranks:
        rank.begin()
        rank.fill(0)
        assert rank.report(0).stage_every == 1, "nothing is known yet"
    for rank, cost in zip(ranks, (0.001, 0.12), strict=True):
        rank.begin()
        rank.fill(1)
        granted = rank.report(1, cost=cost)
    assert granted.stage_every == 16, "of the rank that loses most"
    ranks[0].begin()
    ranks[0].fill(16)
    assert ranks[0].report(16, cost=0.001).stage_every == 16
    assert sidecar.get("/v1/status")["stage_every"] == 16
    for rank in ranks:
        rank.disconnect()
    successor = trainers(sidecar.socket, rank=0, world=2)
    successor.connect()
    assert successor.granted.stage_every == 16, "what is known holds for the next life"
    assert successor.granted.stage_trials
    successor.disconnect()
    alone = trainers(sidecar.socket, rank=0, world=1).begin_run()
    alone.begin()
    alone.fill(2)
    assert alone.report(2, cost=0.001).stage_every == 1, "a rank that is gone has no say"


@pytest.mark.parametrize(
    ("options", "interval"),
    [
        (("--persist-every", "10"), 10),
        (("--keep-every", "100"), 100),
        (("--keep-every", "6h"), 16),
    ],
)
def test_steps_that_are_to_be_durable_are_staged_at_any_cost(
    sidecars: Callable[..., SidecarProcess],
    trainers: Trainers,
    options: tuple[str, ...],
    interval: int,
) -> None:
    sidecar = sidecars().start("--stage-every", "auto", *options)
    trainer = trainers(sidecar.socket).begin_run()
    trainer.begin()
    trainer.fill(0)
    chosen = trainer.report(0, cost=0.12).stage_every
    assert 1 < chosen <= interval
    assert interval % chosen == 0


def test_a_configured_stage_interval_is_never_changed(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    trainer = trainers(sidecars().start("--stage-every", "2").socket).begin_run()
    trainer.begin()
    trainer.fill(0)
    assert trainer.report(0, cost=5.0).stage_every == 0
    assert not trainer.granted.stage_trials
