"""Integrations are no part of the core: nobody pays for them, and each names what it was tested
with."""

from __future__ import annotations

import dis
import subprocess
import sys

import pytest
from torch import nn
from torch.utils.data import DataLoader

import keepstep
from keepstep.integrations import TESTED, find_attributes_set_in_code, require_framework_hooks


def test_importing_keepstep_imports_no_integration():
    code = (
        "import keepstep, sys; keepstep.Checkpointer;"
        "print([one for one in sys.modules if one.split('.')[0] in ('transformers', 'accelerate')"
        " or one.startswith('keepstep.integrations')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Framework:
    """What an adapter may need of a framework."""

    def train(self, model, *, epoch=0):
        self._step = epoch


HERE = f"{__name__}:Framework"


@pytest.fixture
def needed(monkeypatch):
    def needed(version, *hooks, owner=HERE):
        monkeypatch.setitem(TESTED, f"x{hooks}", ("5.19", "5.23"))
        require_framework_hooks(f"x{hooks}", version, hooks={owner: hooks})

    return needed


@pytest.mark.parametrize(
    "missing", ["fit", "train(model, batches)", "_loss", "train(epoch, step, model)"]
)
def test_a_version_that_lacks_a_hook_is_refused_whatever_its_number(needed, missing):
    for version in ("4.60.0", "5.20.1", "6.0"):
        with pytest.raises(keepstep.UsageError, match=r"install .* 5.19 to 5.23") as error:
            needed(version, "train", missing, "_step")
        assert f"lacks what keepstep needs of it: Framework.{missing};" in str(error.value)


@pytest.mark.parametrize("owner", ["no_such_module:Framework", f"{__name__}:Other"])
def test_a_missing_framework_class_is_reported_as_a_missing_hook(needed, owner):
    with pytest.raises(keepstep.UsageError, match=rf"{owner.partition(':')[2]}.train; install"):
        needed("5.20", "train", owner=owner)


def test_an_untested_framework_version_is_accepted_with_one_warning(needed, caplog):
    hooks = ("train(model, epoch)", "_step")
    for version in ("5.19.0", "5.20.1", "5.23.9", "5.19.0rc1"):
        needed(version, *hooks)
    assert not caplog.messages
    for version in ("5.18.9", "5.24.0.dev0", "6.0"):
        for _ in range(2):
            needed(version, *hooks)
        (message,) = caplog.messages
        assert f" {version} was never tested" in message
        assert "tested with 5.19 to 5.23: it has all that keepstep needs of it" in message
        caplog.clear()


def test_batches_that_are_not_a_component_are_refused_at_the_first_iteration(sidecar):
    batches = keepstep.Batches(DataLoader([1, 2, 3]))
    for components in ({}, {"batches": batches}):
        with pytest.raises(keepstep.UsageError, match="no Checkpointer keeps this Batches"):
            next(iter(batches))
        with keepstep.Checkpointer(model=nn.Linear(2, 2), **components) as checkpointer:
            checkpointer.restore()
            kept = components and len(list(batches))
    assert kept == 3


def test_batches_forward_attributes_of_the_wrapped_loader():
    loader = DataLoader([1, 2, 3], batch_size=2)
    batches = keepstep.Batches(loader)
    batches.epoch, batches.mixed = 5, True
    assert (len(batches), batches.batch_size, batches.epoch) == (2, 2, 5)
    assert loader.mixed
    assert not hasattr(loader, "epoch")
    assert not hasattr(batches, "missing")


def test_the_attributes_that_code_sets_are_those_that_dis_finds():
    many = "; ".join(f"self.attribute_{number} = self.other_{number}" for number in range(600))
    names: dict[str, type] = {}
    exec(f"class Many:\n    def set(self): {many}", names)
    for kind in (names["Many"], nn.Module, DataLoader):
        functions = [var for var in vars(kind).values() if hasattr(var, "__code__")]
        found = [each for function in functions for each in dis.get_instructions(function)]
        stored = {each.argval for each in found if each.opname == "STORE_ATTR"}
        assert find_attributes_set_in_code(kind) == stored != set()
