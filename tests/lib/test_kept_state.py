"""What goes in comes out: every kind of tensor and object, through a real sidecar, bit-equal."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import keepstep
from tests.lib.training import begun, bring_back, keep


def bits(tensor):
    return tensor.detach().contiguous().flatten().view(torch.uint8) if tensor.numel() else None


def assert_bit_equal(first, other):
    assert first.dtype == other.dtype
    assert first.shape == other.shape
    if first.numel():
        assert torch.equal(bits(first), bits(other))


def trained(seed=0, optimizer=torch.optim.AdamW, steps=3):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 4))
    optimizer = optimizer(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(32, 8)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_restore_returns_none_when_there_is_no_step(sidecar):
    assert bring_back({"model": nn.Linear(2, 2)}) is None


def test_a_model_is_restored_in_place_bit_equal_and_continues_with_the_same_losses(
    sidecar,
):
    def train_on(model, optimizer):
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(32, 8)).square().mean()
            loss.backward()
            optimizer.step()
            yield loss.item()

    model, optimizer = trained()
    keep({"model": model, "optimizer": optimizer}, step=7)
    other, fresh = trained(seed=1, steps=0)
    addresses = [parameter.data_ptr() for parameter in other.parameters()]
    random = torch.get_rng_state()
    at = bring_back({"model": other, "optimizer": fresh})
    assert (at.step, at.epoch) == (7, 2)
    assert [parameter.data_ptr() for parameter in other.parameters()] == addresses
    for name, tensor in model.state_dict().items():
        assert_bit_equal(tensor, other.state_dict()[name])
    for parameter, two in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[parameter].items():
            assert_bit_equal(value, fresh.state[two][key])
    again = torch.get_rng_state()
    assert not torch.equal(again, random)
    losses = list(train_on(other, fresh))
    torch.set_rng_state(again)
    assert list(train_on(model, optimizer)) == losses


def test_a_growing_list_of_values_keeps_its_layout(sidecar):
    progress = {"losses": []}
    with begun({"p": progress, "m": nn.Linear(2, 2)}, strict=True) as checkpointer:
        checkpointer.save(0)
        layout = checkpointer._snapshots.layout.id
        progress["losses"] += [1.0, 2.0]
        checkpointer.save(1)
        assert checkpointer._snapshots.layout.id == layout


def test_values_that_outgrow_their_reserved_space_get_a_new_layout(sidecar):
    progress = {"text": ""}
    with begun({"p": progress}, strict=True) as checkpointer:
        checkpointer.save(0)
        progress["text"] = "x" * 1_000_000
        checkpointer.save(1)
    live = {"text": ""}
    assert bring_back({"p": live}).step == 1
    assert live["text"] == progress["text"]


def test_an_optimizer_that_is_replaced_during_the_run_gets_a_new_layout(sidecar):
    model, adam = trained()
    components = {"model": model, "optimizer": adam}
    with begun(components, strict=True) as checkpointer:
        checkpointer.save(0)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.randn(8, 8)).sum().backward()
        sgd.step()
        components["optimizer"] = sgd
        checkpointer.save(1)
    other, _ = trained(seed=1, steps=0)
    fresh = torch.optim.SGD(other.parameters(), lr=0.3)
    assert bring_back({"model": other, "optimizer": fresh}).step == 1
    assert fresh.param_groups[0]["lr"] == 0.1
    for parameter, two in zip(model.parameters(), other.parameters(), strict=True):
        assert_bit_equal(
            sgd.state[parameter]["momentum_buffer"], fresh.state[two]["momentum_buffer"]
        )


@pytest.mark.parametrize("kind", ["PCG64", "Philox", "SFC64", "MT19937"])
def test_the_global_numpy_generator_of_any_kind_is_restored(sidecar, kind):
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(getattr(np.random, kind)(7))
        with begun({"x": {}}, strict=True) as checkpointer:
            np.random.normal()
            assert checkpointer.save(0)
            expected = np.random.normal(size=5), np.random.randint(1000, size=5)
        np.random.set_bit_generator(getattr(np.random, kind)(8))
        with begun({"x": {}}) as checkpointer:
            again = np.random.normal(size=5), np.random.randint(1000, size=5)
        assert all((array == other).all() for array, other in zip(expected, again, strict=True))
    finally:
        np.random.set_bit_generator(before)


def test_random_generators_are_not_restored_with_rng_false(sidecar):
    keep({"m": nn.Linear(1, 1)})
    other = nn.Linear(1, 1)
    torch.manual_seed(9)
    bring_back({"m": other}, rng=False)
    after = torch.rand(3)
    torch.manual_seed(9)
    assert torch.equal(torch.rand(3), after)


def test_tensor_names_are_the_same_with_torch_compile(sidecar):
    model = nn.Linear(3, 3)
    keep({"model": torch.compile(model, backend="eager")})
    other = nn.Linear(3, 3)
    bring_back({"model": other})
    assert_bit_equal(other.weight, model.weight)


def test_a_mismatch_lists_all_differences_and_changes_nothing(sidecar):
    keep({"model": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))})
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(3, 3))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(keepstep.MismatchError) as error:
        bring_back({"model": other})
    text = str(error.value)
    assert "model.2.weight: float32[3, 3] here, missing in the checkpoint" in text
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_components_that_cannot_be_kept_are_refused_at_once():
    with pytest.raises(keepstep.UsageError, match="state_dict"):
        keepstep.Checkpointer({"x": 3})
    with pytest.raises(keepstep.UsageError, match="takes a dict"):
        keepstep.Checkpointer(nn.Linear(1, 1))


class Router(nn.Module):
    """Balances its experts by a bias that no checkpoint has, beside a constant and a cache."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(2, 2)
        for name in ("bias", "constant", "cache"):
            self.register_buffer(name, torch.zeros(2), persistent=False)


def test_a_changing_non_persistent_buffer_is_logged_once(sidecar, caplog):
    model = Router()
    with begun({"model": nn.Sequential(model)}, strict=True) as checkpointer:
        model.cache = torch.ones(3)  # made by the first forward pass
        for step in range(4):
            model.bias += 1
            checkpointer.save(step)
    messages = [message for message in caplog.messages if "persistent" in message]
    assert len(messages) == 1
    assert "model.0.bias: changes while training" in messages[0]
    assert not any(name in messages[0] for name in ("constant", "cache"))


def test_a_buffer_that_is_saved_elsewhere_or_constant_causes_no_warning(sidecar, caplog):
    model = Router()
    with begun({"model": model, "extra": {"bias": model.bias}}, strict=True) as checkpointer:
        for step in range(4):
            model.bias += 1
            checkpointer.save(step)
    assert not [message for message in caplog.messages if "persistent" in message]


class StatefulLoader(torch.utils.data.DataLoader):
    def state_dict(self):
        return {"at": 0}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize("later", [False, True])
def test_a_loader_component_causes_a_warning_when_random_states_are_restored_at_once(
    sidecar, caplog, later
):
    checkpointer = keepstep.Checkpointer({"loader": StatefulLoader([1, 2])})
    checkpointer.restore(rng="later" if later else "now")
    messages = [message for message in caplog.messages if "loader draws random numbers" in message]
    assert len(messages) == (0 if later else 1)
    if later:
        checkpointer.restore_rng()
    checkpointer.save(0)
    checkpointer.close()


def test_slow_encoding_of_values_is_logged_once_with_the_largest_value(sidecar, caplog):
    progress = {"words": [str(number) for number in range(200_000)], "n": [0]}
    with begun({"p": progress}, strict=True) as checkpointer:
        for step in range(3):
            checkpointer.save(step)
    messages = [message for message in caplog.messages if "values that are no tensors" in message]
    assert len(messages) == 1
    assert "p.words (" in messages[0] or "most of it for p (" in messages[0]


def test_a_saved_default_generator_and_the_global_random_state_are_restored_consistently(sidecar):
    keep({"p": {"g": torch.default_generator}})
    expected = torch.rand(3)
    torch.manual_seed(9)
    bring_back({"p": {"g": torch.default_generator}})
    assert torch.equal(torch.rand(3), expected)
