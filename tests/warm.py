"""Starts real Python processes without the seconds of their imports: forks them from a server.

Each test run has one server for each set of modules. The server imports the modules once. For each
client that asks on its socket, it forks a process with the argv, environment, directory and files
of the client. That process is as real as one of `subprocess`: it has its own pid and memory, and
SIGKILL ends it. It dies with its client, and the server dies with the test run.

`Process` starts one like `subprocess.Popen`. If a command is needed, as in `keepstep run -- python
train.py`, `python()` returns the path of a program that is a client of the server: it hands its
arguments to such a process, and passes signals and the exit code on.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

DIRECTORY_ENV = "KEEPSTEP_TEST_WARM"
EXECUTABLE_ENV = "KEEPSTEP_TEST_EXECUTABLE"
"""What a forked process takes for `sys.executable`."""
SIDECAR = ("keepstep_sidecar.cli.sidecar", "keepstep_sidecar.cli.main", "keepstep_sidecar.app")
EXPORT = ("torch", "keepstep.huggingface_export", *SIDECAR)
# torch._dynamo: the first optimizer of a process imports it, which takes longer than many tests
TRAINER = (
    "torch._dynamo",
    "torch.distributed.launcher.api",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.profiler",
    "keepstep.checkpointer",
    "keepstep.dcp",
    "keepstep.wire.status",
)
_LARGEST_REQUEST_BYTES = 1 << 17


def begin() -> Path:
    """The directory with the sockets of this test run's servers. Called before xdist starts
    workers, so that they share it."""
    if DIRECTORY_ENV not in os.environ:
        owner = os.getpid()
        directory = tempfile.mkdtemp(prefix=f"keepstep-warm-{owner}-")
        os.environ[DIRECTORY_ENV] = directory
        atexit.register(lambda: owner == os.getpid() and shutil.rmtree(directory))
    return Path(os.environ[DIRECTORY_ENV])


def _server(modules: Sequence[str]) -> str:
    """The socket of the server that has imported `modules`. The first call starts the server."""
    path = begin() / modules[0]
    if not path.exists():
        with Path(f"{path}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                _start_server(path, modules)
    return str(path)


def _start_server(path: Path, modules: Sequence[str]) -> None:
    owner = path.parent.name.split("-")[2]
    environment = {key: value for key, value in os.environ.items() if "KEEPSTEP" not in key}
    environment.pop("OMP_NUM_THREADS", None)
    root, before = str(Path(__file__).parents[1]), environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{root}:{before}" if before else root
    log = Path(f"{path}.log")
    server = os.posix_spawn(  # not `subprocess`: the server must outlive this process
        sys.executable,
        [sys.executable, "-m", "tests.warm", owner, str(path), *modules],
        environment,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )
    deadline = time.monotonic() + 120
    while not path.exists():
        if os.waitpid(server, os.WNOHANG)[0] or time.monotonic() > deadline:
            raise RuntimeError(f"no warm process: {log.read_text()}")
        time.sleep(0.02)


class Process:
    """A forked process, with as much of the interface of `subprocess.Popen` as tests need. `words`
    are those after `python`: `-m MODULE`, `-c CODE` or a script, and its arguments."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        modules: Sequence[str] = TRAINER,
        stdout: IO[Any],
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.returncode: int | None = None
        self._words = list(words)
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST_REQUEST_BYTES)
        self._server.connect(_server(modules))
        asked = [self._words, {**(os.environ if env is None else env)}, str(cwd or os.getcwd())]
        with open(os.devnull) as nothing:
            files = [stream.fileno() for stream in (nothing, stdout, stdout)]
            socket.send_fds(self._server, [json.dumps(asked).encode()], files)
        self.pid = int(self._server.recv(64))

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while the process lives."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises TimeoutExpired if the process still lives after
        `timeout`."""
        if self.returncode is None:
            if not select.select([self._server], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self._words, timeout or 0)
            # without an answer, the server has ended, and its processes with it
            self.returncode = int(self._server.recv(64) or -signal.SIGKILL)
            self._server.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


_PROGRAM = """#!{python} -IS
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, {largest})
server.connect({server!r})
asked = [sys.argv[1:], dict(os.environ), os.getcwd()]
socket.send_fds(server, [json.dumps(asked).encode()], [0, 1, 2])
pid = int(server.recv(64))
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: os.kill(pid, number))
code = int(server.recv(64) or -9)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if code != -9 else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def python(modules: Sequence[str] = TRAINER) -> str:
    """The path of a program that is used like `sys.executable` and starts faster. A SIGKILL to the
    program also kills the process behind it."""
    server = _server(modules)
    path = f"{server}.bin/python"
    if not os.path.exists(path):
        text = _PROGRAM.format(python=sys.executable, server=server, largest=_LARGEST_REQUEST_BYTES)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        made = Path(f"{path}.{os.getpid()}")
        made.write_text(text)
        made.chmod(0o755)
        made.rename(path)
    return path


# --- the server --------------------------------------------------------------------------------


class _Forked(Exception):
    """Raised in a new process; has the words that it must run."""


def _serve(owner: int, path: str) -> None:
    """Fork a process for each client, until the owner has ended. Raises _Forked in each new
    process."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ, "ask")
    waiting.register(os.pidfd_open(owner), selectors.EVENT_READ, "over")
    while True:
        for key, _ in waiting.select():
            if key.data == "over":
                return  # what was forked dies with its own side of the sockets
            if key.data == "ask":
                _fork(listener.accept()[0], waiting)
            elif isinstance(key.data, socket.socket):
                _report_end(key, waiting)
            else:  # the client is gone: kill its process, unless that is gone, too (no entry)
                with contextlib.suppress(KeyError, ValueError, ProcessLookupError):
                    waiting.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGKILL)


def _fork(asking: socket.socket, waiting: selectors.BaseSelector) -> None:
    data, files, _, _ = socket.recv_fds(asking, _LARGEST_REQUEST_BYTES, 3)
    if not data:
        return asking.close()
    words, environment, directory = json.loads(data)
    pid = os.fork()
    if pid == 0:
        for key in [*waiting.get_map().values()]:
            key.fileobj.close() if hasattr(key.fileobj, "close") else os.close(key.fd)
        waiting.close()
        asking.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        raise _Forked(words)
    for file in files:
        os.close(file)
    asking.send(str(pid).encode())
    waiting.register(asking, selectors.EVENT_READ, pid)
    waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, asking)


def _report_end(key: selectors.SelectorKey, waiting: selectors.BaseSelector) -> None:
    asking: socket.socket = key.data
    info = os.waitid(os.P_PIDFD, key.fd, os.WEXITED)
    assert info is not None
    code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
    waiting.unregister(key.fd)
    os.close(key.fd)
    with contextlib.suppress(KeyError, ValueError):  # already unregistered
        waiting.unregister(asking)
    with contextlib.suppress(OSError):
        asking.send(str(code).encode())
    asking.close()


def _run(words: list[str]) -> None:
    """Run what the command line says, as the interpreter would. Never returns."""
    code = 0
    try:
        _become(words)
    except SystemExit as ended:
        if isinstance(ended.code, int) or ended.code is None:
            code = ended.code or 0
        else:
            print(ended.code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    _end(code)


def _become(words: list[str]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for file, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        stream = open(file, mode, closefd=False, buffering=1)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if "torch" in sys.modules:
        _prepare_torch()
    if "keepstep_sidecar.volume.files" in sys.modules:
        sys.modules["keepstep_sidecar.volume.files"].arm_from_environment()
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    sys.executable = os.environ.pop(EXECUTABLE_ENV, sys.executable)
    safe_path = words[0] == "-P"
    words = words[words[0] in ("-u", "-P") :]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if words[0] == "-m":
        sys.path[:1] = [] if safe_path else [os.getcwd()]
        sys.argv = words[1:]
        runpy._run_module_as_main(words[1])
        return
    if words[0] == "-c":
        sys.path[0], sys.argv = "", ["-c", *words[2:]]
        code = compile(words[1], "<string>", "exec")
    else:
        sys.path[0], sys.argv = str(Path(words[0]).resolve().parent), words
        main.__file__ = words[0]
        code = compile(Path(words[0]).read_bytes(), words[0], "exec")
    main.__builtins__ = __builtins__
    exec(code, main.__dict__)


def _prepare_torch() -> None:
    """Apply what torch would have read from the environment, and set seeds that must differ."""
    import numpy
    import torch

    numpy.random.seed()
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))


def _main() -> list[str]:
    """Run the server. Returns only in new processes, with the words that they must run."""
    owner, path, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    if "torch.distributed.launcher.api" in modules:
        from keepstep.warm.process import hasten_rendezvous

        hasten_rendezvous(alone=False)
    for finalizer in [*weakref.finalize._registry]:  # each operator of torch's has one
        finalizer.atexit = False
    gc.collect()
    gc.freeze()
    _collapse_into_huge_pages()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _serve(int(owner), path)
    except _Forked as forked:
        return list(forked.args[0])
    os._exit(0)


def _collapse_into_huge_pages() -> None:
    """Less to copy for each fork, which takes a third of the time then. Older kernels refuse."""
    madvise, collapse, huge = ctypes.CDLL(None).madvise, 25, 1 << 21  # linux/mman.h
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, inode, *_ = line.split()
        begin, end = (int(address, 16) for address in span.split("-"))
        begin, end = -(-begin // huge) * huge, end // huge * huge
        if access.startswith("rw") and inode == "0" and begin < end:
            madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), collapse)


def _end(code: int) -> None:
    """End like the interpreter, but without tearing down all the modules that torch has
    imported."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            file.flush()
    os._exit(code)


if __name__ == "__main__":
    _run(_main())
