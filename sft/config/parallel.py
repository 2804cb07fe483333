"""Keys of the layout: the size of each kind of parallelism."""

from collections.abc import Iterator
from typing import Literal

from pydantic import PositiveFloat

from sft.config.section import Positive, Section, divisors

Shard = Literal["optimizer", "gradients", "weights"]  # by rising amount of sharding


class ParallelConfig(Section):
    tp: Positive = 1
    """Tensor-parallel size."""
    cp: Positive = 1
    """Context-parallel size: the number of ranks over which each document is split."""
    pp: Positive = 1
    """Pipeline-parallel size."""
    ep: Positive = 1
    """Expert-parallel size: the number of the tp x cp x dp ranks of a pipeline stage over which experts are split."""
    etp: Positive = 1
    """Expert-tensor-parallel size: the number of ranks over which each expert is split."""
    virtual_stages: Positive = 1
    """Model chunks per pipeline rank (interleaved schedule); above 1 needs pp > 1."""
    sequence_parallel: bool = True
    """Split norms and residuals along the tokens over tp ranks; without effect with tp = 1."""
    distributed_optimizer: bool = True
    """Shard optimizer states over dp x cp, and the states of an expert over the ranks that hold the expert."""
    shard: Shard = "optimizer"
    """Sharded over the ranks of dp x cp: optimizer (its states), gradients (these, too), or weights (all three)."""
    shard_size: Positive | None = None
    """With shard = gradients or weights: number of ranks of dp x cp that together hold one copy (HSDP); null: all."""
    overlap: bool = True
    """Overlap reductions of gradients with computing (CUDA only)."""
    cp_comm: Literal["p2p", "all_gather", "a2a", "a2a+p2p"] = "p2p"
    """How te moves keys and values over cp (not yet run on GPUs).  portable always all-gathers."""
    cp_a2a: Positive | None = None
    """With a2a+p2p: number of neighbouring cp ranks that exchange heads (a2a); a ring (p2p) connects these groups."""

    dynamic_cp: bool = False
    """Each pack has its own CP size, a power of two that divides cp, or cp.  Short documents then need no CP."""
    gpus_per_node: Positive = 8
    """GPUs of a node."""
    intra_node_gb_s: PositiveFloat = 300.0
    """GB per second that a GPU receives from GPUs of its node (assumed).  Dynamic CP uses it to choose CP sizes."""
    inter_node_gb_s: PositiveFloat = 40.0
    """GB per second that a GPU receives from other nodes (assumed).  Dynamic CP uses it to choose CP sizes."""

    ep_comm: Literal["alltoall", "deepep"] = "alltoall"
    """How tokens travel to experts: NCCL's all-to-all, or kernels of the package deep_ep (not yet run on GPUs)."""

    @property
    def shards_gradients(self) -> bool:
        """Whether each rank keeps only its part of the gradients."""
        return self.shard != "optimizer"

    def conflicts(self) -> Iterator[tuple[str, str]]:
        yield from self._conflicts_of_shards()
        if self.ep_comm == "deepep" and self.ep * self.etp == 1:
            yield "ep_comm", "sends tokens to other ranks, which needs ep > 1; raise ep, or use alltoall"
        if self.dynamic_cp and self.cp == 1:
            yield "dynamic_cp", "chooses a CP size up to cp for each pack, but cp = 1.  Raise cp, or use false"
        if self.dynamic_cp and self.cp_comm == "a2a+p2p":
            yield "dynamic_cp", "cannot divide the two levels of cp_comm = a2a+p2p.  Use p2p, and cp_a2a = null"
        if self.virtual_stages > 1 and self.pp == 1:
            yield "virtual_stages", "needs pp > 1; got pp = 1.  Raise pp, or leave virtual_stages at 1"
        size, fitting = self.cp_a2a, [size for size in divisors(self.cp) if 1 < size < self.cp]
        choices = f"sizes that fit: {', '.join(map(str, fitting))}" if fitting else "no size fits; use p2p or a2a"
        if self.cp_comm != "a2a+p2p":
            if size is not None:
                yield "cp_a2a", f"has an effect only with cp_comm = a2a+p2p; got {self.cp_comm}.  Use null"
        elif size is None:
            yield "cp_a2a", f"is required with cp_comm = a2a+p2p; for cp = {self.cp}, {choices}"
        elif size not in fitting:
            yield "cp_a2a", f"must divide cp = {self.cp} into two factors above 1, and {size} does not; {choices}"

    def _conflicts_of_shards(self) -> Iterator[tuple[str, str]]:
        if self.shards_gradients and not self.distributed_optimizer:
            yield "shard", (
                "needs distributed_optimizer = true, because a rank updates only the part whose gradients it holds; "
                "set it, or shard = optimizer"
            )
        if self.shard == "weights" and self.pp > 1:
            yield "shard", (
                f"does not fit pp = {self.pp}, where each microbatch would gather all weights of a stage "
                "again while other stages wait; use gradients, or pp = 1"
            )
        if self.shard_size is not None and not self.shards_gradients:
            yield "shard_size", "has an effect only with shard = gradients or weights; got optimizer.  Use null"
