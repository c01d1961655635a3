"""Whether a request's tensors are what a version takes: names, datatypes, shapes, element counts, rows and texts, and the wishes for its outputs."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache

from decisions.batching import MAX_BATCH_SIZE, too_many
from decisions.problem import Problem
from schemas import processors
from schemas.events import InferenceRequested, ModelVersionRegistered, Tensor
from schemas.tensors import NAME_CHARS_MAX, TENSORS_MAX, misfit, not_text, unequal_rows
from schemas.tensors import problem as tensor_problem

EMBEDDING, TEXT_CLASSIFICATION, BYTES_CLASSIFICATION = processors.PROCESSORS
PROCESSORS = processors.PROCESSORS
TEXT_PROCESSORS = processors.TEXT_PROCESSORS
TEXT, TOKEN_IDS, LENGTHS = processors.TEXT, processors.TOKEN_IDS, processors.LENGTHS
DIMENSIONS, TOP_K = processors.DIMENSIONS, processors.TOP_K
WISHES: Mapping[str, tuple[str, ...]] = {
    EMBEDDING: (DIMENSIONS,),
    TEXT_CLASSIFICATION: (TOP_K,),
    BYTES_CLASSIFICATION: (TOP_K,),
}
"""By processor, the parameters that it reads; all are whole numbers above 0."""
PARAMETERS_MAX = 64
PARAMETER_CHARS_MAX = 1_024
WISH_MAX = 1_000_000
BATCH_MAX = 4_096
"""So many rows of a request, at most, where a processor takes rows."""
ARGS_KEPT = 256
"""Of so many versions' engine arguments it is known what they say."""

_SHOWN_MAX = 16


def input_problem(inputs: Sequence[Tensor], outputs: Sequence[str], parameters: Mapping[str, str]) -> Problem | None:
    """What is wrong with a request's tensors whatever the model, or None."""
    if not inputs:
        return Problem("inputs is empty", "inputs")
    if len(inputs) > TENSORS_MAX or len(outputs) > TENSORS_MAX:
        return Problem(f"at most {TENSORS_MAX} inputs and outputs are taken", "inputs")
    for index, tensor in enumerate(inputs):
        if (found := tensor_problem(tensor)) is not None:
            return Problem(found, f"inputs[{index}]")
    if (long := next((index for index, name in enumerate(outputs) if len(name) > NAME_CHARS_MAX), None)) is not None:
        return Problem(f"an output's name has at most {NAME_CHARS_MAX} characters", f"outputs[{long}]")
    for names, param in (([tensor.name for tensor in inputs], "inputs"), (list(outputs), "outputs")):
        if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:
            return Problem(f"`{twice}` is given twice", param)
    return _parameters_problem(parameters)


def _parameters_problem(parameters: Mapping[str, str]) -> Problem | None:
    if len(parameters) > PARAMETERS_MAX:
        return Problem(f"at most {PARAMETERS_MAX} parameters are taken", "parameters")
    for name, value in parameters.items():
        if len(name) > PARAMETER_CHARS_MAX or len(value) > PARAMETER_CHARS_MAX:
            text = f"a parameter's name and value have at most {PARAMETER_CHARS_MAX} characters each"
            return Problem(text, "parameters")
    return None


def problem(
    version: ModelVersionRegistered, inputs: Sequence[Tensor], outputs: Sequence[str], parameters: Mapping[str, str]
) -> Problem | None:
    """What a version doesn't take of well-formed inputs, or None."""
    if not version.inputs:
        return Problem(f"the model `{version.model}` takes messages or a prompt, not tensors", "inputs")
    specs = {spec.name: spec for spec in version.inputs}
    for index, tensor in enumerate(inputs):
        spec = specs.get(tensor.name)
        if spec is None:
            return Problem(_unknown("input", tensor.name, specs), f"inputs[{index}].name")
        if (found := misfit(tensor, spec) or _bytes_problem(version.processor, tensor)) is not None:
            return Problem(found, f"inputs[{index}]")
    given = {tensor.name: tensor for tensor in inputs}
    if (missing := _missing(version.processor, given, specs)) is not None:
        return Problem(missing, "inputs")
    known = [spec.name for spec in version.outputs]
    for index, name in enumerate(outputs):
        if name not in known:
            return Problem(_unknown("output", name, known), f"outputs[{index}].name")
    return _rows_problem(version, given) or _wishes_problem(version.processor, parameters)


def unfit(request: InferenceRequested, version: ModelVersionRegistered) -> Problem | None:
    """Why a request isn't one for this version, or None."""
    if request.inputs is not None:
        return problem(version, request.inputs, request.outputs, request.parameters)
    if version.inputs:
        names = ", ".join(spec.name for spec in version.inputs[:_SHOWN_MAX])
        return Problem(f"the model `{version.model}` takes tensors ({names}), not a prompt", "model")
    return None


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    shown = ", ".join(list(known)[:_SHOWN_MAX])
    return f"the model has no {kind} `{name[:PARAMETER_CHARS_MAX]}`; it has {shown}"


def _missing(processor: str, given: Collection[str], specs: Collection[str]) -> str | None:
    if processor in TEXT_PROCESSORS:
        if TEXT in given and (TOKEN_IDS in given or LENGTHS in given):
            return f"give `{TEXT}`, or `{TOKEN_IDS}` with `{LENGTHS}`, and not both"
        if TEXT in given or (TOKEN_IDS in given and LENGTHS in given):
            return None
        return f"`{TEXT}` must be given, or `{TOKEN_IDS}` with `{LENGTHS}`"
    missing = [name for name in specs if name not in given]
    return f"the input `{missing[0]}` is missing" if missing else None


def _bytes_problem(processor: str, tensor: Tensor) -> str | None:
    """Tokenizers and ONNX Runtime take elements of BYTES as text alone; one processor reads the bytes themselves."""
    return None if processor == BYTES_CLASSIFICATION else not_text(tensor)


def _rows_problem(version: ModelVersionRegistered, given: Mapping[str, Tensor]) -> Problem | None:
    if version.processor in PROCESSORS:
        return _items_problem(given, version.fixed_rows)
    if not version.batched:
        return None
    tensors = list(given.values())
    found = unequal_rows(tensors) or too_many(tensors[0].shape[0], _max_batch_size(version.engine_args))
    return None if found is None else Problem(found, "inputs")


@lru_cache(maxsize=ARGS_KEPT)
def _max_batch_size(engine_args: str) -> int:
    """What the engine arguments of a version without a processor say. Those that its worker wouldn't start with say nothing."""
    try:
        found = json.loads(engine_args).get("max_batch_size", MAX_BATCH_SIZE)
    except (ValueError, AttributeError):
        return MAX_BATCH_SIZE
    return found if type(found) is int and found > 0 else MAX_BATCH_SIZE


def _items_problem(given: Mapping[str, Tensor], fixed_rows: int) -> Problem | None:
    lengths = given.get(LENGTHS)
    rows = (lengths or next(iter(given.values()))).shape[0]
    if not 0 < rows <= BATCH_MAX:
        return Problem(f"{rows} items are given; from 1 to {BATCH_MAX} are taken", "inputs")
    if fixed_rows and rows % fixed_rows:
        return Problem(f"the model takes {fixed_rows} items at a time, and {rows} are given", "inputs")
    if lengths is None:
        return None
    counts = int32(lengths.data)
    if min(counts) < 1:
        return Problem(f"`{LENGTHS}` must be at least 1 each", "inputs")
    if sum(counts) != given[TOKEN_IDS].shape[0]:
        text = f"`{LENGTHS}` add up to {sum(counts)}, and `{TOKEN_IDS}` has {given[TOKEN_IDS].shape[0]}"
        return Problem(text, "inputs")
    return None


def int32(data: bytes) -> tuple[int, ...]:
    """The elements of an INT32 tensor."""
    return struct.unpack(f"<{len(data) // 4}i", data)


def _wishes_problem(processor: str, parameters: Mapping[str, str]) -> Problem | None:
    for name in WISHES.get(processor, ()):
        value = parameters.get(name)
        if value is not None and not (
            value.isascii() and value.isdecimal() and len(value) <= 9 and 0 < int(value) <= WISH_MAX
        ):
            return Problem(f"`{name}` must be a whole number from 1 to {WISH_MAX}", f"parameters.{name}")
    return None


def has_text(version: ModelVersionRegistered) -> bool:
    """Whether a version reads text, so that it has a tokenizer."""
    return not version.inputs or version.processor in TEXT_PROCESSORS


# --- texts as token ids ----------------------------------------------------------------------------------------------


def text_lengths(processor: str, inputs: Iterable[Tensor]) -> tuple[int, ...]:
    """The tokens of each text in prepared inputs; empty where the processor takes no text."""
    return _of(inputs, LENGTHS) if processor in TEXT_PROCESSORS else ()


def unknown_token(processor: str, inputs: Iterable[Tensor], vocab_size: int) -> int | None:
    """A token id in prepared inputs that the model doesn't have, or None. Ids run from 0 to `vocab_size` - 1."""
    ids = _of(inputs, TOKEN_IDS) if processor in TEXT_PROCESSORS else ()
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return None
    return next(each for each in ids if not 0 <= each < vocab_size)


def text_tensors(texts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Texts' token ids as a text processor takes them: one after the other, and how many each has."""
    ids = [each for text in texts for each in text]
    lengths = [len(text) for text in texts]
    return (
        Tensor(TOKEN_IDS, "INT32", (len(ids),), struct.pack(f"<{len(ids)}i", *ids)),
        Tensor(LENGTHS, "INT32", (len(lengths),), struct.pack(f"<{len(lengths)}i", *lengths)),
    )


def _of(inputs: Iterable[Tensor], name: str) -> tuple[int, ...]:
    return next((int32(tensor.data) for tensor in inputs if tensor.name == name), ())
