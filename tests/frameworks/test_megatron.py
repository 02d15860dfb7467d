"""Megatron-core with components(): killed where it hurts, it ends as if nothing was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.frameworks.conftest import Lives, assert_same, drawn, losses, result

STEPS = 14


@pytest.fixture
def loop(lives) -> Lives:
    return lives(
        "megatron_loop.py",
        "tests.frameworks.megatron_on_cpu",
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.dist_checkpointing.strategies.torch",
    )


def kills() -> list[int]:
    return drawn(range(1, STEPS // 2), range(STEPS // 2, STEPS))


LAYOUTS = {
    "tensor parallel": {"tp": 2},
    "pipeline": {"pp": 2},
    "data parallel": {},
    "distributed optimizer": {"distributed": True},
    "distributed optimizer, tensor parallel": {"distributed": True, "tp": 2},
    "distributed optimizer, float16": {"distributed": True, "precision": "fp16", "overflow": 4},
    "experts": {"ep": 2, "distributed": True},
}


def test_unsupported_megatron_settings_are_refused_by_name(loop):
    out = loop.undisturbed(refusals=True, distributed=True)
    refusals = json.loads((out / "refusals").read_text())
    assert "use_megatron_fsdp: take use_distributed_optimizer" in refusals["fsdp"]
    assert "weights in FP8 or FP4: take bf16" in refusals["fp8"]
    assert "no _get_model_param_range_map in its DistributedOptimizer" in refusals["hook"]
    assert "wrap it in Megatron's DistributedDataParallel" in refusals["bare model"]
    assert "cannot keep use_decentralized_pg under Megatron-Bridge" in refusals["decentralized"]
    assert "Megatron-Bridge did not call load()" in refusals["peft"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_training_resumes_bit_equal(loop, layout):
    options = LAYOUTS[layout]
    plain = loop.undisturbed(ranks=2, **options)
    kept, output = loop.kept(ranks=2, **options, kill=kills())
    assert "restored step" in output
    assert "discarded" not in output
    assert_same(plain, kept, kills=2, ranks=2)
    if "overflow" in options:
        assert result(plain)["progress"]["skipped"] == 1


def test_the_checkpoint_manager_of_megatron_bridge_can_be_replaced_and_resumes_bit_equal(loop):
    """By its interface: no CPU runs Megatron-Bridge itself."""
    options = {"distributed": True, "ranks": 2}
    plain = loop.undisturbed(**options)
    kept, output = loop.kept(**options, bridge=True, kill=kills())
    assert "restored step" in output
    assert "discarded" not in output
    assert_same(plain, kept, kills=2, ranks=2)


@pytest.mark.parametrize(("before", "after"), [("tp", "pp"), ("pp", "tp")])
def test_a_restore_into_another_layout_equals_a_load_of_megatrons_own_checkpoint(
    loop, tmp_path, before, after
):
    first, _ = loop.kept(ranks=2, **{before: 2}, steps=4, out="before", keep_own=True)
    own = loop.undisturbed(ranks=2, **{after: 2}, own=True, steps=4, seed=2)
    kept, _ = loop.kept(ranks=2, **{after: 2}, steps=4, seed=2, out="after")
    for rank in range(2):
        name = f"restored-{rank}"
        assert (kept / name).read_text() == (own / name).read_text()
    untouched, _ = loop.kept(steps=4, seed=3, out="one")
    assert result(untouched)["progress"]["iteration"] == 4
    loop.keepstep("export", "latest", "--to", str(tmp_path / "exported"))
    assert_exported(tmp_path / "exported", untouched)
    divided, _ = loop.kept(ranks=2, distributed=True, steps=4, seed=4, out="divided")
    assert_equal(whole(first, "ended"), whole(divided, "began"))


OTHERS = {
    "half the ranks": {"ranks": 2, "tp": 2, "distributed": True},
    "data parallel": {"ranks": 3, "distributed": True},
    "pipeline": {"ranks": 2, "pp": 2, "distributed": True},
    "both": {"ranks": 4, "tp": 2, "pp": 2, "distributed": True},
    "one rank": {"ranks": 1, "distributed": True},
    "not distributed": {"ranks": 2, "tp": 2},
}


def whole(folder: Path, when: str) -> dict[str, torch.Tensor]:
    """The parameters in full precision, with their moments, of all ranks put together."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob(f"{when}-with-*.pt"):
        for name, size, places, values in torch.load(file):
            found.setdefault(name, torch.full((3, size), torch.nan))[:, places] = values
    assert found
    assert not any(tensor.isnan().any() for tensor in found.values())
    return found


def assert_equal(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert expected.keys() == found.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])] == []


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_distributed_optimizer_is_restored_into_another_layout(loop, tmp_path, precision):
    """Megatron's own checkpoint is no measure here: it cannot load torch's Adam into this one."""
    options = {"precision": precision, "steps": 4}
    first, _ = loop.kept(ranks=4, tp=2, distributed=True, **options, out="first")
    ended = whole(first, "ended")
    for name, layout in OTHERS.items():
        if precision == "fp32" and not layout.get("distributed"):
            continue
        kept, _ = loop.kept(**layout, **options, seed=2, out=name)
        assert_equal(ended, whole(kept, "began"))
    loop.keepstep("export", "latest", "--to", str(tmp_path / "exported"))
    assert_exported(tmp_path / "exported", first.with_name("one rank"))


def assert_exported(folder: Path, path: Path) -> None:
    """What was exported is what the only rank of a restored training computes with."""
    exported, weights = load_file(folder / "model.safetensors"), torch.load(path / "weights.pt")
    assert_equal(weights, {name: of.to(weights[name].dtype) for name, of in exported.items()})


def test_experts_are_restored_at_another_expert_parallel_size(loop):
    first, _ = loop.kept(ranks=2, ep=2, distributed=True, steps=4, out="first")
    for name, layout in (("one each", {"ep": 4}), ("divided", {"ep": 2, "tp": 2})):
        kept, _ = loop.kept(ranks=4, **layout, distributed=True, steps=4, seed=2, out=name)
        assert_equal(whole(first, "ended"), whole(kept, "began"))
    alone, _ = loop.kept(experts=4, distributed=True, steps=4, out="alone")
    assert "optimizer_1: in the checkpoint" in (alone / "refused-0").read_text()


def test_losses_continue_at_another_tensor_parallel_size(loop):
    """Up to the order in which the parts of a sum are added, which depends on the layout; and
    without dropout, whose masks do, too."""
    options = {"distributed": True, "precision": "fp32", "dropout": 0.0}
    plain = loop.undisturbed(ranks=2, tp=2, **options, steps=10)
    loop.kept(ranks=2, tp=2, **options, steps=4, out="before")
    alone, _ = loop.kept(**options, steps=7, seed=2, out="alone")
    again, _ = loop.kept(ranks=2, tp=2, **options, steps=10, seed=3, out="again")
    expected, found = losses(plain), losses(alone) | losses(again)
    assert [*found] == [*range(4, 10)]
    for step, runs in found.items():
        ((*of,),), ((*like,),) = runs, expected[step]
        assert [*map(float.fromhex, of)] == pytest.approx([*map(float.fromhex, like)], rel=1e-5)


def test_a_vocabulary_that_was_padded_to_another_size_is_refused(loop):
    loop.kept(ranks=2, tp=2, distributed=True, steps=2)
    kept, _ = loop.kept(ranks=2, distributed=True, vocabulary=48, steps=2, out="other")
    text = (kept / "refused-0").read_text()
    assert "embedding.word_embeddings.weight: float32[32, 16] in the checkpoint" in text
    assert "nothing was changed" in text
    same, _ = loop.kept(ranks=2, distributed=True, steps=2, out="same")
    assert result(same)["progress"]["iteration"] == 2
