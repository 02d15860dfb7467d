"""The two keys of keepstep in a cluster, made and replaced without another operator.

    pki        keys and certificates as PEM: made, signed, read
    ring       a pair that is replaced in time, as a Secret holds it: pure
    keeper     one round for one of them: read, decide, write, publish
    main       the process

The webhook shows a certificate that signs itself: its only client, the API server, is told it by
the caBundle. The other pair is the authority with which reconcile signs: for sidecars, for agents,
and for itself.
"""
