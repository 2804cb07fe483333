"""Released templates with the chats of their users: ids, and the words, ends and starts of supervised text.

The table of docs/concepts/masks.md is compared with the results.
"""

from pathlib import Path

import pytest
from jinja2 import TemplateError

from sft.errors import DataError
from tests.unit.fixtures.model_folder import pieces_of
from tests.unit.released_chats import CHATS, OF_ASSISTANT, WORD, tools_of, words_of
from tests.unit.released_templates import NAMES, Model, Models, folder_of_templates, made_once

PAGE = Path(__file__).resolve().parents[3] / "docs/concepts/masks.md"
# Templates of trl whose models are not in docs/reference/models.md.
OTHERS = "cohere diffusion_gemma idefics3 lfm2 llava_next muse_glimmer nemotron phi3_5 smolvlm".split()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return made_once(tmp_path_factory.mktemp)


def table() -> dict[str, dict[str, str]]:
    """The table of the page: {template: {chat: cell}}"""
    text = (
        PAGE.read_text(encoding="utf-8").partition("## Which released templates are trained")[2].partition("\n## ")[0]
    )
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    start = next(i for i, row in enumerate(rows) if row[0] == "template")
    header = [cell.replace(" ", "_") for cell in rows[start]]
    results = [(names.split("`, `"), dict(zip(header[1:], cells, strict=True))) for names, *cells in rows[start + 2 :]]
    return {name: cells for names, cells in results for name in names}


def test_every_template_of_a_family_is_tried() -> None:
    files = {path.stem for path in folder_of_templates().glob("*.jinja")}
    own = {name for name in files if not name.endswith("_training") and not name.startswith(tuple(OTHERS))}
    assert own == set(NAMES) == set(table())


@pytest.mark.parametrize("name", NAMES)
def test_the_table(models: Models, name: str) -> None:
    assert {chat: cell(models(name), chat) for chat in CHATS} == table()[name]


def cell(model: Model, chat: str) -> str:
    """The result of a chat, as a letter of the table."""
    try:
        theirs = text_of(model, model.rendered(chat))
    except (TemplateError, TypeError):
        with pytest.raises(DataError, match="refused the chat"):
            model.encoded(chat)
        return "!"
    words = words_of([CHATS[chat], tools_of(chat)])
    lost = {letter: sum(word not in theirs for word in words if word[0] == letter) for letter in "uytfahnkv"}
    if lost["n"] and all(word not in theirs for word in words if word[0] in "nkv"):
        with pytest.raises(DataError, match="the template writes nothing of it"):
            model.encoded(chat)
        return "0"
    model.encoded(chat)
    all_reasoning = lost["h"] == sum(word[0] == "h" for word in words)
    letters = ("r" if all_reasoning else "p") * bool(lost["h"]) + "c" * bool(lost["n"]) + "s" * bool(lost["f"])
    assert not lost["u"] + lost["y"] + lost["t"] + lost["a"]
    return letters or "+"


def text_of(model: Model, ids: list[int]) -> str:
    """A letter for each token, so that positions of words are positions of tokens; a space for an added token."""
    pieces = pieces_of(ids, model.tokens)
    return b"".join(piece if len(piece) == 1 else b" " for piece in pieces).decode("latin-1")


@pytest.mark.parametrize("name", NAMES)
def test_what_is_trained(models: Models, name: str) -> None:
    model = models(name)
    trained = [chat for chat, letter in table()[name].items() if letter not in "!0"]
    assert len(trained) >= 3
    wrong = {chat: complaint for chat in trained if (complaint := complaint_of(model, chat))}
    assert not wrong


def complaint_of(model: Model, chat: str) -> str:
    encoding = model.encoded(chat)
    ids, weights = encoding.tokens.tolist(), [float(weight) for weight in encoding.weights]
    theirs = model.rendered(chat)
    if ids[: len(theirs)] != theirs:
        return "ids differ from those of apply_chat_template"
    appended = [model.ours.control_names[i] for i in ids[len(theirs) :]]
    if appended != final_end(model, chat):
        return f"the end of the last turn is {appended}"
    text = text_of(model, ids)
    return (
        wrong_words(text, weights) or wrong_ends(model, chat, ids, weights) or wrong_starts(model, chat, ids, weights)
    )


def final_end(model: Model, chat: str) -> list[str]:
    """The tokens that are appended to a chat: for GLM, the token with which the next message would begin."""
    if model.family.tokens != "glm":
        return []
    return ["<|observation|>" if CHATS[chat][-1].get("tool_calls") else "<|user|>"]


def wrong_words(text: str, weights: list[float]) -> str:
    """Words of other roles must have weight 0, words of the assistant 1.  Names of functions also occur in results."""
    named = set()
    for match in WORD.finditer(text):
        found = {weights[k] for k in range(*match.span())}
        if match[0][0] == "n" and found == {0.0} and match[0] in named:
            continue
        named.add(match[0])
        if found != {float(match[0][0] in OF_ASSISTANT)}:
            return f"{match[0]} has weights {found}"
    return ""


def runs(weights: list[float]) -> list[tuple[int, int]]:
    edges = [k for k in range(len(weights) + 1) if (k < len(weights) and weights[k]) != (k > 0 and weights[k - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))


def wrong_ends(model: Model, chat: str, ids: list[int], weights: list[float]) -> str:
    """Every supervised run must end with a token at which generation stops; gpt-oss ends answers of the history with
    another token."""
    stops = {model.theirs.convert_tokens_to_ids(stop) for stop in model.tokens.stops}
    for start, end in runs(weights):
        of_history = (
            model.family.tokens == "gptoss" and end < len(ids) and model.ours.control_names[ids[end]] == "<|end|>"
        )
        if ids[end - 1] not in stops and not of_history:
            return f"{model.theirs.decode(ids[start:end])!r} has no end"
    return ""


def wrong_starts(model: Model, chat: str, ids: list[int], weights: list[float]) -> str:
    """Every supervised run must begin where the prompt for it ends."""
    starts = {start for start, _ in runs(weights)}
    for index in range(len(CHATS[chat])):
        if CHATS[chat][index]["role"] != "assistant":
            continue
        expected = start_of_message(model, chat, index, ids)
        if expected not in starts:
            return f"message {index + 1} does not begin after {model.theirs.decode(ids[expected - 20 : expected])!r}"
    return ""


def start_of_message(model: Model, chat: str, index: int, ids: list[int]) -> int:
    """The end of the longest common start of the rendering and the prompt, searched from the last word before the
    message."""
    prompt = model.rendered(chat, index, prompt=True)
    last = [word for word in words_of(CHATS[chat][index - 1]) if word[0] in "ut"][-1]
    ours, theirs = (text_of(model, some).rindex(last) + len(last) for some in (ids, prompt))
    common = 0
    while theirs + common < len(prompt) and ids[ours + common] == prompt[theirs + common]:
        common += 1
    return ours + common
