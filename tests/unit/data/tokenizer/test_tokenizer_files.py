"""The files of a tokenizer folder: which file decides each property, and the notes if transformers reads them
differently."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from sft.console import Console
from sft.data.cache.tokenizer_notes import first_texts, say_notes
from sft.data.tokenizer import mistral_regex
from sft.data.tokenizer.comparison import compare_with_transformers, losses
from sft.data.tokenizer.files import encode
from sft.data.tokenizer.probe_texts import probe_texts
from sft.data.tokenizer.reading import read_tokenizer
from sft.errors import DataError
from tests.unit.fixtures.folder import make_folder, open_folder, template

Change = Callable[..., Path]
NO_JINJA = {"chat_template.jinja": None}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tokenizer"), "{{ bos_token }}default")


@pytest.fixture
def change(base: Path, tmp_path: Path) -> Change:
    """Returns a function that writes a copy of the folder with changed settings in tokenizer_config.json and changed
    files; None removes a file."""

    def changed(settings: dict[str, Any] | None = None, files: dict[str, object] | None = None) -> Path:
        copy = shutil.copytree(base, tmp_path / "copy")
        path = copy / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **(settings or {})}))
        for name, content in (files or {}).items():
            (copy / name).parent.mkdir(exist_ok=True)
            (copy / name).write_text(content if isinstance(content, str) else json.dumps(content))
            if content is None:
                (copy / name).unlink()
        return copy

    return changed


def test_an_ordinary_folder(base: Path) -> None:
    files = read_tokenizer("it", base)
    assert files.special_tokens == {"eos_token": "<|endoftext|>"}
    assert (files.eos_id, files.pad_id) == (0, None)
    assert files.special_ids["<|im_end|>"] == 2 and "<think>" not in files.special_ids
    assert files.added_ids["<think>"] == 413
    assert files.templates == {"default": "{{ bos_token }}default"}
    assert (files.around_text, files.generation_ends, files.notes) == (((), ()), (), ())
    assert compare_with_transformers("it", base, files, ["Hello"]) is None
    assert losses("it", files) is None


def test_added_tokens_of_the_other_files(change: Change) -> None:
    """Tokens are added in the order of transformers: added_tokens_decoder by id, then special tokens by name, then
    further ones."""
    decoder = {"700": {"content": "<b>", "special": True}, "600": {"content": "<a>", "special": False}}
    folder = change({"added_tokens_decoder": decoder, "pad_token": "<pad>", "additional_special_tokens": ["<c>"]})
    files = read_tokenizer("it", folder)
    assert [files.added_ids[token] for token in ("<a>", "<b>", "<pad>", "<c>")] == [417, 418, 419, 420]
    assert [token in files.special_ids for token in ("<a>", "<b>", "<pad>", "<c>")] == [False, True, True, True]
    assert files.pad_id == 419
    assert files.notes == (
        "tokenizer.json of it lacks tokens that the files beside it name: <a>, <b>, <pad> and 1 more.  They get the "
        "next ids, as in transformers.",
    )
    assert compare_with_transformers("it", folder, files) is None


@pytest.mark.parametrize(
    ("settings", "files", "special"),
    [
        ({"pad_token": "<p>", "image_token": "<img>"}, {}, {"pad_token": "<p>", "image_token": "<img>"}),
        ({"extra_special_tokens": {"image_token": "<img>"}}, {}, {"image_token": "<img>"}),
        ({}, {"special_tokens_map.json": {"bos_token": {"content": "<bos>", "lstrip": False}}}, {"bos_token": "<bos>"}),
        ({"pad_token": "<p>"}, {"added_tokens.json": {"<p>": 500, "<q>": 501}}, {"pad_token": "<p>"}),
        # special_tokens_map.json is not read then
        ({"added_tokens_decoder": {}}, {"special_tokens_map.json": {"bos_token": "<bos>"}}, {}),
        ({"pad_token": {"__type": "AddedToken", "content": "<p>", "rstrip": True}}, {}, {"pad_token": "<p>"}),
        ({"pad_token": "<think>"}, {}, {"pad_token": "<think>"}),  # the token becomes special
    ],
)
def test_special_tokens_are_those_of_transformers(
    change: Change, settings: dict[str, Any], files: dict[str, object], special: dict[str, str]
) -> None:
    from transformers import AutoTokenizer

    folder = change(settings, files)
    found, hf = read_tokenizer("it", folder), AutoTokenizer.from_pretrained(folder)
    assert found.special_tokens == {"eos_token": "<|endoftext|>", **special} == hf.special_tokens_map
    hf.backend_tokenizer.post_processor = None
    hf.backend_tokenizer.no_truncation()
    assert found.backend.to_str() == hf.backend_tokenizer.to_str()


@pytest.mark.parametrize(
    ("settings", "files", "templates"),
    [
        ({"chat_template": "C"}, {}, {"default": "{{ bos_token }}default"}),  # chat_template.jinja replaces it
        ({"chat_template": "C"}, {"chat_template.jinja": ""}, {"default": ""}),
        ({}, {"additional_chat_templates/tool_use.jinja": "T"}, {"default": "{{ bos_token }}default", "tool_use": "T"}),
        ({}, {"chat_template.json": {"chat_template": "J"}}, {"default": "{{ bos_token }}default"}),
        ({"chat_template": "C"}, NO_JINJA, {"default": "C"}),
        ({"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]}, NO_JINJA,
         {"default": "D", "tool_use": "T"}),
        ({}, {"additional_chat_templates/rag.jinja": "R", **NO_JINJA}, {"rag": "R"}),
        ({}, {"chat_template.json": {"chat_template": "J"}, **NO_JINJA}, {"default": "J"}),
        ({}, NO_JINJA, {}),
    ],
)  # fmt: skip
def test_templates(change: Change, settings: dict[str, Any], files: dict[str, object], templates: object) -> None:
    assert read_tokenizer("it", change(settings, files)).templates == templates


def test_a_chat_with_tools_has_the_template_for_tools(change: Change) -> None:
    files = {"chat_template.jinja": template("chatml"), "additional_chat_templates/tool_use.jinja": "T"}
    loaded = open_folder(change({}, files)).template
    assert (loaded.source, loaded.with_tools) == (template("chatml"), "T")


@pytest.mark.parametrize(
    ("content", "ends"),
    [
        ({"eos_token_id": 2}, ("<|im_end|>",)),
        ({"eos_token_id": [2, 0, 2, 99999]}, ("<|im_end|>", "<|endoftext|>")),
        ({"eos_token_id": None}, ()),
        ({}, ()),
    ],
)
def test_ends_of_generation(change: Change, content: object, ends: tuple[str, ...]) -> None:
    assert read_tokenizer("it", change({}, {"generation_config.json": content})).generation_ends == ends


def test_a_broken_generation_config_is_a_note(change: Change) -> None:
    files = read_tokenizer("it", change({}, {"generation_config.json": "{"}))
    assert files.generation_ends == ()
    assert files.notes[0].startswith("generation_config.json of tokenizer folder it cannot be read: Expecting property")


# tokenizer.json decides


def test_config_json_does_not_replace_the_tokenizer(change: Change) -> None:
    """A word-level tokenizer in a folder of Qwen3.5: transformers makes an empty byte-level one of it."""
    folder = change({"tokenizer_class": "TokenizersBackend"}, {"config.json": {"model_type": "qwen3_5_moe_text"}})
    words = {"<|endoftext|>": 0, "<unk>": 1, "a": 2, "hello": 3}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    files = read_tokenizer("it", folder)
    assert encode(files.backend, "hello a b").ids == [3, 2, 1]
    note = compare_with_transformers("it", folder, files, ["hello a"])
    assert note is not None and '1 of 1 texts of the data get other tokens, such as "hello a": [3, 2] by' in note
    assert "unk_token" not in note  # that of the class is another, but the template does not name it
    lost = losses("it", files)
    assert lost is not None and 'get the unknown token <unk>, such as "Ω"' in lost


def test_a_normaliser_of_a_class_is_counted(change: Change) -> None:
    """Qwen2's class composes accents, which tokenizer.json does not."""
    folder = change({"pad_token": "<|endoftext|>"}, {"config.json": {"model_type": "qwen2"}})
    files = read_tokenizer("it", folder)
    note = compare_with_transformers("it", folder, files, ["plain", "e\u0301"])
    assert note is not None
    assert note.startswith(
        "transformers reads the tokenizer of it otherwise (Qwen2Tokenizer) than tokenizer.json says, which sft uses: "
    )
    assert "of 500 probe texts get other tokens, such as " in note
    assert '1 of 2 texts of the data get other tokens, such as "e\u0301": [' in note


def test_a_special_token_that_a_class_adds_is_said(change: Change) -> None:
    """Gemma's class names <bos>, which the template writes."""
    folder = change({"tokenizer_class": "GemmaTokenizer"})
    note = compare_with_transformers("it", folder, read_tokenizer("it", folder))
    assert note is not None and "bos_token is not set, and <bos> by transformers" in note


def test_a_folder_that_transformers_cannot_load(change: Change) -> None:
    folder = change({"padding_side": "up"})
    assert compare_with_transformers("it", folder, read_tokenizer("it", folder)) == (
        "transformers cannot load the tokenizer of it (Padding side should be selected between 'right' and 'left', "
        "current value: up); sft reads tokenizer.json alone.  A server that uses transformers cannot load it either."
    )


def test_probe_texts() -> None:
    texts = probe_texts(["<|im_start|>", "<|im_end|>"])
    assert len(texts) == len(set(texts)) == 500
    assert texts[:2] == [
        "The quick brown fox jumps over the lazy dog.",
        "Dr. Smith's car isn't here; it's \"there\", isn't it?",
    ]
    assert {
        "café",
        "cafe\u0301".replace("cafe", "e"),
        " the",
        "a\t\tb",
        "你 好",
        "\n" * 40,
        "1234567890",
        "a\u200bb",
    } <= {*texts}
    assert "<|im_start|>" in texts and "a<|im_end|>b" in texts
    assert len(set(probe_texts([]))) == len(set(probe_texts([f"<{i}>" for i in range(9000)]))) == 500


def test_letters_that_are_lost(tmp_path: Path) -> None:
    """A byte-pair tokenizer without an unknown token drops letters that it does not know."""
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate("abcdefgh ")}, merges=[]))
    backend.save(str(tmp_path / "tokenizer.json"))
    note = losses("it", read_tokenizer("it", tmp_path))
    assert note is not None
    assert note.startswith("the tokenizer of it cannot write every text: of 500 probe texts, ")
    assert ' lose letters or digits, such as "' in note and ' get no token, such as "Ω"' in note


def test_notes_are_said_once_for_each_preparation(change: Change, capsys: pytest.CaptureFixture[str]) -> None:
    files = {"chat_template.jinja": template("chatml"), "config.json": {"model_type": "qwen2"}}
    folder = change({"pad_token": "<pad>"}, files)
    tokenizer = open_folder(folder)
    rows = folder / "rows.jsonl"
    rows.write_text(
        '{"messages": [{"role": "user", "content": "Hi"}]}\nnot JSON\n{"tokens": [1, 2]}\n{"text": "e\u0301"}\n'
    )
    assert first_texts(rows) == ["user\nHi", "e\u0301"]
    say_notes(tokenizer, [rows], Console(0, sys.stdout))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(
        f"tokenizer: tokenizer.json of {folder} lacks tokens that the files beside it name: <pad>."
    )
    assert "1 of 2 texts of the data get other tokens" in lines[1]


# Mistral's regex


def tekken(folder: Path, regex: str, version: str | None = "4.52.0", model_type: str = "mistral3") -> Path:
    """A byte-level tokenizer of more than 100,000 tokens, in which "The" and "he" are tokens."""
    alphabet = sorted(ByteLevel.alphabet())
    names = [*alphabet, "he", "The", *(f"<{i}>" for i in range(100_000))]
    vocab = {token: i for i, token in enumerate(names)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("T", "he")]))
    split = pre_tokenizers.Split(Regex(regex), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"model_type": model_type, **({} if version is None else {"transformers_version": version})}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def pieces(folder: Path) -> list[str]:
    backend = read_tokenizer("it", folder).backend
    return [str(backend.id_to_token(i)) for i in encode(backend, "'The'").ids]


def test_the_wrong_regex_of_mistral_is_mended(tmp_path: Path) -> None:
    folder = tekken(tmp_path, mistral_regex.WRONG)
    files = read_tokenizer("it", folder)
    assert files.has_mended_regex and pieces(folder) == ["'", "The", "'"]
    assert files.notes == (
        "tokenizer.json of it has the regex that releases of transformers before 5 wrote for Mistral's models by "
        "mistake.  sft uses the right one, with which the model was trained.  Load the tokenizer in transformers with "
        "fix_mistral_regex=True.",
    )
    assert compare_with_transformers("it", folder, files) is None  # with this flag


@pytest.mark.parametrize(
    ("regex", "version", "model_type", "tokens"),
    [
        (mistral_regex.WRONG, None, "mistral", ["'", "The", "'"]),
        (mistral_regex.WRONG, "5.0.0", "mistral3", ["'", "T", "he", "'"]),  # written by a mended release
        (mistral_regex.WRONG, "4.52.0", "llama", ["'", "T", "he", "'"]),
        (mistral_regex.RIGHT, "4.52.0", "mistral3", ["'", "The", "'"]),
        (r"'T|\w+|.", "4.52.0", "mistral3", ["'", "T", "he", "'"]),  # a Mistral model with another vocabulary
    ],
)
def test_when_a_regex_is_mended(
    tmp_path: Path, regex: str, version: str | None, model_type: str, tokens: list[str]
) -> None:
    assert pieces(tekken(tmp_path, regex, version, model_type)) == tokens


# Folders that cannot be used


@pytest.mark.parametrize(
    ("file", "content", "complaint"),
    [
        ("tokenizer.json", "{}", "tokenizer.json of it is not a usable tokenizer: Model missing"),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\noid", "it is a pointer of Git LFS: fetch the"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json of tokenizer folder it cannot be read: it holds no"),
        ("tokenizer_config.json", '{"pad_token": 1}', "tokenizer_config.json of it has a special token that cannot be"),
        ("special_tokens_map.json", "{", "special_tokens_map.json of tokenizer folder it cannot be read: Expecting"),
        ("additional_chat_templates/x.jinja", b"\xff", "a chat template of it cannot be read: 'utf-8' codec"),
    ],
)
def test_folders_that_cannot_be_used(change: Change, file: str, content: str | bytes, complaint: str) -> None:
    folder = change()
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as refusal:
        read_tokenizer("it", folder)
    assert complaint in str(refusal.value)


@pytest.mark.parametrize(
    ("part", "value", "complaint"),
    [
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "is not a usable tokenizer: Precompil"),
        ("post_processor",
         {"type": "TemplateProcessing", "pair": [], "special_tokens": {},
          "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]},
         "the tokenizer of it fails at 'a': no entry found for key."),
        ("model", {"type": "BPE", "vocab": {"q": 0}, "merges": []}, "gives no token for 'a', 'A', '0', ' a', 'the'"),
        ("model", {"type": "WordLevel", "vocab": {"q": 0}, "unk_token": "<unk>"}, "fails at 'a': WordLevel error: Mis"),
        ("model", {"type": "BPE", "vocab": {"a": 4_000_000_000}, "merges": []}, "has the token id 4,000,000,000; the"),
    ],
)  # fmt: skip
def test_panics_and_vocabularies(change: Change, part: str, value: object, complaint: str) -> None:
    folder = change()
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**content, part: value}))
    with pytest.raises(DataError) as refusal:
        read_tokenizer("it", folder)
    assert complaint in str(refusal.value)


def test_a_text_at_which_the_regex_gives_up(change: Change) -> None:
    folder = change()
    content = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": mistral_regex.WRONG}, "behavior": "Isolated", "invert": False}
    (folder / "tokenizer.json").write_text(json.dumps({**content, "pre_tokenizer": split}))
    backend = read_tokenizer("it", folder).backend
    with pytest.raises(
        DataError, match=r'fails at a text of 12,000,002 characters, "x {19}"\.\.\.: Onig: Regex search'
    ):
        encode(backend, "x" + " " * 12_000_000 + "y")
    assert encode(backend, "x").ids  # it still works


# Folders without tokenizer.json


def test_transformers_reads_other_vocabularies(base: Path, tmp_path: Path) -> None:
    content = json.loads((base / "tokenizer.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in content["model"]["merges"]))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>"}')
    files = read_tokenizer("it", tmp_path)
    assert not files.is_of_file and files.eos_id == 2
    assert encode(files.backend, "the").ids == encode(read_tokenizer("it", base).backend, "the").ids
    assert files.notes[0].startswith("it has no tokenizer.json, so transformers makes the tokenizer (GPT2Tokenizer) of")
    assert compare_with_transformers("it", tmp_path, files) is None


@pytest.mark.parametrize(
    ("content", "package"), [(b"\n\x0e\n\x05<unk>", "sentencepiece"), (b"IQ== 0\nIg== 1\n", "tiktoken")]
)
def test_a_package_that_is_missing(
    tmp_path: Path, content: bytes, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr("sft.data.tokenizer.reading.find_spec", lambda name: None)
    monkeypatch.setattr("sft.data.tokenizer.reading.load", _fail)
    with pytest.raises(DataError) as refusal:
        read_tokenizer("it", tmp_path)
    assert str(refusal.value) == (
        f"tokenizer.model of it needs the package {package} to be read, which is not installed here: pip install "
        f"{package}; or give a folder with tokenizer.json."
    )


def _fail(folder: Path, **_: object) -> None:
    raise ValueError("`tiktoken` is required")


def test_faults_of_config_json_are_not_those_of_the_tokenizer(base: Path, tmp_path: Path) -> None:
    fault = {"model_type": "qwen3", "num_hidden_layers": 3, "layer_types": ["full_attention"]}
    content = json.loads((base / "tokenizer.json").read_text())
    (tmp_path / "vocab.json").write_text(json.dumps(content["model"]["vocab"]))
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "config.json").write_text(json.dumps(fault))
    with pytest.raises(DataError, match="^config.json of it cannot be read by transformers, which chooses the kind of"):
        read_tokenizer("it", tmp_path)
    shutil.copy(base / "tokenizer.json", tmp_path)
    assert read_tokenizer("it", tmp_path).templates == {}  # config.json is not needed
