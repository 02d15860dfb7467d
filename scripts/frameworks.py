"""Writes the table of docs/frameworks.md from test results: what is bit-equal after a kill.

    python scripts/frameworks.py build/junit-frameworks.xml           # after make test-frameworks
    python scripts/frameworks.py --check build/junit-frameworks.xml   # writes nothing

A test names the row that it proves by `@pytest.mark.proves(row)`. The comparison itself records
what it compared bit by bit, on how many ranks and with which versions
(tests/frameworks/conftest.py). Only tests that passed count. The results are in
docs/frameworks.json; a test compares the page with them.
"""

from __future__ import annotations

import ast
import json
import sys
import xml.etree.ElementTree
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "frameworks.json"
PAGE = ROOT / "docs" / "frameworks.md"
BEGIN, END = "<!-- frameworks:begin -->", "<!-- frameworks:end -->"


@dataclass(frozen=True)
class Row:
    """A framework, the line that a script needs for it, and the packages whose versions are shown.
    `refuses`: its adapter refuses versions outside its range."""

    framework: str
    line: str
    packages: tuple[str, ...]
    refuses: bool = True


_OWN_LOOP = "`Batches(loader)`, and the lines of [any script](add-keepstep.md)"

ROWS = {
    "transformers": Row(
        "Hugging Face `Trainer`, `Seq2SeqTrainer`, and what derives from them without a loop of"
        " its own",
        "`attach(trainer)`, or the mixin",
        ("transformers", "accelerate"),
    ),
    "trl": Row(
        "TRL's `SFTTrainer`, `DPOTrainer`, `KTOTrainer`, `RewardTrainer`, `GRPOTrainer` and"
        " `RLOOTrainer`, with and without PEFT's LoRA",
        "`attach(trainer)`, or the mixin",
        ("trl", "peft", "transformers", "bitsandbytes"),
    ),
    "accelerate": Row("a loop of your own on `accelerate`", _OWN_LOOP, ("accelerate",)),
    "lightning": Row(
        "Lightning's `Trainer` (`lightning`, `pytorch_lightning`)",
        "`Trainer(callbacks=[KeepstepCallback()])`",
        ("lightning", "torchdata"),
    ),
    "fabric": Row(
        "a loop of your own on Lightning's Fabric",
        _OWN_LOOP,
        ("lightning", "torchdata"),
        refuses=False,
    ),
    "ignite": Row(
        "an `Engine` of PyTorch-Ignite",
        "`Batches(loader)` as its data, and the lines of [any script](add-keepstep.md)",
        ("pytorch-ignite",),
    ),
    "torchtitan": Row(
        "torchtitan's `Trainer`",
        "`checkpoint=KeepstepCheckpointManager.Config(enable=True)`",
        ("torchtitan",),
    ),
    "deepspeed": Row(
        "DeepSpeed's engine (ZeRO 1, 2, 3, or none), in a loop of your own",
        "`Checkpointer(components(engine))`",
        ("deepspeed",),
    ),
}

WORDS = {
    "losses": "losses of all micro-batches (and so the order of the data)",
    "weights": "weights",
    "optimizer": "optimizers",
    "masters": "weights in full precision",
    "scale": "loss scale",
    "schedule": "learning rates",
    "random": "random states of torch, Python and numpy",
    "log": "log",
    "progress": "counts of steps",
    "train_loss": "`train_loss`",
    "flos": "`total_flos`",
    "best": "best metric",
    "callbacks": "callbacks with a state",
    "metrics": "metrics",
    "datamodule": "datamodule with a state",
    "reference": "a reference model that is trained along",
    "tokens": "count of tokens",
}
"""What tests compare, in the order of the table."""

Results = dict[str, dict[str, Any]]
"""By row: `versions`; `tests`, the number of tests that passed; `ranks`, how many of them ran on
which ranks; `compared`, how many of them compared each thing."""


def collect(paths: Iterable[Path]) -> Results:
    """What pytest's JUnit files prove. If a test is in several files, the last one counts."""
    cases = {
        (case.get("classname"), case.get("name")): case
        for path in paths
        for case in xml.etree.ElementTree.parse(path).getroot().iter("testcase")
    }
    found: Results = {}
    for case in cases.values():
        told = {one.get("name"): one.get("value") or "" for one in case.iter("property")}
        if "proves" not in told or any(one.tag in ("failure", "error", "skipped") for one in case):
            continue
        row = found.setdefault(
            told["proves"], {"versions": {}, "tests": 0, "ranks": Counter(), "compared": Counter()}
        )
        row["versions"] |= json.loads(told["versions"])
        row["tests"] += 1
        row["ranks"].update([told["ranks"]])
        row["compared"].update(json.loads(told["compared"]))
    return found


def render(results: Results) -> str:
    """The table, with a row for each framework for which something was proved."""
    lines = [
        "| framework | line | bit-equal after a kill | tested with | taken |",
        "| --- | --- | --- | --- | --- |",
    ]
    taken = {package: f"{package} >= {least}, < {below}" for package, least, below in ranges()}
    for key, row in ROWS.items():
        if (proved := results.get(key)) is None:
            continue
        same = ", ".join(words for name, words in WORDS.items() if name in proved["compared"])
        versions = ", ".join(f"{name} {one}" for name, one in sorted(proved["versions"].items()))
        ranks = ", ".join(sorted(proved["ranks"]))
        bounds = [taken[one] for one in row.packages if one in taken and row.refuses]
        ours = "; ".join(bounds) or "not looked at"
        lines.append(
            f"| {row.framework} | {row.line} | {same} | {versions}; CPU; {ranks};"
            f" {proved['tests']} tests | {ours} |"
        )
    return "\n".join(lines)


def ranges() -> list[tuple[str, str, str]]:
    """(package, lowest version, first refused version) of each `require` call in the adapters."""
    found = []
    for file in sorted((ROOT / "lib/src/keepstep/integrations").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "require"):
                continue
            bounds = {one.arg: ast.literal_eval(one.value) for one in node.keywords}
            name = node.args[0]
            package = name.value if isinstance(name, ast.Constant) else file.stem
            found.append((str(package), bounds["at_least"], bounds["below"]))
    return found


def place(page: str, table: str) -> str:
    """The page with `table` between its marks."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def differences(proved: Results, kept: Results) -> list[str]:
    """The differences between the results that were proved now and those in the file."""
    return [
        f"{row}: {key}: now {now}, in {RESULTS.name} {before}"
        for row in sorted(proved.keys() | kept.keys())
        for key in ("versions", "tests", "ranks", "compared")
        if (now := proved.get(row, {}).get(key)) != (before := kept.get(row, {}).get(key))
    ]


def main(words: list[str]) -> None:
    """Read results. Write docs/frameworks.json and the page, or with `--check` only compare the
    results with docs/frameworks.json."""
    paths = [one for one in words if one != "--check"]
    if not paths:
        raise SystemExit(__doc__)
    proved = collect(map(Path, paths))
    if "--check" in words:
        if different := differences(proved, json.loads(RESULTS.read_text())):
            raise SystemExit(
                "what the tests proved is not what docs/frameworks.md tells:\n  "
                + "\n  ".join(different)
                + f"\nIf that is meant: python scripts/frameworks.py {' '.join(paths)}, and commit"
                " both"
            )
        return
    RESULTS.write_text(json.dumps(proved, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(place(PAGE.read_text(), render(proved)))


if __name__ == "__main__":
    main(sys.argv[1:])
