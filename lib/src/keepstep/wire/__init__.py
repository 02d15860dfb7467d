"""The messages, as types: `trainer` over the unix socket, `status` for people, `reports` between
sidecar and operator. docs/protocol.md states the duties of each side.
"""
