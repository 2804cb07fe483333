"""Why a template leaves out a text, and what would keep it: found by trying, never by the name of a model.

Tried in this order, and the first that holds is told:

    a switch     a variable that the template reads and nobody gives: true and false
    no place     the template does not name what the text is in
    the prompt   the template writes the text when it asks for the last answer, and not once the answer is there
    later turns  the template writes the text as long as no later message follows

Does not decide what is left out (`omitted.py`).
"""

from sft.data.chat.omitted import Missing, omitted_with, writes
from sft.data.chat.template import THINKING
from sft.data.chat.turns import Rendered

_NAMES = {"reasoning": THINKING, "tool call": ("tool_calls",), "tool schema": ("tools",)}


def reason(chat: Rendered, missing: Missing) -> str:
    """A sentence or two, with what would work.

    GLM-4.6, reasoning  ->  data.chat_template_kwargs: {clear_thinking: false} keeps it.
    """
    template = chat.tokenizer.template
    if found := _switch(chat, missing):
        name, value = found
        return f"data.chat_template_kwargs: {{{name}: {str(value).lower()}}} keeps it."
    place = missing.number - 1 if missing.role != "tools" else -1
    names = _NAMES.get(missing.kind, ())
    in_content = missing.kind == "reasoning" and not any(chat.messages[place].get(name) for name in names)
    if names and not in_content and not any(name in template.code for name in names):
        return f"The template never reads {names[0]}: give one that does (data.chat_template)."
    answers = [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if place < answers[-1] and writes(chat, missing, answers[-1], prompt=True):
        return (
            "The template writes it in the prompt that asks for the last answer, and leaves it out once the answer "
            "follows: the model is trained without it, and used with it.  Give a template that keeps it "
            "(data.chat_template)."
        )
    if 0 <= place < len(chat.messages) - 1 and writes(chat, missing, place + 1, prompt=False):
        return (
            "The template writes it as long as no later message follows.  Give a template that keeps it "
            "(data.chat_template), or make rows that end with that message."
        )
    return "Give a template that writes it (data.chat_template)."


def _switch(chat: Rendered, missing: Missing) -> tuple[str, bool] | None:
    """A variable of the template that keeps the text, and nothing else is left out for it."""
    now = {one[:3] for one in omitted_with(chat, {}) or []}
    for name in chat.tokenizer.template.free_switches:
        for value in (True, False):
            with_switch = omitted_with(chat, {name: value})
            if with_switch is not None and {one[:3] for one in with_switch} <= now - {missing[:3]}:
                return name, value
    return None
