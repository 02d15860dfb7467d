"""Shared memory: `slot_file` is one slot, `slot_pool` the slots of all ranks, `allocator` makes
them within the `budget`, `chunk_buffer` is what chunks of other ranks' images arrive in,
`claim` what keeps a second sidecar out.
"""
