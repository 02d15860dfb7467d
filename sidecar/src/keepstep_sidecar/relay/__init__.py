"""What helper pods do on a node that a run's pod has left: serve its shards, or clean them away.

Both run the sidecar's image without a trainer: no slots, no socket, no lock on a volume. They are
started by the operator, on one node, for one run, and end by themselves or are deleted.

    serve       shards of pods that left, to the run's other pods, over the peers' own server
    clean       the directories of a run that is gone, one link-free step at a time
"""
