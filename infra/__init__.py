"""Everything that touches the outside: Kafka and its embedded broker, child processes, the environment, files, ports, telemetry.

Runs inside each process's event loop; its tasks are the followers of `views`, the watch over the log and the replacement of
a broken producer in `log`, the heartbeat and the operators' server of `telemetry`, and the supervisor's watchers. Knows the language of `schemas` and nothing of the rules: it must not decide.
"""
