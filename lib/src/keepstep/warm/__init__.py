"""A warm start: the next life of a training process does not pay for Python and torch again.

A *fork server* has imported torch and run nothing; a process that is to start is forked from it and
becomes what its command line says. What cannot be started so is started cold, with a line that
says why.

    command.py   which command lines can be started warm, and by which interpreter
    client.py    starts a server, and asks it for a process
    server.py    the server: `python -m keepstep.warm.server FD [MODULE...]`
    process.py   the new process: what exec and the interpreter would have done
    torchrun.py  torchrun as such a process: its workers come from a server of its own
"""
