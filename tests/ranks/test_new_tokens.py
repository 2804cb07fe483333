"""data.add_tokens: losses, gradients and steps are those of transformers' resize_token_embeddings and of PEFT's
trainable tokens, on every layout; a resumed run is the same bit for bit, and its export opens."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from sft.batch import Sample
from sft.console import QUIET
from sft.mcore.gradients import gradient_chunks
from sft.weights.export.export_hf import export_hf
from sft.weights.initial import load_initial
from sft.weights.lora.initial_adapters import load_new_adapters
from sft.weights.lora.peft.folder import WEIGHTS
from tests.builders import chats
from tests.ranks import scenarios
from tests.ranks.commands import sft
from tests.ranks.hf_models import (
    ADAMW,
    GRADIENT_TOLERANCE,
    SHORT,
    backward,
    check_losses,
    in_stored_names,
    packs_of,
    parts_of,
    recipe_of,
    stored_gradients,
)
from tests.ranks.layouts import CP, PP, SHARDED, SP, TP
from tests.ranks.peft_models import steps
from tests.ranks.pool import Ranks
from tests.ranks.scenarios import check_parameters
from tests.unit.fixtures import hf
from tests.unit.fixtures.model_folder import Tokens, write_folder

TOKENS = Tokens(special=("<|im_start|>", "<|im_end|>"), eos="<|im_end|>")
NUM_IDS = 258  # 256 bytes and two control tokens
NEW = ["<mol>", "</mol>", "<|tool|>"]
IDS = [NUM_IDS, NUM_IDS + 1, NUM_IDS + 2]
KEYS = ["data.add_tokens=[<mol>, </mol>]", "data.add_special_tokens=[<|tool|>]"]
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.1  # of ADAMW and of peft_models.steps
STEP_TOLERANCE = 2e-3  # relative to the change of the rows in two steps of Adam, which magnifies rounding
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def source_of(folder: Path, family: str, *, tied: bool, rows: int) -> Path:
    hf.save(folder, family, tied=tied, vocab_size=rows)
    return write_folder(folder, TOKENS, TEMPLATE)


def packs() -> list[list[Sample]]:
    """Every fifth token is a new one, also among the labels."""

    def changed(sample: Sample) -> Sample:
        tokens = np.array(sample.tokens) % NUM_IDS
        tokens[2::5] = np.resize(IDS, len(tokens[2::5]))
        return replace(sample, tokens=tokens)

    return [[changed(sample) for sample in pack] for pack in packs_of(SHORT)]


def resized(source: Path, rows: int) -> Any:
    """The model of transformers with `rows` rows, and means of the rows of the pieces of the new tokens."""
    model, tokenizer = hf.load(source), AutoTokenizer.from_pretrained(source)
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for weight in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            for token, row in zip(NEW, IDS, strict=True):
                weight[row] = weight[tokenizer(token, add_special_tokens=False).input_ids].mean(0)
    return model.eval()


def computed(overrides: list[str], rows: int, packs: Any) -> dict[str, Any]:
    with scenarios.running(overrides, rows, has_weights=False) as engine:
        assert engine.config.model.vocab_size == rows
        source = load_initial(engine, engine.config, QUIET)
        losses = scenarios.losses_of(engine, packs)
        engine._run(scenarios.microbatches_of(engine, packs), forward_only=False)
        return {"losses": losses, "chunks": parts_of(gradient_chunks(engine)), "source": source}


@pytest.mark.parametrize(
    ("family", "tied", "rows", "layouts"),
    [
        ("llama", False, NUM_IDS, [(1, []), (2, [*SP, *SHARDED]), (2, CP)]),
        ("qwen3", True, NUM_IDS, [(2, PP), (2, TP)]),
        ("llama", True, 300, [(2, CP)]),  # the model has rows for the new ids already
    ],
)
def test_losses_and_gradients_are_those_of_transformers(
    ranks: Ranks, tmp_path: Path, family: str, tied: bool, rows: int, layouts: list[tuple[int, list[str]]]
) -> None:
    source, grown = source_of(tmp_path / "model", family, tied=tied, rows=rows), max(rows, NUM_IDS + 3)
    model = resized(source, grown)
    model.save_pretrained(tmp_path / "resized")
    backward(model, [sample for pack in packs() for sample in pack])
    expected = stored_gradients(model)
    for world_size, layout in layouts:
        keys = [*recipe_of(source), f"model.hf={source}", "model.init_from=null", *KEYS, *layout]
        results = ranks(world_size).run(computed, keys, grown, packs())
        assert results[0]["source"].endswith(
            "3 new rows ('<mol>', '</mol>', '<|tool|>'), each the mean of the pieces that its token had before"
        )
        check_losses([result["losses"] for result in results], model, packs())
        check_parameters(in_stored_names(tmp_path / "resized", results), expected, GRADIENT_TOLERANCE)


def trained(overrides: list[str], rows: int, packs: Any) -> dict[str, Any]:
    """The embedding and the output weight of this rank, before and after two steps, and their numbers of first rows."""
    with scenarios.running(overrides, rows, has_weights=False) as engine:
        load_initial(engine, engine.config, QUIET)
        load_new_adapters(engine, engine.config, QUIET)
        before = vocabularies(engine)
        for _ in range(2):
            engine.train_step(scenarios.microbatches_of(engine, packs))
        return {"before": before, "after": vocabularies(engine)}


def vocabularies(engine: Any) -> dict[str, tuple[int, torch.Tensor]]:
    shards = [value for chunk in engine.chunks for value in chunk.module.sharded_state_dict().values()]
    return {
        shard.key: (shard.global_offset[0], shard.data.detach().clone())
        for shard in shards
        if getattr(shard, "key", "") in ("embedding.word_embeddings.weight", "output_layer.weight")
    }


def whole(results: list[dict[str, Any]], when: str, key: str) -> torch.Tensor:
    parts = {first: value for result in results for name, (first, value) in result[when].items() if name == key}
    return torch.cat([parts[first] for first in sorted(parts)])


@pytest.mark.parametrize(("tied", "world_size", "layout"), [(False, 2, [*SP, *SHARDED]), (True, 2, PP)], ids=str)
def test_rows_alone_are_trained_as_in_peft(
    ranks: Ranks, tmp_path: Path, tied: bool, world_size: int, layout: list[str]
) -> None:
    """All other rows keep their bits, also with weight decay; the rows move as PEFT's trainable tokens."""
    source, rows = source_of(tmp_path / "model", "llama", tied=tied, rows=NUM_IDS), NUM_IDS + 3
    settings = dict(r=3, lora_alpha=5.0, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")
    indices = IDS if tied else {"embed_tokens": IDS, "lm_head": IDS}
    model = peft.get_peft_model(resized(source, rows), peft.LoraConfig(**settings, trainable_token_indices=indices))
    model.save_pretrained(tmp_path / "adapter")
    steps(model.eval(), packs(), 2)
    moved = {name: value for name, value in peft.get_peft_model_state_dict(model).items() if "token_adapter" in name}
    lora = f"lora={{rank: 3, alpha: 5.0, targets: [q_proj, o_proj], init_from: {tmp_path}/adapter}}"
    parts = ["lora.train_embeddings=added", *([] if tied else ["lora.train_head=added"])]
    keys = [*recipe_of(source), f"model.hf={source}", "model.init_from=null", *KEYS, lora, *parts, *ADAMW, *layout]
    results = ranks(world_size).run(trained, keys, rows, packs())
    names = {"embedding.word_embeddings.weight": "embed_tokens"} | ({} if tied else {"output_layer.weight": "lm_head"})
    for key, module in names.items():
        before, after = (whole(results, when, key) for when in ("before", "after"))
        [expected] = [value for name, value in moved.items() if module in name and name.endswith("_delta")]
        # PEFT's rows also decay in each of two steps; ours do not.
        change = expected - before[IDS] * (1 - LEARNING_RATE * WEIGHT_DECAY) ** 2
        assert torch.equal(before[:NUM_IDS], after[:NUM_IDS])
        assert float((after[IDS] - before[IDS] - change).norm()) <= STEP_TOLERANCE * float(change.norm())


RECIPE = """
run: {{dir: {folder}/run, device: cpu, precision: fp32}}
model: {{hf: {folder}/model}}
data: {{train: {folder}/chat.jsonl, cache_dir: {folder}/cache, seq_length: 256, add_tokens: [<mol>, </mol>],
        add_special_tokens: [{special}], chat_template: {template}}}
train: {{num_steps: 4, global_batch_size: 2}}
optim: {{lr: 1e-2, schedule: constant}}
checkpoint: {{save_every: 2}}
"""


def test_a_run_resumes_bit_for_bit_and_its_export_opens(ranks: Ranks, tmp_path: Path) -> None:
    """A base model gets two tokens, and the control tokens of ChatML with its template."""
    chats(tmp_path, 20)
    hf.save(tmp_path / "model", "llama", tied=False, vocab_size=257)
    write_folder(tmp_path / "model", Tokens(special=("<|endoftext|>",), eos="<|endoftext|>"), None)
    recipe, pool = tmp_path / "recipe.yaml", ranks(2)
    (tmp_path / "chatml.jinja").write_text(TEMPLATE)
    special = "<|im_start|>, <|im_end|>"
    recipe.write_text(RECIPE.format(folder=tmp_path, special=special, template=tmp_path / "chatml.jinja"))
    for words in (["data", "prepare", str(recipe)], ["check", str(recipe)]):
        done = sft(pool, *words, alone=True)
        assert done.code == 0, done.err
    tokens = "'<mol>', '</mol>', '<|im_start|>', '<|im_end|>'"
    assert f"4 new rows ({tokens}), each the mean of the pieces" in done.out
    cut = [f"run.dir={tmp_path}/cut"]
    for more in ([], [*cut, "train.num_steps=2"], cut):
        done = sft(pool, "train", str(recipe), *more)
        assert done.code == 0, done.err
    for run in ("run", "cut"):
        export_hf(tmp_path / run / "checkpoints/iter_0000004", tmp_path / f"{run}-hf", QUIET)
    weights = hf.tensors(tmp_path / "run-hf")
    assert hf.same(weights, hf.tensors(tmp_path / "cut-hf"))
    assert weights["model.embed_tokens.weight"].shape == weights["lm_head.weight"].shape == (261, hf.WIDTH)
    model, tokenizer = hf.load(tmp_path / "run-hf"), AutoTokenizer.from_pretrained(tmp_path / "run-hf")
    assert model.config.vocab_size == len(tokenizer) == 261
    assert tokenizer("a<mol>b</mol><|im_end|>", add_special_tokens=False).input_ids[1:4:2] == [257, 258]
    assert tokenizer.decode([257, 258, 259], skip_special_tokens=True).replace(" ", "") == "<mol></mol>"
    assert (tokenizer.eos_token, model.generation_config.eos_token_id) == ("<|im_end|>", [260, 256])
    for more in ([], [f"model.init_from={tmp_path}/run/checkpoints", f"run.dir={tmp_path}/new"]):
        other = sft(pool, "check", str(recipe), "data.add_tokens=[<mol>]", *more, alone=True)
        assert other.code == 2 and f"added the tokens {tokens}, but this recipe adds" in other.err
    again = sft(pool, "check", str(recipe), f"model.hf={tmp_path}/run-hf", alone=True)
    assert again.code == 2 and "data.add_tokens names '<mol>', which the tokenizer" in again.err
    scored = sft(pool, "eval", str(recipe), f"data.eval={tmp_path}/chat.jsonl", "--from", f"{tmp_path}/run-hf")
    assert scored.code == 0, scored.err


def test_rows_come_out_as_peft_reads_them_and_in_again(ranks: Ranks, tmp_path: Path) -> None:
    chats(tmp_path, 20)
    source_of(tmp_path / "model", "llama", tied=True, rows=NUM_IDS)
    recipe, pool = tmp_path / "recipe.yaml", ranks(2)
    recipe.write_text(RECIPE.format(folder=tmp_path, special="<|tool|>", template="null"))
    lora = ["lora={rank: 4, targets: [q_proj], train_embeddings: added}", "checkpoint.export_hf=last"]
    assert sft(pool, "data", "prepare", str(recipe), alone=True).code == 0
    done = sft(pool, "train", str(recipe), *lora)
    assert done.code == 0, done.err
    exported = tmp_path / "run/hf_exports/last_0000004"
    base = resized(tmp_path / "model", NUM_IDS + 3)
    model = peft.PeftModel.from_pretrained(copy.deepcopy(base), exported)
    model.save_pretrained(tmp_path / "again")
    of_run, of_peft = (load_file(folder / WEIGHTS) for folder in (exported, tmp_path / "again"))
    assert hf.same(of_run, {name: of_peft[name] for name in of_run})  # PEFT also saves the enlarged base weight
    merged = tmp_path / "merged"
    export_hf(tmp_path / "run/checkpoints/iter_0000004", merged, QUIET, merged=True)
    tokens = torch.tensor([[1, *IDS, 7, 9]])
    ours, theirs = (m.eval()(input_ids=tokens).logits for m in (hf.load(merged), model))
    assert float((ours - theirs).abs().max()) < 1e-5  # fp32; W + s B A is rounded once
    assert float((ours - base(input_ids=tokens).logits).abs().max()) > 1e-3
    more = [f"run.dir={tmp_path}/more", f"lora.init_from={tmp_path}/again"]
    again = sft(pool, "check", str(recipe), *lora, *more, alone=True)
    assert again.code == 0 and "3 rows of model.embed_tokens" in again.out, again.err
    other = sft(pool, "check", str(recipe), *lora, *more, "lora.train_embeddings=true", alone=True)
    assert other.code == 2 and "To continue it: lora.train_embeddings=[258,259,260] lora.train_head=false." in other.err
