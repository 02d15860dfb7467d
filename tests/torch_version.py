"""What the oldest torch that the library takes lacks (`make test-torch TORCH=2.6.0`)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

NEWER_DTYPES = [getattr(torch, name) for name in ("float8_e8m0fnu",) if hasattr(torch, name)]
"""Not in torch 2.6."""

needs_stock_reader = pytest.mark.skipif(
    not hasattr(dcp, "HuggingFaceStorageReader"),
    reason="this torch has no stock reader of ours",
)
