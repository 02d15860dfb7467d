"""Frozen parameters are kept once, beside each step that refers to them, and come back."""

from __future__ import annotations

import os

import pytest
import safetensors.torch
import torch

from tests.frozen.models import equal, made, train
from tests.harness import eventually
from tests.lib.training import begun


def components(model, optimizer):
    return {"model": model, "optimizer": optimizer}


def written(sidecar):
    """Bytes of the newest step's own shard, and the base beside it."""
    newest = max(sidecar.root.glob("0*"))
    (shard,), bases = newest.glob("rank-*"), list(newest.glob("base-*"))
    return shard.stat().st_size, bases


def test_each_step_after_the_first_writes_what_is_trained_alone(sidecar):
    model, optimizer = made()
    frozen = sum(one.nbytes for one in model.parameters() if not one.requires_grad)
    with begun(components(model, optimizer), strict=True) as checkpointer:
        for step in range(5):
            train(model, optimizer)
            checkpointer.save(step)
            checkpointer.wait(step)
        size, (base,) = written(sidecar)
    assert size <= 0.02 * (frozen + size)
    assert base.stat().st_size < 1.05 * frozen
    inodes = {path.stat().st_ino for path in sidecar.root.glob("*/base-*")}
    assert len(inodes) == 1


def test_a_killed_run_goes_on_bit_equal(sidecar):
    model, optimizer = made()
    with begun(components(model, optimizer), strict=True) as checkpointer:
        for step in range(3):
            train(model, optimizer)
            checkpointer.save(step)
    other, fresh = made(seed=1)  # with other frozen values, too
    with begun(components(other, fresh), strict=True) as checkpointer:
        assert checkpointer.epoch.parent.step == 2
        assert equal(model, other)
