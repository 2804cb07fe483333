"""Chooses the messages of a chat whose tokens are supervised.  Supervised tokens by `data.supervise`:

    assistant        the assistant's text and the token that ends each turn, once per turn; neither the role header nor
                     the newline after the turn
    last             the same tokens as for assistant, but only of the last assistant turn
    after_last_user  the same tokens of all assistant turns after the last user message: calls, and the final answer
    all              every token except the first

A message may have a weight, which multiplies the loss of its tokens; 0 means that they are not supervised.
"""

from typing import Literal

from sft.data.rows.formats import Chat
from sft.errors import DataError

# turn: the last turn, with data.turns = each
Supervise = Literal["assistant", "last", "after_last_user", "all", "turn"]


def weights_of_turns(chat: Chat, supervise: Supervise) -> dict[int, float]:
    """The weight of the tokens of each assistant message, by its index.  Leaves out 0, unless `supervise` is all."""
    roles = [message["role"] for message in chat.messages]
    answers = [i for i, role in enumerate(roles) if role == "assistant"]
    if supervise in ("last", "turn"):
        answers = answers[-1:]
    elif supervise == "after_last_user":
        asked = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
        answers = [i for i in answers if i > asked]
    weights = chat.weights or (1.0,) * len(chat.messages)
    by_message = {i: weights[i] for i in answers}
    return by_message if supervise == "all" else {i: weight for i, weight in by_message.items() if weight != 0}


def no_loss(supervise: Supervise) -> DataError:
    """The error for a chat without a supervised token."""
    key = "data.turns = each" if supervise == "turn" else f"data.supervise = {supervise}"
    where = " after the last user message" if supervise == "after_last_user" else ""
    return DataError(
        f"every token has weight 0 with {key}, so the chat has no loss.  Give an "
        f"assistant message{where} a weight above 0, or remove the chat."
    )
