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
def test_a_training_goes_on_from_its_step(sidecar, ranks: Ranks, kind: str) -> None:
    ranks(4 if kind == "hsdp" else 2, "end_to_end", kind, "sync")


@pytest.mark.parametrize("how", ["thread", "stager", "async-stager"])
def test_a_training_goes_on_from_a_step_that_was_saved_meanwhile(
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
def test_it_is_kept_as_by_a_file_system_writer(sidecar, ranks: Ranks, what: str) -> None:
    ranks(2, what)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_a_dtype_that_no_image_has_is_refused_by_the_tensor_s_name(sidecar) -> None:
    odd = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8)
    with pytest.raises(CheckpointException, match=r"deep\.odd: tensors of torch\.quint8"):
        dcp.save(
            {"deep": {"odd": odd}},
            storage_writer=keepstep.dcp.StorageWriter("step-1"),
            no_dist=True,
        )
    keepstep.dcp.close()
