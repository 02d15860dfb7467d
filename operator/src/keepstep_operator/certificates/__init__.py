"""The certificates of admission and of the reports API, without another operator.

    pki        keys and certificates as PEM; verification
    rotation   what is due, given what is there and the time: pure
    secrets    how Secrets hold it
    keeper     one round: read, decide, write, publish
    peers      the authority of each run, of which reconcile makes the pods' certificates
    main       the process

There are two authorities, so that whoever gets hold of one key cannot pose as the other server. A
new CA is published before anything is signed with it, and an old one stays published for as long
after, so at every moment each client trusts what each server shows.
"""
