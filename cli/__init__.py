"""The `headrace` command.

Owns what people and scripts type and what they read back: starting one process, `up` (all of them on one machine), the operators'
commands on topics, tenants and models, and `explain`. Each command is one module, imported only when it is run, so that `--help` is
quick and a bridge never loads a model server. It decides nothing about requests: that is `decisions/`, acted on by the processes.
"""
