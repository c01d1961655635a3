"""Log-probabilities as JSON can hold them."""

from __future__ import annotations

import math

LOGPROB_MIN = -9999.0
"""What OpenAI's API gives for a token that could not come: JSON has no minus infinity."""


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return logprob if math.isfinite(logprob) and logprob > LOGPROB_MIN else LOGPROB_MIN
