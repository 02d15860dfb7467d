"""The second job script of docs/slurm.md in a real Slurm: two nodes, of which one leads the run."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.harness import ROOT, eventually
from tests.slurm.cluster import Slurm

TRAIN = """
import sys, time
import torch
import keepstep

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
torch.manual_seed(rank)
model = torch.nn.Linear(64, 64)
checkpointer = keepstep.Checkpointer({f"model{rank}": model})
at = checkpointer.restore()
print("rank", rank, "from", at.step if at else None, flush=True)
for step in range(at.step + 1 if at else 0, int(sys.argv[1])):
    with checkpointer.mutating(), torch.no_grad():
        model.weight += 1.0
    torch.distributed.barrier()
    checkpointer.save(step)
    print("saved", step, flush=True)
    time.sleep(0.05)
checkpointer.close()
print("rank", rank, "done", flush=True)
torch.distributed.destroy_process_group()
"""
pytestmark = pytest.mark.timeout(600)

_STEPS = 200
_FOR_EVER = 1_000_000


def _submitted(slurm: Slurm, tmp_path: Path, *, steps: int) -> str:
    """The page's job on both nodes, once it has trained for 40 steps."""
    (tmp_path / "train.py").write_text(TRAIN)
    script = re.findall(
        "```bash\n#!/bin/bash\n(.*?)```", (ROOT / "docs" / "slurm.md").read_text(), re.S
    )[1]
    for named, here in {
        "--nodes=4": "--nodes=2",
        "/local/keepstep": str(slurm.local / "keepstep"),
        "--nproc-per-node 8": "--nproc-per-node 1",
        "train.py": f"{tmp_path / 'train.py'} {steps}",
        "\nexport MASTER": "\nexport GLOO_SOCKET_IFNAME=eth0\nexport MASTER",
    }.items():
        assert named in script
        script = script.replace(named, here)
    job = slurm.submit(script)
    eventually(
        lambda: "saved 40" in slurm.output(job), what=lambda: slurm.output(job), within_s=180
    )
    return job


def test_a_two_node_job_at_its_time_limit_is_requeued_and_loses_no_step(
    slurm: Slurm, tmp_path: Path
) -> None:
    job = _submitted(slurm, tmp_path, steps=_FOR_EVER)
    slurm.command("scontrol", "update", f"JobId={job}", "TimeLimit=2")  # the signal is due
    eventually(lambda: slurm.state(job) == "PENDING", what=lambda: slurm.story(job), within_s=180)
    finished = _finished(slurm, job)
    slurm.command("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    slurm.begin_soon(job)
    eventually(lambda: len(_starts(slurm, job)) == 4, what=lambda: slurm.story(job), within_s=180)
    slurm.command("scancel", job)
    (from_step,) = {int(step) for _, step in _starts(slurm, job)[2:]}
    story = f"but for the step that SIGTERM met: {finished}, {slurm.story(job)}"
    assert from_step >= finished - 1, story


@pytest.mark.parametrize("lost", ["n1", "n2"], ids=["the-leaders", "another"])
def test_a_two_node_job_at_its_time_limit_resumes_although_a_node_lost_its_drive(
    slurm: Slurm, tmp_path: Path, lost: str
) -> None:
    job = _submitted(slurm, tmp_path, steps=_STEPS)
    slurm.command("scancel", "--batch", "--signal=TERM", job)  # as --signal=B:TERM@180 does
    _goes_on(slurm, job, lost)


def test_a_requeued_two_node_job_resumes_although_the_leader_node_lost_its_drive(
    slurm: Slurm, tmp_path: Path
) -> None:
    job = _submitted(slurm, tmp_path, steps=_STEPS)
    slurm.command("scontrol", "requeue", job)
    _goes_on(slurm, job, lost="n1")


def _goes_on(slurm: Slurm, job: str, lost: str) -> None:
    """A job that was sent back into the queue comes to its end. `lost`: the node whose drive is
    empty by then."""
    eventually(lambda: slurm.state(job) == "PENDING", what=lambda: slurm.story(job), within_s=180)
    eventually(
        slurm.idle, what=lambda: f"no node ends a job any more: {slurm.story(job)}", within_s=180
    )
    drive = slurm.scratch / f"local-{lost}" / "keepstep"

    def emptied() -> bool:
        shutil.rmtree(drive, ignore_errors=True)  # a sidecar may still be at its end
        return not drive.exists()

    eventually(emptied)
    slurm.begin_soon(job)
    eventually(
        lambda: slurm.state(job) == "COMPLETED",
        what=lambda: slurm.story(job),
        every_s=1.0,
        within_s=240,
    )
    starts = _starts(slurm, job)
    assert sorted(starts[:2]) == [("0", "None"), ("1", "None")]
    assert len(starts) == 4, slurm.output(job)
    (from_step,) = {int(step) for _, step in starts[2:]}
    assert from_step > 20, slurm.output(job)
    assert slurm.output(job).count("done") == 2


def _starts(slurm: Slurm, job: str) -> list[tuple[str, str]]:
    """Rank, and the step that it goes on from, of each trainer that has begun."""
    return re.findall(r"rank (\d) from (\S+)", slurm.output(job))


def _finished(slurm: Slurm, job: str) -> int:
    """The newest step that both ranks have finished."""
    saved = Counter(re.findall(r"saved (\d+)", slurm.output(job)))
    return max(int(step) for step, times in saved.items() if times == 2)
