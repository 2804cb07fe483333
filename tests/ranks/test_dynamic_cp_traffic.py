"""A step sends as many bytes over cp as the log and the plan say, and none for packs of one rank."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from sft.data.packing.cp_cost import CpCost
from sft.data.packing.cp_grid import predict
from sft.metrics.records import train_record
from sft.metrics.run_facts import RunFacts
from sft.parallel.cp_bytes import CpBytes
from tests.ranks import scenarios
from tests.ranks.layouts import GEMMA, LATENT, LINEAR, MOE, ROUTERS
from tests.ranks.pool import Ranks
from tests.tree_samples import tree_and_texts

SLOW = "parallel.intra_node_gb_s=1e-6"  # so slow that the plan takes the smallest groups
DYNAMIC = ["parallel.cp=4", "parallel.dynamic_cp=true", SLOW]
TREES = [*DYNAMIC, "data.turns=each"]  # a branch sends no key of its parents once more
HALF = ["parallel.cp=2", "parallel.dynamic_cp=true", SLOW]
SHORT = [30, 64, 5, 61, 33, 2, 17, 48] * 12  # a rank holds 256 / 4 tokens
# For a pack: in each of 4 layers and 4 head groups, keys and values are gathered twice, and gradients are scattered.
NUM_COLLECTIVES = 4 * 4 * 3


class OverCp(TorchDispatchMode):
    """Counts the collectives of this rank in CP groups, and the bytes that it sends to other ranks, by the size of the
    group."""

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        super().__init__()
        self._sizes = {group.group_name: group.size() for group in groups}
        self.calls, self.num_bytes = Counter[int](), Counter[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            (group,) = [dist.ProcessGroup.unbox(arg) for arg in args if _is_group(arg)]
            if group.group_name in self._sizes:
                size = self._sizes[group.group_name]
                self.calls[size] += 1
                self.num_bytes[size] += _sent(func._schema.name, args, group.rank())
        return func(*args, **(kwargs or {}))


def _is_group(arg: Any) -> bool:
    return isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())


def _sent(name: str, args: Any, rank: int) -> int:
    """Bytes that this rank sends: of a tensor of all ranks, all bytes except this rank's part; of an all-to-all, the
    other ranks' parts."""
    if name.endswith("alltoall_base_"):
        message, num_sent = args[1], args[4]
        return int(message.nbytes // max(len(message), 1) * (len(message) - num_sent[rank]))
    if "_base_" in name:
        return abs(args[0].nbytes - args[1].nbytes)
    assert name.endswith("allreduce_"), name  # the all-reduce of metrics: a number per document
    return 0


def steps(overrides: list[str], lengths: Sequence[int]) -> list[dict[str, Any]]:
    """For each of two steps: packs of this rank by CP size, its collectives and bytes over cp, the record of the log,
    and predicted bytes."""
    with scenarios.running(overrides) as engine:
        corpus = (scenarios.TreeCorpus if engine.config.data.turns == "each" else scenarios.SkewedCorpus)(lengths)
        loader, sizes = scenarios.loader_of(engine, corpus), engine.layout.cp_sizes or (engine.layout.cp,)
        run = RunFacts.of(engine.config, engine.layout, engine.vocab_size)
        groups = [group for size in sizes if (group := engine.groups.cp_group(size).members) is not None]
        results = []
        for step in range(2):
            microbatches = loader.microbatches(step)
            with OverCp(groups) as over_cp:
                result = engine.train_step(microbatches)
            record = train_record(step, result, run, seconds=1.0)
            predicted = predict(loader.grid(step), corpus.shapes, CpCost.of(engine.config))
            of_stage = predicted.num_bytes  # for one pipeline stage and one tp rank
            plan = of_stage * engine.layout.tp * engine.layout.pp
            packs = Counter(mb.cp_size for mb in microbatches)
            results.append(
                {"packs": packs, "calls": over_cp.calls, "sent": over_cp.num_bytes, "log": record, "plan": plan}
            )
        return results


@pytest.mark.parametrize(
    "overrides",
    [
        DYNAMIC,
        TREES,
        [*HALF, *LINEAR, "parallel.tp=2"],
        [*DYNAMIC, *LATENT],
        # Keys and values of 8 heads have 136 numbers per token, the latent with the rotary key 24.
        pytest.param([*DYNAMIC, *LATENT, "model.latent_attention.kv_lora_rank=200"], marks=pytest.mark.grid),
        pytest.param([*DYNAMIC, *GEMMA], marks=pytest.mark.grid),
        pytest.param([*DYNAMIC, *LINEAR], marks=pytest.mark.grid),
        pytest.param([*HALF, "parallel.pp=2"], marks=pytest.mark.grid),
        pytest.param([*HALF, "train.recompute=full"], marks=pytest.mark.grid),
    ],
    ids=["dense", "trees", "linear-tp2", "latent", "keys of latents", "windows", "linear", "pp2", "dp2"],
)
def test_bytes_over_cp_are_those_of_the_log_and_of_the_plan(ranks: Ranks, overrides: list[str]) -> None:
    """In the dense model, the number of collectives is also checked: those of the layers, and one of metrics for each
    CP size."""
    results = ranks(4).run(steps, overrides, scenarios.LENGTHS)
    for of_step in zip(*results, strict=True):
        sizes = {size for rank in of_step for size in rank["packs"]}
        assert 1 in sizes and len(sizes) > 1, "packs of one rank and of several ranks should be in each step"
        sent = sum(rank["sent"].total() for rank in of_step)
        assert sent == of_step[0]["log"]["cp-bytes"] > 0
        assert sent == of_step[0]["plan"]
    if overrides in (DYNAMIC, TREES):
        for rank in (rank for of_step in zip(*results) for rank in of_step):
            packs = {size: number for size, number in rank["packs"].items() if size > 1}
            assert rank["calls"] == {size: number * NUM_COLLECTIVES + 1 for size, number in packs.items()}


def of_a_tree(overrides: list[str]) -> tuple[float, list[float]]:
    """Bytes that this rank sends over cp for a tree, and those of the equations: with its branches, and without."""
    # On two ranks, rank 1 holds the tokens 32 to 95 of the trunk.  The last tokens before each fork are there.
    sample, _ = tree_and_texts(
        lengths=[128, 64, 64],
        parents=[-1, 0, 0],
        forks=[0, 70, 80],
        ends=[(0, 128), (1, 64), (2, 64)],
        supervised=[(100, 128), (70, 134), (80, 144)],
        seed=0,
        vocab=scenarios.VOCAB,
    )
    with scenarios.running(overrides) as engine:
        microbatch = scenarios.microbatch_of(engine, [sample])
        group = engine.groups.cp_group(2).members
        assert group is not None
        with OverCp([group]) as over_cp:
            engine.train_step([microbatch])
        padded, equations = np.diff(microbatch.cu_seqlens.numpy().astype(np.int64)), CpBytes.of(engine.config)
        said = [float(equations.document_bytes(padded, 2, branches).sum()) for branches in (microbatch.branches, None)]
        return over_cp.num_bytes.total(), said


def test_bytes_of_the_windows_of_branches(ranks: Ranks) -> None:
    """Rank 0 receives the last 6 tokens before each of two branches, in each of two layers."""
    window = ["model.sliding_window=7", "model.sliding_window_layers=[1, 3]"]
    results = ranks(2).run(of_a_tree, ["parallel.cp=2", "train.global_batch_size=1", *window])
    with_branches, without = results[0][1]
    assert sum(sent for sent, _ in results) == with_branches
    # 4 key heads of 4 numbers; keys and values twice, and gradients once, in fp32
    assert with_branches - without == 2 * 2 * 6 * (2 * 4 * 4) * (4 + 4 + 4)


NUMBERS = 20 + 4  # elements of the latent and the rotary key of a token, which a rank sends instead of 8 x (10 + 7)
DEEPSEEK = [*MOE, *(key for key in ROUTERS if ".moe." in key)]
LATENT_BYTES = NUMBERS * (4 + 4 + 4)  # fp32: the latent in forward, again in backward, and its gradient


@pytest.mark.parametrize(
    "overrides,num_layers",
    [(["parallel.cp=2"], 4), ([*HALF, *DEEPSEEK, "train.mtp=joint"], 5)],
    ids=["fixed", "dynamic, with a block"],
)
def test_bytes_of_latents_by_hand(ranks: Ranks, overrides: list[str], num_layers: int) -> None:
    """For each token of a pack on two ranks, one rank sends the token's latent to the other, in every layer."""
    for of_step in zip(*ranks(2).run(steps, [*overrides, *LATENT], scenarios.LENGTHS), strict=True):
        log = of_step[0]["log"]
        num_tokens = log["by cp size"]["2"]["tokens"] if "by cp size" in log else log["tokens/aligned"]
        sent = sum(rank["sent"].total() for rank in of_step)
        assert sent == num_tokens * num_layers * LATENT_BYTES > 0
        assert sent == of_step[0]["plan"] == log.get("cp-bytes", sent)
        assert ("cp-bytes" in log) is ("parallel.dynamic_cp=true" in overrides)


def test_packs_of_one_rank_enter_no_collective_of_cp(ranks: Ranks) -> None:
    for of_rank in ranks(4).run(steps, DYNAMIC, SHORT):
        assert [set(step["packs"]) for step in of_rank] == [{1}, {1}]
        assert [step["calls"].total() for step in of_rank] == [0, 0]
        assert [step["plan"] for step in of_rank] == [0, 0]
        assert (
            [step["log"]["cp-bytes"] for step in of_rank]
            == [0, 0]
            < [step["log"]["cp-bytes-fixed"] for step in of_rank]
        )
