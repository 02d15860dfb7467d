"""What the callback for Lightning takes, leaves alone and refuses; in this process."""

from __future__ import annotations

import copy
import re
import subprocess
import types

import bitsandbytes
import lightning.pytorch as lightning
import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.tuner import Tuner
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torchao.prototype.quantized_training import int8_weight_only_quantized_training
from torchao.quantization import quantize_

import keepstep
from keepstep.integrations import _training_identity
from keepstep.integrations.lightning import KeepstepCallback
from tests.frameworks.conftest import LIGHTNING, python

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.lr = torch.nn.Linear(2, 2), 0.1

    def forward(self, batch):
        return self.net(batch)

    def training_step(self, batch, at):
        return self.net(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self):
        return DataLoader(torch.zeros(8, 2), batch_size=2)


def made(tmp_path, *callbacks, **options):
    return lightning.Trainer(
        accelerator="cpu",
        max_epochs=options.pop("max_epochs", 1),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        default_root_dir=str(tmp_path),
        **options,
    )


def test_training_without_a_sidecar_is_unchanged_and_no_hook_remains(tmp_path):
    callback = KeepstepCallback()
    trainer = made(tmp_path, callback)
    trainer.fit(Model())
    assert trainer.global_step == 4
    assert callback.checkpointer is not None
    loops = (trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer._checkpoint_connector)
    assert not [name for loop in loops for name in vars(loop) if name.startswith("on_adv")]
    assert not [name for loop in loops for name in vars(loop) if name.startswith("restore_")]


def test_learning_rate_search_and_prediction_create_no_checkpointer(tmp_path, sidecar):
    callback = KeepstepCallback()
    trainer, model = made(tmp_path, callback), Model()
    Tuner(trainer).lr_find(model, num_training=3, min_lr=1e-3, max_lr=1e-2)
    trainer.predict(model, DataLoader(torch.zeros(2, 2)))
    made(tmp_path, callback, fast_dev_run=True).fit(model)
    assert callback.checkpointer is None


class Other(Model):
    pass


def test_a_step_of_another_module_is_refused_before_anything_changes(
    tmp_path, sidecar, lives, caplog
):
    made(tmp_path, KeepstepCallback()).fit(Model())
    lives()
    with pytest.raises(keepstep.MismatchError, match="is of Model, and this is Other"):
        made(tmp_path, KeepstepCallback()).fit(Other())
    assert "hold NaN" not in caplog.text


def test_completion_and_changed_settings_are_logged(tmp_path, sidecar, lives, caplog):
    made(tmp_path, KeepstepCallback()).fit(Model())
    assert "settings differ" not in caplog.text
    lives()
    model = Model()
    model.lr = 0.5
    made(tmp_path, KeepstepCallback()).fit(model)
    assert "this run is complete (step 4): nothing is trained" in caplog.text
    assert "settings differ from step 4: optimizer.lr 0.1 -> 0.5" in caplog.text


def test_an_interrupted_notebook_cell_resumes_when_it_is_run_again(tmp_path, sidecar):
    class Interrupt(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 2:
                raise KeyboardInterrupt

    with pytest.raises(SystemExit):
        made(tmp_path, KeepstepCallback(), Interrupt()).fit(Model())
    callback = KeepstepCallback()
    trainer = made(tmp_path, callback)
    trainer.fit(Model())
    assert callback.checkpointer.epoch.parent.step in (1, 2)
    assert trainer.global_step == 4


def test_a_checkpoint_of_lightnings_that_ends_within_an_epoch_is_warned_of_by_lightning(tmp_path):
    class Save(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 2:
                trainer.save_checkpoint(tmp_path / "within.ckpt")

    made(tmp_path, Save()).fit(Model())
    with pytest.warns(UserWarning, match="ended before the epoch ended"):
        made(tmp_path, KeepstepCallback()).fit(Model(), ckpt_path=tmp_path / "within.ckpt")


@pytest.fixture
def lives(monkeypatch):
    """Each call begins another life of the process, as far as keepstep can see."""
    return lambda: monkeypatch.setattr(_training_identity, "_BEGUN", {})


class Quantized(Model):
    """A frozen layer of four bits below one that trains."""

    def __init__(self, seed=0, block=64):
        super().__init__()
        torch.manual_seed(seed)
        first = bitsandbytes.nn.Linear4bit(2, 64, compute_dtype=torch.float32, quant_type="nf4")
        first.weight.blocksize = block
        first.weight.requires_grad = first.bias.requires_grad = False
        self.net = torch.nn.Sequential(first.to("cpu"), torch.nn.Linear(64, 2))

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[1].parameters(), lr=self.lr)


@pytest.mark.parametrize("other", [{"seed": 1}, {"block": 128}], ids=["base", "block size"])
def test_an_adapter_on_a_quantised_base_is_restored_and_another_base_is_refused(
    tmp_path, sidecar, lives, other
):
    first = Quantized()
    made(tmp_path, KeepstepCallback()).fit(first)
    lives()
    again, callback = Quantized(), KeepstepCallback()
    made(tmp_path, callback).fit(again)
    assert callback.checkpointer.epoch.parent.step == 4
    assert torch.equal(again.net[1].weight, first.net[1].weight)
    lives()
    with pytest.raises(keepstep.MismatchError, match="step 4 was trained on another frozen base"):
        made(tmp_path, KeepstepCallback()).fit(Quantized(**other))


class Divided(Quantized):
    """The same by FSDP2; `trains`: the layer of four bits becomes one of torchao's that trains."""

    def __init__(self, trains):
        super().__init__()
        self.trains = trains

    def configure_model(self):
        if self.trains:
            self.net[0] = torch.nn.Linear(2, 64)
            quantize_(self.net[0], int8_weight_only_quantized_training())
        for part in (self.net[0], self.net):
            fully_shard(part, mesh=self.device_mesh["data_parallel"])


@pytest.mark.parametrize(
    ("trains", "message"),
    [
        (False, "keepstep keeps quantised models without FSDP only"),
        (True, r"net\.0\.weight: a sharded Int8\w+ keeps its values in other tensors"),
    ],
    ids=["bitsandbytes", "torchao"],
)
def test_a_sharded_quantised_model_is_refused_by_name(tmp_path, sidecar, trains, message):
    """In a process of its own, because torch's process group would stay in this one."""
    text = f"from {__name__} import *; fit_divided({str(tmp_path)!r}, trains={trains})"
    command = [python(*LIGHTNING), "-c", text]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 1
    assert re.search(f"UsageError: .*{message}", ended.stderr), ended.stderr[-2000:]


def fit_divided(directory: str, *, trains: bool) -> None:
    strategy = ModelParallelStrategy(1, 1)
    made(directory, KeepstepCallback(), devices=1, strategy=strategy).fit(Divided(trains))


def test_callbacks_can_be_copied_while_they_train(tmp_path, sidecar):
    class Copies(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            self.found = copy.deepcopy(trainer.callbacks)

    copies, callback = Copies(), KeepstepCallback()
    made(tmp_path, copies, callback).fit(Model())
    (found,) = [callback for callback in copies.found if isinstance(callback, KeepstepCallback)]
    assert found.options == callback.options
    assert found.checkpointer is None
    assert callback.checkpointer is not None


def test_the_last_step_is_complete_although_not_every_step_is_staged(
    tmp_path, sidecars, monkeypatch, lives
):
    monkeypatch.setenv("KEEPSTEP_SOCKET", str(sidecars().start("--stage-every", "3").socket))
    made(tmp_path, KeepstepCallback()).fit(Model())
    lives()
    trainer = made(tmp_path, KeepstepCallback())
    trainer.fit(Model())
    assert trainer.global_step == 4, "what is over is not trained again"


def test_logged_metrics_reuse_the_same_tensors_at_each_save(tmp_path, sidecar):
    """Or each save would walk through the whole state."""
    keeper, misses = KeepstepCallback(), []

    class Logging(Model):
        def training_step(self, batch, at):
            loss = super().training_step(batch, at)
            self.log("loss", loss, on_step=True, on_epoch=True)
            return loss

    class Observer(lightning.Callback):
        def on_train_batch_end(self, *_):
            misses.append(keeper.checkpointer._taking._misses)

    made(tmp_path, keeper, Observer(), max_epochs=2).fit(Logging())
    assert misses[3] == misses[7] == 0


def test_a_strategy_that_cannot_be_kept_is_refused_by_name(tmp_path):
    trainer = made(tmp_path, KeepstepCallback())
    kind = type("FSDPStrategy", (type(trainer.strategy),), {})
    trainer.strategy.__class__ = type("Mine", (kind,), {})
    with pytest.raises(keepstep.UsageError, match="keepstep keeps FSDP2"):
        trainer.fit(Model())


@pytest.mark.parametrize("name", ["StochasticWeightAveraging", "ModelPruning"])
def test_a_callback_with_weights_of_its_own_is_refused_by_name(tmp_path, name):
    other = type(name, (lightning.Callback,), {})()
    with pytest.raises(keepstep.UsageError, match=f"{name} .* keepstep cannot follow"):
        made(tmp_path, KeepstepCallback(), other).fit(Model())


def test_a_training_step_that_takes_the_data_iterator_is_refused(tmp_path):
    class Fetching(Model):
        def training_step(self, dataloader_iter):
            return self.net(next(dataloader_iter)[0]).sum()

    with pytest.raises(keepstep.UsageError, match="dataloader_iter"):
        made(tmp_path, KeepstepCallback()).fit(Fetching())


def test_a_checkpoint_hook_that_is_never_called_causes_a_warning(tmp_path, caplog):
    class Adding(Model):
        def on_save_checkpoint(self, checkpoint):
            raise AssertionError

    made(tmp_path, KeepstepCallback()).fit(Adding())
    assert "Adding.on_save_checkpoint is not called" in caplog.text


def test_an_optimizer_that_is_not_a_torch_optimizer_is_refused():
    strategy = types.SimpleNamespace(model=Model(), optimizers=[object()])
    with pytest.raises(keepstep.UsageError, match="state of a object: it is no torch"):
        KeepstepCallback().keepstep_components(types.SimpleNamespace(strategy=strategy))
