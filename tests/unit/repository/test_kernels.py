"""The list of kernels that `make test-kernels` compiles, and how it reads the compilers' output.  Compiles nothing."""

import datetime
import sys
from pathlib import Path

import pytest

from sft.hf.architecture import architecture
from sft.hf.families import FAMILIES
from sft.layers.kinds import all_layer_groups
from sft.mcore.backends import kernels
from tests.kernels import __main__ as command
from tests.kernels import changed, configurations, limits, sample, table
from tests.kernels.changed import FFPA, FLASH4, LINEAR, LOSS, REFUSED
from tests.kernels.cubins import Compiled, Usage, parse
from tests.kernels.cute import dynamic_shared
from tests.kernels.sample import Item
from tests.kernels.table import Result, Stored

# Families of which no released config.json is here.  Their layers are those of other families.
WITHOUT_SIZES = {
    *(
        "afmoe",
        "arcee",
        "dots1",
        "ernie4_5",
        "exaone4",
        "gemma4_text",
        "gemma4_unified",
        "gemma4_unified_text",
    ),
    *(
        "granite_swa",
        "granitemoe",
        "granitemoe_swa",
        "hunyuan_v1_dense",
        "ministral3",
        "mistral",
        "mistral4",
        "olmo3",
    ),
    *(
        "olmoe",
        "qwen2",
        "qwen2_vl",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "step3p5",
    ),
}
OUTPUT = """
Resource usage:
 Common:
  GLOBAL:0
 Function kernel_cutlass_kernel_flash_bwd_0:
  REG:168 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:1320 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function l2norm_bwd_kernel:
  REG:255 STACK:2200 SHARED:0 LOCAL:8 CONSTANT[0]:648 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
# A launch stores 7939 in a descriptor, then 164864 as its shared memory.  Another function stores nothing.
MODULE = """module {
  llvm.func @_cudaLaunchKernelEx(!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
  llvm.func @launch(%arg0: !llvm.ptr) {
    %30 = llvm.mlir.constant(7939 : i64) : i64
    %31 = llvm.mlir.constant(164864 : i64) : i64
    %32 = llvm.mlir.constant(9223372029338583039 : i64) : i64
    %33 = llvm.mlir.constant(131072 : i64) : i64
    llvm.store %32, %40 : i64, !llvm.ptr
    llvm.store %30, %41 : i64, !llvm.ptr
    llvm.store %31, %42 : i64, !llvm.ptr
    %50 = llvm.icmp "uge" %49, %33 : i64
  }
  llvm.func @other(%arg0: !llvm.ptr) {
    %31 = llvm.mlir.constant(229376 : i64) : i64
  }
}
"""


def test_the_list_has_every_family_and_recipe() -> None:
    names = {name for name, _ in configurations.models()}
    recipes = {str(path.relative_to(configurations.RECIPES)) for path in configurations.RECIPES.rglob("*.yaml")}
    assert recipes and recipes < names
    contents = configurations.contents()
    assert {*contents} == names - recipes
    families = {architecture(content, name).family.model_type for name, content in contents.items()}
    assert {family.model_type for family in FAMILIES.values()} - families == WITHOUT_SIZES


def test_the_list_has_every_layer_that_has_a_kernel() -> None:
    """By hand: gpt-oss has windows and 64 query heads for 8 key heads; Gemma 2 soft caps; Gemma 4 heads of 512."""
    listed = {configurations.text(demand): models for demand, models in configurations.softmax().items()}
    linear = {shape.text for shape in configurations.linear()}
    for name, config in configurations.models():
        kinds = {group.mixer.kind for group in all_layer_groups(config.model)}
        found = sum(name in models for models in listed.values())
        assert found == len(kinds - {"linear attention", "Mamba-2", "no mixer"}), name
    assert "gpt_oss_20b_128k.yaml" in listed["64/64, 8 heads a key, window"]
    assert "gemma2_9b" in listed["256/256, 2 heads a key, window, soft cap 50"]
    assert "gemma2_27b" in listed["128/128, 2 heads a key, window, soft cap 50"]
    assert "gemma_4_31b" in listed["512/512, 8 heads a key"]
    assert "deepseek_v3" in listed["192/128, 1 heads a key"]
    assert "mimo_v2_flash" in listed["192/128, 16 heads a key"]
    assert "mimo_v2_flash" in listed["192/128, 8 heads a key, window"]
    assert linear == {
        "128/128, 3 heads a key, 4 taps",
        "128/128, 2 heads a key, 4 taps",
        "96/192, 1 heads a key, 4 taps",
        "128/128, 1 heads a key, 4 taps, decays of channels",
        "128/128, 1 heads a key, 4 taps, decays of channels with a limit",
        *(f"Mamba-2 128/{width} heads a group, 4 taps" for width in ("64, 8", "64, 16", "64, 128", "80, 12")),
    }


def test_the_list_has_calls_of_branches_where_a_run_makes_them() -> None:
    """Layers without a window; gpt-oss has both kinds."""
    listed = [call.text for call in configurations.attention_calls()]
    assert len({*listed}) == len(listed)
    assert "64/64, 8 heads a key, parents" in listed and "512/512, 8 heads a key, parents" in listed
    windows = [text for text in listed if "window" in text]
    assert windows and not any("parents" in text for text in windows)


def test_our_code_refuses_what_the_packages_must_still_refuse() -> None:
    for refused in configurations.REFUSED:
        for architecture_ in refused.architectures:
            demand = refused.demand._replace(capability=configurations.ARCHITECTURES[architecture_])
            assert kernels.FLASH[refused.kernel].refused(demand) is not None, (
                refused,
                architecture_,
            )


def test_resources_of_a_binary() -> None:
    assert parse(OUTPUT) == {
        "kernel_cutlass_kernel_flash_bwd_0": Usage(registers=168, spilled=0, shared=1024),
        "l2norm_bwd_kernel": Usage(registers=255, spilled=2208, shared=0),
    }


def test_shared_memory_of_a_launch() -> None:
    assert dynamic_shared(MODULE) == 164864
    assert dynamic_shared("module {\n}\n") == 0


@pytest.mark.parametrize(
    "files, pins, kinds",
    [
        ([], "", []),
        (
            [
                "sft/mcore/engine.py",
                "docs/index.md",
                "sft/mcore/linear_attention/chunks.py",
            ],
            "",
            [],
        ),
        (["sft/mcore/attention/flash4.py"], "", [FLASH4, REFUSED]),
        (["sft/mcore/attention/flash_kernel.py"], "", [FLASH4, FFPA, REFUSED]),
        (["sft/mcore/loss/softmax_triton.py", "README.md"], "", [LOSS]),
        (["sft/mcore/linear_attention/fla_kernel.py"], "", [LINEAR]),
        (["tests/kernels/cute.py"], "", [FLASH4, FFPA, REFUSED, LOSS, LINEAR]),
        (["constraints.txt"], "--- a/constraints.txt\n-numpy==2.0\n+numpy==2.1\n", []),
        (["constraints.txt"], "-triton==3.7.1\n+triton==3.8.0\n", [LOSS, LINEAR]),
        (
            ["constraints.txt"],
            "+nvidia-cutlass-dsl-libs-base==4.8.2\n",
            [FLASH4, FFPA, REFUSED],
        ),
    ],
)
def test_kinds_that_a_change_touches(files: list[str], pins: str, kinds: list[str]) -> None:
    assert changed.touched(files, pins) == kinds


def test_every_kind_has_its_files_its_packages_and_its_time() -> None:
    for paths in changed.FILES.values():
        assert all([*Path(changed.ROOT).glob(f"{path}*")] for path in paths), paths
    pins = (changed.ROOT / "constraints.txt").read_text()
    assert all(f"\n{package}" in pins for package in changed.PACKAGES)
    assert {*changed.FILES} == {*sample.SECONDS} == {kind for kinds in changed.PACKAGES.values() for kind in kinds}


ITEMS = [
    Item(kind, number, "sm_90a", f"{number}")
    for kind, count in ((FLASH4, 40), (LINEAR, 2), (LOSS, 2))
    for number in range(count)
]


def test_a_change_compiles_four_of_each_kind_in_turns_and_the_fastest_first() -> None:
    kinds = [item.kind for item in sample.chosen(ITEMS, [LINEAR, FLASH4, LOSS], "c0ffee")]
    assert kinds == [LOSS, FLASH4, LINEAR, LOSS, FLASH4, LINEAR, FLASH4, FLASH4]
    assert {item.kind for item in sample.chosen(ITEMS, [LOSS], "c0ffee")} == {LOSS}


def test_commits_together_compile_everything() -> None:
    assert sample.chosen(ITEMS, [FLASH4], "1") == sample.chosen(ITEMS, [FLASH4], "1")
    seen = {item for commit in range(100) for item in sample.chosen(ITEMS, [FLASH4], str(commit))}
    assert len(seen) == 40


def test_nothing_is_begun_that_has_no_time() -> None:
    """With 60 s: 15 s of 60, 40 s of 45, then 5 are left: too few for 15 and for 8."""
    order = [Item(kind, 0, "sm_90a", "") for kind in (FLASH4, LINEAR, FLASH4, LOSS)]
    now, begun = [1000.0], list[tuple[str, float]]()

    def make(item: Item, left: float) -> str | None:
        begun.append((item.kind, left))
        now[0] += sample.SECONDS[item.kind]
        return "good"

    found = [*sample.in_time(order, make, jobs=1, seconds=60, clock=lambda: now[0])]
    assert begun == [(FLASH4, 60), (LINEAR, 45)]
    assert found == [*zip(order, ["good", "good", None, None], strict=True)]


def _compiled(kernel: str, spilled: int, step: str = "forward") -> Compiled:
    return Compiled(step, kernel, Usage(registers=168, spilled=spilled, shared=1024), 1, 2.0)


@pytest.mark.parametrize(
    "kernel, text, spilled, problem",
    [
        ("FlashAttentionForwardSm90", "64/64", 256, ""),
        (
            "FlashAttentionForwardSm90",
            "64/64",
            257,
            "FlashAttentionForwardSm90 spills 257 bytes, more than 256",
        ),
        ("chunk_cp_fwd_kernel_h", "128/128", 1536, ""),
        (
            "chunk_cp_fwd_kernel_h",
            "128/128",
            1540,
            "chunk_cp_fwd_kernel_h spills 1540 bytes, more than 1536",
        ),
        ("chunk_kda_bwd_kernel_wy_dqkg_fused", "decays of channels", 1280, ""),
        ("FlashAttentionBackwardSm100", "128/128, soft cap 50", 448, ""),
        (
            "FlashAttentionBackwardSm100",
            "128/128",
            400,
            "FlashAttentionBackwardSm100 spills 400 bytes, more than 256",
        ),
    ],
)
def test_a_spill_over_the_limit_is_a_problem(kernel: str, text: str, spilled: int, problem: str) -> None:
    assert limits.spills(text, [_compiled("another", 0), _compiled(kernel, spilled)]) == problem


SPILLING = 'echo "[[\\"forward\\", \\"fwd\\", [255, 300, 0], 1, 1.0]]"'


@pytest.mark.parametrize(
    "script, kind, is_quick, problem",
    [
        (SPILLING, FLASH4, False, "fwd spills 300 bytes, more than 256"),
        (SPILLING, FLASH4, True, "fwd spills 300 bytes, more than 256"),
        (SPILLING, LINEAR, False, "fwd spills 300 bytes, more than 256"),
        (SPILLING, LINEAR, True, ""),  # one variant of many
        (
            "echo 'AssertionError: not supported' >&2; exit 1",
            FLASH4,
            False,
            "AssertionError: not supported",
        ),
        ("exit 3", REFUSED, False, "ended with 3"),
    ],
    ids=[
        "spill",
        "quick spill",
        "spill of FLA",
        "one variant of FLA",
        "refusal",
        "no words",
    ],
)
def test_refusals_and_spills_fail(
    script: str,
    kind: str,
    is_quick: bool,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    item = Item(kind, 0, "sm_90a", "64/64")
    found = command.compiled(item, is_quick, 60)
    assert found is not None and found.problem == problem
    monkeypatch.setattr(command, "compiled", lambda *_: found)
    assert command.compile_all([item], 1, tmp_path / "build" / "kernels.json", "triton 1") == bool(problem)
    assert command.compile_changed([item], 1) == bool(problem)


def test_what_is_not_ready_fails_unless_a_change_has_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "compiled", lambda *_: None)
    item = Item(FLASH4, 0, "sm_90a", "64/64")
    assert command.compile_all([item], 1, tmp_path / "build" / "kernels.json", "triton 1") == 1
    assert "FAILED: not ready after 900 s" in capsys.readouterr().out
    assert command.compile_changed([item], 1) == 0
    assert "not compiled, for want of time: sm_90a  FlashAttention-4  64/64." in capsys.readouterr().out


def test_results_of_other_versions_are_dropped(tmp_path: Path) -> None:
    file, result = tmp_path / "build" / "kernels.json", Result(FLASH4, "64/64", "sm_90a", [], "broke", 2.0)
    good = result._replace(found=[_compiled("k", 0)], problem="")
    assert table.load(file) == Stored("", [])
    table.store(file, Stored("triton 1", [result, result._replace(text="32/32")]))
    table.store(file, Stored("triton 1", [good]))
    assert table.load(file) == Stored("triton 1", [good, result._replace(text="32/32")])
    table.store(file, Stored("triton 2", [result]))
    assert table.load(file) == Stored("triton 2", [result])


def test_the_page_names_failures_refusals_and_what_pinned_packages_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "kernels.md"
    page.write_text(f"# Title\n{table.BEGIN}old\n{table.END}end\n")
    monkeypatch.setattr(table, "PAGE", page)
    found = [_compiled("fwd", 8), _compiled("bwd", 0, "backward")]
    good, bad = Result(FLASH4, "64/64, 8 heads a key, window", "sm_90a", found, "", 30.0), Result(
        FFPA, "512/512", "sm_90a", [], "broke", 30.0
    )
    refused = Result(
        REFUSED,
        "FlashAttention-4, 512/512",
        "sm_100a",
        [_compiled("AssertionError: too `wide`", 0)],
        "",
        60.0,
    )
    order = {
        good[:3]: "",
        bad[:3]: "",
        refused[:3]: "it has heads of up to 192",
        (LOSS, "all", "sm_90a"): "",
    }
    again = good._replace(found=[_compiled("fwd", 16), found[1]])
    fewer = good._replace(
        text="64/64, 2 heads a key, window",
        found=[found[0]._replace(seconds=3.0), found[1]],
    )
    fewer_again, absent = fewer._replace(found=again.found), Result(LINEAR, "128/128", "sm_100a", [], "", 0.0)
    calm, loss = (
        good._replace(
            text="32/32, 1 heads a key",
            found=[_compiled("fwd", 0), _compiled("bwd", 0, "backward")],
        ),
        Result(LOSS, "all", "sm_90a", [_compiled("k", 0), _compiled("wide", 8)], "", 0.0),
    )
    order |= {
        fewer[:3]: "",
        calm[:3]: "",
        absent[:3]: "",
        absent._replace(text="96/192")[:3]: "",
    }
    table.write(
        Stored(
            "triton 1",
            [good, fewer, bad, refused, calm, loss, good._replace(text="gone")],
        ),
        Stored("triton 0", [again, fewer_again]),
        order,
        ["- sm_100a, 256/256: plain torch"],
        datetime.date(2026, 1, 2),
    )
    text = page.read_text()
    for line in (
        "2026-01-02: triton 1. 6 of 8 compilations, 3 minutes of one core, 1 failed.",
        "Not compiled yet: sm_100a, linear attention: 128/128; 96/192.",
        "| FlashAttention-4 | 64/64, window | 2, 8 | sm_90a | 3 / 2 | 168 / 168 | 8 / 0 | 1 / 1 |",
        "- FlashAttention-4, sm_90a: 32/32",
        "| `wide` | sm_90a | 1 | 2 | 168 | 8 | 1 |",
        "- sm_90a: `k`",
        "- sm_100a, 256/256: plain torch",
        "- FlashAttention-4, 512/512, sm_100a: it has heads of up to 192",
        "2026-01-02: triton 0. 2 of 5 compilations, 1 minutes of one core, 0 failed.",
        "- FlashAttention-4, 64/64, window, sm_90a, forward: 16 bytes spilled; above 8 bytes spilled",
        "- sm_90a  ffpa-attn, 512/512: FAILED: broke, 30 s",
    ):
        assert f"\n{line}\n" in text
    assert "gone" not in text and "old" not in text
