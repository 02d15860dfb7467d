"""Bases in an archive: sent once, beside all steps that refer to them, and brought back."""

from __future__ import annotations

import functools
import os
import random
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from keepstep.core.shard import Shard
from keepstep.errors import FormatError, RestoreError
from keepstep.image import BaseRef, Layout, TensorRole, TensorSpec
from keepstep.image.layout import CHUNK_BYTES
from keepstep.steps import make_base_file_name, shard_name
from keepstep_sidecar.config.sidecar import ArchiveConfig
from keepstep_sidecar.tiers import verified_chunks
from keepstep_sidecar.tiers.archive.step_record import (
    StepRecord,
    TwinDelta,
    twin_delta_name,
)
from keepstep_sidecar.volume.run_tree import LocalShard
from keepstep_sidecar.volume.volume import SealedMemoryImage, Volume
from tests import warm
from tests.archive.conftest import Bucket, running, send
from tests.cli.conftest import Keepstep
from tests.frozen.models import equal, made, train
from tests.harness import SidecarProcess, eventually, flip, matching
from tests.lib.training import begun
from tests.volume.images import EPOCH, RUN, empty_slot, make_layout, staged, step_id, write_noise

TRAIN = Path(__file__).parents[1] / "frozen/train.py"


class Place:
    """An archive, and a machine that sends each step there."""

    def __init__(self, sidecar: SidecarProcess, root: Path, *options: str) -> None:
        self.sidecar, self.root, self.options = sidecar, root, options

    def start(self, *options: str) -> None:
        self.sidecar.start(*self.options, *options)

    def kill(self) -> None:
        """The sidecar dies. First it sees that the trainer has ended, or the next one would wait
        for a life that may go on."""
        eventually(lambda: not matching(self.root, f"{self.sidecar.run}/lives/*"))
        self.sidecar.kill()

    def empty(self, *options: str) -> None:
        """Another machine in the place of this one: nothing but the archive is left."""
        self.kill()
        self.sidecar.lose_memory()
        shutil.rmtree(self.sidecar.root)
        self.start(*options)

    def status(self) -> Any:
        return self.sidecar.get("/v1/status")["tiers"]["archive"]

    def steps(self) -> list[Path]:
        return [path.parent for path in matching(self.root, f"{self.sidecar.run}/0*/step.json")]

    def bases(self) -> list[Path]:
        return matching(self.root, f"{self.sidecar.run}/0*/base-*")


@pytest.fixture(params=["directory", "s3"])
def place(
    request: pytest.FixtureRequest,
    sidecars: Callable[[], SidecarProcess],
    archive_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Place:
    sidecar = sidecars()
    monkeypatch.setenv("KEEPSTEP_SOCKET", str(sidecar.socket))
    often = ("--archive-every", "1", "--persist-every", "1")
    if request.param == "directory":
        return Place(sidecar, archive_dir, "--archive", str(archive_dir), *often)
    bucket: Bucket = request.getfixturevalue("bucket")
    url = ("--archive", f"s3://{bucket.name}/runs", "--archive-endpoint", bucket.proxy.endpoint)
    region = ("--archive-region", "us-east-1")
    return Place(sidecar, bucket.directory / "runs", *url, *region, *often)


only_directory = pytest.mark.parametrize("place", ["directory"], indirect=True)


def live(*, seed: int = 0, steps: range, change: int | None = None) -> torch.nn.Module:
    """A life that keeps these steps in the archive; at `change`, a frozen tensor changes."""
    model, optimizer = made(seed)
    with begun({"model": model, "optimizer": optimizer}, strict=True, frozen_once=True) as kept:
        for step in steps:
            if step == change:
                with torch.no_grad():
                    model.layers[0].base.weight.add_(1)
            train(model, optimizer)
            kept.save(step)
            kept.wait(step, "archived")
    return model


def restored(seed: int = 9) -> tuple[torch.nn.Module, int]:
    model, optimizer = made(seed)
    state = {"model": model, "optimizer": optimizer}
    with begun(state, strict=True, frozen_once=True) as kept:
        return model, kept.epoch.parent.step


def test_a_base_is_uploaded_once_and_stored_beside_each_step(place: Place) -> None:
    place.start("--archive-keep", "9")
    live(steps=range(1))
    first = place.status()["sent_bytes"]
    model = live(seed=1, steps=range(1, 5))
    each = (place.status()["sent_bytes"] - first) / 4
    assert each <= 0.02 * first
    assert len(place.steps()) == len(place.bases()) == 5
    newest = max(place.steps())
    found = {}
    for path in newest.glob("*.safetensors"):
        tensors = load_file(path)
        assert not tensors.keys() & found.keys()
        found |= tensors
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[f"model.{name}"], tensor)


def test_a_machine_that_lost_all_data_resumes_from_the_archive_without_uploading_the_base_again(
    place: Place,
) -> None:
    place.start()
    before = live(steps=range(3))
    place.empty()
    model, step = restored()
    assert (step, equal(before, model)) == (2, True)
    after = live(seed=3, steps=range(3, 5))
    assert place.status()["sent_bytes"] < place.bases()[0].stat().st_size / 10
    place.empty()
    model, step = restored()
    assert (step, equal(after, model)) == (4, True)


@only_directory
def test_steps_in_a_directory_archive_share_one_base_file_that_is_deleted_with_the_last(
    place: Place,
) -> None:
    place.start("--archive-keep", "2")
    live(steps=range(6), change=3)
    files = eventually(lambda: len(place.steps()) <= 3 and place.bases(), what="older ones go")
    kept = {path.stat().st_ino for path in files if int(path.parent.name[-9:]) >= 3}
    assert len(kept) == 1
    assert kept == {path.stat().st_ino for path in files}, "the first base went with its steps"


@pytest.mark.parametrize("how", ["gone", "cut", "changed"])
def test_a_step_whose_base_is_lost_is_not_restored_and_an_older_one_is(
    place: Place, how: str, keepstep: Keepstep
) -> None:
    place.start()
    live(steps=range(2))
    older, step = restored()
    assert step == 1
    live(seed=2, steps=range(2, 3), change=2)
    (base,) = max(place.steps()).glob("base-*")
    if how == "gone":
        base.unlink()
    elif how == "cut":
        os.truncate(base, base.stat().st_size - 4096)
    else:
        flip(base, base.stat().st_size // 2)
    place.empty()
    model, step = restored()
    assert (step, equal(older, model)) == (1, True)
    output = place.sidecar.text() if how == "changed" else listed(place, keepstep)
    assert f"{base.parent.name}/{base.name}" in output


def listed(place: Place, keepstep: Keepstep) -> str:
    found = keepstep.json("archive", "ls", "--archive", str(place.root), "--run", "run")
    return " ".join(step["fault"] for step in found["steps"])


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_an_archived_base_that_was_found_damaged_is_not_reused_for_new_steps(place: Place) -> None:
    place.start()
    live(steps=range(3))
    _, older, newer = sorted(place.bases())
    flip(newer, newer.stat().st_size // 2)
    place.empty()
    assert restored()[1] == 1
    live(seed=3, steps=range(2, 3))
    newest = max(place.bases(), key=lambda path: path.stat().st_mtime_ns)
    assert newest not in (older, newer)
    assert newest.read_bytes()[:-4096] == older.read_bytes()[:-4096]


def test_the_only_step_without_its_base_is_an_error_that_names_it(place: Place) -> None:
    place.start()
    live(steps=range(1))
    (base,) = place.bases()
    base.unlink()
    place.empty()
    with pytest.raises(RestoreError, match=rf"{base.name} is missing"):
        restored()
    assert place.steps(), "nothing was deleted"


def test_a_base_that_the_archive_lost_is_uploaded_again_from_the_machine(place: Place) -> None:
    place.start()
    live(steps=range(2))
    (base,) = max(place.steps()).glob("base-*")
    size_bytes = base.stat().st_size
    place.kill()
    base.unlink()
    place.start()
    eventually(base.exists, within_s=60, what="it is sent, or copied from the other step")
    assert base.stat().st_size == size_bytes
    before, step = restored()
    place.empty()
    model, step = restored()
    assert (step, equal(before, model)) == (1, True)


def test_a_fork_begins_with_the_base_of_the_other_run(
    place: Place, sidecars: Callable[..., SidecarProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    place.start()
    before = live(steps=range(2))
    place.sidecar.terminate()
    place.sidecar.lose_memory()
    there = sorted((base, base.stat().st_mtime_ns) for base in place.bases())
    fork = Place(sidecars("fork"), place.root, *place.options)
    monkeypatch.setenv("KEEPSTEP_SOCKET", str(fork.sidecar.socket))
    fork.start("--restore-from", "run/latest")
    model, step = restored()
    assert (step, equal(before, model)) == (1, True)
    after = live(seed=4, steps=range(2, 4))
    assert len(fork.bases()) == 2
    assert sorted((base, base.stat().st_mtime_ns) for base in place.bases()) == there
    fork.empty()
    model, step = restored()
    assert (step, equal(after, model)) == (3, True)


@only_directory
def test_a_trainer_killed_at_random_moments_reaches_the_losses_of_an_uninterrupted_run(
    place: Place, sidecars: Callable[..., SidecarProcess], tmp_path: Path
) -> None:
    def life(sidecar: SidecarProcess, out: Path) -> warm.Process:
        variables = {**os.environ, "KEEPSTEP_SOCKET": str(sidecar.socket), "OMP_NUM_THREADS": "1"}
        with (tmp_path / "trainer.log").open("ab") as log:
            return warm.Process([str(TRAIN), "25", str(out)], stdout=log, env=variables)

    def losses(out: Path) -> list[list[str]]:
        return [line.split() for line in out.read_text().splitlines()] if out.exists() else []

    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    undisturbed = sidecars("other", memory=tmp_path / "memory").start()
    assert life(undisturbed, quiet).wait(60) == 0
    generator = random.Random(place.sidecar.memory.name)
    place.start()
    for _ in range(5):
        more = len(losses(killed)) + generator.randrange(1, 6)
        process = life(place.sidecar, killed)
        eventually(lambda more=more: len(losses(killed)) >= more, every_s=0.001)
        process.kill()
        process.wait()
        if generator.random() < 0.7 and place.steps():
            place.empty()
    assert life(place.sidecar, killed).wait(60) == 0, (tmp_path / "trainer.log").read_text()
    seen, expected = losses(killed), dict(losses(quiet))
    assert all(loss == expected[step] for step, loss in seen)
    assert {step for step, _ in seen} == expected.keys()


# --- the command -----------------------------------------------------------------------------


@pytest.fixture
def trained(keepstep: Keepstep, archive_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Keepstep:
    """The command beside a run of two archived steps with a base, and without its drive."""
    keepstep.script(
        "train.py",
        "import keepstep, torch\n"
        "from tests.frozen.models import made, train\n"
        "model, optimizer = made()\n"
        "parts = {'model': model, 'optimizer': optimizer}\n"
        "with keepstep.Checkpointer(parts, frozen_once=True) as checkpointer:\n"
        "    checkpointer.restore()\n"
        "    for step in range(2):\n"
        "        train(model, optimizer)\n"
        "        checkpointer.save(step)\n"
        "        checkpointer.wait(step, 'archived')\n"
        "torch.save(model.state_dict(), 'model.pt')\n",
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("KEEPSTEP_ARCHIVE", str(archive_dir))
    keepstep("run", "--archive-every", "1", "--", sys.executable, "train.py")
    keepstep("stop", code=None)
    shutil.rmtree(keepstep.directory)
    return keepstep


def test_the_command_lists_verifies_pulls_and_exports_steps_with_bases(
    trained: Keepstep, archive_dir: Path
) -> None:
    model = {f"model.{k}": v for k, v in torch.load(trained.home / "model.pt").items()}
    (step,) = [step for step in trained.json("archive", "ls")["steps"] if step["step"] == 1]
    assert (step["complete"], step["shards"]) == (True, 1)
    assert step["bytes"] > 16 << 20
    assert "every digest is right" in trained("archive", "verify").stdout
    trained("archive", "pull", "1", "out")
    found = {}
    for path in matching(trained.home / "out", "*/*.safetensors"):
        found |= load_file(path)
    assert all(torch.equal(found[name], value) for name, value in model.items())
    trained("export", "1", "--archive", str(archive_dir), "--run", "train", "--to", "exported")
    exported = load_file(next((trained.home / "exported").glob("*.safetensors")))
    assert {f"model.{name}" for name in exported} == model.keys()
    (base,) = matching(archive_dir, f"*/{step['id']}/base-*")
    flip(base, base.stat().st_size // 2)
    assert base.name in trained("archive", "verify", "1", code=1).stderr
    assert base.name in trained("archive", "pull", "1", "damaged", code=1).stderr


# --- the record ------------------------------------------------------------------------------


def record(**more: Any) -> StepRecord:
    archived, base = (
        step_id(10),
        Shard(step_id=step_id(3), rank=0, world=2, size_bytes=9, root="b" * 32),
    )
    shards = tuple(
        Shard(step_id=archived, rank=rank, world=2, size_bytes=5, root=f"{rank:032x}", base=shard)
        for rank, shard in enumerate((base, replace(base, rank=1)))
    )
    return StepRecord(
        run=RUN, id=archived, world=2, epochs=(EPOCH,), shards=shards, written_at=1.7e9, **more
    )


def test_a_step_record_with_bases_survives_a_json_round_trip() -> None:
    written = record(base_twins={1: TwinDelta(rank=0, stored_bytes=4)})
    assert StepRecord.from_json(written.to_json(), path="there") == written
    assert written.files == {
        shard_name(0, 2): 5, shard_name(1, 2): 5, make_base_file_name(0, 2): 9,
        twin_delta_name(1, 2, 0, is_base=True): 4,
    }  # fmt: skip


@pytest.mark.parametrize("of", [{0: 0}, {1: 2}, {1: 0, 0: 1}], ids=str)
def test_a_base_that_refers_to_a_base_without_a_complete_file_is_refused(
    of: dict[int, int],
) -> None:
    twins = {rank: TwinDelta(rank=whose, stored_bytes=1) for rank, whose in of.items()}
    with pytest.raises(FormatError, match="has no whole file"):
        StepRecord.from_json(record(base_twins=twins).to_json(), path="there")


# --- twins -----------------------------------------------------------------------------------

CHUNKS = 6


def base_of(rank: int) -> SealedMemoryImage:
    """The base of one of two replicas; its first piece names the rank."""
    values = (CHUNKS * CHUNK_BYTES - 100_000) // 4
    tensors = [TensorSpec("model.frozen", "F32", (values,), TensorRole.PARAMS)]
    layout = Layout.build(tensors, rank=rank, world=2, twins=[1 - rank], is_base=True)
    view = empty_slot(layout)
    write_noise(view[: layout.digests_begin], "0")
    view[: len(layout.header)] = layout.header
    control = staged(make_layout(rank=rank), 0).control
    control = replace(control, layout=layout.id, extras_bytes=0)
    view[layout.control_begin :] = control.to_bytes()
    return SealedMemoryImage(view=view, layout=layout, control=control)


def write(volume: Volume, step: int) -> dict[int, LocalShard]:
    for rank in range(2):
        base, slot = base_of(rank), staged(make_layout(rank=rank), step)
        control = replace(slot.control, base=BaseRef.of(base.control, base.layout))
        slot.view[slot.layout.control_begin :] = control.to_bytes()
        volume.write(slot.view, slot.layout, control, base=base)
    return {shard.rank: shard for shard in volume.scan().shards if shard.step_id.step == step}


async def test_only_the_first_replica_stores_a_complete_base(
    local: Volume, archive_dir: Path
) -> None:
    config = ArchiveConfig(url=str(archive_dir), every=1)
    async with running(config) as tier:
        for step in (10, 20):
            await send(tier, write(local, step), within_s=60)
            directory = archive_dir / RUN / str(step_id(step))
            difference = directory / twin_delta_name(1, 2, 0, is_base=True)
            assert difference.stat().st_size < 3 * CHUNK_BYTES
            assert [path.name[:10] for path in directory.glob("base-*.safetensors")] == [
                "base-00000"
            ]
        held = await tier.scan()
        for shard in held.shards:
            (source,) = tier.sources(shard)
            base, beside = base_of(shard.rank), source.beside
            assert beside is not None
            view, end = empty_slot(base.layout), base.layout.digests_begin
            load = functools.partial(verified_chunks.load_image, beside, view)
            await verified_chunks.run_cancellable(
                None, lambda cancel, load=load: load(cancel=cancel)
            )
            assert view[:end] == base.view[:end]
