"""The loop of a page of docs/recipes: `python recipe.py OUT SETTINGS`; as trainer.py otherwise.

`page` names the page, and the module in `recipes` that makes what the loop starts from. `bare`: the
loop as it was, without the lines that the page adds and with those that it takes away.
"""

from __future__ import annotations

import importlib
import re

import torch

from tests.frameworks.script import SETTINGS, digest, random_states, write
from tests.harness import ROOT


def loop(page: str, *, bare: bool) -> str:
    """The page's one block, before or after the change that it shows."""
    text = (ROOT / "docs" / "recipes" / f"{page}.md").read_text()
    (block,) = re.findall(r"^```diff\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = (line for line in block.splitlines() if line[:1] != ("+" if bare else "-"))
    return "\n".join(line[1:] for line in lines)


def main() -> None:
    page = SETTINGS["page"]
    torch.manual_seed(0)
    if page in ("timm", "ultralytics"):
        importlib.import_module("tests.frameworks.vision_on_cpu")
    module = importlib.import_module(f"tests.frameworks.recipes.{page}")
    names = module.made()
    exec(compile(loop(page, bare=SETTINGS.get("bare", False)), page, "exec"), names)
    kept = {name: names.get(name) for name in module.COMPARED}
    states = {
        name: digest(value.state_dict() if hasattr(value, "state_dict") else value)
        for name, value in kept.items()
    }
    write({**states, "random": random_states()})


if __name__ == "__main__":
    main()
