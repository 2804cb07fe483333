"""Mistakes in a recipe: every message names the place, the value, and a value that would work."""

from pathlib import Path

import pytest

from sft.cli import main
from sft.errors import ConfigError
from sft.recipe.needs import check_names
from tests.builders import RECIPE, parsed, refusal_lines

# @ stands for `command line: OVERRIDE`.
MISTAKES = {
    "data.seq_lenght=2048": "unknown key data.seq_lenght (@).  Did you mean data.seq_length?",
    "parallel.context_parallel_size=2": "unknown key parallel.context_parallel_size (@).  It is called parallel.cp "
    "here, which takes a whole number of at least 1.",
    "attention.zzz=2": "unknown key attention.zzz (@).  Keys of attention: backend, kernels, delta_rule.",
    "zzz=2": "unknown key zzz (@).  Keys of a recipe: run, model, data, parallel, attention, loss, train, optim, "
    "lora, checkpoint, log, profile.",
    "run.dir.x=2": "unknown key run.dir.x (@).  Did you mean run.dir?",
    "model.megatron.a-b=2": "unknown key model.megatron.a-b (@).  Keys of model.megatron: "
    "disable_bf16_reduced_precision_matmul, moe_permute_fusion.",
    "parallel.cp=x": 'parallel.cp = "x" (@); expected a whole number of at least 1.',
    'parallel.cp="4"': 'parallel.cp = "4" (@); expected a whole number of at least 1.  Write 4, without quotes.',
    "data.seq_length=1_024": 'data.seq_length = "1_024" (@); expected a whole number of at least 1.  Write 1024.',
    "parallel.cp=4.0": "parallel.cp = 4.0 (@); expected a whole number of at least 1.  Write 4.",
    "optim.lr=fast": 'optim.lr = "fast" (@); expected a number above 0.0.',
    "optim.lr=1e999": "optim.lr = Infinity (@); expected a number above 0.0.",
    "data.shuffle=no": 'data.shuffle = "no" (@); expected true or false.  Write false.',
    "parallel.cp_comm=p2pp": 'parallel.cp_comm = "p2pp" (@); expected one of p2p, all_gather, a2a, a2a+p2p.  Did you '
    "mean p2p?",
    "data.shuffle=yes": 'data.shuffle = "yes" (@); expected true or false.  Write true.',
    "data.seq_length=64KB": 'data.seq_length = "64KB" (@); expected a whole number of at least 1.  Write 64K, '
    "without B.",
    "train.recompute=true": "train.recompute = true (@); expected one of none, selective, attention_kept, full.  Did "
    "you mean full?",
    "attention.backend=flash_attention_2": 'attention.backend = "flash_attention_2" (@); expected one of auto, te, '
    "portable.  Write auto, the fastest installed kernel; attention.kernels=[fa2] would choose one.",
    "run.device=gpu": 'run.device = "gpu" (@); expected one of auto, cuda, cpu.  Did you mean cuda?',
    "train.eval_every=None": 'train.eval_every = "None" (@); expected a whole number of at least 1 or null.  Write '
    "null, without quotes.",
    'run.dir=""': 'run.dir = "" (@); expected non-empty text.',
    "parallel=4": "parallel = 4 (@); expected a group of keys.  Keys of parallel: tp, cp, pp, ep, etp, virtual_stages, "
    "sequence_parallel, distributed_optimizer, shard, shard_size, overlap, cp_comm, cp_a2a, dynamic_cp, gpus_per_node, "
    "intra_node_gb_s, inter_node_gb_s, ep_comm.",
    "model.megatron.window_size={b: 1}": 'model.megatron.window_size = {"b": 1} (@) has its own key; use '
    "model.sliding_window.",
    "model.megatron.num_layers=3": "model.megatron.num_layers = 3 (@) has its own key; use model.num_layers.",
    "model.megatron.moe_permute_fusion=off": 'model.megatron.moe_permute_fusion = "off" (@); expected false.',
    "model.megatron.moe_permute_fusion=false": "model.megatron.moe_permute_fusion = false (@) has no effect without "
    "moe.num_experts; leave it out.",
    "parallel.cp": 'override "parallel.cp" has no value; write KEY=VALUE, or KEY=null to unset KEY.',
    "data.train=[a": "@, line 1: expected ',' or ']', but got '<stream end>'.  Quote texts with special characters.",
    "data.train=[*a]": "@, line 1: YAML anchors and aliases (& and *) are not supported.  Write the value out, or "
    "quote it.",
    f"parallel.cp={'9' * 50}": f"parallel.cp = 1e+50 (@); expected a whole number of at least 1.  Write {int(1e50)}.",
}


@pytest.mark.parametrize("override, message", MISTAKES.items(), ids=str)
def test_mistakes(override: str, message: str) -> None:
    assert refusal_lines(RECIPE, override) == [message.replace("@", f"command line: {override}")]


# Overrides that exclude each other; @ stands for the last of them.
CLASHES = {
    ("model.init_from=null",): "model.init_from = null (@) says no initial weights, because there is no model.hf; set "
    "model.hf to a Hugging Face folder, model.init_from to a Megatron checkpoint, or model.init_from=random.",
    ("model.num_attention_heads=5",): "model.num_attention_heads = 5 (@) does not divide hidden_size 64; set head_dim.",
    ("model.num_query_groups=3",): "model.num_query_groups = 3 (@) does not divide 4 heads; use one of 1, 2, 4.",
    ("model.head_dim=15",): "model.head_dim = 15 (@) makes heads of width 15, but rotary positions need an even width.",
    ("model.rope.factor=4",): "model.rope.factor = 4 (@) has no effect with scaling = none; use linear, llama3 or "
    "yarn.",
    ("model.rope.scaling=linear",): "model.rope.factor = 1.0 (default) must be above 1 for linear scaling; give "
    "the new length / original_max_position.",
    ("model.rope.scaling=yarn", "model.rope.factor=4"): "model.rope.original_max_position = null (default) is "
    "required with scaling = yarn; give the context length before scaling.",
    ("model.rope={scaling: llama3, factor: 8, original_max_position: 8192, low_freq_factor: 4}",): ""
    "model.rope.high_freq_factor = 4.0 (default) must be above low_freq_factor = 4.0.",
    ("model.rope={scaling: yarn, factor: 8, original_max_position: 8192, beta_slow: 33}",): "model.rope.beta_fast = "
    "32.0 (default) must not be below beta_slow = 33.0.",
    ("parallel.virtual_stages=2",): "parallel.virtual_stages = 2 (@) needs pp > 1; got pp = 1.  Raise pp, or leave "
    "virtual_stages at 1.",
    ("train.num_steps=null",): "train.num_steps = null (@) and num_epochs = null; give one of them.",
    ("train.num_epochs=2",): "train.num_epochs = 2 (@) clashes with num_steps = 10; set one of them to null.",
    ("optim.warmup_steps=2", "optim.warmup_fraction=0.1"): "optim.warmup_fraction = 0.1 (@) clashes with warmup_steps "
    "= 2; give one of them.",
    ("optim.min_lr=1",): "optim.min_lr = 1 (@) is above the peak learning rate, lr = 1e-05.",
    ("optim.schedule=constant", "optim.min_lr=1e-6"): "optim.min_lr = 1e-06 (@) has no effect with schedule = "
    "constant; use another schedule, or min_lr = 0.",
    ("optim.schedule=wsd", "optim.warmup_fraction=0.95"): "optim.wsd_decay_fraction = 0.1 (default) and "
    "warmup_fraction = 0.95 together exceed the run.",
    ("optim.warmup_steps=10",): "optim.warmup_steps = 10 (@) must be below train.num_steps = 10; lower it, or raise "
    "num_steps.",
    ("parallel.distributed_optimizer=false", "parallel.shard=gradients"): 'parallel.shard = "gradients" (@) needs '
    "distributed_optimizer = true, because a rank updates only the part whose gradients it holds; set it, or shard = "
    "optimizer.",
    ("parallel.pp=2", "parallel.shard=weights"): 'parallel.shard = "weights" (@) does not fit pp = 2, where each '
    "microbatch would gather all weights of a stage again while other stages wait; use gradients, or pp = 1.",
    ("parallel.shard_size=4",): "parallel.shard_size = 4 (@) has an effect only with shard = gradients or weights; got "
    "optimizer.  Use null.",
    ("run.fp8=tensorwise", "parallel.shard=weights"): 'parallel.shard = "weights" (@) does not fit run.fp8 = '
    "tensorwise, because Transformer Engine keeps 8-bit copies of all weights between microbatches; use gradients, or "
    "run.fp8 = null.",
    ("run.device=cpu", "attention.backend=te"): 'attention.backend = "te" (@) needs CUDA, and run.device is cpu; use '
    "portable or auto.",
    (
        "run.precision=fp32",
        "model.megatron.disable_bf16_reduced_precision_matmul=true",
    ): "model.megatron.disable_bf16_reduced_precision_matmul = true (@) has no effect with run.precision = fp32; use "
    "false.",
    (
        "model.moe={num_experts: 4, top_k: 2}",
        "parallel.ep=2",
        "run.deterministic=true",
        "parallel.ep_comm=deepep",
    ): 'parallel.ep_comm = "deepep" (@) is not bitwise repeatable; use alltoall, or run.deterministic = false.',
    ("run.device=cpu", "run.fp8=delayed"): 'run.fp8 = "delayed" (@) needs CUDA, and run.device is cpu; use null.',
    (
        "run.precision=fp32",
        "run.fp8=mxfp8",
    ): 'run.fp8 = "mxfp8" (@) needs run.precision = bf16, but run.precision is fp32; use '
    "bf16, or null.",
    (
        "run.fp8=delayed",
        "train.recompute=attention_kept",
    ): 'train.recompute = "attention_kept" (@) does not fit run.fp8 = delayed, whose scales '
    "Transformer Engine restores in attention that runs again; use full or selective, or another run.fp8.",
    ("run.modules=local", "run.fp8=blockwise"): 'run.fp8 = "blockwise" (@) needs modules of Transformer Engine, '
    "but run.modules is local; use te or auto, or null.",
    ("parallel.cp_comm=a2a+p2p", "parallel.cp=12"): "parallel.cp_a2a = null (default) is required with cp_comm = "
    "a2a+p2p; for cp = 12, sizes that fit: 2, 3, 4, 6.",
    ("run.precision=fp32", "optim.grad_dtype=bf16"): 'optim.grad_dtype = "bf16" (@) needs run.precision = bf16, but '
    "run.precision is fp32; use fp32, or run.precision = bf16.",
    ("parallel.cp=2", "parallel.dynamic_cp=true", "optim.grad_dtype=bf16"): 'optim.grad_dtype = "bf16" (@) needs one '
    "microbatch per step on each rank, and with parallel.dynamic_cp = true a step has as many as its documents need: "
    "their sum in bf16 would lose small terms; use fp32, or dynamic_cp = false.",
    ("parallel.dynamic_cp=true",): "parallel.dynamic_cp = true (@) chooses a CP size up to cp for each pack, but cp = "
    "1.  Raise cp, or use false.",
    (
        "parallel.cp=4",
        "parallel.cp_comm=a2a+p2p",
        "parallel.cp_a2a=2",
        "parallel.dynamic_cp=true",
    ): "parallel.dynamic_cp = true (@) cannot divide the two levels of cp_comm = a2a+p2p.  Use p2p, and "
    "cp_a2a = null.",
    ("parallel.cp=4", "parallel.cp_a2a=2"): "parallel.cp_a2a = 2 (@) has an effect only with cp_comm = a2a+p2p; got "
    "p2p.  Use null.",
    ("parallel.cp_comm=a2a+p2p", "parallel.cp=4", "parallel.cp_a2a=4"): "parallel.cp_a2a = 4 (@) must divide cp = 4 "
    "into two factors above 1, and 4 does not; sizes that fit: 2.",
    ("parallel.cp_comm=a2a+p2p", "parallel.cp=2", "parallel.cp_a2a=2"): "parallel.cp_a2a = 2 (@) must divide cp = 2 "
    "into two factors above 1, and 2 does not; no size fits; use p2p or a2a.",
}


@pytest.mark.parametrize("overrides, message", CLASHES.items(), ids=str)
def test_impossible_combinations(overrides: tuple[str, ...], message: str) -> None:
    assert refusal_lines(RECIPE, *overrides) == [message.replace("@", f"command line: {overrides[-1]}")]


def test_a_mistake_in_the_file_names_its_line() -> None:
    text = RECIPE.replace("lr: 1e-5", "lr: -1")
    assert refusal_lines(text) == ["optim.lr = -1 (a.yaml, line 13); expected a number above 0.0."]


def test_what_is_missing() -> None:
    assert refusal_lines(RECIPE.replace("run: {dir: runs/a}\n", "")) == [
        "run.dir is missing from a.yaml; expected non-empty text.  Folder of recipe.yaml, data.json, "
        "metrics.jsonl, tensorboard/, checkpoints/.  Each run needs its own folder."
    ]


@pytest.mark.parametrize("text", ["", "# nothing yet\n"])
def test_an_empty_recipe_names_what_it_must_give(text: str) -> None:
    lines = refusal_lines(text)
    assert [line.split(": ", 1)[1].split(" ")[0] for line in lines][:2] == ["run.dir", "model.hf"]
    assert "data.train is missing from a.yaml; expected a path or a list of paths" in "".join(lines)


def test_a_misspelt_key_is_not_missing_as_well() -> None:
    assert refusal_lines(RECIPE.replace("seq_length", "seq_lenght")) == [
        "unknown key data.seq_lenght (a.yaml, line 10).  Did you mean data.seq_length?"
    ]
    assert refusal_lines(RECIPE.replace("optim:", "optimizer:")) == [
        "unknown key optimizer (a.yaml, line 12).  The optimizer is optim.name, adamw or muon, and its keys are those "
        "of optim."
    ]


def test_a_key_given_twice() -> None:
    assert refusal_lines(RECIPE + "  lr: 2e-5\n") == [
        "optim.lr is given twice (a.yaml, line 14; first in line 13).  Keep one."
    ]
    assert refusal_lines(RECIPE + "run: {dir: b}\n") == [
        "run is given twice (a.yaml, line 14; first in line 1).  Keep one."
    ]


def test_all_mistakes_at_once_in_the_order_of_the_file_then_the_command_line_then_what_is_missing() -> None:
    text = RECIPE.replace("  lr: 1e-5\n", "  beta1: 2\n").replace("num_layers: 2", "num_layers: two") + "lgo: 3\n"
    assert refusal_lines(text, "parallel.virtual_stages=2", "data.seq_length=4.0", "x=1") == [
        '1 of 7: model.num_layers = "two" (a.yaml, line 3); expected a whole number of at least 1 and of at most '
        "4,096.",
        "  2 of 7: optim.beta1 = 2 (a.yaml, line 13); expected a number of at least 0.0 and below 1.0.",
        "  3 of 7: unknown key lgo (a.yaml, line 14).  Did you mean log?",
        "  4 of 7: unknown key x (command line: x=1).  Keys of a recipe: run, model, data, parallel, attention, loss, "
        "train, optim, lora, checkpoint, log, profile.",
        "  5 of 7: data.seq_length = 4.0 (command line: data.seq_length=4.0); expected a whole number of at least 1.  "
        "Write 4.",
        "  6 of 7: parallel.virtual_stages = 2 (command line: parallel.virtual_stages=2) needs pp > 1; got pp = 1.  "
        "Raise pp, or leave virtual_stages at 1.",
        "  7 of 7: optim.lr is missing from a.yaml; expected a number above 0.0.  "
        "Peak learning rate: often 1e-5 for all weights, and 2e-4 for LoRA.",
    ]


BROKEN = {
    "run: {dir: !!python/object/apply:os.system [echo]}": (
        "line 1: the tag tag:yaml.org,2002:python/object/apply:os.system is not supported.  Remove it; a value in "
        "quotes is text."
    ),
    "run:\n  dir: &here runs/a": "line 2: YAML anchors and aliases (& and *) are not supported.  Write the value "
    "out, or quote it.",
    "run:\n\n  dir: *here": "line 3: YAML anchors and aliases (& and *) are not supported.  Write the value out, or "
    "quote it.",
    "run:\n  [a, b]: 3": "line 2: the key is a list or a mapping.  A key must be a name.",
    "run: {dir: a}\n---\nrun: {dir: b}": "line 1: 2 YAML documents.  A recipe is exactly one, without lines ---.",
    "run:\n\tdir: a": "line 2: found character '\\t' that cannot start any token.  Indent with spaces.",
    "run:\n  dir: a: b": "line 2: mapping values are not allowed here.  Quote texts with special characters.",
    "run:\n  dir: \x07": "line 2: control character 0x7.  Remove it.",
    "- run": "line 1: not a recipe.  Keys of a recipe: run, model, data, parallel, attention, loss, train, optim, "
    "lora, checkpoint, log, profile.",
    "run: " + "[" * 5000 + "]" * 5000: "line 1: more than 20 levels of nesting.  A recipe has fewer levels.",
}


@pytest.mark.parametrize("text, message", BROKEN.items(), ids=lambda text: text[:40])
def test_files_that_cannot_be_read_as_yaml(text: str, message: str) -> None:
    assert refusal_lines(text) == [f"a.yaml, {message}"]


def test_an_override_that_a_later_one_replaces_is_said() -> None:
    recipe = parsed("optim.lr=1", "optim.schedule=constant", "optim.lr=2", "optim={schedule: constant}")
    assert recipe.config.optim.lr == 2 and recipe.warnings == (
        "optim.lr is given twice (command line: optim.lr=1; command line: optim.lr=2); the last, 2, is used",
    )


@pytest.mark.parametrize("value", ["chatml", '"{{ messages }}.jinja"'])
def test_a_chat_template_that_cannot_be_a_file_is_refused_without_files(value: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^data.chat_template = .* \(command line: .* is no file; expected a file with"
    ):
        check_names(parsed(f"data.chat_template={value}"))
    check_names(parsed("data.chat_template=here/chatml"))
    check_names(parsed("data.chat_template=chat.jinja"))


def test_weights_are_looked_for_before_data_are_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text(RECIPE)
    Path("a.jsonl").write_text('{"text": "a"}\n')
    for words in (["eval"], ["eval", "--long"], ["score", "--out", "scores"]):
        assert main([*words, "a.yaml", "data.eval=a.jsonl", "data.tokenizer=byte", "--from", "gone"]) == 2
        assert f"no weights to score: gone does not exist in {tmp_path}; expected" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "a.yaml"]
