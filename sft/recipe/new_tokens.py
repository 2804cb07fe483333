"""Gives a model the rows that data.add_tokens needs: model.vocab_size grows, and each new row learns its pieces.

This needs the tokenizer, so recipes without data.add_tokens do not come here.
"""

from dataclasses import replace

from sft.config import Config
from sft.config.pretrained import NewRow
from sft.data.tokenizer import new_tokens
from sft.data.tokenizer.reading import read_tokenizer
from sft.errors import ConfigError, DataError, first_few
from sft.hf.pretrained import tokenizer_folder

_ROWS = ("train_embeddings", "train_head")


def with_new_rows(config: Config) -> Config:
    """The config of a model with a row for every token of the tokenizer.  The recipe adds tokens.

    lora.train_embeddings and lora.train_head get the ids of the new rows in place of `added`.
    Raises ConfigError if a token exists already, or if the tokenizer cannot add it.
    """
    name, folder = config.tokenizer, tokenizer_folder(config)
    if folder is None:
        raise ConfigError(
            "data.add_tokens needs the tokenizer of a folder, and data.tokenizer is byte, whose 259 ids are fixed.  "
            "Name a folder with tokenizer.json in data.tokenizer, or remove data.add_tokens."
        )
    try:
        files = read_tokenizer(name, folder)
        known = files.backend.get_vocab()
        files = new_tokens.with_new_tokens(name, files, config.data)
    except DataError as error:
        raise ConfigError(str(error)) from None
    num_rows = config.model.vocab_size
    _check_new(config, known, num_rows)
    model = config.model
    if num_rows is None:
        rows = dict[int, str]()
    else:
        without_row = new_tokens.beyond(files.backend, num_rows)
        model = model.model_copy(update={"vocab_size": max([num_rows - 1, *without_row]) + 1})
        rows = without_row | {token_id: token for token, token_id in files.new_ids.items()}
    if model.pretrained is not None:
        pieces = new_tokens.pieces_of(files.backend, rows)
        if model.added_rows == "mean" and (
            without := [repr(rows[token_id]) for token_id in rows if not pieces[token_id]]
        ):
            raise ConfigError(
                f"model.added_rows = mean: the tokenizer of {name} wrote {', '.join(first_few(without))} without any "
                "pieces before, so there is no row to take a mean of.  Use model.added_rows = random."
            )
        new_rows = tuple(NewRow(token_id=i, token=rows[i], pieces=pieces[i]) for i in sorted(rows))
        model = model.model_copy(update={"pretrained": replace(model.pretrained, new_rows=new_rows)})
    ids = sorted(rows) or sorted(files.new_ids.values())
    lora = config.lora.model_copy(update={field: ids for field in _ROWS if getattr(config.lora, field) == "added"})
    for field in _ROWS:
        named = getattr(lora, field)
        if isinstance(named, list) and (untrained := sorted({*ids}.difference(named))):
            raise ConfigError(
                f"lora.{field} lists ids, but not {untrained[0]:,}, the id of a token of data.add_tokens, which would "
                f"never be trained.  Use lora.{field} = added."
            )
    return config.model_copy(update={"model": model, "lora": lora})


def _check_new(config: Config, known: dict[str, int], num_rows: int | None) -> None:
    """Raise ConfigError if the tokenizer has a token already, and the model a row for it."""
    for key in ("add_tokens", "add_special_tokens"):
        for token in getattr(config.data, key):
            if token in known and (num_rows is None or known[token] < num_rows):
                raise ConfigError(
                    f"data.{key} names {token!r}, which the tokenizer of {config.tokenizer} has already (id "
                    f"{known[token]:,}){'' if num_rows is None else ', and the model has a row for it'}.  Remove it "
                    f"from data.{key}."
                )
