"""A tiny training with a trainer of TRL's: `python trl_trainer.py OUT SETTINGS`; as trainer.py."""

from __future__ import annotations

import random
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig, prepare_model_for_kbit_training
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

from keepstep.integrations.transformers import attach
from tests.frameworks.script import OUT, SETTINGS, digest, maybe_kill, random_states, record, write

WORDS = [f"w{at}" for at in range(60)]
TIMES = ("runtime", "per_second", "step_time")


def texts(count: int, seed: int, most: int = 12) -> list[str]:
    drawn = random.Random(seed)
    return [" ".join(drawn.choices(WORDS, k=drawn.randint(3, most))) for _ in range(count)]


def tokenizer() -> Any:
    names = ["<pad>", "<eos>", "<bos>", "<unk>", *WORDS]
    words = {word: at for at, word in enumerate(names)}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **special)


def model(kind: Any = LlamaForCausalLM, hidden_size: int = 32, **more: Any) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=hidden_size, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        attention_dropout=0.1, pad_token_id=0, eos_token_id=1, bos_token_id=2, **more,
    )  # fmt: skip
    return kind(config)


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion.split()))) for completion in completions]


def pairs(count: int) -> Dataset:
    answers = {"chosen": texts(count, 2), "rejected": texts(count, 3)}
    spaced = {name: [f" {answer}" for answer in each] for name, each in answers.items()}
    return Dataset.from_dict({"prompt": texts(count, 1, 6), **spaced})


def labelled(count: int) -> Dataset:
    answers = [f" {text}" for text in texts(count, 2)]
    labels = [at % 3 != 0 for at in range(count)]
    return Dataset.from_dict({"prompt": texts(count, 1, 6), "completion": answers, "label": labels})


def data(kind: str) -> Any:
    if kind == "SFT":
        return Dataset.from_dict({"text": texts(80, 0)})
    if kind == "KTO":
        return labelled(48)
    if kind in ("GRPO", "RLOO"):
        return Dataset.from_dict({"prompt": texts(48, 1, 6)})
    return pairs(32)


def quantized(how: str) -> Any:
    """As QLoRA begins: a base of 4 or 8 bits, which bitsandbytes has quantised as it was loaded."""
    base = OUT / "base"
    if not base.exists():
        model(hidden_size=64).save_pretrained(base)
    options: dict[str, Any] = {
        "4": {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": torch.float32,
        },
        "8": {"load_in_8bit": True},
    }[how]
    if SETTINGS.get("other"):
        options["bnb_4bit_quant_type"] = "fp4"
    config = BitsAndBytesConfig(**options)
    loaded = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=config, device_map="cpu"
    )
    torch.manual_seed(0)
    return prepare_model_for_kbit_training(loaded, use_gradient_checkpointing=False)


class Kill(TrainerCallback):
    """Between backward and the optimizer's step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        maybe_kill(state.global_step)


def recorded(kind: Any) -> Any:
    """The same trainer, which writes its losses."""

    class Recorded(kind):  # type: ignore[misc]
        def training_step(self, *args: Any, **options: Any) -> Any:
            loss = super().training_step(*args, **options)
            record(self.state.global_step, loss.detach())
            return loss

    Recorded.__name__ = kind.__name__
    return Recorded


def made(kind: str) -> Any:
    options: dict[str, Any] = {
        "output_dir": str(OUT / "hf"),
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 3,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        **SETTINGS.get("arguments", {}),
    }
    lora = LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
    )  # fmt: skip
    given: dict[str, Any] = {"peft_config": lora if SETTINGS.get("lora") else None}
    if kind in ("GRPO", "RLOO"):
        given["reward_funcs"] = reward
    if SETTINGS.get("reference"):
        given["ref_model"] = model()
    of = LlamaForSequenceClassification if kind == "Reward" else LlamaForCausalLM
    if bits := SETTINGS.get("bits"):
        trained = quantized(bits)
    else:
        trained = model(of, **({"num_labels": 1} if kind == "Reward" else {}))
    trainer = recorded(getattr(trl, f"{kind}Trainer"))(
        model=trained,
        args=getattr(trl, f"{kind}Config")(**options),
        train_dataset=data(kind),
        processing_class=tokenizer(),
        callbacks=[Kill()],
        **given,
    )
    return trainer if SETTINGS.get("bare") else attach(trainer)


def main() -> None:
    transformers.logging.set_verbosity_error()
    trainer = made(SETTINGS["kind"])
    output = trainer.train(resume_from_checkpoint=SETTINGS.get("resume"))
    log = [
        {key: value for key, value in entry.items() if not key.endswith(TIMES)}
        for entry in trainer.state.log_history
    ]
    result = {
        "progress": [output.global_step, trainer.state.epoch],
        "train_loss": output.training_loss.hex(),
        "log": log,
        "weights": digest(trainer.model.state_dict()),
        "optimizer": digest(trainer.optimizer.state_dict()),
        "schedule": trainer.lr_scheduler.get_last_lr(),
        "random": random_states(),
    }
    if SETTINGS.get("reference"):
        result["reference"] = digest(trainer.ref_model.state_dict())
    write(result)


if __name__ == "__main__":
    main()
