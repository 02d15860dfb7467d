"""How long a save keeps the training thread by how many tensors there are, however small they are;
and how much memory images take.

    python -m bench.host                       1,200 and 10,000 tensors on the CPU
    python -m bench.host --device cuda --tensors 1200
    python -m bench.host --slots auto 3 2 1    the peak of memory by number of slots

The state is a module of linear layers under AdamW: two weights a layer, and for each of them two
moments and a step counter. Every step is saved. The floor reads the address of every tensor once.
`save`: the call alone; `cpu`: what this thread computed in it. `fence`: the fence before the next
step. `first`: the save that takes the state apart.

The peak is that of slots and sidecar together over 20 steps, each of them written before the next
one, and a restore from the drive after the memory was lost, as a multiple of a state of 512 MiB.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.ours import KeepstepLazy
from bench.state import State, gpt

_WARM, _SAVES = 6, 30
_PEAK_BYTES, _PEAK_STEPS = 512 << 20, 10


def small(tensors: int, device: str) -> State:
    """A state of so many tensors."""
    model = nn.Sequential(*(nn.Linear(16, 16, device=device) for _ in range(tensors // 8)))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    state = State(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    state.update(0)
    return state


def measure(state: State, directory: Path, device: str) -> dict[str, float]:
    """Medians in seconds."""
    saver = KeepstepLazy(state, directory)
    times: list[tuple[float, ...]] = []
    try:
        for step in range(_WARM + _SAVES):
            state.update(step)
            if device == "cuda":
                torch.cuda.synchronize()
            begun, spent = time.perf_counter(), time.thread_time()
            saver.save(step)
            saved, spent = time.perf_counter(), time.thread_time() - spent
            saver.wait_staged() if device == "cpu" else time.sleep(0.02)
            resumed = time.perf_counter()
            saver.fence()
            fenced = time.perf_counter()
            tensors = list(state.tensors().values())
            read = time.perf_counter()
            list(map(Tensor.data_ptr, tensors))
            floor = time.perf_counter() - read
            times.append((saved - begun, spent, fenced - resumed, floor))
            saver.wait_staged()
            saver.wait_ready()
        skipped = saver.extra()["skipped"]
    finally:
        saver.close()
    columns = list(zip(*times[_WARM:], strict=True))
    names = ("save", "cpu", "fence", "floor")
    medians = dict(zip(names, map(statistics.median, columns), strict=True))
    return medians | {"first": times[0][0], "skipped": skipped}


def peak(directory: Path, slots: int) -> float:
    """The peak of memory outside of the training process, in states. 0 slots: the default."""
    state = gpt(_PEAK_BYTES)
    saver, highest, ended = KeepstepLazy(state, directory, slots=slots), 0, threading.Event()

    def sample() -> None:
        nonlocal highest
        while not ended.wait(0.005):
            with contextlib.suppress(FileNotFoundError, KeyError):  # as it ends
                highest = max(highest, saver.held_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        for steps in (range(_PEAK_STEPS), range(_PEAK_STEPS, 2 * _PEAK_STEPS)):
            for step in steps:
                state.update(step)
                saver.save(step)
                saver.wait_durable()
                saver.wait_ready()
            saver.restore_again("local")
    finally:
        ended.set()
        sampler.join()
        saver.close()
    return highest / state.size_bytes


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--device", default="cpu")
    options.add_argument("--tensors", type=int, nargs="+", default=[1200, 10000])
    options.add_argument("--slots", nargs="+", default=[])
    chosen = options.parse_args()
    for slots in chosen.slots:
        with tempfile.TemporaryDirectory() as directory:
            highest = peak(Path(directory), 0 if slots == "auto" else int(slots))
            print(f"{slots} slots: at most {highest:.2f} states in memory")
    if chosen.slots:
        return
    for tensors in chosen.tensors:
        with tempfile.TemporaryDirectory() as directory:
            found = measure(small(tensors, chosen.device), Path(directory), chosen.device)
        skipped = found.pop("skipped")
        figures = ", ".join(f"{name} {1000 * value:.2f} ms" for name, value in found.items())
        print(f"{tensors:,} tensors on {chosen.device}: {figures}; {skipped:.0f} skipped")


if __name__ == "__main__":
    main()
