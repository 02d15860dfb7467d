"""Megatron-core where there is no GPU: import it before anything of Megatron's.

Megatron-core makes tensors on "cuda", compares their types with torch.cuda's, and draws from CUDA's
generator, all by name. Here these names mean the CPU, and nothing else of it is changed.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

warnings.filterwarnings("ignore", "Transformer Engine and Apex are not installed")
logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


class _OnCpu(TorchFunctionMode):
    """Takes the CPU where the GPU is named, and gives the type that a tensor would have there."""

    def __torch_function__(
        self, function: Any, _: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if str(options.get("device")).startswith("cuda"):
            options["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        found = function(*args, **options)
        if function is torch.Tensor.type and len(args) == 1:
            return found.replace("torch.", "torch.cuda.")
        return found


_OnCpu().__enter__()
torch.cuda.current_device = lambda: "cpu"
torch.cuda.synchronize = lambda *_: None
torch.cuda.manual_seed = torch.manual_seed
torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()

from megatron.core.tensor_parallel import random  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402

random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
moe_utils.te_general_gemm = None  # which it asks for, and forgets to set without Transformer Engine
