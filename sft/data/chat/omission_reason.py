"""Why a template leaves out a text, and what would keep it: found by trying, never by the name of a model.

Tried in this order; the first that holds is the answer:

    a switch     a variable that the template reads and nobody gives: true and false
    no place     the template does not name what the text is in
    the prompt   the template writes the text when it asks for the last answer, and not once the answer is there
    later turns  the template writes the text as long as no later message follows

Does not decide what is left out (`omitted.py`).
"""

from sft.data.chat.message_types import THINKING
from sft.data.chat.omitted import OmittedText, is_written, omitted_with
from sft.data.chat.render import RenderedChat

_NAMES = {"reasoning": THINKING, "tool call": ("tool_calls",), "tool schema": ("tools",)}


def reason(chat: RenderedChat, omitted: OmittedText) -> str:
    """A sentence or two, with what would work.

    GLM-4.6, reasoning  ->  data.chat_template_kwargs: {clear_thinking: false} keeps it.
    """
    template = chat.tokenizer.template
    if switch := _switch(chat, omitted):
        name, value = switch
        return f"data.chat_template_kwargs: {{{name}: {str(value).lower()}}} keeps it."
    index = omitted.number - 1 if omitted.role != "tools" else -1
    names = _NAMES.get(omitted.kind, ())
    in_content = omitted.kind == "reasoning" and not any(chat.messages[index].get(name) for name in names)
    if names and not in_content and not any(name in template.code for name in names):
        return f"The template never reads {names[0]}: give one that does (data.chat_template)."
    last_answer = max((i for i, message in enumerate(chat.messages) if message["role"] == "assistant"), default=None)
    if last_answer is not None and index < last_answer and is_written(chat, omitted, last_answer, prompt=True):
        return (
            "The template writes it in the prompt that asks for the last answer, and leaves it out once the answer "
            "follows: the model is trained without it, and used with it.  Give a template that keeps it "
            "(data.chat_template)."
        )
    if 0 <= index < len(chat.messages) - 1 and is_written(chat, omitted, index + 1, prompt=False):
        return (
            "The template writes it as long as no later message follows.  Give a template that keeps it "
            "(data.chat_template), or make rows that end with that message."
        )
    return "Give a template that writes it (data.chat_template)."


def _switch(chat: RenderedChat, omitted: OmittedText) -> tuple[str, bool] | None:
    """A variable of the template that keeps the text, and nothing else is left out for it."""
    now = {text[:3] for text in omitted_with(chat, {}) or []}
    for name in chat.tokenizer.template.free_switches:
        for value in (True, False):
            with_switch = omitted_with(chat, {name: value})
            if with_switch is not None and {text[:3] for text in with_switch} <= now - {omitted[:3]}:
                return name, value
    return None
