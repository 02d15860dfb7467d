"""Leases, slots and images, over the real socket of a real sidecar."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from trainer import FakeTrainer, content, make_layout, read_image

from keepstep.errors import SidecarError
from keepstep.image import ControlPage
from keepstep_sidecar.memory.slot_file import may_swap, pinning
from tests.harness import SidecarProcess, eventually, verify_image

Trainers = Callable[..., FakeTrainer]


def slots_of(sidecar: SidecarProcess, rank: int = 0) -> list[dict[str, object]]:
    return next(r for r in sidecar.get("/v1/status")["ranks"] if r["rank"] == rank)["slots"]


def test_a_staged_step_is_committed_and_its_file_is_the_image(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    trainer = trainers(sidecar.socket).begin_run()
    id = trainer.stage(7)
    assert trainer.wait(id, "committed", flush=True).reached
    path = sidecar.root / str(id) / "rank-00000-of-00001.safetensors"
    image = path.read_bytes()
    control = verify_image(memoryview(image), trainer.layout)
    assert (control.id, control.run) == (id, "run")


def test_a_slot_asked_for_twice_is_the_same_one(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    trainer = trainers(sidecar.socket).begin_run()
    assert trainer.take_slot() == trainer.take_slot()


def test_a_report_sent_twice_is_taken_once(sidecar: SidecarProcess, trainers: Trainers) -> None:
    trainer = trainers(sidecar.socket).begin_run()
    eventually(lambda: len(slots_of(sidecar)) == 4)
    trainer.begin()
    trainer.fill(0)
    granted = trainer.slot
    first = trainer.report(0)
    trainer.slot = granted
    assert trainer.report(0) == first
    assert sidecar.get("/v1/status")["ranks"][0]["saves"] == 1


def test_a_report_without_a_seal_is_refused(sidecar: SidecarProcess, trainers: Trainers) -> None:
    trainer = trainers(sidecar.socket).begin_run()
    trainer.begin()
    with pytest.raises(SidecarError, match="does not seal step 0001") as error:
        trainer.report(0)
    assert error.value.code == "bad-image"


def test_a_discarded_image_leaves_no_step_behind(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    trainer = trainers(sidecar.socket).begin_run()
    trainer.begin()
    trainer.fill(0)
    trainer.discard(0)
    trainer.skip(1, "no slot is free yet")
    status = sidecar.get("/v1/status")
    assert status["steps"] == []
    assert (status["ranks"][0]["discarded"], status["ranks"][0]["skipped"]) == (1, 1)


def test_the_newest_two_images_and_the_one_being_written_are_never_overwritten(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    trainer = trainers(sidecar.socket).begin_run()
    for step in range(12):
        trainer.stage(step)
        held = {slot["id"]["step"] for slot in slots_of(sidecar) if slot["state"] == "sealed"}
        assert held >= set(range(max(0, step - 1), step + 1))


def test_a_second_live_trainer_of_a_rank_is_turned_away_by_name(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    trainers(sidecar.socket).begin_run()
    with pytest.raises(SidecarError, match=f"pid {os.getpid()}") as error:
        trainers(sidecar.socket).connect()
    assert error.value.code == "rank-taken"


def test_a_rank_is_free_once_its_trainer_has_gone(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    first = trainers(sidecar.socket).begin_run()
    first.disconnect()
    trainers(sidecar.socket).connect()
    with pytest.raises(SidecarError) as error:
        first.take_slot()
    assert error.value.code == "no-lease"


def test_a_library_of_another_protocol_is_told_the_versions(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    with pytest.raises(SidecarError, match="speaks protocol 9, this sidecar") as error:
        trainers(sidecar.socket).connect(protocol=9)
    assert error.value.code == "protocol"
    assert "speaks protocol 9" in sidecar.get("/v1/status")["warnings"][0]
    trainers(sidecar.socket).connect()
    assert sidecar.get("/v1/status")["warnings"] == []


@dataclass
class Rectangle:
    """Nothing that a sidecar could want."""

    width: int
    height: int


def test_nonsense_is_answered_with_a_problem(sidecar: SidecarProcess, trainers: Trainers) -> None:
    trainer = trainers(sidecar.socket)
    for route in ("/v1/slot", "/v1/nowhere"):
        with pytest.raises(SidecarError) as error:
            trainer.call(route, Rectangle(3, 4), dict)
        assert error.value.code == "bad-request"


@pytest.mark.parametrize(("until", "left"), [("filling", [0, 1]), ("sealed", [0, 1, 2])])
def test_a_killed_trainer_leaves_what_it_sealed_and_nothing_else(
    sidecar: SidecarProcess, trainers: Trainers, until: str, left: list[int]
) -> None:
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
    assert [one.id.step for one in found.candidates] == left
    opened = successor.open(found.candidates[-1].id)
    assert ControlPage.from_bytes(Path(opened.path).read_bytes()[-4096:]).step == left[-1]


def test_a_trainer_that_lost_its_connection_goes_on_with_its_slot(
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


def test_a_slot_that_a_straggler_may_still_fill_is_never_given_to_a_successor(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    straggler = trainers(sidecar.socket).begin_run()
    path = straggler.begin()
    straggler.disconnect()  # its process, this one, lives on
    successor = trainers(sidecar.socket).begin_run()
    assert not path.exists() or not os.path.samefile(path, successor.begin())
    straggler.disconnect()


def test_slots_shrink_to_the_memory_limit_and_say_so(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    size = make_layout().size_bytes
    sidecar = sidecars().start("--memory-limit", str(2 * 3 * size))
    trainer = trainers(sidecar.socket, 0, 2)
    trainer.connect()
    accepted = trainer.register()
    assert accepted.slots == 3
    assert "raise --memory-limit" in accepted.warning
    eventually(lambda: len(slots_of(sidecar)) == 3)
    other = trainers(sidecar.socket, 1, 2)
    other.connect()
    assert other.register().slots == 3


def test_a_limit_below_two_slots_is_an_error_that_says_what_to_do(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    sidecar = sidecars().start("--memory-limit", str(make_layout().size_bytes))
    trainer = trainers(sidecar.socket)
    trainer.connect()
    with pytest.raises(SidecarError, match="raise --memory-limit") as error:
        trainer.register()
    assert error.value.code == "no-memory"
    assert "raise --memory-limit" in sidecar.get("/v1/status")["warnings"][0]


def test_slots_of_an_old_layout_stay_until_the_new_one_has_a_step(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    trainer = trainers(sidecar.socket).begin_run()
    trainer.stage(0)
    old = trainer.layout
    trainer.register(make_layout(name="other"))
    assert any(slot["slot"].startswith(old.id[:12]) for slot in slots_of(sidecar))
    trainer.slot = None
    trainer.stage(1)
    assert trainer.wait(trainer.stage(2), "committed", flush=True).reached
    trainer.stage(3)
    assert all(not slot["slot"].startswith(old.id[:12]) for slot in slots_of(sidecar))


def test_the_image_in_memory_has_what_the_trainer_wrote(
    sidecar: SidecarProcess, trainers: Trainers
) -> None:
    trainer = trainers(sidecar.socket).begin_run()
    path = trainer.begin()
    trainer.fill(5)
    trainer.report(5)
    assert read_image(trainer.layout, path) == content(trainer.layout, 5)


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


def test_slots_that_are_not_locked_are_an_alarm_only_where_there_is_swap() -> None:
    refused, huge = {(False, "Cannot allocate memory")}, (True, "")
    assert pinning({(False, "")}, swap=True, limit_bytes=0) == "mlock"
    assert pinning({huge}, swap=True, limit_bytes=0) == "hugepages"
    assert pinning({huge, (False, "")}, swap=True, limit_bytes=0) == "hugepages and mlock"
    harmless = pinning({huge, *refused}, swap=False, limit_bytes=8 << 20)
    assert harmless == "no, and need not be: there is no swap here"
    swapped = pinning(refused, swap=True, limit_bytes=8 << 20)
    assert "RLIMIT_MEMLOCK is 8192 KiB; raise it (ulimit -l)" in swapped
    assert may_swap() in (True, False)


def test_a_sidecar_that_may_lock_nothing_says_what_that_means(
    sidecars: Callable[..., SidecarProcess], trainers: Trainers
) -> None:
    sidecar = sidecars()
    drop = ("setpriv", "--inh-caps=-ipc_lock", "--bounding-set=-ipc_lock")
    sidecar.program = ("prlimit", "--memlock=65536", *drop, *sidecar.program)
    if subprocess.run([*sidecar.program[:5], "true"], check=False).returncode:
        pytest.skip("needs prlimit and setpriv, and the right to drop a capability")
    trainer = trainers(sidecar.start().socket, size=1 << 20).begin_run()
    assert trainer.take_slot().slot
    said = sidecar.get("/v1/status")["locked"]
    assert said.startswith("no")
    assert "Cannot allocate" not in said
    assert "no swap here" in said or "RLIMIT_MEMLOCK is 64 KiB" in said
