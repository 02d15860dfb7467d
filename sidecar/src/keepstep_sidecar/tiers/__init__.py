"""Tiers beyond this machine.

`remote_tier` is their common interface, `replicator` sends what they should have, `source` is one
copy of a shard, `verified_chunks` the loop that moves and verifies its chunks, `incoming_copy` a
copy that comes in. `peer` and `archive` are the two implementations.
"""
