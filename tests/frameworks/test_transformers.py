"""Hugging Face's Trainer with one line more: killed where it hurts, it ends as if nothing was."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frameworks.conftest import TRAINER, Lives, assert_same, drawn, losses, result

EPOCH = 15
"""Steps: 60 rows in batches of 4."""


@pytest.fixture
def trainer(lives) -> Lives:
    return lives("trainer.py", *TRAINER)


def test_two_kills_in_two_epochs_change_nothing(trainer):
    plain = trainer.undisturbed()
    kept, output = trainer.kept(kill=drawn(range(1, EPOCH), range(EPOCH, 2 * EPOCH)))
    assert "restored step" in output
    assert_same(plain, kept, kills=2)
    again, output = trainer.kept(out="again")
    assert not (again / "losses-0").exists(), "what is over is not trained again"
    over, expected = result(again), result(plain)
    assert over["log"] == expected["log"]
    assert over["train_loss"] == expected["train_loss"]
    assert over["weights"] == expected["weights"]


def test_kills_at_the_end_of_an_epoch_change_neither_log_nor_evaluation(trainer):
    arguments = {
        "logging_strategy": "epoch",
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "eval_on_start": True,
        "load_best_model_at_end": True,
        "num_train_epochs": 3,
    }
    plain = trainer.undisturbed(arguments=arguments, patience=5)
    kept, _ = trainer.kept(
        arguments=arguments, patience=5, kill=[EPOCH - 1, EPOCH, *drawn(range(2 * EPOCH, 44))]
    )
    assert_same(plain, kept, kills=3)


def test_accumulation_with_a_remainder_and_loader_workers_resumes_bit_equal(trainer):
    arguments = {"gradient_accumulation_steps": 2, "dataloader_num_workers": 2}
    plain = trainer.undisturbed(arguments=arguments)
    kept, _ = trainer.kept(arguments=arguments, kill=drawn(range(1, 8), range(8, 16)))
    assert_same(plain, kept, kills=2)
    assert len(next(iter(losses(kept)[0]))) == 2, "two micro-batches a step"


@pytest.mark.parametrize("seedable", [True, False])
def test_a_training_with_persistent_workers_resumes_bit_equal(trainer, seedable):
    """Of which the first epoch alone draws a seed, and whoever goes on in a later one does, too. So
    it is with evaluations."""
    arguments = {
        "eval_strategy": "steps",
        "eval_steps": 10,
        "num_train_epochs": 3,
        "dataloader_num_workers": 1,
        "dataloader_persistent_workers": True,
        "accelerator_config": {"use_seedable_sampler": seedable},
    }
    plain = trainer.undisturbed(arguments=arguments)
    kill = [*drawn(range(1, EPOCH)), EPOCH, *drawn(range(EPOCH + 2, 2 * EPOCH))]
    kept, _ = trainer.kept(arguments=arguments, kill=kill)
    assert_same(plain, kept, kills=3)


def test_a_log_history_that_outgrows_its_reserved_space_is_restored(trainer):
    options = {"arguments": {"logging_steps": 1}, "note": 8000}
    plain = trainer.undisturbed(**options)
    kept, _ = trainer.kept(**options, kill=drawn(range(1, 6), range(12, EPOCH)))
    assert_same(plain, kept, kills=2)


def test_a_sampler_that_draws_from_the_global_generator_resumes_bit_equal(trainer):
    options = {"arguments": {"train_sampling_strategy": "group_by_length"}, "lengths": True}
    plain = trainer.undisturbed(**options)
    kept, _ = trainer.kept(**options, kill=drawn(range(1, EPOCH), range(EPOCH, 30)))
    assert_same(plain, kept, kills=2)


def test_a_stream_of_unknown_length_resumes_bit_equal(trainer):
    arguments = {"max_steps": 40}
    plain = trainer.undisturbed(arguments=arguments, stream=True)
    kept, _ = trainer.kept(
        arguments=arguments, stream=True, kill=drawn(range(1, 15), range(15, 40))
    )
    assert_same(plain, kept, kills=2)


def test_the_seq2seq_trainer_with_the_mixin_resumes_bit_equal(trainer):
    plain = trainer.undisturbed(seq2seq=True)
    kept, _ = trainer.kept(seq2seq=True, kill=drawn(range(1, EPOCH), range(EPOCH, 30)))
    assert_same(plain, kept, kills=2)


def test_a_training_on_two_ranks_resumes_bit_equal(trainer):
    arguments = {"ddp_backend": "gloo", "dataloader_num_workers": 1}
    plain = trainer.undisturbed(ranks=2, arguments=arguments)
    kept, _ = trainer.kept(ranks=2, arguments=arguments, kill=drawn(range(1, 8), range(8, 16)))
    assert_same(plain, kept, kills=2, ranks=2)


def by_zero(stage: int, **options: object) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": True},
        "zero_force_ds_cpu_optimizer": False,  # no operator is built here
        "zero_optimization": {"stage": stage, **options},
    }
    return {"deepspeed": config, "bf16": True}


def by_its_own(divided: dict[str, Any]) -> dict[str, Any]:
    """With the optimizer and the scheduler of DeepSpeed's configuration."""
    same = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")
    warmup = dict.fromkeys(("warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    divided["deepspeed"] |= {
        "optimizer": {"type": "AdamW", "params": {**same, "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": warmup},
    }
    return divided


OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
FSDP2 = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": "GPT2Block"}}
FSDP2_OFFLOADED = {**FSDP2, "fsdp_config": {**FSDP2["fsdp_config"], "cpu_offload": True}}


@pytest.mark.parametrize(
    ("divided", "accumulate", "model"),
    [
        pytest.param(by_its_own(by_zero(1)), 3, {"lora": True}, id="zero-1-lora"),
        pytest.param(by_zero(2, **OFFLOADED), 1, {}, id="zero-2-offloaded"),
        pytest.param(by_zero(3, stage3_param_persistence_threshold=20), 1, {}, id="zero-3"),
        pytest.param(by_zero(3, **OFFLOADED), 3, {"lora": True}, id="zero-3-offloaded-lora"),
        pytest.param(FSDP2, 3, {"lora": True}, id="fsdp2-lora"),
        pytest.param(FSDP2_OFFLOADED, 1, {}, id="fsdp2-offloaded"),
        pytest.param({}, 1, {"divides": {"tp_size": 2}}, id="tensor-parallel"),
        pytest.param({}, 1, {"divides": {"fsdp_size": 2, "ep_size": 2}}, id="fsdp2-experts"),
    ],
)
def test_a_model_sharded_over_two_ranks_resumes_bit_equal(trainer, divided, accumulate, model):
    """With accumulation an epoch ends on a remainder of micro-batches."""
    arguments = {
        "use_cpu": False,
        "gradient_accumulation_steps": accumulate,
        "num_train_epochs": accumulate + 1,
        **divided,
    }
    plain = trainer.undisturbed(ranks=2, arguments=arguments, **model)
    kill = drawn(range(1, 6), range(7, 12))
    kept, _ = trainer.kept(ranks=2, arguments=arguments, kill=kill, **model)
    assert_same(plain, kept, kills=2, ranks=2)
    assert result(kept).get("sharded", True)


def test_two_ranks_with_a_private_sampler_generator_resume_bit_equal(trainer):
    arguments = {
        "num_train_epochs": 3,
        "ddp_backend": "gloo",
        "accelerator_config": {"use_seedable_sampler": False},
    }
    plain = trainer.undisturbed(ranks=2, arguments=arguments)
    kept, _ = trainer.kept(ranks=2, arguments=arguments, kill=[*drawn(range(1, 8)), 8, 12])
    assert_same(plain, kept, kills=3, ranks=2)


def test_a_trainer_checkpoint_is_loaded_only_if_the_run_has_no_step(trainer):
    arguments = {"save_strategy": "steps", "save_steps": 10, "save_total_limit": 1}
    folder = trainer.undisturbed(arguments={**arguments, "max_steps": 10}, out="seed") / "hf"
    resume = folder / "checkpoint-10"
    plain = trainer.undisturbed(arguments=arguments, resume=str(resume))
    kept, output = trainer.kept(
        arguments={**arguments, "output_dir": str(folder)}, resume=str(resume), kill=[13, 25]
    )
    assert output.count("checkpoint-10' is ignored, as this run holds a step") == 2
    assert min(losses(kept)) == 10
    assert not resume.exists(), "the last life could not have read it"
    assert_same(plain, kept, kills=2)


def test_unsupported_trainer_features_are_refused(trainer):
    _, output = trainer.kept(arguments={"auto_find_batch_size": True}, code=1)
    assert "Trainer then begins the training again with half the batch" in output
