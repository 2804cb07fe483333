"""Folders with tekken.json: the tokenizer is made of the same files, whether or not mistral-common is installed.

If this package is installed, transformers gives such a folder to it, unless a caller passes fix_mistral_regex.
"""

import base64
import json
from pathlib import Path

import pytest

from sft.data.tokenizer import mistral_regex
from sft.data.tokenizer.comparison import compare_with_transformers
from sft.data.tokenizer.files import encode
from sft.data.tokenizer.reading import read_tokenizer
from tests.unit.fixtures.folder import make_folder


class MistralCommon:
    """Replaces the class of transformers that needs the package."""

    @classmethod
    def from_pretrained(cls, folder: str, **_: object) -> None:
        raise ValueError("mistral-common reads the folder")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers as it is if mistral-common is installed."""
    from transformers.integrations.mistral import tokenizer
    from transformers.models.auto import tokenization_auto

    monkeypatch.setattr(tokenizer, "is_mistral_common_available", lambda: True)
    monkeypatch.setitem(tokenization_auto.TOKENIZER_MAPPING_NAMES, "mistral3", "MistralCommonBackend")
    monkeypatch.setitem(tokenization_auto.REGISTERED_TOKENIZER_CLASSES, "MistralCommonBackend", MistralCommon)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a tekken.json of the 256 bytes, "he" and "The", and the other files of the model."""
    texts = [*(bytes([byte]) for byte in range(256)), b"he", b"The"]
    content = {
        "config": {"pattern": mistral_regex.RIGHT, "default_num_special_tokens": 3},
        "vocab": [{"rank": i, "token_bytes": base64.b64encode(text).decode()} for i, text in enumerate(texts)],
        "special_tokens": [{"rank": i, "token_str": token} for i, token in enumerate(("<unk>", "<s>", "</s>"))],
    }
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    (tmp_path / "config.json").write_text('{"model_type": "mistral3", "transformers_version": "4.52.0"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizerFast", "eos_token": "</s>"}')
    return tmp_path


def test_a_caller_who_says_nothing_gets_mistral_common(folder: Path) -> None:
    from transformers import AutoTokenizer

    with pytest.raises(ValueError, match="mistral-common reads the folder"):
        AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def test_a_folder_with_tekken_json_alone(folder: Path) -> None:
    files = read_tokenizer("it", folder)
    assert encode(files.backend, "'The'</s>").ids == [3 + 39, 3 + 257, 3 + 39, 2]
    assert (files.eos_id, files.is_of_file) == (2, False)


def test_a_folder_with_tokenizer_json_beside_it(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Both compared tokenizers are made of tokenizer.json."""
    other = make_folder(tmp_path_factory.mktemp("other"), "")
    (folder / "tokenizer.json").write_text((other / "tokenizer.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "LlamaTokenizerFast", "eos_token": "<|im_end|>"}'
    )
    files = read_tokenizer("it", folder)
    assert not files.has_mended_regex and files.is_of_file
    assert compare_with_transformers("it", folder, files) is None
