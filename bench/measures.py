"""What is measured of a saver. All values are seconds unless their name says otherwise.

The training thread is the calling thread. "Compute off the CPU" is a sleep: an accelerator works
and the thread waits. "Compute on every core" is a matrix product on all of torch's threads.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.processes import tree_cpu_s
from bench.savers import Saver

Figures = dict[str, float]


@dataclass
class Steps:
    """Hands out ascending step numbers, across all measures of one saver."""

    last: int = -1

    def next(self) -> int:
        self.last += 1
        return self.last


def warm_up(saver: Saver, steps: Steps, *, saves: int) -> None:
    """Let the saver make its buffers, slots and processes. This is not measured."""
    for _ in range(saves):
        saver.save(steps.next())
        time.sleep(0.2)
        _update(saver, steps)
        saver.wait_durable()
        saver.wait_ready()


def blocked(saver: Saver, steps: Steps, *, gap_s: float, repeats: int) -> Figures:
    """How long one save blocks the training thread: the call, and the fence after `gap_s`."""
    samples = []
    for _ in range(repeats):
        begun = time.perf_counter()
        saver.save(steps.next())
        called = time.perf_counter()
        time.sleep(gap_s)
        working = time.perf_counter()
        _update(saver, steps)
        samples.append((called - begun, time.perf_counter() - working))
        saver.wait_durable()
    best = statistics.median_low(samples)
    return {"blocked_s": sum(best), "call_s": best[0], "fence_s": best[1]}


def durable(saver: Saver, steps: Steps, *, size_bytes: int, repeats: int) -> Figures:
    """The time from the call to durable and from staged to durable, and the CPU seconds."""
    samples = []
    for _ in range(repeats):
        time.sleep(0.1)
        tree, beside = tree_cpu_s(), saver.background_cpu_s()
        begun = time.perf_counter()
        saver.save(steps.next())
        saver.fence()
        saver.wait_staged()
        staged = time.perf_counter()
        staged_beside = saver.background_cpu_s()
        saver.wait_durable()
        ended = time.perf_counter()
        cpu = saver.background_cpu_s()
        samples.append(
            {
                "durable_s": ended - begun,
                "staged_s": staged - begun,
                "write_s": ended - staged,
                "background_cpu_s": cpu - beside,
                "write_cpu_s": cpu - staged_beside,
                "cpu_s": tree_cpu_s() - tree,
            }
        )
    middle = {key: statistics.median(sample[key] for sample in samples) for key in samples[0]}
    per_gb = 1e9 / size_bytes
    return middle | {
        "cpu_s_per_gb": middle["cpu_s"] * per_gb,
        "background_cpu_s_per_gb": middle["background_cpu_s"] * per_gb,
    }


def inflation(saver: Saver, steps: Steps, *, wait_s: float, count: int) -> Figures:
    """The ratio of step times with a save in every step and without, with compute off the CPU."""
    return _every_step(saver, steps, lambda: time.sleep(wait_s), count=count)


def busy(saver: Saver, steps: Steps, *, step_s: float, count: int) -> Figures:
    """The same with compute on every core: the seconds that a save adds to a step, and the CPU
    seconds that the saver's helper processes spent for it."""
    work = Compute(step_s)
    before = saver.background_cpu_s()
    figures = _every_step(saver, steps, work.step, count=count)
    beside = (saver.background_cpu_s() - before) / (count + 1)
    return {f"busy_{key}": value for key, value in figures.items()} | {"busy_beside_cpu_s": beside}


def lost(saver: Saver, steps: Steps, *, step_s: float, quiet_s: float) -> Figures:
    """Training time lost while a staged step is persisted, with compute on every core.

    The lost time is how much longer the steps between the save and durable took than the mean of
    the steps before and after.
    """
    work = Compute(step_s)
    quiet = work.times_for(quiet_s)
    saver.save(steps.next())
    saver.fence()
    waiter = threading.Thread(target=saver.wait_durable, name="waiter")
    waiter.start()
    during: list[float] = []
    while waiter.is_alive() or len(during) < 8:
        during.append(work.timed())
    time.sleep(0.1)
    quiet += work.times_for(quiet_s)
    baseline = statistics.mean(quiet)
    return {"lost_s": sum(during) - len(during) * baseline, "lost_step_s": baseline}


class Compute:
    """A matrix product on all threads that takes about `step_s` when nothing else runs."""

    def __init__(self, step_s: float) -> None:
        self._left, self._right = torch.randn(512, 512), torch.randn(512, 512)
        self._out = torch.empty(512, 512)
        self._products = 1
        self.step()
        once = min(self.timed() for _ in range(20))
        self._products = max(1, round(step_s / once))

    def step(self) -> None:
        """Do the work of one step."""
        for _ in range(self._products):
            torch.mm(self._left, self._right, out=self._out)

    def timed(self) -> float:
        """Seconds of one step."""
        begun = time.perf_counter()
        self.step()
        return time.perf_counter() - begun

    def times_for(self, seconds: float) -> list[float]:
        """The times of steps for about so many `seconds`; at least four."""
        end = time.perf_counter() + seconds
        times: list[float] = []
        while time.perf_counter() < end or len(times) < 4:
            times.append(self.timed())
        return times


def _every_step(saver: Saver, steps: Steps, work: Callable[[], None], *, count: int) -> Figures:
    without = [timed_step(saver, steps, work, save=False)[0] for _ in range(count)]
    saved = [timed_step(saver, steps, work)[0] for _ in range(count + 1)]
    saver.wait_durable()
    without += [timed_step(saver, steps, work, save=False)[0] for _ in range(max(1, count // 2))]
    # the first save has nothing before it to wait for
    plain, kept = statistics.median(without), statistics.mean(saved[1:])
    return {"step_s": kept, "plain_step_s": plain, "added_s": kept - plain, "ratio": kept / plain}


def timed_step(
    saver: Saver, steps: Steps, work: Callable[[], None], *, save: bool = True
) -> tuple[float, float]:
    """Seconds of a whole step, and those that the saver held up the training thread."""
    begun = time.perf_counter()
    work()
    worked = time.perf_counter()
    saver.fence()
    fenced = time.perf_counter()
    saver.state.update(steps.last)
    updated = time.perf_counter()
    if save:
        saver.save(steps.next())
    ended = time.perf_counter()
    return ended - begun, fenced - worked + ended - updated


def _update(saver: Saver, steps: Steps) -> None:
    saver.fence()
    saver.state.update(steps.last)
