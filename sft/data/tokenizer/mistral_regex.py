"""Mends the pre-tokenizer that a converter wrote into the files of Mistral's models.

Releases of transformers before 5 wrote the regex of Llama 3 into tokenizer.json of Mistral Small 3, Ministral and
Pixtral.  These models were trained with another regex, and Mistral serves them with it (transformers#42299):

    "'The'"    ' The '    as trained        'T he '    by the file

The regex is replaced if all of these hold:

    config.json names a model_type of Mistral (`_FAMILIES`) or none, and a release of transformers below 5 or none
    the vocabulary has more than 100,000 tokens
    tokenizer.json has exactly the regex of Llama 3

transformers checks only the first two, which also hold for some Mistral models with a correct regex.
"""

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, pre_tokenizers

_FAMILIES = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
_SMALLEST = 100_000
WRONG = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
RIGHT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def mend(name: str, folder: Path, backend: Tokenizer) -> str | None:
    """Replaces the wrong regex of `backend` by the right one.  Returns a note; None if the regex is not the wrong
    one."""
    if backend.get_vocab_size() <= _SMALLEST or not is_of_a_converter(folder) or not _has_wrong_regex(backend):
        return None
    backend.pre_tokenizer[0] = pre_tokenizers.Split(Regex(RIGHT), behavior="isolated")
    return (
        f"tokenizer.json of {name} has the regex that releases of transformers before 5 wrote for Mistral's models by "
        "mistake.  sft uses the right one, with which the model was trained.  Load the tokenizer in transformers with "
        "fix_mistral_regex=True."
    )


def is_of_a_converter(folder: Path) -> bool:
    """Whether config.json names a model_type of Mistral or none, and a release of transformers below 5 or none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # the code that needs config.json reports that it is broken
        return False
    if not isinstance(config, dict) or config.get("model_type") not in (*_FAMILIES, None):
        return False
    major = re.match(r"\d+", str(config.get("transformers_version") or "0"))
    return major is not None and int(major[0]) < 5


def _has_wrong_regex(backend: Tokenizer) -> bool:
    state: dict[str, Any] = json.loads(backend.pre_tokenizer.__getstate__()) if backend.pre_tokenizer else {}
    parts: list[dict[str, Any]] = state.get("pretokenizers") or [{}]
    return parts[0].get("type") == "Split" and parts[0].get("pattern") == {"Regex": WRONG}
