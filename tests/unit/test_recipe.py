"""Text to Config: what values mean, where they came from, and what every kind of mistake is refusal_lines as."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sft.config import yaml
from sft.errors import ConfigError
from sft.recipe.load import load_recipe, parse_recipe
from sft.recipe.resolved import Origin, Recipe, derived, dump
from tests.builders import RECIPE, parsed, refusal_lines


def with_line(line: str, under: str | None = None) -> str:
    """RECIPE with `line` put under the group `under`, or at the end."""
    return RECIPE.replace(f"{under}:\n", f"{under}:\n  {line}\n") if under else RECIPE + line + "\n"


# What values mean


def test_a_recipe_is_read() -> None:
    config = parsed().config
    assert config.run.dir == "runs/a"
    assert config.data.train == ["a.jsonl"]
    assert config.data.eval == []
    assert config.optim.lr == 1e-5
    assert config.parallel.cp == 1
    assert config.model.rope.base == 10000.0


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e-5", 1e-5),
        ("5e4", 50000.0),
        ("1.5E+3", 1500.0),
        (".5", 0.5),
        ("3.", 3.0),
        ("-0.25", -0.25),
        ("7", 7),
        ("-7", -7),
        ("0", 0),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("Null", None),
        ("", None),
        ("no", "no"),
        ("on", "on"),
        ("Yes", "Yes"),
        ("off", "off"),
        ("010", "010"),
        ("0x1F", "0x1F"),
        ("0o17", "0o17"),
        ("1_000", "1_000"),
        ("1:30:00", "1:30:00"),
        ("2024-01-01", "2024-01-01"),
        ("1e", "1e"),
        (".", "."),
        ("None", "None"),
    ],
)
def test_unquoted_scalars(text: str, value: object) -> None:
    read = yaml.scalar(text)
    assert read == value and type(read) is type(value)
    if text:
        assert yaml.read(f"[{text}]", "a.yaml") == [value]


def test_quotes_make_text() -> None:
    assert yaml.read("['7', \"true\", '1e-5', \"\"]", "a.yaml") == ["7", "true", "1e-5", ""]


def test_whole_numbers_serve_as_numbers() -> None:
    lr = parsed("optim.lr=1", "model.rope.base=500000").config
    assert (lr.optim.lr, lr.model.rope.base) == (1.0, 500000.0)
    assert type(lr.optim.lr) is float


def test_one_path_is_a_list_of_one() -> None:
    assert parsed("data.eval=b.jsonl").config.data.eval == ["b.jsonl"]
    assert parsed("data.eval=[b.jsonl, 'c d.jsonl']").config.data.eval == ["b.jsonl", "c d.jsonl"]


def test_held_out_sets_have_names() -> None:
    for override, sets in {
        "data.eval=[]": {},
        "data.eval=b.jsonl": {"eval": ["b.jsonl"]},
        "data.eval=[b.jsonl, c.jsonl]": {"eval": ["b.jsonl", "c.jsonl"]},
        "data.eval={chat: b.jsonl, code-2: [c.jsonl, d.jsonl]}": {
            "chat": ["b.jsonl"],
            "code-2": ["c.jsonl", "d.jsonl"],
        },
    }.items():
        assert parsed(override).config.data.eval_sets == sets


@pytest.mark.parametrize(
    "value, why",
    [
        (
            "{chat: []}",
            '= {"chat": []} (command line: data.eval={chat: []}) names chat without a file; give it one, or ',
        ),
        ("{chat: b, code: c, chat: d}", ".chat is given twice (command line: data.eval={chat: b, code: c, chat: d})."),
        (
            "{a/b: c}",
            '= {"a/b": "c"} (command line: data.eval={a/b: c}); expected a path or a list of paths or a mapping',
        ),
        ("{train: b}", "names a set train, which is what the training data are called; choose another name."),
        ("{chat: {files: b}}", "; expected a path or a list of paths or a mapping of names to such."),
        ("{chat: 7}", "; expected a path or a list of paths or a mapping of names to such."),
    ],
)
def test_held_out_sets_that_are_none(value: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(f"data.eval={value}")
    message = str(caught.value)
    assert message.startswith("data.eval") and why in message and "\n" not in message
    assert parsed("data.train=on").config.data.train == ["on"]


MIXED = RECIPE.replace(
    "  train: a.jsonl\n",
    """\
  train:
    chat: {files: [a.jsonl, b.jsonl], weight: 0.7}
    code:
      files: c.jsonl
      weight: 0.3
""",
)


def test_sources_have_names() -> None:
    recipe = parse_recipe(MIXED, "a.yaml")
    data = recipe.config.data
    assert {name: (s.files, s.weight, s.epochs) for name, s in data.sources.items()} == {
        "chat": (["a.jsonl", "b.jsonl"], 0.7, None),
        "code": (["c.jsonl"], 0.3, None),
    }
    assert data.train_files == ["a.jsonl", "b.jsonl", "c.jsonl"] and data.train_names == ["chat", "chat", "code"]
    assert str(recipe.origins["data.train"]) == "a.yaml, line 8"
    assert str(recipe.origins["data.train.code.weight"]) == "a.yaml, line 12"
    assert parse_recipe(dump(recipe), "b.yaml").config == recipe.config
    unnamed = parsed().config.data
    assert (unnamed.sources, unnamed.train_files, unnamed.train_names) == ({}, ["a.jsonl"], None)


@pytest.mark.parametrize(
    "overrides, sources",
    [
        (["data.train.chat.weight=2"], {"chat": (["a.jsonl", "b.jsonl"], 2.0), "code": (["c.jsonl"], 0.3)}),
        (["data.train.code={files: d, weight: 1}"], {"chat": (["a.jsonl", "b.jsonl"], 0.7), "code": (["d"], 1.0)}),
        (["data.train={x: {files: d}}"], {"x": (["d"], None)}),
        (["data.train=d", "data.train={x: {files: [d, e]}}"], {"x": (["d", "e"], None)}),
        (["data.train=d"], {}),
    ],
    ids=str,
)
def test_overrides_of_sources(overrides: list[str], sources: dict[str, tuple[list[str], float | None]]) -> None:
    data = parse_recipe(MIXED, "a.yaml", overrides).config.data
    assert {name: (source.files, source.weight) for name, source in data.sources.items()} == sources
    assert sources or data.train == ["d"]


WRONG_SOURCES = {
    "chat.wieght=2": "unknown key data.train.chat.wieght (@).  Did you mean data.train.chat.weight?",
    "chat.share=2": "unknown key data.train.chat.share (@).  Keys of data.train.chat: files, weight, epochs.",
    "chat.weight=x": 'data.train.chat.weight = "x" (@); expected a number above 0.0 or null.',
    "chat.weight=0": "data.train.chat.weight = 0 (@); expected a number above 0.0 or null.",
    "chat.files=[]": "data.train.chat.files = [] (@); expected a path or a list of paths, not empty.",
    "chat=null": "data.train.chat = null (@); expected a group of keys.  Keys of data.train.chat: files, weight, "
    "epochs.",
    "chat.epochs=2": "data.train.chat.epochs = 2 (@) cannot be with the weight of chat; give weights to all "
    "sources, or epochs to all.",
    "chat.weight=null": "data.train.chat.weight = null (@) stands beside the weight of code; give weights to all "
    "sources, or to none.",
    "new.weight=1": "data.train.new.files is missing from a.yaml; expected a path or a list of paths, not empty.  "
    "Files of this source.  A single path is a list of one.",
}


@pytest.mark.parametrize("end, message", WRONG_SOURCES.items(), ids=str)
def test_wrong_sources(end: str, message: str) -> None:
    override = f"data.train.{end}"
    assert refusal_lines(MIXED, override) == [message.replace("@", f"command line: {override}")]


@pytest.mark.parametrize(
    "value, message",
    [
        ("{a: b}", 'data.train.a = "b" (@); expected a group of keys.  Keys of data.train.a: files, weight, epochs.'),
        ("{a: {}}", "data.train.a = {} (@); expected a group of keys.  Keys of data.train.a: files, weight, epochs."),
        ("{a/b: {files: c}}", '"a/b" (@) cannot name a source of data.train; use letters, digits, - and _.'),
        ("{a: {files: b}, a: {files: c}}", "data.train.a is given twice (@; first in line 1).  Keep one."),
        ("{a: {files: b, files: c}}", "data.train.a.files is given twice (@; first in line 1).  Keep one."),
        (
            "{a: {files: b, weight: 1}, c: {files: d, epochs: 2}}",
            "data.train.c.epochs = 2 (@) cannot be with the weight of a; give weights to all sources, or "
            "epochs to all.",
        ),
        (
            "{a: {files: b, epochs: 1}, c: {files: d}}",
            "data.train.c.epochs = null (@) stands beside the epochs of a; give epochs to all sources, or to none.",
        ),
    ],
)
def test_mappings_that_are_no_sources(value: str, message: str) -> None:
    assert refusal_lines(RECIPE, f"data.train={value}") == [message.replace("@", f"command line: data.train={value}")]


def test_wrong_sources_of_a_file() -> None:
    assert refusal_lines(MIXED.replace("weight: 0.3", "wait: 0.3")) == [
        "1 of 2: data.train.code.weight = null (a.yaml, line 10) stands beside the weight of chat; give weights to all "
        "sources, or to none.",
        "  2 of 2: unknown key data.train.code.wait (a.yaml, line 12).  Did you mean data.train.code.weight?",
    ]
    assert refusal_lines(RECIPE, "data.train.chat.weight=2") == [
        "data.train.chat.weight (command line: data.train.chat.weight=2): data.train is a list of files (a.yaml, "
        "line 8), without named sources."
    ]


def test_an_empty_group_is_a_group_of_defaults() -> None:
    assert parse_recipe(RECIPE + "log:\nparallel: {}\n", "a.yaml").config == parsed().config


def test_megatron_fields_pass_through() -> None:
    recipe = parse_recipe(
        with_line("megatron: {a: 1, b: [x, y], c: null}", "model"), "a.yaml", ["model.megatron.d=1e-3"]
    )
    assert recipe.config.model.megatron == {"a": 1, "b": ["x", "y"], "c": None, "d": 1e-3}
    assert str(recipe.origins["model.megatron.a"]) == "a.yaml, line 3"
    assert str(recipe.origins["model.megatron.d"]) == "command line: model.megatron.d=1e-3"


# Overrides


@pytest.mark.parametrize(
    "override, key, value",
    [
        ("parallel.cp=4", "cp", 4),
        ("parallel={cp: 4, tp: 2}", "cp", 4),
        ("parallel.cp_comm=a2a", "cp_comm", "a2a"),
        ('parallel.cp_comm="a2a"', "cp_comm", "a2a"),
        ("parallel.overlap=false", "overlap", False),
    ],
)
def test_overrides(override: str, key: str, value: object) -> None:
    assert parsed(override).config.parallel.model_dump()[key] == value


def test_an_override_wins_and_the_last_one_most() -> None:
    assert parsed("optim.lr=1", "optim.lr=2").config.optim.lr == 2.0


def test_null_takes_a_value_back() -> None:
    config = parsed("train.num_steps=null", "train.num_epochs=3").config
    assert (config.train.num_steps, config.train.num_epochs) == (None, 3)


def test_a_group_given_by_an_override_is_merged() -> None:
    assert parsed("optim={beta1: 0.8}").config.optim.lr == 1e-5


def test_an_override_is_taken_as_it_stands() -> None:
    assert parsed("run.dir=runs/a #1: b=c").config.run.dir == "runs/a #1: b=c"


# Origins


def test_origins() -> None:
    origins = parsed("parallel.cp=4").origins
    assert origins["optim.lr"] == Origin("file", file="a.yaml", line=12)
    assert origins["train.num_steps"] == Origin("file", file="a.yaml", line=10)
    assert origins["parallel.cp"] == Origin("command line", text="parallel.cp=4")
    assert origins["parallel.tp"] == Origin("default")
    assert origins["model.head_dim"] == Origin("derived", text="hidden_size / num_attention_heads")
    assert str(origins["optim.lr"]) == "a.yaml, line 12"
    assert str(origins["parallel.cp"]) == "command line: parallel.cp=4"
    assert str(origins["parallel.tp"]) == "default"
    assert str(origins["model.head_dim"]) == "derived: hidden_size / num_attention_heads"


def test_derived_values() -> None:
    assert derived(parsed().config) == {
        "model.num_query_groups": (4, "num_attention_heads"),
        "model.head_dim": (16, "hidden_size / num_attention_heads"),
        "data.cache_dir": ("runs/a/cache", "run.dir/cache"),
    }
    given_all = parsed("model.head_dim=32", "model.num_query_groups=2", "data.cache_dir=c")
    assert derived(given_all.config) == {}
    assert given_all.origins["model.head_dim"].kind == "command line"
    written_out = parsed("model.head_dim=null")
    assert derived(written_out.config)["model.head_dim"][0] == 16
    assert written_out.origins["model.head_dim"].kind == "command line"


# Mistakes, one by one.  Every message names the place, the value, and what would work.

MISTAKES = {
    "misspelt key": (
        "data.seq_lenght=2048",
        "unknown key data.seq_lenght (command line: data.seq_lenght=2048).  Did you mean data.seq_length?",
    ),
    "misspelt group": (
        "paralel.cp=2",
        "unknown key paralel.cp (command line: paralel.cp=2).  Did you mean parallel.cp?",
    ),
    "key of another group": (
        "train.seq_length=2048",
        "unknown key train.seq_length (command line: train.seq_length=2048).  Did you mean data.seq_length?",
    ),
    "Megatron's name": (
        "parallel.context_parallel_size=2",
        "unknown key parallel.context_parallel_size (command line: parallel.context_parallel_size=2).  "
        "Did you mean parallel.cp?",
    ),
    "nothing alike": (
        "attention.zzz=2",
        "unknown key attention.zzz (command line: attention.zzz=2).  Keys of attention: backend.",
    ),
    "nothing alike at the top": (
        "zzz=2",
        "unknown key zzz (command line: zzz=2).  Keys of a recipe: run, model, data, parallel, attention, "
        "loss, "
        "train, optim, checkpoint, log, profile.",
    ),
    "a key below a value": (
        "run.dir.x=2",
        "unknown key run.dir.x (command line: run.dir.x=2).  Did you mean run.dir?",
    ),
    "no name of a field": (
        "model.megatron.a-b=2",
        "unknown key model.megatron.a-b (command line: model.megatron.a-b=2).  Its keys are the names of "
        "megatron-core's TransformerConfig.",
    ),
    "text for a whole number": (
        "parallel.cp=x",
        'parallel.cp = "x" (command line: parallel.cp=x); expected a whole number of at least 1.',
    ),
    "quoted number": (
        'parallel.cp="4"',
        'parallel.cp = "4" (command line: parallel.cp="4"); expected a whole number of at least 1.  '
        "Write 4, without quotes.",
    ),
    "leading zero": (
        "parallel.cp=010",
        'parallel.cp = "010" (command line: parallel.cp=010); expected a whole number of at least 1.  '
        "Write 10, without quotes.",
    ),
    "underscore": (
        "data.seq_length=1_024",
        'data.seq_length = "1_024" (command line: data.seq_length=1_024); expected a whole number of at '
        "least 1.  "
        "Write 1024, without quotes.",
    ),
    "sexagesimal": (
        "run.timeout_s=1:30:00",
        'run.timeout_s = "1:30:00" (command line: run.timeout_s=1:30:00); expected a whole number of at ' "least 1.",
    ),
    "switch for a whole number": (
        "parallel.cp=true",
        "parallel.cp = true (command line: parallel.cp=true); expected a whole number of at least 1.",
    ),
    "fraction for a whole number": (
        "parallel.cp=4.0",
        "parallel.cp = 4.0 (command line: parallel.cp=4.0); expected a whole number of at least 1.  Write 4.",
    ),
    "zero": (
        "parallel.cp=0",
        "parallel.cp = 0 (command line: parallel.cp=0); expected a whole number of at least 1.",
    ),
    "text for a number": (
        "optim.lr=fast",
        'optim.lr = "fast" (command line: optim.lr=fast); expected a number above 0.0.',
    ),
    "infinity": (
        "optim.lr=1e999",
        "optim.lr = Infinity (command line: optim.lr=1e999); expected a number above 0.0.",
    ),
    "more digits than a number has": (
        "parallel.cp=" + "9" * 50,
        f"parallel.cp = 1e+50 (command line: parallel.cp={'9' * 50}); expected a whole number of at least "
        f"1.  "
        f"Write {int(1e50)}.",
    ),
    "above its bound": (
        "optim.wsd_decay_fraction=1.5",
        "optim.wsd_decay_fraction = 1.5 (command line: optim.wsd_decay_fraction=1.5); expected a number "
        "above 0.0 "
        "and of at most 1.0.",
    ),
    "at its bound": (
        "optim.beta1=1",
        "optim.beta1 = 1 (command line: optim.beta1=1); expected a number of at least 0.0 and below 1.0.",
    ),
    "YAML 1.1 switch": (
        "data.shuffle=no",
        'data.shuffle = "no" (command line: data.shuffle=no); expected true or false.  Write true or false, '
        "without quotes.",
    ),
    "misspelt choice": (
        "parallel.cp_comm=p2pp",
        'parallel.cp_comm = "p2pp" (command line: parallel.cp_comm=p2pp); expected one of p2p, all_gather, '
        "a2a, a2a+p2p.  Did you mean p2p?",
    ),
    "a choice of other tools": (
        "run.device=gpu",
        'run.device = "gpu" (command line: run.device=gpu); expected one of auto, cuda, cpu.  ' "Did you mean cuda?",
    ),
    "Python's null": (
        "train.eval_every=None",
        'train.eval_every = "None" (command line: train.eval_every=None); expected a whole number of at '
        "least 1 "
        "or null.  Write null, without quotes.",
    ),
    "null where there must be a value": (
        "run.dir=null",
        "run.dir = null (command line: run.dir=null); expected non-empty text.",
    ),
    "number for text": ("run.dir=3", "run.dir = 3 (command line: run.dir=3); expected non-empty text."),
    "empty text": ('run.dir=""', 'run.dir = "" (command line: run.dir=""); expected non-empty text.'),
    "mapping for text": (
        "run.dir={a: 1}",
        'run.dir = {"a": 1} (command line: run.dir={a: 1}); expected non-empty text.',
    ),
    "number for a path": (
        "data.train=[a.jsonl, 3]",
        'data.train = ["a.jsonl", 3] (command line: data.train=[a.jsonl, 3]); expected a path or a list of '
        "paths, not empty, or a mapping of names to groups of keys.",
    ),
    "no path": (
        "data.train=[]",
        "data.train = [] (command line: data.train=[]); expected a path or a list of paths, not empty, or a mapping of "
        "names to groups of keys.",
    ),
    "value for a group": (
        "parallel=4",
        "parallel = 4 (command line: parallel=4); expected a group of keys.  Keys of parallel: tp, cp, pp, ep, etp, "
        "virtual_stages, sequence_parallel, distributed_optimizer, overlap, cp_comm, cp_a2a.",
    ),
    "nested value for a megatron field": (
        "model.megatron.a={b: 1}",
        'model.megatron.a = {"b": 1} (command line: model.megatron.a={b: 1}); expected true, false, a '
        "number, "
        "text, null or a list of texts.",
    ),
    "look-alike for a megatron field": (
        "model.megatron.a=off",
        'model.megatron.a = "off" (command line: model.megatron.a=off) is read as text; write true, false, '
        "null "
        "or a plain decimal number.",
    ),
    "no value": (
        "parallel.cp",
        'override "parallel.cp" has no value; write KEY=VALUE, or KEY=null for none.',
    ),
    "empty value": (
        "parallel.cp=",
        'override "parallel.cp=" has no value; write KEY=VALUE, or KEY=null for none.',
    ),
    "open bracket": (
        "data.train=[a",
        "command line: data.train=[a, line 1: expected ',' or ']', but got '<stream end>'.  "
        "Quote text that is not plain.",
    ),
    "alias": (
        "data.train=[*a]",
        "command line: data.train=[*a], line 1: anchors and aliases (& and *) are not read.  Write the "
        "value out, "
        "or quote it.",
    ),
}


@pytest.mark.parametrize("override, message", MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes(override: str, message: str) -> None:
    assert refusal_lines(RECIPE, override) == [message]


CLASHES = {
    "heads and width": (
        ["model.num_attention_heads=5"],
        "model.num_attention_heads = 5 (command line: model.num_attention_heads=5) does not divide "
        "hidden_size 64; "
        "set head_dim.",
    ),
    "groups and heads": (
        ["model.num_query_groups=3"],
        "model.num_query_groups = 3 (command line: model.num_query_groups=3) does not divide 4 heads; "
        "use one of 1, 2, 4.",
    ),
    "odd head": (
        ["model.head_dim=15"],
        "model.head_dim = 15 (command line: model.head_dim=15) makes heads of width 15, which cannot be "
        "rotated; "
        "make it even.",
    ),
    "factor without scaling": (
        ["model.rope.factor=4"],
        "model.rope.factor = 4 (command line: model.rope.factor=4) has no effect with scaling = none; "
        "use linear, llama3 or yarn.",
    ),
    "scaling without factor": (
        ["model.rope.scaling=linear"],
        "model.rope.factor = 1.0 (default) must be above 1 for linear scaling.",
    ),
    "scaling of what": (
        ["model.rope.scaling=yarn", "model.rope.factor=4"],
        "model.rope.original_max_position = null (default) is the context before scaling; yarn needs it.",
    ),
    "llama3 frequencies": (
        ["model.rope={scaling: llama3, factor: 8, original_max_position: 8192, low_freq_factor: 4}"],
        "model.rope.high_freq_factor = 4.0 (default) must be above low_freq_factor = 4.0.",
    ),
    "yarn betas": (
        ["model.rope={scaling: yarn, factor: 8, original_max_position: 8192, beta_slow: 32}"],
        "model.rope.beta_fast = 32.0 (default) must be above beta_slow = 32.0.",
    ),
    "virtual stages": (
        ["parallel.virtual_stages=2"],
        "parallel.virtual_stages = 2 (command line: parallel.virtual_stages=2) needs pp > 1; got pp = 1.  "
        "Raise pp, or leave virtual_stages at 1.",
    ),
    "no length": (
        ["train.num_steps=null"],
        "train.num_steps = null (command line: train.num_steps=null) and num_epochs is null too; give one " "of them.",
    ),
    "two lengths": (
        ["train.num_epochs=2"],
        "train.num_epochs = 2 (command line: train.num_epochs=2) clashes with num_steps = 10; "
        "set one of them to null.",
    ),
    "two warm-ups": (
        ["optim.warmup_steps=2", "optim.warmup_fraction=0.1"],
        "optim.warmup_fraction = 0.1 (command line: optim.warmup_fraction=0.1) clashes with warmup_steps = "
        "2; "
        "give one of them.",
    ),
    "end above peak": (
        ["optim.min_lr=1"],
        "optim.min_lr = 1 (command line: optim.min_lr=1) is above the peak, lr = 1e-05.",
    ),
    "end of a constant": (
        ["optim.min_lr=1e-6", "optim.schedule=constant"],
        "optim.min_lr = 1e-06 (command line: optim.min_lr=1e-6) has no effect with schedule = constant; "
        "use another, or min_lr = 0.",
    ),
    "decay longer than the run": (
        ["optim.schedule=wsd", "optim.warmup_fraction=0.95"],
        "optim.wsd_decay_fraction = 0.1 (default) and warmup_fraction = 0.95 together exceed the run.",
    ),
    "warm-up longer than the run": (
        ["optim.warmup_steps=10"],
        "optim.warmup_steps = 10 (command line: optim.warmup_steps=10) must be below train.num_steps = 10; "
        "lower one, raise the other.",
    ),
    "te on a CPU": (
        ["attention.backend=te", "run.device=cpu"],
        'attention.backend = "te" (command line: attention.backend=te) needs CUDA, and run.device is cpu; '
        "use portable or auto.",
    ),
    "fp8 on a CPU": (
        ["run.fp8=delayed", "run.device=cpu"],
        'run.fp8 = "delayed" (command line: run.fp8=delayed) needs CUDA, and run.device is cpu; use null.',
    ),
    "fp8 beside fp32": (
        ["run.fp8=mxfp8", "run.precision=fp32"],
        'run.fp8 = "mxfp8" (command line: run.fp8=mxfp8) needs run.precision = bf16, and it is fp32; use bf16.',
    ),
    "fp8 without its layers": (
        ["run.fp8=blockwise", "attention.backend=portable"],
        'run.fp8 = "blockwise" (command line: run.fp8=blockwise) is Transformer Engine\'s, and attention.backend is '
        "portable; use te or auto, or null.",
    ),
    "two levels without their size": (
        ["parallel.cp_comm=a2a+p2p", "parallel.cp=12"],
        "parallel.cp_a2a = null (default) is needed with cp_comm = a2a+p2p; for cp = 12, sizes that fit: 2, 3, 4, 6.",
    ),
    "a size without its levels": (
        ["parallel.cp_a2a=2", "parallel.cp=4"],
        "parallel.cp_a2a = 2 (command line: parallel.cp_a2a=2) is for cp_comm = a2a+p2p; got p2p.  Use null.",
    ),
    "levels of nobody": (
        ["parallel.cp_comm=a2a+p2p", "parallel.cp=4", "parallel.cp_a2a=4"],
        "parallel.cp_a2a = 4 (command line: parallel.cp_a2a=4) must divide cp = 4 into two factors above 1, and 4 does "
        "not; sizes that fit: 2.",
    ),
    "one level alone": (
        ["parallel.cp_comm=a2a+p2p", "parallel.cp=4", "parallel.cp_a2a=1"],
        "parallel.cp_a2a = 1 (command line: parallel.cp_a2a=1) must divide cp = 4 into two factors above 1, and 1 does "
        "not; sizes that fit: 2.",
    ),
    "levels of a prime": (
        ["parallel.cp_comm=a2a+p2p", "parallel.cp=2", "parallel.cp_a2a=2"],
        "parallel.cp_a2a = 2 (command line: parallel.cp_a2a=2) must divide cp = 2 into two factors above 1, and 2 does "
        "not; none fits; use p2p or a2a.",
    ),
}


@pytest.mark.parametrize("overrides, message", CLASHES.values(), ids=CLASHES.keys())
def test_impossible_combinations(overrides: list[str], message: str) -> None:
    assert refusal_lines(RECIPE, *overrides) == [message]


def test_a_mistake_in_the_file_names_its_line() -> None:
    assert refusal_lines(with_line("shufle: true", "data")) == [
        "unknown key data.shufle (a.yaml, line 8).  Did you mean data.shuffle?"
    ]
    assert refusal_lines(RECIPE.replace("lr: 1e-5", "lr: -1")) == [
        "optim.lr = -1 (a.yaml, line 12); expected a number above 0.0."
    ]


def test_what_is_missing() -> None:
    assert refusal_lines(RECIPE.replace("  lr: 1e-5\n", "")) == [
        "optim.lr is missing from a.yaml; expected a number above 0.0.  Peak learning rate."
    ]
    assert refusal_lines(RECIPE.replace("run: {dir: runs/a}\n", "")) == [
        "run.dir is missing from a.yaml; expected non-empty text.  Folder of this run: recipe.yaml, data.json, "
        "metrics.jsonl, "
        "tensorboard/, checkpoints/.  One run, one folder."
    ]


def test_a_misspelt_key_is_not_missing_as_well() -> None:
    assert refusal_lines(RECIPE.replace("seq_length", "seq_lenght")) == [
        "unknown key data.seq_lenght (a.yaml, line 9).  Did you mean data.seq_length?"
    ]
    assert refusal_lines(RECIPE.replace("optim:", "optimizer:")) == [
        "unknown key optimizer (a.yaml, line 11).  Did you mean optim?"
    ]


def test_a_key_given_twice() -> None:
    assert refusal_lines(RECIPE + "  lr: 2e-5\n") == [
        "optim.lr is given twice (a.yaml, line 13; first in line 12).  Keep one."
    ]
    assert refusal_lines(RECIPE + "run: {dir: b}\n") == [
        "run is given twice (a.yaml, line 13; first in line 1).  Keep one."
    ]


def test_all_mistakes_at_once_in_the_order_of_the_file_then_the_command_line_then_what_is_missing() -> None:
    text = RECIPE.replace("  lr: 1e-5\n", "  beta1: 2\n").replace("num_layers: 2", "num_layers: two") + "lgo: 3\n"
    assert refusal_lines(text, "parallel.virtual_stages=2", "data.seq_length=4.0", "x=1") == [
        '1 of 7: model.num_layers = "two" (a.yaml, line 3); expected a whole number of at least 1.',
        "  2 of 7: optim.beta1 = 2 (a.yaml, line 12); expected a number of at least 0.0 and below 1.0.",
        "  3 of 7: unknown key lgo (a.yaml, line 13).  Did you mean log?",
        "  4 of 7: unknown key x (command line: x=1).  Keys of a recipe: run, model, data, parallel, "
        "attention, loss, "
        "train, optim, checkpoint, log, profile.",
        "  5 of 7: data.seq_length = 4.0 (command line: data.seq_length=4.0); expected a whole number of at "
        "least 1.  "
        "Write 4.",
        "  6 of 7: parallel.virtual_stages = 2 (command line: parallel.virtual_stages=2) needs pp > 1; got "
        "pp = 1.  "
        "Raise pp, or leave virtual_stages at 1.",
        "  7 of 7: optim.lr is missing from a.yaml; expected a number above 0.0.  Peak learning rate.",
    ]


BROKEN = {
    "python tag": (
        "run: {dir: !!python/object/apply:os.system [echo]}",
        "a.yaml, line 1: the tag tag:yaml.org,2002:python/object/apply:os.system is not read.  Write the "
        "bare "
        "value; quotes make text.",
    ),
    "harmless tag": (
        "run:\n  seed: !!int 3",
        "a.yaml, line 2: the tag tag:yaml.org,2002:int is not read.  Write the bare value; quotes make text.",
    ),
    "anchor": (
        "run:\n  dir: &here runs/a",
        "a.yaml, line 2: anchors and aliases (& and *) are not read.  Write the value out, or quote it.",
    ),
    "alias": (
        "run:\n\n  dir: *here",
        "a.yaml, line 3: anchors and aliases (& and *) are not read.  Write the value out, or quote it.",
    ),
    "bomb": (
        "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]",
        "a.yaml, line 1: anchors and aliases (& and *) are not read.  Write the value out, or quote it.",
    ),
    "merge key": (
        "run: {<<: *base}",
        "a.yaml, line 1: anchors and aliases (& and *) are not read.  Write the value out, or quote it.",
    ),
    "too deep": (
        "run: " + "[" * 5000 + "]" * 5000,
        "a.yaml, line 1: nested more than 20 deep.  No key of a recipe is.",
    ),
    "list as a key": ("run:\n  [a, b]: 3", "a.yaml, line 2: a list or mapping as a key.  A key is a name."),
    "two documents": (
        "run: {dir: a}\n---\nrun: {dir: b}",
        "a.yaml, line 1: 2 documents.  A recipe is exactly one; remove the ---.",
    ),
    "empty": ("", "a.yaml, line 1: 0 documents.  A recipe is exactly one; remove the ---."),
    "tab": (
        "run:\n\tdir: a",
        "a.yaml, line 2: found character '\\t' that cannot start any token.  Indent with spaces.",
    ),
    "colon in text": (
        "run:\n  dir: a: b",
        "a.yaml, line 2: mapping values are not allowed here.  Quote text that is not plain.",
    ),
    "control character": ("run:\n  dir: \x07", "a.yaml, line 2: control character 0x7.  Remove it."),
    "a list": (
        "- run",
        "a.yaml, line 1: not a recipe.  Keys of a recipe: run, model, data, parallel, attention, loss, "
        "train, optim, "
        "checkpoint, log, profile.",
    ),
    "a text": (
        "recipes/qwen.yaml",
        "a.yaml, line 1: not a recipe.  Keys of a recipe: run, model, data, parallel, attention, loss, "
        "train, optim, "
        "checkpoint, log, profile.",
    ),
}


@pytest.mark.parametrize("text, message", BROKEN.values(), ids=BROKEN.keys())
def test_files_that_cannot_be_read_as_yaml(text: str, message: str) -> None:
    assert refusal_lines(text) == [message]


def test_an_empty_file_says_so() -> None:
    assert refusal_lines("# nothing yet\n")[0].startswith("a.yaml, line 1: 0 documents.")


# Files


def test_a_recipe_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("\ufeff" + RECIPE.replace("\n", "\r\n"), encoding="utf-8")
    recipe = load_recipe(str(path), ["parallel.cp=2"])
    assert recipe.config == parsed("parallel.cp=2").config
    assert recipe.path == str(path)
    assert recipe.origins["optim.lr"] == Origin("file", file=str(path), line=12)


def test_files_that_are_no_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("qwen_64k.yaml").write_text(RECIPE)
    Path("latin.yaml").write_bytes(b"run: {dir: caf\xe9}")
    Path("data.jsonl").write_bytes(b" " * 2_000_000)
    for path, message in {
        "qwen_46k.yaml": "recipe qwen_46k.yaml does not exist.  Did you mean qwen_64k.yaml?",
        "zzz": "recipe zzz does not exist.  Recipes beside it: latin.yaml, qwen_64k.yaml.",
        "no/a.yaml": "recipe no/a.yaml does not exist.  Recipes beside it: none.",
        ".": "recipe . cannot be read: Is a directory.",
        "latin.yaml": "recipe latin.yaml is not UTF-8 from byte 14 on.  Save it as UTF-8.",
        "data.jsonl": "recipe data.jsonl is larger than 1 MiB; data goes into data.train=FILE.",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load_recipe(path)
        assert str(caught.value) == message


# The resolved recipe


def test_dump_says_whence() -> None:
    lines = dump(parsed("parallel.cp=4", "model.megatron.a=1")).split("\n")
    assert lines[0] == "# Resolved from a.yaml."
    assert "  cp: 4  # command line: parallel.cp=4" in lines
    assert "  lr: 1e-05  # a.yaml, line 12" in lines
    assert "  train: [a.jsonl]  # a.yaml, line 8" in lines
    assert "  head_dim: null  # derived: hidden_size / num_attention_heads" in lines
    assert "    base: 10000.0  # default" in lines
    assert "    a: 1  # command line: model.megatron.a=1" in lines


def test_dump_loads_back(tmp_path: Path) -> None:
    first = parsed(
        "data.eval={b: [b, 'c d'], 1.5: d}", "model.megatron={a: 1, b: null}", "train.eval_every=5", "optim.lr=5e4"
    )
    again = parse_recipe(dump(first), "b.yaml")
    assert again.config == first.config
    assert parse_recipe(dump(again), "c.yaml").config == first.config


@settings(deadline=None, max_examples=50)
@given(st.text(min_size=1), st.floats(min_value=1e-300, allow_infinity=False), st.lists(st.text(min_size=1)))
def test_any_value_survives_the_dump(text: str, number: float, paths: list[str]) -> None:
    config = parsed().config
    config = config.model_copy(
        update={
            "run": config.run.model_copy(update={"dir": text}),
            "optim": config.optim.model_copy(update={"lr": number}),
            "data": config.data.model_copy(update={"eval": paths}),
        }
    )
    changed = Recipe(config=config, origins=parsed().origins, path=text)
    assert parse_recipe(dump(changed), "b.yaml").config == config


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=200))
def test_no_text_ends_in_anything_but_a_recipe_or_a_config_error(text: str) -> None:
    try:
        parse_recipe(text, "a.yaml", [text])
    except ConfigError:
        pass
