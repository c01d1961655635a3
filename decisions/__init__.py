"""The rules of Headrace, as pure functions: `decide(state, event, …) -> (state, events)` and folds.

Owns: what a request's stream means (`stream`), which requests are let in and where they go (`admission`, `placement`), which work a worker
looks at and what it may commit (`window`), and how a request is taken over (`takeover`). Nothing here reads a clock, draws at random, does
I/O or awaits: what a rule needs to know is handed to it, and times are those of the records.
"""
