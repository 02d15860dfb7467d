"""The peer tier: shards kept on the drives of other pods of the run, over mutual TLS.

    tls           certificate, key and authorities; the identity in a certificate
    protocol      the messages and their paths, and how the bytes of a body move
    peer_list     the other pods of the run, and which of them are buddies
    buddy         a buddy as a place: what it should hold, and how one shard is sent
    kept_copies   the copies that this machine keeps for others
    server        takes copies and serves shards: handlers   each request, served_shards   what is
                  read
    client        connections to another pod, a shard there as a source, and lists for a command
    tier          all of it as one tier

Bytes move in blocking calls on separate threads, not on the event loop. Python's TLS releases the
GIL while it encrypts, reads go from the socket straight into the slot, and a slow peer cannot hold
up the loop that trainers wait for. `cryptography` is imported only where peers are used.
"""
