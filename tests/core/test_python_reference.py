"""docs/python-api.md is what the code has, and every public name has a docstring."""

from __future__ import annotations

import ast

import keepstep
import keepstep.dcp
from scripts.python_reference import PLACE, modules, reference


def test_the_python_reference_is_that_of_the_code() -> None:
    assert PLACE.read_text() == reference(), "run: python scripts/python_reference.py"


def test_it_has_every_public_name_and_each_tells_what_it_is() -> None:
    named = {module.name: module.names for module in modules()}
    assert named["keepstep"].keys() == set(keepstep.__all__)
    assert named["keepstep.dcp"].keys() == set(keepstep.dcp.__all__)
    assert "attach" in named["keepstep.integrations.transformers"]
    for module in modules():
        assert module.doc, module.name
        for name, node in module.names.items():
            assert ast.get_docstring(node), f"{module.name}.{name} has no docstring"


def test_signatures_are_those_that_python_sees() -> None:
    text = reference()
    assert "save(step: int, *, healthy: bool = True) -> bool" in text
    assert "    step: int | None = None,\n    rng: Literal['now', 'later'] = 'now',\n)" in text
    assert "    run: str | None = None,\n    **named: Any,\n)" in text
