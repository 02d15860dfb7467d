"""A tiny training of sentence-transformers: `python sentence.py OUT SETTINGS`; as trainer.py."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from datasets import Dataset, DatasetDict
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sentence_transformer.modules import Dropout, StaticEmbedding

from keepstep.integrations.transformers import attach
from tests.frameworks.script import OUT, SETTINGS, digest, random_states, write
from tests.frameworks.trainer import TIMES, Losses, recorded
from tests.frameworks.trl_trainer import texts, tokenizer


class Summed(losses.MultipleNegativesRankingLoss):
    """Two losses by name, of which the trainer keeps sums for the log."""

    def forward(self, features: Any, labels: Any) -> Any:
        loss = super().forward(features, labels)
        return {"ranking": loss, "half": loss / 2}


def pairs(seed: int) -> Dataset:
    columns = {name: texts(40, seed + at) for at, name in enumerate(("premise", "hypothesis"))}
    return Dataset.from_dict(columns)


def labelled() -> Dataset:
    return pairs(0).add_column("label", [at % 3 for at in range(40)])


def made() -> Any:
    torch.manual_seed(0)
    embedding = StaticEmbedding(tokenizer().backend_tokenizer, embedding_dim=16)
    model = SentenceTransformer(modules=[embedding, Dropout(0.1)], device="cpu")
    if SETTINGS["loss"] == "softmax":
        loss, rows = losses.SoftmaxLoss(model, 16, num_labels=3), labelled()
    else:
        loss, rows = Summed(model), DatasetDict({"a": pairs(0), "b": pairs(5)})
    args = Arguments(
        output_dir=str(OUT / "hf"), num_train_epochs=2, per_device_train_batch_size=4,
        learning_rate=1e-2, logging_steps=4, save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=True, **SETTINGS.get("arguments", {}),
    )  # fmt: skip
    trainer = recorded(SentenceTransformerTrainer)(
        model=model, args=args, train_dataset=rows, loss=loss, callbacks=[Losses()]
    )
    return trainer if SETTINGS.get("bare") else attach(trainer)


def main() -> None:
    transformers.logging.set_verbosity_error()
    trainer = made()
    output = trainer.train()
    log = [
        {key: value for key, value in entry.items() if not key.endswith(TIMES)}
        for entry in trainer.state.log_history
    ]
    write(
        {
            "progress": [output.global_step, trainer.state.epoch],
            "train_loss": output.training_loss.hex(),
            "log": log,
            "weights": digest(trainer.model.state_dict()),
            "loss": digest(trainer.loss.state_dict()),
            "optimizer": digest(trainer.optimizer.state_dict()),
            "random": random_states(),
        }
    )


if __name__ == "__main__":
    main()
