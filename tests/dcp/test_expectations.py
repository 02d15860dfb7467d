"""What PyTorch's own tests ask of a DCP storage is asked of `StorageWriter(path)` and reader."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import keepstep.dcp

Ranks = Callable[..., list[str]]


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
def test_a_training_resumes_from_its_saved_step(sidecar, ranks: Ranks, kind: str) -> None:
    ranks(4 if kind == "hsdp" else 2, "end_to_end", kind, "sync")


@pytest.mark.parametrize("how", ["thread", "stager", "async-stager"])
def test_a_training_resumes_from_a_step_that_was_saved_asynchronously(
    sidecar, ranks: Ranks, how: str
) -> None:
    ranks(2, "end_to_end", "fsdp", how)


@pytest.mark.parametrize(
    "what",
    [
        "casting",
        "partial_load",
        "other_shape",
        "saved_again",
        "odd_dtypes",
        "sharded",
        "other_order",
        "mixed",
    ],
)
def test_the_storage_meets_the_same_expectations_as_a_file_system_writer(
    sidecar, ranks: Ranks, what: str
) -> None:
    ranks(2, what)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_an_unsupported_dtype_is_refused_with_the_name_of_the_tensor(sidecar) -> None:
    odd = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)
    with pytest.raises(CheckpointException, match=r"deep\.odd: tensors of torch\.quint8"):
        dcp.save(
            {"deep": {"odd": odd}},
            storage_writer=keepstep.dcp.StorageWriter("step-1"),
            no_dist=True,
        )
    keepstep.dcp.close()
