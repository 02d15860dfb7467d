"""The `keepstep` command: runs a training command beside a sidecar, and shows what is kept.

The modules of commands import rich, the image reader and the volumes inside functions, so that
`keepstep --help` stays quick.
"""
