"""The engines behind one small port (`port`): `vllm` serves language models, `scripted` serves tests and load."""
