"""What `attach` takes, leaves alone and refuses; in this process, without training."""

from __future__ import annotations

import types

import peft
import pytest
import torch
import transformers

import keepstep
from keepstep import checkpointer
from keepstep.integrations import _training_identity
from keepstep.integrations import transformers as integration

pytestmark = pytest.mark.filterwarnings("ignore")


def made(tmp_path, kind=transformers.Trainer, **arguments):
    options = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": [], **arguments}
    rows = [{"x": torch.zeros(2)}] * 4
    return kind(
        model=torch.nn.Linear(2, 2),
        args=transformers.TrainingArguments(**options),
        train_dataset=rows,
    )


def test_attach_returns_the_same_trainer_and_keeps_its_class_name(tmp_path):
    trainer = made(tmp_path)
    assert integration.attach(trainer, trusted=True) is trainer
    assert type(trainer).__name__ == "Trainer"
    assert isinstance(trainer, transformers.Trainer)
    assert trainer.keepstep_options == {"trusted": True}
    assert trainer.checkpointer is None
    assert integration.KeepstepTrainerMixin.keepstep_options == {}
    with pytest.raises(keepstep.UsageError, match="attached already"):
        integration.attach(trainer)


@pytest.mark.parametrize("name", ["_inner_training_loop", "_run_epoch"])
def test_a_trainer_with_an_overridden_training_loop_is_refused(tmp_path, name):
    own = type("Looping", (transformers.Trainer,), {name: lambda self, *args, **options: None})
    mixed = type("Mixed", (integration.KeepstepTrainerMixin, own), {})
    for trainer in (integration.attach(made(tmp_path, own)), made(tmp_path, mixed)):
        with pytest.raises(keepstep.UsageError, match=rf"(Looping|Mixed) has a {name} of its own"):
            trainer.train()


@pytest.mark.parametrize(
    ("attribute", "value", "text"),
    [
        ("is_fsdp_enabled", True, "fsdp_version: 2"),
        ("args.auto_find_batch_size", True, "auto_find_batch_size"),
    ],
)
def test_untested_trainer_settings_are_refused_by_name(tmp_path, attribute, value, text):
    trainer = integration.attach(made(tmp_path))
    place, _, name = f"trainer.{attribute}".rpartition(".")
    setattr(trainer.args if place.endswith("args") else trainer, name, value)
    with pytest.raises(keepstep.UsageError, match=text):
        trainer.train()


def test_dispatch_batches_on_several_ranks_is_refused_by_name(tmp_path, monkeypatch):
    trainer = integration.attach(made(tmp_path))
    trainer.accelerator.dataloader_config.dispatch_batches = True
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    with pytest.raises(keepstep.UsageError, match="with dispatch_batches on several ranks"):
        trainer.train()


def test_an_optimizer_that_is_not_a_torch_optimizer_is_refused(tmp_path):
    trainer = integration.attach(made(tmp_path))
    trainer.optimizer = types.SimpleNamespace(optimizer=object())
    with pytest.raises(keepstep.UsageError, match="state of a object: it is no torch"):
        trainer.keepstep_components()


class Line(torch.nn.Linear):
    def forward(self, x):
        return {"loss": super().forward(x).square().mean()}


class Noise(torch.utils.data.Dataset):
    """Rows that are drawn: from the process's generator, or from one seeded by their index."""

    def __init__(self, seeded):
        self.seeded = seeded

    def __len__(self):
        return 8

    def __getitem__(self, at):
        generator = torch.Generator().manual_seed(at) if self.seeded else None
        return {"x": torch.randn(2, generator=generator)}


@pytest.mark.parametrize("seeded", [False, True])
def test_a_dataset_that_draws_random_numbers_during_prefetch_causes_a_warning(
    tmp_path, sidecar, caplog, seeded
):
    options = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": [], "max_steps": 6}
    args = transformers.TrainingArguments(**options, per_device_train_batch_size=2)
    trainer = transformers.Trainer(model=Line(2, 2), args=args, train_dataset=Noise(seeded))
    integration.attach(trainer).train()
    assert trainer.checkpointer.stats.staged
    assert caplog.text.count("draws from the random generators") == (0 if seeded else 1)


def trained(tmp_path, kind=transformers.Trainer, rows=8, callbacks=(), options=None, **arguments):
    given = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": [], "max_steps": 3}
    args = transformers.TrainingArguments(**given | {"per_device_train_batch_size": 1} | arguments)
    data = [{"x": torch.ones(2)}] * rows
    trainer = kind(model=Line(2, 2), args=args, train_dataset=data, callbacks=list(callbacks))
    integration.attach(trainer, **options or {}).train()
    return trainer


@pytest.fixture
def lives(monkeypatch):
    """Each call begins another life of the process, as far as keepstep can see."""

    def begin():
        monkeypatch.setattr(_training_identity, "_BEGUN", {})
        monkeypatch.setattr(checkpointer, "_SAVED_IN", set())

    return begin


def test_a_second_call_of_train_on_the_same_trainer_is_refused(tmp_path, sidecar):
    trainer = trained(tmp_path)
    weights = trainer.model.weight.detach().clone()
    with pytest.raises(keepstep.UsageError, match="a run keeps one training, and this process"):
        trainer.train()
    assert torch.equal(trainer.model.weight, weights)


def test_a_plain_checkpointer_cannot_restore_a_step_of_the_adapter(tmp_path, sidecar):
    trainer = trained(tmp_path)
    plain = keepstep.Checkpointer(model=trainer.model, optimizer=trainer.optimizer.optimizer)
    with pytest.raises(keepstep.MismatchError, match="trainer: in the checkpoint, but not given"):
        plain.restore()


def test_the_adapter_refuses_a_step_of_a_plain_checkpointer(tmp_path, sidecar, lives):
    with keepstep.Checkpointer(model=torch.nn.Linear(2, 2)) as plain:
        plain.restore()
        plain.save(1)
    lives()
    with pytest.raises(keepstep.MismatchError, match="kept by a script's own Checkpointer"):
        trained(tmp_path)


class Other(transformers.Trainer):
    pass


def test_a_step_of_another_kind_of_training_is_refused_before_anything_changes(
    tmp_path, sidecar, lives, caplog
):
    trained(tmp_path)
    lives()
    with pytest.raises(keepstep.MismatchError, match="step 3 of this run is of Trainer, and this"):
        trained(tmp_path, Other)
    assert "hold NaN" not in caplog.text
    assert "restored step" not in caplog.text
    lives()
    assert trained(tmp_path).state.global_step == 3


def test_a_complete_run_logs_that_nothing_is_trained(tmp_path, sidecar, lives, caplog):
    trained(tmp_path)
    assert "complete" not in caplog.text
    assert "settings differ" not in caplog.text
    lives()
    trained(tmp_path)
    assert "this run is complete (step 3 of 3): nothing is trained" in caplog.text
    assert "settings differ" not in caplog.text


def test_arguments_that_changed_since_the_restored_step_are_logged_once(
    tmp_path, sidecar, lives, caplog
):
    trained(tmp_path)
    lives()
    changed = {"learning_rate": 0.5, "max_steps": 5, "seed": 7, "logging_steps": 1}
    assert trained(tmp_path / "elsewhere", rows=9, **changed).state.global_step == 5
    (message,) = (
        message for message in caplog.messages if "settings differ from step 3" in message
    )
    names = ("learning_rate 5e-05 -> 0.5", "max_steps 3 -> 5", "rows 8 -> 9", "seed 42 -> 7")
    assert all(name in message for name in names)
    assert "logging" not in message
    assert "output_dir" not in message


class Interrupt(transformers.TrainerCallback):
    def on_step_end(self, args, state, *_, **__):
        if state.global_step == 2:
            raise KeyboardInterrupt


def test_an_interrupted_notebook_cell_resumes_when_it_is_run_again(tmp_path, sidecar, caplog):
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, callbacks=[Interrupt()])
    again = trained(tmp_path)
    assert again.checkpointer.epoch.parent.step in (1, 2)
    assert again.state.global_step == 3


def test_layers_that_were_unfrozen_during_training_are_still_trained_after_a_restart(
    tmp_path, sidecar, lives
):
    class Unfreeze(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, model, **_):
            model.bias.requires_grad = state.global_step >= 1

    class Frozen(transformers.TrainerCallback):
        def on_train_begin(self, *_, model, **__):
            self.seen = model.bias.requires_grad

    def with_frozen_bias(**options):
        options["model"].bias.requires_grad = False
        return transformers.Trainer(**options)

    trained(tmp_path, with_frozen_bias, callbacks=[Unfreeze()])
    lives()
    frozen = Frozen()
    trained(tmp_path, with_frozen_bias, callbacks=[frozen], max_steps=4)
    assert frozen.seen


@pytest.mark.parametrize("frozen", [True, False])
def test_a_step_of_mostly_frozen_bytes_causes_a_warning(tmp_path, sidecar, caplog, frozen):
    class Wide(Line):
        def forward(self, x):
            return super().forward(x.repeat(1, 8))

    def of_bias(**options):
        options["model"] = Wide(16, 2)
        options["model"].weight.requires_grad = not frozen
        return transformers.Trainer(**options)

    trained(tmp_path, of_bias)
    assert caplog.text.count("of each step do not train") == frozen


@pytest.mark.parametrize("options", [{}, {"frozen_once": False}])
def test_the_frozen_base_below_an_adapter_is_stored_once(tmp_path, sidecar, lives, options):
    class Wide(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.line = torch.nn.Linear(2, 1 << 19, bias=False)

        def forward(self, x):
            return {"loss": self.line(x).square().mean()}

    def of_lora(**given):
        given["model"] = peft.get_peft_model(Wide(), peft.LoraConfig(r=1, target_modules=["line"]))
        return transformers.Trainer(**given)

    def train(steps):
        lives()
        torch.manual_seed(5)
        return trained(tmp_path, of_lora, options=options, max_steps=steps)

    first = train(2)
    before = {name: value.clone() for name, value in first.model.state_dict().items()}
    again = train(3)
    assert again.checkpointer.epoch.parent.step == 2
    plain = "base_model.model.line.base_layer.weight"
    assert torch.equal(again.model.state_dict()[plain], before[plain])
    kept_once = again.checkpointer._frozen.base is not None
    assert kept_once == (not options)


def test_a_substitute_for_the_model_stores_only_what_its_state_dict_returns(
    tmp_path, sidecar, lives, caplog
):
    class Bias:
        def __init__(self, model):
            self.model = model

        def state_dict(self):
            return {"bias": self.model.bias.detach()}

        def load_state_dict(self, state):
            self.model.load_state_dict(state, strict=False)

    class Tuner(integration.KeepstepTrainerMixin, transformers.Trainer):
        def keepstep_components(self):
            return {**super().keepstep_components(), "model": Bias(self.model)}

    def train(steps, seed):
        torch.manual_seed(seed)
        model = Line(2, 2)
        model.weight.requires_grad = False
        options = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": []}
        args = transformers.TrainingArguments(
            **options, max_steps=steps, per_device_train_batch_size=1
        )
        Tuner(model=model, args=args, train_dataset=[{"x": torch.ones(2)}] * 8).train()
        return model

    first = train(3, seed=1)
    lives()
    again = train(3, seed=2)
    assert torch.equal(again.bias, first.bias)
    assert not torch.equal(again.weight, first.weight)
    assert "of each step do not train" not in caplog.text


class Curriculum(transformers.Trainer):
    """Knows things of its own, as people write it."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.level, self.fixed = 0, {"a": [1, 2]}
        self.teacher = torch.nn.Linear(2, 2)
        self.hardness = types.SimpleNamespace(seen=[0.0])

    def training_step(self, *args, **options):
        self.level += 1
        self.hardness.seen[0] += 0.5
        with torch.no_grad():
            self.teacher.weight.data.mul_(0.9)
        return super().training_step(*args, **options)


class Average(transformers.TrainerCallback):
    def __init__(self):
        self.weight, self.of = torch.zeros(2), "weights"

    def on_step_end(self, args, state, control, model, **_):
        self.weight.mul_(0.9).add_(model.bias.detach(), alpha=0.1)


class Counted(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):
    def __init__(self, steps=0):
        self.steps = steps

    def state(self):
        return {"args": {}, "attributes": {"steps": self.steps}}

    def on_step_end(self, *_, **__):
        self.steps += 1


def test_attributes_that_change_but_are_in_no_step_are_logged_once(tmp_path, sidecar, caplog):
    trained(tmp_path, Curriculum, callbacks=[Average(), Counted()], max_steps=9)
    (message,) = (message for message in caplog.messages if "is in no step" in message)
    names, _, _ = message.removeprefix("keepstep: ").partition(": changes")
    assert names.split(", ") == [
        "Average.weight", "Curriculum.hardness", "Curriculum.level", "Curriculum.teacher",
    ]  # fmt: skip


def test_attributes_that_a_class_adds_as_components_cause_no_warning(tmp_path, sidecar, caplog):
    class Named(integration.KeepstepTrainerMixin, Curriculum):
        def keepstep_components(self):
            level = {"level": self.level}
            return {**super().keepstep_components(), "teacher": self.teacher, "level": level}

    options = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": [], "max_steps": 5}
    args = transformers.TrainingArguments(**options, per_device_train_batch_size=1)
    Named(model=Line(2, 2), args=args, train_dataset=[{"x": torch.ones(2)}] * 8).train()
    assert "is in no step" not in caplog.text
