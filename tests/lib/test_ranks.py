"""Several ranks: the same step of the same epoch on all, by RANK, or a clear error on all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import keepstep
from tests.harness import matching, torchrun

SCRIPT = Path(__file__).parent / "ddp_script.py"
UNEQUAL = Path(__file__).parent / "unequal_script.py"


def losses(log, rank):
    lines = Path(f"{log}.{rank}").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


def test_two_ranks_resume_together_after_one_was_killed(sidecar, tmp_path):
    reference, log = tmp_path / "reference", tmp_path / "log"
    done = torchrun(2, SCRIPT, 8, -1, reference, KEEPSTEP_SOCKET="")
    assert done.returncode == 0, done.stderr
    assert torchrun(2, SCRIPT, 8, 4, log).returncode != 0
    done = torchrun(2, SCRIPT, 8, -1, log)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert losses(log, rank) == losses(reference, rank)
        steps = [
            json.loads(line)["step"] for line in Path(f"{log}.{rank}").read_text().splitlines()
        ]
        assert steps[0] == 0
        assert len(steps) <= 10, f"more than the step in flight was done again: {steps}"


def test_a_run_resumes_from_the_same_step_at_another_world_size(sidecar, tmp_path):
    done = torchrun(2, SCRIPT, 3, -1, tmp_path / "log")
    assert done.returncode == 0, done.stderr
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpointer = keepstep.Checkpointer({"model": model, "optimizer": optimizer})
    at = checkpointer.restore()
    checkpointer.close()
    assert (at.step, at.tier) == (2, "memory")
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert all(state["step"] == 3 for state in optimizer.state.values())


def test_a_rollback_requires_the_same_step_on_all_ranks(sidecar, tmp_path):
    reference, log = tmp_path / "reference", tmp_path / "log"
    assert torchrun(2, SCRIPT, 6, -1, reference, KEEPSTEP_SOCKET="").returncode == 0
    assert torchrun(2, SCRIPT, 4, -1, log).returncode == 0
    done = torchrun(2, SCRIPT, 6, -1, log, ASKED="2 3")
    assert done.returncode != 0
    text = "all ranks go back to the same step, but it is restore(step=2) on rank 0"
    assert done.stderr.count(f"UsageError: {text}") >= 2, done.stderr
    done = torchrun(2, SCRIPT, 6, -1, log, ASKED="2 2")
    assert done.returncode == 0, done.stderr
    lines = Path(f"{log}.0").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3, 3, 4, 5]
    for rank in (0, 1):
        assert losses(log, rank) == losses(reference, rank)


def test_a_new_rank_without_saved_random_states_logs_a_warning(sidecar, tmp_path):
    done = torchrun(2, SCRIPT, 3, -1, tmp_path / "log")
    assert "random generators" not in done.stderr
    done = torchrun(3, SCRIPT, 5, -1, tmp_path / "log")
    assert done.returncode == 0, done.stderr
    output = [line for line in done.stderr.splitlines() if "random generators" in line]
    assert len(output) == 1
    assert "keepstep: rank 2 goes on from what other ranks saved of step 0001." in output[0]


def test_a_new_run_trains_without_checkpoints_when_one_rank_has_no_sidecar(sidecar, tmp_path):
    log = tmp_path / "log"
    done = torchrun(2, SCRIPT, 3, -1, log, WITHOUT_SIDECAR="1")
    assert done.returncode == 0, done.stderr
    assert [sorted(losses(log, rank)) for rank in (0, 1)] == [[0, 1, 2]] * 2
    output = [line for line in done.stderr.splitlines() if "step 0 is not kept" in line]
    assert len(output) == 2
    assert all("rank 1 (" in line and "Delete the pods without" in line for line in output)
    assert sidecar.published() == []


def test_a_rank_without_a_sidecar_does_not_make_a_run_start_over(sidecar, tmp_path):
    log = tmp_path / "log"
    assert torchrun(2, SCRIPT, 3, -1, log).returncode == 0
    done = torchrun(2, SCRIPT, 6, -1, log, WITHOUT_SIDECAR="1")
    assert done.returncode != 0
    count = done.stderr.count("RestoreError: this run may have steps, so it does not begin again")
    assert count >= 2, "both ranks say so"
    assert sorted(losses(log, 0)) == [0, 1, 2], "and none trained"
    done = torchrun(2, SCRIPT, 4, -1, log)
    assert done.returncode == 0, done.stderr
    assert sorted(losses(log, 0)) == [0, 1, 2, 3]


def test_several_ranks_without_a_process_group_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(keepstep.UsageError, match="init_process_group"):
        keepstep.Checkpointer({"m": nn.Linear(1, 1)})


def test_a_rank_that_cannot_load_raises_an_error_on_all_ranks(sidecar, tmp_path):
    """Nobody may train on alone, and nobody may wait forever for a rank that failed."""
    assert torchrun(2, SCRIPT, 3, -1, tmp_path / "log").returncode == 0
    script = tmp_path / "misfit.py"
    script.write_text(
        "import os, torch, keepstep\n"
        "torch.distributed.init_process_group('gloo')\n"
        "wide = 8 if torch.distributed.get_rank() == 0 else 9\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, wide), torch.nn.Dropout(0.3))\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "c = keepstep.Checkpointer({'model': model, 'optimizer': optimizer})\n"
        "try:\n"
        "    c.restore()\n"
        "except keepstep.RestoreError as error:\n"
        "    line = f'refused {torch.distributed.get_rank()} {type(error).__name__}\\n'\n"
        "    os.write(1, line.encode())\n"
        "torch.distributed.barrier()\n"
        "os._exit(0)\n"
    )
    done = torchrun(2, script)
    assert "refused 0 MismatchError" in done.stdout, done.stderr
    assert "refused 1 MismatchError" in done.stdout


@pytest.mark.parametrize(
    ("saves", "seconds", "why"),
    [
        ("step % 2 == rank", 0.0, "it saves other steps"),
        ("rank == 0", 9.0, "it has saved no step yet"),
    ],
)
def test_ranks_that_save_different_steps_are_warned_during_training(
    sidecar, tmp_path, saves, seconds, why
):
    done = torchrun(2, UNEQUAL, 20, seconds, SAVES=saves)
    for rank in (0, 1):
        lines = [
            line for line in done.stderr.splitlines() if f"keepstep: rank {rank}: rank 1" in line
        ]
        assert len(lines) == 1, done.stderr
        assert f"saves none of the steps that rank 0 saves ({why})" in lines[0]
        assert "call save(step) on every rank, with the same steps" in lines[0]
    assert len(matching(sidecar.root, "pending/*/rank-*")) <= 8
    done = torchrun(2, UNEQUAL, 4, 0.0, SAVES="True")
    assert "rank 0 begins at None" in done.stdout
    [lines] = [line for line in done.stderr.splitlines() if "the run begins at step 0" in line]
    assert "of rank 0 alone" in lines
    assert "which were never whole" in lines
