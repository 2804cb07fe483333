"""Writes a proposal as a recipe: the keys of the planned recipe, the proposal's settings, and a header."""

import re
import textwrap
from math import ceil

from sft.config import Config, yaml
from sft.config.keys import in_schema, leaves, values
from sft.console import short_count
from sft.estimate.gpus import GIB
from sft.planner.reasons import counted
from sft.planner.subject import Keys, text_of, user_keys
from sft.planner.task import PLANNED, Proposal, Task
from sft.recipe.load import parse_recipe
from sft.recipe.resolved import Recipe


def recipe_text(
    recipe: Recipe, task: Task, proposal: Proposal, *, path: str, sibling: str, has_comments: bool = False
) -> str:
    """The text of the planned recipe.

    path          path of the recipe's file, for the launch line
    sibling       name of a recipe for the same model, which the header mentions
    has_comments  whether a comment says what each key means; the keys are then in separate lines
    """
    keys = {key: value for key, value in user_keys(recipe).items() if key not in PLANNED} | proposal.settings
    keys |= _cluster(task, proposal)
    text = "\n".join([*_header(task, proposal, path, sibling), "", commented(keys) if has_comments else text_of(keys)])
    written = values(parse_recipe(text, path).config)  # raises ConfigError if the text is not a valid recipe
    planned = values(proposal.config)
    assert all(written[key] == planned[key] for key in PLANNED), "the recipe reads back as the proposal"
    return text


def commented(keys: Keys) -> str:
    """The keys as YAML, one in a line, each below the first sentence of its meaning.

    optim:
      # Peak learning rate: often 1e-5 for all weights, and 2e-4 for LoRA.
      lr: 1e-05
    """
    lines: list[str] = []
    headed: set[str] = set()
    for key, value in sorted(keys.items(), key=lambda item: _position(item[0])):
        *groups, name = key.split(".")
        for depth in range(len(groups)):
            if (path := ".".join(groups[: depth + 1])) not in headed:
                headed.add(path)
                lines += [""] * (depth == 0 and bool(lines)) + ["  " * depth + f"{groups[depth]}:"]
        indent = "  " * len(groups)
        meaning = " ".join((leaves()[in_schema(key)].description or "").split())
        first = re.split(r"(?<=[.;]) ", meaning)[0].rstrip(".;") + "."
        lines += textwrap.wrap(first, 100, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        lines.append(f"{indent}{name}: {yaml.write(value)}")
    return "\n".join(lines) + "\n"


def _position(key: str) -> tuple[int, list[int], str]:
    """The position of a key in a recipe: groups in the order of a recipe, keys of a group before its inner groups."""
    names = list(leaves())
    group = key.rpartition(".")[0]
    return list(Config.model_fields).index(key.split(".")[0]), [group.count(".")], f"{names.index(in_schema(key)):04}"


def _cluster(task: Task, proposal: Proposal) -> Keys:
    """Keys of the cluster whose values are not the defaults.  Only dynamic CP reads bandwidths."""
    parallel, names = proposal.config.parallel, ["gpus_per_node"]
    if proposal.layout.cp_sizes:
        names += ["intra_node_gb_s", "inter_node_gb_s"]
    keys = {f"parallel.{name}": getattr(parallel, name) for name in names}
    return {key: value for key, value in keys.items() if value != leaves()[key].default}


def launch_line(proposal: Proposal, task: Task, path: str) -> str:
    """The command that starts the run on each node.

    sft train a.yaml --processes 8
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m sft train a.yaml
    """
    hardware, gpus = task.hardware, proposal.num_gpus
    nodes = hardware.nodes(gpus)
    if nodes == 1:
        return f"sft train {path} --processes {gpus}"
    meet = "--rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"torchrun --nnodes {nodes} --nproc-per-node {ceil(gpus / nodes)} {meet} -m sft train {path}"


def _header(task: Task, proposal: Proposal, path: str, sibling: str) -> list[str]:
    hardware, time = task.hardware, proposal.time
    nodes = hardware.nodes(proposal.num_gpus)
    trains = "LoRA adapters of " if proposal.config.lora.is_used else ""
    where = "one node" if nodes == 1 else f"{nodes} nodes of {hardware.gpus_per_node}, network {hardware.fabric}"
    host = proposal.host_bytes / GIB
    beside = f", and {host:,.0f} GiB of each host" if host else ""
    needed, usable = proposal.memory.device / GIB, proposal.usable.bytes / GIB
    return [
        f"# Purpose:  trains {trains}{task.name} at {short_count(proposal.config.data.seq_length)} tokens; "
        "`sft plan` chose the layout.",
        f"# Launch:   {launch_line(proposal, task, path)}",
        f"# Hardware: {counted(proposal.num_gpus, 'GPU')} {hardware.gpu.name}, {where}.",
        f"# Expected: predicted, not measured: {needed:.0f} of {usable:.0f} usable GiB per GPU"
        f"{beside}; a step {seconds(time.step_s)}, {time.tokens_per_gpu_s:,.0f} tokens/s per GPU, "
        f"{time.mfu:.0%} MFU.  {sentence(hardware.constants.describe())}",
        f"# Sibling:  {sibling}",
    ]


def sentence(text: str) -> str:
    """The text with a capital letter and a full stop: all constants are assumed -> All constants are assumed."""
    return f"{text[:1].upper()}{text[1:]}."


def seconds(value: float) -> str:
    """The duration with its unit: 3.14 -> 3.1 s, 2634 -> 2,634 s."""
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"
