"""Recipe text becomes a Config: the meaning of values, and their origins."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sft.config import NamedDataset, yaml
from sft.errors import ConfigError
from sft.recipe.load import load_recipe, parse_recipe
from sft.recipe.resolved import Origin, Recipe, derived, dump, summary
from tests.builders import RECIPE, parsed, refusal_lines

FIELD = "disable_bf16_reduced_precision_matmul"  # of model.megatron

# The meaning of values


@pytest.mark.parametrize(
    "text, value",
    [
        ("1e-5", 1e-5),
        ("1.5E+3", 1500.0),
        (".5", 0.5),
        ("-0.25", -0.25),
        ("0", 0),
        ("true", True),
        ("~", None),
        ("Null", None),
        ("", None),
        ("on", "on"),
        ("off", "off"),
        ("010", "010"),
        ("0x1F", "0x1F"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("1e", "1e"),
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


def test_datasets_by_name() -> None:
    """Datasets beside files; a dataset may rename columns, and select a part of a split."""
    columns = (("messages", "talk"),)
    data = parsed(
        'data.train={chat: {dataset: a/b, split: "train[:10%]", columns: {messages: talk}}, code: {files: c.jsonl}}',
        "data.train.code.weight=2",
        "data.train.chat.weight=1",
        "data.eval={chat: {dataset: a/b, config: en, revision: v1}, code: [d.jsonl]}",
    ).config.data
    chat = NamedDataset("a/b", split="train[:10%]", columns=columns)
    assert (data.train_files, data.train_names) == ([chat, "c.jsonl"], ["chat", "code"])
    assert data.eval_sets == {"chat": [NamedDataset("a/b", config="en", revision="v1")], "code": ["d.jsonl"]}
    assert data.train_keys == {"data.train.code.files": ["c.jsonl"]}
    assert [str(chat), str(data.eval_sets["chat"][0])] == ["a/b train[:10%]", "a/b en train"]


def test_held_out_sets_have_names() -> None:
    for override, sets in {
        "data.eval=[]": {},
        "data.eval=null": {},
        "data.eval=b.jsonl": {"eval": ["b.jsonl"]},
        "data.eval={chat: b.jsonl, code-2: [c.jsonl, d.jsonl]}": {
            "chat": ["b.jsonl"],
            "code-2": ["c.jsonl", "d.jsonl"],
        },
    }.items():
        assert parsed(override).config.data.eval_sets == sets


@pytest.mark.parametrize(
    "value, why",
    [
        ("{chat: []}", "(command line: data.eval={chat: []}) has no file for chat; give a file, or "),
        ("{chat: b, code: c, chat: d}", ".chat is given twice (command line: data.eval={chat: b, code: c, chat: d})."),
        ("{a/b: c}", "(command line: data.eval={a/b: c}); expected a path or a list of paths or a mapping"),
        ("{train: b}", "has a set named train, which is the name of the training data; choose another name."),
        ("{chat: 7}", "; expected a path or a list of paths or a mapping of names to such or groups of keys or null."),
        ("{chat: {dataset: a, splits: b}}", "unknown key data.eval.chat.splits (command line: data.eval={chat: {data"),
        (
            "{chat: {dataset: a, files: b}}",
            '.dataset = "a" (command line: data.eval={chat: {dataset: a, files: b}}) clashes',
        ),
        (
            "{chat: {split: a}, b: c}",
            "files = null (command line: data.eval={chat: {split: a}, b: c}) is missing; give files, ",
        ),
        (
            "{chat: {dataset: 7}, b: c}",
            "data.eval.chat.dataset = 7 (command line: data.eval={chat: {dataset: 7}, b: c}); expec",
        ),
    ],
)
def test_held_out_sets_that_are_none(value: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(f"data.eval={value}")
    message = str(caught.value)
    assert "data.eval" in message and why in message and "\n" not in message


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
    assert str(recipe.origins["data.train"]) == "a.yaml, line 9"
    assert str(recipe.origins["data.train.code.weight"]) == "a.yaml, line 13"
    assert parse_recipe(dump(recipe), "b.yaml").config == recipe.config
    unnamed = parsed().config.data
    assert (unnamed.sources, unnamed.train_files, unnamed.train_names) == ({}, ["a.jsonl"], None)


@pytest.mark.parametrize(
    "overrides, sources",
    [
        (["data.train.chat.weight=2"], {"chat": (["a.jsonl", "b.jsonl"], 2.0), "code": (["c.jsonl"], 0.3)}),
        (["data.train.code={files: d, weight: 1}"], {"chat": (["a.jsonl", "b.jsonl"], 0.7), "code": (["d"], 1.0)}),
        (["data.train=d", "data.train={x: {files: [d, e]}}"], {"x": (["d", "e"], None)}),
        (["data.train=d"], {}),
    ],
    ids=str,
)
def test_overrides_of_sources(overrides: list[str], sources: dict[str, tuple[list[str], float | None]]) -> None:
    data = parse_recipe(MIXED, "a.yaml", overrides).config.data
    assert {name: (source.files, source.weight) for name, source in data.sources.items()} == sources
    assert sources or data.train == ["d"]


FIELDS = "files, dataset, config, split, revision, columns, weight, epochs."
WRONG_SOURCES = {  # key: the end of the override
    ".chat.wieght=2": "unknown key data.train.chat.wieght (@).  Did you mean data.train.chat.weight?",
    ".chat=null": "data.train.chat = null (@); expected a group of keys.  Keys of data.train.chat: " + FIELDS,
    ".chat.epochs=2": "data.train.chat.epochs = 2 (@) clashes with the weight of chat; give weights to all sources, "
    "or epochs to all sources.",
    ".chat.weight=null": "data.train.chat.weight = null (@) is missing, but code has weight; give weights to "
    "all sources, or to none.",
    ".new.weight=1": "data.train.new.files = null (default) is missing; give files, or dataset with the name of a "
    "dataset.",
    ".chat.dataset=a/b": 'data.train.chat.dataset = "a/b" (@) clashes with files; give one of them.',
    ".chat.split=test": 'data.train.chat.split = "test" (@) belongs to a dataset, but dataset is not given; remove it.',
    ".chat.splits=test": "unknown key data.train.chat.splits (@).  Did you mean data.train.chat.split?",
    "={a: b}": 'data.train.a = "b" (@); expected a group of keys.  Keys of data.train.a: ' + FIELDS,
    "={a/b: {files: c}}": '"a/b" (@) is not a valid name of a source in data.train; use letters, digits, - and _.',
    "={a: {files: b}, a: {files: c}}": "data.train.a is given twice (@; first in line 1).  Keep one.",
    "={a: {files: b, weight: 1}, c: {files: d, epochs: 2}}": "data.train.c.epochs = 2 (@) clashes with the "
    "weight of a; give weights to all sources, or epochs to all sources.",
    "={a: {files: b, epochs: 1}, c: {files: d}}": "data.train.c.epochs = null (@) is missing, but a has epochs; "
    "give epochs to all sources, or to none.",
}


@pytest.mark.parametrize("end, message", WRONG_SOURCES.items(), ids=str)
def test_wrong_sources(end: str, message: str) -> None:
    override = f"data.train{end}"
    assert refusal_lines(MIXED, override) == [message.replace("@", f"command line: {override}")]


def test_wrong_sources_of_a_file() -> None:
    assert refusal_lines(MIXED.replace("weight: 0.3", "wait: 0.3")) == [
        "1 of 2: data.train.code.weight = null (a.yaml, line 11) is missing, but chat has weight; give weights to "
        "all sources, or to none.",
        "  2 of 2: unknown key data.train.code.wait (a.yaml, line 13).  Did you mean data.train.code.weight?",
    ]
    assert refusal_lines(RECIPE, "data.train.chat.weight=2") == [
        "data.train.chat.weight (command line: data.train.chat.weight=2): data.train is a list of files (a.yaml, "
        "line 9), without named sources."
    ]


def test_an_empty_group_is_a_group_of_defaults() -> None:
    assert parse_recipe(RECIPE + "log:\nparallel: {}\n", "a.yaml").config == parsed().config


def test_null_unsets_a_group() -> None:
    given = ["lora.rank=4", "lora.alpha=8", "loss.distill.temperature=2.0", "loss.z_loss_coef=1e-4"]
    found = parsed(*given, "lora=null", "loss.distill=null", "lora.rslora=false").config
    assert (found.lora.rank, found.lora.alpha) == (None, 32.0)
    assert (found.loss.distill.temperature, found.loss.z_loss_coef) == (1.0, 1e-4)
    assert "train.global_batch_size is missing" in refusal_lines(RECIPE, "train=null")[0]


def test_megatron_fields_of_the_file_and_the_command_line_are_merged() -> None:
    text = RECIPE.replace(
        "model:\n", "model:\n  moe: {num_experts: 4, top_k: 2}\n  megatron: {moe_permute_fusion: false}\n"
    )
    override = f"model.megatron.{FIELD}=true"
    recipe = parse_recipe(text, "a.yaml", [override])
    assert recipe.config.model.megatron == {"moe_permute_fusion": False, FIELD: True}
    assert str(recipe.origins["model.megatron.moe_permute_fusion"]) == "a.yaml, line 4"
    assert str(recipe.origins[f"model.megatron.{FIELD}"]) == f"command line: {override}"


# Overrides


def test_an_override_wins_and_the_last_one_most() -> None:
    config = parsed(
        "optim.lr=1", "optim.lr=2", "optim={beta1: 0.8}", 'parallel.cp_comm="a2a"', "run.dir=a #1: b=c"
    ).config
    assert (config.optim.lr, config.optim.beta1) == (2.0, 0.8)
    assert (config.parallel.cp_comm, config.run.dir) == ("a2a", "a #1: b=c")
    assert parsed("train.num_steps=null", "train.num_epochs=3").config.train.num_steps is None


# Origins


def test_origins() -> None:
    origins = parsed("parallel.cp=4").origins
    assert origins["optim.lr"] == Origin("file", file="a.yaml", line=13)
    assert origins["parallel.cp"] == Origin("command line", text="parallel.cp=4")
    assert origins["parallel.tp"] == Origin("default")
    assert origins["model.head_dim"] == Origin("derived", text="hidden_size / num_attention_heads")


def test_derived_values() -> None:
    assert derived(parsed().config) == {
        "model.num_query_groups": (4, "num_attention_heads"),
        "model.head_dim": (16, "hidden_size / num_attention_heads"),
        "data.tokenizer": ("byte", "no model.hf"),
        "data.cache_dir": ("runs/a/cache", "run.dir/cache"),
    }
    assert derived(parsed("model.num_query_groups=2").config)["model.head_dim"][0] == 16
    given_all = parsed("model.head_dim=32", "model.num_query_groups=2", "data.tokenizer=byte", "data.cache_dir=c")
    assert derived(given_all.config) == {}
    assert given_all.origins["model.head_dim"].kind == "command line"
    written_out = parsed("model.head_dim=null")
    assert derived(written_out.config)["model.head_dim"][0] == 16
    assert written_out.origins["model.head_dim"].kind == "command line"


# Files


def test_a_recipe_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("\ufeff" + RECIPE.replace("\n", "\r\n"), encoding="utf-8")
    recipe = load_recipe(str(path), ["parallel.cp=2"])
    assert recipe.config == parsed("parallel.cp=2").config
    assert recipe.origins["optim.lr"] == Origin("file", file=str(path), line=13)


def test_files_that_are_no_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("qwen_64k.yaml").write_text(RECIPE)
    Path("latin.yaml").write_bytes(b"run: {dir: caf\xe9}")
    Path("data.jsonl").write_bytes(b" " * 2_000_000)
    for path, message in {
        "qwen_46k.yaml": "recipe qwen_46k.yaml does not exist.  Did you mean qwen_64k.yaml?",
        "zzz": "recipe zzz does not exist.  Recipes beside it: latin.yaml, qwen_64k.yaml.",
        "no/a.yaml": "recipe no/a.yaml does not exist.  Recipes beside it: none.",
        ".": "recipe . is a folder, not a regular file.  A recipe is a file of at most 1 MiB; if the file holds data, "
        "name it with data.train=FILE.",
        "latin.yaml": "recipe latin.yaml is not UTF-8 from byte 14 on.  Save it as UTF-8.",
        "data.jsonl": "recipe data.jsonl has 2,000,000 bytes; at most 1,048,576 are read.  "
        "A recipe is a file of at most 1 MiB; if "
        "the file holds data, name it with data.train=FILE.",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load_recipe(path)
        assert str(caught.value) == message


# The resolved recipe


def test_dump_says_whence() -> None:
    lines = dump(parsed("parallel.cp=4", f"model.megatron.{FIELD}=true")).split("\n")
    assert lines[0] == "# Resolved from a.yaml."
    assert "  cp: 4  # command line: parallel.cp=4" in lines
    assert "  train: [a.jsonl]  # a.yaml, line 9" in lines
    assert "  head_dim: null  # derived: hidden_size / num_attention_heads" in lines
    assert f"    {FIELD}: true  # command line: model.megatron.{FIELD}=true" in lines


def test_dump_loads_back() -> None:
    """Also if the name of the file and an override contain line breaks."""
    first = parsed("data.eval={b: [b, 'c d'], 1.5: d}", f"model.megatron={{{FIELD}: false}}", "optim.lr=5e4")
    for recipe in (first, parse_recipe(RECIPE, "a\nb: c.yaml", ["run.dir=runs/a\nb: c"])):
        assert parse_recipe(dump(recipe), "b.yaml").config == recipe.config


def test_the_summary_of_a_start_has_what_the_user_set_and_no_default() -> None:
    recipe = parsed("parallel.cp=4", f"model.megatron.{FIELD}=true", "optim.lr=2e-5")
    assert summary(recipe) == f"""\
# Set in a.yaml or on the command line; all keys: runs/a/recipe.yaml
run:
  dir: runs/a  # a.yaml, line 1
model:
  num_layers: 2  # a.yaml, line 3
  hidden_size: 64  # a.yaml, line 4
  ffn_hidden_size: 128  # a.yaml, line 5
  num_attention_heads: 4  # a.yaml, line 6
  init_from: random  # a.yaml, line 7
  megatron:
    {FIELD}: true  # command line: model.megatron.{FIELD}=true
data:
  train: [a.jsonl]  # a.yaml, line 9
  seq_length: 1024  # a.yaml, line 10
parallel:
  cp: 4  # command line: parallel.cp=4
train:
  num_steps: 10  # a.yaml, line 11
  global_batch_size: 4  # a.yaml, line 11
optim:
  lr: 2e-05  # command line: optim.lr=2e-5
"""


@settings(deadline=None, max_examples=30)
@given(st.text(min_size=1), st.floats(min_value=1e-300, allow_infinity=False), st.lists(st.text(min_size=1)))
def test_any_value_survives_the_dump(text: str, number: float, paths: list[str]) -> None:
    config = parsed().config
    run = config.run.model_copy(update={"dir": text})
    optim = config.optim.model_copy(update={"lr": number})
    data = config.data.model_copy(update={"eval": paths})
    config = config.model_copy(update={"run": run, "optim": optim, "data": data})
    changed = Recipe(config=config, origins=parsed().origins, path=text)
    assert parse_recipe(dump(changed), "b.yaml").config == config


@settings(deadline=None, max_examples=30)
@given(st.text(max_size=200))
def test_no_text_ends_in_anything_but_a_recipe_or_a_config_error(text: str) -> None:
    try:
        parse_recipe(text, "a.yaml", [text])
    except ConfigError:
        pass
