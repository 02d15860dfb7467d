"""Local drives.

    volume                     a run's directory on a drive; all such directories of a run
    run_tree                   where a shard is (pending, published, retired, in quarantine), and
                               what lies there at the start
    files                      system calls, O_DIRECT by threads, files that are whole or not there
    run_record, history_file   the run's epochs; what happened

The picture: docs/architecture.md.
"""
