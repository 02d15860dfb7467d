"""Helper pods on a node that a run's pod has left: they serve its shards, or clean them away.

Both run the sidecar's image without a trainer: no slots, no socket, no lock on a volume. The
operator starts them, on one node, for one run. They end by themselves or are deleted.

    serve        serves the run's other pods with shards of pods that left, by the peers' server
    directories  makes those of a run, and removes those of a run that is gone, following no links
"""
