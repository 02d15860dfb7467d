"""`keepstep start` and `Checkpointer(dir=...)`: a sidecar for what nobody started by `run`."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

import pytest

from keepstep.errors import SidecarError, UsageError
from keepstep_sidecar.cli import calls, run_dir
from tests import harness, warm
from tests.cli.conftest import MARK, TRAIN, Keepstep
from tests.harness import eventually, matching

OWN = TRAIN.replace('"optimizer": optimizer}', '"optimizer": optimizer}, dir=".keepstep"')


def plain(
    keepstep: Keepstep, *words: str, code: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A script as people start it without us."""
    variables = {name: value for name, value in os.environ.items() if name != "KEEPSTEP_SOCKET"}
    variables |= {MARK: str(keepstep.home), **environment}
    done = subprocess.run(
        [warm.python(), *words],
        cwd=keepstep.home,
        env=variables,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == code, done.stderr
    return done


def test_a_script_resumes_with_two_added_lines(keepstep: Keepstep) -> None:
    keepstep.script("train.py", OWN)
    assert plain(keepstep, "train.py", "6", "3", code=-9).stdout == "from None\n"
    sidecar = keepstep.sidecar().pid
    assert plain(keepstep, "train.py", "6", "-1").stdout == "from 3\n"
    assert keepstep.sidecar().pid == sidecar, "found again, with its memory"
    assert keepstep.json("status")["run"] == "train", "and by the name that `keepstep run` gives"
    assert keepstep.json("status")["committed"]["step"] == 5
    keepstep("stop")
    assert keepstep.family() == []
    again = keepstep("run", "--", warm.python(), "train.py", "7", "-1")
    assert again.stdout == "from 5\n", "its sidecar counts before dir="


def test_all_ranks_of_a_machine_have_one_sidecar(keepstep: Keepstep) -> None:
    keepstep.script(
        "train.py",
        "import torch; torch.distributed.init_process_group('gloo')\n"
        + OWN.replace('print("from"', 'os.write(1, b"from %d\\n" % (at.step if at else -1))#'),
    )
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    options = {"OMP_NUM_THREADS": "1", "PYTHON_EXEC": warm.python()}
    plain(keepstep, *torchrun, "train.py", "3", "-1", **options)
    assert len(keepstep.sidecars()) == 1
    done = plain(keepstep, *torchrun, "train.py", "4", "-1", **options)
    assert done.stdout == "from 2\nfrom 2\n"
    keepstep("stop")


UNTIL_STOPPED = """
import os, pathlib, time
import torch
import keepstep

dist, rank = torch.distributed, int(os.environ.get("RANK", "0"))
if "RANK" in os.environ:
    dist.init_process_group("gloo")
home = os.getcwd()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.Adam(model.parameters())
checkpointer = keepstep.Checkpointer(model=model, optimizer=optimizer, dir=".keepstep")
at = checkpointer.restore()
os.write(1, b"from %d\\n" % (at.step if at else -1))
os.chdir("/")  # whatever it does to itself
os.environ["KEEPSTEP_KEEP"] = "7"
for step in range(at.step + 1 if at else 0, 10**9):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    checkpointer.save(step)
    time.sleep(0.01)
    stop = torch.tensor(float(pathlib.Path(home, "stop").exists()))
    if "RANK" in os.environ:
        dist.all_reduce(stop)
    if stop:
        break
while True:  # one step that every rank saved: a busy machine may let one of them skip it
    saved = torch.tensor(float(checkpointer.save(step)))
    if "RANK" in os.environ:
        dist.all_reduce(saved, op=dist.ReduceOp.MIN)
    if saved:
        break
    step, _ = step + 1, time.sleep(0.01)
checkpointer.wait(step, "staged", timeout=60)
os.write(1, b"staged %d\\n" % step)
if "RANK" in os.environ:
    dist.barrier()
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sidecar_that_dies_is_restarted_with_the_same_memory_and_training_continues(
    keepstep: Keepstep, ranks: int
) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    words = (*(torchrun if ranks == 2 else ()), keepstep.script("train.py", UNTIL_STOPPED))
    variables = {**os.environ, MARK: str(keepstep.home), "OMP_NUM_THREADS": "1"}
    variables |= {"PYTHON_EXEC": warm.python()}
    output_path = keepstep.home / "said"
    with output_path.open("w") as file:  # not a pipe: others may hold its end when this test fails
        training = subprocess.Popen(
            [warm.python(), *words], cwd=keepstep.home, env=variables, stdout=file, stderr=file
        )
    try:
        eventually(lambda: committed(keepstep) > 0, within_s=60, what="it commits")
        slots = inodes(keepstep)
        assert slots
        record = (keepstep.directory / "train" / "sidecar.toml").read_text()
        for times in (1, 2):
            before, step = keepstep.sidecar().pid, committed(keepstep)
            os.kill(before, 9)
            eventually(functools.partial(commits, keepstep, step), within_s=60, what="it goes on")
            assert keepstep.sidecar().pid != before
            eventually(functools.partial(is_logged, output_path, times), what="it says so")
        assert slots.items() <= inodes(keepstep).items(), "the same memory"
        assert (keepstep.directory / "train" / "sidecar.toml").read_text() == record
        (keepstep.home / "stop").touch()
        training.wait(60)
    finally:
        training.kill()
        training.wait()
    log = output_path.read_text()
    (newest,) = {line.split()[1] for line in log.splitlines() if line.startswith("staged ")}
    again = plain(keepstep, *words, code=1 if ranks == 2 else -9, **variables)
    assert again.stdout.count(f"from {newest}\n") == ranks, again.stdout
    keepstep("stop")


def is_logged(log: Path, times: int) -> bool:
    return log.read_text().count("the sidecar ended and was started again") == times


def inodes(keepstep: Keepstep) -> dict[Path, int]:
    return harness.inodes(matching(keepstep.memory("train"), "rank-*/*.slot"))


def commits(keepstep: Keepstep, after: int) -> bool:
    return committed(keepstep) > after


def committed(keepstep: Keepstep) -> int:
    """The newest step that a live sidecar knows; -1 for none."""
    try:
        live = calls.ask_status(run_dir.load_record(keepstep.directory, "train").socket)
    except (UsageError, SidecarError):  # before the first start; or it was killed as it answered
        return -1
    step = None if live is None else live.watermarks.get("local")
    return -1 if step is None else step.step


def test_a_lingering_sidecar_writes_its_steps_to_the_volume_and_exits(keepstep: Keepstep) -> None:
    keepstep.script("train.py", OWN)
    settings = {"KEEPSTEP_LINGER": "1s", "KEEPSTEP_PERSIST_EVERY": "1000"}
    plain(keepstep, "train.py", "6", "4", code=-9, **settings)
    eventually(lambda: not keepstep.family(), within_s=30)
    assert not keepstep.memory("train").exists()
    assert plain(keepstep, "train.py", "6", "-1").stdout == "from 4\n"
    keepstep("stop")


def test_start_prints_a_socket_and_again_the_same(keepstep: Keepstep) -> None:
    socket = keepstep("start", "--run", "notebook").stdout.strip()
    assert Path(socket).is_socket()
    assert keepstep("start", "--run", "notebook").stdout.strip() == socket
    assert len(keepstep.sidecars()) == 1
    keepstep.script("train.py", TRAIN)
    done = plain(keepstep, "train.py", "2", "-1", KEEPSTEP_SOCKET=socket)
    assert done.stdout == "from None\n"
    keepstep("stop")


def test_the_sidecar_of_a_running_trainer_cannot_be_replaced_or_stopped(keepstep: Keepstep) -> None:
    stays = "print(os.getpid(), file=sys.stderr); sys.stdin.read()"
    held = OWN.replace("checkpointer.close()", stays)
    keepstep.script("train.py", held)
    process = subprocess.Popen(
        [warm.python(), "train.py", "2", "-1"],
        cwd=keepstep.home,
        env={**os.environ, MARK: str(keepstep.home)},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        pid = next(line for line in process.stderr if line.strip().isdigit()).strip()
        output = keepstep("start", "--keep", "9", "--", "train.py", code=2).stderr
        assert f"run 'train' is training with other options (pid {pid})" in output
        output = keepstep("stop", code=2).stderr
        assert f"is training (pid {pid}); end that first" in output
        assert keepstep("start", "--", "train.py").stdout
        output = keepstep("run", "--", warm.python(), "train.py", "2", "-1", code=2).stderr
        assert f"is training (pid {pid})" in output
    finally:
        process.kill()
        process.communicate()
    keepstep("stop")


def test_a_sidecar_that_cannot_be_started_raises_an_error_with_the_reason(
    keepstep: Keepstep,
) -> None:
    keepstep.script("train.py", OWN)
    (keepstep.home / ".keepstep").write_text("a file")
    output = plain(keepstep, "train.py", "2", "-1", code=1).stderr
    assert "UsageError: dir='.keepstep': Invalid value for '--dir'" in output
    (keepstep.home / ".keepstep").unlink()
    (keepstep.home / "lacking").mkdir()
    (keepstep.home / "lacking" / "keepstep_sidecar.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'keepstep_sidecar'\")"
    )
    path = os.pathsep.join(filter(None, ["lacking", os.environ.get("PYTHONPATH")]))
    output = plain(keepstep, "train.py", "2", "-1", code=1, PYTHONPATH=path).stderr
    assert "pip install ./sidecar of keepstep's source" in output
    assert "give it one with --run NAME" in keepstep("start", code=2).stderr


def test_a_run_name_gives_each_training_of_a_process_its_own_run(keepstep: Keepstep) -> None:
    keepstep.script(
        "train.py",
        "import keepstep\n"
        "for name in ('one', 'two'):\n"
        "    progress = {'of': None}\n"
        "    with keepstep.Checkpointer(progress=progress, dir='.keepstep', run=name) as made:\n"
        "        at = made.restore()\n"
        "        print(name, at and at.step, progress['of'])\n"
        "        progress['of'] = name\n"
        "        made.save(at.step + 1 if at else 0)\n",
    )
    first, again = "one None None\ntwo None None\n", "one 0 one\ntwo 0 two\n"
    assert plain(keepstep, "train.py").stdout == first
    under = keepstep("run", "--run", "other", "--", warm.python(), "train.py")
    assert under.stdout == again, "by its name, whatever else provides a sidecar"
    for name in ("one", "two", "other"):
        keepstep("stop", "--run", name)


def test_a_run_name_without_a_directory_is_refused() -> None:
    import keepstep as library

    with pytest.raises(UsageError, match="run='dpo' names a run below a directory"):
        library.Checkpointer(progress={}, run="dpo")
    with pytest.raises(UsageError, match="run= is an option, the name of a run"):
        library.Checkpointer(model={}, run={"epoch": 0})  # type: ignore[arg-type]
