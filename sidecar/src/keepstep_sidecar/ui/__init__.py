"""The page of runs: `keepstep ui` of a machine, and `kubectl keepstep ui` of a run in a cluster.

It reads what any command reads, in a process of its own. It asks a sidecar once a second, however
many viewers there are, and only while there is one. It changes nothing: there are only GET routes.

- `run_figures`: what is known of a run, and what follows from its history. Pure
- `pages`: HTML of the sections, from the templates
- `server`: who may read, the runs as they were read last, routes, and the stream of changes
"""
