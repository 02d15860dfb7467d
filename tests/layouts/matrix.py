"""Which layouts are tested: for each world the names, with the number of nodes that they run on."""

_ONE_NODE = ("fsdp", "tensor-parallel", "pipeline", "ddp", "ddp-spread", "zero", "own-optimizers")
WORLDS = {
    2: dict.fromkeys(_ONE_NODE, 1),
    4: {
        **dict.fromkeys(("two-dimensions", "hybrid", "empty-shards"), 1),
        **dict.fromkeys(("ddp-on-two-nodes", "hybrid-on-two-nodes", "ddp-spread-over-nodes"), 2),
    },
}

STAGED_ONLY = {"ddp-spread-over-nodes"}
"""No node has all bytes, and there is no common tier here to restore from."""
