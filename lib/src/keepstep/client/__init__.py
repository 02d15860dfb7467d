"""How the trainer uses the sidecar: `http` and `session` (lease, reconnect) over the unix socket,
`slot` (mapped shared memory), `copying` (copies of bytes), `wakeups` (of threads), `embedded`
(starts the sidecar).
"""
