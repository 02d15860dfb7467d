"""accelerate's own tests of resuming, without keepstep and with keepstep in place of save and load.

Its source distribution has them. Trainer's, Lightning's and DCP's are in no package. Ignite's tests
load states that they write out themselves, so there is nothing to keep.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests import warm
from tests.harness import ROOT

TESTS = Path(sys.prefix) / "own-tests" / "accelerate" / "tests"
MODULES = ("accelerate", "torch._dynamo")  # few: each worker of a loader is a fork of them

_HOOKS = "assert 'random' == 'Linear'"
"""A script's hook of `load_state` would have set the name; keepstep calls none, so what a hook
loads has to be a component."""

DIFFERS = {
    "test_save_load_model_with_hooks_use_safetensors": _HOOKS,
    "test_save_load_model_with_hooks_use_pytorch": _HOOKS,
}
"""By test: how it fails where keepstep is in place."""


def failures(home: Path, file: str, selected: str, *options: str) -> dict[str, str]:
    """By test of accelerate that ran: how it failed, '' if it passed."""
    report = home / "report.xml"
    words = ["-c", os.devnull, "-p", "no:cacheprovider", f"--junitxml={report}", "-k", selected]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [warm.python(MODULES), "-m", "pytest", *words, *options, str(TESTS / file)],
        cwd=home,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    print(done.stdout)
    assert done.returncode in (0, 1)
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.attrib['classname']}.{case.attrib['name']}"
        found[name] = "".join(part.attrib["message"] for part in case)
    return found


@pytest.mark.parametrize(
    ("file", "selected", "count"),
    [
        ("test_state_checkpointing.py", "can_resume or scheduler or automatic_loading", 10),
        ("test_accelerator.py", "save_load_model or save_model_with_stateful", 21),
    ],
)
def test_accelerates_own_tests_of_resuming(tmp_path, file, selected, count):
    without = failures(tmp_path, file, selected)
    assert without == dict.fromkeys(without, "")
    assert len(without) == count
    in_place = failures(tmp_path, file, selected, "-p", "tests.frameworks.accelerate_in_place")
    assert in_place.keys() == without.keys()
    for name, message in in_place.items():
        expected = DIFFERS.get(name.rpartition(".")[2])
        assert (expected in message) if expected else not message, name
