"""The released chat templates that the package trl ships, and the control tokens of their models' tokenizers.

Decides which templates of docs/reference/models.md are tested.  The repository contains none of them: the files are
read from the installed package, and none of its code runs.
"""

from collections.abc import Callable
from copy import deepcopy
from datetime import datetime
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from transformers import AutoTokenizer
from transformers.utils import chat_template_utils

from sft.data.chat.encode_chat import Encoding, encode_chat
from sft.data.rows.formats import Chat, read_row
from sft.data.template.chat_template import DATE
from tests.unit.fixtures.folder import open_folder
from tests.unit.fixtures.model_folder import Tokens, write_folder
from tests.unit.released_chats import CHATS, for_transformers, tools_of

_QWEN = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
)
_HERMES = "<tool_call> </tool_call> <tool_response> </tool_response>"
_THINK = "<think> </think>"
_LLAMA = (
    "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|eot_id|> <|python_tag|> "
    "<|finetune_right_pad_id|>"
)
_DEEPSEEK_TOOLS = (
    "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> <｜tool▁sep｜> "
    "<｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> <｜tool▁output▁end｜>"
)
_GLM = "<|system|> <|user|> <|assistant|> <|observation|> <|begin_of_image|> <|end_of_image|> /nothink"
_GLM_XML = "<tool_response> </tool_response> <arg_key> </arg_key> <arg_value> </arg_value>"
_GEMMA4 = (
    '<|tool> <tool|> <|tool_call> <tool_call|> <|tool_response> <tool_response|> <|"|> <|think|> <|channel> <channel|> '
    "<|turn> <turn|> <|image|> <|audio|> <|video|>"
)


def _tokens(special: str, ordinary: str, eos: str, stops: str, bos: str = "", rstrip: str = "") -> Tokens:
    tokens = tuple(special.split()), tuple(ordinary.split())
    return Tokens(*tokens, eos, bos, tuple(stops.split()), tuple(rstrip.split()))


# Special tokens, ordinary added tokens, the eos, the tokens at which generation stops, the bos, and the special tokens
# that include the spaces after them
TOKENS = {
    "qwen2": _tokens(_QWEN, "<tool_call> </tool_call>", "<|im_end|>", "<|im_end|> <|endoftext|>"),
    "qwen3": _tokens(_QWEN, f"{_HERMES} {_THINK}", "<|im_end|>", "<|im_end|> <|endoftext|>"),
    "llama3": _tokens(_LLAMA, "", "<|eot_id|>", "<|end_of_text|> <|eot_id|>", "<|begin_of_text|>"),
    "llama31": _tokens(_LLAMA, "", "<|eot_id|>", "<|end_of_text|> <|eom_id|> <|eot_id|>", "<|begin_of_text|>"),
    "phi3": _tokens("<unk> <s> <|endoftext|> <|assistant|> <|system|> <|end|> <|user|>", "</s>", "<|endoftext|>",
                    "<|endoftext|> <|assistant|> <|end|>", "<s>", "<|assistant|> <|system|> <|end|> <|user|>"),
    "gemma": _tokens(
        "<pad> <eos> <bos> <start_of_turn> <end_of_turn> <start_of_image>", "", "<eos>", "<eos> <end_of_turn>", "<bos>"
    ),
    "gemma4": _tokens(f"<pad> <eos> <bos> {_GEMMA4}", "", "<eos>", "<eos> <turn|> <|tool_response>", "<bos>"),
    "gptoss": _tokens(
        "<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> <|end|> <|message|> <|call|>", "",
        "<|return|>", "<|return|> <|endoftext|> <|call|>", "<|startoftext|>"),
    "glm": _tokens(
        f"<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> {_GLM}", f"{_THINK} <tool_call> </tool_call> {_GLM_XML}",
        "<|endoftext|>", "<|endoftext|> <|user|> <|observation|>"),
    "deepseek": _tokens(
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜▁pad▁｜>", f"<｜User｜> <｜Assistant｜> {_DEEPSEEK_TOOLS} {_THINK}",
        "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>"),
}  # fmt: skip


class Family(NamedTuple):
    """A template of trl, and facts about its model.

    tokens      the key in TOKENS
    model_type  the families of docs/reference/models.md that use the template
    as_text     whether the template takes the arguments of calls as JSON text
    """

    template: str
    tokens: str
    model_type: str
    as_text: bool = False


FAMILIES = [
    Family("llama3", "llama3", "llama"),
    Family("llama3_1", "llama31", "llama"),
    Family("llama3_2", "llama31", "llama"),
    Family("qwen2_5", "qwen2", "qwen2"),
    Family("qwen2_5_vl", "qwen2", "qwen2_5_vl"),
    Family("qwen3", "qwen3", "qwen3, qwen3_moe"),
    Family("qwen3_instruct_2507", "qwen3", "qwen3_moe"),
    Family("qwen3_vl", "qwen3", "qwen3_vl, qwen3_vl_moe"),
    Family("qwen3_5_nothink", "qwen3", "qwen3_5"),
    Family("qwen3_5_think", "qwen3", "qwen3_5, qwen3_5_moe"),
    Family("qwen3_6", "qwen3", "qwen3_5, qwen3_5_moe"),
    Family("qwen3_8", "qwen3", "qwen3_5"),
    Family("phi3", "phi3", "phi3"),
    Family("gemma", "gemma", "gemma2"),
    Family("gemma3", "gemma", "gemma3"),
    Family("gemma4", "gemma4", "gemma4"),
    Family("gemma4_v2", "gemma4", "gemma4"),
    Family("gemma4_v3", "gemma4", "gemma4"),
    Family("gemma4_v4", "gemma4", "gemma4"),
    Family("gemma4_v5", "gemma4", "gemma4"),
    Family("gptoss", "gptoss", "gpt_oss"),
    Family("glm4moe", "glm", "glm4_moe"),
    Family("deepseekv3", "deepseek", "deepseek_v3", as_text=True),
    Family("deepseek_r1_distill", "deepseek", "llama, qwen2"),
]
NAMES = [family.template for family in FAMILIES]


def folder_of_templates() -> Path:
    return Path(str(distribution("trl").locate_file("trl/chat_templates")))


def template(name: str) -> str:
    return (folder_of_templates() / f"{name}.jinja").read_text(encoding="utf-8")


class _Clock(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime.fromisoformat(DATE)


def at_the_default_date() -> Any:
    """Sets the clock of transformers to the default of data.date, because some templates ask for the time."""
    return patch.object(chat_template_utils, "datetime", _Clock)


class Model:
    """A tokenizer folder with a template, loaded by this trainer and by transformers."""

    def __init__(self, folder: Path, name: str, family: Family) -> None:
        self.family, self.tokens = family, TOKENS[family.tokens]
        written = write_folder(folder, self.tokens, template(name))
        self.ours = open_folder(written)
        self.theirs = AutoTokenizer.from_pretrained(str(written), local_files_only=True)

    def encoded(self, chat: str) -> Encoding:
        """The ids and weights of this trainer.  Raises DataError."""
        tools = tools_of(chat)
        row = read_row({"messages": deepcopy(CHATS[chat]), **({"tools": tools} if tools else {})})
        assert isinstance(row, Chat)
        return encode_chat(row, self.ours)

    def rendered(self, chat: str, stop: int | None = None, *, prompt: bool = False) -> list[int]:
        """The ids of transformers for the first messages of a chat.  Raises errors of the template."""
        messages = for_transformers(CHATS[chat][:stop], as_text=self.family.as_text)
        tools = tools_of(chat)
        with at_the_default_date():
            return self.theirs.apply_chat_template(messages, tools, add_generation_prompt=prompt, return_dict=False)

    def generated(self, chat: str) -> tuple[list[int], list[int]]:
        """The ids of transformers, and its mask of the text between {% generation %} and {% endgeneration %}."""
        messages = for_transformers(CHATS[chat], as_text=self.ours.habits.calls_as_text)
        with at_the_default_date():
            both = self.theirs.apply_chat_template(
                messages, tools_of(chat), return_dict=True, return_assistant_tokens_mask=True
            )
        return both["input_ids"], both["assistant_masks"]


Models = Callable[[str], Model]


def made_once(folder: Callable[[str], Path]) -> Models:
    """A function that makes the model of a family when it is first asked for.  folder: makes a folder of this name"""
    return cache(lambda name: Model(folder(name), name, FAMILIES[NAMES.index(name)]))
