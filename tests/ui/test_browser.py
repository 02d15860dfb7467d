"""The page in a real browser, beside a run that is killed while one looks."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.common.by import By

from keepstep.core.history import EventKind, HistoryEvent
from tests import warm
from tests.cli.conftest import Keepstep
from tests.harness import eventually

Started = Callable[[], tuple[subprocess.Popen[str], str]]

TRAIN = """
import pathlib, time
import torch
import keepstep

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpointer = keepstep.Checkpointer({"model": model, "optimizer": optimizer})
at = checkpointer.restore()
step = at.step + 1 if at else 0
while not pathlib.Path("end").exists():
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
    checkpointer.save(step)
    step += 1
checkpointer.close()
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        pytest.fail("no browser: apt-get install -y chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0] or ""
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(word)
    options.add_argument("--window-size=1100,1400")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(programs[1]))
    driver.set_script_timeout(20)
    yield driver
    driver.quit()


_GONE = (StaleElementReferenceException, NoSuchElementException)
"""While a page, or a section that changes, goes and another comes."""


class Seen:
    """What a person sees on the page."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def text(self, element_id: str) -> str:
        try:
            return str(self.driver.find_element(By.ID, element_id).text)
        except _GONE:
            return ""

    def follows(self, link: str) -> None:
        eventually(lambda: self._clicked(link), what=f"the link {link}")

    def _clicked(self, link: str) -> bool:
        try:
            self.driver.find_element(By.LINK_TEXT, link).click()
        except _GONE:
            return False
        return True

    def shows(self, element_id: str, text: str) -> None:
        eventually(
            lambda: text in self.text(element_id),
            what=lambda: f"{text!r}: {self.text(element_id)!r}",
        )

    def js(self, text: str) -> Any:
        return self.driver.execute_script(text)

    def draws(self, chart: str) -> None:
        eventually(lambda: self.js(_DRAWN % chart), what=f"the chart of {chart}")

    def complaints(self) -> list[str]:
        """Of the browser's console: errors, and what the page's policy forbids."""
        found = self.driver.get_log("browser")
        return [entry["message"] for entry in found if entry["level"] == "SEVERE"]

    def opens(self, url: str) -> None:
        self.driver.get(url)
        self.shows("main", "Runs")
        assert "token" not in self.driver.current_url


def test_the_page_stays_current_while_a_run_is_killed_and_restarted(
    browser: webdriver.Chrome, keepstep: Keepstep, opened: Started
) -> None:
    page = Seen(browser)
    ui, url = opened()
    page.opens(url)
    page.shows("runs", "keepstep run --dir")  # what to do

    script = keepstep.script("train.py", TRAIN)
    words = ("run", "--", warm.python(), script)
    training = keepstep.start(*words)
    page.shows("runs", "training")  # by itself
    page.follows("train")
    page.shows("state", "Training: 1 of 1 ranks are connected.")
    page.shows("committed", "of epoch 1")
    before = page.text("committed")
    eventually(lambda: page.text("committed") != before)
    page.shows("time", "without keepstep")
    for chart in ("steps", "time"):
        page.draws(chart)
    browser.find_element(By.ID, "steps").send_keys("")  # focus

    (pid,) = eventually(lambda: re.findall(r"pid (\d+)", page.text("time")))
    os.kill(int(pid), signal.SIGKILL)
    page.shows("state", "A sidecar runs; no trainer is connected.")
    training.communicate(timeout=60)

    training = keepstep.start(*words)
    page.shows("state", "Training: 1 of 1 ranks are connected.")
    page.shows("restarts", "memory")
    page.shows("committed", "of epoch 2")
    assert page.js("return document.activeElement.id") == "steps"  # through all of it

    (keepstep.home / "end").touch()
    training.communicate(timeout=60)
    page.shows("state", "No sidecar runs")
    page.shows("goodput", "were steps that count")
    page.shows("restarts", "memory")  # from the history on the volume
    assert page.js(_DRAWN % "steps")
    assert page.js(_ORIGINS) == [url.partition("/?")[0]]
    assert page.complaints() == []

    ui.send_signal(signal.SIGINT)
    page.shows("connection", "keepstep ui does not answer")


def test_hostile_text_stays_text_in_a_browser(
    browser: webdriver.Chrome, keepstep: Keepstep, opened: Started
) -> None:
    hostile = '<img src=x onerror="hacked=1"><script>hacked=2</script>'
    script = "import os, keepstep; os.environ['KEEPSTEP_SOCKET']"
    keepstep("run", "--run", "a", "--", warm.python(), "-c", script)
    event = HistoryEvent(
        sequence=10**6, kind=EventKind.SKIPPED, at=1e9, until=1e9, rank=0, text=hostile
    )
    line = {"sequence": event.sequence, "kind": "skipped", "at": 1e9, "until": 1e9, "text": hostile}
    with (keepstep.directory / "a" / "history.jsonl").open("a") as file:
        file.write(f"\n{json.dumps(line)}\n")
    home = keepstep.directory / hostile.replace("/", "")
    home.mkdir()
    (home / "sidecar.toml").touch()

    page = Seen(browser)
    page.opens(opened()[1])
    page.shows("runs", home.name)
    page.follows(home.name)
    page.shows("problems", home.name)
    page.follows("keepstep")
    page.shows("runs", "stopped")
    page.follows("a")
    page.shows("lost", hostile)
    assert page.js("return typeof hacked") == "undefined"
    assert page.js("return document.querySelectorAll('img, main script').length") == 0
    # nor does the page run what somebody would get into it
    page.js(f"document.getElementById('lost').innerHTML = {json.dumps(hostile)}")
    eventually(
        lambda: any("Content Security Policy" in complaint for complaint in page.complaints())
    )
    assert page.js("return typeof hacked") == "undefined"


_DRAWN = """
const canvas = document.querySelector("#chart-%s canvas");
if (!canvas) return false;
const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
return data.some((value) => value > 0);
"""

_ORIGINS = """
const loaded = performance.getEntriesByType("resource").map((one) => new URL(one.name).origin);
return [...new Set(loaded)];
"""
