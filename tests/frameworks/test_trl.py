"""TRL's trainers with one line more: what they know beside Trainer comes back, too."""

from __future__ import annotations

import pytest

from tests.frameworks.conftest import TRL, Lives, assert_same, drawn


@pytest.fixture
def trainer(lives) -> Lives:
    return lives("trl_trainer.py", *TRL)


def check(trainer, *, ranks=1, **options):
    plain = trainer.undisturbed(ranks=ranks, **options)
    kept, output = trainer.kept(ranks=ranks, **options, kill=drawn(range(1, 6), range(6, 12)))
    assert "restored step" in output
    assert "changes from step to step, and is in no step" not in output
    assert_same(plain, kept, kills=2, ranks=ranks)


def test_packed_lora_sft_with_accumulation_resumes_bit_equal(trainer):
    arguments = {"packing": True, "max_length": 32, "gradient_accumulation_steps": 2}
    check(trainer, kind="SFT", lora=True, arguments=arguments)


@pytest.mark.parametrize("kind", ["DPO", "KTO", "Reward"])
def test_preference_trainers_resume_bit_equal_including_logged_sums(trainer, kind):
    more = {"DPO": {"lora": True}, "KTO": {"reference": True}}.get(kind, {})
    check(trainer, kind=kind, arguments={"max_length": 32}, **more)


ROLLOUTS = {"steps_per_generation": 4, "num_generations": 4, "max_completion_length": 6}


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO", "Reward", "GRPO"])
def test_a_training_on_two_ranks_resumes_bit_equal(trainer, kind):
    some = {"SFT": {"max_length": 32, "packing": True}, "GRPO": ROLLOUTS}
    arguments = some.get(kind, {"max_length": 32})
    more = {"lora": kind in ("SFT", "DPO"), "reference": kind == "KTO"}
    check(trainer, ranks=2, kind=kind, arguments={"ddp_backend": "gloo", **arguments}, **more)


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_a_synchronised_reference_model_resumes_bit_equal(trainer, kind):
    arguments = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
    check(trainer, kind=kind, reference=True, arguments={"max_length": 32, **arguments})


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_rollouts_that_are_reused_for_several_steps_resume_bit_equal(trainer, kind):
    check(trainer, kind=kind, arguments={**ROLLOUTS, "beta": 0.0})


@pytest.mark.parametrize("bits", ["4", "8"])
def test_an_adapter_on_a_quantised_base_resumes_bit_equal(trainer, bits):
    check(trainer, kind="SFT", lora=True, bits=bits, arguments={"max_length": 32})


def test_a_different_quantised_base_is_refused_before_anything_changes(trainer):
    options = {"kind": "SFT", "lora": True, "bits": "4"}
    trainer.kept(**options, arguments={"max_steps": 3})
    _, output = trainer.kept(**options, arguments={"max_steps": 6}, other=True, code=1)
    assert "step 3 was trained on another frozen base" in output
    assert "hold NaN" not in output


def test_rollouts_that_are_trained_twice_with_accumulation_resume_bit_equal(trainer):
    arguments = {
        "steps_per_generation": 2,
        "num_iterations": 2,
        "num_generations": 4,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 6,
    }
    check(trainer, kind="GRPO", lora=True, arguments=arguments)
