"""Megatron-core with components(): killed where it hurts, it ends as if nothing was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.frameworks.conftest import Lives, assert_same, drawn, result

STEPS = 14


@pytest.fixture
def loop(lives) -> Lives:
    return lives("megatron_loop.py", "tests.frameworks.megatron_on_cpu")


def kills() -> list[int]:
    return drawn(range(1, STEPS // 2), range(STEPS // 2, STEPS))


LAYOUTS = {
    "tensor parallel": {"tp": 2},
    "pipeline": {"pp": 2},
    "data parallel": {},
    "distributed optimizer": {"distributed": True},
    "distributed optimizer, float16": {"distributed": True, "precision": "fp16", "overflow": 4},
    "experts": {"ep": 2, "distributed": True},
}


def test_names_what_it_cannot_keep(loop):
    out = loop.undisturbed(refusals=True, distributed=True)
    said = json.loads((out / "refusals").read_text())
    assert "use_megatron_fsdp: take use_distributed_optimizer" in said["fsdp"]
    assert "weights in FP8 or FP4: take bf16" in said["fp8"]
    assert "no _get_model_param_range_map in its DistributedOptimizer" in said["hook"]
    assert "wrap it in Megatron's DistributedDataParallel" in said["bare model"]
    assert "cannot keep use_decentralized_pg under Megatron-Bridge" in said["decentralized"]
    assert "Megatron-Bridge did not call load()" in said["peft"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_and_gone_on_with_bit_by_bit(loop, layout):
    options = LAYOUTS[layout]
    plain = loop.undisturbed(ranks=2, **options)
    kept, said = loop.kept(ranks=2, **options, kill=kills())
    assert "restored step" in said
    assert "discarded" not in said
    assert_same(plain, kept, kills=2, ranks=2)
    if "overflow" in options:
        assert result(plain)["progress"]["skipped"] == 1


def test_megatron_bridges_manager_is_replaced_bit_by_bit(loop):
    """By its interface: no CPU runs Megatron-Bridge itself."""
    options = {"distributed": True, "ranks": 2}
    plain = loop.undisturbed(**options)
    kept, said = loop.kept(**options, bridge=True, kill=kills())
    assert "restored step" in said
    assert "discarded" not in said
    assert_same(plain, kept, kills=2, ranks=2)


@pytest.mark.parametrize(("before", "after"), [("tp", "pp"), ("pp", "tp")])
def test_another_layout_gets_what_megatrons_own_checkpoint_gives_it(loop, tmp_path, before, after):
    loop.kept(ranks=2, **{before: 2}, steps=4, out="before", keep_own=True)
    own = loop.undisturbed(ranks=2, **{after: 2}, own=True, steps=4, seed=2)
    kept, _ = loop.kept(ranks=2, **{after: 2}, steps=4, seed=2, out="after")
    for rank in range(2):
        name = f"restored-{rank}"
        assert (kept / name).read_text() == (own / name).read_text()
    one, _ = loop.kept(steps=4, seed=3, out="one")
    assert result(one)["progress"]["iteration"] == 4
    loop.keepstep("export", "latest", "--to", str(tmp_path / "exported"))
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    weights = torch.load(one / "weights.pt")
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name].bfloat16(), weights[name]) for name in weights)


def whole(folder: Path, when: str) -> dict[str, torch.Tensor]:
    """The parameters and moments of all ranks' distributed optimizers, put together."""
    parts: dict[str, dict[int, torch.Tensor]] = {}
    for file in folder.glob(f"{when}-with-*.pt"):
        for name, (begin, part) in torch.load(file).items():
            parts.setdefault(name, {})[begin] = part
    parts.pop("output_layer.weight", None)  # a pipeline's copy of the embedding
    return {name: torch.cat([of[at] for at in sorted(of)], 1) for name, of in parts.items()}


def test_the_distributed_optimizer_in_other_data_parallel_and_pipeline_sizes(loop):
    """Megatron's own checkpoint is no measure here: it cannot load torch's Adam into this one."""
    before, _ = loop.kept(ranks=2, distributed=True, steps=4, out="before")
    for ranks, options in ((2, {"pp": 2}), (1, {}), (3, {})):
        kept, _ = loop.kept(
            ranks=ranks, **options, distributed=True, steps=4, seed=2, out=f"{ranks}"
        )
        ended, began = whole(before, "ended"), whole(kept, "began")
        assert ended.keys() == began.keys()
        assert all(torch.equal(ended[name], began[name]) for name in ended)


def test_another_tensor_parallel_size_of_the_distributed_optimizer_is_refused(loop):
    loop.kept(ranks=2, tp=2, distributed=True, steps=2)
    kept, _ = loop.kept(ranks=2, distributed=True, steps=2, out="other")
    said = (kept / "refused-0").read_text()
    assert "megatron (distributed optimizer, tensor parallel size 2): in the checkpoint" in said
    assert "nothing was changed" in said
