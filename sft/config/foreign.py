"""Maps settings of other trainers to keys of a recipe, or to the reason why there is no such key, for hints in errors.

The other trainers are Megatron-LM, Megatron-Bridge, transformers' Trainer, TRL, axolotl, LLaMA-Factory, torchtune, FSDP
and DeepSpeed.  docs/how-to/move.md has tables for four of them.
"""

_NAMES = {
    "model.hf": "base_model model_name model_name_or_path model_id model_path pretrained_model_name_or_path",
    "model.init_from": "load pretrained_checkpoint",
    "model.ffn_hidden_size": "intermediate_size",
    "model.head_dim": "kv_channels",
    "model.norm_epsilon": "rms_norm_eps layernorm_epsilon",
    "model.num_layers": "num_hidden_layers n_layers",
    "model.num_query_groups": "num_key_value_heads",
    "model.rope.base": "rotary_base rope_theta",
    "model.rope.scaling": "rope_type",
    "model.tie_embeddings": "tie_word_embeddings",
    "data.train": "datasets dataset_name dataset_path data_path data_files train_file train_files train_data"
    " dataset_root dataset_train_split dataset_text_field dataset_dir mix_strategy interleave_probs",
    "data.eval": "eval_dataset eval_file eval_files validation_file test_datasets valid_data_path dataset_test_split",
    "data.tokenizer": "tokenizer_name tokenizer_path tokenizer_model tokenizer_name_or_path tokenizer_config",
    "data.seq_length": "max_length max_seq_length max_seq_len sequence_len cutoff_len model_max_length"
    " packed_sequence_size",
    "data.cache_dir": "dataset_prepared_path data_cache_path tokenized_path",
    "data.add_tokens": "added_tokens tokens new_tokens",
    "data.add_special_tokens": "additional_special_tokens new_special_tokens",
    "data.num_workers": "dataset_num_proc preprocessing_num_workers dataset_processes",
    "data.over_long": "truncation excess_length_strategy overflow_strategy truncation_mode",
    "data.pad_to_seq_length": "pad_to_sequence_len pad_to_max_length",
    "data.supervise": "train_on_inputs assistant_only_loss completion_only_loss train_on_prompt roles_to_train"
    " mask_history",
    "parallel.tp": "tensor_model_parallel_size tensor_parallel_size tensor_parallel_degree tp_size",
    "parallel.cp": "context_model_parallel_size context_parallel_size context_parallel_degree cp_size"
    " sequence_parallel_size sequence_parallel_degree ulysses_sequence_parallel_size",
    "parallel.pp": "pipeline_model_parallel_size pipeline_parallel_size pipeline_parallel_degree pp_size",
    "parallel.ep": "expert_model_parallel_size expert_parallel_size expert_parallel_degree ep_size",
    "parallel.etp": "expert_tensor_parallel_size",
    "parallel.virtual_stages": "virtual_pipeline_model_parallel_size",
    "parallel.distributed_optimizer": "use_distributed_optimizer",
    "parallel.overlap": "overlap_grad_reduce",
    "parallel.shard": "fsdp zero_stage sharding_strategy data_parallel_sharding_strategy",
    "parallel.shard_size": "data_parallel_shard_degree dp_shard_size",
    "parallel.cp_comm": "cp_comm_type ring_attn_func heads_k_stride",
    "attention.backend": "attn_implementation flash_attention flash_attn use_flash_attn sdp_attention"
    " attention_backend",
    "train.num_steps": "max_steps train_iters max_train_steps num_train_steps",
    "train.num_epochs": "num_train_epochs max_epochs",
    "train.global_batch_size": "train_batch_size",
    "train.recompute": "gradient_checkpointing activation_checkpointing enable_activation_checkpointing"
    " recompute_granularity recompute_activations recompute_modules recompute_method disable_gradient_checkpointing",
    "train.offload_fraction": "activation_offloading enable_activation_offloading cpu_offload activation_offload"
    " fine_grained_activation_offloading",
    "train.eval_every": "eval_steps eval_interval evals_per_epoch eval_strategy evaluation_strategy",
    "loss.impl": "use_liger_kernel liger_fused_linear_cross_entropy cut_cross_entropy cross_entropy_loss_fusion"
    " enable_liger_kernel chunked_cross_entropy",
    "optim.lr": "learning_rate max_lr peak_lr",
    "optim.min_lr": "cosine_min_lr_ratio lr_min min_learning_rate",
    "optim.schedule": "lr_scheduler lr_scheduler_type lr_decay_style scheduler",
    "optim.warmup_steps": "lr_warmup_iters lr_warmup_steps num_warmup_steps warmup",
    "optim.warmup_fraction": "warmup_ratio lr_warmup_fraction",
    "optim.beta1": "adam_beta1",
    "optim.beta2": "adam_beta2",
    "optim.epsilon": "adam_eps adam_epsilon",
    "optim.muon.momentum": "muon_momentum",
    "optim.muon.nesterov": "muon_use_nesterov muon_nesterov",
    "optim.muon.ns_steps": "muon_num_ns_steps",
    "optim.muon.scale": "muon_scale_mode adjust_lr_fn",
    "optim.groups": "lr_groups embedding_lr embedding_lr_scale embedding_learning_rate decoupled_lr",
    "optim.clip_grad": "max_grad_norm gradient_clipping gradient_clip_val grad_clip",
    "optim.offload_fraction": "optimizer_cpu_offload optimizer_offload_fraction offload_optimizer",
    "optim.grad_dtype": "accumulate_allreduce_grads_in_fp32 grad_reduce_in_fp32 main_grads_dtype",
    "lora.rank": "r lora_r lora_rank dim",
    "lora.alpha": "lora_alpha",
    "lora.dropout": "lora_dropout",
    "lora.targets": "target_modules lora_target lora_target_modules lora_attn_modules" " apply_lora_to_mlp",
    "lora.target_parameters": "lora_target_parameters",
    "lora.exclude": "exclude_modules lora_exclude_modules",
    "lora.rslora": "use_rslora lora_use_rslora peft_use_rslora",
    "lora.train_embeddings": "trainable_token_indices",
    "lora.lr_ratio": "loraplus_lr_ratio",
    "lora.init_from": "adapter_name_or_path adapter_path lora_model_dir lora_path lora_weights",
    "lora.export": "merge_lora",
    "checkpoint.resume": "resume_from_checkpoint resume_from auto_resume_from_checkpoints",
    "checkpoint.save_every": "save_steps save_interval saves_per_epoch save_strategy",
    "checkpoint.keep_last": "save_total_limit most_recent_k",
    "checkpoint.keep_best": "load_best_model_at_end metric_for_best_model save_best",
    "checkpoint.async_save": "use_async_save",
    "log.every": "logging_steps log_interval log_every_n_steps",
    "log.tensorboard": "tensorboard_dir logging_dir use_tensorboard",
    "log.wandb": "report_to wandb_project use_wandb",
    "log.peak_tflops": "log_throughput",
    "run.dir": "output_dir save save_dir output checkpoint_dir",
    "run.precision": "bf16 params_dtype mixed_precision torch_dtype dtype tf32",
    "run.fp8": "fp8_format fp8_recipe",
    "run.timeout_s": "distributed_timeout_minutes ddp_timeout",
    "run.exit_after_minutes": "exit_duration_in_mins",
    "parallel.cp_a2a": "hierarchical_context_parallel_sizes",
    "loss.reduction": "calculate_per_token_loss",
    "data.doc_multiple": "pad_seq_to_mult pad_to_multiple_of",
    "data.shuffle": "shuffle_dataset",
    "data.chat_template": "template chat_template_path",
    "model.moe.aux_loss_coef": "moe_aux_loss_coeff moe_aux_loss_coef router_aux_loss_coef",
    "model.moe.z_loss_coef": "moe_z_loss_coeff",
    "train.mlp_tile": "tiled_mlp",
    "train.freeze": "unfrozen_parameters",
    "checkpoint.export_hf": "also_save_hf_checkpoint export_dir",
    "log.mlflow": "mlflow_experiment mlflow_experiment_name use_mlflow",
    "run.deterministic": "full_determinism",
}
CALLED_HERE = {name: key for key, names in _NAMES.items() for name in names.split()}

_REASONS = {
    "Remove it: lora.targets is all-linear by default": "lora_target_linear",
    "Remove it: lora.rank turns adapters on": "peft peft_config use_peft use_lora adapter finetuning_type"
    " train_type tuner_type",
    "Beside adapters, lora.train_embeddings and lora.train_head train whole weights": "modules_to_save"
    " lora_modules_to_save additional_target apply_lora_to_output",
    "All adapters have the same rank and scale": "rank_pattern alpha_pattern",
    "lora.exclude takes patterns of modules without adapters, such as model.layers.1?.*": "layers_to_transform"
    " peft_layers_to_transform",
    "Remove it if it is false.  Else write model.base_dtype=nf4 (4 bits), or as_stored for the low bits of the files; "
    "the scales of nf4 are not quantised, and products are in run.precision": "load_in_4bit load_in_8bit"
    " quantization quantization_bit quantization_config bnb_4bit_quant_type bnb_4bit_compute_dtype"
    " bnb_4bit_use_double_quant qlora use_qlora",
    "Adapters do not change how frozen weights are quantised (model.base_dtype)": "use_qalora loftq_config loftq_bits",
    "The only adapters are LoRA's, which add B A to a weight; DoRA and other variants are not supported": "dora"
    " use_dora peft_use_dora lora_bias use_bdlora alora_invocation_tokens kasa_config velora_config arrow_config",
    "A starts random and B at zero; starts that change the base weights are not supported": "init_lora_weights"
    " peft_init_lora_weights pissa pissa_init pissa_iter eva_config corda_config lora_ga_config",
    "Training in FP4 is not supported; run.fp8 trains in FP8, and checkpoint.export_format=nvfp4 quantises exports": (
        "fp4 fp4_format fp4_recipe fp4_param nvfp4"
    ),
    "fp16 is not supported, because gradients would need loss scaling; use run.precision=bf16": "fp16 half",
    "A microbatch is always one pack; train.global_batch_size, the packs of a step on all GPUs, is micro batch size x "
    "accumulation steps x data-parallel size": "batch_size micro_batch_size per_device_train_batch_size"
    " train_micro_batch_size_per_gpu"
    " gradient_accumulation_steps gradient_accumulation num_microbatches num_micro_batches",
    "A microbatch is one pack, in evaluations, too": "eval_batch_size per_device_eval_batch_size eval_micro_batch_size"
    " eval_iters",
    "dp has no key, because it follows from the number of processes: world_size / (tp * cp * pp)": "dp dp_size"
    " data_parallel_size data_parallel_degree num_gpus world_size",
    "parallel.shard divides optimizer states, gradients and weights among ranks of dp x cp; DeepSpeed and FSDP are not "
    "used": "deepspeed ds_config zero_optimization fsdp_config fsdp2 fsdp_version accelerate dp_replicate_size",
    "Samples are always packed, and no document of a pack reads another document": "packing sample_packing"
    " multipack_real_batches eval_sample_packing neat_packing pack packed enable_offline_packing packing_strategy"
    " padding_free eval_packing",
    "Evaluation needs files of its own: data.eval=FILE": "val_set_size val_size eval_split test_size",
    "data.add_tokens and data.add_special_tokens add tokens; roles such as pad_token come from the folder of the "
    "tokenizer": "special_tokens pad_token",
    "An export is a folder on disk, which `hf upload` uploads": "push_to_hub hub_model_id hub_strategy hub_token",
    "The optimizer is optim.name, adamw or muon, and its keys are those of optim": "optimizer optim_args optimizer_name"
    " optim_target_modules",
    "The code of a model is never downloaded": "trust_remote_code",
    "Training uses supervised tokens only: no rewards and no preferences": "rl dpo grpo reward_model beta_dpo beta"
    " ref_model ref_model_name_or_path max_prompt_length max_completion_length loss_type pref_loss pref_beta rlhf_type",
    "`sft score` writes a teacher's distributions into files, which data.teacher.files names": "teacher_model"
    " teacher_model_name_or_path kd_teacher distill_teacher",
    "8-bit moments are optim.moments=int8, with optim.name=adamw": "adamw_8bit adamw_bnb_8bit paged_adamw_8bit"
    " adamw_torch_8bit adam8bit",
    "Variables of the chat template stand in data.chat_template_kwargs, such as {enable_thinking: false}": (
        "enable_thinking"
    ),
    "model.rope has its keys: scaling (rope_type), factor, original_max_position, base (rope_theta)": "rope_scaling"
    " rope_parameters",
    "Experts always run as grouped GEMMs and all-to-all, with parallel.ep ranks; "
    "parallel.ep_comm says how": "moe_token_dispatcher_type moe_grouped_gemm",
    "All rows of a file are used; a shorter file, or the weight of a source in data.train, "
    "takes fewer": "max_train_samples max_samples",
    "Data are tokenised before the run and mapped into memory, so they are not streamed": "streaming dataset_streaming",
    "Learning rates decay until the last step of the run": "lr_decay_iters lr_decay_steps lr_decay_samples",
    "Linear, cosine and other shapes are optim.schedule, which the other keys of optim describe": "lr_scheduler_kwargs",
    "Training minimises the cross-entropy of supervised tokens; loss.reduction and "
    "loss.denominator weigh them": "use_dft_loss",
    "Embeddings get no noise": "neftune_noise_alpha",
    "Models are not compiled by torch.compile": "torch_compile torch_compile_backend",
    "Towers of images are never trained; their tensors are passed through": "freeze_vision_tower"
    " freeze_multi_modal_projector freeze_language_model",
    "`sft plot RUN` draws the curves": "plot_loss",
    "The log goes to metrics.jsonl, TensorBoard, and with log.wandb or log.mlflow to W&B or MLflow": "use_swanlab"
    " swanlab_project use_comet comet_project use_trackio",
    "Every run trains with megatron-core": "use_mca use_mcore",
    "The only stage is supervised fine-tuning": "stage",
}
NOT_HERE = {name: reason for reason, names in _REASONS.items() for name in names.split()}


def called_here(name: str) -> str | None:
    """The recipe key for a setting of another trainer, by the last known part of its dotted name; None: there is none.

    trainer.bf16 -> run.precision
    """
    return CALLED_HERE.get(_known(name) or "")


def why_not_here(name: str) -> str | None:
    """A sentence: why a recipe has no such setting; None if the setting is unknown.

    lora.use_dora -> The only adapters are ...
    """
    reason = NOT_HERE.get(_known(name) or "")
    return reason and f"{reason}."


def _known(name: str) -> str | None:
    """The last part of a dotted name that is a setting of another trainer: trainer.Max-Steps -> max_steps

    Two parts may be such a setting together: rope.type -> rope_type
    """
    words = [part.replace("-", "_").lower() for part in reversed(name.split("."))]
    words += [f"{group}_{part}" for part, group in zip(words, words[1:], strict=False)]
    return next((word for word in words if word in CALLED_HERE or word in NOT_HERE), None)
