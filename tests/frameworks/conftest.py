"""One training undisturbed, and the same under `keepstep run`, killed on its way.

These tests run in an environment of their own: `make test-frameworks`.
"""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.cli.conftest import Keepstep
from tests.harness import ROOT

_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
# What scripts, or frameworks in the middle of a training, import. The processes from which
# trainings are forked, each named by its first module, have it in advance. It takes seconds:
# accelerate imports deepspeed to unwrap a model, and deepspeed torch's compiler with the first
# optimizer.
DEEPSPEED = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer")
ACCELERATE = ("accelerate", "datasets", "peft", *DEEPSPEED)
TRAINER = ("transformers.trainer", *ACCELERATE)
LIGHTNING = ("lightning.pytorch", "lightning.fabric", "torchdata.stateful_dataloader", *ACCELERATE)
_KINDS = ("grpo", "rloo", "kto", "sft", "dpo", "reward")
TRL = (*(f"trl.trainer.{kind}_trainer" for kind in _KINDS), "sentence_transformers", *ACCELERATE)
os.environ["DS_ACCELERATOR"] = "cpu"  # deepspeed reads it as it is imported


def python(*modules: str) -> str:
    """`warm.python` for a training that needs these modules, too."""
    return warm.python((*modules, *warm.TRAINER))


class Lives:
    """Trainings of one script: `undisturbed`, and `killed`, which may take several lives."""

    def __init__(self, home: Path, script: Path, modules: tuple[str, ...]) -> None:
        self.keepstep = Keepstep(home)
        self._home, self._script, self._modules = home, script, modules

    @property
    def _python(self) -> str:
        return python(*self._modules)

    def command(self, out: str, settings: dict[str, Any], ranks: int) -> list[str]:
        (self._home / out).mkdir(exist_ok=True)
        python = self._python
        words = [str(self._script), out, json.dumps(settings)]
        if ranks == 1:
            return [python, *words]
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        return [python, *launch, *words]

    def undisturbed(self, *, ranks: int = 1, out: str = "plain", **settings: Any) -> Path:
        """Without keepstep, or with `bare=False` without a sidecar. Returns its folder."""
        done = subprocess.run(
            self.command(out, {"bare": True, **settings}, ranks),
            cwd=self._home,
            env=self.variables(),
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return self._home / out

    def resumed(self, *, kill: int, **settings: Any) -> Path:
        """Without keepstep, killed once, and gone on with by what the framework has for that: from
        `resume`, the newest of its checkpoints below the folder. Returns its folder."""
        options: dict[str, Any] = {"cwd": self._home, "env": self.variables(), "timeout": 200}
        resume = settings.pop("resume")
        command = self.command("own", {"bare": True, "kill": [kill], **settings}, 1)
        assert subprocess.run(command, capture_output=True, **options).returncode == -9
        (newest,) = sorted((self._home / "own").glob(resume))[-1:]
        return self.undisturbed(out="own", resume=str(newest), **settings)

    def kept(
        self, *, ranks: int = 1, out: str = "kept", code: int = 0, **settings: Any
    ) -> tuple[Path, str]:
        """Under `keepstep run`. Returns its folder, and what was said."""
        command = self.command(out, settings, ranks)
        words = ("run", "--run", "trainer", "--restarts", "3", "--", *command)
        env = {**self.variables(), warm.EXECUTABLE_ENV: warm.python(warm.SIDECAR)}
        start = functools.partial(self.keepstep.start, *words, forked=True, env=env)
        text = output_of(start, self._home / f"{out}.log", code=code, timeout_s=200)
        return self._home / out, text

    def variables(self) -> dict[str, str]:
        mark = {"KEEPSTEP_TEST_CLI": str(self._home)}
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        found = {"PYTHONPATH": paths, "PYTHON_EXEC": self._python}  # the latter for torchrun
        return {**os.environ, **_ENVIRONMENT, **mark, **found}


def output_of(
    start: Callable[..., subprocess.Popen[Any]], log: Path, *, code: int, timeout_s: float
) -> str:
    """What the process that `start` starts wrote until its end. The test fails with that text if it
    does not end, and is killed, or ends with another code.

    It goes to a file: whoever else came to hold a pipe would keep its end from being seen.
    """
    with log.open("w") as file, start(stdout=file, stderr=subprocess.STDOUT) as process:
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            pytest.fail(f"no end after {timeout_s} s: {log.read_text()[-8000:]}")
    text = log.read_text()
    assert process.returncode == code, text[-8000:]
    return text


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Callable[..., Lives]]:
    """Makes `Lives` of a script beside these tests; ends whatever they leave."""
    made: list[Lives] = []

    def make(script: str, *modules: str) -> Lives:
        made.append(Lives(tmp_path, Path(__file__).with_name(script), modules))
        return made[-1]

    yield make
    for lives in made:
        lives.keepstep.end()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those of Ray first, so that one worker runs them one after the other: parts of Ray look for
    the newest cluster of the machine."""
    items.sort(key=lambda item: item.path.name != "test_ray.py")


_SAME: dict[str, set[Any]] = {}


@pytest.fixture(autouse=True)
def _tracked_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a framework logs to wandb by itself, because that is installed, is not left here."""
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))


@pytest.fixture(autouse=True)
def _reported(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """What a test found to be the same, for `scripts/frameworks.py`."""
    _SAME.clear()
    yield
    for name, values in _SAME.items():
        record_property(name, " ".join(map(str, sorted(values))))


def found_same(ranks: int, *names: str) -> None:
    """After a kill, these are as in an undisturbed training of so many ranks, bit by bit."""
    _SAME.setdefault("ranks", set()).add(ranks)
    _SAME.setdefault("same", set()).update(names)


def losses(folder: Path, rank: int = 0) -> dict[int, set[tuple[str, ...]]]:
    """By step: the losses of its micro-batches, once for each time that it was done."""
    found: dict[int, set[tuple[str, ...]]] = {}
    lines = (folder / f"losses-{rank}").read_text().splitlines()
    for step, run in _runs([json.loads(line) for line in lines]):
        found.setdefault(step, set()).add(run)
    return found


def _runs(lines: list[Any]) -> Iterator[tuple[int, tuple[str, ...]]]:
    """A step that was done again begins where the number of the steps does not grow."""
    at, run, life = -1, [], None
    for step, loss, number in lines:
        if run and (step, number) != (at, life):
            yield at, tuple(run)
            run = []
        at, life = step, number
        run.append(loss)
    if run:
        yield at, tuple(run)


def result(folder: Path, rank: int = 0) -> Any:
    return json.loads((folder / f"result-{rank}").read_text())


def assert_same(plain: Path, kept: Path, *, kills: int, ranks: int = 1) -> None:
    """Every loss of every life, and all that there is at the end, bit by bit."""
    assert len(list(kept.glob("killed-*"))) == kills
    for rank in range(ranks):
        assert losses(kept, rank) == losses(plain, rank)
        assert result(kept, rank) == result(plain, rank)
    found_same(ranks, "losses", *(name for name, value in result(kept).items() if value))


def drawn(*ranges: range) -> list[int]:
    """A step of each range to be killed in; the output of a failed test has them."""
    steps = [random.choice(bounds) for bounds in ranges]
    print("killed before the steps after", steps)
    return steps
