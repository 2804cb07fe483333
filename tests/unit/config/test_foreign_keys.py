"""Settings of other trainers: the error names our key, or says why we have none."""

import pytest

from sft.config import foreign, keys
from tests.builders import RECIPE, refusal_lines

# Written as users of Megatron-LM, transformers, TRL and axolotl write them; @ stands for `command line: OVERRIDE`.
ADVICE = {
    "gradient_checkpointing=true": "It is called train.recompute here, which takes one of none, selective, "
    "attention_kept, full.  Did you mean full?",
    "train.gradient_checkpointing=true": "It is called train.recompute here, which takes one of none, selective, "
    "attention_kept, full.  Did you mean full?",
    "trainer.max_steps=9": "It is called train.num_steps here, which takes a whole number of at least 1 and of at most "
    "100,000,000 or null.",
    "bf16=true": "It is called run.precision here, which takes one of bf16, fp32.",
    "max_seq_length=2048": "It is called data.seq_length here, which takes a whole number of at least 1.",
    "base_model=a": "It is called model.hf here, which takes non-empty text or null.",
    "train.micro_batch_size=1": "A microbatch is always one pack; train.global_batch_size, the packs of a step on all "
    "GPUs, is micro batch size x accumulation steps x data-parallel size.",
    "model.rope.type=yarn": "It is called model.rope.scaling here, which takes one of none, linear, llama3, yarn, "
    "proportional.",
    "loss.type=dpo": "Training uses supervised tokens only: no rewards and no preferences.",
    "lora.r=16": "It is called lora.rank here, which takes a whole number of at least 1 or null.",
    "peft.lora_alpha=16": "It is called lora.alpha here, which takes a number above 0.0.",
    "use_dora=true": "The only adapters are LoRA's, which add B A to a weight; DoRA and other variants are not "
    "supported.",
    "lora.modules_to_save=lm_head": "Beside adapters, lora.train_embeddings and lora.train_head train whole weights.",
    "load_in_4bit=true": "Remove it if it is false.  Else write model.base_dtype=nf4 (4 bits), or as_stored for the "
    "low bits of the files; the scales of nf4 are not quantised, and products are in run.precision.",
    "lora_target_linear=true": "Remove it: lora.targets is all-linear by default.",
    "deepspeed=a.json": "parallel.shard divides optimizer states, gradients and weights among ranks of dp x cp; "
    "DeepSpeed and FSDP are not used.",
    "data_parallel_sharding_strategy=optim_grads_params": "It is called parallel.shard here, which takes one of "
    "optimizer, gradients, weights.",
    "parallel.dp=2": "dp has no key, because it follows from the number of processes: world_size / (tp * cp * pp).",
    "sample-packing=true": "Samples are always packed, and no document of a pack reads another document.",
    # here `datasets` is a name that the user chose, not a setting of another trainer
    "data.train={datasets: {files: a.jsonl, wieght: 2}}": "Did you mean data.train.datasets.weight?",
}


@pytest.mark.parametrize("override, advice", ADVICE.items())
def test_the_error_says_what_to_write_instead(override: str, advice: str) -> None:
    (line,) = refusal_lines(RECIPE, override)
    assert line.startswith("unknown key ")
    assert line.endswith(f"(command line: {override}).  {advice}")


@pytest.mark.parametrize("override", ["run.fp8=nvfp4", "run.fp8=FP4", "run.fp4=e2m1"])
def test_training_in_fp4_is_refused_by_name(override: str) -> None:
    (line,) = refusal_lines(RECIPE, override)
    reason = "Training in FP4 is not supported; run.fp8 trains in FP8, and checkpoint.export_format=nvfp4 quantises"
    assert line.endswith(f"  {reason} exports.")


def test_each_name_leads_to_one_of_our_keys_or_to_one_reason() -> None:
    names = [name for _, names in [*foreign._NAMES.items(), *foreign._REASONS.items()] for name in names.split()]
    assert len(names) == len(set(names))
    assert set(foreign.CALLED_HERE.values()) <= set(keys.leaves())
    assert not set(names) & {group.rpartition(".")[2] for group in keys.sections()}, "our groups would be foreign"
    own = {key.rpartition(".")[2] for key in keys.leaves()}
    assert not set(names) & own, "an error about optim.lr would say that lr is called something else"
