"""Refuses data with a token, or a teacher's distributions with an id, for which the model's embedding has no row.

A tokenizer may have more ids than the embedding has rows (Gemma 3 1B: 262,145 ids, 262,144 rows), as long as the data
contains none of the further ids.  A store records its largest id, so the check reads tokens only to name the row.
"""

import json

from sft.config import Config
from sft.data.cache.corpus import Corpus
from sft.data.chat.tokenizer import ChatTokenizer
from sft.errors import DataError
from sft.parallel.layout import vocab_rows


def check_ids(config: Config, corpus: Corpus, tokenizer: ChatTokenizer) -> None:
    """Raises DataError if the embedding lacks a row for a token of `corpus`, or for an id of a teacher's distribution.
    The message names the first of them.  Also raises DataError if data.teacher.k is above the number of rows."""
    rows = vocab_rows(config.model, tokenizer.vocab_size)
    if (k := config.data.teacher.k) is not None and k > rows:
        raise DataError(
            f"data.teacher.k = {k} is more than the {rows:,} tokens of the vocabulary.  Give at most this number; 64 "
            "is usual."
        )
    if (taught := corpus.first_taught_beyond(rows)) is not None:
        raise DataError(
            f"{corpus.name(taught[0])}: the teacher's distributions have the id {taught[1]:,}, but the embedding has "
            f"only {rows:,} rows (model.vocab_size).  The teacher has a larger vocabulary.  Score with a teacher that "
            "has the vocabulary of this model."
        )
    if tokenizer.vocab_size <= rows or (first := corpus.first_beyond(rows)) is None:
        return
    sample_id, position = first
    token = int(corpus.sample(sample_id).tokens[position])
    if config.model.hf is None:
        remedy = f"Set model.vocab_size to at least {tokenizer.vocab_size}"
    else:
        name = tokenizer.decode([token])
        remedy = f"Give every token a row: data.add_tokens=[{json.dumps(name)}]"
        if config.data.tokenizer not in (None, config.model.hf):
            remedy += "; or use the model's own tokenizer: data.tokenizer=null"
        remedy += "; or remove from the row what gives this token"
    raise DataError(
        f"{corpus.name(sample_id)}: token {position + 1:,} is {tokenizer.decode([token])} (id {token:,}), but the "
        f"embedding has only {rows:,} rows (model.vocab_size).  {remedy}."
    )
