"""`keepstep run` where the machine has huge pages."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from keepstep.steps import StepId
from keepstep_sidecar.memory.slot_directories import USUAL_MOUNT
from tests import hugetlbfs
from tests.cli.conftest import Keepstep

TRAIN = """
import os, signal, sys, torch, keepstep
torch.manual_seed(0)
model = torch.nn.Linear(4096, 4096)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
checkpointer = keepstep.Checkpointer({"model": model, "optimizer": optimizer})
restored = checkpointer.restore()
print("from", restored and restored.step, flush=True)
last, die_at = int(sys.argv[1]), int(sys.argv[2])
for step in range(0 if restored is None else restored.step + 1, last):
    optimizer.zero_grad()
    model(torch.ones(1, 4096)).sum().backward()
    optimizer.step()
    kept = checkpointer.save(step)
    if kept and 0 <= die_at <= step:
        checkpointer.wait(step, "staged", timeout=60)
        os.kill(os.getpid(), signal.SIGKILL)
checkpointer.close()
print(f"{model.weight.double().sum().item():.17g}", flush=True)
"""


@pytest.fixture
def huge(keepstep: Keepstep) -> Iterator[Keepstep]:
    """Its processes see a hugetlbfs at its usual place, which nobody else does."""
    made = not USUAL_MOUNT.exists()
    with hugetlbfs.or_skip(), hugetlbfs.turn(), hugetlbfs.reserved(200):
        if made:
            USUAL_MOUNT.mkdir()
        script = f'mount -t hugetlbfs -o pagesize=2M none {USUAL_MOUNT} && exec "$@"'
        keepstep.prefix = ("unshare", "--mount", "sh", "-c", script, "sh")
        try:
            yield keepstep
        finally:
            keepstep.prefix = ()
            if made:
                with contextlib.suppress(OSError):
                    USUAL_MOUNT.rmdir()


def mapped(process: psutil.Process) -> set[str]:
    return {Path(one.path).parts[1] + "/" + Path(one.path).parts[2] for one in process.memory_maps()
            if one.path.endswith(".slot")}  # fmt: skip


def test_a_run_goes_on_from_huge_pages_after_kill_9(huge: Keepstep) -> None:
    huge.script("train.py", TRAIN)
    plain = huge(
        "run", "--run", "plain", "--small-pages", "--", sys.executable, "train.py", "12", "-1"
    )
    command = ("run", "--run", "killed", "--", sys.executable, "train.py", "12", "3")
    failed = huge(*command, code=137)
    assert failed.stdout.splitlines() == ["from None"]
    huge.prefix = ()
    status = huge.json("status", "--run", "killed")
    assert status["sidecar"]["locked"] == "hugepages"
    sidecar = psutil.Process(status["sidecar"]["pid"])
    assert {path.split("/")[1] for path in mapped(sidecar)} == {"hugepages"}
    huge("stop", "--run", "killed")
    again = huge(*command[:-1], "-1")
    assert again.stdout.splitlines()[-1] == plain.stdout.splitlines()[-1]


def test_a_command_that_does_not_see_huge_pages_keeps_its_steps_on_small_ones(
    huge: Keepstep,
) -> None:
    huge.script("train.py", TRAIN)
    blind = ("unshare", "--mount", "sh", "-c", f'umount {USUAL_MOUNT} && exec "$@"', "sh")
    done = huge("run", "--", *blind, sys.executable, "train.py", "12", "5", code=137)
    assert "cannot be mapped" not in done.stderr
    huge.prefix = ()
    assert StepId.parse(huge.json("status")["sidecar"]["ranks"][0]["staged"]).step >= 5
    huge("stop")
