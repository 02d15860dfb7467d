"""The blocks of code of README, CONTRIBUTING and docs/, and where each of them runs.

A fence names its language. An indented block is `bash` if it begins with a command, else `text`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import dedent

from tests.harness import ROOT

COMMANDS = frozenset(
    {"keepstep", "kubectl", "helm", "docker", "kind", "make", "pip", "export", ".venv/bin/pytest"}
)
FRAMEWORKS = "docs/frameworks.md"
ELSEWHERE = {
    "docs/slurm.md Slurm": "tests/slurm/test_one_node.py",
    "docs/slurm.md Several nodes": "tests/slurm/test_several_nodes.py",
    "docs/recipes/diffusers.md diffusers' training scripts": "tests/frameworks/test_recipes.py",
    "docs/recipes/nanogpt.md nanoGPT's loop": "tests/frameworks/test_recipes.py",
    "docs/recipes/timm.md timm's training script": "tests/frameworks/test_recipes.py",
    "docs/recipes/ultralytics.md ultralytics' trainer": "tests/frameworks/test_recipes.py",
    f"{FRAMEWORKS} torchtitan": "tests/frameworks/titan.py",
    f"{FRAMEWORKS} DeepSpeed": "tests/frameworks/deepspeed_loop.py",
    f"{FRAMEWORKS} Ray Train": "tests/frameworks/ray_train.py",
    f"{FRAMEWORKS} Megatron-core": "tests/frameworks/megatron_loop.py",
    f"{FRAMEWORKS} Megatron-Bridge": "tests/frameworks/megatron_loop.py",
}
"""By the name of a block: the test that takes it from its page, or runs a loop of its lines."""


@dataclass(frozen=True)
class Block:
    """One block. `name`: its page and section, and its number there if it is not the first."""

    page: str
    section: str
    number: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page} {self.section}" + (f" {self.number}" if self.number > 1 else "")

    @property
    def commands(self) -> list[str]:
        """The lines of a shell's block, without comments; continued ones are joined."""
        lines = self.text.replace("\\\n", " ").splitlines()
        plain = (re.sub(r"\s+#\s.*|^#\s.*", "", line).strip() for line in lines)
        return [re.sub(r"\s+", " ", command) for command in plain if command]


def blocks() -> list[Block]:
    """All blocks of all pages."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = []
    for page in pages:
        seen = Counter[str]()
        name = str(page.relative_to(ROOT))
        for section, language, text in _blocks_of(page.read_text().splitlines()):
            seen[section] += 1
            found.append(Block(name, section, seen[section], language, text))
    return found


def _blocks_of(lines: list[str]) -> Iterator[tuple[str, str, str]]:
    section, at = "", 0
    while at < len(lines):
        line, begin = lines[at], at
        if heading := re.match(r"#+ (.+)", line):
            section = heading[1]
        if fence := re.match(r"( *)```(\w*)$", line):
            at = lines.index(f"{fence[1]}```", at + 1)
            yield section, fence[2], _text(lines[begin + 1 : at])
        elif line.startswith("    ") and not lines[at - 1]:
            while at < len(lines) and (lines[at].startswith("    ") or not lines[at]):
                at += 1
            for part in _text(lines[begin:at]).split("\n\n"):
                is_command = part.split(maxsplit=1)[0] in COMMANDS
                yield section, "bash" if is_command else "text", part.rstrip() + "\n"
            continue
        at += 1


def _text(lines: list[str]) -> str:
    return dedent("\n".join(lines)).strip() + "\n"
