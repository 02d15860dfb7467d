"""Lightning's Trainer with one line more: killed where it hurts, it ends as if nothing was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.frameworks.conftest import (
    LIGHTNING,
    Lives,
    assert_same,
    drawn,
    found_same,
    losses,
    result,
)

EPOCH = 15
"""Steps: 60 rows in batches of 4."""


@pytest.fixture
def fit(lives) -> Lives:
    return lives("lightning_fit.py", *LIGHTNING)


def logged(folder: Path, rank: int = 0) -> set[str]:
    """What is done again is logged again, and the same."""
    return set((folder / f"log-{rank}").read_text().splitlines())


def assert_same_log(plain: Path, kept: Path, *, kills: int, ranks: int = 1) -> None:
    assert_same(plain, kept, kills=kills, ranks=ranks)
    assert logged(kept) == logged(plain)
    found_same(ranks, "log")


def test_two_kills_in_two_epochs_change_nothing(fit):
    plain = fit.undisturbed()
    kept, output = fit.kept(kill=drawn(range(1, EPOCH), range(EPOCH, 2 * EPOCH)))
    assert "restored step" in output
    assert "ended before the epoch ended" not in output
    assert_same_log(plain, kept, kills=2)
    again, output = fit.kept(out="again")
    assert not (again / "losses-0").exists(), "what is over is not trained again"
    over, expected = result(again), result(plain)
    assert {**over, "metrics": 0} == {**expected, "metrics": 0}


def test_kills_at_the_end_of_an_epoch_change_neither_log_nor_validation(fit):
    options = {"arguments": {"max_epochs": 3}, "patience": 5, "plateau": True}
    plain = fit.undisturbed(**options)
    kill = [EPOCH - 1, EPOCH, *drawn(range(2 * EPOCH, 44))]
    kept, _ = fit.kept(**options, kill=kill)
    assert_same_log(plain, kept, kills=3)


def test_accumulation_with_a_remainder_and_loader_workers_resumes_bit_equal(fit):
    options = {"arguments": {"accumulate_grad_batches": 2}, "workers": 2}
    plain = fit.undisturbed(**options)
    kept, _ = fit.kept(**options, kill=drawn(range(1, 8), range(8, 16)))
    assert_same_log(plain, kept, kills=2)
    assert len(next(iter(losses(kept)[0]))) == 2, "two micro-batches a step"


@pytest.mark.parametrize("stateful", [False, True])
def test_persistent_workers_and_a_private_loader_generator_resume_bit_equal(fit, stateful):
    options = {"stateful": stateful, "workers": 2, "persistent": True, "generator": True}
    plain = fit.undisturbed(**options)
    kept, _ = fit.kept(**options, kill=[*drawn(range(1, EPOCH)), EPOCH, *drawn(range(17, 30))])
    assert_same_log(plain, kept, kills=3)


def test_a_training_with_a_stateful_loader_resumes_bit_equal(fit):
    plain = fit.undisturbed(stateful=True)
    kept, _ = fit.kept(stateful=True, kill=[*drawn(range(1, EPOCH)), EPOCH, *drawn(range(17, 30))])
    assert_same_log(plain, kept, kills=3)


@pytest.mark.parametrize("stateful", [False, True])
def test_a_stream_of_unknown_length_with_validation_within_the_epoch_resumes_bit_equal(
    fit, stateful
):
    options = {
        "stream": True,
        "stateful": stateful,
        "arguments": {"max_steps": 40, "max_epochs": -1, "val_check_interval": 5},
    }
    plain = fit.undisturbed(**options)
    kept, _ = fit.kept(**options, kill=[*drawn(range(1, 10), range(16, 30)), 35])
    assert_same_log(plain, kept, kills=3)


def test_a_dataset_that_draws_from_the_global_generators_resumes_bit_equal(fit):
    plain = fit.undisturbed(augment=True)
    kept, _ = fit.kept(augment=True, kill=drawn(range(1, EPOCH), range(EPOCH, 2 * EPOCH)))
    assert_same_log(plain, kept, kills=2)


def test_manual_optimization_of_two_optimizers_in_pytorch_lightning_resumes_bit_equal(fit):
    options = {"two": True, "package": "pytorch_lightning"}
    plain = fit.undisturbed(**options)
    kept, _ = fit.kept(**options, kill=drawn(range(2, 30), range(30, 60)))
    assert_same_log(plain, kept, kills=2)


@pytest.mark.parametrize("finetune", ["backbone", "bias"])
def test_layers_unfrozen_and_groups_added_during_training_resume_bit_equal(fit, finetune):
    options = {"finetune": finetune, "arguments": {"max_epochs": 3}}
    plain = fit.undisturbed(**options)
    kill = [EPOCH, *drawn(range(EPOCH + 1, 30), range(31, 44))]
    kept, _ = fit.kept(**options, kill=kill)
    assert_same_log(plain, kept, kills=3)
    groups = [(folder / "groups-0").read_text() for folder in (plain, kept)]
    assert groups[0] == groups[1]
    assert len(json.loads(groups[0])) == 2, "a group was added"


def test_a_training_on_two_ranks_resumes_bit_equal(fit):
    plain = fit.undisturbed(ranks=2, workers=1)
    kept, _ = fit.kept(ranks=2, workers=1, kill=drawn(range(1, 8), range(8, 16)))
    assert_same_log(plain, kept, kills=2, ranks=2)


def test_a_lightning_checkpoint_is_loaded_only_if_the_run_has_no_step(fit):
    seed = fit.undisturbed(arguments={"max_epochs": 1}, checkpoint=True, out="seed")
    resume = seed / "lightning.ckpt"
    plain = fit.undisturbed(resume=str(resume))
    kept, output = fit.kept(resume=str(resume), kill=[18, 25])
    assert output.count("lightning.ckpt' is ignored, as this run holds a step") == 2
    assert min(losses(kept)) == EPOCH
    assert_same_log(plain, kept, kills=2)


def test_a_loader_that_restarts_within_an_epoch_causes_a_warning(fit):
    plain = fit.undisturbed(second=4)
    kept, output = fit.kept(second=4, kill=[2, 9])
    assert output.count("is shorter than the epoch restarted within it") == 1, "after one of two"
    done = losses(plain)
    assert all(done[step] == runs for step, runs in losses(kept).items() if step < 9)


def test_unsupported_lightning_features_are_refused(fit):
    _, output = fit.kept(tuned=True, code=1)
    assert "LearningRateFinder trains within a training" in output


def test_weight_averaging_resumes_bit_equal(fit):
    """Which takes their place in a validation, and at the end."""
    plain = fit.undisturbed(average=True)
    kept, _ = fit.kept(average=True, kill=drawn(range(1, EPOCH), range(EPOCH, 2 * EPOCH)))
    assert_same_log(plain, kept, kills=2)
    found_same(1, "averages")
    assert result(plain)["weights"] != result(fit.undisturbed(out="without"))["weights"]
    again, _ = fit.kept(average=True, out="again")
    assert result(again)["weights"] == result(plain)["weights"]


@pytest.mark.parametrize(
    ("accumulate", "options"),
    [
        pytest.param(1, {"fsdp2": True}, id="fsdp2"),
        pytest.param(2, {"tensors": True}, id="tensors"),
        pytest.param(2, {"zero": {"zero_optimization": {"stage": 2}}}, id="zero-2"),
        pytest.param(1, {"zero": {"zero_optimization": {"stage": 3}}}, id="zero-3"),
    ],
)
def test_a_model_sharded_over_two_ranks_resumes_bit_equal(fit, accumulate, options):
    options = {**options, "arguments": {"accumulate_grad_batches": accumulate}}
    plain = fit.undisturbed(ranks=2, **options)
    steps = (30 if "tensors" in options else 16) // accumulate
    kill = drawn(range(1, steps // 2), range(steps // 2, steps - 1))
    kept, _ = fit.kept(ranks=2, **options, kill=kill)
    assert_same_log(plain, kept, kills=2, ranks=2)
    assert result(kept)["sharded"] == ("zero" not in options)
