"""Lets accelerate take a CPU for its accelerator: there it knows neither DeepSpeed nor FSDP2.

It then takes the ways that it takes on GPUs, with gloo. To be imported before its state is made.
"""

from __future__ import annotations

import sys
from typing import Any

import deepspeed  # noqa: F401  # what it finds of a CPU
import torch
from accelerate.state import DistributedType, PartialState
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import training_args


def backend(*_: Any, **__: Any) -> tuple[str, DistributedType]:
    return "gloo", DistributedType.MULTI_GPU


def set_device(self: Any) -> None:
    self.device = torch.device("cpu")


PartialState._prepare_backend = backend
PartialState.set_device = set_device
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
training_args.is_torch_bf16_gpu_available = lambda: True
CPUOffloadPolicy.__init__.__defaults__ = (False,)  # no memory is pinned where there is no GPU
