"""The elementwise passes of a whole layer move the bytes that the prediction counts.  torch's dispatcher counts them.

The count uses the tensors that operators read and write, and shares no formula with sft/estimate or sft/layers.  On a
GPU, torch compiles some functions, or a library has a kernel for them: each of these counts as one operator
(`ONE_KERNEL`).  Matrix products, the attention kernel and the delta rule do not count.  The bytes of a token in a layer
are a difference of differences: of runs with more tokens, in models with more layers.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.fusions import fused_bias_swiglu
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sft.estimate.layer_work import elementwise_bytes
from sft.layers.moved import Moved
from sft.mcore.attention import torch_kernel
from sft.mcore.attention.rope import Rotation
from sft.mcore.experts import dispatch, grouped
from sft.mcore.experts import layer as expert_layer
from sft.mcore.linear_attention.chunked_kernel import ChunkedKernel
from sft.mcore.modules import activation, norm
from tests.builders import answer
from tests.ranks import scenarios
from tests.ranks.layouts import GPT_OSS
from tests.ranks.pool import Ranks

# Forward leaves out scales of norms, sines, and small numbers of the router; backward also fp32 copies that only the
# kernels on a CPU make.
FORWARD_TOLERANCE, BACKWARD_TOLERANCE = 0.05, 0.11
LENGTHS, LAYERS = (256, 512), (2, 4)
WIDE = [
    *("model.hidden_size=256", "model.ffn_hidden_size=512", "model.head_dim=64", "model.num_attention_heads=4"),
    *("model.num_query_groups=2", "model.qkv_bias=false", "run.precision=bf16", "train.global_batch_size=1"),
    *("data.seq_length=512", "model.init_std=0.2"),
]
EXPERTS = ["model.moe.num_experts=8", "model.moe.top_k=4", "model.moe.ffn_hidden_size=128"]
# Every layer has the kind of attention; the test writes the numbers of the layers.
LINEAR = [
    *("model.linear_attention.layers=EVERY", "model.linear_attention.num_key_heads=2"),
    *("model.linear_attention.num_value_heads=4", "model.linear_attention.key_head_dim=64"),
    "model.linear_attention.value_head_dim=64",
]
LATENT = [
    *("model.latent_attention.kv_lora_rank=64", "model.latent_attention.q_lora_rank=96", "model.rope.interleaved=true"),
    *("model.latent_attention.qk_nope_head_dim=32", "model.latent_attention.qk_rope_head_dim=16"),
    *("model.latent_attention.v_head_dim=32", "model.num_query_groups=null", "model.qk_norm=false"),
    "model.head_dim=null",
]
MAMBA = ["model.mamba={layers: EVERY, num_heads: 8, num_groups: 2, head_dim: 32, state_dim: 64}"]
GEMMA = ["model.norm_placement=both", "model.norm_zero_centered=true", "model.activation=geglu"]
CASES = {
    "dense": [],
    "dense, norms on outputs": GEMMA,
    "experts": [*EXPERTS, "model.moe.shared_ffn_hidden_size=128", "model.moe.shared_gate=true"],
    "halves": [
        *("model.halves.without_mlp=ODD", "model.halves.without_mixer=EVEN", "model.moe.layers=EVEN", *EXPERTS),
        *("model.moe.shared_ffn_hidden_size=128", "model.moe.latent_size=192", "model.activation=relu2"),
    ],
    "linear": LINEAR,
    "linear, channels": [
        *LINEAR,
        *("model.linear_attention.num_key_heads=4", "model.linear_attention.decay=channel"),
        *("model.linear_attention.low_rank=64", "model.linear_attention.gate=sigmoid"),
    ],
    "Mamba-2": MAMBA,
    "latent": LATENT,
    "gpt-oss": [*EXPERTS, *GPT_OSS, "model.sliding_window=20", "model.sliding_window_layers=EVERY"],
}
ONE_KERNEL: list[tuple[Any, str]] = [
    *((norm, name) for name in ("_forward", "_backward")),
    *((activation, name) for name in ("_forward", "_backward")),
    *((fused_bias_swiglu, name) for name in ("swiglu", "swiglu_back", "weighted_swiglu", "weighted_swiglu_back")),
    (dispatch, "_sums"),
    (Rotation, "_turned"),
]
UNCOUNTED: list[tuple[Any, str]] = [
    *((torch_kernel.TorchKernel, name) for name in ("forward", "backward")),
    *((ChunkedKernel, name) for name in ("transitions", "forward", "state_gradients", "backward")),
]
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul")
VIEWS = ("_unsafe_view", "_reshape_alias", "detach", "alias", "lift_fresh")
EMPTY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
# Operators that touch some rows of their tensors: bytes / bytes of the rows
OF_ROWS = {"index_select": 2, "gather": 2, "index": 2, "index_copy_": 2, "scatter": 2, "index_add_": 3}


def size(x: Tensor) -> int:
    """Bytes in memory: a broadcast dimension counts once."""
    return x.element_size() * math.prod(n for n, stride in zip(x.shape, x.stride()) if stride) if x.numel() else 0


class Counting(TorchDispatchMode):
    """Bytes that operators read and write in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: Counter[str] = Counter()
        self.inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if self.inside or func.is_view or name in (*VIEWS, *EMPTY) or name.rstrip("_") in PRODUCTS:
            return result
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        given = {key: value for key, value in (kwargs or {}).items() if key != "out"}
        inputs = [x for x in tree_leaves((args, given)) if isinstance(x, Tensor)]
        if name in OF_ROWS:
            rows = outputs if OF_ROWS[name] == 2 and not name.endswith("_") and name != "scatter" else inputs[-1:]
            self.add(OF_ROWS[name] * sum(map(size, rows)))
        else:
            read = inputs[1:] if name in ("copy_", "zero_", "fill_") else inputs
            self.add(sum(map(size, (*read, *outputs))))
        return result

    def add(self, num_bytes: int) -> None:
        self.num_bytes["backward" if torch._C._current_autograd_node() is not None else "forward"] += num_bytes

    @contextmanager
    def as_one(self, owner: Any, name: str, counts: bool) -> Iterator[None]:
        """While the function runs, nothing counts; then its arguments and results do, if `counts`."""
        original: Callable[..., Any] = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            self.inside += 1
            try:
                result = original(*args, **kwargs)
            finally:
                self.inside -= 1
            if counts and not self.inside:
                self.add(sum(size(x) for x in tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)))
            return result

        with mock.patch.object(owner, name, run):
            yield


def grouped_mm(x: Tensor, other: Tensor, *, offs: Tensor) -> Tensor:
    """torch's grouped product, in a loop."""
    starts = [0, *offs.tolist()]
    pairs = list(zip(starts, starts[1:]))
    if other.ndim == 3:
        return torch.cat([x[a:b] @ matrix for (a, b), matrix in zip(pairs, other)])
    return torch.stack([x[:, a:b] @ other[a:b] for a, b in pairs])


def rows_of(counts: list[int], device: torch.device) -> grouped.RowsOfExperts:
    return grouped.RowsOfExperts(counts, torch.tensor(counts).cumsum(0).to(torch.int32))


def count(overrides: list[str]) -> tuple[list[Counter[str]], Moved]:
    """Bytes of training steps with one document of each of LENGTHS, by pass, and those of the equations for a token."""
    results = []
    with ExitStack() as patches:
        for owner, name, replacement in (
            (expert_layer, "computes_at_once", lambda core: True),
            (torch.nn.functional, "grouped_mm", grouped_mm),
            (grouped.RowsOfExperts, "of", rows_of),
        ):
            patches.enter_context(mock.patch.object(owner, name, replacement, create=True))
        engine = patches.enter_context(scenarios.running(overrides))
        for module in (module for chunk in engine.chunks for module in chunk.modules()):
            if hasattr(module, "config"):
                module.config.bias_activation_fusion = engine.config.model.activation == "swiglu"
        for length in (LENGTHS[0], *LENGTHS):  # the first step also makes the optimizer's states
            counted = Counting()
            microbatch = scenarios.microbatch_of(engine, [answer(length, 16, seed=0, last=scenarios.VOCAB)])
            with ExitStack() as regions:
                for owner, name in ONE_KERNEL:
                    regions.enter_context(counted.as_one(owner, name, True))
                for owner, name in [*UNCOUNTED, (torch.nn.functional, "grouped_mm")]:
                    regions.enter_context(counted.as_one(owner, name, False))
                with counted:
                    engine.train_step([microbatch])
            results.append(counted.num_bytes)
        return results[1:], elementwise_bytes(engine.config, engine.layout)


@pytest.mark.parametrize("name", CASES)
def test_passes_of_a_layer(ranks: Ranks, name: str) -> None:
    """Backward and what it computes again are counted together, because autograd functions compute both."""
    for recompute in ("none", "selective"):
        counted, said = dict[str, float](), dict[str, float]()
        for layers, sign in zip(LAYERS, (-1, 1)):
            numbers, overrides = range(1, layers + 1), [*WIDE, *CASES[name]]
            for word, chosen in (("EVERY", numbers), ("ODD", numbers[::2]), ("EVEN", numbers[1::2])):
                overrides = [text.replace(word, str([*chosen])) for text in overrides]
            overrides += [f"model.num_layers={layers}", f"train.recompute={recompute}"]
            (((short, long), moved),) = ranks(1).run(count, overrides)
            for part, of_equations in (("forward", moved.forward), ("backward", moved.backward + moved.repeated)):
                per_token = (long[part] - short[part]) / (LENGTHS[1] - LENGTHS[0])
                counted[part] = counted.get(part, 0.0) + sign * per_token
                said[part] = said.get(part, 0.0) + sign * of_equations
        assert counted["forward"] == pytest.approx(said["forward"], rel=FORWARD_TOLERANCE), recompute
        assert counted["backward"] == pytest.approx(said["backward"], rel=BACKWARD_TOLERANCE), recompute
