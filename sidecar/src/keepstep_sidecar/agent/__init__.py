"""The agent of a node: for runs whose directories lie there without a pod. Two processes.

Neither has slots, a socket, or the lock of a volume for longer than a moment.

    run_directories  makes those of a pod before it starts, and finds those of all runs
    serve            serves each run its steps, by the peers' server; reads only
    clean            removes the directories of runs that are gone, following no links
"""
