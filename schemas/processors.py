"""The named processors that may stand between a caller's tensors and a model's own, and the names that they use. A closed list."""

from __future__ import annotations

EMBEDDING, TEXT_CLASSIFICATION, BYTES_CLASSIFICATION = "text-embedding", "text-classification", "bytes-classification"
PROCESSORS = (EMBEDDING, TEXT_CLASSIFICATION, BYTES_CLASSIFICATION)
TEXT_PROCESSORS = (EMBEDDING, TEXT_CLASSIFICATION)

TEXT, TOKEN_IDS, LENGTHS = "text", "token_ids", "lengths"
"""Inputs of the text processors: texts, or all their token ids one after the other with how many each has."""
CONTENT = "bytes"
"""The input of `bytes-classification`: each element a file's bytes."""
VECTOR, LABEL, SCORE = "embedding", "label", "score"
"""Outputs: of an embedding, and of a classification, best first."""
DIMENSIONS, TOP_K = "dimensions", "top_k"
"""Parameters: how many of an embedding's numbers, and how many labels."""
