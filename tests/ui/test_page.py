"""What the page shows of runs, and that nothing in a run can be more than text on it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from typing import Any

import msgspec
import pytest

from keepstep.core.history import Badput, EventKind, Goodput, HistoryEvent, RestartCost
from keepstep.steps import Epoch, EpochId, StepId, Tier
from keepstep.wire.status import RankStatus, Status, StepStatus, TierStatus, VolumeStatus
from keepstep.wire.trainer import from_json
from keepstep_sidecar.ui import server as board
from keepstep_sidecar.ui.pages import STATIC, TEMPLATES
from keepstep_sidecar.ui.run_figures import RunPage
from tests.harness import until
from tests.ui.conftest import Site, site_of

EPOCH = EpochId(2, "0123abcd")


def step(number: int, **values: Any) -> StepStatus:
    return StepStatus(id=StepId(EPOCH, number), world=2, **values)


def status(**values: Any) -> Status:
    known: dict[str, Any] = {
        "run": "a",
        "sidecar": "0.1.0",
        "pid": 77,
        "started_at": 1e9,
        "protocol": 1,
        "locked": "no slots yet",
    }
    return Status(**{**known, **values})


def view(name: str = "a", *, steps: tuple[StepStatus, ...] = (), **values: Any) -> RunPage:
    live = status(run=name, steps=steps, **values)
    return RunPage(name=name, live=live, steps=steps, problems=live.warnings, volumes=("/v/a",))


def event(kind: EventKind, after_s: float, **values: Any) -> HistoryEvent:
    at = 1e9 + after_s
    return HistoryEvent(
        **{"sequence": int(after_s) + 100, "at": at, "until": at, "rank": 0, **values}, kind=kind
    )


BEFORE = EpochId(1, "89abcdef")
HAPPENED = (
    event(EventKind.STAGED, 0, step=StepId(BEFORE, 8)),
    event(EventKind.ENDED, 1, text="gone"),
    event(
        EventKind.RESTORED,
        5,
        epoch=Epoch(EPOCH, StepId(BEFORE, 6)),
        tier=Tier.MEMORY,
        seconds=0.3,
    ),
    event(
        EventKind.RESTARTED,
        6,
        restart=RestartCost(at=1e9, detection_s=0.5, start_s=2, restore_s=0.3, first_step_s=1.2),
    ),
    event(EventKind.STAGED, 10, step=StepId(EPOCH, 10)),
    event(EventKind.STAGED, 11, step=StepId(EPOCH, 12), count=2, seconds=0.02),
    event(EventKind.SKIPPED, 12, number=12, count=3, text="no slot was free"),
)
"""A life, its end, and the next one: a step takes half a second then, of which 10 ms are ours."""


async def test_the_page_shows_the_steps_of_a_run_by_tier_and_the_cost_of_restarts() -> None:
    rank = {"world": 2, "alive": True, "saves": 10, "blocked_s": 0.05, "skipped": 3}
    ranks = (RankStatus(rank=0, pid=5, **rank), RankStatus(rank=1, **rank))
    steps = (
        step(7, ranks={Tier.LOCAL: (0, 1), Tier.ARCHIVE: (0, 1)}, committed=True, bytes=2 << 20),
        step(8, ranks={Tier.MEMORY: (0, 1), Tier.LOCAL: (1,)}, suspect=True),
    )
    drive = VolumeStatus(path="/v/a", engine="direct", used_bytes=3 << 30, free_bytes=5 << 30)
    archive = TierStatus(where="s3://ckpt", backlog=4, behind_s=75, trouble="401")
    live = view(steps=steps, ranks=ranks, volumes=(drive,), tiers={Tier.ARCHIVE: archive})
    read = from_json(Status, msgspec.json.encode(live.live))  # as the command reads it
    live = dataclasses.replace(live, live=read)
    goodput = Goodput(
        since=1e9,
        productive_s=90,
        badput=Badput(wasted_progress=6, checkpoint_restore=4),
        steps=180,
        interruptions=1,
    )
    shown = dataclasses.replace(live, events=HAPPENED, goodput=goodput)
    async with site_of({"a": shown}) as site:
        await site.enter()
        page = _read(await site.text("/runs/a"))
    assert page.text("state") == "Training: 2 of 2 ranks are connected."
    assert page.rows("steps") == [
        ["8", "2", "all 2", "1 of 2", "–", "0 B", "no", "suspect"],
        ["7", "2", "–", "all 2", "all 2", "2.00 MiB", "yes", "–"],
    ]
    costs = ["0.50 s", "2.00 s", "0.30 s", "1.20 s", "4.00 s"]
    assert [row[1:] for row in page.rows("restarts")] == [["0", "step 6, memory", "2", *costs]]
    skipped = ["skipped", "0", "3", "12", "no slot was free"]
    assert [row[1:] for row in page.rows("lost")] == [skipped]
    assert "takes 500 ms, and 490 ms without keepstep" in page.text("time")
    assert "for 10.0 ms of it (2 %)" in page.text("time")
    assert page.rows("time")[0][:4] == ["0", "pid 5", "10", "5.00 ms"]
    assert "90.0 % of 1m40s were steps that count: 180 of them" in page.text("goodput")
    assert ["wasted progress", "6.00 s", "6.0 %"] in page.rows("goodput")
    assert page.rows("drives")[0][:4] == ["/v/a", "direct", "3.00 GiB", "5.00 GiB"]
    assert page.rows("tiers")[0][3:] == ["4", "1m15s", "0 B", "401"]


@pytest.mark.parametrize(
    "number", [1e18, -1e18, float("nan"), float("inf"), pytest.param(10**400, id="large")]
)
async def test_a_run_with_invalid_values_is_shown_as_unreadable_and_others_are_not_affected(
    number: float,
) -> None:
    volume = VolumeStatus(path="/v", engine="direct", used_bytes=0, free_bytes=number)
    event_then = event(EventKind.DISCARDED, 1, number=1, text="-")
    hostile = {
        "committed": view("committed", committed_at=number),
        "started": view("started", started_at=number),
        "free": view("free", volumes=(volume,)),
        "events": dataclasses.replace(
            view("events"), events=(dataclasses.replace(event_then, until=number),)
        ),
        "goodput": dataclasses.replace(
            view("goodput"), goodput=Goodput(since=0, productive_s=number)
        ),
        "typed": dataclasses.replace(view("typed"), committed="no step"),
    }
    async with site_of({"a": view("a"), **hostile}) as site:
        await site.enter()
        index = await site.text("/")
        assert all(f"/runs/{name}" in index for name in ("a", *hostile))
        changes = (await _changes(site, "/changes"))["runs"]
        assert all(f"/runs/{name}" in changes for name in ("a", *hostile))
        assert "no trainer has connected" in await site.text("/runs/a")
        for name in hostile:
            assert f"Run {name}" in await site.text(f"/runs/{name}")
            assert "state" in await _changes(site, f"/runs/{name}/changes")
        assert "cannot be shown" in await site.text("/runs/typed")


async def test_changes_are_sent_to_a_viewer_within_two_seconds() -> None:
    async with site_of({"a": view(steps=(step(1),))}) as site:
        await site.enter()
        before = await _changes(site, "/runs/a/changes")
        assert set(before) >= {"state", "steps", "drives"}
        site.views["a"] = view(steps=(step(2),))
        await asyncio.sleep(board.EVERY_S)  # as long as a read is good enough
        now = await _changes(site, "/runs/a/changes")
        assert {name for name in now if now[name] != before[name]} == {"steps"}


async def test_concurrent_viewers_share_one_read() -> None:
    with ThreadPoolExecutor(1) as readers:
        reads = board.RunBoard(lambda: ["a"], lambda name: RunPage(name=name), readers)
        await asyncio.gather(*(reads.get_fresh_pages() for _ in range(16)))
        assert reads.reads == 1


async def test_a_run_that_hangs_does_not_delay_the_pages_of_other_runs() -> None:
    go_on = threading.Event()

    def read(name: str) -> RunPage:
        assert name != "hangs" or go_on.wait(60)
        return RunPage(name=name)

    with ThreadPoolExecutor(8) as readers:
        reads = board.RunBoard(lambda: ["a", "hangs"], read, readers)
        try:
            a, hangs = await reads.get_fresh_pages(timeout_s=2)
            assert a.state == "stopped"
            assert "not answered" in hangs.error
            go_on.set()
            await until(lambda: reads.view("hangs").state == "stopped")
        finally:
            go_on.set()


def test_the_files_of_the_page_are_small_and_refer_to_no_external_url() -> None:
    files = [path for path in STATIC.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 80_000
    assert (STATIC / "uplot" / "LICENSE").is_file()
    own = [*STATIC.glob("*.js"), *STATIC.glob("*.css"), *TEMPLATES.rglob("*.html")]
    for path in own:
        assert "://" not in path.read_text(), path


class _Page(HTMLParser):
    """Texts and rows of a page by the nearest element with an id."""

    def __init__(self) -> None:
        super().__init__()
        self._open: list[tuple[str, str]] = []
        self._texts: dict[str, list[str]] = {}
        self._rows: dict[str, list[list[str]]] = {}
        self._cell = False

    def text(self, element_id: str) -> str:
        return " ".join("".join(self._texts.get(element_id, ())).split())

    def rows(self, element_id: str) -> list[list[str]]:
        """Of its table's body."""
        return [[" ".join(cell.split()) for cell in row] for row in self._rows.get(element_id, ())]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = {name: value or "" for name, value in attrs}
        if tag not in ("meta", "link", "img", "br"):
            self._open.append((tag, known.get("id", "")))
        if tag == "tr" and any(tag == "tbody" for tag, _ in self._open):
            self._rows.setdefault(self._id(), []).append([])
        if tag in ("td", "th") and self._rows.get(self._id()):
            self._rows[self._id()][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag, f"{tag} closes another element"

    def handle_data(self, data: str) -> None:
        self._texts.setdefault(self._id(), []).append(data)
        if any(tag in ("td", "th") for tag, _ in self._open) and self._rows.get(self._id()):
            self._rows[self._id()][-1][-1] += data

    def _id(self) -> str:
        return next((element_id for _, element_id in reversed(self._open) if element_id), "")


def _read(html: str) -> _Page:
    page = _Page()
    page.feed(html)
    page.close()
    return page


async def _changes(site: Site, route: str) -> dict[str, str]:
    """The sections that a viewer is sent."""
    sections: dict[str, str] = json.loads(await site.text(route))["sections"]
    return sections
