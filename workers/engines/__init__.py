"""The engines behind two small ports: `vllm` (language models) and `scripted` (tests and load) behind `port`, `onnx` behind `tensors`."""
