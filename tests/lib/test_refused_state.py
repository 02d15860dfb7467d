"""What refuses its own state is named when it is first kept."""

import pytest
import torch
from torch import nn

import keepstep


class Lazy(nn.Linear):
    """Gives more once it has seen a batch, and refuses that."""

    def forward(self, x):
        self.scale = x.detach().abs().max()
        return super().forward(x)

    def _save_to_state_dict(self, state, prefix, keep_vars):
        super()._save_to_state_dict(state, prefix, keep_vars)
        if hasattr(self, "scale"):
            state[f"{prefix}scale"] = self.scale


def test_what_refuses_its_state_from_the_first_batch_on_makes_the_first_save_fail(sidecar):
    model = nn.Sequential(Lazy(2, 2))
    checkpointer = keepstep.Checkpointer({"model": model})
    checkpointer.restore()
    model(torch.ones(1, 2))
    with pytest.raises(keepstep.UsageError, match=r"0\.scale"):
        checkpointer.save(0)
    assert checkpointer.save(1) is False
    with pytest.raises(keepstep.NotDurableError, match=r"0\.scale"):
        checkpointer.close()
