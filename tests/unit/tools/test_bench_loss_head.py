"""tools/bench: the counts of the loss head's benchmark, results that it refuses to time, and the bars for counts."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from sft.config import LossConfig
from sft.estimate import model_bytes
from sft.mcore.loss import softmax
from sft.mcore.process_groups import parallel_state
from tests.ranks.pool import RankPool, join
from tools.bench import __main__ as bench
from tools.bench import loss_head, loss_problem
from tools.bench import ranks as bench_ranks
from tools.bench.clock import check_close, medians
from tools.bench.counter import Counter
from tools.bench.harness import Bar, Refused, Row
from tools.bench.loss_head import bars
from tools.bench.loss_problem import BASELINE, Problem, Sizes, count, make_problem, measure

ESTIMATE_TOLERANCE = 0.05  # numbers of rows, and of the bucket, are not in the estimate
TINY = Sizes(tokens=24, hidden=8, vocab=50, chunks=(5, 9))
ALL_WAYS = ["fused 5", "fused 9", "distilled 9", "frozen 9", "chunked", "full", BASELINE]


@pytest.fixture
def world() -> Iterator[None]:
    with bench_ranks.alone("cpu"):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
        yield
        parallel_state.destroy_model_parallel()


def tiny(**changes: Any) -> Problem:
    return make_problem(replace(TINY, **changes))


def rows_of(results: dict[str, Row], sizes: Sizes = Sizes(), device: str = "cpu") -> list[Row]:
    """The rows of one case in the form in which bars get them."""
    facts = {
        "tokens": sizes.tokens, "hidden": sizes.hidden, "vocab": sizes.vocab, "fraction": sizes.fraction, "tp": 1,
        "supervised": sizes.num_supervised, "dtype": "fp32" if device == "cpu" else "bf16", "device": device,
        "unit": 2 * sizes.tokens * sizes.hidden * sizes.vocab,
    }  # fmt: skip
    return [{**facts, "way": name, **result} for name, result in results.items()]


def missed(rows: list[Row]) -> list[Bar]:
    return [bar for bar in bars(rows) if bar.is_missed]


# --- bytes, by hand: 400 bytes are 100 floats ----------------------------------------------------------------


def test_most_bytes_alive_at_once() -> None:
    with Counter() as counter:
        a = torch.empty(100)
        b = torch.empty(50)  # 600
        del a
        c = torch.empty(75)  # 500
        del b, c
        torch.empty(25)
    assert counter.peak_bytes() == 600
    with Counter() as counter:
        part = torch.empty(100).view(10, 10)[2:4].t()
        other = torch.empty(50)
    assert counter.peak_bytes() == 600  # a view of 20 keeps the 100 alive
    del part, other


def test_tensors_beyond_which_is_counted() -> None:
    given, out = torch.ones(1000), torch.ones(1000)
    with Counter() as counter:
        torch.add(given, 1, out=out.add_(1))  # allocates nothing
        kept = given + 1  # 4000
        (kept * 2).sum()  # 4000 and 4
    assert counter.peak_bytes(beyond=[given, out]) == 8004
    # tensors share bytes if they share a storage
    assert counter.peak_bytes(beyond=[out, given[5:], kept.view(10, 100)]) == 4004


# --- FLOPs and bytes sent ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.0])
def test_flops_are_six_per_supervised_token_and_trained_weight(fraction: float) -> None:
    p = tiny(fraction=fraction)
    weights, rows = 8 * 50, round(24 * fraction)
    units = {name: count(p, name)["flops"] / weights for name in p.ways}
    every = dict.fromkeys(["chunked", "full", BASELINE], 6 * 24)
    supervised = {"fused 5": 6 * rows, "fused 9": 6 * rows, "distilled 9": 6 * rows, "frozen 9": 4 * rows}
    assert units == {**every, **supervised}


def rows_of_two() -> list[Row]:
    join()
    rows = loss_head.measure_on_rank(TINY, ["fused", "frozen", "distilled"], 1)
    dist.destroy_process_group()
    return rows


def test_two_ranks_send_what_the_loss_head_says(ranks: Callable[[int], RankPool]) -> None:
    """24 tokens of width 8: 3 floats each for the statistics, and the gradient of the hidden states.

    A teacher adds the scores of its list of 50 tokens, and 3 floats of the other scores.
    """
    rows = {row["way"]: row for row in ranks(2).run(rows_of_two)[0]}
    assert list(rows) == ["full", "fused 5", "fused 9", "distilled 9", "frozen 9"]
    assert {rows[name]["bytes_sent"] for name in ("fused 5", "fused 9", "frozen 9")} == {24 * (3 + 8) * 4}
    assert rows["distilled 9"]["bytes_sent"] == 24 * (3 + 8 + 50 + 3) * 4
    assert {name: row["gemm"] for name, row in rows.items()} == {**dict.fromkeys(rows, 3.0), "frozen 9": 2.0}
    assert not missed(list(rows.values()))


# --- bars for counts -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("fraction", [1.0, 0.1, 0.0])
def test_the_loss_meets_the_bars_of_counts(fraction: float) -> None:
    """At the default sizes, with fake tensors, which have storages without contents."""
    sizes = Sizes(fraction=fraction)
    with FakeTensorMode():
        p = make_problem(sizes, ["fused", "frozen", "distilled"])
        rows = rows_of({name: count(p, name) for name in p.ways}, sizes)
    # FLOPs and bytes of two chunk sizes, of a frozen weight and of a teacher; the teacher has a bar of bytes at 1 only
    assert len(list(bars(rows))) == (8 if fraction == 1.0 else 7)
    assert not missed(rows)


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("fraction, chunk", [(1.0, 256), (0.1, 128)])
def test_extra_bytes_do_not_grow_with_the_tokens(fraction: float, chunk: int) -> None:
    extra = []
    for tokens in (2048, 4096):
        sizes = Sizes(tokens=tokens, hidden=8, vocab=512, fraction=fraction, chunks=(chunk,))
        extra.append(count(make_problem(sizes, ["fused"]), f"fused {chunk}")["extra"])
    assert 0 <= extra[1] - extra[0] <= 32 * 2048


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("impl", ["fused", "chunked", "full"])
def test_a_teacher_takes_the_bytes_of_the_estimate(
    impl: Literal["fused", "chunked", "full"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """512 tokens, lists of 64, chunks of 128; blocks of the softmax are small here, as in a real head."""
    monkeypatch.setitem(softmax._BLOCK_BYTES, "cpu", 1 << 14)
    p = make_problem(Sizes(tokens=512, hidden=8, vocab=4096, chunks=(128,)), ["fused", "distilled", "chunked", "full"])
    plain = "fused 128" if impl == "fused" else impl
    distilled = p.ways["distilled 128"]
    assert isinstance(distilled, partial)
    p.ways["taught"] = partial(p.ways[plain], to=distilled.keywords["to"])
    counted = count(p, "taught")["extra"] - count(p, plain)["extra"]
    loss = LossConfig(impl=impl, chunk_size=None if impl == "full" else 128)
    estimated = model_bytes._divergence(loss, 4096, 512, 64) - 8 * 64 * 512  # the teacher's lists are inputs
    assert counted == pytest.approx(estimated, rel=ESTIMATE_TOLERANCE)


SCORES = 256 * 32_768 * 4
FLOPS = 6 * 2048 * 1024 * 32_768
GOOD = {"seconds": 0.1, "extra": SCORES, "flops": FLOPS}


DISTILLED = {"seconds": 0.114, "extra": int(1.09 * SCORES), "flops": FLOPS}
TRAINED = {**GOOD, "total": 5 * 2**27}
FROZEN = {"seconds": 0.074, "total": 4 * 2**27, "flops": FLOPS // 3 * 2}  # the weight has 2**27 bytes


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, ""),
        ({"fused 256": {**GOOD, "seconds": 0.109}}, f"fused 256, time / time of {BASELINE}: 1.09, at most 1.08"),
        ({"fused 256": {**GOOD, "extra": int(1.03 * SCORES)}}, "extra bytes: 34,561,064, at most 34,291,057"),
        ({"fused 256": {**GOOD, "flops": FLOPS + 1}}, f"fused 256, FLOPs: {FLOPS + 1:,}, exactly {FLOPS:,}"),
        ({"fused 256": {"status": "out of memory"}}, ""),
        ({"fused 256": TRAINED, "frozen 256": FROZEN}, ""),
        ({"distilled 256": DISTILLED}, ""),
        (
            {"distilled 256": {**DISTILLED, "seconds": 0.116}},
            "distilled 256, time / time of fused 256: 1.16, at most 1.15",
        ),
        (
            {"distilled 256": {**DISTILLED, "extra": int(1.11 * SCORES)}},
            "distilled 256, extra bytes / those of fused 256: 1.11, at most 1.1",
        ),
        (
            {"fused 256": TRAINED, "frozen 256": {**FROZEN, "seconds": 0.076}},
            "frozen 256, time / time of fused 256: 0.76, at most 0.75",
        ),
        (
            {"fused 256": TRAINED, "frozen 256": {**FROZEN, "total": 4 * 2**27 + 1}},
            f"frozen 256, total bytes: {4 * 2**27 + 1:,}, at most {4 * 2**27:,}",
        ),
        (
            {"fused 256": TRAINED, "frozen 256": {**FROZEN, "flops": FLOPS}},
            f"frozen 256, FLOPs: {FLOPS:,}, exactly {FLOPS // 3 * 2:,}",
        ),
    ],
)
def test_a_missed_bar_is_named(changes: dict[str, Row], message: str) -> None:
    rows = rows_of({BASELINE: {"seconds": 0.1}, "fused 256": GOOD, **changes})
    assert len(missed(rows)) == bool(message) and all(message in str(bar) for bar in missed(rows))


def test_the_bars_on_cuda() -> None:
    sizes, flops = Sizes(tokens=262_144, hidden=2048, vocab=62_080), 6 * 262_144 * 2048 * 62_080
    fits = {"seconds": 0.300, "total": int(3.2 * 2**30), "flops": flops}
    assert not missed(rows_of({"fused 4096": fits}, sizes, "cuda"))
    not_quite = {"seconds": 0.317, "total": int(3.4 * 2**30), "flops": flops}
    assert [str(bar) for bar in missed(rows_of({"fused 4096": not_quite}, sizes, "cuda"))] == [
        "MISSED        fraction 1, fused 4096, ms: 317, at most 316",
        "MISSED        fraction 1, fused 4096, GiB: 3.4, at most 3.3",
    ]


# --- results that must agree before they are timed -----------------------------------------------------------


def test_calls_take_turns_after_a_round_that_warms_up() -> None:
    order: list[str] = []
    seconds = iter([9.0, 9.0, 1.0, 5.0, 3.0, 7.0, 2.0, 6.0])
    calls = {name: (lambda name=name: order.append(name)) for name in "ab"}

    def clock(call: Any) -> float:
        call()
        return next(seconds)

    assert medians(calls, repeats=3, clock=clock) == {"a": 2.0, "b": 6.0}
    assert order == ["a", "b"] * 4


def test_a_wrong_gradient_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    loss = loss_problem.lm_loss
    monkeypatch.setattr(loss_problem, "lm_loss", lambda *a: (1.001 * loss(*a)[0],))
    monkeypatch.setattr(loss_problem, "medians", lambda *a, **k: pytest.fail("a wrong way was timed"))
    assert bench.main(["loss_head", "--tiny"]) == 2
    output = capsys.readouterr()
    assert "fused 5: gradient 0 differs by" in output.err and BASELINE not in output.out  # no row is printed


def test_which_results_are_close() -> None:
    right = [torch.ones(3), torch.ones(4)]
    check_close("way", {"a": right[0], "b": right[1]}, right, 1e-5)
    with pytest.raises(Refused, match="way: b differs by 1 from a norm of 2"):
        check_close("way", {"a": right[0], "b": torch.tensor([1.0, 1, 1, 2])}, right, 1e-5)
    with pytest.raises(Refused, match="way: b differs by"):
        check_close("way", {"a": right[0], "b": right[1] * torch.nan}, right, 1e-5)
    with pytest.raises(Refused, match="way: 1 results; expected 2"):
        check_close("way", {"a": right[0]}, right, 1e-5)
    with pytest.raises(Refused):  # without a supervised token, gradients must be exactly 0
        check_close("way", {"a": torch.full((4,), 1e-9)}, [torch.zeros(4)], 1e-5)


@pytest.mark.usefixtures("world")
def test_out_of_memory_is_a_row() -> None:
    def too_much() -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    p = tiny()
    p.ways["fused 5"] = too_much
    rows = {row["way"]: row for row in measure(p, tiny(tokens=10), repeats=1)}
    assert {name for name, row in rows.items() if row["status"] == "done"} == {*ALL_WAYS} - {"fused 5"}
    assert rows["fused 5"]["status"] == "out of memory" and rows["fused 5"]["seconds"] is None
