"""torchtitan where there is no accelerator: import it from here, before anything of its own.

It asks torch for one and takes CUDA where there is none. Told that it is "cpu", it trains on gloo,
once nobody asks for that device's memory and number.
"""

from __future__ import annotations

import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.components import metrics  # noqa: E402
from torchtitan.distributed import utils  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

__all__ = ["Trainer", "metrics"]


class NoMemory:
    """Of a device that has none to be asked for."""

    device_name = "cpu"

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


metrics.build_device_memory_monitor = NoMemory
utils.set_pg_timeouts = lambda **_: None
