"""Reports to the run's leader, and of the run to the operator.

report              the content of a report, and what is new in it
reporter            sends it when it is due
leader_channel      how the leader is reached: in this process, or over a connection
leader_role         this machine as leader or member of its run
peer_network        how the machines of a run meet: credentials, port, link
operator_reporter   the leader's reports of the run to the operator
"""
