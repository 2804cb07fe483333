"""Renders the beginnings of a chat, each alone and with the results of the others (`template/replay.py`)."""

from collections.abc import Iterator, Sequence
from typing import Any

from sft.data.template.chat_template import ChatTemplate, Refused
from sft.data.template.rendering import trace_inputs
from sft.data.template.replay import KeptResults
from tests.unit.released_chats import Message


def both(source: str, messages: Sequence[Message], tools: Any, kept: KeptResults) -> Iterator[tuple[Any, Any]]:
    """Yields the renderings of the first messages, alone and with kept results; the error in place of one that is
    refused."""
    made = ChatTemplate(source, "t", {"bos_token": "<s>", "eos_token": "</s>", "sep": "|"})
    inputs = trace_inputs(messages, tools, None, {})
    for stop in range(1, len(messages) + 1):
        for prompt in (False, True):
            first, results = inputs._replace(messages=inputs.messages[:stop]), []
            for known in (None, kept):
                try:
                    results.append(made.rendered(first, prompt=prompt, kept=known))
                except Refused as error:
                    results.append(str(error))
            yield results[0], results[1]
