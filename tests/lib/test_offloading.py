"""State that is moved between steps, as trainers by reinforcement do to make room for the rollouts:
other memory after each step. No step is lost by it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import keepstep
from tests.lib.training import begun, hold_copies

STEPS = 12
LAZY = 2
"""After so many saves it is known that the state moves, and nothing is copied later any more."""


def by_new_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As verl's `offload_fsdp_optimizer`."""
    for state in optimizer.state.values():
        for name, value in state.items():
            state[name] = value.clone()


def by_data(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As `model.to(device)` for parameters, and the former for the optimizer."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    by_new_tensors(model, optimizer)


def by_data_of_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.data = value.data.clone()


def by_swapping(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As `model.to(device)` for DTensors."""
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))


def kept_where_it_is(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pass


MOVES = [by_new_tensors, by_data, by_data_of_state, by_swapping]


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.parametrize("when", ["before the save", "after the save"])
@pytest.mark.parametrize("move", [*MOVES, kept_where_it_is])
def test_offloading_the_state_loses_no_step(
    sidecar, monkeypatch, move: Callable[..., None], when: str, caplog
) -> None:
    model, optimizer = trained()
    copies = hold_copies(monkeypatch)
    checkpointer = begun({"model": model, "optimizer": optimizer})
    for step in range(STEPS):
        copies.set()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if when == "before the save":
            move(model, optimizer)
        if step < LAZY:
            copies.clear()
        assert checkpointer.save(step)
        if when == "after the save":
            move(model, optimizer)
    copies.set()
    checkpointer.close()
    assert (checkpointer.stats.staged, checkpointer.stats.discarded) == (STEPS, 0)
    count = sum(
        "was given other memory between two steps" in message for message in caplog.messages
    )
    assert count == (move is not kept_where_it_is and when == "after the save")
    other, its = trained()
    with keepstep.Checkpointer({"model": other, "optimizer": its}) as again:
        assert again.restore().step == STEPS - 1
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    states = zip(its.state.values(), optimizer.state.values(), strict=True)
    assert all(torch.equal(copied[name], state[name]) for copied, state in states for name in state)


def test_writes_to_memory_that_the_state_has_left_do_not_reach_the_image(
    sidecar, monkeypatch
) -> None:
    model, optimizer = trained()
    copies = hold_copies(monkeypatch)
    checkpointer = begun({"model": model})
    assert checkpointer.save(0)
    expected = model[0].weight.detach().clone()
    by_data(model, optimizer)
    model[0].weight.data.add_(1)
    copies.set()
    checkpointer.wait(0, "staged")
    assert checkpointer.save(1)
    checkpointer.wait(1, "staged")
    image = checkpointer._saver.staged_step.slot.mapping
    saved = image.view_tensor(image.layout.entries["model.0.weight"])
    assert torch.equal(saved, model[0].weight), "the next image has the memory of now"
    assert torch.equal(saved, expected + 1)
    checkpointer.close()
    assert checkpointer.stats.discarded == 0


def test_an_image_is_discarded_if_the_former_memory_of_the_state_may_be_overwritten(
    sidecar, monkeypatch
) -> None:
    model = nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.weight.grad = torch.randn(256, 256)
    optimizer.step()
    momentum = optimizer.state[model.weight]["momentum_buffer"]
    pool = momentum.clone().view(-1)
    momentum.data = pool.view(256, 256)
    copies = hold_copies(monkeypatch)
    checkpointer = begun({"model": model, "optimizer": optimizer})
    assert checkpointer.save(1)
    momentum.data = momentum.data.clone()
    pool[1:9] = 77.0  # between the samples of the fingerprint
    copies.set()
    with pytest.raises(keepstep.NotDurableError):
        checkpointer.wait(1, "staged", timeout=20)
    with pytest.raises(keepstep.NotDurableError, match="no step was staged"):
        checkpointer.close()
    assert checkpointer.stats.discarded == 1


def test_a_replaced_parameter_that_shares_its_memory_is_still_checked_for_changes(
    sidecar, monkeypatch
) -> None:
    model = nn.Linear(256, 256)
    copies = hold_copies(monkeypatch)
    copies.set()
    checkpointer = begun({"model": model})
    assert checkpointer.save(1)
    checkpointer.wait(1, "staged")
    model.weight = nn.Parameter(model.weight.data)
    copies.clear()
    assert checkpointer.save(2)
    with torch.no_grad():
        model.weight[0, 1:5] = 77.0  # between the samples of the fingerprint
    copies.set()
    with pytest.raises(keepstep.NotDurableError):
        checkpointer.wait(2, "staged", timeout=20)
    checkpointer.close()


def test_no_user_code_is_called_inside_an_optimizer_step(sidecar) -> None:
    class Own:
        def __init__(self) -> None:
            self.calls: list[str] = []
            self.where = ""

        def state_dict(self) -> dict[str, int]:
            self.calls.append(self.where)
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            pass

    model, optimizer = trained()
    own = Own()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    beside = {"scheduler": scheduler, "own": own, "progress": {"batches": 0}}
    checkpointer = begun({"model": model, "optimizer": optimizer, **beside})
    for step in range(6):
        own.where = "step"
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        own.where = "save"
        assert checkpointer.save(step)
        checkpointer.wait(step, "staged")
        by_data(model, optimizer)
    assert checkpointer._saver.copies_eagerly, "what torch makes of model and optimizer was read"
    checkpointer.close()
    assert "save" in own.calls
    assert "step" not in own.calls


def test_the_former_memory_of_an_offloaded_state_is_released_soon(sidecar) -> None:
    model, optimizer = trained()
    checkpointer = begun({"model": model, "optimizer": optimizer})
    for step in range(STEPS):
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        assert checkpointer.save(step)
        storages = [parameter.untyped_storage() for parameter in model.parameters()]
        storages += [
            value.untyped_storage() for each in optimizer.state.values() for value in each.values()
        ]
        former = [StorageWeakRef(storage) for storage in storages]
        del storages
        checkpointer.wait(step, "staged")
        by_data(model, optimizer)
        if step > LAZY:
            assert all(ref.expired() for ref in former)
    checkpointer.close()


def test_a_tensor_that_each_forward_pass_recreates_does_not_count_as_offloading(
    sidecar, caplog
) -> None:
    model, optimizer = trained()
    carried = {"hidden": torch.zeros(8)}
    checkpointer = begun({"model": model, "optimizer": optimizer, "carried": carried})
    for step in range(STEPS):
        out = model(torch.randn(4, 64))
        carried["hidden"] = out.detach().mean(0)
        out.square().mean().backward()
        optimizer.step()
        assert checkpointer.save(step)
    assert not checkpointer._saver.copies_eagerly
    checkpointer.close()
    assert "other memory" not in caplog.text
