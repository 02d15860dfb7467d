"""Nobody can tear an image: a tensor that changes right after `save` is seen, whoever changes it.

The copy is held back until the change was made, so each test is sure to hit the window.
"""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import keepstep
from keepstep.client import copying
from keepstep.save import pending as pending_module
from tests.lib.training import begun


@pytest.fixture
def held_copy(monkeypatch):
    """Lazy copies wait for `release`; eager ones (on the training thread) do not."""
    gate = threading.Event()
    run = copying.run

    def held(transfers, **options):
        if threading.current_thread().name == "keepstep-agent":
            assert gate.wait(30)
        run(transfers, **options)

    monkeypatch.setattr(copying, "run", held)
    yield gate
    gate.set()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))


def restored_weight(model):
    other = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    with keepstep.Checkpointer({"model": other}) as checkpointer:
        at = checkpointer.restore()
    return at, other[0].weight.detach()


def in_place(model):
    with torch.no_grad():
        model[0].weight.add_(1)


def by_data(model):
    model[0].weight.data.add_(1)


def by_a_view_of_data(model):
    model[0].weight.data.view(-1)[:].mul_(2)


def by_load_state_dict(model):
    model.load_state_dict({name: one + 1 for name, one in model.state_dict().items()})


def by_reinitialising(model):
    nn.init.normal_(model[0].weight)


@pytest.mark.parametrize(
    "mutate", [in_place, by_data, by_a_view_of_data, by_load_state_dict, by_reinitialising]
)
def test_a_change_between_save_and_copy_discards_the_image(sidecar, held_copy, model, mutate):
    checkpointer = begun({"model": model})
    assert checkpointer.save(1)
    mutate(model)
    held_copy.set()
    with pytest.raises(keepstep.NotDurableError):
        checkpointer.wait(1, "staged", timeout=10)
    assert checkpointer.stats.discarded == 1
    expected = model[0].weight.detach().clone()
    assert checkpointer.save(2), "the save after a discarded one is eager, and kept"
    mutate(model)
    checkpointer.close()
    at, weight = restored_weight(model)
    assert at.step == 2
    assert torch.equal(weight, expected)


@pytest.mark.parametrize("by_optimizer", [True, False], ids=["optimizer step", "mutating"])
def test_what_is_said_to_change_the_tensors_waits_for_the_copy(
    sidecar, held_copy, model, by_optimizer
):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    checkpointer = begun({"model": model})
    expected = model[0].weight.detach().clone()
    checkpointer.save(1)
    model(torch.randn(4, 256)).sum().backward()
    threading.Timer(0.2, held_copy.set).start()
    if by_optimizer:
        optimizer.step()
    else:
        with checkpointer.mutating():
            assert held_copy.is_set()
            model[0].weight.data.add_(1)
    assert held_copy.is_set(), "the change went ahead of the copy"
    assert not torch.equal(model[0].weight, expected)
    checkpointer.close()
    at, weight = restored_weight(model)
    assert at.step == 1
    assert torch.equal(weight, expected)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # what torch itself imports
def test_an_optimizer_step_within_torch_compile_waits_for_the_copy(sidecar, held_copy, model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    compiled = torch.compile(lambda: optimizer.step(), backend="aot_eager")
    checkpointer = begun({"model": model})
    for number in range(4):
        if number:  # the first one is compiled while nothing is on its way
            held_copy.clear()
            expected = model[0].weight.detach().clone()
            assert checkpointer.save(number)
            threading.Timer(0.2, held_copy.set).start()
        model(torch.randn(4, 256)).sum().backward()
        compiled()
        assert held_copy.is_set() or not number, "the change went ahead of the copy"
    checkpointer.close()
    assert checkpointer.stats.discarded == 0
    at, weight = restored_weight(model)
    assert at.step == 3
    assert torch.equal(weight, expected)


def test_buffers_and_plain_tensors_may_change_at_once(sidecar, held_copy):
    norm, extra = nn.BatchNorm1d(4), {"x": torch.zeros(3)}
    with begun({"norm": norm, "extra": extra}, strict=True) as checkpointer:
        checkpointer.save(1)
        norm(torch.randn(8, 4))
        extra["x"].add_(1)
        held_copy.set()
    other, plain = nn.BatchNorm1d(4), {"x": torch.ones(3)}
    with keepstep.Checkpointer({"norm": other, "extra": plain}) as checkpointer:
        assert checkpointer.restore().step == 1
    assert torch.equal(other.running_mean, torch.zeros(4))
    assert torch.equal(plain["x"], torch.zeros(3))


def test_a_discarded_image_leaves_nothing_sealed(sidecar, held_copy, model):
    checkpointer = begun({"model": model})
    checkpointer.save(1)
    by_data(model)
    held_copy.set()
    assert checkpointer._agent.drain(timeout_s=10)
    status = sidecar.get("/v1/status")
    assert all(slot["state"] != "sealed" for rank in status["ranks"] for slot in rank["slots"])
    assert status["ranks"][0]["discarded"] == 1
    with pytest.raises(keepstep.NotDurableError):
        checkpointer.close()


def test_a_thread_that_sits_in_one_operation_is_not_judged():
    """Early judging needs progress of the training thread: an in-place kernel that still runs has
    not moved its version counter."""
    inside, leave, done = threading.Event(), threading.Event(), threading.Event()

    def train():
        inside.set()
        leave.wait(20)
        done.set()

    trainer = threading.Thread(target=train)
    trainer.start()
    inside.wait(20)
    assert not done.wait(0.2), "by now it sits in the lock of leave.wait"
    before = pending_module._position(trainer.ident)
    assert not done.wait(0.2)
    assert pending_module._position(trainer.ident) == before, "it has not moved, and says so"
    leave.set()
    trainer.join()
    assert pending_module._position(trainer.ident) != before
