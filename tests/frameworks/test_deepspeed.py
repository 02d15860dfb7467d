"""DeepSpeed's engine with components(engine): killed where it hurts, it ends as if nothing was."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.conformance.rows.packages import EXTENSIONS
from tests.frameworks.conftest import DEEPSPEED, Lives, assert_same, drawn, result

BATCHES = 28
"""Of two epochs on two ranks: 56 rows in batches of 4; twice as many on one."""

OFFLOADS = {"zero_force_ds_cpu_optimizer": False}


@pytest.fixture
def loop(lives) -> Lives:
    return lives("deepspeed_loop.py", *DEEPSPEED)


def kill_within(steps: int) -> list[int]:
    return drawn(range(1, steps // 2), range(steps // 2, steps))


def test_zero_1_in_float16_with_an_overflow_resumes_bit_equal(loop):
    options = {"stage": 1, "precision": "fp16", "overflow": 11}
    plain = loop.undisturbed(ranks=2, **options)
    kept, output = loop.kept(ranks=2, **options, kill=kill_within(BATCHES // 2))
    assert "restored step" in output
    assert_same(plain, kept, kills=2, ranks=2)
    _, _, skipped, _ = result(plain)["progress"]
    assert skipped >= 2, "one an epoch"


def rows(name: str, kept: Path) -> list[int]:
    """How many of a tensor each image of the newest step has."""
    found = []
    for image in max((kept.parent / ".keepstep" / "trainer").glob("0*")).glob("*.safetensors"):
        with safe_open(image, "pt") as file:
            here = name in set(file.keys())
            found.append(file.get_slice(name).get_shape()[0] if here else 0)
    return sorted(found)


def test_zero_2_with_accumulation_resumes_bit_equal_and_at_other_world_sizes(loop):
    options = {"stage": 2, "accumulation": 2}
    plain = loop.undisturbed(ranks=2, **options)
    kept, _ = loop.kept(ranks=2, **options, kill=kill_within(BATCHES // 4))
    assert_same(plain, kept, kills=2, ranks=2)
    assert rows("model.1.weight", kept) == [0, 17], "once, as all ranks have it"
    assert rows("master.zero.group.1", kept) == [6, 7]
    first, _ = loop.kept(stage=1, out="one", epochs=3)
    assert (first / "restored-0").read_text() == result(plain)["masters"]
    steps = BATCHES // 4 + 3 * BATCHES // 4  # half of the second epoch, and the third
    assert result(first)["progress"][:2] == [steps, steps], "without accumulation"
    two, _ = loop.kept(ranks=2, stage=2, out="two", epochs=3)
    for rank in range(2):
        assert (two / f"restored-{rank}").read_text() == result(first)["masters"]
    for name in ("masters", "weights", "progress", "schedule"):
        assert result(two)[name] == result(first)[name]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_zero_3_resumes_bit_equal_and_at_other_world_sizes(loop, precision):
    """Some of its parameters stay whole on every rank. How many share a tensor differs from life to
    life, as does what they are before the restore, also the one that is not trained."""
    options = {"stage": 3, "precision": precision, "overflow": 11 if precision == "fp16" else None}
    small = {"stage3_param_persistence_threshold": 20}
    shared = [{"sub_group_size": size} | small for size in (100, 30, 1000, 1)]
    plain = loop.undisturbed(ranks=2, **options, zero=shared[0])
    kill = kill_within(BATCHES // 2)
    before, _ = loop.kept(ranks=2, **options, zero=shared[0], kill=kill)
    assert_same(plain, before, kills=2, ranks=2)
    assert rows("model.1.weight", before) == [68, 68], "each by itself"
    for life, ranks in enumerate((1, 2, 3), start=1):
        more = {"zero": shared[life], "seed": life, "epochs": 2 + life}
        after, _ = loop.kept(ranks=ranks, **options, **more, out=f"life-{life}")
        for rank in range(ranks):
            assert (after / f"restored-{rank}").read_text() == result(before)["masters"]
        assert (after / "weights-0").read_text() == result(before)["weights"]
        before = after
    assert rows("model.1.weight", before) == [44, 46, 46]
    assert rows("optimizer.state.model.2.weight.exp_avg", before) == [5, 6, 6]
    other, _ = loop.kept(stage=2, precision=precision, out="other")
    refused = (other / "refused-0").read_text()
    assert "nothing was changed" in refused
    assert "master: given to Checkpointer, but not in the checkpoint" in refused


def test_an_export_of_zero_3_equals_the_model_that_deepspeed_saves(loop, tmp_path):
    """By name and shape; of weights that were trained, in full precision."""
    zero = {"sub_group_size": 100, "stage3_gather_16bit_weights_on_model_save": True}
    kept, _ = loop.kept(ranks=2, stage=3, zero=zero, epochs=1, stock=True)
    stock = torch.load(kept / "stock.bin")
    for dtype, options in ((torch.float32, ()), (torch.bfloat16, ("--dtype", "bf16"))):
        out = tmp_path / f"exported{len(options)}"
        # a buffer is each rank's own
        loop.keepstep("export", "latest", "--to", str(out), "--lowest-rank", *options)
        exported = load_file(out / "model.safetensors")
        assert exported.keys() == stock.keys()
        for name, tensor in exported.items():
            assert torch.equal(tensor.bfloat16(), stock[name].bfloat16()), name
        assert {exported[f"{layer}.weight"].dtype for layer in (1, 2, 4)} == {dtype}
    assert exported["1.weight"].shape == (17, 8)


def test_zero_1_in_bfloat16_with_float32_accumulation_resumes_bit_equal(loop):
    """Another optimizer of DeepSpeed's, and a loader with workers."""
    options = {"stage": 1, "config": {"data_types": {"grad_accum_dtype": "fp32"}}, "workers": 2}
    plain = loop.undisturbed(**options)
    kept, _ = loop.kept(**options, kill=kill_within(BATCHES))
    assert_same(plain, kept, kills=2)


@pytest.mark.skipif(
    not (EXTENSIONS / "cpu_adam").exists(),
    reason="DeepSpeed's CPU Adam is not compiled: make test-frameworks does that",
)
def test_zero_2_with_the_cpu_adam_of_deepspeed_resumes_bit_equal(loop, monkeypatch):
    """Whose powers of betas round as they are multiplied, which is seen after some 50 steps."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(EXTENSIONS))
    monkeypatch.setenv("PATH", f"{sys.prefix}/bin", prepend=os.pathsep)  # of ninja
    options = {
        "stage": 2,
        "own": True,
        "epochs": 6,
        "zero": {"offload_optimizer": {"device": "cpu"}},
    }
    plain = loop.undisturbed(**options)
    kept, _ = loop.kept(**options, kill=drawn(range(1, 30), range(50, 70)))
    assert_same(plain, kept, kills=2)


def test_a_save_during_accumulation_without_zero_is_skipped_with_a_message(loop):
    options = {"stage": 0, "accumulation": 2}
    plain = loop.undisturbed(**options)
    kept, output = loop.kept(**options, always=True, kill=kill_within(BATCHES // 2))
    assert_same(plain, kept, kills=2)
    assert "gradients are being accumulated, which no step holds" in output


def test_unsupported_deepspeed_settings_are_refused_by_name(loop):
    out = loop.undisturbed(stage=1, refusals=True, config=OFFLOADS)
    refusals = json.loads((out / "refusals").read_text())
    assert "zero_optimization.offload_param: leave offload_param out" in refusals["offload"]
    assert "data_efficiency: leave it out of the configuration" in refusals["data"]
    assert "a PipelineEngine was never tried" in refusals["pipeline"]
    assert "this engine has no optimizer" in refusals["no optimizer"]
