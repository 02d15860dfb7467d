"""What a fork server starts behaves as what exec starts; where it could not, it says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from keepstep.warm.client import PythonCommand, late_differences, parse_python_command
from tests.harness import SidecarProcess, eventually

PYTHON = sys.executable
CLIENT = Path(__file__).with_name("fork_client.py")

SAME = {
    "main": """
import __main__, os, pickle, sys
class K: pass
print(__name__, __file__, __spec__, __package__, sys.argv, sys.path[0], sys.orig_argv)
print(pickle.loads(pickle.dumps(K())).__class__ is K is __main__.K)
print(sorted(name for name in globals() if name.startswith("__")))
print(sys.stdout.line_buffering, sys.stdout.write_through, sys.stderr.line_buffering)
print(open("/proc/self/cmdline").read().replace("\\0", " ").strip(), os.environ["COLOUR"])
""",
    "children": """
import multiprocessing, os, sys
class C: pass
def work(queue, one):
    main = os.path.basename(sys.modules["__main__"].__file__)
    queue.put((type(one).__module__, __name__, sys.argv, main))
if __name__ == "__main__":
    for how in ("spawn", "fork", "forkserver"):
        context = multiprocessing.get_context(how)
        queue = context.Queue()
        child = context.Process(target=work, args=(queue, C()))
        child.start()
        print(how, queue.get(timeout=60))
        child.join()
        print(child.exitcode)
""",
    "the end": """
import atexit, sys, threading, time
x = "globals are still there"
atexit.register(lambda: print("atexit", x))
threading.Thread(target=lambda: (time.sleep(.1), print("thread", x))).start()
print("no newline", end="")
sys.exit(5)
""",
    "a text as exit code": "import sys; sys.exit('a reason')",
    "annotations": "def f(x: int): pass\nprint(f.__annotations__)",
    "an exception": "def f():\n    raise ValueError('boom')\nf()",
    "an interrupt": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
    "a hook for exceptions": """
import sys
sys.excepthook = lambda kind, error, trace: print(kind, error, trace.tb_frame.f_code.co_name)
raise ValueError("boom")
""",
    "no Python": "def f(:\n",
    "signals": """
import os, resource, signal
names = (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD, signal.SIGHUP)
print([str(signal.getsignal(one)) for one in names], signal.pthread_sigmask(signal.SIG_BLOCK, ()))
for line in open("/proc/self/status"):
    if line[:6] in ("SigBlk", "SigIgn", "SigCgt"):
        print(line[:6], int(line[7:], 16) & ~(3 << 31))  # 32 and 33 are glibc's own
print(os.umask(0), os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid(), os.getcwd())
print(sorted(map(int, os.listdir("/proc/self/fd")))[:-1])
print(resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
""",
    "sources": """
import dataclasses, inspect, torch, typing
@dataclasses.dataclass
class D:
    a: "int" = 1
def f(x):
    return x + 1
print(inspect.getsource(f), typing.get_type_hints(D), inspect.getfile(D))
@torch.jit.script
def g(x: torch.Tensor):
    return x + 1
print(g(torch.ones(1)).item())
""",
    "arithmetic": """
import numpy, os, torch
print(torch.get_num_threads(), torch.get_num_interop_threads(), torch.cuda.is_initialized())
chance = torch.Generator().manual_seed(1)
a = torch.randn(300, 300, generator=chance)
layer = torch.nn.Linear(300, 300, bias=False)
layer.weight.data.copy_(a / 300)
layer(a).pow(2).mean().backward()
print(layer.weight.grad.sum().item().hex(), (a @ a).sum().item().hex())
print(numpy.linalg.norm(a.numpy() @ a.numpy()).hex())
""",
}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def ask(
    directory: Path,
    runs: list[dict[str, Any]],
    *modules: str,
    prefix: tuple[str, ...] = (),
    on_path: bool = True,
) -> list[list[Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [*prefix, PYTHON, str(CLIENT)],
        input=json.dumps({"modules": modules, "runs": runs}),
        capture_output=True,
        text=True,
        cwd=directory,
        env={**environment, "COLOUR": "blue", "PYTHONPATH": _path(directory if on_path else None)},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    answers: list[list[Any]] = json.loads(done.stdout)
    return answers


def _path(directory: Path | None) -> str:
    more = None if directory is None else str(directory)
    return os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), more]))


def run(*words: str, warm: bool = True, **environment: str) -> dict[str, Any]:
    return {"argv": [PYTHON, *words], "environment": environment, "warm": warm}


def test_scripts_and_modules_behave_as_started_by_exec(tmp_path: Path) -> None:
    runs, names = [], []
    for name, text in SAME.items():
        script = tmp_path / f"{name.replace(' ', '_')}.py"
        script.write_text(text)
        more = ONE_THREAD if name == "arithmetic" else {}
        runs += [run(script.name, "a", "b", warm=warm, **more) for warm in (False, True)]
        names.append(name)
    (tmp_path / "a_module.py").write_text("import sys; print(__name__, sys.argv, sys.path[0])")
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "__main__.py").write_text("import sys; print(__file__, sys.path[0])")
    with zipfile.ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("__main__.py", SAME["main"])
    words_of = (("-m", "a_module", "x"), ("-u", "main.py"), ("missing.py",))
    for words in (*words_of, ("directory",), ("app.zip", "a")):
        runs += [run(*words, warm=warm) for warm in (False, True)]
        names.append(" ".join(words))
    answers = ask(tmp_path, runs)
    pairs = dict(zip(names, zip(answers[1::2], answers[::2], strict=True), strict=True))
    different = {name: both for name, both in pairs.items() if both[0] != both[1]}
    assert not different, json.dumps(different, indent=1)


def test_warm_starts_have_torch_imported_draw_different_numbers_and_detect_changed_files(
    tmp_path: Path,
) -> None:
    text = "import sys; there = 'torch' in sys.modules; import numpy, random, torch; print(there,"
    (tmp_path / "chance.py").write_text(
        f"{text} random.random(), numpy.random.rand(), torch.rand(1).item())"
    )
    (tmp_path / "nothing.py").write_text("")
    other = run("nothing.py", TORCH_LOGS="+dynamo")
    late = run("nothing.py", RANK="3", TORCHELASTIC_RUN_ID="x", KEEPSTEP_SOCKET="y")
    (tmp_path / "preloaded.py").write_text("VALUE = 1\n")
    (tmp_path / "uses.py").write_text(
        "import preloaded, sys; print(preloaded.VALUE)\n"
        "open('preloaded.py', 'w').write('VALUE = 22')"
    )
    runs = [run("chance.py")] * 2 + [other, run("-c", "1"), run("-O", "nothing.py"), late]
    first, second, *others, before, changed = ask(
        tmp_path, [*runs, run("uses.py"), run("uses.py")], "preloaded"
    )
    drawn = [answer[1].split() for answer in (first, second)]
    assert [words[0] for words in drawn] == ["True", "True"]
    assert len({*drawn[0][1:], *drawn[1][1:]}) == 6
    assert others == [
        ["cold", "imports may have read what differs now: TORCH_LOGS"],
        ["cold", "only exec can start this command"],
        ["cold", "only exec can start this command"],
        [0, "", ""],
    ]
    assert before == [0, "1\n", ""]
    assert changed[0] == "cold", "a file that was imported is another one"
    assert "1 imported files have changed since, such as" in changed[1]
    assert "preloaded.py" in changed[1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "from threading import Event, Thread; Thread(target=Event().wait, daemon=True).start()",
            "a preloaded module has started threads",
        ),
        ("import torch; torch.cuda._is_in_bad_fork = lambda: True", "has asked for CUDA devices"),
        ("raise OSError('no licence')", "cannot be imported (OSError('no licence'))"),
        ("import os; os._exit(3)", "the fork server has died"),
    ],
)
def test_preloading_a_module_that_is_not_fork_safe_is_refused_with_the_reason(
    tmp_path: Path, text: str, reason: str
) -> None:
    (tmp_path / "bad.py").write_text(text)
    (answer,) = ask(tmp_path, [run("bad.py")], "bad")
    assert answer[0] == "cold"
    assert reason in answer[1]


# --- as the entry point of a container ----------------------------------------------------------


TRAIN = """
import os, sys
there = "torch" in sys.modules
import torch
import keepstep
model = torch.nn.Linear(8, 8)
checkpointer = keepstep.Checkpointer({"model": model})
at = checkpointer.restore()
begin = at.step + 1 if at else 0
print(begin, there, flush=True)
for step in range(begin, 40):
    checkpointer.save(step)
    checkpointer.wait(step, "staged", timeout=60)
    if step in DEADLY and step >= begin:
        os.kill(os.getpid(), 9)
checkpointer.close()
"""


def entry(*words: str, within_s: float = 150, **options: Any) -> tuple[int, str, str]:
    """The container's exit code, stdout and stderr."""
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    with subprocess.Popen([PYTHON, "-m", "keepstep.warm", *words], **settings) as pod:
        out, err = pod.communicate(timeout=within_s)
    return pod.returncode, out, err


def test_a_sidecar_that_disappears_does_not_count_as_a_finished_step(
    sidecar: SidecarProcess, tmp_path: Path
) -> None:
    script, gone = tmp_path / "train.py", tmp_path / "gone"
    assert sidecar.process is not None
    begin = f"import os, sys\nprint('life', flush=True)\nif os.path.exists({str(gone)!r}):\n"
    take_away = f"    os.kill({sidecar.process.pid}, 9)\n    open({str(gone)!r}, 'w').close()\n"
    head, tail = TRAIN.replace("DEADLY", "(0,)").split("print(begin", 1)
    script.write_text(
        f"{begin}    sys.exit(7)\n{head}if begin:\n{take_away}    sys.exit(7)\nprint(begin{tail}"
    )
    code, out, err = entry("--fruitless", "2", "--", PYTHON, str(script))
    assert code == 7
    # one that finishes a step, one that takes the sidecar away, one without
    assert out.count("life") == 3, err
    assert "2 lives have finished no step" in err


def test_a_pod_exits_on_sigterm_with_all_child_processes(tmp_path: Path) -> None:
    text = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))"
    child = "import os, subprocess; subprocess.Popen(['sleep', '600'])"
    script = tmp_path / "train.py"
    script.write_text(f"{text}\n{child}\nopen('ready', 'w').close()\ntime.sleep(600)")
    words = [PYTHON, "-m", "keepstep.warm", "--", PYTHON, str(script)]
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as pod:
        eventually((tmp_path / "ready").exists)
        before = psutil.Process(pod.pid).children(recursive=True)
        pod.terminate()
        _, err = pod.communicate(timeout=60)
    assert pod.returncode == 5, err
    assert "starts again" not in err
    assert len(before) >= 2, "the trainer, its child, and perhaps a fork server"
    assert not any(process.is_running() for process in before)


def test_no_restart_happens_after_the_pod_received_sigterm(tmp_path: Path) -> None:
    left = "import signal, time; signal.signal(15, lambda *_: open('asked', 'w').close()); "
    left += "open('ready', 'w').close(); [time.sleep(.1) for _ in range(6000)]"
    script = tmp_path / "train.py"
    script.write_text(
        "import os, subprocess, sys, time\nprint('life', flush=True)\n"
        f"subprocess.Popen([sys.executable, '-c', {left!r}], stdout=2)\n"
        "while not os.path.exists('ready'): time.sleep(.01)\nos._exit(4)"
    )
    words = [PYTHON, "-m", "keepstep.warm", "--", PYTHON, str(script)]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as pod:
        eventually((tmp_path / "asked").exists)  # what the first life left is being ended
        pod.terminate()
        out, _ = pod.communicate(timeout=60)
    assert (pod.returncode, out) == (4, "life\n")


# --- command lines -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["python", "a.py", "-x"], PythonCommand("script", "a.py", ("-x",))),
        (["/v/bin/python3.11", "-u", "a.py"], PythonCommand("script", "a.py", (), unbuffered=True)),
        (["python3", "-m", "a.b", "c"], PythonCommand("module", "a.b", ("c",))),
        (["/v/bin/torchrun", "a.py"], PythonCommand("module", "torch.distributed.run", ("a.py",))),
        (["python"], None),
        (["python", "-c", "1"], None),
        (["python", "-O", "a.py"], None),
        (["python-config", "a.py"], None),
        (["bash", "a.sh"], None),
        (["numactl", "python", "a.py"], None),
    ],
)
def test_python_command_lines_are_parsed(words: list[str], expected: PythonCommand | None) -> None:
    assert parse_python_command(words) == expected


def test_only_worker_variables_may_differ_from_the_fork_server_environment() -> None:
    before = {"PATH": "/bin", "OMP_NUM_THREADS": "4", "PYTHONPATH": "a"}
    now = {"PATH": "/bin", "RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}
    assert late_differences(before, {**now, "PYTHONPATH": "a"}) == []
    assert late_differences(before, {**now, "TORCHINDUCTOR_X": "1"}) == [
        "PYTHONPATH",
        "TORCHINDUCTOR_X",
    ]
