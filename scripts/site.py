"""The site: what mkdocs.yml alone cannot do. `make docs` builds it.

    python scripts/site.py build/tables     # the tables that come from code, before mkdocs runs

A page of docs/ names a table as `<!-- table: NAME -->`. The rest of this module are hooks of
MkDocs, which run in an environment of its own that has none of the packages of keepstep.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
DOCS: Final = ROOT / "docs"
TABLES: Final = ROOT / "build" / "tables"

TABLE = re.compile(r"<!-- table: (\w+) -->")
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
ITEM = re.compile(r"( *)(?:[-*]|\d+\.) ")
LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*?\bsrc=[\"']?(?:https?:)?//[^>]*>"
    r"|<link\b(?![^>]*rel=[\"']?(?:canonical|alternate|prev|next))[^>]*href=[\"']?(?:https?:)?//[^>]*>"
    r"|(?:url\(|@import )[\"']?(?:https?:)?//[^)\"']*"
)
"""What a browser asks another host for when it shows a page."""

log = logging.getLogger("mkdocs.plugins.keepstep")
"""A warning here ends a strict build."""


def tables() -> dict[str, str]:
    """The tables by name, made from the code."""
    from keepstep.core import node
    from keepstep.save import save_thread
    from keepstep_sidecar.volume import volume
    from scripts import (
        api_reference,
        chart_reference,
        conformance,
        log_reference,
        metrics_reference,
    )

    return {
        "resources": api_reference.reference(),
        "values": chart_reference.table(),
        "conformance": conformance.render(),
        "metrics": metrics_reference.reference(),
        "log_events": log_reference.reference(),
        "rights": chart_reference.rights(),
        "step_states": states(node, node.STEP),
        "image_states": states(save_thread, save_thread.IMAGE),
        "shard_states": states(volume, volume.SHARD),
    }


def states(module: ModuleType, table: Any) -> str:
    """A theory of operation: the usual way through the states, what is said, all transitions."""
    way, following = list[str](), table[0].states
    while following:
        way.append(following)
        after = (row.after for row in table if following in row.states.split(", "))
        following = next((state for state in after if not {*way} & {*state.split(", ")}), "")
    text = (module.__doc__ or "").partition("\n\n")[2]
    rows = (f"| {row.states} | {row.event} | {row.after} | `{row.where}` |" for row in table)
    head = "| state | event | next | in the code |\n| --- | --- | --- | --- |"
    return "\n".join([f"**{' → '.join(way)}**\n", text, head, *rows, ""])


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """A page as MkDocs takes it: with its tables, and links that lead somewhere on the site."""
    source = DOCS / page.file.src_uri
    if page.file.src_uri == "index.md":
        source = ROOT / "README.md"
        markdown = source.read_text()
    markdown = TABLE.sub(lambda match: (TABLES / f"{match[1]}.md").read_text(), markdown)
    lines = []
    for line, is_code in _lines(markdown):
        lines += [line] if is_code else _prose(line, lines, source=source, page=page)
    return "\n".join(lines)


def on_page_content(html: str, *, page: Any, **_: Any) -> None:
    """Refuse a row of a table that stands apart from it."""
    if "<p>|" in html:
        log.warning("%s has a row of a table outside of it", page.file.src_uri)


def on_post_build(config: Any, **_: Any) -> None:
    """Refuse a site that asks another host for anything."""
    site = Path(config["site_dir"])
    for path in [
        path for kind in ("html", "css", "svg") for path in sorted(site.rglob(f"*.{kind}"))
    ]:
        for found in LOADED.findall(path.read_text()):
            log.warning("%s asks another host: %s", path.relative_to(site), found)


def _lines(markdown: str) -> Iterator[tuple[str, bool]]:
    """Each line, and whether it is code."""
    fenced = False
    for line in markdown.splitlines():
        fence = line.lstrip().startswith("```")
        yield line, fenced or fence
        fenced ^= fence


def _prose(line: str, before: list[str], *, source: Path, page: Any) -> Iterator[str]:
    """A line of text. GitHub nests lists by two blanks and lets them follow a text at once,
    Python-Markdown does neither."""
    if item := ITEM.match(line):
        last = before[-1] if before else ""
        if not item[1] and last and not last.startswith((" ", "#")) and not ITEM.match(last):
            yield ""
        line = "    " * ((len(item[1]) + 1) // 2 if len(item[1]) < 6 else 2) + line.lstrip()
    yield LINK.sub(lambda match: _linked(match[1], match[2], source=source, page=page), line)


def _linked(text: str, to: str, *, source: Path, page: Any) -> str:
    """A link. One that leads out of docs/ goes to the source, where SOURCE_URL says where that
    is, and is text otherwise."""
    path, mark, anchor = to.partition("#")
    if "://" in to or not path:
        return f"[{text}]({to})"
    target = (source.parent / path).resolve()
    if not target.exists():
        log.warning("%s: %s does not exist", source.relative_to(ROOT), to)
    if target.is_relative_to(DOCS) and target.suffix in {".md", ".json", ".png"}:
        here = (DOCS / page.file.src_uri).parent
        return f"[{text}]({os.path.relpath(target, here)}{mark}{anchor})"
    url = os.environ.get("SOURCE_URL", "").rstrip("/")
    return f"[{text}]({url}/{target.relative_to(ROOT)}{mark}{anchor})" if url else text


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    for name, text in tables().items():
        (Path(sys.argv[1]) / f"{name}.md").write_text(text)
