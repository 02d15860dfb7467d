"""What does not verify in memory comes from the next tier, and is never an error for ever."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import keepstep
from keepstep.client.slot import SlotMapping
from keepstep.image import ControlPage, Layout, TensorRole, TensorSpec
from tests.lib.training import begun

TEXTS = {"said": "0123456789" * 50}


def killed_after(steps, sidecar):
    """A life that ends without a goodbye; returns the weights of its last step."""
    model, notes = nn.Linear(8, 8), dict(TEXTS)
    checkpointer = begun({"m": model, "notes": notes})
    for step in range(steps):
        with checkpointer.mutating():
            model.weight.data.add_(1)
        assert checkpointer.save(step)
        checkpointer.wait(step, "committed", timeout=20)
    checkpointer.close()
    return model.weight.detach().clone()


def newest_slot(sidecar, step):
    for path in sidecar.memory.glob("rank-*/*.slot"):
        page = path.read_bytes()[-4096:]
        if page.strip(b"\0") and ControlPage.from_bytes(page).step == step:
            return path
    pytest.fail(f"step {step} is in no slot")


def damage(path, what):
    layout = Layout.parse(path.read_bytes())
    at = {
        "seal": layout.control_begin + 100,
        "header": 40,
        "extras": layout.extras_begin + 1,
    }
    if what == "removed":
        path.unlink()
    elif what == "truncated":
        os.truncate(path, 0)
    else:
        with path.open("r+b") as file:
            file.seek(at[what])
            file.write(b"\xff\xff")


@pytest.mark.parametrize("what", ["seal", "header", "extras", "removed", "truncated"])
def test_an_image_that_is_damaged_in_memory_comes_from_the_volume(sidecar, what):
    expected = killed_after(3, sidecar)
    damage(newest_slot(sidecar, 2), what)
    for _ in range(2):
        model, notes = nn.Linear(8, 8), {}
        with keepstep.Checkpointer({"m": model, "notes": notes}) as checkpointer:
            at = checkpointer.restore()
        assert (at.step, at.tier) == (2, "local")
        assert torch.equal(model.weight, expected)
        assert notes == TEXTS


def test_extras_beyond_their_capacity_are_an_error_and_write_nothing(tmp_path: Path) -> None:
    layout = Layout.build([TensorSpec("w", "F32", (4,), TensorRole.PARAMS)], rank=0, world=1)
    path = tmp_path / "slot"
    path.write_bytes(layout.header.ljust(layout.size_bytes, b"\0"))
    before = path.read_bytes()
    mapping = SlotMapping(str(path))
    with pytest.raises(ValueError, match="1 bytes larger"):
        mapping.write_extras(b"x" * (layout.extras_capacity_bytes + 1))
    assert path.read_bytes() == before
    mapping.write_extras(b"x" * layout.extras_capacity_bytes)
    assert path.read_bytes()[layout.digests_begin :] == before[layout.digests_begin :]
