"""Nobody can tear an image: a tensor that changes right after `save` is seen, whoever changes it.

The copy is held back until the change was made, so each test is sure to hit the window.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

import keepstep
from keepstep.client import copying
from keepstep.save import snapshot
from tests.core.test_states import watched_save_thread  # noqa: F401
from tests.lib.training import begun, hold_copies


@pytest.fixture
def held_copy(monkeypatch):
    """Lazy copies wait for `release`; eager ones (on the training thread) do not."""
    gate = hold_copies(monkeypatch)
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


def by_reinitialising(model):
    nn.init.normal_(model[0].weight)


@pytest.mark.parametrize("mutate", [in_place, by_data, by_a_view_of_data, by_reinitialising])
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


def test_load_state_dict_of_a_module_waits_for_the_copy(sidecar, held_copy, model):
    checkpointer = begun({"model": model})
    expected = model[0].weight.detach().clone()
    assert checkpointer.save(1)
    threading.Timer(0.5, held_copy.set).start()
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    assert held_copy.is_set()
    checkpointer.close()
    assert checkpointer.stats.discarded == 0
    at, weight = restored_weight(model)
    assert at.step == 1
    assert torch.equal(weight, expected)


def channels_last():
    model = nn.Sequential(nn.Conv2d(64, 64, 3, bias=False), nn.Conv2d(64, 8, 3, bias=False))
    return model.to(memory_format=torch.channels_last)


def columns():
    model = nn.Linear(300, 200, bias=False)
    model.weight = nn.Parameter(torch.randn(300, 200).t())
    return model


def doubles():
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(40, 30, dtype=torch.complex128).t())
    return model


def scalars():
    return nn.ParameterList([nn.Parameter(torch.zeros(())) for _ in range(3)])


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(256, 256), channels_last, columns, doubles, scalars]
)
@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
def test_weights_swapped_out_and_back_during_the_copy_discard_the_image(
    sidecar, held_copy, make, which
):
    """What is compared is the image: the state is the same before and after."""
    model = make()
    checkpointer = begun({"model": model})
    assert checkpointer.save(1)
    weight = list(model.parameters())[which]
    before = weight.detach().clone()
    weight.data.add_(1)
    held_copy.set()
    assert checkpointer._saver.pending_image.copied.wait(10)
    weight.data.copy_(before)
    with pytest.raises(keepstep.NotDurableError, match=r"model\..* changed before it was copied"):
        checkpointer.wait(1, "staged", timeout=10)
    assert checkpointer.save(2)
    checkpointer.close()
    assert checkpointer.stats.discarded == 1


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(256, 256), channels_last, columns, doubles, scalars]
)
def test_the_image_of_an_unchanged_state_is_kept_for_any_memory_format(sidecar, make):
    model = make()
    with begun({"model": model}) as checkpointer:
        for step in range(3):
            assert checkpointer.save(step)
            checkpointer.wait(step, "staged")
    assert checkpointer.stats.discarded == 0


def resized(weight):
    storage = weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)


def given_other_memory(weight):
    weight.data = weight.data.clone()


def set_to_other_memory(weight):
    weight.data.set_(weight.detach().clone())


def shared(weight):
    weight.share_memory_()


@pytest.mark.parametrize("free", [resized, given_other_memory, set_to_other_memory, shared])
def test_memory_that_is_freed_during_the_copy_does_not_stop_training(sidecar, monkeypatch, free):
    """Large enough to be unmapped at once: a copy that still read it would end this process."""
    model, run, reads = nn.Linear(4096, 2048, bias=False), copying.run_transfers, threading.Event()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()

    def slow(transfers, **options):
        if threading.current_thread().name != "keepstep-save":
            return run(transfers, **options)
        for move in transfers.moves:
            for piece in range(0, move.bytes, 1 << 20):
                reads.set()
                copying.copy_bytes(move.target + piece, move.source + piece, 1 << 20)
                time.sleep(0.005)

    monkeypatch.setattr(copying, "run_transfers", slow)
    checkpointer = begun({"model": model, "optimizer": optimizer}, strict=True)
    for step in range(4):
        reads.clear()
        expected = model.weight.detach().clone()
        eager = checkpointer._saver.copies_eagerly
        assert checkpointer.save(step)
        if eager:
            checkpointer._saver.drain(timeout_s=10)
            continue
        momentum = optimizer.state[model.weight]["momentum_buffer"]
        assert reads.wait(10)
        free(model.weight)
        free(momentum)
        checkpointer._saver.drain(timeout_s=10)
        staged = checkpointer._saver.staged_step
        if free in (resized, shared):
            assert getattr(staged, "step", None) == step, "it waited for the copy"
        if staged is not None and staged.step == step:
            image = staged.slot.mapping
            assert torch.equal(image.view_tensor(image.layout.entries["model.weight"]), expected)
        with torch.no_grad():
            model.weight.copy_(expected)
    checkpointer._let_go("the test ends", timeout_s=5)


@pytest.mark.parametrize("by_optimizer", [True, False], ids=["optimizer step", "mutating"])
def test_an_announced_change_of_tensors_waits_for_the_copy(sidecar, held_copy, model, by_optimizer):
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
    assert checkpointer._saver.drain(timeout_s=10)
    status = sidecar.get("/v1/status")
    assert all(slot["state"] != "sealed" for rank in status["ranks"] for slot in rank["slots"])
    assert status["ranks"][0]["discarded"] == 1
    with pytest.raises(keepstep.NotDurableError):
        checkpointer.close()


def test_an_image_is_not_accepted_early_while_the_training_thread_is_inside_one_operation():
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
    before = snapshot._position(trainer.ident)
    assert not done.wait(0.2)
    assert snapshot._position(trainer.ident) == before, "it has not moved, and says so"
    leave.set()
    trainer.join()
    assert snapshot._position(trainer.ident) != before


_COLLECTING = r"""
import gc, sys, threading, time

from keepstep.save.snapshot import _position

class Garbage:
    def __init__(self):
        self.cycle = self

    def __del__(self):
        if threading.current_thread() is saving:
            time.sleep(0.0002)  # gives up the GIL

# functions of different sizes, so that one's frame is never where another's was
scope = {}
for size in range(13):
    names = "".join(f", a{n}=None" for n in range(size))
    inner = f"f{(7 * size + 3) % 13}(left - 1) if left else 0"
    exec(f"def f{size}(left{names}):\n    x = [left]; y = (left, x)\n    return {inner}", scope)

def train():
    while not over.is_set():
        assert [scope[f"f{n}"](n) for n in (0, 3, 5, 7, 9)] == [0] * 5

saving, over = threading.main_thread(), threading.Event()
training = threading.Thread(target=train)
training.start()
sys.setswitchinterval(1e-5)
gc.set_threshold(3, 10, 10)
for _ in range(2000):
    Garbage()
    _position(training.ident)
over.set()
training.join()
print("as it was")
"""


def test_the_position_of_a_thread_is_read_without_collecting_garbage():
    """CPython 3.11 may collect while it makes the object of a frame, which then may have ended."""
    program = [sys.executable, "-c", _COLLECTING]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "as it was\n"), ended.stderr[-3000:]
