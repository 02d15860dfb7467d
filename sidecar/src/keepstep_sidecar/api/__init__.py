"""What trainers ask over the unix socket: `server` has the routes, `saving` and `waiting` answer
those of a save, `status` and `metrics` tell, `service` ties one run together.
"""
