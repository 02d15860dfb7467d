"""Makes tests/compat/files/VERSION.tar.xz: what a keepstep of that version leaves behind.

Run it with the sources of that version on PYTHONPATH, from this directory's root:

    PYTHONPATH=OLD/lib/src:OLD/sidecar/src:OLD:. python tests/compat/make.py VERSION

`alone/`: a run of one rank: `keepstep/` (its directory with a volume, run.json and service.json),
`archive/` and `memory/` (its shared memory). `pair/`: `a/`, the directory of the first of two
machines that keep copies for each other; the second one's is lost. Beside them `values/`, what
their trainings computed.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import psutil
from keepstep_sidecar.cli.places import places_of

from tests.peer.authority import Authority

HERE = Path(__file__).resolve().parent
STEPS = 4


def start(
    home: Path, *options: str, state: str, values: Path, **environment: str
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "keepstep_sidecar.cli", "run", *options, "--"]
    command += [sys.executable, str(HERE / "training.py"), str(STEPS), state, str(values)]
    home.mkdir(exist_ok=True)
    values.mkdir(exist_ok=True)
    return subprocess.Popen(command, cwd=home, env={**os.environ, **environment})


def kill_sidecar(memory: Path) -> None:
    pid = int((memory / "sidecar.pid").read_text())
    psutil.Process(pid).kill()
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)


def copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.log", "*.sock"))


def alone(base: Path, out: Path) -> None:
    archive = out / "archive"
    archive.mkdir(parents=True)
    home = base / "alone"
    options = ("--archive", str(archive), "--archive-every", "2")
    run = start(home, *options, state="committed", values=out / "values")
    assert run.wait(120) == 3
    memory = places_of(home / ".keepstep", "training").memory
    while not list(archive.rglob("*-000000002/step.json")):
        time.sleep(0.05)
    kill_sidecar(memory)
    copy(memory, out / "memory")
    copy(home / ".keepstep", out / "keepstep")
    shutil.rmtree(memory)


def pair(base: Path, out: Path) -> None:
    authority = Authority(base)
    ports = []
    for _ in range(3):
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            ports.append(one.getsockname()[1])
    out.mkdir(parents=True)
    homes, runs = [base / "a", base / "b"], []
    for rank, home in enumerate(homes):
        files = authority.files(rank, run="training")
        options = ["--peer-listen", f"127.0.0.1:{ports[rank]}"]
        options += ["--peer", f"127.0.0.1:{ports[1 - rank]}", "--peer-cert", str(files.certificate)]
        options += ["--peer-key", str(files.key), "--peer-ca", str(files.authorities)]
        world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[2]), "WORLD_SIZE": "2"}
        world |= {"RANK": str(rank), "LOCAL_WORLD_SIZE": "1"}
        runs.append(start(home, *options, state="durable", values=out / "values", **world))
    assert [one.wait(120) for one in runs] == [3, 3]
    kept = homes[0] / ".keepstep" / "training" / "peers"
    while not list(kept.glob(f"*-{STEPS - 1:09d}/rank-00001-of-00002.safetensors")):
        time.sleep(0.05)
    for home in homes:
        memory = places_of(home / ".keepstep", "training").memory
        kill_sidecar(memory)
        shutil.rmtree(memory)
    copy(homes[0] / ".keepstep", out / "a")


def main(version: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        out = Path(name) / "out"
        alone(Path(name), out / "alone")
        pair(Path(name), out / "pair")
        target = HERE / "files" / f"{version}.tar.xz"
        with tarfile.open(target, "w:xz") as tar:
            tar.add(out, ".")
    print(f"{target.name}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1])
