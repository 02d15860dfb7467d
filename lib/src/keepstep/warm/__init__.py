"""A warm start: the next life of a training process need not load Python and torch again.

A *fork server* has imported torch and run nothing else. A new process is forked from it, and
becomes what its command line says. A command that cannot be started this way is started cold, and a
line says why.

    client.py    which command lines can be started warm; starts a server, asks it for a process
    server.py    the server, which `client` starts
    process.py   the new process: does what exec and the interpreter would have done; torchrun as
                 such a process, whose workers come from a server of its own
"""
