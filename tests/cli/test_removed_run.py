"""`rm -rf DIR` and the same command again: the run begins at step 0, and no memory is left."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import warm
from tests.cli.conftest import TRAIN, Keepstep
from tests.harness import eventually
from tests.volume.drives import command, made

FREED = (
    "its directory was removed, so what an earlier run of that name had left in memory was freed"
)


def fail(keepstep: Keepstep, *options: str) -> None:
    """A run that is killed at step 3, whose sidecar lingers."""
    keepstep.script("train.py", TRAIN)
    keepstep("run", *options, "--", warm.python(), "train.py", "6", "3", code=137)
    assert len(keepstep.sidecars()) == 1


def again(keepstep: Keepstep, *options: str) -> tuple[str, str]:
    done = keepstep("run", *options, "--", warm.python(), "train.py", "6", "-1")
    return done.stdout, done.stderr


def remove(directory: Path) -> None:
    """Its sidecar may just be retiring a step: then once more, as a person would."""

    def gone() -> bool:
        shutil.rmtree(directory, ignore_errors=True)
        return not directory.exists()

    eventually(gone, what="the directory is removed")


def test_the_sidecar_of_a_removed_run_ends_and_frees_its_memory(keepstep: Keepstep) -> None:
    fail(keepstep)
    remove(keepstep.directory)
    eventually(lambda: not keepstep.sidecars(), what="the sidecar ends")
    assert not list(keepstep.memory("train").glob("rank-*"))
    assert not keepstep.directory.exists(), "nothing makes it again"
    out, err = again(keepstep)
    assert "from None" in out
    assert FREED not in err, "there was nothing left"


def test_a_run_that_starts_after_its_directory_was_removed_begins_at_step_0_with_a_message(
    keepstep: Keepstep,
) -> None:
    fail(keepstep)
    sidecar = keepstep.sidecar()
    sidecar.suspend()  # it has not noticed
    shutil.rmtree(keepstep.directory)
    with keepstep.start("run", "--", warm.python(), "train.py", "6", "-1") as process:
        sidecar.resume()
        out, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert "from None" in out


def test_a_new_directory_does_not_reuse_the_memory_of_a_removed_run(
    keepstep: Keepstep,
) -> None:
    fail(keepstep)
    keepstep.sidecar().send_signal(signal.SIGKILL)
    eventually(lambda: not keepstep.sidecars())
    shutil.rmtree(keepstep.directory)
    out, err = again(keepstep)
    assert "from None" in out
    assert err.count(FREED) == 1


def test_stop_frees_the_memory_of_a_removed_run(keepstep: Keepstep) -> None:
    fail(keepstep)
    keepstep.sidecar().send_signal(signal.SIGKILL)
    eventually(lambda: not keepstep.sidecars())
    shutil.rmtree(keepstep.directory)
    output = keepstep("stop", "--dir", str(keepstep.directory)).stdout
    assert "run 'train': its directory was removed; its memory is freed now" in output
    assert not keepstep.memory("train").exists()
    assert "no run is kept" in keepstep("stop", "--dir", str(keepstep.directory), code=2).stderr


@pytest.mark.root
@pytest.mark.parametrize(("memory_stays", "begins"), [(True, "from 3"), (False, "from None")])
def test_a_run_on_one_machine_with_a_formatted_drive_loses_only_steps_not_in_memory(
    keepstep: Keepstep,
    mounted: Callable[..., Path],
    tmp_path: Path,
    memory_stays: bool,
    begins: str,
) -> None:
    """As `torch.save` to that drive would: nothing else knows that there were steps."""
    image = made(tmp_path / "image", size_bytes=64 << 20)
    drive = mounted("drive", "-o", "loop", image)
    fail(keepstep, "--volume", str(drive))
    assert list(drive.glob("train/*-000000002"))
    keepstep.sidecar().send_signal(signal.SIGKILL)
    eventually(lambda: not keepstep.sidecars())
    if not memory_stays:
        shutil.rmtree(keepstep.memory("train"))
    command("mount", "-o", "loop", made(tmp_path / "another", size_bytes=64 << 20), drive)
    try:
        out, err = again(keepstep, "--volume", str(drive))
        assert begins in out
        assert ("it can go on from step 3" in err) is memory_stays
    finally:
        keepstep.end()
        command("umount", "--lazy", drive)
