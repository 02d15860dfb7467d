"""The trainer's side of the sidecar: `http` and `session` (lease, reconnect) over the unix socket,
`slot` (shared memory, mapped), `copying` (the bytes), `wakeups` (threads).
"""
