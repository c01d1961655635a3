"""The front door: OpenAI's API over HTTP, server-sent events and a WebSocket, and the Open Inference Protocol, with the log behind it.

Owns: callers' keys and bodies (`auth`, `body`, `wishes`), OpenAI's shapes (`openai_models`, `openai_chat`, `openai_completions`, `rendering`,
`openapi`), the Open Inference Protocol (`inference`), the way of one call through the log (`calls`, `streams`), how its answer is written (`sse`, `websocket`, `errors`), and how a
caller comes back to it (`event_ids`, `resume`, `replay`, `readers`, `catching_up`, `followers`).

Runs as one asyncio process: uvicorn's tasks, one a connection; one task that reads this bridge's partition of `tokens` and folds each
record into the call that waits for it, and one for any other partition in which a resumed stream stands; a task for each partition in
which resumed streams catch up; a task for each cancel under way. The reading task never awaits a socket: what a caller has not
taken is merged in its `Call`, and a caller that falls too far behind is disconnected.

Must not decide: admission alone lets a request in. What is checked here is checked so that bad input gets a clear error before anything
reaches the log.
"""
