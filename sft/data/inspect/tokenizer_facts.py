"""What a tokenizer and its template say about ends of turns, padding, and how masks are proven.

Decides what each way of proving a mask is called, and its words for people (`MASKS`): a new way is a new entry there
and a case of `_masks`, nothing else.
"""

from dataclasses import dataclass

from sft.data.chat.tokenizer import BYTE_CONTROL, ByteTokenizer, ChatTokenizer

MASKS = {
    "built in": "written by the built-in ChatML template, which knows what the assistant wrote",
    "generation markers": "proven by the template's {% generation %} blocks",
    "differences": "proven chat by chat, by text prefixes or by blanking a turn (no {% generation %} blocks)",
}


@dataclass(frozen=True, kw_only=True)
class TokenizerFacts:
    """masks: a key of MASKS.  The byte tokenizer has no end of sequence (eos): null.

    end_of_turn_ids  end_of_turn_id first, then those of turns that end in another way (after a tool call)
    """

    name: str
    vocab_size: int
    end_of_turn: str
    end_of_turn_id: int
    end_of_turn_ids: tuple[int, ...]
    eos: str | None
    eos_id: int | None
    pad_id: int
    masks: str


def tokenizer_facts(tokenizer: ChatTokenizer) -> TokenizerFacts:
    """Those of the tokenizer that a recipe names."""
    if isinstance(tokenizer, ByteTokenizer):
        ends: tuple[int, ...] = (BYTE_CONTROL[tokenizer.end_of_turn],)
        eos, eos_id = None, None
    else:
        ends = tuple(tokenizer.ids[end] for end in tokenizer.delimiters.ends)
        eos, eos_id = tokenizer.hf.eos_token, tokenizer.hf.eos_token_id
    return TokenizerFacts(
        name=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        end_of_turn=tokenizer.end_of_turn,
        end_of_turn_id=ends[0],
        end_of_turn_ids=ends,
        eos=eos,
        eos_id=eos_id,
        pad_id=tokenizer.pad_id,
        masks=_masks(tokenizer),
    )


def _masks(tokenizer: ChatTokenizer) -> str:
    if isinstance(tokenizer, ByteTokenizer):
        return "built in"
    return "generation markers" if tokenizer.template.has_markers else "differences"
