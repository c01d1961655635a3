"""Model servers: they take a model version's work from the log, generate, and write the answers' streams.

Owns the work group's consumer (`group`), the window's shell and the loop (`loop`), what a record becomes (`intake`, `work`), whose turn it is
(`turns`), one request's run (`job`) and what it writes (`answer`), taking over from a former owner (`takeover`), cancels (`control`), reports
(`report`), leaving in bounded time (`goodbye`), the engines behind two ports (`engines/`), and what stands between
callers' tensors and a model's own (`processors/`).

A worker process is one event loop: a task fetches, one commits and drops what is past its deadline, one reports, one follows `control`,
one runs each request, and one takes each batch over. It may own up to all partitions of its tiers' work topics, and needs none. It must
not decide which token counts or how a request ended: that is the fold's; nor write endings anywhere but to `tokens`.
"""
