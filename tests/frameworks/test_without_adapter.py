"""Where a framework is met without its adapter: told once, and what cannot be kept is refused."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import keepstep

ADAPTER = "keepstep.integrations.transformers"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x) - labels).square().mean()}


class ByHand(TrainerCallback):
    """As one keeps steps without an adapter. `early`: from before the training."""

    def __init__(self, model: Model, *, early: bool) -> None:
        self.model = model
        self.checkpointer = self.begun() if early else None

    def begun(self) -> keepstep.Checkpointer:
        checkpointer = keepstep.Checkpointer(model=self.model, strict=True)
        checkpointer.restore()
        return checkpointer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.checkpointer = self.checkpointer or self.begun()

    def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        assert self.checkpointer is not None
        assert self.checkpointer.save(state.global_step)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        assert self.checkpointer is not None
        self.checkpointer.close()


def trained(tmp_path: Path, *, early: bool) -> None:
    model = Model()
    rows = [{"x": torch.ones(2), "labels": torch.ones(1)}] * 6
    options = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(str(tmp_path), max_steps=3, **options)
    Trainer(model, arguments, train_dataset=rows, callbacks=[ByHand(model, early=early)]).train()


@pytest.mark.parametrize("early", [False, True], ids=["made-within", "made-before"])
def test_a_trainer_loop_without_the_adapter_causes_one_warning(
    sidecar, tmp_path, caplog, monkeypatch, early
) -> None:
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    with caplog.at_level(logging.WARNING, "keepstep"):
        trained(tmp_path, early=early)
    assert [
        message
        for message in caplog.messages
        if ADAPTER in message and "a framework owns" in message
    ]
    assert sum(ADAPTER in message for message in caplog.messages) == 1


def test_a_trainer_loop_with_the_adapter_causes_no_warning(sidecar, tmp_path, caplog) -> None:
    importlib.import_module(ADAPTER)
    trained(tmp_path, early=False)
    assert ADAPTER not in caplog.text


def test_a_plain_training_loop_causes_no_warning(sidecar, caplog, monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    checkpointer = keepstep.Checkpointer(model=nn.Linear(1, 1))
    checkpointer.restore()
    assert checkpointer.save(1)
    checkpointer.close()
    assert "a framework owns" not in caplog.text


@pytest.mark.parametrize(
    "kind", [DeepSpeedEngine, DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3]
)
def test_a_deepspeed_object_without_the_adapter_is_refused_by_name(kind: type) -> None:
    named = rf"'it' is a {kind.__name__}, .*keepstep\.integrations\.deepspeed can name"
    with pytest.raises(keepstep.UsageError, match=named):
        keepstep.Checkpointer(it=kind.__new__(kind))
