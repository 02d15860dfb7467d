"""The page of runs: `keepstep ui` of a machine, and `kubectl keepstep ui` of a run in a cluster.

It reads what any command reads, in a process of its own. It asks a sidecar once a second, however
many viewers there are, and only while there is one. It changes nothing: there are only GET routes.

- `view`: what is known of a run; `timeline`: what follows from its history. Both pure
- `pages`: HTML of the sections, from the templates
- `access`: what a browser must show before it may read
- `board`: reads the runs while a viewer is connected
- `server`: routes, and the stream of changes
"""
