"""The page in a browser: what `keepstep ui` and the page of a cluster have alike.

Who may look (`access`), reading while somebody looks (`board`), HTML of sections (`pages`), routes
and changes (`server`), templates, styles, the script. What is shown is passed in: sidecar and
operator each have runs of their own, and sections of their own. It changes nothing: there are GET
routes only.

Not part of `import keepstep`, and none of it is for a trainer: it needs aiohttp and jinja2, which
the sidecar and the operator bring.
"""
