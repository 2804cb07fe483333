"""The whole trainer on one GPU: its curve, its checkpoints, and Adam in host memory.

What CPU runs show of Adam in host memory is in tests/ranks/test_optimizer_offload.py.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sft.mcore.backends import kernels
from sft.mcore.backends.portable import Portable
from sft.mcore.lora.adapted import Adapted
from sft.mcore.optimizer.inner import chained_optimizers, inner_optimizers
from tests.gpu.runs import BF16_TOLERANCE, GPU, around_a_checkpoint, gradients, losses, running, train
from tests.ranks import layouts, scenarios
from tests.ranks.pool import RankPool

FP32_TOLERANCE = 1e-4  # other kernels, sums in another order; TF32 is off
BF16_GRADIENT_TOLERANCE = 3e-2  # of its norm; 8 bits of mantissa, through four layers, rounded at other places


def first_steps(overrides: Sequence[str], folder: str) -> list[float]:
    """On the CPU, in a process of a pool."""
    with scenarios.running(overrides) as engine:
        return around_a_checkpoint(engine, Path(folder))


MOE = ["model.moe.num_experts=4", "model.moe.top_k=2", "model.moe.ffn_hidden_size=32", "model.init_std=0.2"]


@pytest.mark.parametrize("model", [[], MOE], ids=["dense", "experts"])
def test_bf16_follows_full_precision(model: list[str], backend: str) -> None:
    wide = losses([*model, "run.precision=fp32", "attention.backend=portable"])
    half = losses([*model, "run.precision=bf16", f"attention.backend={backend}"])
    np.testing.assert_allclose(half, wide, rtol=BF16_TOLERANCE)


KINDS = {  # with heads as wide as those of released models, which decides the kernel
    "gpt-oss": [*MOE, *layouts.WINDOWS, *layouts.GPT_OSS],
    "gemma 4": [
        *layouts.GEMMA4,
        "model.full_attention={head_dim: 512, num_query_groups: 8, keys_as_values: true}",
    ],
    "qwen 3.6": [
        *layouts.LINEAR,
        *("model.linear_attention.key_head_dim=128", "model.linear_attention.value_head_dim=128"),
    ],
    "latent": [
        *layouts.LATENT,
        *("model.latent_attention.qk_nope_head_dim=128", "model.latent_attention.qk_rope_head_dim=64"),
        *("model.latent_attention.v_head_dim=128", "model.head_dim=null"),
    ],
    "adapters": [*MOE, "model.qkv_bias=false", "lora.rank=4"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_follows_full_precision(kind: str) -> None:
    """By a flash kernel, plain torch, FLA or torch's grouped product, whichever the kind of layer gets."""
    model = [*KINDS[kind], "attention.backend=portable"]
    with running([*model, "run.precision=bf16"]) as engine:
        has_adapters = any(isinstance(module, Adapted) for chunk in engine.chunks for module in chunk.modules())
    assert has_adapters == (kind == "adapters")
    wide, half = (losses([*model, f"run.precision={dtype}"], range(12)) for dtype in ("fp32", "bf16"))
    np.testing.assert_allclose(half, wide, rtol=BF16_TOLERANCE)


def test_portable_takes_a_flash_kernel() -> None:
    """Else the tiles would stand in for it, and every number would be right."""
    with running(["run.precision=bf16", "attention.backend=portable"]) as engine:
        assert isinstance(engine.backend, Portable)
        assert [kernel.name in kernels.FLASH for kernel in engine.backend.chosen.values()] == [True]


def test_a_gpu_is_not_waited_for_within_the_passes(backend: str) -> None:
    """Forward and backward are given to it as fast as the host can; torch refuses whatever would wait."""
    with running(["run.precision=bf16", f"attention.backend={backend}", "train.global_batch_size=4"]) as engine:
        loader = scenarios.loader_of(engine, scenarios.SkewedCorpus(scenarios.LENGTHS))
        microbatches, schedule = loader.microbatches(0), engine._schedule

        def watched(*args: Any, **named: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return schedule(*args, **named)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        engine.train_step(microbatches)  # compiles, and makes what stays
        engine._schedule = watched  # type: ignore[method-assign]
        engine.train_step(microbatches)


MIXES = [[250], [31, 1, 64, 100], [8] * 30]


def token_losses_and_gradients(overrides: Sequence[str]) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Of packs of random documents."""
    with running(overrides) as engine:
        packs = []
        for lengths in MIXES:
            corpus = scenarios.SkewedCorpus(lengths)
            packs.append(scenarios.microbatch_of(engine, [corpus.sample(i) for i in range(len(lengths))], 8))
        found = [scenarios.local_token_losses(engine, pack) for pack in packs]
        grads = {_key(name): gradient for name, gradient in gradients(engine, packs).items()}
        return [losses.cpu().numpy() for losses in found if losses is not None], grads


def _key(name: str) -> str:
    """The local spec has norms apart that Transformer Engine has within the layer after them."""
    return name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.").replace(
        "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."
    )


def test_transformer_engine_agrees_with_portable() -> None:
    """Every token's loss and every weight's gradient, packed, in bf16; both from the same weights."""
    pytest.importorskip("transformer_engine.pytorch")
    recipe = ["run.precision=bf16", f"train.global_batch_size={len(MIXES)}"]
    mine, expected = token_losses_and_gradients([*recipe, "attention.backend=portable"])
    theirs, others = token_losses_and_gradients([*recipe, "attention.backend=te"])
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=BF16_TOLERANCE)
    assert expected.keys() == others.keys()
    for name, gradient in expected.items():
        error = np.linalg.norm(others[name] - gradient)
        assert error <= BF16_GRADIENT_TOLERANCE * np.linalg.norm(gradient), (name, error)


def test_a_checkpoint_of_a_cpu_goes_on(tmp_path: Path) -> None:
    pool = RankPool(1)
    try:
        (expected,) = pool.run(first_steps, [*GPU, "run.precision=fp32"], str(tmp_path))
    finally:
        pool.close()
    found = losses(["run.precision=fp32"], range(2, 4), tmp_path)
    np.testing.assert_allclose(found, expected, rtol=FP32_TOLERANCE)


def share(fraction: float) -> list[str]:
    """Of Adam's parameters whose state is in host memory."""
    return ["run.precision=bf16", "parallel.distributed_optimizer=true", f"optim.offload_fraction={fraction}"]


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_the_curve_does_not_tell_the_share(fraction: float) -> None:
    np.testing.assert_allclose(losses(share(fraction)), losses(share(0.0)), rtol=BF16_TOLERANCE)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_the_share_leaves_the_device(fraction: float) -> None:
    sizes = {"cpu": 0, "cuda": 0}
    with running(share(fraction)) as engine:
        train(engine, range(1))
        (part,) = chained_optimizers(engine.optimizer)
        for adam in inner_optimizers(part):
            for tensor, state in adam.state.items():
                sizes[tensor.device.type] += tensor.numel()
                assert tensor.dtype == torch.float32
                assert state["exp_avg"].device == state["exp_avg_sq"].device == tensor.device
                assert tensor.grad is not None and tensor.grad.is_pinned() == (tensor.device.type == "cpu")
        for group in part.optimizer.param_groups:
            assert all(param.is_cuda and param.dtype == torch.bfloat16 for param in group["params"])
    total = sum(sizes.values())
    assert total > 50_000 and fraction * total <= sizes["cpu"] <= total
    assert (sizes["cuda"] == 0) == (fraction == 1.0)


@pytest.mark.parametrize("before,after", [(0.0, 1.0), (1.0, 0.5), (0.5, 0.0)])
def test_a_checkpoint_goes_on_with_another_share(tmp_path: Path, before: float, after: float) -> None:
    with running(share(before)) as engine:
        expected = around_a_checkpoint(engine, tmp_path)
    np.testing.assert_allclose(losses(share(after), range(2, 4), tmp_path), expected, rtol=BF16_TOLERANCE)
