"""A directory that is not exactly one step is refused, by name, and nothing is loaded."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from keepstep.dcp.reader import StepFolder
from keepstep.dcp.session import SavedStateTree
from keepstep.errors import ForeignError, FormatError, ImageError, RestoreError
from keepstep.image import ControlPage, Layout, TensorRole, TensorSpec
from keepstep.steps import shard_name
from tests.image.images import noise, seal, stage

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

Box = tuple[int, int]


def shard(
    folder: Path, rank: int, world: int, boxes: Sequence[Box], rows: int = 4, **control: object
) -> Path:
    """Rank's shard with boxes (first row, rows) of a tensor `w` of `rows` x 3."""
    names = ["w"] if len(boxes) == 1 else [f"w@{number}" for number in range(len(boxes))]
    specs = [
        TensorSpec(name, "F32", (count, 3), TensorRole.REST, (first, 0), (rows, 3), tensor="w")
        for name, (first, count) in zip(names, boxes, strict=True)
    ]
    tree = SavedStateTree().to_skeleton_json()
    layout = Layout.build(specs, rank=rank, world=world, skeleton=tree)
    data = stage(layout, noise(layout, seed=rank), kept={})
    if control:
        page = ControlPage.from_bytes(memoryview(data)[layout.control_begin :])
        data[layout.control_begin :] = replace(page, **control).to_bytes()
    path = folder / shard_name(rank, world)
    path.write_bytes(seal(layout, data))
    return path


def test_a_missing_rank_is_refused_with_its_file_name(tmp_path: Path) -> None:
    shard(tmp_path, 0, 3, [(0, 2)])
    shard(tmp_path, 2, 3, [(2, 2)])
    with pytest.raises(RestoreError, match=r"rank-00001-of-00003\.safetensors missing"):
        StepFolder(tmp_path)


@pytest.mark.parametrize("what", [{"step": 1201}, {"run": "other"}])
def test_a_directory_with_shards_of_two_steps_or_runs_is_refused(tmp_path: Path, what) -> None:
    shard(tmp_path, 0, 2, [(0, 2)])
    odd = shard(tmp_path, 1, 2, [(2, 2)], **what)
    with pytest.raises(ForeignError, match="take it out") as caught:
        StepFolder(tmp_path)
    assert str(odd) in str(caught.value)


def test_a_directory_with_shards_of_two_world_sizes_is_refused(tmp_path: Path) -> None:
    shard(tmp_path, 0, 2, [(0, 2)])
    shard(tmp_path, 1, 2, [(2, 2)])
    odd = shard(tmp_path, 1, 3, [(2, 2)])
    with pytest.raises(ForeignError) as caught:
        StepFolder(tmp_path)
    assert odd.name in str(caught.value)


def test_a_foreign_file_is_refused_with_its_path(tmp_path: Path) -> None:
    shard(tmp_path, 0, 1, [(0, 4)])
    foreign = tmp_path / "model.safetensors"
    save_file({"w": torch.ones(2)}, foreign)
    with pytest.raises(ImageError) as caught:
        StepFolder(tmp_path)
    assert str(foreign) in str(caught.value)


def test_a_renamed_shard_is_refused(tmp_path: Path) -> None:
    path = shard(tmp_path, 0, 2, [(0, 2)])
    shutil.copy(path, tmp_path / shard_name(1, 2))
    with pytest.raises(ForeignError):
        StepFolder(tmp_path)


def test_a_truncated_shard_is_refused_with_its_path(tmp_path: Path) -> None:
    path = shard(tmp_path, 0, 1, [(0, 4)])
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ImageError, match="truncated") as caught:
        StepFolder(tmp_path)
    assert str(path) in str(caught.value)


def test_a_malformed_tree_is_refused(tmp_path: Path) -> None:
    for text in ('{"dcp":1}', '{"dcp":1,"values":[1],"boxes":{},"paths":null}', "{"):
        with pytest.raises(FormatError):
            SavedStateTree.parse(text)


def test_missing_and_empty_directories_have_different_errors(tmp_path: Path) -> None:
    with pytest.raises(RestoreError, match="no shard"):
        StepFolder(tmp_path)
    with pytest.raises(RestoreError, match="no directory"):
        StepFolder(tmp_path / "nowhere")
