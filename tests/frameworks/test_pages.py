"""The blocks of docs/frameworks.md, as the page has them, with the frameworks themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import warm
from tests.harness import SidecarProcess
from tests.pages.blocks import blocks
from tests.pages.programs import IN_FRAMEWORKS, check

BLOCKS = {block.name: block for block in blocks()}
MODULES = ("transformers.trainer", "accelerate", "peft", "lightning.pytorch", *warm.TRAINER)


@pytest.mark.parametrize("name", IN_FRAMEWORKS)
def test_each_code_block_of_the_page_runs_and_resumes_after_a_restart(
    sidecar: SidecarProcess, tmp_path: Path, name: str
) -> None:
    check(IN_FRAMEWORKS[name], BLOCKS[name], tmp_path, warm.python(MODULES))
