"""Converts a document or a file of code to tokens, all of which are supervised.

A text gets the tokens of `tokenizer(text)` in transformers, as in pretraining: no chat template, control strings in the
text are control tokens, and a BOS token comes first if the tokenizer adds one.  Then the tokenizer's EOS token ends the
document, once: it is added unless the text already ends with it.  `data.supervise` does not apply.

    "hé", byte tokenizer                          104 195 169               no BOS, no EOS
    "Hi", Llama 3      <|begin_of_text|> Hi <|end_of_text|>                 supervised: Hi <|end_of_text|>
    "Hi", Qwen                           Hi <|endoftext|>                   supervised: <|endoftext|>
"""

import numpy as np

from sft.data.chat.tokenizer import ByteTokenizer, ChatTokenizer
from sft.data.rows.formats import PlainText
from sft.errors import DataError


def encode_text(row: PlainText, tokenizer: ChatTokenizer) -> tuple[np.ndarray, np.ndarray, int]:
    """Tokens int32 [n], weights float32 [n], and the number of tokens that the tokenizer puts before a text.

    The tokens before the text have weight 0, and so has the first token, which no token predicts.  Raises DataError if
    no token is left to supervise.
    """
    if isinstance(tokenizer, ByteTokenizer):
        ids, num_before = np.frombuffer(row.text.encode(), dtype=np.uint8).astype(np.int32), 0
    else:
        before, after = tokenizer.around_text
        num_before = len(before)
        content = tokenizer.encode(row.text).ids
        last = after[-1] if after else content[-1] if len(content) else None
        end = [] if tokenizer.eos_id in (None, last) else [tokenizer.eos_id]
        ids = np.concatenate([before, content, after, end]).astype(np.int32)
    weights = np.ones(len(ids), dtype=np.float32)
    weights[: max(1, num_before)] = 0
    if not weights.any():
        raise DataError("the text has only one token, so no token is supervised.")
    return ids, weights, num_before
