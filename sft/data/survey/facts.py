"""What a tokenizer and its template say about ends of turns, padding, and how masks are proven.

Decides what each way of proving a mask is called, and its words for people (`MASKS`): a new way is a new entry there
and a case of `_masks`, nothing else.
"""

from dataclasses import dataclass

from sft.data.tokenizer import BYTE_CONTROL, ByteTokenizer, ChatTokenizer

MASKS = {
    "built in": "written by the built-in ChatML template, which knows what the assistant wrote",
    "generation markers": "proven by the template's {% generation %} blocks",
    "text prefix": "proven by text prefixes: the template has no {% generation %} blocks",
}


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """masks: a key of MASKS.  The byte tokenizer has no end of sequence (eos): null."""

    name: str
    vocab_size: int
    end_of_turn: str
    end_of_turn_id: int
    eos: str | None
    eos_id: int | None
    pad_id: int
    masks: str


def tokenizer_facts(tokenizer: ChatTokenizer) -> TokenizerFacts:
    """Those of the tokenizer that a recipe names."""
    if isinstance(tokenizer, ByteTokenizer):
        end_of_turn_id, eos, eos_id = BYTE_CONTROL[tokenizer.end_of_turn], None, None
    else:
        end_of_turn_id = int(tokenizer.hf.convert_tokens_to_ids(tokenizer.end_of_turn))
        eos, eos_id = tokenizer.hf.eos_token, tokenizer.hf.eos_token_id
    return TokenizerFacts(
        name=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        end_of_turn=tokenizer.end_of_turn,
        end_of_turn_id=end_of_turn_id,
        eos=eos,
        eos_id=eos_id,
        pad_id=tokenizer.pad_id,
        masks=_masks(tokenizer),
    )


def _masks(tokenizer: ChatTokenizer) -> str:
    if isinstance(tokenizer, ByteTokenizer):
        return "built in"
    return "generation markers" if tokenizer.has_markers else "text prefix"
