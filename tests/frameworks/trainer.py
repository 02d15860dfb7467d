"""A tiny training with Hugging Face's Trainer: `python trainer.py OUT [SETTINGS as JSON]`.

Beside what `script.py` writes: at the end, all that must be the same in an undisturbed run.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    AutoModelForCausalLM,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    Qwen3MoeConfig,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState

from keepstep.integrations.transformers import KeepstepTrainerMixin, attach
from tests.frameworks.script import (
    OUT,
    RANK,
    SETTINGS,
    digest,
    divided,
    maybe_kill,
    random_states,
    record,
    write,
)

if not SETTINGS.get("arguments", {}).get("use_cpu", True):
    from tests.frameworks import accelerate_on_cpu  # noqa: F401

TIMES = ("runtime", "per_second")
ROWS = 60


class Rows(Dataset[Any]):
    """Text of several lengths, so that a sampler may group it."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, at: int) -> Any:
        if at >= ROWS:
            raise IndexError(at)
        length = 1 + at * 7 % 8 if SETTINGS.get("lengths") else 8
        ids = torch.randint(0, 64, (length,), generator=torch.Generator().manual_seed(at))
        return {"input_ids": ids, "labels": ids}


def padded(rows: list[Any]) -> dict[str, torch.Tensor]:
    ids = [row["input_ids"] for row in rows]
    batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return {"input_ids": batch, "labels": batch}


class Stream(IterableDataset[Any]):
    """The same, of a length that nobody knows."""

    def __iter__(self) -> Any:
        return (Rows()[at] for at in range(ROWS))


class Losses(TrainerCallback, ExportableState):
    """Counts what it sees, and kills between backward and the optimizer's step."""

    def __init__(self, evaluations: int = 0, steps: int = 0) -> None:
        self.evaluations, self.steps = evaluations, steps

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"evaluations": self.evaluations, "steps": self.steps}}

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.evaluations += 1

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps += 1

    def on_pre_optimizer_step(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # every rank has written its loss
        maybe_kill(state.global_step)


def recorded(kind: Any) -> Any:
    """The same Trainer, which writes its losses."""

    class Recorded(kind):  # type: ignore[misc]
        def training_step(self, model: Any, *args: Any, **options: Any) -> Any:
            if self.is_deepspeed_enabled and "step" not in vars(model):
                kill_before_its_step(model)
            loss = super().training_step(model, *args, **options)
            record(self.state.global_step, loss)
            return loss

        def log(self, logs: Any, *args: Any, **options: Any) -> None:
            note = {"note": "n" * SETTINGS["note"]} if "note" in SETTINGS else {}
            super().log({**logs, **note}, *args, **options)

    return Recorded


def flos(trainer: Any) -> float | None:
    """Of ZeRO-3, Trainer counts those parameters that happen to be gathered."""
    divides = trainer.is_deepspeed_enabled and trainer.model_wrapped.zero_optimization_stage() == 3
    return None if divides else trainer.state.total_flos


def state(trainer: Any) -> dict[str, Any]:
    if trainer.is_deepspeed_enabled:
        return divided(trainer.model_wrapped)
    return {
        "sharded": any(isinstance(parameter, DTensor) for parameter in trainer.model.parameters()),
        "weights": digest(trainer.model.state_dict()),
        "optimizer": digest(trainer.optimizer.state_dict()),
    }


def kill_before_its_step(engine: Any) -> None:
    """DeepSpeed's engine steps within `backward`, before the callback that kills elsewhere.

    The loss of that micro-batch is not written then, so the step must have no other.
    """
    step = engine.step

    def killing(*args: Any, **options: Any) -> Any:
        if engine.global_steps % 2 and engine.gradient_accumulation_steps() == 1:
            maybe_kill(engine.global_steps)
        return step(*args, **options)

    engine.step = killing


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=1, n_head=2))


def divided_at_load() -> Any:
    """A model that transformers divides as it is loaded: by tensors, by FSDP2, or by experts."""
    from transformers.distributed import DistributedConfig

    small: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "attention_dropout": 0.1,
    }  # fmt: skip
    config: Any = LlamaConfig(**small)
    if "ep_size" in SETTINGS["divides"]:
        experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
        config = Qwen3MoeConfig(**small, **experts, head_dim=8)
    place = OUT / f"divided-{RANK}"
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    divides = DistributedConfig(**SETTINGS["divides"])
    return AutoModelForCausalLM.from_pretrained(place, distributed_config=divides)


def made() -> Any:
    torch.manual_seed(0)
    arguments = SETTINGS.get("arguments", {})
    options: dict[str, Any] = {
        "output_dir": str(OUT / "hf"),
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
        "logging_steps": 3,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **arguments,
    }
    rows: Any = Stream() if SETTINGS.get("stream") else Rows()
    callbacks: list[Any] = [Losses()]
    if SETTINGS.get("patience"):
        callbacks.append(EarlyStoppingCallback(SETTINGS["patience"]))
    common: dict[str, Any] = {"train_dataset": rows, "eval_dataset": Rows(), "callbacks": callbacks}
    common["data_collator"] = padded
    if SETTINGS.get("seq2seq"):
        small = T5Config(
            vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2,
            decoder_start_token_id=0, dropout_rate=0.1,
        )  # fmt: skip
        bases: Any = (recorded(Seq2SeqTrainer),)
        if not SETTINGS.get("bare"):
            bases = (KeepstepTrainerMixin, *bases)
        kind = type("Mine", bases, {})
        t5 = T5ForConditionalGeneration(small)
        return kind(model=t5, args=Seq2SeqTrainingArguments(**options), **common)
    model: Any = divided_at_load() if SETTINGS.get("divides") else gpt2()
    if SETTINGS.get("lora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1))
    trainer = recorded(Trainer)(model=model, args=TrainingArguments(**options), **common)
    return trainer if SETTINGS.get("bare") else attach(trainer)


def main() -> None:
    transformers.logging.set_verbosity_error()
    trainer = made()
    output = trainer.train(resume_from_checkpoint=SETTINGS.get("resume"))
    unlike = (*TIMES, "total_flos") if flos(trainer) is None else TIMES
    log = [
        {key: value for key, value in entry.items() if not key.endswith(unlike)}
        for entry in trainer.state.log_history
    ]
    (callback,) = (
        callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Losses)
    )
    result = {
        "progress": [output.global_step, trainer.state.epoch],
        "train_loss": output.training_loss.hex(),
        "log": log,
        **state(trainer),
        "schedule": trainer.lr_scheduler.get_last_lr(),
        "flos": flos(trainer),
        "best": [trainer.state.best_metric, trainer.state.best_global_step],
        "callbacks": [callback.evaluations, callback.steps],
        "random": random_states(),
    }
    write(result)


if __name__ == "__main__":
    main()
