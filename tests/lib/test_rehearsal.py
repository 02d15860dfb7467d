"""What refuses its own state is found before the first step, by loading a copy of it."""

import pytest
import torch
from torch import nn

import keepstep


class Strict(nn.Linear):
    """Like a quantized layer whose own code refuses what the layer gives."""

    def _load_from_state_dict(self, state, prefix, *rest):
        raise RuntimeError("only .cuda() layers are loaded")


class Whole(nn.Linear):
    def load_state_dict(self, state, **options):
        raise NotImplementedError("no way back")


class StrictSGD(torch.optim.SGD):
    def load_state_dict(self, state):
        self.counter = state["counter"]
        super().load_state_dict(state)


class OneWay:
    def state_dict(self):
        return {"at": 3}

    def load_state_dict(self, state):
        raise ValueError(f"cannot go to {state['at']}")


def refused(name):
    model = nn.Linear(2, 2)
    return {
        "a layer": lambda: {"it": nn.Sequential(nn.Linear(2, 2), Strict(2, 2))},
        "a model": lambda: {"it": Whole(2, 2)},
        "an optimizer": lambda: {"model": model, "it": StrictSGD(model.parameters(), lr=0.1)},
        "an object": lambda: {"it": OneWay()},
    }[name]()


@pytest.mark.parametrize("name", ["a layer", "a model", "an optimizer", "an object"])
def test_an_object_that_cannot_load_its_own_state_is_refused_before_the_first_step(sidecar, name):
    checkpointer = keepstep.Checkpointer(refused(name))
    with pytest.raises(keepstep.UsageError, match=r"it: load_state_dict\(\) refuses"):
        checkpointer.restore()
    checkpointer.close()


class ActNorm(nn.Linear):
    """Takes its scale from the first batch, unless it was loaded."""

    initialized = False

    def _load_from_state_dict(self, *rest):
        super()._load_from_state_dict(*rest)
        self.initialized = True


def test_the_load_check_uses_a_copy_and_does_not_change_live_objects(sidecar):
    live, drawn = ActNorm(2, 2), []
    before = live.weight.detach().clone()
    torch.manual_seed(5)
    hooked = nn.Linear(2, 2)
    hooked.register_load_state_dict_post_hook(lambda *_: drawn.append(torch.rand(1)))
    torch.manual_seed(6)
    expected = torch.rand(3)
    torch.manual_seed(6)
    with keepstep.Checkpointer({"live": nn.Sequential(live), "hooked": hooked}) as checkpointer:
        assert checkpointer.restore() is None
        assert not live.initialized
        assert not drawn, "a hook that reaches out of its module is not rehearsed"
        assert torch.equal(live.weight, before)
        assert torch.equal(torch.rand(3), expected), "random numbers are those of the script"
        assert checkpointer.save(0)
        assert not live.initialized


LIVE = {"loads": 0}


def by_closure(live):
    return lambda *_: live.update(loads=live["loads"] + 1)


def by_default(live):
    return lambda module, keys, live=live: live.update(loads=live["loads"] + 1)


def by_global(_):
    return lambda *_: LIVE.update(loads=LIVE["loads"] + 1)


@pytest.mark.parametrize("reach", [by_closure, by_default, by_global])
def test_the_load_check_skips_modules_whose_hooks_access_other_modules(sidecar, reach):
    LIVE["loads"] = 0
    model = nn.Linear(2, 2)
    model.register_load_state_dict_post_hook(reach(LIVE))
    with keepstep.Checkpointer({"model": model}) as checkpointer:
        assert checkpointer.restore() is None
        assert LIVE["loads"] == 0


class Lazy(nn.Linear):
    """Gives more once it has seen a batch, and refuses that."""

    def forward(self, x):
        self.scale = x.detach().abs().max()
        return super().forward(x)

    def _save_to_state_dict(self, state, prefix, keep_vars):
        super()._save_to_state_dict(state, prefix, keep_vars)
        if hasattr(self, "scale"):
            state[f"{prefix}scale"] = self.scale


def test_an_object_that_cannot_load_its_state_after_the_first_batch_fails_the_first_save(sidecar):
    model = nn.Sequential(Lazy(2, 2))
    checkpointer = keepstep.Checkpointer({"model": model})
    checkpointer.restore()
    model(torch.ones(1, 2))
    with pytest.raises(keepstep.UsageError, match=r"0\.scale"):
        checkpointer.save(0)
    assert checkpointer.save(1) is False
    with pytest.raises(keepstep.NotDurableError, match=r"0\.scale"):
        checkpointer.close()
