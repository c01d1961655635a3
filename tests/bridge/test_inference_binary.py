"""Properties of the binary tensor extension: every tensor's bytes come back as they went, and what doesn't add up is the caller's fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import httpx
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridge.inference.asking import Answer
from bridge.inference.rest_answers import rendered
from bridge.inference.rest_requests import LENGTH_HEADER, read_ask, split
from decisions.batching import PARTS_MAX
from decisions.signature import input_problem
from schemas.errors import HeadraceError
from schemas.parts import Tensor
from schemas.reasons import Reason
from schemas.tensors import BYTES, DATATYPES, ITEM_BYTES, elements, pack
from tests.bridge.conftest import RunningBridge
from tests.bridge.tensors import ADD, RANKS_MAX, back

EXAMPLES = 6


@dataclass(frozen=True)
class Body:
    """A request's body in its parts. `sizes` and `length` are what it says of itself, which may be wrong."""

    inputs: tuple[Tensor, ...]
    sizes: tuple[object, ...]
    data: bytes
    length: str | None = ""

    @property
    def head(self) -> bytes:
        told = [
            {"name": t.name, "datatype": t.datatype, "shape": t.shape, "parameters": {"binary_data_size": size}}
            for t, size in zip(self.inputs, self.sizes, strict=True)
        ]
        return orjson.dumps({"id": "mine", "inputs": told, "parameters": {"binary_data_output": True}})

    @property
    def raw(self) -> bytes:
        return self.head + self.data

    @property
    def told(self) -> str | None:
        """The header's value; the right one for ""."""
        return str(len(self.head)) if self.length == "" else self.length


def body(inputs: Sequence[Tensor]) -> Body:
    """The right body for these."""
    return Body(tuple(inputs), tuple(len(t.data) for t in inputs), b"".join(t.data for t in inputs))


@st.composite
def ranked(draw: st.DrawFn, datatype: str, rank: int) -> Tensor:
    """Any tensor of a datatype and rank, every bit pattern of it included. Text is text, as most models read it."""
    shape = tuple(draw(st.lists(st.integers(0, 3), min_size=rank, max_size=rank)))
    count = elements(shape)
    if datatype == BYTES:
        data = pack(text.encode() for text in draw(st.lists(st.text(max_size=4), min_size=count, max_size=count)))
    elif datatype == "BOOL":
        data = bytes(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    else:
        size = count * ITEM_BYTES[datatype]
        data = draw(st.binary(min_size=size, max_size=size))
    return Tensor(f"x{rank}", datatype, shape, data)


def all_ranks(datatype: str) -> st.SearchStrategy[Body]:
    """A request of one tensor of each rank."""
    return st.tuples(*(ranked(datatype, rank) for rank in range(RANKS_MAX + 1))).map(body)


BODIES = st.sampled_from(DATATYPES).flatmap(all_ranks)

# What is wrong with each of these shows in nothing but the sizes, the header or the data.
Wrong = Callable[[Body, int], Body]


def _sizes(found: Body, index: int, size: object) -> Body:
    return replace(found, sizes=(*found.sizes[:index], size, *found.sizes[index + 1 :]))


def _size_of(by: int) -> Wrong:
    return lambda found, index: _sizes(found, index, len(found.inputs[index].data) + by)


def _size_as(size: object) -> Wrong:
    return lambda found, index: _sizes(found, index, size)


def _header(of: Callable[[Body, int], str | None]) -> Wrong:
    return lambda found, index: replace(found, length=of(found, index))


def _reshaped(tensor: Tensor) -> Tensor:
    """The same data as one element more, or as one where there is none."""
    *rows, last = tensor.shape
    return replace(tensor, shape=(*rows, last + 1) if elements(rows) else (1,) * len(tensor.shape))


WRONG: dict[str, Wrong] = {
    "more data than is told": lambda found, index: replace(found, data=found.data + bytes(index + 1)),
    "no data": lambda found, index: replace(found, data=b"") if found.data else replace(found, data=b"\0"),
    "data that is cut": lambda found, index: replace(found, data=found.data[:-1] if found.data else b"\0"),
    "a size too large by one": _size_of(1),
    "a size too small by one": _size_of(-1),
    "a size of its own invention": _size_of(1 << 40),
    "a negative size": _size_as(-1),
    "a size that is text": _size_as("8"),
    "a size with a point": _size_as(8.0),
    "a size that is true": _size_as(True),
    "no header": _header(lambda found, index: None),
    "a header too small": _header(lambda found, index: str(len(found.head) - index - 1)),
    "a header too large by one": _header(lambda found, index: str(len(found.head) + 1)),
    "a header beyond the body": _header(lambda found, index: str(len(found.raw) + index + 1)),
    "a header of 0": _header(lambda found, index: "0"),
    "a negative header": _header(lambda found, index: "-1"),
    "a header that is no number": _header(lambda found, index: "many"),
    "a header of many digits": _header(lambda found, index: "9" * 40),
    "another shape": lambda found, index: replace(found, inputs=(*found.inputs[:-1], _reshaped(found.inputs[-1]))),
}  # fmt: skip


def refused(found: Body) -> HeadraceError | None:
    """What the front door says to it before the log, if anything. Whatever else is raised is a fault of ours."""
    try:
        ask = read_ask(found.raw, found.told, "m", "")
    except HeadraceError as error:
        return error
    problem = input_problem(ask.inputs, (), {})
    return None if problem is None else HeadraceError(Reason.INVALID_REQUEST, problem.message)


@given(BODIES)
def test_what_goes_as_binary_data_is_read_as_it_went(asked: Body) -> None:
    assert refused(asked) is None
    ask = read_ask(asked.raw, asked.told, "m", "")
    assert (ask.inputs, ask.binary, ask.id) == (asked.inputs, True, "mine")


@given(BODIES, st.booleans())
def test_and_an_answers_too(asked: Body, whole: bool) -> None:
    """Each output's data stands in its place; read as a caller reads it."""
    ask = read_ask(asked.raw, asked.told, "m", "")
    written, headers = rendered(ask, Answer("m", "1", "mine", asked.inputs, {}))
    head, data = split(written, headers[LENGTH_HEADER])
    at = 0
    for tensor, told in zip(asked.inputs, orjson.loads(head)["outputs"], strict=True):
        size = told["parameters"]["binary_data_size"]
        assert (told["name"], told["datatype"], tuple(told["shape"])) == (tensor.name, tensor.datatype, tensor.shape)
        assert data[at : at + size] == tensor.data
        at += size
    assert at == len(data)


@pytest.mark.parametrize("what", WRONG)
@given(asked=BODIES, index=st.integers(0, RANKS_MAX))
@settings(max_examples=20, deadline=None)
def test_what_does_not_add_up_is_the_callers_fault(what: str, asked: Body, index: int) -> None:
    found = refused(WRONG[what](asked, index))
    assert found is not None
    assert found.reason.http_status == 400
    assert found.message


@given(BODIES, st.data())
def test_no_bytes_whatever_are_a_fault_of_ours(asked: Body, data: st.DataObject) -> None:
    """A body that is cut, with some of it overwritten, and a header of any value."""
    raw = bytearray(asked.raw)
    for at in data.draw(st.lists(st.integers(0, len(raw) - 1), max_size=4)):
        raw[at] = data.draw(st.integers(0, 255))
    cut = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    length = data.draw(st.none() | st.just(asked.told) | st.integers(-2, len(raw) + 2).map(str) | st.text(max_size=3))
    try:
        ask = read_ask(cut, length, "m", "")
    except HeadraceError as error:
        status = error.reason.http_status
    else:
        input_problem(ask.inputs, (), {})
        status = 400
    assert status == 400


# --- over HTTP --------------------------------------------------------------------------------------------------------


def post(http: httpx.Client, datatype: str, asked: Body) -> httpx.Response:
    headers = {} if asked.told is None else {LENGTH_HEADER: asked.told}
    return http.post(f"/v2/models/{back(datatype)}/infer", content=asked.raw, headers=headers)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_each_datatype_and_rank_comes_back_bit_by_bit(http: httpx.Client, datatype: str) -> None:
    @given(all_ranks(datatype))
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def ask(asked: Body) -> None:
        answer = post(http, datatype, asked)
        assert answer.status_code == 200, answer.text
        head, data = split(answer.content, answer.headers[LENGTH_HEADER])
        outputs = orjson.loads(head)["outputs"]
        assert [(o["name"], o["datatype"], tuple(o["shape"])) for o in outputs] == [
            (t.name, t.datatype, t.shape) for t in asked.inputs
        ]
        assert [o["parameters"]["binary_data_size"] for o in outputs] == list(asked.sizes)
        assert data == asked.data

    ask()


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_add_up_never_reaches_the_log(http: httpx.Client, bridge: RunningBridge, what: str) -> None:
    before = len(bridge.responder.seen)

    @given(asked=BODIES, index=st.integers(0, RANKS_MAX))
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def ask(asked: Body, index: int) -> None:
        answer = post(http, asked.inputs[0].datatype, WRONG[what](asked, index))
        assert (answer.status_code, list(answer.json())) == (400, ["error"])

    ask()
    assert len(bridge.responder.seen) == before


def test_more_rows_than_a_request_can_be_cut_into_are_refused_before_the_log(
    http: httpx.Client, bridge: RunningBridge
) -> None:
    def ask(count: int) -> httpx.Response:
        inputs = [{"name": name, "datatype": "FP32", "shape": [count, 3], "data": [1] * 3 * count} for name in "ab"]
        return http.post(f"/v2/models/{ADD}/infer", json={"inputs": inputs})

    before = len(bridge.responder.seen)
    refused = ask(PARTS_MAX + 1)
    assert (refused.status_code, len(bridge.responder.seen)) == (400, before)
    assert refused.json()["error"].startswith(f"{PARTS_MAX + 1} rows are given; at most {PARTS_MAX} are taken at once")
    assert ask(PARTS_MAX).status_code == 200
