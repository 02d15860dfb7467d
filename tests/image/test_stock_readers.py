"""The exit door: what is committed can be read without keepstep, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from safetensors import safe_open
from safetensors.torch import load_file

from keepstep.image import Layout, TensorRole, TensorSpec, add_rank_suffix
from keepstep.image.tensor_specs import NATIVE_BYTES, OPAQUE_BYTES
from keepstep.state.taken_state import DTYPE_OF
from keepstep.steps import shard_name
from tests.image.images import noise, seal, stage
from tests.image.strategies import tensor_lists
from tests.torch_version import needs_stock_reader

# torch warns that there is no process group; to do without one is the point here.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def write(folder: Path, layout: Layout, content: dict[str, bytes]) -> Path:
    path = folder / shard_name(layout.rank, layout.world)
    path.write_bytes(seal(layout, stage(layout, content, kept={"rank": layout.rank})))
    return path


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(tensor_lists)
def test_stock_safetensors_reads_every_tensor_bit_equal(tmp_path: Path, specs) -> None:
    layout = Layout.build(specs, rank=0, world=1)
    content = noise(layout)
    path = write(tmp_path, layout, content)
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) - {spec.name for spec in specs} == {
            "keepstep.extras.0",
            "keepstep.digests.0",
            "keepstep.control.0",
        }
        for spec in specs:
            tensor = file.get_tensor(spec.name)
            assert tuple(tensor.shape) == spec.stored_shape
            assert raw(tensor) == content[spec.name]


@needs_stock_reader
@pytest.mark.parametrize("dtype", sorted(NATIVE_BYTES))
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 3)])
def test_stock_dcp_reads_every_native_dtype(tmp_path: Path, dtype: str, shape) -> None:
    layout = Layout.build([TensorSpec("x", dtype, shape, TensorRole.REST)], rank=0, world=1)
    content = noise(layout)
    write(tmp_path, layout, content)
    target = torch.zeros(shape, dtype=DTYPE_OF[dtype])
    dcp.load(
        {"x": target}, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True
    )
    assert raw(target) == content["x"]


@pytest.mark.parametrize("dtype", sorted(OPAQUE_BYTES))
def test_other_dtypes_are_bytes_to_stock_readers_and_view_back(tmp_path: Path, dtype: str) -> None:
    layout = Layout.build([TensorSpec("x", dtype, (4, 3), TensorRole.REST)], rank=0, world=1)
    content = noise(layout)
    tensor = load_file(write(tmp_path, layout, content))["x"]
    assert tensor.dtype is torch.uint8
    assert tensor.shape == (4, 3, OPAQUE_BYTES[dtype])
    assert raw(tensor) == content["x"]
    if dtype in DTYPE_OF:
        assert tensor.view(DTYPE_OF[dtype]).shape == (4, 3, 1)


def test_complex128_keeps_its_values(tmp_path: Path) -> None:
    value = torch.tensor([1 + 2j, -3.5j], dtype=torch.complex128)
    layout = Layout.build([TensorSpec("x", "C128", (2,), TensorRole.REST)], rank=0, world=1)
    loaded = load_file(write(tmp_path, layout, {"x": raw(value)}))["x"]
    assert torch.equal(loaded.view(torch.complex128).squeeze(-1), value)


def _rank(folder: Path, rank: int, whole: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Rank's shard: two rows of `whole`, all of `bias` (replicated), and its own random state."""
    rows = whole[2 * rank : 2 * rank + 2]
    own = torch.arange(3 + rank, dtype=torch.uint8)
    layout = Layout.build(
        [
            TensorSpec("whole", "F32", (2, 6), TensorRole.PARAMS, (2 * rank, 0), (4, 6)),
            TensorSpec("bias", "BF16", (6,), TensorRole.PARAMS),
            TensorSpec("count", "I64", (), TensorRole.REST),
            TensorSpec("wave", "C128", (1, 2), TensorRole.REST, (rank, 0), (2, 2)),
            TensorSpec(add_rank_suffix("rng", rank), "U8", (3 + rank,), TensorRole.REST),
        ],
        rank=rank,
        world=2,
        aliases={"head": "bias"},
    )
    content = {
        "whole": raw(rows),
        "bias": raw(bias),
        "count": raw(torch.tensor([41])),
        "wave": raw(torch.full((1, 2), complex(rank, 1), dtype=torch.complex128)),
        add_rank_suffix("rng", rank): raw(own),
    }
    write(folder, layout, content)
    return own


@needs_stock_reader
@pytest.mark.parametrize("threads", [1, 2])
def test_stock_dcp_reads_a_directory_of_two_ranks_at_world_one(tmp_path: Path, threads) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    bias = torch.randn(6, generator=torch.Generator().manual_seed(1)).bfloat16()
    own = [_rank(tmp_path, rank, whole, bias) for rank in (0, 1)]
    target = {
        "whole": torch.zeros(4, 6),
        "bias": torch.zeros(6, dtype=torch.bfloat16),
        "count": torch.zeros((), dtype=torch.int64),
        "wave": torch.zeros(2, 2, 16, dtype=torch.uint8),
        add_rank_suffix("rng", 0): torch.zeros(3, dtype=torch.uint8),
        add_rank_suffix("rng", 1): torch.zeros(4, dtype=torch.uint8),
    }
    reader = dcp.HuggingFaceStorageReader(str(tmp_path), thread_count=threads)
    dcp.load(target, storage_reader=reader, no_dist=True)
    assert torch.equal(target["whole"], whole)
    assert torch.equal(target["bias"], bias)
    assert target["count"] == 41
    assert torch.equal(
        target["wave"].view(torch.complex128).squeeze(-1),
        torch.tensor([[1j, 1j], [1 + 1j, 1 + 1j]], dtype=torch.complex128),
    )
    for rank in (0, 1):
        assert torch.equal(target[add_rank_suffix("rng", rank)], own[rank])


@needs_stock_reader
def test_reserved_keys_of_two_ranks_do_not_collide(tmp_path: Path) -> None:
    """Their regions may differ in size: under one key stock DCP would join them."""
    for rank in (0, 1):
        _rank(tmp_path, rank, torch.zeros(4, 6), torch.zeros(6, dtype=torch.bfloat16))
    metadata = dcp.HuggingFaceStorageReader(str(tmp_path)).read_metadata()
    reserved = [key for key in metadata.state_dict_metadata if key.startswith("keepstep.")]
    assert len(reserved) == 6
    assert all(len(metadata.state_dict_metadata[key].chunks) == 1 for key in reserved)
