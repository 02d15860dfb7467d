"""Every hostile file of attacks/ is refused with the right error, and costs no memory."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import tracemalloc
from types import ModuleType

import numpy  # noqa: F401  imported here, so that the import is not what allocates
import pytest
import torch  # noqa: F401

from keepstep.image import extras_codec
from tests.harness import control_of, layout_of, verify_image

FOLDER = pathlib.Path(__file__).parents[2] / "attacks"
MEBIBYTE = 1 << 20


def _make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("attacks_make", FOLDER / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


make = _make()
ATTACKS = list(make.attacks())


def read(path: pathlib.Path) -> object:
    """Everything that a reader of a shard does."""
    layout = layout_of(path)
    control_of(path)
    view = memoryview(path.read_bytes())
    control = verify_image(view, layout, path=path, run=make.RUN, step_id=make.ID)
    return extras_codec.decode(view[layout.extras_begin :][: control.extras_bytes])


def test_the_unmodified_image_is_read(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "honest.safetensors"
    path.write_bytes(make.image())
    assert read(path) == {"epoch": 7}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_each_attack_is_refused_for_its_reason_without_a_large_allocation(attack) -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # Python's own; some test tools raise it for the whole process
    tracemalloc.start()
    try:
        with pytest.raises(attack.error, match=attack.message) as caught:
            read(attack.path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        sys.setrecursionlimit(limit)
    assert type(caught.value) is attack.error
    assert peak < MEBIBYTE
    assert len(str(caught.value)) < 600


def test_the_stored_attack_files_and_their_table_match_the_script() -> None:
    assert {attack.path for attack in ATTACKS} == set(FOLDER.glob("*.safetensors"))
    for attack in ATTACKS:
        assert attack.path.read_bytes() == attack.data, attack.name
    assert (FOLDER / "README.md").read_text() == make.readme()
