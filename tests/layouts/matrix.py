"""Which layouts are tested: for each world the names, with the number of nodes that they run on."""

WORLDS = {
    2: {
        "fsdp": 1,
        "tensor-parallel": 1,
        "pipeline": 1,
        "ddp": 1,
        "ddp-spread": 1,
        "zero": 1,
        "own-optimizers": 1,
    },
    4: {
        "two-dimensions": 1,
        "hybrid": 1,
        "empty-shards": 1,
        "ddp-on-two-nodes": 2,
        "hybrid-on-two-nodes": 2,
        "ddp-spread-over-nodes": 2,
    },
}

STAGED_ONLY = {"ddp-spread-over-nodes"}
"""No node has all bytes, and there is no common tier here to restore from."""
