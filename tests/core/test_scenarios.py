"""Every scenario prints what its file says. KEEPSTEP_REWRITE=1 rewrites the files: then read the
difference."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_FILES = sorted((_HERE / "scenarios").glob("*.txt"))


def _play(text: str) -> str:
    spec = importlib.util.spec_from_file_location("keepstep_scenario", _HERE / "scenario.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.play(text))


@pytest.mark.parametrize("file", _FILES, ids=lambda file: file.stem)
def test_the_output_of_a_scenario_matches_its_file(file: Path) -> None:
    text = file.read_text()
    played = _play(text)
    if os.environ.get("KEEPSTEP_REWRITE"):
        file.write_text(played)
        return
    assert played == text
