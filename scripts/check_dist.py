"""Tests what `make dist` built as a user would use it: from the wheels, in a bare environment.

`make test-dist` runs it. It compares the contents of wheels and sdists with the source, and
installs `keepstep[local]` and the operator from the wheels into a new virtual environment. There it
trains two steps, with a SIGKILL after the first. Nothing of the checkout is on the path. It needs a
package index for the dependencies.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
DIST: Final = ROOT / "build" / "dist"
PARTS: Final = {
    "lib": "keepstep",
    "sidecar": "keepstep_sidecar",
    "operator": "keepstep_operator",
}

TRAINING: Final = """\
import os, signal, sys
import torch
import keepstep

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
checkpointer = keepstep.Checkpointer(model=model, optimizer=optimizer)
at = checkpointer.restore()
for step in range(at.step + 1 if at else 0, 2):
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    checkpointer.save(step)
    if at is None:
        checkpointer.wait(step)
        os.kill(os.getpid(), signal.SIGKILL)
checkpointer.close()
print("went on from step", at.step, "in", sys.modules["keepstep"].__file__)
"""


def check_contents(dist: Path) -> dict[str, Path]:
    """The wheels, by part. Exits if a wheel or sdist lacks a file of the source, has code that is
    not in the source, or has no licence."""
    wheels = {}
    for part, package in PARTS.items():
        (wheel,) = dist.glob(f"{package}-*.whl")
        (sdist,) = dist.glob(f"{package}-*.tar.gz")
        expected = _source(ROOT / part / "src")
        with zipfile.ZipFile(wheel) as archive:
            _compare(wheel, expected, set(archive.namelist()), "/licenses/LICENSE")
        with tarfile.open(sdist) as packed:
            inside = {name.partition("/src/")[2] or name for name in packed.getnames()}
            _compare(sdist, expected, inside, "/LICENSE")
        wheels[part] = wheel
    return wheels


def _source(place: Path) -> set[str]:
    files = (path for path in place.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(file.relative_to(place)) for file in files if ".egg-info" not in str(file)}


def _compare(packed: Path, expected: set[str], inside: set[str], licence: str) -> None:
    if missing := sorted(expected - inside):
        sys.exit(f"{packed.name} lacks {', '.join(missing)}")
    code = {name for name in inside if name.endswith(".py") and name.startswith("keepstep")}
    if extra := sorted(code - expected):
        sys.exit(f"{packed.name} has what is not in the source: {', '.join(extra)}")
    if not any(name.endswith(licence) for name in inside):
        sys.exit(f"{packed.name} has no LICENSE")


def install(wheels: dict[str, Path], place: Path) -> Path:
    """Make a bare environment with the three wheels. Returns its bin/."""
    venv.create(place, clear=True, with_pip=True)
    torch = re.search(r"^torch==\S+", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)
    assert torch is not None
    ours = [f"{wheels['lib']}[local]", str(wheels["sidecar"]), str(wheels["operator"])]
    _run(place / "bin" / "python", "-m", "pip", "install", "-q", torch[0], *ours, cwd=place)
    _run(place / "bin" / "python", "-m", "pip", "check", cwd=place)
    return place / "bin"


def train(bin_dir: Path, scratch: Path) -> None:
    """Train two steps; the process is killed after the first one. Exits if the training does not go
    on from step 0 with the installed packages."""
    (scratch / "train.py").write_text(TRAINING)
    for program in ("keepstep", "keepstep-sidecar", "keepstep-operator", "kubectl-keepstep"):
        _run(bin_dir / program, "--help", cwd=scratch)
    _run(bin_dir / "python", "-c", "import keepstep", cwd=scratch)
    command = (bin_dir / "python", "train.py")
    output = _run(bin_dir / "keepstep", "run", "--restarts", "1", "--", *command, cwd=scratch)
    match = re.search(r"went on from step 0 in (\S+)", output)
    if match is None or not match[1].startswith(str(bin_dir.parent)):
        sys.exit(f"the training did not go on from the wheels' own step 0: {output}")
    print(match[0])


def _run(*command: str | Path, cwd: Path) -> str:
    """Run `command`; returns its standard output. If it fails, exits with its output."""
    keep = ("PATH", "HOME", "TMPDIR", "XDG_RUNTIME_DIR")
    ours = {name: value for name, value in os.environ.items() if name in keep or "PIP" in name}
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=ours | {"PATH": f"{Path(command[0]).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    if done.returncode:
        output = f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
        sys.exit(f"{' '.join(map(str, command))}: exit {done.returncode}\n{output}")
    return done.stdout


if __name__ == "__main__":
    bin_dir = install(check_contents(DIST), ROOT / "build" / "dist-venv")
    with tempfile.TemporaryDirectory(prefix="keepstep-dist-") as scratch:
        train(bin_dir, Path(scratch))
    print("the wheels install into a bare environment and keep a training that is killed")
