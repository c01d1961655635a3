"""The front door: OpenAI's API over HTTP, server-sent events and a WebSocket, with the log behind it.

Owns: callers' keys and bodies (`auth`, `body`), OpenAI's shapes (`openai_models`, `openai_chat`, `openai_completions`, `rendering`,
`openapi`), the way of one call through the log (`calls`, `streams`), and how its answer is written (`sse`, `websocket`, `errors`).

Runs as one asyncio process: uvicorn's tasks, one a connection; one task that reads this bridge's partition of `tokens` and folds each
record into the call that waits for it; a task for each cancel under way. The reading task never awaits a socket: what a caller has not
taken is merged in its `Call`, and a caller that falls too far behind is disconnected.

Must not decide: admission alone lets a request in. What is checked here is checked so that bad input gets a clear error before anything
reaches the log.
"""
