"""Shared memory.

`slot_file` is one slot, `slot_pool` the slots of all ranks. `allocator` makes them within the
memory limit. Chunks of other ranks' images arrive in a `chunk_buffer`. `directory_lock` keeps a
second sidecar out.
"""
