"""The peer tier: shards kept on the drives of other pods of the run, over mutual TLS.

    identity      who a certificate says somebody is
    credentials   certificate, key and authorities: from files, or issued by the operator
    wire          what is said, and where
    ring          who is whose buddy, what is sent next, which copies may go: pure
    receiving     one copy on its way in: resumable, checked chunk by chunk, sealed last
    copies        the copies that this machine keeps for others
    server        serves shards and takes copies
    link          one connection to another pod
    fetching      verified bytes from whoever holds them
    depot         all of it as one `Depot`

Bytes move in blocking calls on threads of their own, not on the event loop: Python's TLS lets go of
the GIL while it encrypts, reads go from the socket straight into the slot, and a slow peer cannot
hold up the loop that trainers wait on. `cryptography` is imported only where peers are used.
"""
