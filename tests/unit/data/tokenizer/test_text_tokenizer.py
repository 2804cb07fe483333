"""Tokens of a text: the characters of each token, and the characters that a token provably decodes to."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from sft.data.tokenizer.text_tokenizer import Encoder

# Ids: "a" 0, "b" 1, the two bytes of "é" 2 and 3, "ab" 4, "A" 5, the letters "«" and "»" of bytes 6 and 7.
_VOCABULARY = {"a": 0, "b": 1, "Ã": 2, "©": 3, "ab": 4, "A": 5, "«": 6, "»": 7}


def _tokenizer(normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(_VOCABULARY, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([AddedToken("<|▁|>", normalized=False), AddedToken("«A»", normalized=False)])
    return tokenizer


def test_edges_count_bytes() -> None:
    encoded = Encoder(_tokenizer())("abé<|▁|>a")
    assert encoded.ids.tolist() == [4, 2, 3, 8, 0]
    assert encoded.edges == [0, 2, 3, 4, 11, 12]
    assert encoded.starts.tolist() == [0, 2, 2, 3, 8]  # both bytes of "é" are character 2
    assert encoded.ends.tolist() == [2, 3, 3, 8, 9]


@pytest.mark.parametrize(
    ("start", "end", "span"),
    [
        (0, 2, (0, 1, True)),
        (2, 3, (1, 3, True)),
        (3, 9, (3, 5, True)),
        (0, 0, (0, 0, True)),
        (9, 9, (5, 5, True)),
        (1, 3, (0, 3, False)),  # begins inside "ab"
        (0, 1, (0, 1, False)),  # ends inside "ab"
        (4, 9, (3, 5, False)),  # begins inside a control token
    ],
)
def test_tokens_of_whole_characters_are_proven(start: int, end: int, span: tuple[int, int, bool]) -> None:
    assert Encoder(_tokenizer())("abé<|▁|>a").token_spans([start], [end]) == [span]


@pytest.mark.parametrize(
    ("normalizer", "text", "ids"),
    [
        (normalizers.Lowercase(), "Aa", [0, 0]),  # as many bytes as the text, but other bytes
        (normalizers.Replace("b", ""), "ab", [0]),
        (None, "azb", [4]),  # "z" has no token, and is lost
        (None, "«A»", [9]),  # the decoder reads « and » as bytes, not as letters
    ],
)
def test_other_bytes_than_those_of_the_text_prove_nothing(
    normalizer: normalizers.Normalizer | None, text: str, ids: list[int]
) -> None:
    tokenizer = _tokenizer(normalizer)
    encoded = Encoder(tokenizer)(text)
    assert encoded.ids.tolist() == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) != text
    assert encoded.edges is None
    assert [proven for _, _, proven in encoded.token_spans([0], [len(text)])] == [False]


def test_a_normaliser_that_changes_nothing_of_a_text_leaves_the_proof() -> None:
    encoded = Encoder(_tokenizer(normalizers.Lowercase()))("ab")
    assert encoded.token_spans([0], [2]) == [(0, 1, True)]


def test_other_decoders_prove_nothing() -> None:
    tokenizer = _tokenizer()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip("a", 1, 0)])
    assert Encoder(tokenizer)("ab").edges is None
