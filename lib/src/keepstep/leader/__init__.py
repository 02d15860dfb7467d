"""What the leader of a run knows: the ledger over all its node ranks. Pure, as `core` is.

run_ledger        the ledger of a run, fed by reports of its node ranks
node_rank         a node rank, and what its sidecar reported last
bounds            what one report may say
durability        which step the loss of one node would leave
orphaned_shards   shards that were left on nodes where the run no longer is
buddies           which node ranks keep copies for which others
"""
