"""After a power cut at any moment, no torn shard is sealed and no promise is broken.

A volume lives through a story on a recording file system. Each state in which the power may have
left its medium is laid out in shared memory, opened as a volume, and judged. The last test takes
out one sync after the other and expects that the judge notices: each of them is needed.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.errors import ImageError, KeepstepError
from keepstep.steps import Epoch, EpochId, shard_name
from keepstep_sidecar.volume import files
from keepstep_sidecar.volume.files import IoMode
from keepstep_sidecar.volume.run_record import RunRecord
from keepstep_sidecar.volume.run_tree import VolumeScan, is_step
from keepstep_sidecar.volume.volume import SHARD, Volume
from tests.harness import control_of, layout_of, verify_image
from tests.volume.images import EPOCH, RUN, Slot, empty_slot, load, make_layout, staged, step_id
from tests.volume.powercut import Crash, Entry, Note, Recorder, crashes, without_syncs_after

WORLD = 2
SLOTS = {
    (rank, step): staged(make_layout(rank=rank, world=WORLD, parameters=1000), step)
    for rank in range(WORLD)
    for step in (1, 2, 3)
}
PASSED: set[tuple[str, str]] = set()
"""The fault points, and the functions that have them."""
LATER_EPOCH = Epoch(EpochId(2, "0badcafe"), step_id(2))
ENDS = {1: "retiring 1", 2: "losing 2"}
"""From here on a step need not be visible, and of its shards only rank 0's of step 2 must stay."""


@contextlib.contextmanager
def recorded(root: Path) -> Iterator[tuple[Volume, Recorder]]:
    """A volume on a recording file system, which also notes each fault point."""
    root.mkdir()
    recorder = Recorder(root)
    volume = Volume(root, run=RUN, filesystem=recorder, engine=IoMode.BUFFERED)

    class Noted(dict[tuple[str, int], str]):
        def get(self, passed: tuple[str, int]) -> None:  # type: ignore[override]
            recorder.note(f"point {passed[0]}")
            frame = sys._getframe(3 if sys._getframe(2).f_code.co_name == "_point" else 2)
            PASSED.add((passed[0], frame.f_code.co_qualname))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_armed", Noted({("none", 1): "kill"}))
        yield volume, recorder
    volume.close()


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> list[Entry]:
    """Steps 1 and 2 are written and published, 1 is retired, 3 is written by one rank only; then
    a shard of step 2 is found broken, and a new epoch begins."""
    with recorded(tmp_path_factory.mktemp("volume") / RUN) as (volume, recorder):
        volume.save_record(RunRecord(run=RUN, epochs=(EPOCH,)))
        recorder.note("recorded 1")
        _write_and_publish(volume, recorder, 1)
        _write_and_publish(volume, recorder, 2)
        _retire(volume, recorder, reuse=False)
        _write(volume, recorder, SLOTS[0, 3])
        recorder.note("losing 2")
        volume.quarantine_file(volume.root / str(step_id(2)) / shard_name(1, WORLD), "digest")
        recorder.note("recording 2")
        volume.save_record(volume.record.with_added_epochs(LATER_EPOCH))
        recorder.note("recorded 2")
    return recorder.log


@pytest.fixture(scope="module")
def reusing(tmp_path_factory: pytest.TempPathFactory) -> list[Entry]:
    """Step 1 is retired, and step 2 is written over it."""
    with recorded(tmp_path_factory.mktemp("reusing") / RUN) as (volume, recorder):
        _write(volume, recorder, SLOTS[0, 1])
        _retire(volume, recorder, reuse=True)
        _write(volume, recorder, SLOTS[0, 2])
    return recorder.log


def _retire(volume: Volume, recorder: Recorder, *, reuse: bool) -> None:
    recorder.note("retiring 1")
    volume.delete_step(step_id(1), reuse=reuse)
    recorder.note("retired 1")


def _write_and_publish(volume: Volume, recorder: Recorder, step: int) -> None:
    for rank in range(WORLD):
        _write(volume, recorder, SLOTS[rank, step])
    volume.publish_step(step_id(step))
    recorder.note(f"published {step}")


def _write(volume: Volume, recorder: Recorder, slot: Slot) -> None:
    volume.write(slot.view, slot.layout, slot.control)
    recorder.note(f"durable {slot.control.rank} {slot.control.step}")


# --- the judge ---------------------------------------------------------------------------------


def judge(crash: Crash, root: Path) -> list[str]:
    """What is wrong with a medium that the power has left like this."""
    crash.make(root)
    wrong = _sealed_but_torn(root) + _incomplete_in_sight(root)
    try:
        volume = Volume(root, run=RUN, engine=IoMode.BUFFERED)
    except KeepstepError as error:
        return [f"moment {crash.moment}: cannot be opened: {error}"]
    try:
        scan = volume.scan()
        wrong += [f"refused: {problem.error}" for problem in scan.problems]
        wrong += _not_bit_equal(volume, scan)
        wrong += _promises_broken(set(crash.notes), scan, volume.record)
        wrong += [f"swept too little: {path}" for path in root.rglob(".rank-*")]
    finally:
        volume.close()
    return [f"moment {crash.moment}: {text}" for text in wrong]


def _sealed_but_torn(root: Path) -> list[str]:
    """Files under any name, temporary ones too, whose seal is valid though bytes are missing."""
    wrong = []
    for path in root.rglob("*rank-*"):
        try:
            layout = layout_of(path)
            control_of(path)
        except ImageError:
            continue
        try:
            verify_image(memoryview(path.read_bytes()), layout)
        except ImageError as error:
            wrong.append(f"sealed but torn: {error}")
    return wrong


def _incomplete_in_sight(root: Path) -> list[str]:
    shards = {shard_name(rank, WORLD) for rank in range(WORLD)}
    steps = [path for path in root.iterdir() if is_step(path.name)]
    return [
        f"incomplete, but visible: {path.name}"
        for path in steps
        if {path.name for path in path.iterdir()} != shards
    ]


def _not_bit_equal(volume: Volume, scan: VolumeScan) -> list[str]:
    wrong = []
    for shard in scan.shards:
        slot = SLOTS[shard.rank, shard.step_id.step]
        view = empty_slot(slot.layout)
        load(volume, shard.path, view)
        if view[: slot.layout.digests_begin] != slot.view[: slot.layout.digests_begin]:
            wrong.append(f"not what was staged: {shard.path}")
    return wrong


def _promises_broken(notes: set[str], scan: VolumeScan, record: RunRecord) -> list[str]:
    found = {(shard.rank, shard.step_id.step): shard.published for shard in scan.shards}
    wrong = []
    for rank, step in SLOTS:
        hidden = ENDS.get(step, "never") in notes
        lost = hidden and (rank, step) != (0, 2)
        if f"durable {rank} {step}" in notes and not lost and (rank, step) not in found:
            wrong.append(f"lost: rank {rank}, step {step}")
        if f"published {step}" in notes and not hidden and not found.get((rank, step)):
            wrong.append(f"not published: rank {rank}, step {step}")
    if "retired 1" in notes and any(step == 1 and shown for (_, step), shown in found.items()):
        wrong.append("retired, but visible: step 1")
    if "recorded 1" in notes and EPOCH not in record.epochs:
        wrong.append("epoch 1 is forgotten")
    if ("recorded 2" in notes) > (LATER_EPOCH in record.epochs):
        wrong.append("epoch 2 is forgotten")
    return wrong


def judged(log: list[Entry], memory: Path, *, seed: int = 20240229) -> Iterator[list[str]]:
    """The verdict on each state of `log`."""
    for number, crash in enumerate(crashes(log, seed=seed)):
        root = memory / str(number) / RUN
        try:
            yield judge(crash, root)
        finally:
            shutil.rmtree(root.parent)


# --- the tests ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("log", "reusing")
def test_every_function_in_the_shard_state_table_causes_its_transition() -> None:
    assert {(row.event, row.where) for row in SHARD if "." in row.event} <= PASSED


@pytest.mark.timeout(300)
def test_no_power_cut_breaks_a_guarantee(log: list[Entry], memory_dir: Path) -> None:
    verdicts = list(judged(log, memory_dir))
    assert [text for verdict in verdicts for text in verdict] == []
    assert len(verdicts) > 800, "the story has become too short to prove anything"


@pytest.mark.timeout(300)
def test_no_power_cut_breaks_a_guarantee_when_a_spare_file_is_overwritten(
    reusing: list[Entry], memory_dir: Path
) -> None:
    assert "point spare.sync" in {note.text for note in reusing if isinstance(note, Note)}
    verdicts = list(judged(reusing, memory_dir))
    assert [text for verdict in verdicts for text in verdict] == []
    assert len(verdicts) > 800, "as above"


def test_omitting_the_sync_before_a_spare_file_is_overwritten_breaks_a_guarantee(
    reusing: list[Entry], memory_dir: Path
) -> None:
    careless = without_syncs_after(reusing, lambda note: note == "point spare.sync")
    assert any(judged(careless, memory_dir))


@pytest.mark.parametrize(
    "point",
    [
        *(row.event for row in SHARD if row.event.endswith("sync") and row.states != "hidden"),
        "write.data-sync",
        "record.data-sync",
        "record.directory-sync",
    ],
)
@pytest.mark.timeout(300)
def test_omitting_any_sync_breaks_a_guarantee(
    log: list[Entry], memory_dir: Path, point: str
) -> None:
    careless = without_syncs_after(log, lambda note: note == f"point {point}")
    assert any(judged(careless, memory_dir)), f"nothing goes wrong without the sync at {point}"


def test_the_simulated_file_system_ends_in_the_state_of_the_real_one(
    log: list[Entry], memory_dir: Path
) -> None:
    """The last state that all syncs allow is the one that the real file system had."""
    *_, last = crashes(log, seed=0)
    last.make(memory_dir / RUN)
    volume = Volume(memory_dir / RUN, run=RUN, engine=IoMode.BUFFERED)
    found = [(shard.step_id, shard.rank, shard.published) for shard in volume.scan().shards]
    volume.close()
    assert found == [(step_id(2), 0, False), (step_id(3), 0, False)]
