"""The peer tier: shards kept on the drives of other pods of the run, over mutual TLS.

    tls           certificate, key and authorities; the identity in a certificate
    protocol      the messages and their paths
    placement     which pod is whose buddy, what is sent next, which copies may be deleted: pure
    members       the other pods of the run
    replicate     sends this machine's shards to its buddies; send   one of them
    receive       one incoming copy: resumable, checked chunk by chunk, sealed last
    copies        the copies that this machine keeps for others
    server        takes copies and serves shards: handlers   each request, serve   what is read
    client        connections to another pod, and a shard there as a source
    reading       lists shards at peers, for a command
    body          moves bytes of a body into a buffer
    tier          all of it as one tier

Bytes move in blocking calls on separate threads, not on the event loop. Python's TLS releases the
GIL while it encrypts, reads go from the socket straight into the slot, and a slow peer cannot hold
up the loop that trainers wait for. `cryptography` is imported only where peers are used.
"""
