"""Functions that tests run on every rank of a pool.  They return plain values.

    with running(overrides) as engine: ...

builds the whole trainer, without its data, on the layout that the overrides of RECIPE give.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sft.batch import Microbatch, Sample
from sft.data.loader import Loader
from sft.data.packing.cp_cost import CpCost
from sft.data.packing.pack import Collator
from sft.data.packing.plan import EpochPlans
from sft.layers.flops import AttentionCost
from sft.mcore import device, process_groups
from sft.mcore.checkpoint_io import engine_state, optimizer_shards
from sft.mcore.engine import Engine, release
from sft.mcore.initial_weights import initialise
from sft.mcore.lora import adapted
from sft.mcore.optimizer.inner import chained_optimizers
from sft.metrics.totals import StepResult, Totals
from sft.parallel import context_parallel
from sft.parallel.alignment import pack_multiple
from sft.parallel.layout import Layout
from sft.parallel.shapes import SampleSizes, Shapes
from sft.recipe.load import parse_recipe
from sft.weights.trained import trained_weights
from tests.ranks.pool import RankPool, join
from tests.tree_samples import tree_and_texts

VOCAB = 301  # a prime number, so no multiple of a layout size
DECAYS = (".A_log", ".dt_bias")  # ends of the names of the parameters that make the decay of linear attention

RECIPE = """
run: {dir: unused, device: cpu, precision: fp32, seed: 7}
model: {num_layers: 4, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 8, num_query_groups: 4, qk_norm: true,
        qkv_bias: true, init_from: random}
data: {train: unused, seq_length: 256, doc_multiple: 32}
parallel: {sequence_parallel: false, distributed_optimizer: false}
loss: {chunk_size: 24}
train: {num_steps: 5, global_batch_size: 4}
optim: {lr: 1e-3, weight_decay: 0.1, schedule: linear, warmup_steps: 1}
"""


class SkewedCorpus:
    """Random samples of unequal length of which only the last quarter is supervised: a short answer after a long
    prompt.

    With zigzag, few ranks hold all supervised tokens: of a document of 64 tokens with cp 2, rank 0 holds all of [48,
    64).
    """

    sources = ("even", "odd")

    def __init__(self, lengths: Sequence[int], vocab: int = VOCAB) -> None:
        rng = np.random.default_rng(3)
        self.lengths = np.array(lengths, dtype=np.int64)
        self.shapes: SampleSizes = self.lengths
        self._tokens = [rng.integers(0, vocab, size=n, dtype=np.int32) for n in lengths]

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, sample_id: int) -> Sample:
        tokens = self._tokens[sample_id]
        mask = np.arange(len(tokens)) >= 0.75 * len(tokens)
        return Sample(sample_id=sample_id, tokens=tokens, weights=mask.astype(np.float32), source=sample_id % 2)


class TreeCorpus(SkewedCorpus):
    """Every third sample is a tree: a document, two branches at one fork, and a branch of the second of them.

    Its documents are padded to multiples of 32 tokens.  The last quarter of each text is supervised.
    """

    def __init__(self, lengths: Sequence[int], vocab: int = VOCAB) -> None:
        super().__init__(lengths, vocab)
        self._trees: dict[int, Sample] = {}
        for sample_id in range(0, len(lengths), 3):
            first = 30 + 3 * (sample_id % 17)
            sizes, parents, forks = [first, 20, 35, 7], [-1, 0, 0, 2], [0, first // 2, first // 2, 9]
            ends = [(0, first), (1, 20), (2, 35), (3, 7)]
            counts = [first, first // 2 + 20, first // 2 + 35, first // 2 + 16]
            supervised = [(count - count // 4, count) for count in counts]
            self._trees[sample_id], _ = tree_and_texts(
                sizes, parents, forks, ends, supervised, seed=sample_id, vocab=vocab, sample_id=sample_id
            )
        documents = [
            (
                [(int(self.lengths[i]), 0)]
                if i not in self._trees
                else list(
                    zip(np.diff(self._trees[i].tree.starts).tolist(), self._trees[i].tree.branches.depths.tolist())
                )
            )
            for i in range(len(lengths))
        ]
        sizes_and_depths = np.array([pair for of_sample in documents for pair in of_sample])
        starts = np.cumsum([0, *map(len, documents)])
        self.shapes = Shapes(starts, *sizes_and_depths.T)
        self.lengths = np.asarray(self.shapes)

    def sample(self, sample_id: int) -> Sample:
        tree = self._trees.get(sample_id)
        return super().sample(sample_id) if tree is None else replace(tree, source=sample_id % 2)


# 20 packs of up to 256 tokens, that is, five global batches of four packs.
LENGTHS = [200, 37, 64, 5, 111, 90, 2, 256, 33, 150, 31, 75] * 4


@contextmanager
def running(
    overrides: Sequence[str],
    vocab: int = VOCAB,
    *,
    has_weights: bool = True,
    trains: bool = True,
    progress: Callable[[str], None] = lambda name: None,
) -> Iterator[Engine]:
    """An engine with random weights, on the layout that `overrides` of RECIPE give on this number of ranks; released at
    the end.

    has_weights: False leaves the weights unset; trains: False makes an engine for forward passes only
    """
    config = parse_recipe(RECIPE, "tests", list(overrides)).config
    join()
    layout = Layout.resolve(config, dist.get_world_size())
    on_device = device.start("cpu", deterministic=config.run.deterministic)
    place = process_groups.start(layout, on_device, seed=config.run.seed, timeout_s=600)
    engine = None
    try:
        num_steps = config.train.num_steps or 1
        engine = Engine(
            config,
            layout,
            place,
            vocab_size=vocab,
            num_steps=num_steps,
            trained=trained_weights(config, vocab),
            trains=trains,
            progress=progress,
        )
        if has_weights:
            initialise(engine)
            adapted.initialise(engine.chunks, config.run.seed)
        yield engine
    finally:
        process_groups.stop()
        if engine:
            # a model that is not released keeps its groups alive, and each group keeps threads that poll
            release(engine)


def loader_of(engine: Engine, corpus: Any = None) -> Loader:
    config, layout = engine.config, engine.layout
    if corpus is None:
        corpus = (TreeCorpus if config.data.turns == "each" else SkewedCorpus)(LENGTHS)
    plans = EpochPlans(corpus.shapes, config.data, seed=0, global_batch_size=layout.global_batch_size)
    return Loader(
        corpus,
        plans,
        {cp_size: collator_of(engine, cp_size) for cp_size in layout.cp_sizes or (layout.cp,)},
        layout,
        seq_length=config.data.seq_length,
        dp_rank=engine.groups.dp_rank,
        attention=AttentionCost.of(config.model),
        cp_cost=CpCost.of(config) if layout.cp_sizes else None,
    )


def collator_of(engine: Engine, cp_size: int | None = None) -> Collator:
    data, layout = engine.config.data, engine.layout
    size = cp_size or layout.cp
    return Collator(
        doc_multiple=data.doc_multiple,
        pack_multiple=pack_multiple(engine.config, size),
        pad_id=0,
        pad_to_length=data.seq_length * size // layout.cp if data.pad_to_seq_length else 0,
        reduction=engine.config.loss.reduction,
        shared=engine.config.loss.shared,
        cp_size=size,
        cp_rank=engine.groups.cp_rank % size,
    )


def microbatch_of(
    engine: Engine, samples: Sequence[Sample], doc_multiple: int | None = None, cp_size: int | None = None
) -> Microbatch:
    """This rank's part of a pack of the samples; without samples, the pack is one filler document."""
    collator = replace(collator_of(engine, cp_size), pad_to_length=0)
    if doc_multiple:
        collator = replace(collator, doc_multiple=doc_multiple, pack_multiple=1)
    return collator.microbatch(samples)


def microbatches_of(engine: Engine, packs: Sequence[Sequence[Sample]]) -> list[Microbatch]:
    """The packs of this data-parallel rank: packs are dealt to the data-parallel ranks in turn."""
    return [microbatch_of(engine, pack) for pack in packs[engine.groups.dp_rank :: engine.layout.dp]]


def count_parameters(engine: Engine) -> int:
    """The parameters of the whole model with padding of the vocabulary; counts tied embeddings and slices over tp
    once."""
    total = torch.zeros((), dtype=torch.int64)
    for chunk in engine.chunks:
        for param in chunk.module.parameters():
            split = getattr(param, "tensor_model_parallel", False)
            if (split or engine.groups.tp_rank == 0) and not getattr(param, "shared", False):
                total += param.numel()
    dist.all_reduce(total, group=engine.groups.collection.mp)
    return int(total)


def parameter_hash(engine: Engine) -> str:
    """A hash of all weights of the model on this rank.  Collective if weights are sharded."""
    found = {
        name: hashlib.sha256(weight.contiguous().view(torch.uint8).numpy()).hexdigest()
        for name, weight in weights_of(engine)
    }
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def weights_of(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    """All weights of this rank's chunks.  A sharded weight is whole only until the next one is asked for."""
    for number, chunk in enumerate(engine.chunks):
        units = {id(p): unit for unit in getattr(chunk, "units", ()) for flat in unit.flats for p in flat.params}
        for name, param in chunk.module.named_parameters():
            unit = units.get(id(param))
            if unit is not None:
                unit.make_whole()
            yield f"{number}.{name}", param.detach().clone()  # numpy would keep the memory of a shard
            if unit is not None:
                unit.free()


def optimizer_hash(engine: Engine) -> str:
    """A hash of the moments and fp32 weights of this rank, in the order of the optimizer."""
    digest = hashlib.sha256()
    for one in optimizer_shards.optimizer_slices(engine.optimizer):
        for name, flat in sorted(one.tensors.items()):
            digest.update(name.encode() + flat.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save(engine: Engine, folder: Path, plain: dict[str, Any]) -> None:
    """Writes a checkpoint of `engine`, without manifest, into `folder`, which must exist and be empty."""
    engine_state.write(engine_state.snapshot(engine, plain), folder, engine.groups.control)


def write_checkpoint(overrides: Sequence[str], folder: str) -> None:
    """Writes a checkpoint of random weights before any step into `folder`."""
    with running(overrides) as engine:
        save(engine, Path(folder), {"iteration": 0})


def train_steps(engine: Engine, steps: Sequence[int]) -> list[StepResult]:
    loader = loader_of(engine)
    return [engine.train_step(loader.microbatches(step)) for step in steps]


def train(
    overrides: Sequence[str], steps: Sequence[int] = (0, 1, 2), load: str | None = None, save_to: str | None = None
) -> dict[str, Any]:
    """Trains the given steps (counted from 0) from random weights or from the checkpoint `load`, and saves into
    `save_to`."""
    with running(overrides) as engine:
        if load:
            plain = engine_state.load(engine, Path(load))
            assert plain["iteration"] == steps[0]
        results, grid = train_steps(engine, steps), loader_of(engine).grid
        # advances the random generators, so that a resume has states to restore
        random.random(), np.random.random(), torch.rand(1)
        if save_to:
            Path(save_to).mkdir(exist_ok=True)
            save(engine, Path(save_to), {"iteration": steps[-1] + 1})
        groups = engine.groups
        return {
            "loss": [r.objective / r.num_tokens for r in results],
            "grad_norm": [r.grad_norm for r in results],
            "learning_rate": [r.learning_rate for r in results],
            "counts": [(r.num_tokens, r.num_real_tokens, r.num_aligned_tokens, r.num_documents) for r in results],
            "experts": [r.experts for r in results],
            "num_parameters": count_parameters(engine),
            "parameters": parameter_hash(engine),
            "optimizer": optimizer_hash(engine),
            "adam_steps": adam_steps(engine),
            "cp_sizes": {slot.cp_size for step in steps for slots in grid(step) for slot in slots},
            "place": (groups.dp_rank, groups.cp_rank, groups.tp_rank, groups.pp_rank),
        }


def adam_steps(engine: Engine) -> set[float]:
    if all("step" in group for group in engine.optimizer.param_groups):  # counted by group
        return {float(group["step"]) for group in engine.optimizer.param_groups}
    states = [s for o in chained_optimizers(engine.optimizer) for s in o.optimizer.state.values() if "step" in s]
    assert len({s["step"].data_ptr() for s in states}) == len(states), "shared, it would advance once per parameter"
    return {float(s["step"]) for s in states}


def check_bitwise(pool: RankPool, folder: Path, overrides: list[str]) -> None:
    """Two steps in one run equal, bit for bit, one step, a checkpoint, and one step of a resumed run."""
    whole = pool.run(train, overrides, [0, 1])
    first = pool.run(train, overrides, [0], None, str(folder))
    second = pool.run(train, overrides, [1], str(folder))
    for w, f, s in zip(whole, first, second):
        for name in ("loss", "grad_norm", "learning_rate"):
            assert f[name] + s[name] == w[name]
        assert s["parameters"] == w["parameters"] and s["optimizer"] == w["optimizer"]
        assert f["adam_steps"] == {1.0} and s["adam_steps"] == w["adam_steps"] == {2.0}


def gradients(
    overrides: Sequence[str], packs: Sequence[Sequence[int]], doc_multiple: int | None = None
) -> dict[str, Any]:
    """Gradients of the mean loss over `packs` of sample ids, by parameter name; needs tp 1, pp 1, dp 1."""
    with running(overrides) as engine:
        corpus = SkewedCorpus(LENGTHS)
        totals, grads = backward(
            engine, [microbatch_of(engine, [corpus.sample(i) for i in ids], doc_multiple) for ids in packs]
        )
        return {"gradients": grads, "loss": totals.objective / totals.num_tokens, "num_tokens": totals.num_tokens}


def backward(engine: Engine, microbatches: list[Microbatch]) -> tuple[Totals, dict[str, np.ndarray]]:
    """The totals of a forward and a backward pass, and the gradients of this rank by parameter name."""
    for chunk in engine.chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    totals = engine._run(microbatches, forward_only=False)
    named = [pair for chunk in engine.chunks for pair in chunk.named_parameters()]
    return totals, {name: param.main_grad.clone().numpy() for name, param in named}


def local_token_losses(engine: Engine, microbatch: Microbatch) -> Tensor | None:
    """-log p(label) of every local token, float32 [t], on the last pipeline stage; None elsewhere."""
    return _local_losses(engine, [microbatch])[0]


def _local_losses(engine: Engine, microbatches: Sequence[Microbatch]) -> Sequence[Tensor | None]:
    everywhere = [replace(mb, loss_weights=torch.ones_like(mb.loss_weights), further=None) for mb in microbatches]
    measured = [-rows.logprob for _, rows in engine.measure(everywhere, forward_only=True)] if everywhere else []
    return measured or [None] * len(microbatches)


def losses_of(engine: Engine, packs: Sequence[Sequence[Sample]]) -> list[Any]:
    """For each pack, the positions of the local tokens and their -log p(label); None on ranks without the last
    stage."""
    microbatches = [microbatch_of(engine, samples) for samples in packs]
    found = []
    for microbatch, losses in zip(microbatches, _local_losses(engine, microbatches)):
        where = context_parallel.local_indices(microbatch.cu_seqlens.numpy(), engine.layout.cp, engine.groups.cp_rank)
        found.append(None if losses is None else (where, losses.numpy()))
    return found


def token_losses(overrides: Sequence[str], packs: Sequence[Sequence[Sample]]) -> list[Any]:
    with running(overrides) as engine:
        return losses_of(engine, packs)


def in_pack_order(results: Sequence[list[Any]], pack: int, length: int) -> np.ndarray:
    """The losses of a pack, float32 [length], assembled from the ranks that hold its tokens."""
    losses = np.full(length, np.nan, dtype=np.float32)
    for result in results:
        if result[pack] is not None:
            where, values = result[pack]
            losses[where] = values
    assert not np.isnan(losses).any()
    return losses


def check_parameters(
    found: Mapping[str, Any], expected: Mapping[str, Any], tolerance: float, decay_tolerance: float | None = None
) -> float:
    """Checks that all parameters are present, and that each differs by at most `tolerance` of its norm; 0: bit for bit
    equal.  Returns the largest difference over a norm, without decays.

    decay_tolerance: for gradients of the decay of linear attention, which are sums over all tokens whose terms cancel
    """
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    wrong, worst = {}, 0.0
    for name, one in expected.items():
        limit = decay_tolerance if decay_tolerance is not None and name.endswith(DECAYS) else tolerance
        error, norm = (float(x.norm()) for x in (torch.as_tensor(found[name] - one), torch.as_tensor(one)))
        if not error <= limit * norm:
            wrong[name] = error, norm
        elif limit == tolerance and norm:
            worst = max(worst, error / norm)
    assert not wrong, wrong
    return worst
