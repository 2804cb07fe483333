"""The list of kernels that `make test-kernels` compiles, and how it reads the compilers' output.  Compiles nothing."""

from pathlib import Path

import pytest

from sft.hf.architecture import architecture
from sft.hf.families import FAMILIES
from sft.layers.kinds import all_layer_groups
from sft.mcore.backends import kernels
from tests.kernels import changed, configurations
from tests.kernels.cubins import Usage, parse
from tests.kernels.cute import dynamic_shared
from tests.unit.hf import released

# Families of which no released config.json is here.  Their layers are those of other families.
WITHOUT_SIZES = {
    *("exaone4", "gemma4_text", "gemma4_unified", "gemma4_unified_text", "granitemoe", "ministral3", "mistral"),
    *("olmo3", "olmoe", "qwen2", "qwen2_vl", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
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
    families = {architecture(released.config(name), name).family.model_type for name in names - recipes}
    assert {family.model_type for family in FAMILIES.values()} - families == WITHOUT_SIZES


def test_the_list_has_every_layer_that_has_a_kernel() -> None:
    """By hand: gpt-oss has windows and 64 query heads for 8 key heads; Gemma 2 soft caps; Gemma 4 heads of 512."""
    listed = {configurations.text(demand): models for demand, models in configurations.softmax().items()}
    linear = {shape.text for shape in configurations.linear()}
    for name, config in configurations.models():
        kinds = {group.mixer.kind for group in all_layer_groups(config.model)}
        found = sum(name in models for models in listed.values())
        assert found == len(kinds - {"linear attention"}), name
    assert "gpt_oss_20b_128k.yaml" in listed["64/64, 8 heads a key, window"]
    assert "gemma2_9b" in listed["256/256, 2 heads a key, window, soft cap 50"]
    assert "gemma_4_31b" in listed["512/512, 8 heads a key"]
    assert "deepseek_v3" in listed["192/128, 1 heads a key"]
    assert linear == {"128/128, 3 heads a key, 4 taps", "128/128, 2 heads a key, 4 taps"}


def test_our_code_refuses_what_the_packages_must_still_refuse() -> None:
    for refused in configurations.REFUSED:
        for architecture_ in refused.architectures:
            demand = refused.demand._replace(capability=configurations.ARCHITECTURES[architecture_])
            assert kernels.FLASH[refused.kernel].refused(demand) is not None, (refused, architecture_)


def test_resources_of_a_binary() -> None:
    assert parse(OUTPUT) == {
        "kernel_cutlass_kernel_flash_bwd_0": Usage(registers=168, spilled=0, shared=1024),
        "l2norm_bwd_kernel": Usage(registers=255, spilled=2208, shared=0),
    }


def test_shared_memory_of_a_launch() -> None:
    assert dynamic_shared(MODULE) == 164864
    assert dynamic_shared("module {\n}\n") == 0


@pytest.mark.parametrize(
    "files, kinds",
    [
        ([], []),
        (["sft/mcore/engine.py", "docs/index.md", "sft/mcore/linear_attention/chunks.py"], []),
        (["sft/mcore/attention/flash4.py"], ["FlashAttention-4"]),
        (["sft/mcore/attention/flash_kernel.py"], ["FlashAttention-4", "ffpa-attn"]),
        (["sft/mcore/loss/softmax_triton.py", "README.md"], ["loss head"]),
        (["sft/mcore/linear_attention/fla_kernel.py"], ["linear attention"]),
        (["tests/kernels/cute.py"], ["FlashAttention-4", "ffpa-attn", "loss head", "linear attention"]),
    ],
)
def test_kinds_that_a_change_touches(files: list[str], kinds: list[str]) -> None:
    assert changed.touched(files) == kinds


def test_a_change_compiles_at_least_one_kernel_of_each_kind() -> None:
    texts = {*map(configurations.text, configurations.softmax()), *(shape.text for shape in configurations.linear())}
    assert {*changed.SAMPLE} <= {*changed.FILES}
    for sample in changed.SAMPLE.values():
        assert {*sample} <= texts
    for paths in changed.FILES.values():
        assert all([*Path(changed.ROOT).glob(f"{path}*")] for path in paths), paths
