"""The Open Inference Protocol v2 at the front door: REST with the binary tensor extension, and gRPC.

Owns: tensors as JSON has them (`elements`), a request as either protocol brings it (`asking`, `rest_requests`, `messages`, `grpc_requests`), what its
parameters mean (`parameters`, `generation`), its way through the door (`serving`), and how its answer is written (`rest_answers`, `rest`,
`grpc_server`; `grpc_calls` for what all gRPC calls have in common). `models` tells what is served, and what of it is ready.

Runs in the bridge's loop: a task for each REST call, as uvicorn has it; gRPC's own tasks, and one for each request of a stream.

Must not decide: what is checked here is checked so that bad input gets a clear error before anything reaches the log.
"""
