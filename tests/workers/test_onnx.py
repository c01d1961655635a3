"""ONNX Runtime behind the engine's port: every datatype and rank, batches whose rows stay apart, and refusals; `test_onnx_ends` has ends before the end."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from decisions.batching import PARTS_MAX
from schemas.errors import HeadraceError
from schemas.events import Tensor
from schemas.reasons import Reason
from schemas.tensors import pack
from tests.onnx_models import EXTREMES, ONNX_TYPES, RANKS, counting_rows, doubling, identity, picking, write
from tests.workers.onnx_site import array, floats, request, serving, tensor
from workers.engines.onnx import ROWS_IN_LOOP_MAX, STRINGS_IN_LOOP_MAX, VALUES_IN_LOOP_MAX, OnnxEngine
from workers.engines.onnx_session import Session
from workers.engines.port import EngineConfig, EngineError


@pytest.mark.parametrize("datatype", ONNX_TYPES)
async def test_every_datatype_and_rank_comes_back_bit_by_bit(tmp_path: Path, datatype: str) -> None:
    for rank in range(RANKS):
        shape = ("n", "a", "b", "c")[:rank]
        folder = identity(tmp_path / f"{datatype}{rank}", datatype, shape)
        values = np.empty((2, 3, 1, 2)[:rank], dtype=object)
        np.put(values, range(values.size), EXTREMES[datatype])
        sent = tensor("x", datatype, values.tolist())
        async with serving(folder) as engine:
            found = await asyncio.gather(*(engine.infer(request(sent)) for _ in range(3)))
        for result in found:
            assert result.outputs == (Tensor("y", datatype, sent.shape, sent.data),)


@pytest.mark.parametrize("datatype", ONNX_TYPES)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
async def test_a_tensor_without_elements_comes_back(tmp_path: Path, datatype: str, shape: tuple[int, ...]) -> None:
    folder = identity(tmp_path / "m", datatype, ("n", "a")[: len(shape)])
    async with serving(folder) as engine:
        found = await asyncio.gather(*(engine.infer(request(Tensor("x", datatype, shape, b""))) for _ in range(2)))
    assert [each.outputs[0] for each in found] == [Tensor("y", datatype, shape, b"")] * 2


async def test_bytes_that_are_no_text_are_refused_and_their_neighbour_is_served(tmp_path: Path) -> None:
    async with serving(identity(tmp_path, "BYTES", ("n",))) as engine:
        bad = engine.infer(request(Tensor("x", "BYTES", (1,), pack([b"\xff"]))))
        good = engine.infer(request(tensor("x", "BYTES", ["fine"])))
        refused, served = await asyncio.gather(bad, good, return_exceptions=True)
    assert isinstance(refused, HeadraceError)
    assert (refused.reason, refused.message) == (Reason.INVALID_REQUEST, "`x`: element 0 isn't UTF-8 text")
    assert array(served).tolist() == ["fine"]


class TestBatches:
    async def test_each_caller_gets_its_own_rows(self, tmp_path: Path) -> None:
        async with serving(doubling(tmp_path), max_batch_size=8, max_queue_delay_ms=50) as engine:
            sizes = [1, 3, 2, 1, 5, 8, 4]
            asked = [floats(*[[100.0 * i + row, 1.0] for row in range(size)]) for i, size in enumerate(sizes)]
            found = await asyncio.gather(*(engine.infer(request(each)) for each in asked))
        for i, (size, result) in enumerate(zip(sizes, found, strict=True)):
            assert array(result).tolist() == [[2 * (100.0 * i + row), 2.0] for row in range(size)]
            assert array(result, "sum").tolist() == [2 * (100.0 * i + row) + 2 for row in range(size)]
            assert size <= result.batch <= 8
        assert max(result.batch for result in found) > 1

    async def test_a_request_larger_than_a_batch_is_cut_and_put_together(self, tmp_path: Path) -> None:
        async with serving(doubling(tmp_path), max_batch_size=4) as engine:
            sent = np.arange(22, dtype=np.float32).reshape(11, 2)
            result = await engine.infer(request(tensor("x", "FP32", sent), outputs=("y",)))
        assert [each.name for each in result.outputs] == ["y"]
        assert np.array_equal(array(result), sent * 2)
        assert result.batch <= 4

    async def test_only_equal_shapes_share_a_batch(self, tmp_path: Path) -> None:
        async with serving(doubling(tmp_path), max_queue_delay_ms=20) as engine:
            narrow, wide = floats([1, 2]), floats([1, 2, 3])
            found = await asyncio.gather(*(engine.infer(request(each)) for each in (narrow, wide, narrow)))
        assert [each.batch for each in found] == [2, 1, 2]
        assert array(found[1]).tolist() == [[2, 4, 6]]

    async def test_a_neighbour_at_fault_fails_alone(self, tmp_path: Path) -> None:
        async with serving(picking(tmp_path), max_queue_delay_ms=20) as engine:
            asked = [engine.infer(request(tensor("x", "INT64", [[i]]))) for i in (0, 7, 2)]
            first, bad, last = await asyncio.gather(*asked, return_exceptions=True)
        assert (array(first).tolist(), array(last).tolist()) == ([[10.0]], [[30.0]])
        assert isinstance(bad, EngineError)
        assert bad.reason is Reason.ENGINE_ERROR
        assert "the model failed: " in bad.message
        assert "indices element out of data bounds, idx=7" in bad.message

    async def test_a_shape_that_its_bytes_do_not_fill_is_refused_beside_one_that_is_right(self, tmp_path: Path) -> None:
        """triton#7171, for what comes past the front door."""
        async with serving(doubling(tmp_path), max_queue_delay_ms=20) as engine:
            seven = Tensor("x", "FP32", (1, 5), bytes(4 * 7))
            wrong, right = await asyncio.gather(
                engine.infer(request(seven)), engine.infer(request(floats([1, 2, 3, 4, 5]))), return_exceptions=True
            )
        assert isinstance(wrong, HeadraceError)
        assert (wrong.reason, "doesn't take 7 elements" in wrong.message) == (Reason.INVALID_REQUEST, True)
        assert array(right).tolist() == [[2, 4, 6, 8, 10]]

    @pytest.mark.parametrize("name", ["found", None], ids=["named", "nameless"])
    async def test_where_rows_cannot_be_told_apart_requests_run_by_themselves(
        self, tmp_path: Path, name: str | None
    ) -> None:
        async with serving(counting_rows(tmp_path, name), max_queue_delay_ms=20) as engine:
            assert engine.file is not None
            assert engine.file.batched is (name is None), "a name of its own tells that it counts something else"
            asked = [floats([1, 0]), floats([1, 1]), floats([0, 1])]
            for _ in range(2):
                found = await asyncio.gather(*(engine.infer(request(each)) for each in asked))
                assert [array(each).tolist() for each in found] == [[[0, 0]], [[0, 0], [0, 1]], [[0, 1]]]

    async def test_others_still_run_together(self, tmp_path: Path) -> None:
        """A caller chooses its shapes, and what comes of them; it doesn't choose for others."""
        async with serving(counting_rows(tmp_path, None), max_queue_delay_ms=60_000, max_batch_size=4) as engine:
            apart, alike = floats([1, 1], [1, 0]), floats([1], [1])
            found = await asyncio.gather(*(engine.infer(request(apart)) for _ in range(2)))
            assert [array(each).tolist() for each in found] == [[[0, 0], [0, 1], [1, 0]]] * 2
            found = await asyncio.gather(*(engine.infer(request(alike)) for _ in range(2)))
            assert [each.batch for each in found] == [4, 4]

    async def test_a_model_of_fixed_size_is_not_batched(self, tmp_path: Path) -> None:
        async with serving(doubling(tmp_path, (2, 3)), max_queue_delay_ms=10_000) as engine:
            right = floats([1, 2, 3], [4, 5, 6])
            found = await asyncio.gather(*(engine.infer(request(right)) for _ in range(3)))
            with pytest.raises(HeadraceError, match=r"takes the shape \[2, 3\], not \[1, 3\]") as refused:
                await engine.infer(request(floats([1, 2, 3])))
        assert refused.value.reason is Reason.INVALID_REQUEST
        assert [array(each, "sum").tolist() for each in found] == [[12, 30]] * 3

    async def test_inputs_with_rows_of_their_own_are_not_batched(self, tmp_path: Path) -> None:
        from onnx import helper

        node = helper.make_node("Concat", ["a", "b"], ["y"], axis=0)
        folder = write(tmp_path, [node], [("a", "FP32", ("n",)), ("b", "FP32", ("m",))], [("y", "FP32", ("both",))])
        async with serving(folder) as engine:
            asked = request(tensor("a", "FP32", [1, 2]), tensor("b", "FP32", [3]))
            found = await asyncio.gather(*(engine.infer(asked) for _ in range(2)))
        assert [array(each).tolist() for each in found] == [[1, 2, 3]] * 2


@pytest.mark.parametrize(
    ("cores", "args", "threads"),
    [
        (8, {"instances": None}, [4, 4]),
        (2, {"instances": None}, [1]),
        (1, {"instances": None}, [1]),
        (8, {"instances": 1}, [8]),
        (8, {"instances": 3}, [2, 2, 2]),
        (1, {"instances": 2}, [1]),
        (8, {"instances": 2, "intra_op_threads": 3}, [3, 3]),
    ],
)
async def test_instances_share_the_machines_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, args: dict[str, Any], threads: list[int]
) -> None:
    """The threads of each session. Runs of one thread share a session."""
    begun: list[int] = []

    class Watched(Session):
        def __init__(self, folder: Path, threads: int) -> None:
            super().__init__(folder, threads)
            begun.append(self._session.get_session_options().intra_op_num_threads)

    monkeypatch.setattr("workers.engines.onnx.Session", Watched)
    monkeypatch.setattr("workers.engines.onnx.usable_cores", lambda: cores)
    async with serving(doubling(tmp_path), **args):
        assert begun == threads


class TestTheEventLoop:
    """It has others to serve: what takes long is done in a thread."""

    @pytest.mark.parametrize(
        ("sent", "prepared_aside", "finished_aside"),
        [
            (tensor("x", "FP32", np.zeros((4, 2))), False, False),
            (tensor("x", "FP32", np.zeros((4, VALUES_IN_LOOP_MAX // 4))), False, True),
            (tensor("x", "FP32", np.zeros((ROWS_IN_LOOP_MAX + 1, 2))), True, True),
        ],
    )
    async def test_large_requests_and_answers_are_not_its_work(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: Tensor, prepared_aside: bool, finished_aside: bool
    ) -> None:
        async with serving(doubling(tmp_path), max_batch_size=32) as engine:
            aside = self.watch(monkeypatch, engine)
            result = await engine.infer(request(sent))
            assert aside == {"prepare": prepared_aside, "finish": finished_aside}
            assert array(result).shape == sent.shape

    async def test_nor_are_many_texts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        async with serving(identity(tmp_path, "BYTES", ("n",))) as engine:
            for count in (STRINGS_IN_LOOP_MAX, STRINGS_IN_LOOP_MAX + 1):
                aside = self.watch(monkeypatch, engine)
                result = await engine.infer(request(tensor("x", "BYTES", ["a"] * count)))
                assert aside == dict.fromkeys(("prepare", "finish"), count > STRINGS_IN_LOOP_MAX)
                assert array(result).tolist() == ["a"] * count

    async def test_what_fails_there_fails_as_ever(self, tmp_path: Path) -> None:
        async with serving(identity(tmp_path, "BYTES", ("n",))) as engine:
            bad = Tensor("x", "BYTES", (100,), pack([b"\xff"] * 100))
            with pytest.raises(HeadraceError, match="isn't UTF-8") as refused:
                await engine.infer(request(bad))
        assert refused.value.reason is Reason.INVALID_REQUEST

    @staticmethod
    def watch(monkeypatch: pytest.MonkeyPatch, engine: OnnxEngine) -> dict[str, bool]:
        """Whether each was done in another thread than this."""
        aside: dict[str, bool] = {}
        processor: Any = engine._processor
        here, prepare = threading.current_thread(), type(processor).prepare

        def watched(asked: Any) -> Any:
            aside["prepare"] = threading.current_thread() is not here
            prepared = prepare(processor, asked)

            def finish(done: Any) -> Any:
                aside["finish"] = threading.current_thread() is not here
                return prepared.finish(done)

            return replace(prepared, finish=finish)

        monkeypatch.setattr(processor, "prepare", watched)
        return aside


class TestRefusals:
    @pytest.mark.parametrize(
        ("asked", "told"),
        [
            (request(), "the input `x` is missing"),
            (request(floats([1, 2]), tensor("z", "FP32", [1])), "no input `z`; it has x"),
            (request(tensor("x", "FP64", [[1]])), "takes FP32, not FP64"),
            (request(tensor("x", "FP32", [1])), r"takes the shape \[-1, -1\], not \[1\]"),
            (request(floats([1, 2]), outputs=("z",)), "no output `z`; it has y, sum"),
            (request(floats([1, 2]), floats([3, 4])), "`x` is given twice"),
        ],
    )
    async def test_what_the_model_does_not_take_is_refused_in_words(self, tmp_path: Path, asked, told: str) -> None:
        async with serving(doubling(tmp_path)) as engine:
            with pytest.raises(HeadraceError, match=told) as refused:
                await engine.infer(asked)
        assert refused.value.reason is Reason.INVALID_REQUEST

    @pytest.mark.parametrize(
        ("bad", "told"),
        [
            (Tensor("x", "FP32", (1, 2), bytes(7)), "`x`: its bytes are no elements of FP32"),
            (Tensor("x", "FP32", (1, 2), bytes(12)), r"`x`: the shape \[1, 2\] doesn't take 3 elements"),
            (Tensor("x", "FP32", (-1, 2), bytes(8)), r"`x`: the shape \[-1, 2\] doesn't take 2 elements"),
            (Tensor("x", "FP32", (-1, -2), bytes(8)), r"`x`: the shape \[-1, -2\] doesn't take 2 elements"),
        ],
    )
    async def test_bytes_that_are_not_what_they_are_said_to_be_are_refused_in_words(
        self, tmp_path: Path, bad: Tensor, told: str
    ) -> None:
        async with serving(doubling(tmp_path)) as engine:
            with pytest.raises(HeadraceError, match=told) as refused:
                await engine.infer(request(bad))
        assert refused.value.reason is Reason.INVALID_REQUEST

    async def test_nor_are_cut_texts_taken(self, tmp_path: Path) -> None:
        async with serving(identity(tmp_path, "BYTES", ("n",))) as engine:
            with pytest.raises(
                HeadraceError, match="`x`: its bytes are no elements of BYTES: an element of"
            ) as refused:
                await engine.infer(request(Tensor("x", "BYTES", (1,), b"\xff\0\0\0a")))
        assert refused.value.reason is Reason.INVALID_REQUEST

    async def test_a_file_that_is_no_model_is_refused_at_the_start(self, tmp_path: Path) -> None:
        with pytest.raises(HeadraceError, match=r"holds no model\.onnx"):
            await OnnxEngine(EngineConfig("m", str(tmp_path), 1, 8)).start()
        (tmp_path / "model.onnx").write_bytes(b"junk")
        with pytest.raises(HeadraceError, match=r"model\.onnx can't be loaded: .*[Pp]rotobuf"):
            await OnnxEngine(EngineConfig("m", str(tmp_path), 1, 8)).start()

    async def test_more_rows_than_a_request_may_be_cut_into_are_refused(self, tmp_path: Path) -> None:
        """Whether they have elements or not: each part is a place in the queue."""
        async with serving(doubling(tmp_path), max_batch_size=2) as engine:
            rows = 2 * PARTS_MAX
            with pytest.raises(HeadraceError, match=f"{rows + 1} rows are given; at most {rows} are taken") as refused:
                await engine.infer(request(Tensor("x", "FP32", (rows + 1, 0), b"")))
            assert refused.value.reason is Reason.INVALID_REQUEST
            assert engine.stats().waiting == 0

    def test_an_unknown_argument_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(
            HeadraceError, match=r"engine_args\.threads is unknown; the engine onnx takes max_batch_size"
        ):
            OnnxEngine(EngineConfig("m", str(tmp_path), 1, 8, {"threads": 2}))


async def test_numbers_of_half_a_width_beside_strings_are_refused_when_the_model_is_loaded(tmp_path: Path) -> None:
    given = [("x", "BF16", ("n",)), ("text", "BYTES", ("n",))]
    nodes = [helper.make_node("Identity", [name], [f"{name}_back"]) for name, _, _ in given]
    folder = write(tmp_path / "both", nodes, given, [(f"{name}_back", kind, shape) for name, kind, shape in given])
    with pytest.raises(HeadraceError, match="one or the other"):
        async with serving(folder):
            pass
