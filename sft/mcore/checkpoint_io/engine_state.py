"""Saves the engine's state as a checkpoint in Megatron's torch_dist format, and loads it.

A checkpoint holds the model under Megatron-LM's keys, the optimizer's tensors under the keys of Megatron-LM's fully
reshardable form, the states of random number generators, and one dictionary of plain values.  Runs with any tp, cp, pp,
dp, and with either optimizer, can load the checkpoint.  `torch_dist_files.py` writes and reads the bytes.
`optimizer_shards.py` cuts the optimizer's tensors.  `sft.checkpoint` decides when and where to save.
"""

import io
import json
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject

from sft.errors import CheckpointError
from sft.files.atomic_files import flush
from sft.files.file_digest import Entry
from sft.mcore.checkpoint_io import fp8_state, optimizer_shards, partial_stacks, rng, safe_reader, torch_dist_files
from sft.mcore.checkpoint_io.megatron_arguments import model_arguments
from sft.mcore.checkpoint_io.save_plans import SavePlans
from sft.mcore.engine import Engine, weights_changed
from sft.mcore.lora import adapted, freeze
from sft.mcore.sharding.parts import held
from sft.parallel.collectives import all_gather_objects, broadcast_from_rank0
from sft.parallel.layout import padded_vocab_size

CHECKPOINT_VERSION = 3.0  # Megatron-LM's number for the layout of these dictionaries


def snapshot(engine: Engine, plain: dict[str, Any], plans: SavePlans | None = None) -> torch_dist_files.Snapshot:
    """This rank's part of the engine's state, together with `plain` (JSON-like values).  Collective.

    plans: the plans of earlier saves of `engine`; None: new plans are made
    """
    model = trained_state(engine)
    slices = list(optimizer_shards.optimizer_slices(engine.optimizer))
    main = optimizer_shards.MAIN_PREFIX[engine.config.parallel.distributed_optimizer]
    optimizer_tensors = partial_stacks.for_save(
        optimizer_shards.sharded_slices(slices, model, main=main), engine.trained
    )
    whole, parts = held(engine.chunks, model)
    tensors = [*whole, *parts, *optimizer_tensors]
    # Modules store objects as well as tensors: Transformer Engine stores its scaling factors.
    module_objects = [entry for entry in nested_values(model) if isinstance(entry, ShardedObject)]
    objects = [*module_objects, rng.describe(engine.groups)]
    common = _common(engine, plain)
    return torch_dist_files.select_shards(tensors, objects, engine.groups, common, plans or SavePlans())


def write(
    taken: torch_dist_files.Snapshot, folder: Path, group: dist.ProcessGroup, plans: SavePlans | None = None
) -> dict[str, Entry]:
    """Write the snapshots of all ranks into the existing, empty `folder`.  Collective over `group`.

    All files are on disk when the function returns.  The caller marks the checkpoint as complete.  Returns, by name, an
    entry for each file of shards that this rank wrote.  If a rank cannot write, all raise StorageError or OSError.
    """
    files = torch_dist_files.write(taken, folder, group, plans or SavePlans())
    broadcast_from_rank0(lambda: write_common(taken.common, folder), group)
    return files


def load(engine: Engine, folder: Path) -> dict[str, Any]:
    """Load model, optimizer, schedule and random generators into `engine`; return the plain values.  Collective.

    Generators keep their states if the checkpoint was written on another layout, or holds no states of generators.
    Raises CheckpointError if the folder lacks something that the model needs, or holds a tensor of another shape.
    """
    reader = safe_reader.SafeReader(folder)
    common, stored = safe_reader.common_state(reader), safe_reader.tensors(reader)
    model = trained_state(engine)
    slices = list(optimizer_shards.optimizer_slices(engine.optimizer))
    # An fp32 run without the distributed optimizer has no fp32 weights besides the model's own.
    main = next((p for p in optimizer_shards.MAIN_PREFIX.values() if any(key.startswith(p) for key in stored)), "")
    wanted = list(partial_stacks.for_load(optimizer_shards.sharded_slices(slices, model, main=main), stored))
    step = _stored_step(common, folder)
    whole, parts = held(engine.chunks, model)
    _check_shapes([*whole, *parts, *wanted], stored, folder)
    torch_dist_files.read_replicated(whole, reader, engine.groups)
    torch_dist_files.read([*parts, *wanted], reader)
    for part in slices:
        part.write()
    if engine.config.run.fp8 == "delayed":
        modules = [chunk.module for chunk in engine.chunks]
        fp8_state.restore(modules, model_state(engine), engine.core_config, reader)
    optimizer_shards.set_step(engine.optimizer, step)
    engine.scheduler.num_steps = 0
    engine.scheduler.step(int(common["iteration"]))
    key = rng.key_of(engine.groups)
    if is_same_layout(engine, common) and key in safe_reader.objects(reader):
        states: dict[str, Any] = {key: None}
        safe_reader.load(states, reader)
        rng.restore(engine.groups, states[key][0])
    engine.has_weights = True
    return common


def is_same_layout(engine: Engine, common: dict[str, Any]) -> bool:
    """Whether the checkpoint with these plain values was written with the parallel sizes of `engine`."""
    stored, current = common.get("args"), _arguments(engine, 0)
    axes = ("tensor_model", "pipeline_model", "context", "data", "expert_model", "expert_tensor")
    sizes = [f"{axis}_parallel_size" for axis in axes]
    return all(getattr(stored, size, 1) == getattr(current, size) for size in sizes)


def load_weights(engine: Engine, folder: Path, *, trained: bool = False) -> None:
    """Load only the weights.  Adam's moments, the schedule and the step keep the values of a new run.  Collective.

    trained: with LoRA, False loads the model's weights without adapters, and True loads the adapters and the weights
        that are trained beside them
    """
    state = trained_state(engine) if trained else model_state(engine)
    (whole, parts), reader = held(engine.chunks, state), safe_reader.SafeReader(folder)
    _check_shapes([*whole, *parts], safe_reader.tensors(reader), folder)
    torch_dist_files.read_replicated(whole, reader, engine.groups)
    torch_dist_files.read(parts, reader)
    weights_changed(engine)


def is_finite(engine: Engine) -> bool:
    """Whether every trained weight of this rank is finite; frozen ones do not change.  Not collective."""
    params = (param for chunk in engine.chunks for param in chunk.parameters())
    return torch_dist_files.are_finite(param.detach() for param in params if param.requires_grad)


def trained_state(engine: Engine) -> dict[str, Any]:
    """The part of the model that a checkpoint holds: the whole model, or with LoRA the trained part.

    The trained part consists of the adapters and of the weights that are trained beside them.  With delayed scaling, a
    checkpoint also holds the FP8 scales of frozen layers, because they depend on earlier steps.
    """
    if not engine.config.lora.is_used:
        return model_state(engine)
    has_scales = engine.config.run.fp8 == "delayed"
    model = model_state(engine) if engine.trained.whole or has_scales else {}
    return {
        "adapters": list(adapted.leaves(engine.chunks)),
        "whole": list(freeze.whole_leaves(model, engine.trained)),
        "scales": [entry for entry in nested_values(model) if isinstance(entry, ShardedObject) and has_scales],
    }


def model_state(engine: Engine) -> dict[str, Any]:
    """The sharded state dict of each model chunk, without adapters, under the name that Megatron-LM gives the chunk."""
    names = ["model"] if len(engine.chunks) == 1 else [f"model{i}" for i in range(len(engine.chunks))]
    form = {"dp_cp_group": engine.groups.collection.dp_cp, **_form(engine)}  # core writes into it
    return {n: chunk.module.sharded_state_dict(metadata=dict(form)) for n, chunk in zip(names, engine.chunks)}


def _form(engine: Engine) -> dict[str, Any]:
    """The metadata of the sharded state dict.  A checkpoint stores it, and core reads it on load."""
    form: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if engine.config.parallel.distributed_optimizer:
        form["distrib_optim_sharding_type"] = "fully_reshardable"
    return form


def _common(engine: Engine, plain: dict[str, Any]) -> dict[str, Any]:
    """All plain values of the checkpoint: the plain values of the engine, and `plain`.  Collective."""
    # On a pipeline stage that trains no weight, Adam has made no update, so ranks can differ.
    step = max(all_gather_objects(lambda: optimizer_shards.step_of(engine.optimizer), engine.groups.control))
    return {
        "args": _arguments(engine, plain.get("iteration", 0)),
        "checkpoint_version": CHECKPOINT_VERSION,
        "content_metadata": _form(engine),
        "optimizer": optimizer_shards.plain_form(engine.optimizer, engine.layout.ep, step),
        "opt_param_scheduler": _schedule(engine),
        **plain,
    }


def _arguments(engine: Engine, step: int) -> Namespace:
    """The arguments that Megatron-LM compares with its own before it continues from a checkpoint."""
    config, layout = engine.config, engine.layout
    return Namespace(
        **model_arguments(
            config.model,
            padded_vocab_size=padded_vocab_size(engine.vocab_size, layout.tp),
            positions=config.data.seq_length,
            bf16=config.run.precision == "bf16",
        ),
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        data_parallel_size=layout.dp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        world_size=layout.world_size,
        sequence_parallel=layout.sequence_parallel,
        use_distributed_optimizer=config.parallel.distributed_optimizer,
        data_parallel_random_init=False,
        no_save_optim=False,
        no_save_rng=False,
        micro_batch_size=1,
        global_batch_size=layout.global_batch_size,
        consumed_train_samples=step * layout.global_batch_size,
    )


def _schedule(engine: Engine) -> dict[str, Any]:
    """The state of the schedule, with steps converted to packs: Megatron-LM counts its schedule in samples."""
    counted = ("num_steps", "lr_warmup_steps", "lr_decay_steps", "wd_incr_steps", "wsd_decay_steps")
    packs = engine.layout.global_batch_size
    stored: dict[str, Any] = engine.scheduler.state_dict()
    return {key: value * packs if key in counted and value is not None else value for key, value in stored.items()}


def _stored_step(common: dict[str, Any], folder: Path) -> int:
    """Adam's step in a checkpoint.  Raises CheckpointError if the optimizer has another form than this trainer writes.

    Megatron-LM's default form stores the optimizer by rank, so only one layout can load it.
    """
    plain = common.get("optimizer")
    form = (common.get("content_metadata") or {}).get("distrib_optim_sharding_type", "fully_reshardable")
    try:
        if plain is None or form != "fully_reshardable":
            raise KeyError(form)
        return optimizer_shards.stored_step(plain)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder} holds no optimizer state that this trainer can load (found {form if plain else 'none'}).  "
            f"Megatron-LM writes such a state with --dist-ckpt-optim-fully-reshardable; model.init_from={folder} "
            "loads only the weights."
        ) from error


def _check_shapes(wanted: list[Any], stored: dict[str, Any], folder: Path) -> None:
    """Raise CheckpointError if tensors are missing or have another shape.  Its message names these tensors."""
    problems = {}
    for shard in wanted:
        if shard.key not in stored:
            problems[shard.key] = "missing"
        elif stored[shard.key][0] != tuple(shard.global_shape) and not shard.allow_shape_mismatch:
            problems[shard.key] = f"{stored[shard.key][0]} in the checkpoint, {tuple(shard.global_shape)} in the model"
    if problems and all(key.startswith(optimizer_shards.PREFIX) for key in problems):
        first = min(problems)
        raise CheckpointError(
            f"{folder} holds no optimizer state of weights that this run trains ({first}: {problems[first]}), because "
            "the run that wrote it had frozen them, or updated them with another optimizer, or trained another model.  "
            "Give train.freeze and optim.name the values of that run; or start a new run from its weights: "
            f"model.init_from={folder} with another run.dir."
        )
    if problems:
        shown = [f"{key}: {problem}" for key, problem in sorted(problems.items())[:5]]
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(f"{folder} is of another model: {'; '.join(shown)}{more}.")


def write_common(common: dict[str, Any], folder: Path) -> None:
    """Write and flush the two files that hold no tensors: the plain values, and Megatron-LM's marker of the format."""
    stream = io.BytesIO()  # on a full disk, torch.save to a file raises an error that is not an OSError
    torch.save(common, stream)
    (folder / safe_reader.COMMON_FILE).write_bytes(stream.getvalue())
    config = {**asdict(CheckpointingConfig("torch_dist")), "common_backend": "torch", "common_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(config), encoding="ascii")
    for name in (safe_reader.COMMON_FILE, "metadata.json"):
        flush(folder / name)
