"""The reconciler: hosts each run's ledger, answers sidecars, and tells people what is protected.

    main          the process
    watch         what happens when objects of the cluster change
    errands       carries out the actions that the state asks for
    reports_api   takes reports (token_auth: from whom), signs (peer_certificates), answers
    report_body   decodes reports in small parts (turns), within bounds
    writers       statuses, Checkpoints, Events
    status        what people read of a run
    state         what is known of all runs: pure, time is passed in

All state here can be rebuilt from pods, their reports and CheckpointRun.status.
"""
