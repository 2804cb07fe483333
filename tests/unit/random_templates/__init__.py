"""Makes random chat templates and chats, with text and mask computed by Python alone: `case(seed)`.

Every piece of a template has two forms: Jinja text, and a Python function that returns the same text.  So the correct
rendering is known without Jinja.  The mask follows from the layout of a turn:

    header (0)  reasoning, content, calls (1)  end token (1)  newline (0)

A turn begins after the longest common start of its text and the header that asks for an answer, so text that the prompt
already has (<think>) gets 0.
"""

from collections import Counter
from random import Random
from typing import Any, NamedTuple

from tests.unit.fixtures.model_folder import Tokens
from tests.unit.random_templates.chats import make_chat
from tests.unit.random_templates.expressions import Message
from tests.unit.random_templates.whole import Draw


class Case(NamedTuple):
    """A template, a chat, and the correct results.

    labels    0, 1 or EITHER for each character of `text`, with data.supervise = assistant
    tokens    the tokens that the tokenizer must have
    appended  whether the template writes no end after the last answer, so that one token may be appended
    controls  how often the template itself writes each special token
    """

    template: str
    messages: list[Message]
    tools: list[dict] | None
    text: str
    labels: list[int]
    tokens: Tokens
    appended: bool
    controls: Counter[str]


def case(seed: int) -> Case:
    """The case of a seed; it is always the same."""
    rng = Random(seed)
    draw = Draw(rng)
    draw.compose()
    draw.draw_tools()
    template = draw.template()
    messages, tools = make_chat(rng, draw)
    text, labels = draw.render(messages, tools)
    appended = draw.end_style == "none" and messages[-1]["role"] == "assistant"
    tokens = draw.tokens()
    clean, _ = draw.render(_without_controls(messages), _without_controls(tools))
    controls = Counter({token: clean.count(token) for token in tokens.special})
    return Case(template, messages, tools, text, labels, tokens, appended, controls)


def _without_controls(value: Any) -> Any:
    """The value, with another text in place of each typed special token."""
    if isinstance(value, str):
        return value.replace("<|", "(|")
    if isinstance(value, dict):
        return {key: _without_controls(item) for key, item in value.items()}
    return [_without_controls(item) for item in value] if isinstance(value, list) else value
