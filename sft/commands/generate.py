"""`sft generate`: shows what weights answer."""

import json
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft.commands.output import progress, show
from sft.errors import ConfigError
from sft.files.object_store import is_url

if TYPE_CHECKING:
    from sft.api.generation import Prompt

_ROWS = 3  # held-out rows that are shown without a prompt


def add(commands: Any) -> None:
    about = "let a checkpoint or a model answer prompts, for a first look (with transformers)"
    command = commands.add_parser("generate", help=about)
    command.set_defaults(action=generate, parser=command)
    about = "run, checkpoint, Hugging Face or PEFT folder, or a name on the hub"
    command.add_argument("source", metavar="WEIGHTS", help=about)
    which = command.add_mutually_exclusive_group()
    about = "text of a user; may be given several times.  Default: held-out rows of the run"
    which.add_argument("--prompt", metavar="TEXT", action="append", help=about)
    about = "prompts: a .txt file with one in each line, or rows as for training, shown beside their answers"
    which.add_argument("--prompts", metavar="FILE", type=Path, help=about)
    about = f"number of prompts from a file (default: all of --prompts, {_ROWS} of held-out rows)"
    command.add_argument("--rows", metavar="N", type=int, help=about)
    command.add_argument("--max-tokens", metavar="N", type=int, default=256, help="most tokens of an answer (256)")
    about = "0, the default, takes the most probable token; 1 draws by the probabilities"
    command.add_argument("--temperature", metavar="T", type=float, default=0.0, help=about)
    about = "draw from the most probable tokens with this sum of probabilities (1)"
    command.add_argument("--top-p", metavar="P", type=float, default=1.0, help=about)
    command.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the draws (0)")
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    command.add_argument("--json", action="store_true", help="print one JSON object for each answer")


def generate(arguments: Namespace) -> None:
    from sft.api.generation import generate as answers_of

    prompts = _prompts(arguments)
    answers = answers_of(
        arguments.source,
        prompts,
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
        device=arguments.device,
    )
    for number, answer in enumerate(answers, 1):
        prompt = answer.prompt
        if arguments.json:
            facts = {"messages": list(prompt.messages), "expected": prompt.expected, "answer": answer.text}
            numbers = {"prompt_tokens": answer.num_prompt, "tokens": answer.num_tokens, "is_whole": answer.is_whole}
            print(json.dumps({**facts, **numbers}, ensure_ascii=False))
            continue
        end = "" if answer.is_whole else f", cut at --max-tokens {arguments.max_tokens}"
        show(f"--- {number} of {len(answers)}: {answer.num_prompt:,} tokens, answer {answer.num_tokens:,}{end}")
        show(f"{prompt.messages[-1]['role']}: {_text(prompt.messages[-1].get('content'))}")
        if prompt.expected is not None:
            show(f"expected: {prompt.expected}")
        show(f"answer: {answer.text}\n")


def _text(content: object) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _prompts(arguments: Namespace) -> "list[Prompt | str]":
    from sft.api.generation import read_prompts

    if arguments.rows is not None and arguments.rows < 1:
        raise ConfigError(f"--rows {arguments.rows} is not above 0.")
    if arguments.prompt:
        return list(arguments.prompt)
    if arguments.prompts is not None:
        rows = read_prompts(arguments.prompts, arguments.rows)
        if not rows:
            raise ConfigError(f"{arguments.prompts} has no prompt.")
        return list(rows)
    return list(_held_out(Path(arguments.source), arguments.rows or _ROWS))


def _held_out(source: Path, number: int) -> "list[Prompt]":
    """Rows of data.eval of the run that holds `source`.  Raises ConfigError if there are none."""
    from sft.api.generation import read_prompts

    run = source.parent.parent if source.parent.name == "checkpoints" else source
    recipe = run / "recipe.yaml"
    if not recipe.is_file():
        raise ConfigError(
            f"{source} is no run and no checkpoint of a run, so there are no held-out rows.  Give --prompt TEXT."
        )

    from sft.data.read.remote_files import stage
    from sft.recipe.load import load_recipe

    config = load_recipe(str(recipe)).config
    paths = [file for files in config.data.eval_sets.values() for file in files if isinstance(file, str)]
    if not paths:
        raise ConfigError(f"{recipe} names no held-out file (data.eval).  Give --prompt TEXT or --prompts FILE.")
    prompts: list[Prompt] = []
    for path in paths:
        if len(prompts) < number:
            file = stage(path, Path(config.cache_dir), progress()) if is_url(path) else Path(path)
            prompts += read_prompts(file, number - len(prompts))
    return prompts
