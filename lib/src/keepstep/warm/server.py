"""The fork server: it has imported torch, run nothing else, and has one thread.

    python -c CODE keepstep.warm.server FD [MODULE...]

CODE is `client._SERVER`, which calls `run_server`: no module of the working directory is imported
but MODULE. FD is the server's end of the connection that `client.ForkServer` holds; the server ends
when the other end is closed. A request is one message, JSON and three descriptors. The answer is
{"pid": n}, or {"cold": reason}. The process is forked twice, so it becomes a child of the nearest
subreaper above the server, which reaps it like any other child. It runs nothing before the client
has confirmed that it knows the pid.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from keepstep.processes import become_subreaper
from keepstep.warm import process
from keepstep.warm.client import (
    GO,
    LARGEST_BYTES,
    ColdStart,
    ForkServer,
    late_differences,
    parse_python_command,
    socket_pair,
)
from keepstep.warm.process import ProcessSpec

# torch._dynamo: a process's first optimizer imports it, which takes longer than importing torch
_MODULES: Final = (
    "torch",
    "torch._dynamo",
    "torch.distributed.run",
    "torch.distributed.launcher.api",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "keepstep.checkpointer",
)
_IGNORED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


Stamps = dict[str, tuple[int, int, int] | None]


def module_stamps() -> Stamps:
    """The files of all imported modules, with their time, size and inode."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return {path: _stamp(path) for path in files if isinstance(path, str)}


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _ended(path: str) -> bool:
    """Whether a program wrote this module for itself, and the file is gone. torch 2.6 imports a
    module from a temporary directory, which is removed when the first forked process ends."""
    temporary = os.path.join(os.path.realpath(tempfile.gettempdir()), "")
    return os.path.realpath(path).startswith(temporary) and not os.path.exists(path)


def preload(modules: list[str]) -> None:
    """Import everything. Raises ColdStart if a fork of the result would be broken."""
    if getattr(sys.flags, "safe_path", False):
        raise ColdStart("PYTHONSAFEPATH is set")
    _import(_MODULES)
    sys.path.insert(0, os.getcwd())  # from here on as `python -m` has it
    _import(modules)
    import torch

    if torch.cuda.is_initialized():
        raise ColdStart("a preloaded module has initialised CUDA, which no fork survives")
    # numpy's OpenBLAS starts threads when it is loaded, and ends them at the first fork
    probe = os.fork()
    if probe == 0:
        # CUDA may be in use without torch's knowledge: `torch.cuda.is_available()` is enough
        os._exit(torch.cuda._is_in_bad_fork())
    if os.waitpid(probe, 0)[1]:
        raise ColdStart("a preloaded module has asked for CUDA devices: no fork may use them")
    if names := _other_threads():
        raise ColdStart(f"a preloaded module has started threads: {', '.join(names)}")
    gc.collect()
    gc.freeze()


def _import(modules: Sequence[str]) -> None:
    name = ""
    try:
        for name in modules:
            importlib.import_module(name)
    except Exception as error:
        raise ColdStart(f"module {name} cannot be imported ({error!r})") from error


def _other_threads() -> list[str]:
    found = []
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
                found.append(file.read().strip())
    return found


def serve_forks(
    connection: socket.socket, environment: Mapping[str, str], known: Stamps
) -> ProcessSpec:
    """Fork for each request. Returns in each new process, with its job; never returns in the
    server.

    `environment`: what the imports may have read. `known`: the files of the imported modules.
    """
    set_by_imports = {key: value for key, value in os.environ.items() if key not in environment}
    while True:
        asked = _receive(connection)
        if asked is None:
            os._exit(0)
        reason = _in_the_way(asked, environment, known)
        job = None if reason else _fork(connection, asked, set_by_imports)
        if job is not None:
            return job
        for file in asked.files:
            os.close(file)
        if reason:
            _send(connection, {"cold": reason})


def _receive(connection: socket.socket) -> ProcessSpec | None:
    try:
        data, files, _, _ = socket.recv_fds(connection, LARGEST_BYTES, 3)
    except OSError:
        return None
    return ProcessSpec(**json.loads(data), files=tuple(files)) if data else None


def _in_the_way(job: ProcessSpec, environment: Mapping[str, str], known: Stamps) -> str:
    if parse_python_command(job.argv) is None:
        return "only exec can start this command"
    if names := late_differences(environment, job.environment):
        return f"imports may have read what differs now: {', '.join(names)}"
    changed = [path for path, stamp in known.items() if _stamp(path) != stamp and not _ended(path)]
    if changed:
        return f"{len(changed)} imported files have changed since, such as {min(changed)}"
    if names := _other_threads():
        return f"the fork server has threads: {', '.join(names)}"
    return ""


def _fork(
    connection: socket.socket, job: ProcessSpec, set_by_imports: Mapping[str, str]
) -> ProcessSpec | None:
    """The job in the new process; None in the server."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        middle = os.fork()
    except OSError as error:
        ours.close()
        theirs.close()
        _send(connection, {"cold": f"cannot fork ({error.strerror})"})
        return None
    if middle == 0:
        if os.fork():
            os._exit(0)
        connection.close()
        ours.close()
        return _begin(theirs, job, set_by_imports)
    theirs.close()
    os.waitpid(middle, 0)  # from here on, the new process is the subreaper's child
    with ours, contextlib.suppress(OSError):  # the client is gone, or the process was killed
        answer = ours.recv(4096).decode(errors="replace")
        if not answer.isdigit():
            _send(connection, {"cold": answer or "the new process has died"})
        elif _send(connection, {"pid": int(answer)}):
            ours.send(connection.recv(len(GO)))
    return None


def _begin(
    server: socket.socket, job: ProcessSpec, set_by_imports: Mapping[str, str]
) -> ProcessSpec:
    try:
        job.environment.update({**set_by_imports, **job.environment})
        process.apply_exec_attributes(job)
        server.send(str(os.getpid()).encode())
        message = server.recv(len(GO))
    except BaseException as error:
        server.send(repr(error).encode())
        os._exit(126)
    if message != GO:
        os._exit(126)
    server.close()
    return job


def _send(connection: socket.socket, answer: dict[str, Any]) -> bool:
    try:
        connection.send(json.dumps(answer).encode())
    except OSError:
        return False
    return True


def main() -> None:
    """Run the server. In each process that it starts, run that process's job."""
    for number in _IGNORED:  # the terminal's signals are for the rest of the process group
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[2]))
    connection.set_inheritable(False)
    environment = dict(os.environ)
    try:
        preload(sys.argv[3:])
    except ColdStart as refused:
        _send(connection, {"cold": str(refused)})
        os._exit(0)
    _send(connection, {"pid": os.getpid()})
    job = serve_forks(connection, environment, module_stamps())
    while (python := parse_python_command(job.argv)) is not None and python.is_torchrun:
        # its workers come from a server of its own, forked while it has one thread
        ours, theirs = socket_pair()
        pid = os.fork()
        if pid:
            theirs.close()
            become_subreaper()  # the parent of what that server starts
            server = ForkServer(ours, pid)
            server.ready = True
            return process.run_job(job, torchrun=partial(process.run_torchrun, server))
        ours.close()
        os.setsid()  # keeps the agent's signals from the server
        job = serve_forks(theirs, dict(os.environ), module_stamps())
    process.run_job(job)


def run_server() -> None:
    """Run the server, and in each process that it starts end as the job does."""
    try:
        main()
    except SystemExit:
        raise
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_globals.get("__package__") == __package__:
            trace = trace.tb_next  # a frame of keepstep.warm, which the user does not know
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, KeyboardInterrupt):
            process.exit_without_teardown(-signal.SIGINT)
        sys.exit(1)
