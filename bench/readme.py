"""Copies tables of results into README and docs/measured.md.

Call `python -m bench.readme BARS.md PEERS.md GPU.json` after runs that should be shown. The first
two may be the same file. No figure in these tables is typed by hand.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from bench.processes import ROOT

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
PEERS = {
    "keepstep": "**keepstep**",
    "keepstep, 2 MiB pages": "**keepstep**, huge pages",
    "torch.save + fsync": "`torch.save`, fsync",
    "dcp.async_save reused stager": "`dcp.async_save`, stager kept",
    "torch_checkpointing": "torch_checkpointing",
    "DeepSpeed FastPersist": "DeepSpeed FastPersist",
}
"""The rows of README, as results name them: what people use, and all that is faster in a column."""
GPU_PEERS = {
    "keepstep": "**keepstep**",
    "LM-Resiliency GEMINI": "LM-Resiliency, in memory",
    **{name: PEERS[name] for name in ("dcp.async_save reused stager", "torch_checkpointing")},
}
SHAPE = "0.4B, batch 32"


def bars_of(report: Path) -> str:
    """The part for docs/measured.md: the machine, and a table of floors and bars for each size of
    pages."""
    text = report.read_text()
    rows = dict(re.findall(r"^\| (.*?) \| (.*?) \|$", text, re.M))
    machine = f"{rows['processor']}, {rows['memory']}, {rows['volume']}"
    where = f"../{report.resolve().relative_to(ROOT)}"
    made = f"medians over {rows['rounds']} rounds of `{rows['command']}` ([all of it]({where}))"
    intro = f"{machine}. Against the floors and the bars, {made}:"
    return "\n\n".join([intro, *(f"{head}:\n\n{table}" for head, table in _tables(text, "Bars"))])


def peers_of(report: Path, gpu: Path) -> str:
    """The part for README: one table of other tools, on a CPU and on a GPU."""
    ((heading, table),) = _tables(report.read_text(), "Beside its peers")
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    by_name = {name: [figure.partition(" [")[0] for figure in rest] for name, *rest in cells}
    size = heading.partition(", ")[2].removesuffix(" state")
    rows = [(_link(f"{size}, 2 CPU cores", report), *_figures(by_name, PEERS))]
    found = json.loads(gpu.read_text())
    training: dict[str, dict[str, Any]] = found["training"][SHAPE]
    on_gpu = {name: _of_gpu(name, training[name]) for name in GPU_PEERS}
    gigabytes = training["plain"]["state_bytes"] / 1e9
    name = found["machine"]["gpu"].removeprefix("NVIDIA ")
    rows.append(
        (_link(f"{gigabytes:.1f} GB, {name}", gpu.with_suffix(".md")), *_figures(on_gpu, GPU_PEERS))
    )
    lines = [
        "| every step is saved | | training waits for a save | durable after | step time |",
        "| --- | --- | --- | --- | --- |",
    ]
    for where, *figures in rows:
        for at, figure in enumerate(figures):
            lines.append(f"| {'' if at else where} | {' | '.join(figure)} |")
    return "\n".join(lines)


def _of_gpu(name: str, figures: dict[str, Any]) -> list[str]:
    if name.startswith("LM-Resiliency"):  # its second step is another node's memory
        return [_time(figures["blocked_s"]), "in memory only", f"{figures['inflation']:.3g} x"]
    return [
        _time(figures["blocked_s"]),
        _time(figures["durable_s"]),
        f"{figures['inflation']:.3g} x",
    ]


def _figures(by_name: dict[str, list[str]], names: dict[str, str]) -> list[list[str]]:
    return [[shown, *by_name[name][:3]] for name, shown in names.items()]


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 0.1 else f"{seconds:.3g} s"


def _link(text: str, report: Path) -> str:
    return f"[{text}]({report.resolve().relative_to(ROOT)})"


def _tables(report: str, title: str) -> list[tuple[str, str]]:
    """Heading and first table of each section whose heading begins with `title`."""
    found = re.findall(rf"^## ({title}.*?)\n.*?^(\|.*?)\n\n", report, re.S | re.M)
    assert found, f"no table {title!r}"
    return found


def main() -> None:
    bars, peers, gpu = map(Path, sys.argv[1:])
    pages = {"README.md": peers_of(peers, gpu), "docs/measured.md": bars_of(bars)}
    for page, text in pages.items():
        path = ROOT / page
        head, rest = path.read_text().split(BEGIN)
        path.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
