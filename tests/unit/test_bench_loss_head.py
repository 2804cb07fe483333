"""tools/bench_loss_head.py: what it counts, what it refuses to time, and the bars that are counts.

Bytes at the default shape are counted on fake tensors, which have storages and no contents.
"""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from tools import bench_loss_head as bench
from tools.bench_loss_head import BASELINE, CONCATENATE, RECOMPUTE, Block, Counter, Problem, Result, Shape

CPU = torch.device("cpu")
TINY = Shape(tokens=24, hidden=8, vocab=50)
# Narrow, so that it is fast; the scores are as wide as at the default shape, and so is what 2% of a chunk must hold.
NARROW = Shape(tokens=512, hidden=64, vocab=32_768)
TINY_COMMAND = ["--device", "cpu", "--tokens", "24", "--hidden", "8", "--vocab", "50", "--chunks", "5,9"]
TINY_COMMAND += ["--repeats", "1"]
ALL_ROWS = ["fused 5", "fused 9", "chunked", "full", "token_statistics", BASELINE, CONCATENATE, RECOMPUTE]


@pytest.fixture
def world() -> Iterator[None]:
    with bench.world("cpu", 0, 1):
        yield


def problem(
    shape: Shape = TINY,
    fraction: float = 1.0,
    chunks: tuple[int, ...] = (5, 9),
    dtype: torch.dtype = torch.float32,
    only: list[str] = bench.ROWS,
) -> Problem:
    return bench.loss_head(shape, fraction=fraction, chunks=chunks, dtype=dtype, device=CPU, only=only)


def block(results: dict[str, Result], shape: Shape = TINY, fraction: float = 1.0, device_type: str = "cpu") -> Block:
    dtype = torch.float32 if device_type == "cpu" else torch.bfloat16
    return Block(shape=shape, fraction=fraction, dtype=dtype, device_type=device_type, tp=1, results=results)


def missed(of: Block) -> list[str]:
    return [words for words, met in bench.bars(of) if not met]


# --- bytes: written out, 400 bytes are 100 floats ------------------------------------------------------------


def test_most_bytes_alive_at_once() -> None:
    with Counter() as counter:
        a = torch.empty(100)
        b = torch.empty(50)  # 600
        del a
        c = torch.empty(75)  # 500
        del b, c
        torch.empty(25)
    assert counter.peak_bytes() == 600


def test_what_is_freed_at_once_does_not_add_up() -> None:
    with Counter() as counter:
        for _ in range(100):
            torch.empty(100)
    assert counter.peak_bytes() == 400


def test_a_loop_variable_lives_until_it_is_assigned_again() -> None:
    with Counter() as counter:
        for _ in range(3):
            a = torch.empty(100)
    assert counter.peak_bytes() == 800
    del a


def test_views_share_their_storage_and_keep_it() -> None:
    with Counter() as counter:
        part = torch.empty(100).view(10, 10)[2:4].t()
        other = torch.empty(50)
    assert counter.peak_bytes() == 600  # the 100 are alive through a view of 20
    del part, other


def test_operations_in_place_and_with_out_allocate_nothing() -> None:
    a, b, c = torch.ones(10, 10), torch.ones(10, 10), torch.ones(10, 10)
    with Counter() as counter:
        a.add_(1).exp_()
        torch.mm(a, b, out=c)
        torch.addmm(c, a, b, beta=0, out=c)
        c[2:4].zero_()
    assert counter.peak_bytes(beyond=[a, b, c]) == 0
    assert counter.peak_bytes() == 1200


def test_a_resized_storage_counts_what_it_is_now() -> None:
    with Counter() as counter:
        a = torch.empty(0)
        torch.add(torch.empty(100), 1, out=a)  # 400 and, grown for it, 400
        b = torch.empty(25)
    assert counter.peak_bytes() == 800
    del a, b


def test_tensors_beyond_which_is_counted() -> None:
    given = torch.ones(1000)
    with Counter() as counter:
        kept = given + 1  # 4000
        (kept * 2).sum()  # 4000 and 4
    assert counter.peak_bytes(beyond=[given]) == 8004
    assert counter.peak_bytes(beyond=[given, kept]) == 4004
    assert counter.peak_bytes(beyond=[given[5:], kept.view(10, 100)]) == 4004  # by storage


def test_the_gradient_of_autograd_is_where_it_wrote_it() -> None:
    """exp saves its result (400); with the loss and its gradient of 4 each, that is all beyond x and x.grad."""
    x = torch.ones(100, requires_grad=True)
    with Counter() as counter:
        loss = x.exp().sum()
        loss.backward()
    assert x.grad is not None
    assert counter.peak_bytes(beyond=[x, x.grad]) == 408
    assert counter.peak_bytes(beyond=[x]) == 808


def test_what_autograd_frees_on_its_way_is_noticed() -> None:
    """Four results of 400 are saved.  Each step back makes a gradient of 400 and drops the one before it and a result:
    6 at a time in the first two steps (results, two gradients), then fewer."""
    x = torch.ones(100, requires_grad=True)
    with Counter() as counter:
        y = x
        for _ in range(4):
            y = y.exp()
        loss = y.sum()
        del y
        loss.backward()
    assert x.grad is not None
    by_hand = 4 * 400 + 400 + 8  # results, first gradient, loss and its gradient
    assert by_hand <= counter.peak_bytes(beyond=[x, x.grad]) <= by_hand + 400
    with Counter() as counter:
        z = x.detach().clone()
        for _ in range(4):
            z = z.exp()
    assert counter.peak_bytes(beyond=[x]) == 800


@pytest.mark.usefixtures("world")
def test_the_baseline_written_out() -> None:
    """24 x 50 scores of 4 bytes are 4,800; at its widest backward has three of them: log-probs, the gradient of the
    chosen ones and that of the scores.  The scores themselves went when their log-probs were there."""
    found = bench.count(problem(), BASELINE)
    scores = 24 * 50 * 4
    assert found.extra is not None and found.total is not None
    assert 3 * scores <= found.extra <= 3 * scores + 64
    inputs = (24 * 8 + 50 * 8) * 4 + 24 * (8 + 8 + 8 + 4)
    assert inputs + 3 * scores <= found.total <= inputs + 3 * scores + (24 * 8 + 50 * 8) * 4 + 64


# --- FLOPs and bytes sent ------------------------------------------------------------------------------------


def test_flops_of_every_kind_of_product() -> None:
    a, b, out = torch.ones(2, 3), torch.ones(3, 5), torch.ones(2, 5)
    with Counter(storages=False) as counter:
        torch.mm(a, b)
        torch.mm(a, b, out=out)
        torch.addmm(out, a, b)
        torch.addmm(out, a, b, beta=0, out=out)
        assert counter.flops == 4 * 2 * 2 * 3 * 5
        torch.bmm(torch.ones(7, 2, 3), torch.ones(7, 3, 5))
    assert counter.flops == (4 + 7) * 2 * 2 * 3 * 5


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.0])
def test_flops_are_those_of_torch(fraction: float) -> None:
    p = problem(fraction=fraction)
    assert sorted(p.rows) == sorted(ALL_ROWS)
    for name in p.rows:
        with FlopCounterMode(display=False) as torch_counts:
            p.backward(name)
        assert bench.count(p, name, peak=False).flops == torch_counts.get_total_flops(), name


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("fraction", bench.EVERY_FRACTION)
def test_flops_are_six_per_supervised_token_and_weight(fraction: float) -> None:
    p = problem(fraction=fraction)
    weights, rows = 8 * 50, round(24 * fraction)
    units = {name: bench.count(p, name, peak=False).flops / weights for name in p.rows}
    every = dict.fromkeys(["chunked", "full", BASELINE, CONCATENATE], 6 * 24)
    supervised = {"fused 5": 6 * rows, "fused 9": 6 * rows, "token_statistics": 8 * rows}
    assert units == {**every, **supervised, RECOMPUTE: 8 * 24}


def test_two_ranks_send_what_the_loss_head_says(capfd: pytest.CaptureFixture[str]) -> None:
    """Of 24 tokens, 8 wide: 3 floats each for the statistics, and the gradient of the hidden states."""
    only = ["--only", "fused,full", "--no-peak"]
    assert bench.main([*TINY_COMMAND, *only, "--tp", "2", "--check", "--fraction", "1"]) == 0
    out = capfd.readouterr().out
    lines = {line[:28].strip(): line.split() for line in out.splitlines()}
    assert lines["fused 5"][-2:] == lines["fused 9"][-2:] == ["3.000", f"{24 * (3 + 8) * 4:,}"]
    assert lines["full"][-2] == "3.000"
    assert "bench_loss_head: 2 of 2 bars met" in out


# --- the bars that are counts --------------------------------------------------------------------------------


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("fraction", bench.EVERY_FRACTION)
@pytest.mark.parametrize("shape, fake", [(NARROW, False), (bench.CPU_SHAPE, True)], ids=["narrow", "default shape"])
def test_bars(shape: Shape, fake: bool, fraction: float) -> None:
    with FakeTensorMode() if fake else nullcontext():
        p = problem(shape, fraction, chunks=(256, 512), only=["fused", CONCATENATE, RECOMPUTE])
        results = {name: bench.count(p, name) for name in p.rows}
    outcomes = list(bench.bars(block(results, shape, fraction)))
    assert len(outcomes) == 6  # FLOPs and bytes of two chunks, and what the two others must be worse at
    assert not missed(block(results, shape, fraction))


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("fraction", [1.0, 0.3])
def test_bytes_of_fake_tensors_are_those_of_real_ones(fraction: float) -> None:
    """Down to a scalar, which is sometimes kept and sometimes not."""
    found = []
    for mode in (nullcontext(), FakeTensorMode()):
        with mode:
            p = problem(
                Shape(tokens=96, hidden=16, vocab=32_768),
                fraction,
                chunks=(20, 36),
                only=["fused", "chunked", CONCATENATE, RECOMPUTE],
            )
            found.append({name: bench.count(p, name) for name in p.rows})
    real, fake = found
    for name in real:
        assert real[name].flops == fake[name].flops
        assert real[name].extra == pytest.approx(fake[name].extra, abs=16), name


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("fraction, chunk", [(1.0, 256), (1.0, 512), (0.5, 512), (0.1, 128), (0.0, 256)])
def test_extra_bytes_do_not_grow_with_the_tokens(fraction: float, chunk: int) -> None:
    extra = []
    for tokens in (2048, 4096):
        p = problem(Shape(tokens=tokens, hidden=8, vocab=4096), fraction, chunks=(chunk,), only=["fused"])
        found = bench.count(p, f"fused {chunk}").extra
        assert found is not None
        extra.append(found)
    assert 0 <= extra[1] - extra[0] <= 32 * 2048


@pytest.mark.usefixtures("world")
def test_without_the_gradients_of_everything_fused_is_smallest() -> None:
    p = problem(Shape(tokens=512, hidden=16, vocab=8192), chunks=(64,))
    extra = {name: bench.count(p, name).extra or 0 for name in p.rows}
    assert min(extra, key=lambda name: extra[name]) in ("fused 64", "token_statistics")
    assert max(extra, key=lambda name: extra[name]) == CONCATENATE


def test_a_missed_bar_is_named() -> None:
    scores = 256 * 32_768 * 4
    good = Result(ms=100.0, extra=scores, flops=6 * 2048 * 1024 * 32_768)
    reference = Result(ms=100.0)
    fused = {"fused 256": good}
    shape = bench.CPU_SHAPE
    assert not missed(block({BASELINE: reference, **fused}, shape))

    slow = Result(ms=109.0, extra=scores, flops=good.flops)
    assert missed(block({BASELINE: reference, "fused 256": slow}, shape)) == [
        f"fraction 1, fused 256: 1.090 of the time of {BASELINE} (at most 1.08)"
    ]
    wide = Result(ms=100.0, extra=int(1.03 * scores), flops=good.flops)
    (words,) = missed(block({BASELINE: reference, "fused 256": wide}, shape))
    assert words.startswith("fraction 1, fused 256: 34,561,064 bytes extra (at most 34,291,057")
    more = Result(ms=100.0, extra=scores, flops=good.flops + 1)
    (words,) = missed(block({BASELINE: reference, "fused 256": more}, shape))
    assert words == f"fraction 1, fused 256: {good.flops + 1:,} FLOPs (exactly {good.flops:,})"
    (words,) = missed(block({**fused, CONCATENATE: Result(extra=scores)}, shape))
    assert words.startswith(f"fraction 1, {CONCATENATE}")
    (words,) = missed(block({**fused, RECOMPUTE: Result(flops=good.flops)}, shape))
    assert words.startswith(f"fraction 1, {RECOMPUTE}")


@pytest.mark.parametrize("fraction, chunk, most", [(1.0, 512, 1.0), (0.1, 256, 0.15), (0.1, 512, 0.15)])
def test_the_bars_of_time(fraction: float, chunk: int, most: float) -> None:
    flops = 6 * round(2048 * fraction) * 1024 * 32_768
    for ms, met in ((most * 100 - 0.1, True), (most * 100 + 0.1, False)):
        results = {BASELINE: Result(ms=100.0), f"fused {chunk}": Result(ms=ms, flops=flops)}
        assert (not missed(block(results, bench.CPU_SHAPE, fraction))) == met
        assert not missed(block(results, Shape(tokens=2048, hidden=1024, vocab=32_767), fraction)) is False  # FLOPs


def test_the_bars_on_cuda() -> None:
    flops = 6 * 262_144 * 2048 * 62_080
    fits = Result(ms=300.0, total=int(3.2 * 2**30), flops=flops)
    assert not missed(block({"fused 4096": fits}, bench.CUDA_SHAPE, device_type="cuda"))
    not_quite = Result(ms=317.0, total=int(3.4 * 2**30), flops=flops)
    assert missed(block({"fused 4096": not_quite}, bench.CUDA_SHAPE, device_type="cuda")) == [
        "fraction 1, fused 4096: 317.0 ms (at most 316)",
        "fraction 1, fused 4096: 3.40 GiB (at most 3.3)",
    ]


# --- what is timed -------------------------------------------------------------------------------------------


def test_rows_take_turns_after_a_round_that_does_not_count() -> None:
    order: list[str] = []
    x = torch.ones((), requires_grad=True)

    def row(name: str) -> torch.Tensor:
        order.append(name)
        return x * 1

    p = Problem(rows={"a": lambda: row("a"), "b": lambda: row("b")}, leaves=(x,), constants=())
    assert sorted(bench.time_all(p, ["a", "b"], 2)) == ["a", "b"]
    assert order == ["a", "b"] * 3


@pytest.mark.parametrize("factor", [1.001, 0.0, torch.nan])
def test_a_wrong_gradient_is_refused(
    factor: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int) -> torch.Tensor:
        return factor * bench.baseline(hidden, weight, labels)

    def never(*_: object) -> None:
        raise AssertionError("a wrong row was timed")

    monkeypatch.setattr(bench, "recompute", wrong)
    monkeypatch.setattr(bench, "time_all", never)
    assert bench.main(TINY_COMMAND) == 2
    said = capsys.readouterr()
    assert f"{RECOMPUTE}: a gradient of norm" in said.err
    assert BASELINE not in said.out  # no table


def test_a_wrong_gradient_of_one_input_is_refused() -> None:
    right = [torch.ones(3), torch.ones(4)]
    bench.check_gradients("row", right, right)
    with pytest.raises(bench.WrongGradient, match="row: a gradient of norm 2 is off by 1"):
        bench.check_gradients("row", [right[0], torch.tensor([1.0, 1, 1, 2])], right)
    with pytest.raises(bench.WrongGradient, match="row: 1 of 2 gradients"):
        bench.check_gradients("row", right[:1], right)
    nothing = [torch.zeros(3), torch.zeros(4)]
    with pytest.raises(bench.WrongGradient):  # of nothing supervised, exactly nothing
        bench.check_gradients("row", [torch.zeros(3), torch.full((4,), 1e-9)], nothing)


@pytest.mark.usefixtures("world")
def test_gradients_of_many_tokens_are_checked_on_fewer() -> None:
    many, few = problem(), problem(Shape(tokens=10, hidden=8, vocab=50))
    results = bench.measure(many, few, repeats=1)
    assert sorted(results) == sorted(ALL_ROWS)
    assert all(leaf.grad is None for leaf in few.leaves)


@pytest.mark.usefixtures("world")
def test_out_of_memory_is_a_result() -> None:
    p = problem(only=["fused"])

    def too_much() -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    p.rows["fused 5"] = too_much
    results = bench.measure(p, problem(only=["fused"]), repeats=1)
    assert {name: result.fits for name, result in results.items()} == {
        BASELINE: True,
        "fused 5": False,
        "fused 9": True,
    }
    assert results["fused 5"].ms is None


# --- the command line ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_row_is_printed(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*TINY_COMMAND, "--dtype", dtype, "--fraction", "1,0.5,0"]) == 0
    out = capsys.readouterr().out
    header, *lines = out.splitlines()
    assert header.startswith(f"cpu, {torch.get_num_threads()} threads, torch {torch.__version__}, {dtype}, 24 tokens")
    for name in ALL_ROWS:
        assert sum(line.startswith(f"{name} ") for line in lines) == 3
    for rows in (24, 12, 0):
        assert f"supervised {rows} of 24" in lines


def test_check_names_what_is_missed_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """At this shape a few blocks of rows take more than 2% of a chunk."""
    assert bench.main([*TINY_COMMAND, "--check"]) == 1
    out = capsys.readouterr().out
    assert "of 24 bars met" in out
    assert "MISSED  fraction 1, fused 9: " in out
    for rows in (24, 12, 2, 0):
        assert f"supervised {rows} of 24" in out


def test_a_choice_of_rows_and_no_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*TINY_COMMAND, "--only", "recompute,fused", "--no-peak", "--check"]) == 0
    out = capsys.readouterr().out
    assert "12 of 12 bars met" in out  # FLOPs only
    assert CONCATENATE not in out
    names = [line[:28].strip() for line in out.splitlines()[4:8]]
    assert names == [BASELINE, "fused 5", "fused 9", RECOMPUTE]


def test_a_sweep_is_many_chunks_of_fused() -> None:
    options = bench.parse(["--sweep", "--device", "cpu"])
    assert (options.chunks[0], options.chunks[-1], options.only) == (512, 16384, ["fused"])


@pytest.mark.usefixtures("world")
def test_the_grid(capsys: pytest.CaptureFixture[str]) -> None:
    bench.print_grid([40, 70], [9, 20], chunk=4, dtype=torch.bfloat16, device=CPU, repeats=1)
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == 2 * 2 * 3
    assert [line.split()[:2] for line in lines[::3]] == [["40", "9"], ["40", "20"], ["70", "9"], ["70", "20"]]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--grid", "--device", "cpu"], "--grid needs"),
        (["--only", "fu"], "is the start of"),
        (["--only", "nothing"], "is the start of none"),
        (["--fraction", "1.5"], "not within 0 and 1"),
        (["--tokens", "0"], "0 is below 1"),
        (["--tp", "2", "--vocab", "31"], "not a multiple"),
    ],
)
def test_what_cannot_be_measured(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.parse(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
