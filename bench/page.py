"""What `keepstep ui` costs a run's sidecar while it has viewers, and how soon it shows a change.

    python -m bench.page [--rounds 3] [--seconds 20] [--write]

A training keeps a step each 100 ms and waits for its commit. In turns, no viewer, one and three
look at its page, over the stream that a browser reads. The first two seconds of each turn do not
count. The cost is CPU seconds of the sidecar, and of `keepstep ui` itself, per second of wall time,
as medians over the rounds. What the page adds is the difference to a turn without viewers in the
same round. The delay is measured for all commits of these turns: from a commit, as the trainer sees
it, to the first event that names that step or a later one. Bars: at most 1 % of a core, and 2 s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

from bench import machine
from bench.processes import ROOT, cpu_s, environment
from bench.report import table

VIEWERS, COST_BAR, SHOWN_BAR_S = (0, 1, 3), 0.01, 2.0
_BYTES, _STEP_S, _SETTLED_S, _LIMIT_S = 16 << 20, 0.1, 2.0, 60.0
_KEEPSTEP = (sys.executable, "-m", "keepstep_sidecar.cli")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each turn")
    parser.add_argument("--write", action="store_true", help="into bench/results")
    options = parser.parse_args()
    about = machine.describe(Path(tempfile.gettempdir()))
    about["command"] = " ".join(["python -m bench.page", *sys.argv[1:]])
    with tempfile.TemporaryDirectory(prefix="keepstep-bench-") as home:
        page = asyncio.run(_measured(Path(home), options.rounds, options.seconds))
    text = report(page, about)
    print(text)
    if options.write:
        (ROOT / "bench" / "results" / f"{machine.slug()}-page.md").write_text(text)


class Page:
    """Figures by number of viewers: shares of a core, one for each round, and seconds until
    shown."""

    def __init__(self) -> None:
        self.sidecar: dict[int, list[float]] = {number: [] for number in VIEWERS}
        self.ui: dict[int, list[float]] = {number: [] for number in VIEWERS}
        self.shown_s: dict[int, list[float]] = {number: [] for number in VIEWERS}


def report(page: Page, about: dict[str, str]) -> str:
    """The whole text."""
    rows = []
    for number in VIEWERS:
        pairs = zip(page.sidecar[number], page.sidecar[0], strict=True)
        added = statistics.median(here - idle for here, idle in pairs)
        shown = page.shown_s[number]
        row = [str(number), _share(page.sidecar[number]), _share(page.ui[number])]
        if shown:
            row += [f"{added:.2%}", _verdict(added <= COST_BAR)]
            row += [f"{statistics.median(shown):.2f} s", f"{max(shown):.2f} s"]
            row += [_verdict(max(shown) <= SHOWN_BAR_S)]
        rows.append(row + ["–"] * (8 - len(row)))
    head = ["who look", "sidecar, of a core", "`keepstep ui`, of a core", "the page adds"]
    head += [f"bar {COST_BAR:.0%}", "a commit is shown after", "at most", f"bar {SHOWN_BAR_S:g} s"]
    parts = [
        "# The page, measured",
        f"Made by `{about['command']}`; how, says `bench/page.py`.",
        table(["machine", ""], list(about.items())),
        table(head, rows),
    ]
    return "\n\n".join(parts) + "\n"


def _share(rounds: list[float]) -> str:
    return f"{statistics.median(rounds):.2%} [{min(rounds):.2%}, {max(rounds):.2%}]"


def _verdict(met: bool) -> str:
    return "pass" if met else "**FAIL**"


async def _measured(home: Path, rounds: int, seconds: float) -> Page:
    page = Page()
    jar = aiohttp.CookieJar(unsafe=True)  # takes cookies from an address without a name
    with _training(home) as commits, _ui(home) as (ui, url):
        async with aiohttp.ClientSession(cookie_jar=jar) as client, client.get(url) as answer:
            answer.raise_for_status()  # the token in the URL counts once
        sidecar = int(json.loads(_said(home, "status", "--json"))["sidecar"]["pid"])
        for _ in range(rounds):
            for number in VIEWERS:
                async with _looking(url, number, jar) as shown:
                    await asyncio.sleep(_SETTLED_S)
                    begun, before = time.monotonic(), (cpu_s(sidecar), cpu_s(ui))
                    await asyncio.sleep(seconds)
                    after, wall = (cpu_s(sidecar), cpu_s(ui)), time.monotonic() - begun
                    await asyncio.sleep(_SETTLED_S)  # so that the last commits are shown, too
                page.sidecar[number].append((after[0] - before[0]) / wall)
                page.ui[number].append((after[1] - before[1]) / wall)
                within = [one for one in list(commits) if 0 <= one[1] - begun <= wall]
                for events in shown:
                    page.shown_s[number] += [_after_s(commit, events) for commit in within]
                print(number, page.sidecar[number][-1], file=sys.stderr, flush=True)
    return page


Seen = tuple[int, float]
"""A step, and its time by `time.monotonic()`, which all processes of a machine share."""


def _after_s(commit: Seen, events: list[Seen]) -> float:
    """Seconds from the commit to the first event that shows it. Raises RuntimeError if there is
    none."""
    step, at = commit
    for shown, when in events:
        if shown >= step:
            return max(0.0, when - at)
    raise RuntimeError(f"the commit of step {step} was never shown")


@contextlib.asynccontextmanager
async def _looking(url: str, number: int, jar: aiohttp.CookieJar) -> Any:
    """Look at the run's page with `number` viewers. Yields what each has seen as committed; the
    lists grow meanwhile."""
    seen: list[list[Seen]] = [[] for _ in range(number)]
    limits = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(cookie_jar=jar, timeout=limits) as client:
        changes = f"{url.partition('/?')[0]}/runs/bench/changes"
        tasks = [asyncio.create_task(_read(client, changes, one)) for one in seen]
        try:
            yield seen
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for one in ended:
            if not isinstance(one, asyncio.CancelledError):
                raise RuntimeError("the page's stream ended") from one


async def _read(client: aiohttp.ClientSession, changes: str, seen: list[Seen]) -> None:
    async with client.get(changes, max_line_size=1 << 24) as answer:
        answer.raise_for_status()
        rest = b""
        async for part in answer.content.iter_any():
            *events, rest = (rest + part).split(b"\n\n")
            for one in events:
                found = re.search(rb'id=\\"committed\\">step (\d+) ', one)
                if found is not None:
                    seen.append((int(found[1]), time.monotonic()))


@contextlib.contextmanager
def _training(home: Path) -> Iterator[list[Seen]]:
    """Run bench/trainer.py under `keepstep run`. Yields its commits; the list grows meanwhile."""
    words = ["--bytes", _BYTES, "--steps", 10**6, "--step-s", _STEP_S, "--commit"]
    script = ROOT / "bench" / "trainer.py"
    command = [*_KEEPSTEP, "run", "--run", "bench", "--", sys.executable, script, *words]
    commits: list[Seen] = []
    first = threading.Event()

    def follow(out: Any) -> None:
        for line in out:
            if line.startswith("{") and (said := json.loads(line))["event"] == "committed":
                commits.append((said["step"], said["at"]))
                first.set()

    try:
        with _started(command, home) as process:
            threading.Thread(target=follow, args=(process.stdout,), daemon=True).start()
            if not first.wait(_LIMIT_S):
                raise RuntimeError(f"nothing was committed:\n{(home / 'errors').read_text()}")
            yield commits
    finally:
        _said(home, "stop", "--run", "bench")  # frees its memory


@contextlib.contextmanager
def _ui(home: Path) -> Iterator[tuple[int, str]]:
    with _started([*_KEEPSTEP, "ui", "--no-open"], home) as process:
        assert process.stdout is not None
        yield process.pid, process.stdout.readline().rpartition(": ")[2].strip()


@contextlib.contextmanager
def _started(command: list[Any], home: Path) -> Iterator[subprocess.Popen[str]]:
    """Start `command`, and end it with SIGTERM. Its stderr goes to a file in `home`."""
    words = [str(word) for word in command]
    with (home / "errors").open("a") as errors:
        process = subprocess.Popen(
            words, cwd=home, env=environment(), stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_LIMIT_S)
        finally:
            process.kill()


def _said(home: Path, *words: str) -> str:
    command = [*_KEEPSTEP, *words]
    done = subprocess.run(command, cwd=home, env=environment(), capture_output=True, check=True)
    return done.stdout.decode()


if __name__ == "__main__":
    main()
