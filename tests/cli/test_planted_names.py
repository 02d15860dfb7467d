"""What others left in place of the names that keepstep knows leads to no other file.

A link, a pipe, a foreign file, a file with two names, or a directory stands in the place of each
name below DIR, a volume, an archive, or where `archive pull` and `export` write. Each command then
either works or says what is in its way; the file and the directory elsewhere stay as they are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from keepstep_sidecar.tiers.incoming_copy import part_name
from tests import warm
from tests.cli.conftest import MARK, Keepstep

_TRAIN = """
import os, torch, keepstep
model = torch.nn.Linear(4, 4)
checkpointer = keepstep.Checkpointer(model=model, n={"n": 0})
restored = checkpointer.restore()
first = 0 if restored is None else restored.step + 1
for step in range(first, first + 3):
    with torch.no_grad():
        model.weight.add_(1.0)
    checkpointer.save(step)
    checkpointer.wait(step, "durable", timeout=60)
checkpointer.close()
"""

_LIMIT_S = 100


class Elsewhere:
    """A file and a directory of the user's, to which nothing of keepstep's leads."""

    def __init__(self, place: Path) -> None:
        place.mkdir()
        self.file, self.directory = place / "file", place / "directory"
        (self.directory / "below").mkdir(parents=True)
        self._texts = {
            self.file: "a file of the user's\n",
            self.directory / "plain": "plain\n",
            self.directory / "below" / "deep": "deep\n",
            self.directory / "rank-00000-of-00001.safetensors": "a model\n",
        }
        for path, text in self._texts.items():
            path.write_text(text)

    def check(self) -> None:
        found = {path: path.read_text() for path in self.file.parent.rglob("*") if path.is_file()}
        assert found == self._texts


def link_to_file(path: Path, elsewhere: Elsewhere) -> None:
    path.symlink_to(os.path.relpath(elsewhere.file, path.parent))


def link_to_directory(path: Path, elsewhere: Elsewhere) -> None:
    path.symlink_to(elsewhere.directory)


def second_name(path: Path, elsewhere: Elsewhere) -> None:
    os.link(elsewhere.file, path)


def pipe(path: Path, _: Elsewhere) -> None:
    os.mkfifo(path)


def foreign_file(path: Path, _: Elsewhere) -> None:
    path.write_bytes(os.urandom(100))


def directory(path: Path, _: Elsewhere) -> None:
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "file").write_text("foreign\n")


PLANTS = (link_to_file, link_to_directory, second_name, pipe, foreign_file, directory)

NAMES = (
    ".gitignore",
    "train/run.lock",
    "train/sidecar.toml",
    "train/.sidecar.toml.tmp",
    "train/sidecar.log",
    "train/.lock",
    "train/run.json",
    "train/.run.json.tmp",
    "train/history.jsonl",
    "train/.history.jsonl.tmp",
    "train/pending",
    "train/quarantine",
    "train/retired",
    "train/spare",
    "train/peers",
    "train/compile-cache",
    "train/compile-cache/made",
)


def _put(path: Path, plant: Callable[[Path, Elsewhere], None], elsewhere: Elsewhere) -> None:
    if path.is_dir() and not path.is_symlink():
        path.rename(elsewhere.file.parent.with_name(f"moved-{path.name}"))
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    plant(path, elsewhere)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_no_command_follows_a_link_that_replaces_an_expected_file(
    keepstep: Keepstep, tmp_path: Path, plant: Callable[[Path, Elsewhere], None]
) -> None:
    script = keepstep.script("train.py", _TRAIN)
    elsewhere = Elsewhere(tmp_path / "elsewhere")
    keepstep("run", "--keep", "1", "--", warm.python(), script)
    for name in NAMES:
        _put(keepstep.directory / name, plant, elsewhere)
        for words in (
            ("run", "--run", "train", "--keep", "1", "--", "true"),
            ("steps",),
            ("status",),
            ("verify",),
            ("rm", "--yes", "0"),
            ("stop",),
        ):
            ended = keepstep.start(*words, forked=True)
            output = ended.communicate(timeout=_LIMIT_S)
            assert ended.returncode in (0, 1, 2, 125), (name, words, output)
            if ended.returncode not in (0, 1) and words[0] != "rm":
                assert ".keepstep" in output[1], (name, words, output)
        elsewhere.check()
        _remove(keepstep.directory / name)


STEP = "STEP"  # stands for the step's directory
SHARD = "rank-00000-of-00001.safetensors"
READ = (
    ("steps",),
    ("status",),
    ("verify",),
    ("doctor",),
    ("inspect", f".keepstep/train/{STEP}/{SHARD}"),
    ("export", "latest", "--to", "out"),
)
ARCHIVED = (
    ("archive", "ls", "--archive", "far"),
    ("archive", "verify", "--archive", "far", "--run", "train"),
    ("archive", "pull", "2", "pulled", "--archive", "far", "--run", "train"),
)
READ_FROM = {
    f".keepstep/train/{STEP}": READ,
    f".keepstep/train/{STEP}/{SHARD}": READ,
    "far/train": ARCHIVED,
    f"far/train/{STEP}": ARCHIVED,
    f"far/train/{STEP}/{SHARD}": ARCHIVED,
    f"far/train/{STEP}/step.json": ARCHIVED,
    f"pulled/{STEP}": ARCHIVED[2:],
    f"pulled/.{STEP}.pulling": ARCHIVED[2:],
    f"pulled/.{STEP}.pulling/{SHARD}": ARCHIVED[2:],
    f"pulled/.{STEP}.pulling/{part_name(SHARD)}": ARCHIVED[2:],
    "out": READ[-1:],
    "out/model.safetensors": READ[-1:],
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_commands_that_read_or_copy_steps_do_not_follow_planted_links(
    keepstep: Keepstep, tmp_path: Path, plant: Callable[[Path, Elsewhere], None]
) -> None:
    script = keepstep.script("train.py", _TRAIN)
    elsewhere = Elsewhere(tmp_path / "elsewhere")
    (keepstep.home / "far").mkdir()
    archive = ("--archive", "far", "--archive-every", "1")
    keepstep("run", *archive, "--", warm.python(), script)
    keepstep("stop")
    (step,) = (path.name for path in (keepstep.home / "far" / "train").glob("*-000000002"))
    for place in (".keepstep", "far"):
        shutil.copytree(keepstep.home / place, tmp_path / "base" / place, symlinks=True)
    for name, commands in READ_FROM.items():
        for place in (".keepstep", "far", "pulled", "out"):
            _remove(keepstep.home / place)
            if (base := tmp_path / "base" / place).exists():
                shutil.copytree(base, keepstep.home / place, symlinks=True)
        planted = keepstep.home / name.replace(STEP, step)
        _remove(planted)
        planted.parent.mkdir(parents=True, exist_ok=True)
        plant(planted, elsewhere)
        for words in commands:
            done = keepstep(*(word.replace(STEP, step) for word in words), code=None)
            assert done.returncode in (0, 1, 2), (name, words, done)
        elsewhere.check()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        subprocess.run(["rm", "-rf", str(path)], check=True)
    else:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("plant", [link_to_directory, pipe, foreign_file, link_to_file])
def test_a_run_directory_that_is_not_a_directory_is_refused_with_its_path(
    keepstep: Keepstep, tmp_path: Path, plant: Callable[[Path, Elsewhere], None]
) -> None:
    elsewhere = Elsewhere(tmp_path / "elsewhere")
    keepstep.directory.mkdir()
    plant(keepstep.directory / "train", elsewhere)
    script = keepstep.script("train.py", _TRAIN)
    output = keepstep("run", "--", "python", script, code=2).stderr
    assert str(keepstep.directory / "train") in output
    elsewhere.check()


def test_project_modules_that_shadow_the_standard_library_are_not_imported_by_the_sidecar(
    keepstep: Keepstep, tmp_path: Path
) -> None:
    names = ("queue", "select", "inspect", "secrets", "profile", "shlex", "tempfile", "runpy")
    for name in names:
        text = (
            f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})\nraise ImportError({name!r})\n"
        )
        keepstep.script(f"{name}.py", text)
    (keepstep.home / "yaml").mkdir()
    (keepstep.home / "yaml" / "__init__.py").write_text("raise ImportError('yaml')\n")
    script = tmp_path / "apart" / "train.py"
    script.parent.mkdir()
    script.write_text(_TRAIN)
    for words in (("run",), ("run", "--warm")):
        # as the `keepstep` script, which has no working directory on its path
        ended = keepstep.start(
            *words, "--", sys.executable, str(script), via=("-P", "-m", "keepstep_sidecar.cli")
        )
        output = ended.communicate(timeout=_LIMIT_S)
        assert ended.returncode == 0, output
    embedded = _TRAIN.replace("n={", 'dir="kept", n={')
    (script.parent / "embedded.py").write_text(embedded)
    done = subprocess.run(
        [sys.executable, str(script.parent / "embedded.py")],
        cwd=keepstep.home,
        env={**os.environ, MARK: str(keepstep.home)},
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    (script.parent / "beside.py").touch()
    (script.parent / "imports.py").write_text("import beside")
    for socket in ({}, {"KEEPSTEP_SOCKET": str(tmp_path / "none.sock")}):  # and in a pod
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "keepstep.warm",
                "--",
                sys.executable,
                script.parent / "imports.py",
            ],
            cwd=keepstep.home,
            env={**os.environ, **socket},
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()
