"""A script that fails again and again after the same restore goes on from an older step."""

from __future__ import annotations

import pytest

from tests import warm
from tests.cli.conftest import Keepstep

BAD = 90
"""The step that goes bad: a whole run at most once."""

LOOP = """
import os, signal, sys
import torch
import keepstep

how, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
checkpointer = keepstep.Checkpointer({"model": model, "optimizer": optimizer})
at = checkpointer.restore()
print("from", at.step if at else None, flush=True)
for step in range(at.step + 1 if at else 0, steps):
    loss = model(torch.randn(4, 8)).sum()
    if not torch.isfinite(loss):
        if how == "nan":
            checkpointer.save(step, healthy=False)
            sys.exit(1)
        if how == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("the loss is not finite")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == BAD and not os.path.exists("was-bad"):
        open("was-bad", "w").close()
        with torch.no_grad(), checkpointer.mutating():
            model.weight[0, 0] = float("nan")
    checkpointer.save(step)
    checkpointer.wait(step, "durable" if step % 10 == 0 or step == BAD else "staged")
checkpointer.close()
""".replace("BAD", str(BAD))


def lives(text: str) -> list[int | None]:
    starts = [line.removeprefix("from ") for line in text.splitlines() if line.startswith("from ")]
    return [None if word == "None" else int(word) for word in starts]


@pytest.mark.parametrize("how", ["nan", "error"])
def test_a_poisoned_step_is_no_longer_restored_after_two_failures(
    keepstep: Keepstep, how: str
) -> None:
    script = keepstep.script("loop.py", LOOP)
    with keepstep.start(
        "run", "--restarts", "6", "--", warm.python(), script, how, "120"
    ) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    begun = lives(out)
    assert begun[:3] == [None, BAD, BAD]
    assert len(begun) == 4
    assert begun[3] is not None
    assert BAD - 80 <= begun[3] <= BAD - 20
    assert f"it can go on from step {BAD} of epoch 1 (memory, local; suspect)" in err
    assert f"going back to step {begun[3]}: the script failed twice within 20 steps" in err
    assert ("ValueError" in err) is (how == "error"), "the script's own words stay"


def test_suspect_steps_are_shown_survive_a_sidecar_restart_and_can_be_chosen_explicitly(
    keepstep: Keepstep,
) -> None:
    script = keepstep.script("loop.py", LOOP)
    train = ("--", warm.python(), script, "nan")
    keepstep("run", "--restarts", "1", *train, "120", code=1)
    keepstep("stop")
    assert lives(keepstep("run", *train, "120", code=1).stdout) == [BAD]
    for _ in range(2):  # as the sidecar says it, and without one
        steps = {step["step"]: step for step in keepstep.json("steps")["steps"]}
        proven = [number for number, step in steps.items() if step["proven"]]
        assert [number for number, step in steps.items() if step["suspect"]] == [BAD]
        assert proven
        assert max(proven) <= BAD - 20
        keepstep("stop")
    asked = keepstep("run", "--restore-from", str(BAD), *train, "120", code=1)
    assert lives(asked.stdout) == [BAD], "whoever names it gets it"
    assert "are suspect: the script failed twice" in keepstep("status").stdout
    assert lives(keepstep("run", *train, "120").stdout) == [max(proven)]
    healthy = keepstep.json("steps")["steps"]
    assert not any(step["suspect"] for step in healthy)
