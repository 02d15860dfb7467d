"""A restore that takes its time says what it waits for."""

from __future__ import annotations

import logging

import pytest
from torch import nn

import keepstep
from keepstep.restore import collective
from tests.harness import torchrun
from tests.lib.training import bring_back, keep

LATE = """
import logging, os, pathlib, sys, time
import torch
import keepstep
from keepstep.restore import collective

collective.FIRST_S = 0.2
torch.distributed.init_process_group("gloo")
rank, seen = torch.distributed.get_rank(), pathlib.Path(sys.argv[1])

class Seen(logging.Handler):
    def emit(self, record):
        seen.write_text(record.getMessage())

logging.getLogger("keepstep").addHandler(Seen())
while rank == 1 and not (seen.exists() and "waiting until" in seen.read_text()):
    time.sleep(0.01)
checkpointer = keepstep.Checkpointer({"model": torch.nn.Linear(2, 2)})
checkpointer.restore()
checkpointer.close()
torch.distributed.barrier()
os._exit(0)
"""


def test_rank_0_logs_that_another_rank_has_not_called_restore_yet(sidecar, tmp_path):
    script = tmp_path / "late.py"
    script.write_text(LATE)
    done = torchrun(2, script, tmp_path / "seen")
    assert done.returncode == 0, done.stderr
    assert "waiting until all ranks have called it" in (tmp_path / "seen").read_text()


def test_a_rank_logs_what_its_restore_waits_for(sidecars, tmp_path, monkeypatch, caplog):
    sidecar = sidecars().start("--archive", str(tmp_path / "away"))
    monkeypatch.setenv("KEEPSTEP_SOCKET", str(sidecar.socket))
    monkeypatch.setattr(collective, "FIRST_S", 0.5)
    checkpointer = keepstep.Checkpointer({"m": nn.Linear(2, 2)})
    with (
        caplog.at_level(logging.WARNING, logger="keepstep"),
        pytest.raises(keepstep.RestoreError, match="away is not there"),
    ):
        checkpointer.restore()
    checkpointer.close()
    message = next(text for text in caplog.messages if "restore() goes on after" in text)
    assert "rank 0 waits: " in message
    assert "away is not there; mount it" in message


def test_a_quick_restore_logs_nothing_about_waiting(sidecar, caplog, monkeypatch):
    monkeypatch.setattr(collective, "FIRST_S", 60)  # what is quick depends on the machine
    keep({"m": nn.Linear(2, 2)})
    with caplog.at_level(logging.WARNING, logger="keepstep"):
        bring_back({"m": nn.Linear(2, 2)})
    assert "goes on after" not in caplog.text
