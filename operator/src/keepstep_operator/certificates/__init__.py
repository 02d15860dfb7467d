"""The certificates of admission and of the reports API, made without another operator.

    pki        keys and certificates as PEM; verification
    rotation   what is due, given the certificates and the time: pure
    secrets    how Secrets hold authorities and leaves
    keeper     one round for one server: read, decide, write, publish
    peers      the authority with which reconcile signs the pods' certificates
    main       the process

Each of the two servers has its own authority, so the key of one does not let its holder pose as the
other. A new CA is published before anything is signed with it, and an old one stays published for
as long afterwards. So at every moment each client trusts the certificate of each server.
"""
