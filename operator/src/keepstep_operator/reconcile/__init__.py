"""The reconciler: hosts each run's ledger, answers sidecars, and tells people what is protected.

The pure core (`records`, `host`, `restores`, `runs`, `book`, `survival`, `conditions`, `status`,
`pacing`) decides; time is passed in and nothing is read or written. The shell (`parsing`,
`watching`, `handlers`, `tokens`, `reports`, `writer`, `events`, `metrics`, `main`) does the rest.
Nothing here holds state that pods, their reports and CheckpointRun.status cannot bring back.
"""
