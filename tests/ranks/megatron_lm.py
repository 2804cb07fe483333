"""Megatron-LM's side of a checkpoint, without code of this project: its model, its optimizer, its save and its load.

    with running("--tensor-model-parallel-size 2") as other:  # further flags of Megatron-LM's command line
        save(other, folder, iteration=1)

If megatron.training is installed (megatron-core 0.19), `save` and `load` call its save_checkpoint and load_checkpoint,
and its own parser reads the flags.  Otherwise they do the same with plain megatron-core calls. There is no forward
pass: a test that wants an update sets the gradients itself.
"""

import argparse
import ast
import contextlib
import importlib.util
import io
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from sft.mcore import device
from tests.ranks.pool import join

HAS_TRAINING = importlib.util.find_spec("megatron.training") is not None
VOCAB = 301
LAYERS = 4
SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
BATCH = 4  # samples per update; Megatron-LM's schedule counts samples

# The model and schedule of scenarios.RECIPE.
COMMAND = (
    "--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 4 --seq-length 256 --max-position-embeddings 256 --swiglu --normalization RMSNorm "
    "--qk-layernorm --add-qkv-bias --disable-bias-linear --untie-embeddings-and-output-weights "
    "--position-embedding-type rope --tokenizer-type NullTokenizer --vocab-size 301 --micro-batch-size 1 "
    "--global-batch-size 4 --train-iters 5 --lr 1e-3 --min-lr 0.0 --lr-decay-style linear --lr-warmup-iters 1 "
    "--weight-decay 0.1 --adam-beta2 0.95 --save-interval 1 --transformer-impl local --use-cpu-initialization "
    "--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-rope-fusion "
    "--no-bias-dropout-fusion --no-bias-swiglu-fusion --dist-ckpt-optim-fully-reshardable"
)
# The experts of test_experts.MOE.
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-token-dispatcher-type alltoall"


@dataclass
class Other:
    """One rank of a Megatron-LM run."""

    args: argparse.Namespace
    model: DistributedDataParallel
    optimizer: Any
    scheduler: OptimizerParamScheduler

    def update(self) -> None:
        """Runs one update with the present gradients; then steps the schedule, as Megatron-LM's loop does."""
        self.optimizer.step()
        self.scheduler.step(increment=BATCH)


@contextlib.contextmanager
def running(flags: str) -> Iterator[Other]:
    """A run with random weights and with `flags` added to COMMAND, on the ranks of this pool."""
    join()
    device.start("cpu")
    args = _arguments(f"{COMMAND} {flags}".split())
    sizes = {name: getattr(args, name) for name in SIZES}
    parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    model = _model(args)
    try:
        optimizer = _optimizer(args, model)
        yield Other(args=args, model=model, optimizer=optimizer, scheduler=_scheduler(args, optimizer))
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        vars(model).clear()  # parameters and their gradient hooks form cycles that the garbage collector does not see


def _arguments(words: list[str]) -> argparse.Namespace:
    args = _parsed(words) if HAS_TRAINING else _understood(words)
    # Megatron-LM's padding of the vocabulary depends on tp, ours does not
    multiple = 128 * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-VOCAB // multiple) * multiple
    return args


def _parsed(words: list[str]) -> argparse.Namespace:
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.training import arguments, global_vars

    global_vars.unset_global_variables()
    with (
        mock.patch.object(sys, "argv", ["pretrain_gpt.py", *words]),
        mock.patch.object(arguments, "get_device_arch_version", lambda: 10),  # the original function asks the GPU
        contextlib.redirect_stdout(io.StringIO()),
    ):
        args = arguments.parse_args()
        arguments.validate_args(args)
    global_vars.set_args(args)
    init_num_microbatches_calculator(args.rank, None, BATCH, 1, args.data_parallel_size)
    return args


def _understood(words: list[str]) -> argparse.Namespace:
    """The arguments that `_parsed` would return, as far as a checkpoint needs them."""
    args = argparse.Namespace(**dict.fromkeys(SIZES, 1), add_position_embedding=True, bf16=False)
    args.use_distributed_optimizer = args.no_save_optim = args.no_save_rng = False
    args.override_opt_param_scheduler = args.use_checkpoint_opt_param_scheduler = False
    args.num_experts = None
    for flag, value in zip(words, [*words[1:], "--"]):
        if flag.startswith("--"):
            given: Any = value
            with contextlib.suppress(ValueError, SyntaxError):
                given = ast.literal_eval(value)
            setattr(args, flag[2:].replace("-", "_"), True if value.startswith("--") else given)
    return args


def _model(args: argparse.Namespace) -> DistributedDataParallel:
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    shape = dict(num_layers=LAYERS, hidden_size=32, ffn_hidden_size=64, num_attention_heads=8, num_query_groups=4)
    kind = dict(normalization="RMSNorm", qk_layernorm=True, add_bias_linear=False, add_qkv_bias=True)
    gated = dict(gated_linear_unit=True, activation_func=torch.nn.functional.silu)
    dtypes = dict(params_dtype=dtype, pipeline_dtype=dtype, bf16=args.bf16)
    sizes = {name: getattr(args, name) for name in SIZES}
    experts = {}
    if args.num_experts:
        experts = dict(num_moe_experts=args.num_experts, moe_router_topk=args.moe_router_topk)
        experts |= dict(moe_ffn_hidden_size=args.moe_ffn_hidden_size, moe_token_dispatcher_type="alltoall")
    config = TransformerConfig(
        **shape,
        **kind,
        **gated,
        **dtypes,
        **sizes,
        **experts,
        use_cpu_initialization=True,
        **device.CPU_TRANSFORMER_FIELDS,
    )
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(args.num_experts),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=256,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    sharded = args.use_distributed_optimizer
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
    return DistributedDataParallel(config, ddp, chunk.bfloat16() if args.bf16 else chunk)


def _layer_spec(num_experts: int | None) -> Any:
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm", num_experts=num_experts)
    if num_experts:
        # megatron-core's local spec stores the norm before the experts under a key of the first matrix of dense layers.
        # With Transformer Engine, which users of Megatron-LM have, the norm has its own key, and so it has here.
        keys = spec.submodules.sharded_state_dict_keys_map
        spec.submodules.sharded_state_dict_keys_map = {k: v for k, v in keys.items() if k != "pre_mlp_layernorm."}
    return spec


def _optimizer(args: argparse.Namespace, model: DistributedDataParallel) -> Any:
    config = OptimizerConfig(
        optimizer="adam",
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=0.1,
        adam_beta2=0.95,
        clip_grad=1.0,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    overrides = get_standard_config_overrides(config)
    optimizer = get_megatron_optimizer(config, [model], config_overrides=overrides, use_gloo_process_groups=False)
    # torch's Adam lists only states that exist, Transformer Engine's Adam lists all
    for part in optimizer.chained_optimizers:
        for group in part.param_groups:
            for param in group["params"]:
                zeros = {name: torch.zeros_like(param.data) for name in ("exp_avg", "exp_avg_sq")}
                part.optimizer.state[param] = {"step": torch.zeros(()), **zeros}
    return optimizer


def _scheduler(args: argparse.Namespace, optimizer: Any) -> OptimizerParamScheduler:
    """Makes the scheduler of megatron.training.training.get_optimizer_param_scheduler, which counts samples."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=1 * BATCH,
        lr_decay_steps=5 * BATCH,
        lr_decay_style="linear",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=5 * BATCH,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
    )


def save(other: Other, folder: Path, iteration: int) -> None:
    """Saves as Megatron-LM with --save FOLDER does after `iteration` updates.  Collective."""
    other.args.save, other.args.consumed_train_samples = str(folder), iteration * BATCH
    if HAS_TRAINING:
        from megatron.training import checkpointing

        with contextlib.redirect_stdout(io.StringIO()):
            checkpointing.save_checkpoint(iteration, [other.model], other.optimizer, other.scheduler, 12345)
        return
    state = _described(other, _metadata(other), is_loading=False)
    if other.args.no_save_optim:
        del state["optimizer"], state["opt_param_scheduler"]
    state.update(args=other.args, checkpoint_version=3.0, iteration=iteration, rng_state=_rng_state())
    state["num_floating_point_operations_so_far"] = 12345
    place = folder / f"iter_{iteration:07d}"
    if dist.get_rank() == 0:
        place.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(place), content_metadata={**_metadata(other), "dp_cp_group": None})
    if dist.get_rank() == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))


def load(other: Other, folder: Path) -> int:
    """Loads as Megatron-LM with --load FOLDER does.  Returns the iteration.  Collective."""
    other.args.load = str(folder)
    with _adam_of_torch():
        if HAS_TRAINING:
            from megatron.training import checkpointing

            checkpointing._CHECKPOINT_VERSION = None  # a global of the process, but this process has many runs
            with contextlib.redirect_stdout(io.StringIO()):
                iteration, _ = checkpointing.load_checkpoint([other.model], other.optimizer, other.scheduler)
            return int(iteration)
        iteration = int((folder / "latest_checkpointed_iteration.txt").read_text())
        return _load_plainly(other, folder / f"iter_{iteration:07d}")


def _load_plainly(other: Other, place: Path) -> int:
    """Makes the calls of load_checkpoint that read the checkpoint, in its order."""
    common = dist_checkpointing.load_common_state_dict(str(place))
    theirs, ours = common["args"], other.args
    for name in ("num_layers", "hidden_size", "num_attention_heads", "add_position_embedding"):
        assert getattr(theirs, name) == getattr(ours, name), name
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    if ours.use_distributed_optimizer:
        assert metadata["distrib_optim_sharding_type"] == "fully_reshardable", metadata
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    wanted = _described(other, metadata, is_loading=True)
    wanted.pop("opt_param_scheduler")
    if not theirs.no_save_rng and all(getattr(theirs, size) == getattr(ours, size) for size in SIZES):
        wanted["rng_state"] = _rng_state()
    state = dist_checkpointing.load(wanted, str(place))
    ours.consumed_train_samples = theirs.consumed_train_samples
    other.model.load_state_dict(state["model"])
    other.optimizer.load_state_dict(state["optimizer"])
    other.scheduler.load_state_dict(state["opt_param_scheduler"])
    return int(state["iteration"])


def _described(other: Other, metadata: dict[str, Any], *, is_loading: bool) -> dict[str, Any]:
    model = other.model.module.sharded_state_dict(metadata=metadata)
    optimizer = other.optimizer.sharded_state_dict({"model": model}, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer, "opt_param_scheduler": other.scheduler.state_dict()}


def _metadata(other: Other) -> dict[str, Any]:
    kind = {"distrib_optim_sharding_type": "fully_reshardable"} if other.args.use_distributed_optimizer else {}
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {**kind, "singleton_local_shards": False, "chained_optim_avoid_prefix": True, "dp_cp_group": group}


def _rng_state() -> ShardedObject:
    state = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    tp, pp = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return ShardedObject("rng_state", [state], (pp.size(), tp.size()), (pp.rank(), tp.rank()), replica_id=replica)


@contextlib.contextmanager
def _adam_of_torch() -> Iterator[None]:
    """Without Transformer Engine, megatron-core's distributed optimizer looks for a stored tensor named `step`, and
    shares one such tensor among all parameters.  Users of Megatron-LM have Transformer Engine, so neither happens to
    them."""
    put = DistributedOptimizer._set_main_param_and_optimizer_states

    def without_step(self: Any, param: Any, tensors: dict[str, Tensor]) -> None:
        group, order = self.model_param_group_index_map[param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        step = state.pop("step")
        put(self, param, tensors)
        state["step"] = step.clone()

    with mock.patch.object(DistributedOptimizer, "_set_main_param_and_optimizer_states", without_step):
        yield
