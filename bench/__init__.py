"""Measurements, each side by side with its peer in one run: `headrace bench NAME [--json] [--quick]`.

Owns: what a result looks like (`rows`), the load that every peer gets alike (`load`), the private stack that is measured (`stack`), and
one module a benchmark, which has `async def run(as_json, *, quick=False)`: `overhead` (what the way through HTTP and Kafka adds), `llm`
(Headrace against `vllm serve`) and `takeover` (the pause when a worker dies or drains, against a caller that asks again). Runs in the
command's process, beside the processes it starts, and stops them again. Nothing that serves may import it.
"""
