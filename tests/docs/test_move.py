"""`sft check` answers each key in the tables of docs/how-to/move.md as the row of the table says, and more keys."""

import re
from collections.abc import Iterator

import pytest

from sft.config import keys
from sft.errors import ConfigError
from sft.recipe.load import parse_recipe
from tests.builders import RECIPE
from tests.docs.blocks import ROOT

PAGE = ROOT / "docs/how-to/move.md"
_ROW = re.compile(r"\| `([\w.]+)` \| (none|`[\w.]+`) \|(.*)\|$")
_NO_ADVICE = re.compile(r"\)\.  (Keys of |Did you mean)")


def rows() -> Iterator[tuple[str, str, str]]:
    """(trainer, key of this trainer, our key or none)"""
    trainer = ""
    for line in PAGE.read_text(encoding="utf-8").split("\n"):
        if line.startswith("## "):
            trainer = line.removeprefix("## ")
        elif line.startswith("| `"):
            row = _ROW.fullmatch(line)
            assert row, f"no row of three cells: {line}"
            yield trainer, row[1], row[2].strip("`")


# Keys that the tables leave out, by our key.
MORE = """
attention.backend: attn_implementation flash_attention flash_attn model.attention_backend
checkpoint.async_save: checkpoint.async_save
checkpoint.keep_best: load_best_model_at_end metric_for_best_model
checkpoint.keep_last: checkpoint.most_recent_k save_total_limit
checkpoint.resume: resume_from_checkpoint
checkpoint.save_every: save_steps
data.cache_dir: dataset_prepared_path tokenized_path
data.chat_template: chat_template_path
data.chat_template_kwargs: enable_thinking
data.doc_multiple: pad_to_multiple_of
data.eval: dataset_test_split eval_dataset test_datasets
data.num_workers: dataset_num_proc preprocessing_num_workers
data.pad_to_seq_length: pad_to_sequence_len
data.seq_length: dataset.offline_packing_specs.packed_sequence_size
data.shuffle: shuffle_dataset
data.supervise: roles_to_train
data.tokenizer: tokenizer.tokenizer_model
data.train: dataset.dataset_root dataset_dir dataset_text_field dataset_train_split interleave_probs
log.every: logger.log_interval logging_steps
log.mlflow: logger.mlflow_experiment use_mlflow
log.wandb: logger.wandb_project wandb_project
lora.alpha: lora_alpha peft.alpha
lora.dropout: lora_dropout
lora.init_from: lora_model_dir
lora.lr_ratio: loraplus_lr_ratio
lora.rank: lora_r lora_rank peft.dim
lora.rslora: peft_use_rslora use_rslora
lora.targets: lora_target lora_target_modules
loss.impl: chunked_cross_entropy enable_liger_kernel model.cross_entropy_loss_fusion use_liger_kernel
model.hf: base_model model_name_or_path
model.moe.aux_loss_coef: model.moe_aux_loss_coeff router_aux_loss_coef
model.moe.z_loss_coef: model.moe_z_loss_coeff
none: adapter additional_target dataset.enable_offline_packing dataset.max_train_samples deepspeed dp_replicate_size
    eval_packing finetuning_type freeze_vision_tower fsdp_config gradient_accumulation_steps load_in_4bit
    lora_modules_to_save loss_type max_samples model.moe_grouped_gemm model.moe_token_dispatcher_type neat_packing
    neftune_noise_alpha optim_args optimizer packing packing_strategy padding_free peft_use_dora
    per_device_eval_batch_size pissa_init plot_loss push_to_hub quantization_bit sample_packing
    scheduler.lr_decay_iters special_tokens stage streaming torch_compile trust_remote_code use_dora use_mca use_peft
    use_swanlab val_set_size val_size validation.eval_iters
optim.beta1: adam_beta1
optim.beta2: adam_beta2 optimizer.adam_beta2
optim.clip_grad: max_grad_norm optimizer.clip_grad
optim.epsilon: adam_epsilon
optim.lr: learning_rate optimizer.lr
optim.min_lr: cosine_min_lr_ratio optimizer.min_lr
optim.offload_fraction: optimizer.optimizer_cpu_offload
optim.schedule: lr_scheduler lr_scheduler_type scheduler.lr_decay_style
optim.warmup_fraction: scheduler.lr_warmup_fraction warmup_ratio
optim.warmup_steps: scheduler.lr_warmup_iters warmup_steps
optim.weight_decay: weight_decay
parallel.cp: sequence_parallel_degree
parallel.cp_a2a: model.hierarchical_context_parallel_sizes
parallel.cp_comm: heads_k_stride model.cp_comm_type
parallel.distributed_optimizer: ddp.use_distributed_optimizer
parallel.ep: model.expert_model_parallel_size
parallel.etp: model.expert_tensor_parallel_size
parallel.overlap: ddp.overlap_grad_reduce
parallel.pp: model.pipeline_model_parallel_size
parallel.tp: tensor_parallel_size
parallel.virtual_stages: model.virtual_pipeline_model_parallel_size
run.deterministic: full_determinism
run.dir: output_dir
run.exit_after_minutes: train.exit_duration_in_mins
run.fp8: fp8
run.precision: bf16 dtype mixed_precision
run.seed: rng.seed seed
run.timeout_s: ddp_timeout dist.distributed_timeout_minutes
train.eval_every: eval_steps eval_strategy validation.eval_interval
train.num_epochs: num_epochs num_train_epochs
train.num_steps: max_steps
train.offload_fraction: activation_offloading
train.recompute: disable_gradient_checkpointing model.recompute_method model.recompute_modules
"""


def more() -> Iterator[tuple[str, str, str]]:
    """("", key of a trainer, our key or none)"""
    for line in MORE.replace("\n    ", " ").strip().split("\n"):
        ours, _, theirs = line.partition(": ")
        yield from (("", key, ours) for key in theirs.split())


ROWS = list(rows())


def answer(key: str) -> str:
    """The error message for a recipe with `key`; "" if `key` is one of our keys."""
    try:
        parse_recipe(RECIPE, "a.yaml", [f"{key}=1"])
    except ConfigError as error:
        return next(line for line in str(error).split("\n") if f"{key} " in line)
    return ""


@pytest.mark.parametrize(("trainer", "theirs", "ours"), [*ROWS, *more()], ids=lambda value: value)
def test_sft_check_answers_as_the_table_says(trainer: str, theirs: str, ours: str) -> None:
    if theirs == ours:
        assert ours in keys.leaves()
        return
    line = answer(theirs)
    assert line.startswith(f"unknown key {theirs} "), f"{trainer}: {theirs} is not refused: {line}"
    if ours == "none":
        assert not _NO_ADVICE.search(line) and "is called" not in line, line
    else:
        assert ours in (*keys.leaves(), *keys.sections())
        section, _, name = ours.rpartition(".")
        assert section in line and name in line, line


def test_every_trainer_has_a_table_without_a_key_twice() -> None:
    pairs = [(trainer, theirs) for trainer, theirs, _ in ROWS]
    assert [*dict.fromkeys(trainer for trainer, _ in pairs)] == ["Megatron-Bridge", "axolotl", "TRL", "LLaMA-Factory"]
    assert len(pairs) == len(set(pairs))
