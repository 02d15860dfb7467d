"""The messages, as types: `trainer` over the unix socket, `status` for people, `member_reports` to
the leader of a run, `run_reports` from there to the operator. docs/protocol.md states the duties of
each side.
"""
