"""Beside what each framework has for going on: keepstep is equal where that is, and elsewhere.

The control of every promise: the same training undisturbed, gone on with by the framework itself
from its newest checkpoint, and gone on with by keepstep after the same SIGKILL.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.conftest import LIGHTNING, TRAINER, TRL, Lives, assert_same, losses, result

KILL, EVERY = 13, 10
"""Steps: when it is killed, and how often the framework writes a checkpoint."""

SAVING = {"save_strategy": "steps", "save_steps": EVERY}


def differs(plain: Path, other: Path) -> set[str]:
    """What is not as in an undisturbed training."""
    expected, found = result(plain), result(other)
    names = {name for name in expected if found[name] != expected[name]}
    after = [step for step, runs in losses(other).items() if runs != losses(plain)[step]]
    return names | ({"losses"} if after else set())


def compare(lives: Lives, resume: str, **options: Any) -> set[str]:
    """What differs after the framework's own resume; nothing does after keepstep's."""
    plain = lives.undisturbed(**options)
    own = lives.resumed(kill=KILL, resume=resume, **options)
    kept, _ = lives.kept(**options, kill=[KILL])
    assert_same(plain, kept, kills=1)
    return differs(plain, own)


def test_the_built_in_resume_of_trainer_loses_loss_sums_and_callbacks(lives):
    trainer = lives("trainer.py", *TRAINER)
    lost = compare(trainer, "hf/checkpoint-*", arguments=SAVING)
    assert lost == {"log", "train_loss", "callbacks"}


def test_the_built_in_resume_of_lightning_within_an_epoch_trains_on_other_data(lives):
    fit = lives("lightning_fit.py", *LIGHTNING)
    lost = compare(fit, "own/*.ckpt", checkpoints=EVERY)
    assert lost == {"losses", "weights", "optimizer", "metrics", "datamodule", "random"}


@pytest.mark.parametrize("kind", ["SFT", "GRPO"])
def test_the_built_in_resume_of_trl_loses_the_rollouts(lives, kind):
    more = {"steps_per_generation": 4, "num_generations": 4, "max_completion_length": 6}
    arguments = {**SAVING, "max_steps": 16, **(more if kind == "GRPO" else {})}
    trainer = lives("trl_trainer.py", *TRL)
    lost = compare(trainer, "hf/checkpoint-*", kind=kind, arguments=arguments)
    rollouts = {"losses", "weights", "optimizer", "random"} if kind == "GRPO" else set()
    assert lost == {"log", "train_loss"} | rollouts
