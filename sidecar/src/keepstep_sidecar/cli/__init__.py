"""The `keepstep` command: runs a training command beside a sidecar, and shows what is kept.

Modules of commands import only click and the standard library at the top; rich, the image reader
and the volumes are imported where they are used, so that `keepstep --help` stays quick.
"""
