"""The reconciler: hosts each run's ledger, answers sidecars, and tells people what is protected.

    main          the process
    watch         what is done when objects of the cluster change
    errands       carries out what the state asks for
    reports_api   takes reports (token_auth: whose), signs (peer_certificates), answers
    report_body   reads what they say, in small parts (turns), within bounds
    helpers       pods that serve and clean what a run left on nodes
    writers       statuses, Checkpoints, Events
    status        what people read of a run
    state         what is known of all runs: pure, time is passed in

Nothing here holds state that pods, their reports and CheckpointRun.status cannot bring back.
"""
