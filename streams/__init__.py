"""The rules applied to the log: thin agents, one file a concern, with the same name as its rule in `decisions/`.

Owns: `admission` (a Faust app a tier, with `faust_shell`, `faust_transport`, `intake`, `world`, `tokenizers`) and
`endings` (one aiokafka consumer over all `tokens` topics, with `fold_table`); both write through `outbox`. Each module with
a `run(settings, stop)` is one process; it scales by partitions. Agents decide nothing themselves and keep nothing that the
log can't give back. They must not import workers or the bridge: they meet in topics.
"""
