"""`keepstep run --restore-from`: back to a step, once; what came after it is dead."""

from __future__ import annotations

from tests import warm
from tests.cli.conftest import TRAIN as PLAIN
from tests.cli.conftest import Keepstep
from tests.harness import eventually

TRAIN = PLAIN.replace(
    "at = checkpointer.restore()",
    """try:
    at = checkpointer.restore()
except keepstep.RestoreError as error:
    sys.exit(f"refused: {error}")""",
)
PATIENT = TRAIN.replace("save(step)\n", "save(step)\n    checkpointer.wait(step)\n")
"""Every step is committed: none is left out because the drive is slow."""


def test_a_rollback_happens_once_and_later_steps_of_the_old_epoch_are_never_restored(
    keepstep: Keepstep,
) -> None:
    keepstep.script("train.py", PATIENT)
    train = ("--", warm.python(), "train.py")
    keepstep("run", "--keep", "9", *train, "6", "-1")
    first = {step["step"]: step["id"] for step in keepstep.json("steps")["steps"]}
    assert set(first) == {0, 1, 2, 3, 4, 5}

    back = ("run", "--keep", "9", "--restore-from", "2", "--restarts", "1", *train)
    # step 4 ends the first attempt; the second one goes on from there, not from 2 again
    assert keepstep(*back, "8", "4").stdout == "from 2\nfrom 4\n"
    assert keepstep("run", "--keep", "9", *train, "9", "-1").stdout == "from 7\n"
    after = keepstep.json("steps")["steps"]
    live = {row["id"] for row in after if row["committed"] and not row["dead"]}
    assert {first[step] for step in (0, 1, 2)} <= live
    assert live.isdisjoint({first[step] for step in (3, 4, 5)})

    dead = keepstep("run", "--keep", "9", "--restore-from", first[4], *train, "9", "-1", code=None)
    assert dead.returncode != 0
    assert f"going back to step {first[4]} was asked for" in dead.stderr


def test_a_lingering_sidecar_drops_memory_that_is_newer_than_the_rollback_target(
    keepstep: Keepstep,
) -> None:
    keepstep.script("train.py", TRAIN)
    train = ("--", warm.python(), "train.py")
    keepstep("run", "--persist-every", "1000", "--slots", "3", *train, "9", "5", code=137)
    steps = keepstep.json("steps")["steps"]
    target = next(step for step in steps if step["step"] == 3)
    assert target["tiers"] == ["memory"], "only the newest two are flushed"
    shown = keepstep("run", "--persist-every", "1000", "--restore-from", "3", *train, "7", "-1")
    assert shown.stdout == "from 3\n"
    newest = keepstep.json("status")["committed"]["id"]
    assert newest.startswith("0002.")
    assert newest.endswith("-000000006")


def test_the_rollback_target_is_not_retired_by_newer_commits(keepstep: Keepstep) -> None:
    keepstep.script("train.py", PATIENT)
    train = ("--", warm.python(), "train.py")
    keepstep("run", "--keep", "3", *train, "6", "-1")
    keepstep.script("broken.py", "raise SystemExit(3)")
    broken = ("--run", "train", "--", warm.python(), "broken.py")
    keepstep("run", "--keep", "1", "--restore-from", "3", *broken, code=3)
    eventually(lambda: [step["step"] for step in keepstep.json("steps")["steps"]] == [3, 5])
    keepstep("stop")
    shown = keepstep("run", "--keep", "1", "--restore-from", "3", *train, "6", "-1")
    assert shown.stdout == "from 3\n"


ASKS = PATIENT.replace("checkpointer.restore()", "checkpointer.restore(step=ASKED)")


def test_a_script_can_roll_back_and_later_steps_of_the_old_epoch_are_never_restored(
    keepstep: Keepstep,
) -> None:
    keepstep.script("train.py", PATIENT)
    keepstep.script("back.py", f"ASKED = 2\n{ASKS}")
    keep = ("run", "--keep", "9", "--run", "train")
    keepstep(*keep, "--", warm.python(), "train.py", "6", "-1")
    first = {step["step"]: step["id"] for step in keepstep.json("steps")["steps"]}
    assert keepstep(*keep, "--", warm.python(), "back.py", "4", "-1").stdout == "from 2\n"
    assert keepstep(*keep, "--", warm.python(), "train.py", "5", "-1").stdout == "from 3\n"
    live = {step["id"] for step in keepstep.json("steps")["steps"] if not step["dead"]}
    assert {first[step] for step in (0, 1, 2)} <= live
    assert live.isdisjoint({first[step] for step in (3, 4, 5)})
