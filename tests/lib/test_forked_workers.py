"""A script may fork at any moment, as a data loader does for its workers, also while a thread of
ours saves. A child that got a lock of torch or of the C library that this thread holds would hang.
"""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from torch import nn

from keepstep import processes
from keepstep.save.mutation_guard import Fingerprint
from tests.harness import eventually
from tests.lib.training import begun


def exit_code_of_child(code) -> int:
    """Fork; returns what `code()` is in the child."""
    child = os.fork()
    if child == 0:
        os._exit(int(code()))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_no_fork_comes_while_a_thread_is_within(monkeypatch):
    monkeypatch.setattr(processes, "_FORK_WAITS_S", 60.0)  # for slow machines
    within, over = False, False

    def work() -> None:
        nonlocal within
        while not over:
            with processes.no_fork():
                within = True
                time.sleep(0.001)
                within = False

    thread = threading.Thread(target=work)
    thread.start()
    codes = [exit_code_of_child(lambda: within) for _ in range(50)]
    over = True
    thread.join()
    assert codes == [0] * 50


def test_a_fork_waits_for_what_the_save_thread_asks_of_torch(sidecar, monkeypatch):
    monkeypatch.setattr(processes, "_FORK_WAITS_S", 60.0)  # for slow machines
    entered, within = threading.Event(), False
    read = Fingerprint.read_image_samples

    def slowly(fingerprint, memory):
        nonlocal within
        within = True
        entered.set()
        eventually(lambda: processes._forking_threads)
        time.sleep(0.02)  # where a fork that does not wait would come
        samples = read(fingerprint, memory)
        within = False
        return samples

    monkeypatch.setattr(Fingerprint, "read_image_samples", slowly)
    checkpointer = begun({"m": nn.Linear(2, 2)})
    assert checkpointer.save(0)
    assert entered.wait(30)
    assert within
    assert exit_code_of_child(lambda: within) == 0
    checkpointer.wait(0, "staged")
    checkpointer.close()


def test_a_fork_does_not_wait_longer_than_a_second():
    entered, over = threading.Event(), threading.Event()

    def work() -> None:
        with processes.no_fork():
            entered.set()
            over.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait(30)
    started = time.monotonic()
    assert exit_code_of_child(lambda: 7) == 7
    assert 0.9 < time.monotonic() - started < 20
    over.set()
    thread.join()


def test_a_thread_goes_on_after_a_fork_that_an_exception_interrupted():
    thread = threading.Thread(target=processes._before_fork)
    thread.start()
    thread.join()
    assert processes._forking_threads
    with processes.no_fork():
        assert not processes._forking_threads


_ATOMIC = ("_accelerator_getAccelerator",)
"""They keep the GIL, so no fork can come within."""


def _is_of_torch(function) -> bool:
    owner = getattr(function, "__self__", None)
    kind = owner if isinstance(owner, type) else type(owner)
    names = (function.__module__, kind.__module__, getattr(owner, "__name__", ""))
    return any(str(name).partition(".")[0] == "torch" for name in names)


class Mixed(nn.Module):
    """Parameters, buffers, and tensors that are not plain memory."""

    def __init__(self, *, width: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.norm = nn.BatchNorm1d(width)
        self.turned = nn.Parameter(torch.randn(4, 5).t())
        self.wave = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.twice = nn.Parameter(torch.randn(4, dtype=torch.complex128))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    sum(value.abs().sum() for value in model.parameters() if value.requires_grad).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("lazy", [True, False])
def test_threads_call_torch_only_where_no_fork_comes(sidecar, lazy):
    apart: set[str] = set()

    def note(frame, event, function) -> None:
        outside = threading.get_ident() not in processes._threads_within
        named = event == "c_call" and function.__name__ not in _ATOMIC
        if named and outside and _is_of_torch(function):
            code = frame.f_code
            apart.add(f"{threading.current_thread().name} {code.co_name} {function.__name__}")

    threading.setprofile(note)
    try:
        model = Mixed()
        optimizer = torch.optim.Adam([*model.layer.parameters(), model.turned, model.wave])
        components = {"m": model, "o": optimizer, "view": {"x": torch.ones(9)[::3]}}
        checkpointer = begun(components, lazy=lazy)
        for step in range(4):
            train(model, optimizer)
            assert checkpointer.save(step)
            deadline = time.monotonic() + 30
            while step % 2 and checkpointer.stats.staged <= step and time.monotonic() < deadline:
                model.layer(torch.ones(1, 3))  # before a fence, the save thread decides
            checkpointer.wait(step, "staged")
        assert checkpointer.save(4)
        model.layer.weight.data.add_(1)  # discarded, if it was not copied yet
        model.layer.weight.data = torch.zeros(3, 3)
        checkpointer.save(5)
        checkpointer.close()
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]
    assert apart == set()
