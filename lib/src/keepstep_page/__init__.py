"""The page in a browser: the code that `keepstep ui` and the page of a cluster share.

- `access`: who may read the page
- `board`: reads the runs while a viewer is connected
- `pages`: HTML of the sections
- `server`: routes, and the stream of changes
- templates, styles and the script

Sidecar and operator pass in what is shown: each has runs and sections of its own. The page changes
nothing: it has only GET routes.

`import keepstep` does not include it, and a trainer does not need it. It uses aiohttp and jinja2,
which the sidecar and the operator bring.
"""
