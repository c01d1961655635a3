"""Text on the CPU: tokenising, chat templates, detokenising, stop strings, usage.

Owns what turns text into token ids and token ids into the text that a caller may see. All of it is pure but for
`load_tokenizer`, which reads files, and `TokenizePool`, which runs threads. Shared by streams, workers and bridge; it
imports `schemas` alone, and never torch or transformers.
"""
