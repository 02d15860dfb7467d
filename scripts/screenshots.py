"""The pictures of docs/images, from a run that is trained and killed for them: `make screenshots`.

    page-light.png, page-dark.png    the page of `keepstep ui`, in a browser without a window
    status.svg                       what `keepstep status` prints

The browser (Debian's chromium and chromium-driver) is needed here alone: the site shows what is
committed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from PIL import Image
from rich.console import Console
from rich.text import Text
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

ROOT: Final = Path(__file__).resolve().parents[1]
IMAGES: Final = ROOT / "docs" / "images"
KEEPSTEP: Final = (sys.executable, "-m", "keepstep_sidecar.cli")
SIZE: Final = (960, 1360)
COLUMNS: Final = 110
LIMIT_BYTES: Final = 150 << 10
"""Of all pictures together."""

# the fonts of rich's own template come from another host
SVG: Final = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>.{unique_id}-matrix {{ font: {char_height}px/{line_height}px monospace; }}
{styles}</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>{lines}</defs>
{chrome}<g transform="translate({terminal_x}, {terminal_y})"
clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="gpt-") as name:
        home = Path(name)
        with training(home) as trainer:
            wait(lambda: newest(home) >= 60)
            os.kill(worker_of(trainer.pid), signal.SIGKILL)
            before = newest(home)
            wait(lambda: newest(home) > before + 60)
            (IMAGES / "status.svg").write_text(terminal("keepstep status", printed(home, "status")))
            for scheme in ("light", "dark"):
                (IMAGES / f"page-{scheme}.png").write_bytes(page(home, scheme))
    total = sum(path.stat().st_size for path in IMAGES.iterdir())
    print(f"{total:,} bytes in {IMAGES}")
    assert total <= LIMIT_BYTES


@contextlib.contextmanager
def training(home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The example GPT under `keepstep run`, with an archive."""
    (home / "archive").mkdir()
    keep = ("run", "--run", "gpt", "--restarts", "3", "--archive", "archive")
    often = ("--archive-every", "20", "--linger", "1s")
    script = (str(ROOT / "examples/train_gpt.py"), "--steps", "100000", "--step-seconds", "0.1")
    model = ("--layers", "2", "--width", "64", "--context", "32", "--log-file", "log")
    command = [*KEEPSTEP, *keep, *often, "--", sys.executable, *script, *model]
    process = subprocess.Popen(command, cwd=home, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def printed(home: Path, *words: str) -> str:
    return subprocess.run([*KEEPSTEP, *words], cwd=home, capture_output=True, text=True).stdout


def newest(home: Path) -> int:
    """The newest committed step."""
    steps = json.loads(printed(home, "steps", "--json") or '{"steps": []}')["steps"]
    return max((step["step"] for step in steps if step["committed"]), default=-1)


def worker_of(pid: int) -> int:
    """The training process below `keepstep run`."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True).stdout
    rows = [line.split(maxsplit=2) for line in listed.splitlines()]
    children = [row for row in rows if row[1] == str(pid)]
    (found,) = [pid for pid, _, words in children if "keepstep_sidecar" not in words]
    return int(found)


def wait(condition: Callable[[], bool], within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the run does not get on")
        time.sleep(0.5)


def terminal(command: str, text: str) -> str:
    """A picture of a terminal, in which this was typed and said."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text(f"$ {command}\n{text.rstrip()}"))
    return console.export_svg(title="", code_format=SVG, unique_id="keepstep")


def page(home: Path, scheme: str) -> bytes:
    """The run's page in a browser that prefers this scheme, as PNG."""
    command = [*KEEPSTEP, "ui", "--no-open"]
    with subprocess.Popen(command, cwd=home, stdout=subprocess.PIPE, text=True) as ui:
        assert ui.stdout is not None
        url = ui.stdout.readline().split()[-1]
        options = webdriver.ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        for word in (
            "--headless=new",
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
        ):
            options.add_argument(word)
        driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
        try:
            driver.execute_cdp_cmd(
                "Emulation.setEmulatedMedia",
                {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
            )
            driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": SIZE[0], "height": SIZE[1], "deviceScaleFactor": 1, "mobile": False},
            )
            driver.get(url)
            shown = WebDriverWait(driver, 30)
            shown.until(lambda driver: driver.find_element(By.LINK_TEXT, "gpt")).click()
            shown.until(lambda driver: driver.find_element(By.CSS_SELECTOR, "#chart-steps canvas"))
            png = Image.open(io.BytesIO(driver.get_screenshot_as_png()))
        finally:
            driver.quit()
            ui.send_signal(signal.SIGINT)
    packed = io.BytesIO()
    png.convert("RGB").quantize(method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        packed, "PNG", optimize=True
    )
    return packed.getvalue()


if __name__ == "__main__":
    main()
