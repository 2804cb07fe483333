"""Describes template, defaults and end tokens of an export for users, with the flags with which vLLM serves adapters.

For a whole model, a server reads all files from the exported folder.  For adapters, it takes tokenizer, template and
end tokens from the base model, unless flags name the adapter's folder.
"""

import json
from collections.abc import Iterator

from sft.weights.serving.served import Record
from sft.weights.serving.served_files import GENERATION, TEMPLATE

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values of --max-lora-rank
_DEFAULT_RANK = 16


def short(record: Record) -> str:
    """One line for the log, such as "chat_template.jinja of the run (enable_thinking: false); ends with <|im_end|>"."""
    values = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in record.defaults.items()]
    values += [f"date {record.date}"] if record.date else []
    of_run = f" of the run ({', '.join(values)})" if values else " of the run"
    template = f"{', '.join(record.templates)}{of_run}" if record.templates else "no chat template, as in the run"
    return f"{template}; ends with {', '.join(record.ends)}" if record.ends else template


def details(record: Record) -> Iterator[str]:
    """The sentences about template and end tokens in the model card."""
    if record.templates:
        files = ", ".join(f"`{name}`" for name in record.templates)
        yield f"Chat template: {files}, which writes the prompts of the training."
    else:
        yield "The run had no chat template: it trained plain texts or tokens."
    for name, value in record.defaults.items():
        yield f"`{name}` is {_json(value)} in the template, unless a request gives another value in its variables."
    for name, value in record.requests.items():
        yield f"Each request must give the template's variable `{name}`: {_json(value)}, with which it was trained."
    if record.row_switches:
        names = ", ".join(f"`{name}`" for name in record.row_switches)
        yield f"Rows gave {names} themselves, so the template has no default of the training for it."
    if record.date:
        yield f"The template gives {record.date} as today's date, which the model was trained with."
    if record.asks_for_today:
        yield "The template asks the server for today's date; the model was trained with one date (data.date)."
    if record.has_marks:
        yield "The template has {% generation %} marks, which transformers knows and other programs may not."
    if record.ends:
        ends = ", ".join(f"`{end}` ({i})" for end, i in zip(record.ends, record.end_ids, strict=True))
        yield f"Generation stops at {ends}: `eos_token_id` in {GENERATION}."


def flags(record: Record, base: str, rank: int) -> list[str]:
    """The command with which vLLM serves adapters, one element for each flag.  ADAPTER stands for their folder.

    vllm serve BASE, --enable-lora, --lora-modules NAME=ADAPTER, --chat-template ADAPTER/chat_template.jinja, ...
    """
    lines = [f"vllm serve {base}", "--enable-lora", "--lora-modules NAME=ADAPTER"]
    if rank > _DEFAULT_RANK:
        lines.append(f"--max-lora-rank {next((size for size in _RANKS if size >= rank), rank)}")
    if record.is_other or len(record.templates) > 1:  # the tokenizer chooses one of several templates
        lines.append("--tokenizer ADAPTER")
    if record.templates == (TEMPLATE,):
        lines.append(f"--chat-template ADAPTER/{TEMPLATE}")
    if record.requests:
        lines.append(f"--default-chat-template-kwargs '{_json(record.requests)}'")
    if record.ends:
        lines.append("--generation-config ADAPTER")
    return lines


def stop_ids(record: Record) -> str:
    """The JSON key and value of the stop ids, for a request to a server that does not read generation_config.json."""
    return f'"stop_token_ids": {_json(list(record.end_ids))}'


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
