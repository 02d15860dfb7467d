"""The reconciler: shows runs, introduces their pods to each other, and signs for them.

    main           the process
    handlers       what happens when objects change (kopf); periodic_checks: what no watch tells
    reports_api    takes reports of leaders (token_auth: from whom), signs (peer_certificates)
    writers        statuses, Checkpoints, Services, Events
    run_registry   all runs: each event is a transition of one
    run            a run as a frozen value, and its transitions: pure
    leader_answer  what the leader is told; render, conditions, events: what people are told: pure

A run's ledger is its leader's. All state here is pods, the newest report, and CheckpointRun.status.
"""
