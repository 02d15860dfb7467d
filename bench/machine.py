"""Describes the machine that the figures come from."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path


def describe(directory: Path) -> dict[str, str]:
    """Names and values for the head of the report."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": f"{_processor()}, {len(os.sched_getaffinity(0))} cores visible",
        "memory": f"{memory / (1 << 30):.1f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "volume": _file_system(directory),
        "huge pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "fio": _output("fio", "--version"),
        "xxhash": _version("xxhash"),
        "load before": "{:.2f} {:.2f} {:.2f}".format(*os.getloadavg()),
        "command": " ".join(["python", *sys.orig_argv[1:]]),
    }


def slug() -> str:
    """A short name for files, made of processor, cores and memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    name = f"{_processor()}-{len(os.sched_getaffinity(0))}core-{memory:.0f}gib"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _processor() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(directory: Path) -> str:
    rows = [line.split() for line in _read("/proc/mounts").splitlines()]
    path = str(directory.resolve())
    fits = [row for row in rows if path == row[1] or path.startswith(row[1].rstrip("/") + "/")]
    device, _, kind, options = max(fits, key=lambda row: len(row[1]))[:4]
    free = shutil.disk_usage(directory).free / (1 << 30)
    return f"{kind} on {device} ({options}), {free:.0f} GiB free"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return "not installed"
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
