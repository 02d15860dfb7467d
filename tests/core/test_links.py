"""Every relative link in the documents leads to a file, and to a heading of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.harness import ROOT

FENCED = re.compile(r"^\s*```.*?^\s*```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


def pages() -> Iterator[Path]:
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))
    for folder in ("docs", "charts", "attacks", "bench/results", "tests/soak/results"):
        yield from sorted((ROOT / folder).rglob("*.md"))


@cache
def anchors(page: Path) -> frozenset[str]:
    """As GitHub names them."""
    seen, found = Counter[str](), set()
    for heading in HEADING.findall(FENCED.sub("", page.read_text())):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip())
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return frozenset(found)


def broken(page: Path) -> Iterator[str]:
    for link in LINK.findall(FENCED.sub("", page.read_text())):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{page.relative_to(ROOT)}: {link}: there is no such file"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{page.relative_to(ROOT)}: {link}: there is no such heading"


def test_every_link_in_the_documentation_has_an_existing_target() -> None:
    assert not [link for page in pages() for link in broken(page)]
