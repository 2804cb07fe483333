"""Chooses the adapters with which a new run starts: those of the PEFT folder lora.init_from, or random ones.

`load_new_adapters` loads them into an engine.  `describe` describes and checks them without loading them.  An adapter
folder must have exactly the adapters of the recipe, with the same rank and scale.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sft.config import Config
from sft.config.lora import LoraConfig
from sft.console import Console, size
from sft.errors import CheckpointError, ConfigError
from sft.hf.family import Family, TensorMapping
from sft.hf.model_family import model_family
from sft.layers.adapters import EMBEDDING, HEAD, Trained, names_of
from sft.parallel.collectives import all_gather_objects
from sft.weights.lora import merged_adapters
from sft.weights.lora.initial_rows import by_key, row_parts, rows_of
from sft.weights.lora.matched import Matched, match, shown
from sft.weights.lora.peft import folder, token_rows
from sft.weights.lora.peft.config import disagreements
from sft.weights.lora.peft.stacked import rows_in_file, stacked_part

if TYPE_CHECKING:
    from sft.mcore.engine import Engine

_KEYS = {EMBEDDING: "train_embeddings", HEAD: "train_head"}  # our weight -> the key of `lora` that trains it whole


@dataclass(frozen=True, kw_only=True)
class Opened:
    """An adapter folder that fits the model and the recipe."""

    name: str
    adapter: folder.PeftAdapter
    module_of: Mapping[str, str]  # name of an adapter (see `Matched`) -> its module in the folder
    stacks: Mapping[str, TensorMapping]  # name of an adapter of stacked experts -> mapping of its first expert
    whole: Mapping[str, str]  # key of our weight that is trained whole -> its module in the folder
    rows: Mapping[str, str]  # key of our weight of which rows are trained -> its module in the folder

    def describe(self) -> str:
        """A text for the log, such as "out/adapter: 252 adapters of rank 16; 166 MiB"."""
        whole = "".join(f", {module}" for module in self.whole.values())
        whole += "".join(
            f", {len(self.adapter.contents.rows[module].ids):,} rows of {module}" for module in self.rows.values()
        )
        adapters = f"{len(self.module_of):,} adapters of rank {self.adapter.contents.config.rank}"
        return f"{self.name}: {adapters}{whole}; {size(self.adapter.num_bytes)}"

    def notes(self, config: Config) -> list[str]:
        """Lines about another base model, dropout that is not used, and values that are rounded to BF16."""
        stored, base, notes = self.adapter.contents.config, config.model.hf or "null", []
        if stored.base is not None and _plain(stored.base) != _plain(base):
            notes.append(
                f"WARNING: {self.name} was trained beside {stored.base}, but model.hf = {base}.  If these are other "
                "weights, the adapters do not fit them."
            )
        if stored.dropout > 0:
            notes.append(f"WARNING: lora_dropout = {stored.dropout} of {self.name} is not used.")
        if config.run.precision == "bf16" and (wide := sorted(self.adapter.dtypes - {"BF16"})):
            notes.append(f"{' and '.join(wide)} of {self.name} is rounded to BF16")
        return notes


def load_new_adapters(engine: "Engine", config: Config, console: Console) -> str:
    """Load the adapters with which a new run starts into `engine`.  Collective.  Returns a text that names them.

    Raises ConfigError or CheckpointError on all ranks if one rank cannot read the adapters, or reads a value that is
    not finite.
    """
    from sft.mcore.engine import weights_changed
    from sft.mcore.lora import adapted

    if config.lora.init_from is None:
        adapted.initialise(engine.chunks, config.run.seed)
        weights_changed(engine)
        return f"new adapters (rank {config.lora.rank}, seed {config.run.seed})"
    of_rank: list[Opened] = []
    compare = engine.groups.rank == 0
    all_gather_objects(lambda: of_rank.append(_open(config, engine.trained, compare=compare)), engine.groups.control)
    (opened,) = of_rank
    for note in opened.notes(config):
        console.say(note)
    with torch.no_grad():
        all_gather_objects(lambda: opened.adapter.read_parts(_parts(engine, opened)), engine.groups.control)
    weights_changed(engine)
    return f"the adapters of {opened.describe()}"


def describe(config: Config, trained: Trained) -> list[str]:
    """A line about the adapters with which a new run starts, and the lines of `Opened.notes`.

    Raises ConfigError or CheckpointError if the folder lora.init_from is damaged, or does not fit the recipe.
    """
    if config.lora.init_from is None:
        return [f"new (rank {config.lora.rank}, seed {config.run.seed})"]
    opened = _open(config, trained)
    return [opened.describe(), *opened.notes(config)]


def as_in_folder(config: Config, source: str) -> LoraConfig:
    """The section `lora` of a recipe that starts from the adapters of the PEFT folder `source`.

    It is the section of `config`, with init_from = source, if that recipe uses LoRA.  Otherwise, it is made from the
    folder.  Raises ConfigError or CheckpointError if the folder cannot be used.
    """
    adapter = folder.read(Path(source))
    if config.lora.is_used:
        return config.lora.model_copy(update={"init_from": source})
    stored, family = adapter.contents.config, _family(source, config)
    matched = match(source, adapter, family, config)
    trained: dict[str, bool | list[int]] = {key: True for key in _whole(source, adapter, family, config)}
    trained |= {
        key: [*adapter.contents.rows[modules[0]].ids]
        for key, modules in rows_of(source, adapter, family, config).items()
    }
    return LoraConfig(
        rank=stored.rank,
        alpha=stored.alpha,
        rslora=stored.rslora,
        targets=matched.targets,
        target_parameters=matched.parameters,
        train_embeddings=trained.get(EMBEDDING, False),
        train_head=trained.get(HEAD, False),
        init_from=source,
    )


def _open(config: Config, trained: Trained, *, compare: bool = True) -> Opened:
    """The folder lora.init_from.  Raises ConfigError or CheckpointError if it does not fit the recipe.

    compare: also read the two copies of a tied embedding, and refuse them if they differ
    """
    source = config.lora.init_from
    assert source is not None
    if not Path(source).is_dir():
        raise ConfigError(
            f"lora.init_from = {source} is no folder in {Path.cwd()}.  Give the folder of a PEFT adapter, with "
            "adapter_config.json and adapter_model.safetensors; `hf download NAME --local-dir DIR` fetches one of the "
            "hub."
        )
    adapter = folder.read(Path(source))
    family = _family(source, config)
    matched = match(source, adapter, family, config)
    by_name = matched.module_of
    if different := disagreements(adapter.contents.config, config.lora):
        stored = adapter.contents.config
        raise ConfigError(
            f"{source} has adapters that the recipe would compute differently: {'; '.join(different)}.  To continue "
            f"them: lora.rank={stored.rank} lora.alpha={stored.alpha} lora.rslora={str(stored.rslora).lower()}."
        )
    shapes = {
        name: (weight.rows_of(each), weight.num_columns)
        for weight in trained.adapted
        for each in weight.adapters
        for name in ([each.name] if each.tensor else names_of(each.name, range(weight.num_experts)))
    }
    _compare(source, shapes.keys(), matched)
    whole = _whole(source, adapter, family, config)
    rows = rows_of(source, adapter, family, config)
    ids = {key: [*adapter.contents.rows[modules[0]].ids] for key, modules in rows.items()}
    _compare_whole(source, {**dict.fromkeys(whole, True), **ids}, config.lora)
    sizes = {weight.key: weight.shape for weight in trained.whole or ()}
    saved = {module: sizes[key] for key, modules in whole.items() for module in modules}
    of_rows = {
        name: trained_rows._replace(width=config.model.hidden_size)
        for name, trained_rows in adapter.contents.rows.items()
    }
    try:
        num_experts = {by_name[name]: config.model.moe.num_experts or 0 for name in matched.stacks}
        adapter.check({by_name[name]: shape for name, shape in shapes.items()}, saved, num_experts, of_rows)
    except CheckpointError as error:
        raise CheckpointError(f"{error}\n  Use an adapter of the model that model.hf names.") from None
    if config.model.pretrained is not None and config.model.init_from is None:
        merged_adapters.refuse_adapter(config.model.pretrained.folder, Path(source))
    for module, *copies in (*whole.values(), *rows.values()) if compare else ():
        for copy in copies:
            adapter.check_equal(module, copy)
    first, first_rows = ({key: modules[0] for key, modules in each.items()} for each in (whole, rows))
    return Opened(name=source, adapter=adapter, module_of=by_name, stacks=matched.stacks, whole=first, rows=first_rows)


def _family(source: str, config: Config) -> Family:
    family = model_family(config.model)
    if family is None:
        raise ConfigError(f"{source} names Linears of a Hugging Face model, but no table has the tensors of `model`.")
    return family


def _whole(source: str, adapter: folder.PeftAdapter, family: Family, config: Config) -> dict[str, list[str]]:
    """The modules of the folder whose weights are trained whole, by the key of our weight (`by_key`).

    Raises CheckpointError for a weight other than these two.  Also raises it if PEFT trained them as two weights, but
    the base model ties them.
    """
    whole, unknown = by_key(adapter.contents.saved, family, config)
    if unknown:
        raise CheckpointError(
            f"{source} holds the whole weight of {shown(unknown)} (modules_to_save), but beside adapters this trainer "
            "trains only the embedding and the output weight.  Use an adapter without it."
        )
    if whole and config.model.tie_embeddings and not adapter.contents.config.tied:
        raise CheckpointError(
            f"{source} holds {' and '.join(whole[EMBEDDING])} (modules_to_save), which PEFT trained apart from the "
            "weight to which the base model ties it.  They cannot be one weight.  Train the adapter in PEFT with "
            "ensure_weight_tying."
        )
    return whole


def _compare_whole(source: str, stored: Mapping[str, bool | list[int]], lora: LoraConfig) -> None:
    """Raise ConfigError unless the recipe trains exactly the weights and rows `stored`.

    stored: for keys of our weights, True if the folder has the weight whole, or the ids of its rows
    """
    values = {field: stored.get(key, False) for key, field in _KEYS.items()}
    if any(_ids(getattr(lora, field)) != _ids(value) for field, value in values.items()):
        has_rows = any(isinstance(value, list) for value in values.values())
        kinds = f"rows ({token_rows.OPTION})" if has_rows else "whole weights (modules_to_save)"
        as_keys = [f"lora.{field}={str(value).lower().replace(' ', '')}" for field, value in values.items()]
        raise ConfigError(
            f"{source} holds {'other' if stored else 'no'} {kinds} than the recipe trains.  To continue it: "
            f"{' '.join(as_keys)}."
        )


def _ids(rows: object) -> object:
    """The ids in any order, for a comparison; true and false stay as they are."""
    return {*rows} if isinstance(rows, list) else rows


def _compare(source: str, wanted: Set[str], matched: Matched) -> None:
    """Raise ConfigError unless folder and recipe have the same adapters.

    wanted: names of the recipe's adapters; matched: the adapters of the folder
    """
    stored = matched.module_of.keys()
    if stored == wanted:
        return
    problems = [
        f"{text} {shown(sorted(names))}"
        for text, names in (("the folder has none of", wanted - stored), ("the recipe has none of", stored - wanted))
        if names
    ]
    keys = f"lora.targets=[{', '.join(matched.targets)}] lora.exclude=[]"
    if matched.parameters:
        keys += f" lora.target_parameters=[{', '.join(matched.parameters)}]"
    raise ConfigError(
        f"{source} has other adapters than the recipe: {'; '.join(problems)}.  To continue those of the folder: {keys}."
    )


def _plain(name: str) -> str:
    """The name of a model without revision and final slash: org/model@main -> org/model; models/a/ -> models/a"""
    return name.partition("@")[0].rstrip("/")


def _parts(engine: "Engine", opened: Opened) -> Iterator[folder.AdapterPart]:
    """The parts of the folder that this rank trains."""
    from sft.mcore.checkpoint_io import engine_state
    from sft.mcore.lora import adapted, freeze
    from sft.mcore.sharding.parts import held

    for stack in adapted.factor_parts(engine.chunks):
        stacked = opened.stacks.get(_name_and_factor(stack.key)[0])
        for shard in [stack] if stacked else adapted.of_linears(stack):
            name, factor = _name_and_factor(shard.key)
            key = {"lora_A": folder.key_of_a, "lora_B": folder.key_of_b}[factor](opened.module_of[name])
            where = tuple(slice(first, first + count) for first, count in zip(shard.global_offset, shard.local_shape))
            if stacked is None:
                yield folder.AdapterPart(key, where, shard.data)
                continue
            rows = rows_in_file(stacked.sources) if factor == "lora_B" else None
            yield folder.AdapterPart(key, *stacked_part(where, shard.global_shape, rows, shard.data.detach()))
    has_any = opened.whole or opened.rows
    leaves = list(freeze.whole_leaves(engine_state.model_state(engine), engine.trained)) if has_any else []
    whole, parts = held(engine.chunks, leaves)
    for shard in (*whole, *parts):
        if shard.key in opened.rows:
            yield from row_parts(shard, opened.rows[shard.key], opened.adapter.contents)
            continue
        module = opened.whole[shard.key]
        num_rows, _ = opened.adapter.contents.saved[module]
        row, column = shard.global_offset
        count = min(len(shard.data), num_rows - row)  # the rows after num_rows are padding
        if count > 0:
            where = slice(row, row + count), slice(column, column + shard.data.shape[1])
            yield folder.AdapterPart(folder.key_of_saved(module), where, shard.data[:count])


def _name_and_factor(key: str) -> tuple[str, str]:
    """The name of an adapter and of one of its factors: adapter.a.q_proj.lora_A.weight -> a.q_proj, lora_A"""
    from sft.mcore.lora import factors

    name, _, factor = key.removeprefix(factors.PREFIX).removesuffix(".weight").rpartition(".")
    return name, factor
