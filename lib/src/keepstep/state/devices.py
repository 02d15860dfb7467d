"""Accelerators that hold a state: which can be kept, their names, and their generators.

torch's generic interface (`torch.accelerator`, the module of a device type) serves all kinds of
devices; ROCm is called "cuda", too. `keepstep.save.accelerator` orders the work on them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from keepstep.errors import UsageError


def kind() -> str:
    """The type of the accelerator that torch has here, for example "cuda"; "" if there is none."""
    if not torch.accelerator.is_available():
        return ""
    device = torch.accelerator.current_accelerator()
    return "" if device is None else device.type


def module(kind: str) -> Any:
    """`torch.cuda`, `torch.xpu` and so on. Raises RuntimeError for a kind unknown to torch."""
    return torch.get_device_module(kind)


def kind_in_use() -> str:
    """Like `kind`, but "" until this process has used the accelerator: the query must not
    initialize a device.
    """
    found = kind()
    return found if found and module(found).is_initialized() else ""


def check_device(device: torch.device, name: str) -> None:
    """Raise UsageError, naming the tensor, if it is on a device from which nothing can be kept."""
    if device.type != "cpu" and (why := _why_not(device.type)):
        raise UsageError(
            f"{name}: tensors on {device.type!r} cannot be kept: {why}; train on CUDA, ROCm or XPU,"
            " or keep copies on the CPU (a dict of tensor.cpu(), made anew before each save)"
        )


@functools.cache
def _why_not(kind_of_tensor: str) -> str:
    """Why tensors of this kind cannot be kept.

    Empty for an accelerator that has what concurrent copies need: streams, events, and host memory
    that can be pinned.
    """
    if kind_of_tensor == "mps":
        return "it has one stream, and no host memory that another process shares can be pinned"
    if kind_of_tensor != kind():
        return f"torch's accelerator here is {kind() or 'none'}"
    try:
        torch.Stream(kind_of_tensor)
        torch.Event(kind_of_tensor)
        torch.empty(1, pin_memory=True)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return f"torch has no streams, events or pinned memory for it ({error})"
    return ""


# --- names of devices in the header of an image ---------------------------------------------


def device_name(device: torch.device) -> str:
    """The name of a device. The process's current device gets no number, because the number may be
    another one in the next life.
    """
    own = device.type != "cpu" and device.type == kind()
    return (
        device.type
        if own and device.index == module(device.type).current_device()
        else (str(device))
    )


def device_of(name: str | None) -> torch.device:
    """The inverse of `device_name`, as closely as this machine allows; the CPU if nothing
    is known.
    """
    here = kind()
    if name is None or not here or name.partition(":")[0] != here:
        return torch.device("cpu")
    device = torch.device(name)
    if device.index is None or device.index >= module(here).device_count():
        return torch.device(here, module(here).current_device())
    return device


# --- generators --------------------------------------------------------------------------------


def generator_states() -> dict[str, list[bytes]]:
    """By kind, the generator states of every device that this process sees.

    A model may lie on several devices, each with a generator of its own. Empty if no accelerator is
    in use.
    """
    if not (found := kind_in_use()):
        return {}
    devices = module(found)
    count = range(devices.device_count())
    return {found: [bytes(devices.get_rng_state(at).tolist()) for at in count]}


def set_generator(kind: str, state: torch.Tensor, at: int) -> None:
    """Set the generator of device `at`."""
    module(kind).set_rng_state(state, at)
