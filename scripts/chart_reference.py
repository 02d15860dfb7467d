"""Writes the table of values in the chart's README from values.yaml, and packages the chart.

`make chart` does both, `python scripts/chart_reference.py` only the README. A test compares the
README with values.yaml.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import helm_python
import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "charts" / "keepstep"
PLACE = CHART / "README.md"
IMAGES: Final = ("operator", "sidecar")
BEGIN, END = "<!-- values:begin -->\n", "<!-- values:end -->\n"

USUAL: Final = {
    "affinity", "interval", "nodeSelector", "podAnnotations", "podLabels", "priorityClassName",
    "resources", "tolerations",
}  # fmt: skip
"""Values that need no description, because every reader of a chart knows them."""

_LINE = re.compile(r"(?P<indent> *)(?:# ?(?P<said>.*)|(?P<key>[A-Za-z]+):.*)")


def readme() -> str:
    """The whole README, with the table that values.yaml makes."""
    head, _, rest = PLACE.read_text().partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}{table()}{END}{tail}"


def rights() -> str:
    """What the chart grants, as its README says."""
    return PLACE.read_text().partition("## What it may do\n")[2].partition("\n## ")[0]


def undescribed() -> list[str]:
    """The values that need a description and have none."""
    comments = _comments((CHART / "values.yaml").read_text())
    leaves = (path for path, _ in _leaves(_values(), ()))
    return [".".join(path) for path in leaves if path[-1] not in USUAL and not comments.get(path)]


def table() -> str:
    comments = _comments((CHART / "values.yaml").read_text())
    rows = [
        f"| `{'.'.join(path)}` | `{json.dumps(value)}` | {_cell(comments.get(path, ''))} |"
        for path, value in _leaves(_values(), ())
    ]
    return "\n".join(["| value | default | |", "| --- | --- | --- |", *rows]) + "\n"


def _values() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return loaded


def _leaves(
    values: dict[str, Any], above: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in values.items():
        if isinstance(value, dict) and value and name not in USUAL:
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name), value


def _comments(text: str) -> dict[tuple[str, ...], str]:
    """The description of each value: the comment above it that begins with "# --"."""
    found: dict[tuple[str, ...], str] = {}
    path: list[str] = []
    words: list[str] = []
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None or not line.strip():
            words = []
        elif (comment := match["said"]) is not None:
            words = (
                [comment.removeprefix("-- ")]
                if comment.startswith("-- ")
                else words and [*words, comment]
            )
        else:
            path = [*path[: len(match["indent"]) // 2], match["key"]]
            found[tuple(path)] = " ".join(words)
            words = []
    return found


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def package(*, registry: str = "", digests: Mapping[str, str] = MappingProxyType({})) -> Path:
    """Package the chart into build/. `registry`, `digests` by image: what it pulls. Without
    them it pulls by the names in values.yaml, which anybody may own in a public registry."""
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        chart = Path(scratch) / CHART.name
        shutil.copytree(CHART, chart)
        values = chart / "values.yaml"
        values.write_text(released(values.read_text(), registry=registry, digests=digests))
        return Path(helm_python.package(chart, destination=ROOT / "build"))


def released(values: str, *, registry: str, digests: Mapping[str, str]) -> str:
    """values.yaml with this registry and these digests; comments stay."""
    if registry:
        values = _replaced(values, 'registry: ""', f"registry: {registry}")
    for image, digest in digests.items():
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            raise SystemExit(f"{digest!r} is no digest of the image {image}")
        head, found, tail = values.partition(f"    repository: keepstep/{image}\n")
        if not found:
            raise SystemExit(f"values.yaml has no repository keepstep/{image}")
        tail = _replaced(tail, 'digest: ""', f"digest: {digest}")
        values = f"{head}    repository: {image}\n{tail}"
    return values


def _replaced(text: str, old: str, new: str) -> str:
    """The first `old` replaced. Exits if there is none."""
    if old not in text:
        raise SystemExit(f"values.yaml has no {old}")
    return text.replace(old, new, 1)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", choices=["package"])
    parser.add_argument("--registry", default="")
    for image in IMAGES:
        parser.add_argument(f"--{image}", metavar="DIGEST", default="")
    asked = parser.parse_args()
    PLACE.write_text(readme())
    print(f"{PLACE.relative_to(ROOT)} written")
    if asked.what == "package":
        digests = {image: digest for image in IMAGES if (digest := getattr(asked, image))}
        packed = package(registry=asked.registry, digests=digests)
        print(
            f"{packed.relative_to(ROOT)} written; publish: helm push {packed.name} oci://REGISTRY"
        )


if __name__ == "__main__":
    _main()
