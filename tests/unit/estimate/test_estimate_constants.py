"""GPUs, their usable memory, distributions of lengths, and the file of constants.  Expected values are computed by
hand."""

from pathlib import Path

import numpy as np
import pytest

from sft.errors import ConfigError
from sft.estimate import constants, gpus
from sft.estimate.constants import Constant, Curve
from sft.estimate.gpus import GIB
from sft.estimate.lengths import Lengths
from sft.layers.rank_share import RankShare
from sft.parallel.shapes import Shapes


def test_usable_memory_names_what_a_run_cannot_use() -> None:
    """79.1 - 0.75 - 2.4 - 0.03 x 79.1 = 73.577 GiB"""
    usable = gpus.usable_memory(gpus.gpu("h100"), nccl_bytes=2.4 * GIB)
    assert usable.bytes / GIB == pytest.approx(73.577)
    assert usable.describe() == ("73.6 GiB = capacity 79.1 - CUDA's context 0.75 - NCCL's buffers 2.40 - 3% 2.4")


def test_names() -> None:
    with pytest.raises(ConfigError, match=r"unknown GPU h10\.  Known GPUs: a100-40, a100-80, b200, b300, .*, mi300x\."):
        gpus.gpu("h10")
    assert gpus.fabric("ib400") == 40 and gpus.fabric("12.5") == 12.5
    for wrong in ("ib", "-1", "0", "nan"):
        with pytest.raises(ConfigError, match="Known networks: none, eth100, .* or give GB/s"):
            gpus.fabric(wrong)
    devices = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "NVIDIA A100-SXM4-40GB": "a100-40"}
    devices |= {"NVIDIA A100-SXM4-80GB": "a100-80", "NVIDIA GB200": "gb200", "NVIDIA H20": "h20"}
    for name, expected in devices.items():
        found = gpus.gpu_of_device(name)
        assert found is not None and found.name == expected
    assert gpus.gpu_of_device("Tesla T4") is None


def test_lengths_of_a_pack() -> None:
    """Lengths 2 and 6 are equally frequent: a pack of 8 holds one of each."""
    lengths = Lengths.read("2:0.5,6:0.5")
    assert [column.tolist() for column in lengths.of_pack(8)] == [[2, 6], [1, 1]]
    cut = Lengths.read("2:3,60:3").of_pack(8)  # 60 counts as 8
    assert [column.tolist() for column in cut] == [[2, 8], [pytest.approx(0.8)] * 2]
    tree = Lengths.of_corpus(Shapes(np.array([0, 2, 3]), np.array([6, 4, 5]), np.array([0, 4, 0])))
    assert tree.tokens == pytest.approx([5.0, 8.4]) and tree.shares == pytest.approx([8.4 / 18.4, 10 / 18.4])
    corpus = Lengths.of_corpus(np.array([2, 6, 6, 2, 0]))
    assert (corpus.tokens.tolist(), corpus.shares.tolist()) == ([2, 6], [0.5, 0.5])
    for wrong in ("", "5", "a:1", "0:1", "5:-1", "5:0"):
        with pytest.raises(ConfigError, match="Write LENGTH:SHARE,LENGTH:SHARE"):
            Lengths.read(wrong)
    with pytest.raises(ConfigError, match="no document has tokens"):
        Lengths.of_corpus(np.array([0]))


def test_trees_of_a_pack() -> None:
    """A document of 60 tokens with branches of 10 and 20 after 40, and of 9 after 50; and one of 1 without branches."""
    corpus = Lengths.of_corpus(Shapes(np.array([0, 4, 5]), np.array([60, 10, 20, 9, 1]), np.array([0, 40, 40, 50, 0])))
    rank = corpus.of_rank(RankShare(), 200)  # twice the corpus
    trees = rank.trees
    assert (trees.forks, trees.keys) == pytest.approx((4, 100))
    assert (trees.branches, trees.tokens) == pytest.approx((6, 2 * 39))
    assert rank.documents > trees.branches
    assert trees.halo(11, 1) == pytest.approx(60) and trees.halo(46, 1) == pytest.approx(
        2 * (45 + 45 + 40)
    )  # means of a group
    assert trees.halo(11, 2) == pytest.approx(8 * 2 * 10)
    # With cp 1, eight documents and four places; over cp 2, four of the eight documents are long.
    assert trees.fragments(0, 1) == pytest.approx(8 + 4)
    assert trees.fragments(15, 2) == pytest.approx(2 * 4 + (4 + 4) / 2)
    assert not Lengths.of_corpus(np.array([5, 6])).of_rank(RankShare(), 200).trees


def test_documents_of_a_rank_with_dynamic_cp() -> None:
    """Packs of 8 on two ranks: the document of 2 is whole on one of them, that of 6 has two chunks on both."""
    lengths, rank = Lengths.read("2:0.5,6:0.5"), RankShare(cp=2)
    assert [lengths.of_rank(rank, 8).sequences, lengths.of_rank(rank, 8, [1, 2]).sequences] == [4.0, 2.5]
    # Of 63 documents, a rank has two chunks of each, or 8 whole ones: those start fewer blocks for nothing.
    mixed = Lengths.read("1024:0.9,32768:0.1")
    assert [mixed.of_rank(RankShare(cp=8), 262_144, sizes).is_uneven for sizes in (None, [1, 1])] == [True, False]


def test_bins_of_a_corpus_keep_its_squares() -> None:
    """The work of attention per token changes by less than a thousandth."""
    corpus = np.random.default_rng(0).lognormal(8, 1.5, 10_000).astype(int) + 1
    lengths = Lengths.of_corpus(corpus)
    assert len(lengths.tokens) <= 64
    assert lengths.shares @ lengths.tokens**2 == pytest.approx((corpus.astype(float) ** 2).mean(), rel=1e-9)
    assert lengths.shares @ lengths.tokens == pytest.approx(corpus.mean(), rel=1e-2)


def test_a_curve_is_linear_in_the_logarithm() -> None:
    curve = Curve(((128, 100.0), (512, 300.0)), "assumed: for the test")
    assert [curve.at(size) for size in (64, 128, 256, 512, 1024)] == [100, 100, pytest.approx(200), 300, 300]


def test_a_file_keeps_constants_and_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SFT_CACHE", str(tmp_path))
    h100 = gpus.gpu("h100")
    assumed = constants.assumed(h100, 40.0)
    assert constants.constants_of(h100, 40.0) == assumed
    assert assumed.describe() == "all constants of h100 are assumed; `sft plan --calibrate` measures them"
    measured = constants.replace(assumed, inter_gb_s=Constant(33.0, "measured 2026-11-23 on two nodes"))
    constants.write(measured, tmp_path / "calibration" / "h100.json")
    assert constants.constants_of(h100, 40.0) == measured
    assert measured.describe().startswith("constants of h100: measured inter_gb_s; assumed gemm_tflops, grouped_gemm")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"version": 2', '"version": 1'),
        ('"Transformer Engine"', '"a kernel"'),
        ('"latency_us"', '"latency"'),
        ('"value": 20.0', '"value": -1'),
        ('"value": 20.0', '"value": NaN'),
        ("[\n    16,", "[\n    64,"),
        ('"gpu": "h100"', '"gpu": "h100", "more": 1'),
        ("{", ""),
    ],
)
def test_another_file_is_refused(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / "h100.json"
    constants.write(constants.assumed(gpus.gpu("h100"), 40.0), path)
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))
    with pytest.raises(ConfigError, match="is no file of constants of this version: .*Make it again: sft plan"):
        constants.read(path)


def test_another_peak_changes_products_and_attention_only() -> None:
    base = constants.assumed(gpus.gpu("h100"), 40.0)
    half = base.with_peak(base.peak_tflops / 2)
    assert half.gemm_tflops.at(4096) == pytest.approx(base.gemm_tflops.at(4096) / 2)
    assert half.attention_backward.at(8192) == pytest.approx(base.attention_backward.at(8192) / 2)
    assert half.intra_gb_s == base.intra_gb_s


def test_gloo_is_assumed_to_overlap_nothing_and_to_sum_by_an_all_reduce() -> None:
    on = {name: constants.assumed(gpus.gpu(name), 40.0) for name in ("cpu", "h100")}
    values = {name: (of.exposed.value, of.reduce_scatter.value, of.send.value) for name, of in on.items()}
    assert values == {"cpu": (1.0, 0.5, 1.0), "h100": (0.0, 1.0, 1.0)}
