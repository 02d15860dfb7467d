"""What the leader of a run knows: the ledger over all its node ranks. Pure, as `core` is.

leader                takes the reports of members, and says to each what it needs of the rest
run_ledger            the ledger of a run, fed by reports of its node ranks
node_rank             a node rank, and what its sidecar reported last
node_loss             which step the loss of one node would leave
buddies               which node ranks keep copies for which others
orphaned_shards       shards that were left on nodes where the run no longer is
left_shards           which agents serve these

operator_requests     what the operator asks, and how far it is
restore_request       a step that a person wants the run to go back to
fresh_start_approval  a person's word on a start at step 0
run_history           what has happened to the run
restart_history       restarts, and what each of them cost
goodput               the goodput of the run over all its lives
drives                the file systems on which its shards lie

run_report            the report of the run to the operator
advisories            what a person should know, as sentences
"""
