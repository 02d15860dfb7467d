"""`make bench-gpu`: everything about keepstep that needs a GPU, in under eight minutes.

Needs one CUDA device, torch, and this repository (the library and the sidecar with its five
dependencies); no network. `--device cpu --smoke` runs the same code at a tiny size without a GPU.
Exit codes: 0 measured, 1 an image was torn, 2 something is missing (the message says what).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
for _path in (_ROOT, _ROOT / "lib/src", _ROOT / "sidecar/src"):
    sys.path.insert(0, str(_path))

_NEEDED = ("torch", "keepstep", "keepstep_sidecar", "aiohttp", "msgspec", "xxhash", "click", "rich")
_NEEDED_TOO = ("prometheus_client",)
_MINUTES = 7.0


def main() -> int:
    options = _options()
    if options.register_as is not None:
        # before anything touches CUDA, which must see this process as that user from the start
        from bench import gpu_copies

        gpu_copies.child(
            options.device, options.register_bytes, options.register_as, options.register_file
        )
        return 0
    if missing := _missing(options.device):
        print(f"bench-gpu cannot run: {missing}", file=sys.stderr)
        return 2
    directory = options.dir / f"keepstep-bench-gpu-{os.getpid()}"
    directory.mkdir(parents=True)
    try:
        results = _measure(options, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    text = _markdown(results)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{results['name']}.json").write_text(json.dumps(results, indent=1))
    (options.out / f"{results['name']}.md").write_text(text)
    print(text)
    tearing = results["tearing"]
    return 1 if tearing.get("optimizer_torn") or tearing.get("in_place_torn") else 0


def _missing(device: str) -> str:
    """What is missing, and what to do; empty if nothing is."""
    absent = [one for one in (*_NEEDED, *_NEEDED_TOO) if importlib.util.find_spec(one) is None]
    if absent:
        return (
            f"python packages are missing: {', '.join(absent)}. torch comes from pytorch.org,"
            " keepstep and keepstep_sidecar lie in lib/src and sidecar/src of this repository, the"
            " rest are the sidecar's dependencies: pip install"
            " aiohttp msgspec xxhash click rich prometheus-client"
        )
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} sees no CUDA device (built for CUDA"
            f" {torch.version.cuda}). Run it where nvidia-smi lists a GPU; or try the code without"
            " one: python -m bench.gpu --device cpu --smoke"
        )
    if not os.access("/dev/shm", os.W_OK):
        return "/dev/shm is not writable: slots live there"
    return ""


def _measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    from bench import gpu_copies, gpu_tearing, gpu_training

    began = time.monotonic()
    deadline = began + options.minutes * 60
    _alarm_at(deadline + 15.0)
    smoke, device = options.smoke, options.device
    results: dict[str, Any] = {"machine": _machine(device, directory), "name": _name(options)}
    _say("tearing")
    results["tearing"] = _guarded(
        lambda: gpu_tearing.measure(
            device, directory, steps=12 if smoke else 60, width=256 if smoke else 4096
        )
    )
    _say("bandwidth and registration")
    size = 16 << 20 if smoke else 2 << 30
    results["bandwidth"] = _guarded(lambda: gpu_copies.bandwidth(device, size))
    results["registration"] = _guarded(lambda: gpu_copies.registration(device, size))
    results["training"] = {}
    for shape in gpu_training.TINY if smoke else gpu_training.SHAPES:
        # `figures` is filled during the measurement, so that a failure keeps earlier figures
        figures: dict[str, Any] = {}
        results["training"][shape.name] = figures
        if why := gpu_training.obstacle(shape, device, directory):
            figures["skipped"] = why
            continue
        _say(f"{shape.name}: {shape.parameters / 1e9:.2f} billion parameters")
        failed = _guarded(
            lambda shape=shape, figures=figures: gpu_training.measure(
                shape, device, directory, figures, steps=5 if smoke else 12, deadline=deadline
            )
        )
        figures |= failed or {}
    results["machine"]["took"] = f"{time.monotonic() - began:.0f} s"
    return results


def _guarded(work: Any) -> Any:
    """Run one part. If it fails, report that; the other parts still count."""
    try:
        return work()
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def _alarm_at(deadline: float) -> None:
    """Raise TimeoutError at `deadline`, whatever runs then: parts check it only in between."""

    def ring(*_: object) -> None:
        raise TimeoutError("the time budget is used up")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, deadline - time.monotonic()))


def _say(text: str) -> None:
    print(f"bench-gpu: {text}", file=sys.stderr, flush=True)


def _machine(device: str, directory: Path) -> dict[str, str]:
    import torch

    described = {
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "none: a smoke test on a CPU",
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "driver": _driver() if device == "cuda" else "-",
        "python": platform.python_version(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "/dev/shm": f"{shutil.disk_usage('/dev/shm').total / 2**30:.0f} GiB",
        "disk": f"{directory.parent}, {shutil.disk_usage(directory).free / 2**30:.0f} GiB free",
        "command": " ".join(["python -m bench.gpu", *sys.argv[1:]]),
    }
    return described


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    query = ["nvidia-smi", "--query-gpu=driver_version,pcie.link.gen.max", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _name(options: argparse.Namespace) -> str:
    import torch

    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu-smoke"
    return options.name or re.sub(r"[^a-z0-9]+", "-", f"gpu-{device}".lower()).strip("-")


def _markdown(results: dict[str, Any]) -> str:
    lines = ["# keepstep on a GPU, measured", "", "Made by `make bench-gpu`.", ""]
    lines += _pairs(results["machine"])
    lines += ["", "## Never torn", "", "Tensors changed right after `save()` returned.", ""]
    lines += _pairs(results["tearing"])
    lines += ["", "## Copies, GB/s", "", *_pairs(results["bandwidth"])]
    lines += ["", "## Registering shared memory with CUDA", ""]
    lines += _pairs(results["registration"])
    lines += ["", "## Training, every step saved", ""]
    for name, subjects in results["training"].items():
        lines += [f"### {name}", ""]
        lines += _pairs(subjects) if not _is_nested(subjects) else _subjects(subjects)
        lines.append("")
    return "\n".join(lines)


def _is_nested(value: dict[str, Any]) -> bool:
    return all(isinstance(one, dict) for one in value.values())


def _pairs(values: dict[str, Any]) -> list[str]:
    lines = ["| | |", "| --- | --- |"]
    for key, value in values.items():
        shown = (
            ", ".join(f"{k}: {_show(v)}" for k, v in value.items())
            if isinstance(value, dict)
            else _show(value)
        )
        lines.append(f"| {key} | {shown} |")
    return lines


def _subjects(subjects: dict[str, dict[str, Any]]) -> list[str]:
    columns = sorted({key for figures in subjects.values() for key in figures}, key=_column)
    lines = ["| | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    for name, figures in subjects.items():
        cells = [_show(figures[key]) if key in figures else "-" for key in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


_COLUMNS = ("step_s", "inflation", "blocked_s", "staged_s", "durable_s", "restore_memory_s")


def _column(key: str) -> tuple[int, str]:
    return (_COLUMNS.index(key) if key in _COLUMNS else len(_COLUMNS), key)


def _show(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("\n", " ")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--smoke", action="store_true", help="tiny: does the code run?")
    parser.add_argument("--minutes", type=float, default=_MINUTES, help="time budget")
    parser.add_argument("--dir", type=Path, default=_ROOT / "build", help="on the disk to measure")
    parser.add_argument("--out", type=Path, default=_ROOT / "bench" / "results")
    parser.add_argument("--name", help="of the result files; default: from the GPU")
    parser.add_argument("--register-as", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--register-file", help=argparse.SUPPRESS)
    parser.add_argument("--register-bytes", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
