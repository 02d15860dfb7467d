"""How long a save keeps the training thread by how many tensors there are, however small they are.

    python -m bench.host                       1,200 and 10,000 tensors on the CPU
    python -m bench.host --device cuda --tensors 1200

The state is a module of linear layers under AdamW: two weights a layer, and for each of them two
moments and a step counter. Every step is saved. The floor reads the address of every tensor once.
`save`: the call alone; `cpu`: what this thread computed in it. `fence`: the fence before the next
step. `first`: the save that takes the state apart.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.ours import KeepstepLazy

_WARM, _SAVES = 6, 30


class State:
    """A `bench.savers.Savable` of so many tensors."""

    def __init__(self, tensors: int, device: str) -> None:
        layers = [nn.Linear(16, 16, device=device) for _ in range(tensors // 8)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.progress: dict[str, Any] = {"step": -1, "loss": 0.0}
        for one in self.model.parameters():
            one.grad = torch.zeros_like(one)
        self.step_off_cpu(0)

    @property
    def size_bytes(self) -> int:
        return sum(one.nbytes for one in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        found = {f"model.{name}": one for name, one in self.model.state_dict().items()}
        for at, of in enumerate(self.optimizer.state.values()):
            found |= {f"optimizer.{at}.{name}": one for name, one in of.items()}
        return found

    def nested(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def components(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "progress": self.progress}

    def step_off_cpu(self, step: int) -> None:
        self.optimizer.step()
        self.progress.update(step=step, loss=1 / (step + 1))


def measure(state: State, directory: Path, device: str) -> dict[str, float]:
    """Medians in seconds."""
    saver = KeepstepLazy(state, directory)
    times: list[tuple[float, ...]] = []
    try:
        for step in range(_WARM + _SAVES):
            state.step_off_cpu(step)
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


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--device", default="cpu")
    options.add_argument("--tensors", type=int, nargs="+", default=[1200, 10000])
    options.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()))
    chosen = options.parse_args()
    for tensors in chosen.tensors:
        with tempfile.TemporaryDirectory(dir=chosen.dir) as directory:
            found = measure(State(tensors, chosen.device), Path(directory), chosen.device)
        skipped = found.pop("skipped")
        figures = ", ".join(f"{name} {1000 * value:.2f} ms" for name, value in found.items())
        print(f"{tensors:,} tensors on {chosen.device}: {figures}; {skipped:.0f} skipped")


if __name__ == "__main__":
    main()
