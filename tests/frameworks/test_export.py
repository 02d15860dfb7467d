"""`keepstep export` and stock transformers: what was trained is what `from_pretrained` loads."""

from __future__ import annotations

import shutil

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.cli.conftest import Keepstep
from tests.frameworks.conftest import TRAINER, python

pytestmark = pytest.mark.filterwarnings("ignore")

TRAIN = """
import sys, torch, transformers, keepstep
torch.manual_seed(0)
config = transformers.AutoConfig.from_pretrained("config")
model = transformers.AutoModelForCausalLM.from_config(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
checkpointer = keepstep.Checkpointer({"model": model, "optimizer": optimizer})
checkpointer.restore()
rows = torch.randint(0, 64, (4, 8))
for step in range(3):
    model(input_ids=rows, labels=rows).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.save(step)
checkpointer.close()
model.save_pretrained("stock")
"""

_SMALL = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
CONFIGS = {
    "gpt2": transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=16, **_SMALL),
    "llama": transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
        **_SMALL,
    ),
}


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_from_pretrained_loads_the_model_that_was_trained(name: str, keepstep: Keepstep) -> None:
    CONFIGS[name].save_pretrained(keepstep.home / "config")
    keepstep("run", "--", python(*TRAINER), keepstep.script("train.py", TRAIN))
    stock = transformers.AutoModelForCausalLM.from_pretrained(keepstep.home / "stock")
    for options in ((), ("--shard-size", "4KB"), ("--dtype", "bf16")):
        out = keepstep.home / f"out{len(options)}{options[-1:]}"
        keepstep("export", "latest", "--to", str(out), *options)
        CONFIGS[name].save_pretrained(out)
        dtype = torch.bfloat16 if "bf16" in options else torch.float32
        loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
            out, dtype=dtype, output_loading_info=True
        )
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        expected = stock.to(dtype).state_dict() if "bf16" in options else stock.state_dict()
        assert loaded.state_dict().keys() == expected.keys()
        for key, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, expected[key]), key


TRAIN_ADAPTER = """
import sys, peft, torch, transformers, keepstep
torch.manual_seed(0)
config = transformers.AutoConfig.from_pretrained("config")
model = transformers.AutoModelForCausalLM.from_config(config)
model.save_pretrained("base")
options = {"use_dora": True} if "dora" in sys.argv else {"modules_to_save": ["lm_head"]}
lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **options)
model = peft.get_peft_model(model, lora)
optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
parts = {"model": model, "optimizer": optimizer}
checkpointer = keepstep.Checkpointer(parts, frozen_once=True)
checkpointer.restore()
rows = torch.randint(0, 64, (4, 8))
for step in range(3):
    model(input_ids=rows, labels=rows).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.save(step)
checkpointer.close()
model.save_pretrained("stock")
"""


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_peft_loads_the_adapter_that_was_trained(kind: str, keepstep: Keepstep) -> None:
    CONFIGS["llama"].save_pretrained(keepstep.home / "config")
    keepstep("run", "--", python(*TRAINER), keepstep.script("train.py", TRAIN_ADAPTER), kind)
    keepstep("export", "latest", "--to", "out", "--only", "adapter")
    stock, out = keepstep.home / "stock", keepstep.home / "out"
    expected = load_file(stock / "adapter_model.safetensors")
    found = load_file(out / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    shutil.copy(stock / "adapter_config.json", out)
    base = transformers.AutoModelForCausalLM.from_pretrained(keepstep.home / "base")
    loaded = peft.PeftModel.from_pretrained(base, out)
    rows = torch.arange(8).reshape(1, 8)
    again = transformers.AutoModelForCausalLM.from_pretrained(keepstep.home / "base")
    reference = peft.PeftModel.from_pretrained(again, stock)
    assert torch.equal(loaded(input_ids=rows).logits, reference(input_ids=rows).logits)
