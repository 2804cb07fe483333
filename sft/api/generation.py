"""`sft.generate`: lets weights answer prompts, for a first look, with transformers."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft.errors import ConfigError
from sft.hf.hub import ADAPTERS, CONFIG, is_hub_name

if TYPE_CHECKING:
    from sft.data.read.rows import DataFile

Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A chat that a model is to continue.

    messages  messages in OpenAI's form; the last one is not the assistant's
    tools     the tools of the chat, or None
    expected  the answer in the data, if the prompt comes from a row with an answer
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    expected: str | None = None


@dataclass(frozen=True, kw_only=True)
class Generated:
    """An answer.

    text        the generated text, with control tokens
    num_prompt  tokens of the prompt
    num_tokens  tokens of the answer
    is_whole    whether the model ended its answer; False: it reached `max_tokens`
    """

    prompt: Prompt
    text: str
    num_prompt: int
    num_tokens: int
    is_whole: bool


def generate(
    source: str | Path,
    prompts: Sequence[str | Prompt],
    *,
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    device: str = "auto",
) -> list[Generated]:
    """Answer prompts with the weights of `source`, one after another, in this process.

    source: a checkpoint, a run (its newest checkpoint), a Hugging Face or PEFT folder, or a name on the hub
    prompts: texts of a user, or chats
    max_tokens: largest number of tokens of an answer
    temperature: 0 takes the most probable token; other values draw, with `seed`, from the most probable tokens whose
    probabilities add up to `top_p`
    device: auto (a GPU if there is one), cpu, cuda

    A checkpoint is exported into a temporary folder first; its adapters are merged.  Weights keep the type of the
    folder; on a CPU they are float32.  For many prompts, use a server such as vLLM.

    Raises ConfigError for arguments that cannot be used or a model that transformers cannot open, and the errors of
    `sft.export`.
    """
    if max_tokens < 1 or temperature < 0 or not 0 < top_p <= 1:
        raise ConfigError(
            f"max_tokens = {max_tokens}, temperature = {temperature:g}, top_p = {top_p:g}: expected at least 1, at "
            "least 0, and above 0 and at most 1."
        )
    chats = [Prompt(messages=[{"role": "user", "content": p}]) if isinstance(p, str) else p for p in prompts]
    with tempfile.TemporaryDirectory(prefix="sft-generate-") as temporary:
        model, tokenizer = _open(_folder(source, Path(temporary)), device)

    import torch

    torch.manual_seed(seed)
    options: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        options = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    return [_answer(model, tokenizer, chat, {"max_new_tokens": max_tokens, **options}) for chat in chats]


def read_prompts(file: "DataFile", number: int | None = None) -> list[Prompt]:
    """The first `number` prompts of a file; None: all.

    A .txt file has a prompt in each line.  Any other data file has rows as for training: the prompt is the chat before
    the last answer, which becomes `expected`.
    """
    if isinstance(file, Path) and file.suffix == ".txt":
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} cannot be read: {error}.") from error
        texts = [line for line in lines if line.strip()]
        return [Prompt(messages=[{"role": "user", "content": line}]) for line in texts[:number]]

    from sft.data.read.rows import check_file, read_rows, row_name
    from sft.data.read.strict_json import parse
    from sft.data.rows.formats import Chat, read_row
    from sft.data.rows.messages import text_of, with_arguments, with_reasoning_keys

    check_file(file)
    prompts: list[Prompt] = []
    for position, content in read_rows(file, stop=number):
        chat = read_row(parse(content))
        if not isinstance(chat, Chat):
            raise ConfigError(f"{row_name(file, position)} is a text or tokens, not a chat.  Give rows with messages.")
        messages = with_arguments(with_reasoning_keys(chat.messages), as_text=False)
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=len(messages))
        expected = None if last == len(messages) else _shown(messages[last], text_of(messages[last]))
        prompts.append(Prompt(messages=messages[:last], tools=chat.tools, expected=expected))
    return prompts


def _shown(message: Message, content: str) -> str:
    """The answer of a row as text: its reasoning, its content and its calls."""
    calls = [str(call["function"]) for call in message.get("tool_calls") or ()]
    return "\n".join(filter(None, [message.get("reasoning_content"), content, *calls]))


def _folder(source: str | Path, temporary: Path) -> Path:
    """A folder that transformers can open."""
    from sft.hf.hub_weights import model_folder

    path = Path(source)
    if is_hub_name(str(source)):
        return model_folder(str(source))
    if (path / ADAPTERS).is_file() or ((path / CONFIG).is_file() and any(path.glob("*.safetensors*"))):
        return path

    from sft.api.models import export

    exported = temporary / "model"
    export(path, exported, verify="size")
    if not (exported / ADAPTERS).is_file():
        return exported
    export(path, temporary / "merged", verify="size", merged=True)
    return temporary / "merged"


def _open(folder: Path, device: str) -> tuple[Any, Any]:
    """The model on the device, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device = cuda, but torch sees no GPU on this machine.  Use cpu.")
    dtype = torch.float32 if device == "cpu" else "auto"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        if (folder / ADAPTERS).is_file():
            from peft import AutoPeftModelForCausalLM

            model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype=dtype)
        else:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    except ImportError as error:
        raise ConfigError(f"{folder} needs a package that is not installed: {error}.") from error
    except (OSError, ValueError, KeyError) as error:
        subject = f"transformers cannot open {folder}{_base_of(folder)}"
        raise ConfigError(f"{subject}: {' '.join(str(error).split())}") from error
    if tokenizer.chat_template is None:
        raise ConfigError(f"the tokenizer of {folder} has no chat template, so chats cannot be written for the model.")
    return model.to(device).eval(), tokenizer


def _base_of(folder: Path) -> str:
    """Names the model of adapters for a message, if it is a folder that is gone; otherwise empty."""
    try:
        base = str(json.loads((folder / ADAPTERS).read_text(encoding="utf-8"))["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if Path(base).exists():
        return ""
    return f", whose adapters need {base}, which is no folder here (base_model_name_or_path in {ADAPTERS} names it)"


def _answer(model: Any, tokenizer: Any, prompt: Prompt, options: Mapping[str, Any]) -> Generated:
    """The answer to a prompt.  options: arguments of transformers' `generate`"""
    import torch

    try:
        inputs = tokenizer.apply_chat_template(
            [dict(message) for message in prompt.messages],
            tools=None if prompt.tools is None else [dict(tool) for tool in prompt.tools],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        ).to(model.device)
    except Exception as error:  # a template may raise anything
        raise ConfigError(f"the chat template cannot write a prompt: {error}") from error
    num_prompt = inputs["input_ids"].shape[1]
    with torch.no_grad():
        tokens = model.generate(**inputs, **options)[0, num_prompt:].tolist()
    ends = model.generation_config.eos_token_id
    is_whole = bool(tokens) and tokens[-1] in ([ends] if isinstance(ends, int) else ends or [])
    text = tokenizer.decode(tokens[:-1] if is_whole else tokens, skip_special_tokens=False)
    return Generated(prompt=prompt, text=text, num_prompt=num_prompt, num_tokens=len(tokens), is_whole=is_whole)
