"""With experts, selective recomputation sends tokens to experts only once.  test_saved_tensors.py counts the tensors
that a layer saves."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from tests.ranks import scenarios
from tests.ranks.layouts import AUX, MOE
from tests.ranks.pool import Ranks

NUM_LAYERS = 2
# In each layer, tokens and their weights go to the experts, and outputs come back.  Backward sends the three gradients.
SENT, SENT_BACK = 3, 3


def messages(overrides: list[str]) -> tuple[int, int]:
    """The number of all-to-alls in forward and backward, and how often tokens were counted; each count makes the host
    wait."""
    with scenarios.running([*MOE, *AUX, f"model.num_layers={NUM_LAYERS}", *overrides]) as engine:
        microbatch = scenarios.microbatch_of(engine, [scenarios.SkewedCorpus([100, 60]).sample(i) for i in (0, 1)])
        count = MoEAlltoAllTokenDispatcher.preprocess
        with (
            mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as sent,
            mock.patch.object(MoEAlltoAllTokenDispatcher, "preprocess", autospec=True, side_effect=count) as counted,
        ):
            engine.measure([microbatch], forward_only=False)
        return sent.call_count, counted.call_count


@pytest.mark.parametrize(
    "recompute, sent, counted",
    [("none", SENT + SENT_BACK, 1), ("selective", SENT + SENT_BACK, 1), ("full", 2 * SENT + SENT_BACK, 2)],
)
def test_tokens_are_sent_once(ranks: Ranks, recompute: str, sent: int, counted: int) -> None:
    overrides = ["parallel.ep=2", "parallel.cp=2", f"train.recompute={recompute}"]
    assert ranks(2).run(messages, overrides) == [(sent * NUM_LAYERS, counted * NUM_LAYERS)] * 2


def kept_by_dispatchers(recompute: str) -> list[str]:
    """The names of tensors with one number per token that token dispatchers hold after a forward and a backward
    pass."""
    with scenarios.running([*MOE, f"model.num_layers={NUM_LAYERS}", f"train.recompute={recompute}"]) as engine:
        microbatch = scenarios.microbatch_of(engine, [scenarios.SkewedCorpus([256]).sample(0)])
        engine.measure([microbatch], forward_only=False)
        dispatchers = [layer.mlp.token_dispatcher for layer in engine.chunks[0].module.decoder.layers]
        held = [pair for dispatcher in dispatchers for pair in vars(dispatcher).items()]
        return [name for name, value in held if isinstance(value, torch.Tensor) and value.numel() >= 256]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_no_layer_keeps_the_choices_of_its_tokens(ranks: Ranks, recompute: str) -> None:
    """Otherwise, offloaded and recomputed layers would keep these tensors on the device until their next forward
    pass."""
    assert ranks(1).run(kept_by_dispatchers, recompute) == [[]]
