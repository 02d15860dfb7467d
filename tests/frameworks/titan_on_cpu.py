"""torchtitan where there is no accelerator: import it from here, before anything of its own.

It asks torch for one and takes CUDA where there is none. Told that it is "cpu", it trains on gloo,
once nobody asks for that device's memory and number. At the end of a training it waits for nobody.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch._utils
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan import trainer  # noqa: E402
from torchtitan.components import metrics  # noqa: E402
from torchtitan.distributed import fsdp, utils  # noqa: E402

Trainer = trainer.Trainer
__all__ = ["Trainer", "metrics"]


class NoMemory:
    """Of a device that has none to be asked for."""

    device_name = "cpu"

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


def sum_gradients(model: torch.nn.Module) -> None:
    """Without the factor of 1, which gloo's reductions do not take."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def step(schedule: Any, **microbatches: Any) -> None:
    """A step of microbatches, for which torch 2.13 has no public method."""
    for stage in schedule._stages:
        stage.has_backward = schedule._has_backward
        stage.clear_runtime_states()
    schedule._step_microbatches(**microbatches)


metrics.build_device_memory_monitor = NoMemory
utils.set_pg_timeouts = lambda **_: None
fsdp.disable_fsdp_gradient_division = sum_gradients
_PipelineScheduleRuntime.step = step
trainer.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)
