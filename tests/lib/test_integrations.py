"""Integrations are no part of the core: nobody pays for them, and each names what it was tested
with."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch import nn
from torch.utils.data import DataLoader

import keepstep
from keepstep.integrations import require
from keepstep.integrations.loaders import Batches


def test_importing_keepstep_imports_no_integration():
    code = (
        "import keepstep, sys; keepstep.Checkpointer;"
        "print([one for one in sys.modules if one.split('.')[0] in ('transformers', 'accelerate')"
        " or one.startswith('keepstep.integrations')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("version", ["5.18.9", "4.60.0", "5.24.0.dev0", "6.0"])
def test_a_version_outside_of_the_range_is_refused_and_the_range_is_named(version):
    with pytest.raises(keepstep.UsageError, match=rf"x {version} was never .*x >= 5.19, < 5.24"):
        require("x", version, at_least="5.19", below="5.24")


def test_batches_that_are_no_component_are_refused_before_an_epoch_is_done_twice(sidecar):
    def begun(**components):
        made = keepstep.Checkpointer(model=nn.Linear(2, 2), **components)
        made.restore(rng="later")
        return made

    batches = Batches(DataLoader([1, 2, 3]))
    alone = begun()
    with pytest.raises(keepstep.UsageError, match="no component of the Checkpointer"):
        next(batches.left(alone))
    alone.close()
    with_it = begun(batches=batches)
    assert len(list(batches.left(with_it))) == 3
    with_it.close()
