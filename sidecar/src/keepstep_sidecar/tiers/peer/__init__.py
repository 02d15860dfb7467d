"""The peer tier: shards kept on the drives of other pods of the run, over mutual TLS.

    tls           certificate, key and authorities; who a certificate says somebody is
    protocol      what is said, and where
    placement     who is whose buddy, what is sent next, which copies may go: pure
    members       the other pods of the run
    replicate     sends this machine's shards to its buddies; send   one of them
    receive       one copy on its way in: resumable, checked chunk by chunk, sealed last
    copies        the copies that this machine keeps for others
    server        takes copies and serves shards: handlers   each request, serve   what is read
    client        connections to another pod, and a shard there as a source
    tier          all of it as one tier

Bytes move in blocking calls on threads of their own, not on the event loop: Python's TLS lets go of
the GIL while it encrypts, reads go from the socket straight into the slot, and a slow peer cannot
hold up the loop that trainers wait on. `cryptography` is imported only where peers are used.
"""
