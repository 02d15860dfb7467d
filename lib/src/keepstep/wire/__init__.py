"""Messages, as types: `trainer` over the unix socket, `status` for people, `reports` between
sidecar and operator. `docs/protocol.md` says who owes what to whom.
"""
