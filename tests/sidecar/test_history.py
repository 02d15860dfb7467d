"""The history of a run: what happened, kept over a sidecar's death, bounded, read with care."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer import FakeTrainer

from keepstep.core.history import EventKind, HistoryEvent, HistoryTotals
from keepstep.steps import Epoch, EpochId, StepId
from keepstep.wire.status import HistoryPage
from keepstep_sidecar.history import KEPT, TEXT_CHARS, MachineHistory
from keepstep_sidecar.volume.files import FAULTS_ENV
from keepstep_sidecar.volume.history_file import HistoryFile
from tests.harness import SidecarProcess, eventually

EPOCH = EpochId(1, "00000001")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def step(number: int) -> StepId:
    return StepId(EPOCH, number)


def events(sidecar: SidecarProcess, since: int = 0) -> HistoryPage:
    return msgspec.convert(sidecar.get(f"/v1/history?since={since}"), HistoryPage)


def of(kind: EventKind, page: HistoryPage) -> list[HistoryEvent]:
    return [event for event in page.events if event.kind is kind]


# --- one life after the other ----------------------------------------------------------------


def test_the_history_is_served_and_survives_the_death_of_the_sidecar(
    sidecar: SidecarProcess, trainers: Callable[..., FakeTrainer]
) -> None:
    first = trainers(sidecar.socket).begin_run(age_s=3.0)
    for number in range(5):
        first.stage(number)
    assert first.wait(step(4), "committed", flush=True).reached
    first.begin()
    first.discard(5, "a tensor changed")
    first.skip(6, "no slot")
    found = eventually(
        lambda: of(EventKind.SKIPPED, now := events(sidecar)) and now,
        what="it is told within a second",
    )
    assert [event.kind for event in found.events][:3] == [
        EventKind.STARTED,
        EventKind.CONNECTED,
        EventKind.RESTORED,
    ]
    assert (of(EventKind.CONNECTED, found)[0].rank, of(EventKind.CONNECTED, found)[0].seconds) == (
        0,
        3.0,
    )
    staged = of(EventKind.STAGED, found)
    assert (staged[0].first, staged[-1].step) == (0, step(4))
    assert sum(event.count for event in staged) == 5
    assert sum(event.seconds for event in staged) == 5 * 0.125
    assert of(EventKind.COMMITTED, found)[-1].step == step(4)
    (discarded,) = of(EventKind.DISCARDED, found)
    assert (discarded.number, discarded.text) == (5, "a tensor changed")
    assert [event.sequence for event in found.events] == list(range(1, found.last + 1))
    assert events(sidecar, found.last).events == ()
    eventually(lambda: sidecar.root.joinpath("history.jsonl").exists(), what="it is kept")
    kept = eventually(
        lambda: "no slot" in sidecar.root.joinpath("history.jsonl").read_text(), what="all of it"
    )
    assert kept
    sidecar.kill()
    sidecar.start()
    again = events(sidecar)
    assert again.events[: len(found.events)] == found.events
    assert len(of(EventKind.STARTED, again)) == 2
    second = trainers(sidecar.socket)
    second.connect()
    second.restored(Epoch(EpochId(2, "00000002"), step(4)))
    assert events(sidecar, found.last).events[-1].epoch == second.epoch
    second.disconnect()
    ended = eventually(lambda: of(EventKind.ENDED, events(sidecar)), what="the second life ends")
    assert (ended[0].attempt, ended[0].text) == (second.attempt, "gone")
    assert sidecar.terminate() == 0
    lines = sidecar.root.joinpath("history.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["kind"] for line in lines[1:] if line]
    assert "ended" in kinds, "what came since is kept, too, when the sidecar ends"


def test_a_hung_write_of_the_history_does_not_block_commits_or_shutdown(
    sidecars: Callable[..., SidecarProcess], trainers: Callable[..., FakeTrainer]
) -> None:
    sidecar = sidecars().start(**{FAULTS_ENV: "history.write:hang"})
    eventually(lambda: "history.write: hang" in sidecar.log.read_text(), what="a write hangs")
    trainer = trainers(sidecar.socket).begin_run()
    for number in range(1, 4):
        assert trainer.wait(trainer.stage(number), "committed", flush=True).reached
    eventually(
        lambda: (found := of(EventKind.COMMITTED, events(sidecar))) and found[-1].step == step(3),
        what="it is told",
    )
    trainer.disconnect()
    assert sidecar.terminate() == 0
    assert not sidecar.root.joinpath("history.jsonl").exists()


# --- bounded ---------------------------------------------------------------------------------


def test_the_memory_of_the_history_is_bounded_for_any_trainer_input(clock: Clock) -> None:
    history = MachineHistory(clock=clock)
    for number in range(3 * KEPT):
        reason = f"{number}\ud800" + "x" * 10_000
        history.record_lost_saves(EventKind.SKIPPED, rank=number % 9, step=number, reason=reason)
    assert len(history._open) <= 64
    found = history.all()
    assert KEPT // 2 < len(found) <= KEPT
    assert max(len(event.text) for event in found) == TEXT_CHARS
    assert msgspec.json.encode(history.history_page("run", 0))
    assert history.history_page("run", 0).oldest == found[0].sequence > 1


# --- the file --------------------------------------------------------------------------------


def one_of_each(clock: Clock) -> MachineHistory:
    history = MachineHistory(clock=clock)
    history.note(EventKind.RESTORED, rank=0, epoch=Epoch(EPOCH, step(3)), seconds=2.0)
    for number in range(4, 50):
        clock.now += 1.0
        history.staged(step(number), blocked_s=0.5)
    return history


def test_the_history_file_is_read_back_and_appended_to(tmp_path: Path, clock: Clock) -> None:
    history, path = one_of_each(clock), tmp_path / "history.jsonl"
    file = HistoryFile(path, run="run")
    file.append(history.all(), history.before)
    size = path.stat().st_size
    file.append(history.all(), history.before)
    assert path.stat().st_size == size
    history.note(EventKind.ENDED, rank=0)
    file.append(history.all(), history.before)
    assert size < path.stat().st_size < size + 200
    assert HistoryFile(path, run="run").read(now=clock.now)[0] == history.all()
    path.unlink()  # as when somebody removed the run's directory
    file.append(history.all(), history.before)
    history.note(EventKind.CONNECTED, rank=0)
    file.append(history.all(), history.before)
    assert HistoryFile(path, run="run").read(now=clock.now)[0] == history.all()


@given(cut=st.integers(1, 3000))
def test_a_torn_last_line_of_the_history_file_loses_only_that_line(
    cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    clock = Clock()
    path = tmp_path_factory.mktemp("torn") / "history.jsonl"
    HistoryFile(path, run="run").append((known := one_of_each(clock)).all(), HistoryTotals())
    os.truncate(path, path.stat().st_size - cut)
    file = HistoryFile(path, run="run")
    before, _ = file.read(now=clock.now)
    assert before == known.all()[: len(before)]
    again = MachineHistory(before, clock=clock)
    again.note(EventKind.CONNECTED, rank=0)
    file.append(again.all(), again.before)
    assert HistoryFile(path, run="run").read(now=clock.now)[0] == again.all()


def test_the_size_of_the_history_file_is_bounded(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keepstep_sidecar.volume.history_file._LARGEST_BYTES", 1 << 20)
    file = HistoryFile(path := tmp_path / "history.jsonl", run="run")
    history, largest = MachineHistory(clock=clock), 0
    for number in range(20_000):
        history.note(EventKind.FAILED, rank=0, step=step(number), text="x" * 100)
        if number % 100 == 0:
            file.append(history.all(), history.before)
            largest = max(largest, path.stat().st_size)
    assert (1 << 19) < largest < (1 << 20) + (1 << 16)
    file.append(history.all(), history.before)
    assert HistoryFile(path, run="run").read(now=clock.now)[0][-1] == history.all()[-1]


def test_a_history_keeps_its_id_as_long_as_its_file_is_continued(
    tmp_path: Path, clock: Clock
) -> None:
    path = tmp_path / "history.jsonl"

    def read() -> tuple[HistoryFile, MachineHistory]:
        file = HistoryFile(path, run="run")
        return file, MachineHistory(*file.read(now=clock.now), history_id=file.id, clock=clock)

    file, history = read()
    file.append(history.all(), history.before)
    assert [read()[1].id for _ in range(2)] == [history.id] * 2
    path.unlink()
    history.note(EventKind.CONNECTED, rank=0)
    file.append(history.all(), history.before)
    assert read()[1].id == history.id, "the file is replaced, the history goes on"
    path.write_bytes(HEAD.replace(ID, b"../../x") + EVENT)
    assert read()[1].id not in (history.id, "../../x")
    path.unlink()
    assert read()[1].id != history.id, "another one begins"


BEFORE = (
    b'{"mark":-1.0}', b'{"mark":1e300}', b'{"segments":[[5,9,1.0]]}', b'{"segments":[[5,1,-1.0]]}',
    b'{"since":1e400}', b'{"mark":1e9}', b'{"interruptions":-1}',
    b'{"badput":{"training_prep":-1.0}}',
    b'{"segments":[' + b",".join([b"[5,1,1.0]"] * 500) + b"]}",
)  # fmt: skip


@pytest.mark.parametrize("before", BEFORE)
def test_impossible_totals_in_the_history_file_are_ignored(tmp_path: Path, before: bytes) -> None:
    path = tmp_path / "history.jsonl"
    path.write_bytes(HEAD.replace(b"}", b',"before":' + before + b"}") + EVENT)
    assert HistoryFile(path, run="run").read(now=10.0)[1] == HistoryTotals()


ID = b"00112233445566ff"
HEAD = b'{"format_version":1,"run":"run","id":"%b"}\n' % ID
EVENT = b'{"sequence":1,"kind":"came","at":5.0,"until":5.0,"rank":3}\n'


def test_a_missing_history_directory_raises_no_error_and_the_write_is_retried(
    tmp_path: Path,
) -> None:
    file = HistoryFile(tmp_path / "gone" / "history.jsonl", run="run")
    history = MachineHistory()
    file.append(history.all(), history.before)
    (tmp_path / "gone").mkdir()
    file.append(history.all(), history.before)
    assert (tmp_path / "gone" / "history.jsonl").exists()
