"""How the trainer uses the sidecar: `session` (lease, calls, reconnect) over the unix socket,
`slot` (mapped shared memory), `copying` (copies of bytes), `embedded` (starts the sidecar).
"""
