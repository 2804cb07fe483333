"""The lines about dynamic CP of `sft data plan` and `sft check`."""

from pathlib import Path

import pytest

from sft.cli import main
from sft.data.inspect.cp_forecast import BatchForecast, lines
from sft.data.packing.cp_grid import Prediction
from tests.unit.metric_values import config
from tests.unit.surveys import chat_of, lay_out, write

# A token has 6 x 2 x 64 x 832 FLOPs outside attention, which take 1 ms at 0.35 of this peak; each microbatch of two
# layers takes 1 ms more.  Keys, values and gradients of a token have 2 x 128 x (2 + 2 + 4) bytes; a byte takes 333 ns.
RECIPE = """\
run: {dir: runs/a, device: cpu}
model: {num_layers: 2, hidden_size: 64, ffn_hidden_size: 192, num_attention_heads: 4, init_from: random}
data: {train: chat.jsonl, seq_length: 256, num_workers: 1}
train: {num_steps: 20, global_batch_size: 4}
parallel: {cp: 4, intra_node_gb_s: 0.003}
optim: {lr: 1e-5}
log: {peak_tflops: 1.8256457e-03}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """32 chats of 64 tokens."""
    lay_out(tmp_path, monkeypatch)
    Path("a.yaml").write_text(RECIPE)
    write("chat", *[chat_of(64)] * 32)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main([*arguments, "--world-size", "8"]) == 0
    return [line[8:] for line in capsys.readouterr().out.splitlines()]


def test_short_documents_need_no_cp(capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps of 16 documents of 64 tokens; each of 8 ranks has room for 64 tokens.

    On one rank, a document takes 64 + 64 * 64 / 832 = 68.92 ms, and two documents in two microbatches 139.85 ms.  On
    four ranks, 3 x 64 x 2,048 bytes take 131.07 ms, of which attention hides 4.92: (68.92 + 126.15) / 4 = 48.77 ms.  A
    rank computes its part of eight documents in two microbatches: 392.14 ms.  139.85 / 392.14 = 0.36
    """
    told = printed(capsys, "data", "plan", "a.yaml", "parallel.dynamic_cp=true")
    assert told[-9:] == [
        "packs on 1 rank 100.0%",
        "tokens on 1 rank 100.0%",
        "step 0.36 / 0.36 of fixed cp, 1.00 / 1.00 of the bound (median / max)",
        "bytes over cp 0.00 / 0.00 of fixed cp (median / max)",
        "microbatches 2 / 2 / 2 (min / median / max); fixed cp has 2",
        "predicted and not measured, at 35% of 0.00182565 TFLOP/s, 0.003 GB/s within a node of 8 GPUs, "
        "40 GB/s between nodes",
        "attention takes as many FLOPs as all else at 832 tokens; 2 batches checked",
        "efficiency per step 100.0% / 100.0% (min / median)",
        "efficiency per microbatch 100.0% / 100.0% (min / median)",
    ]
    assert (
        "dynamic CP, predicted: a step 0.36 of fixed cp, bytes over cp 0.00, 100.0% of tokens on 1 rank; "
        "microbatches 2 / 2 / 2 (min / median / max); fixed cp has 2"
    ) in printed(capsys, "check", "a.yaml", "parallel.dynamic_cp=true")


ADVICE = "parallel.dynamic_cp=true: a step takes 0.36 of its time, with 0.00 of the bytes over cp (predicted)"


def test_dynamic_cp_is_advised_where_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "data", "plan", "a.yaml")[-1] == ADVICE
    assert "dynamic" not in str(printed(capsys, "check", "a.yaml"))
    # Two levels of groups cannot be divided into smaller CP groups.
    told = printed(capsys, "data", "plan", "a.yaml", "parallel.cp_comm=a2a+p2p", "parallel.cp_a2a=2")[-1]
    assert told == ADVICE.replace(":", " parallel.cp_comm=p2p parallel.cp_a2a=null:")
    # Of 192 tokens, each of four ranks would hold 48, which is not a multiple of 32.
    assert "dynamic" not in str(printed(capsys, "data", "plan", "a.yaml", "data.seq_length=192"))
    assert "dynamic" not in str(printed(capsys, "data", "plan", "a.yaml", "parallel.cp=1", "train.global_batch_size=8"))


def test_dynamic_cp_is_not_advised_where_every_document_needs_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    write("chat", *[chat_of(256)] * 8)
    assert "dynamic" not in str(printed(capsys, "data", "plan", "a.yaml"))
    told = printed(capsys, "data", "plan", "a.yaml", "parallel.dynamic_cp=true")
    assert told[-9:-4] == [
        "packs on 4 ranks 100.0%",
        "tokens on 4 ranks 100.0%",
        "step 1.00 / 1.00 of fixed cp, 1.00 / 1.00 of the bound (median / max)",
        "bytes over cp 1.00 / 1.00 of fixed cp (median / max)",
        "microbatches 2 / 2 / 2 (min / median / max); fixed cp has 2",
    ]


def test_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    told = printed(capsys, "data", "plan", "a.yaml", "--png", "step.png", "parallel.dynamic_cp=true")
    assert told[-1] == "step.png: step 1 with cp 4 and with dynamic CP, 8 ranks of dp x cp"
    assert Path("step.png").read_bytes().startswith(b"\x89PNG")
    for arguments, words in (
        (["step.png"], "Give parallel.dynamic_cp=true"),
        (["step.svg", "parallel.dynamic_cp=true"], "does not end in .png"),
        (
            ["a.yaml/step.png", "parallel.dynamic_cp=true"],
            "--png a.yaml/step.png cannot be written: [Errno 17] File exists",
        ),
    ):
        assert main(["data", "plan", "a.yaml", "--world-size", "8", "--png", *arguments]) == 2
        assert words in " ".join(capsys.readouterr().err.split())


def prediction(
    makespan_ns: int, num_bytes: int, num_microbatches: int, packs: dict[int, float], tokens: dict[int, float]
) -> Prediction:
    return Prediction(
        makespan_ns=makespan_ns, num_bytes=num_bytes, num_microbatches=num_microbatches, per_step=1.0,
        per_microbatch=1.0, share_of_packs=packs, share_of_tokens=tokens,
    )  # fmt: skip


def test_batches_that_differ() -> None:
    """Means of shares, medians and maxima of ratios, and also the minimum for microbatches."""
    fixed = prediction(100, 100, 2, {4: 1.0}, {4: 1.0})
    dynamic = [
        prediction(60, 10, 3, {1: 1.0}, {1: 1.0}),
        prediction(80, 30, 5, {1: 0.5, 2: 0.5}, {1: 0.25, 2: 0.75}),
        prediction(90, 80, 4, {4: 1.0}, {4: 1.0}),
    ]
    batches = [BatchForecast(dynamic=batch, fixed=fixed, bound_ns=50) for batch in dynamic]
    assert lines(config(), batches)[:-1] == [
        "packs on 1 rank 50.0%, 2 ranks 16.7%, 4 ranks 33.3%",
        "tokens on 1 rank 41.7%, 2 ranks 25.0%, 4 ranks 33.3%",
        "step 0.80 / 0.90 of fixed cp, 1.60 / 1.80 of the bound (median / max)",
        "bytes over cp 0.30 / 0.80 of fixed cp (median / max)",
        "microbatches 3 / 4 / 5 (min / median / max); fixed cp has 2",
    ]
