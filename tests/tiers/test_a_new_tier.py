"""What a new tier costs: a copy of the packages gets one, `vault`, by changes to the listed files
alone (`toy`), and a run uses it as it uses peers and an archive."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from keepstep.steps import Tier
from scripts import house
from tests.tiers.toy.edits import EDITS, VAULT

ROOT = Path(__file__).resolve().parents[2]
TOY = Path(__file__).with_name("toy")
SOURCES = ("lib/src", "sidecar/src", "operator/src")
OF_ONE_TIER = {
    "lib/src/keepstep/core/ledger.py": "archived steps of ranks whose pods are gone",
    "sidecar/src/keepstep_sidecar/api/sidecar_service.py": "an ending pod archives its newest step",
    "sidecar/src/keepstep_sidecar/api/status.py": "an archive that does not answer is a warning",
    "sidecar/src/keepstep_sidecar/api/saving.py": "a wait until a step is archived",
    "sidecar/src/keepstep_sidecar/commit/lineage.py": "epochs that peers tell",
    "sidecar/src/keepstep_sidecar/report/report.py": "copies, and archived steps, of other pods",
    "lib/src/keepstep/leader/node_rank_states.py": "whose rank it is",
    "lib/src/keepstep/leader/run_ledger.py": "what is left without a node",
    "lib/src/keepstep/leader/leader.py": "whether the run has an archive",
    "lib/src/keepstep/leader/run_report.py": "what the loss of a node leaves; archived steps",
    "lib/src/keepstep/leader/advisories.py": "how long a shard may wait for each",
}
"""Files that name peers or the archive for something that only these do, and what this is. A new
tier, which does nothing of the kind, leaves them alone."""


def test_a_tier_is_built_from_the_listed_files_alone(tmp_path: Path) -> None:
    copy = with_vault(tmp_path / "copy")
    path = os.pathsep.join(str(copy / source) for source in SOURCES)
    home = tmp_path / "home"
    home.mkdir()
    ended = subprocess.run(
        [sys.executable, TOY / "scenario.py", copy, home],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ended.stdout.splitlines()[-1:] == ["passed"], ended.stdout + ended.stderr


def test_the_files_to_edit_for_a_new_tier_match_the_documentation_and_are_at_most_eight() -> None:
    assert sorted([*EDITS, VAULT]) == sorted(house.TIER)
    assert len(house.TIER) <= 8
    lines = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    (row,) = (line for line in lines if line.startswith("| a tier |"))
    for path in EDITS:
        assert path.removeprefix("lib/src/").rpartition("src/")[2] in row, path


def test_no_other_file_mentions_every_tier() -> None:
    beyond = {tier.name for tier in Tier if not tier.in_pod}
    found = {path for path in _files() if not beyond.isdisjoint(_tiers(ROOT / path))}
    assert found - {*EDITS} == {*OF_ONE_TIER}


def with_vault(copy: Path) -> Path:
    """The packages, with the tier."""
    for folder in (*SOURCES, "crds"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(TOY / "vault.py", copy / VAULT)
    for path, changes in EDITS.items():
        text = (copy / path).read_text()
        for old, new in changes:
            assert text.count(old) == 1, (path, old)
            text = text.replace(old, new)
        (copy / path).write_text(text)
    return copy


def _files() -> Iterator[str]:
    own = ("keepstep_sidecar/tiers/peer/", "keepstep_sidecar/tiers/archive/")
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            if not any(folder in str(path) for folder in own):
                yield str(path.relative_to(ROOT))


def _tiers(path: Path) -> Iterator[str]:
    """The tiers that a module names: as `Tier.PEER`, or by two words or more of one list."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(value=ast.Name(id="Tier")):
                yield node.attr
            case ast.Tuple(elts=listed) | ast.List(elts=listed) | ast.Set(elts=listed):
                yield from _words(listed)
            case ast.Dict(keys=listed):
                yield from _words(listed)


def _words(listed: Sequence[ast.expr | None]) -> list[str]:
    words = [element.value for element in listed if isinstance(element, ast.Constant)]
    tiers = [tier.name for tier in Tier if str(tier) in words]
    return tiers if len(tiers) > 1 else []
