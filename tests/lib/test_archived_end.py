"""The last step is in the archive when `close` returns; a restore waits as long as it is told."""

from __future__ import annotations

import logging
import shutil

import pytest
import torch
from torch import nn

import keepstep
from tests.harness import files_below
from tests.lib.training import begun


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "archive"
    path.mkdir()
    return path


@pytest.fixture
def archiving(sidecars, archive, monkeypatch):
    """A sidecar that archives every 1000th step."""
    sidecar = sidecars().start("--archive", str(archive), "--archive-every", "1000")
    monkeypatch.setenv("KEEPSTEP_SOCKET", str(sidecar.socket))
    return sidecar


def train(steps, *, timeout=60.0, strict=False, unmount=None):
    """One life; `unmount`: an archive that goes away in the middle."""
    checkpointer = begun({"model": nn.Linear(8, 8)}, strict=strict)
    if unmount is not None:
        unmount.rename(unmount.with_name("gone"))
    for step in range(1, steps):
        checkpointer.save(step)
    checkpointer.close(timeout=timeout)


def complete(archive):
    return sorted(
        int(path.parent.name.rpartition("-")[2]) for path in files_below(archive, "step.json")
    )


def test_close_archives_the_last_step_outside_the_archive_interval(archiving, archive):
    train(8)
    assert complete(archive) == [7]


def test_close_warns_but_does_not_fail_when_the_archive_of_a_committed_run_is_unreachable(
    archiving, archive, caplog
):
    with caplog.at_level(logging.WARNING, logger="keepstep"):
        train(4, timeout=5.0, unmount=archive)
    (message,) = [
        record.getMessage() for record in caplog.records if "archive" in record.getMessage()
    ]
    for part in ("step 3 is committed", "goes on uploading", "the archive is behind"):
        assert part in message
    assert max(int(path.name.rpartition("-")[2]) for path in archiving.root.glob("0*")) == 3


def test_close_in_strict_mode_raises_when_the_last_step_is_not_archived(archiving, archive):
    with pytest.raises(keepstep.NotDurableError, match="step 3 is not archived"):
        train(4, timeout=5.0, strict=True, unmount=archive)


def test_a_restore_that_takes_too_long_names_the_option_to_raise(sidecars, monkeypatch):
    sidecar = sidecars().start()
    monkeypatch.setenv("KEEPSTEP_SOCKET", str(sidecar.socket))
    train(3)
    sidecar.kill()
    shutil.rmtree(sidecar.memory)
    sidecar.memory.mkdir()
    sidecar.start("--memory-limit", "4096")  # the image waits for memory that never comes
    monkeypatch.setenv("KEEPSTEP_RESTORE_TIMEOUT", "0.5")
    checkpointer = keepstep.Checkpointer({"model": nn.Linear(8, 8)})
    with pytest.raises(keepstep.RestoreError, match=r"in 0\.5 s; raise KEEPSTEP_RESTORE_TIMEOUT"):
        checkpointer.restore()


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_an_invalid_restore_timeout_is_refused(monkeypatch, text):
    monkeypatch.setenv("KEEPSTEP_RESTORE_TIMEOUT", text)
    with pytest.raises(keepstep.UsageError, match="KEEPSTEP_RESTORE_TIMEOUT"):
        keepstep.Checkpointer({"model": torch.nn.Linear(1, 1)})
