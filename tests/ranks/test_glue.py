"""What holds the parts of `sft train` together: sources, seed, reduction and held-out sets reach the engine.

Two whole runs, as a user starts them.  Which samples a step trains on is written out.  What the log says of them is
asked of transformers, in a plain float64 loop over single chats that shares no code with ours: it tokenises, weighs,
averages, and steps by itself.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sft.hf.convert.export_hf import export_hf
from sft.hf.convert.import_hf import import_hf
from tests.ranks.test_bad_input import start
from tests.ranks.test_hf_convert import QUIET, check_parameters, recipe_of
from tests.unit.fixtures import hf

# fp32 against float64, over six Adam steps, relative.
TOLERANCE = 1e-5
LR, WARM_UP, DECAY, CLIP, BETAS = 3e-3, 2, 0.1, 0.5, (0.9, 0.95)

Row = dict[str, Any]
Record = dict[str, Any]


# --- chats, and what they are as tokens --------------------------------------------------------------------


def chat(question: str, answer: str, **more: Any) -> Row:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]}


# Answers of unequal length, two of which weigh less: means over samples, tokens and weights are three numbers.
FILES: dict[str, list[Row]] = {
    "sums": [chat(f"{i} + {i}?", f"{2 * i} " * (i + 1), weight=0.25 if i == 2 else 1) for i in range(6)],
    "code": [chat(f"Count to {3 * i}.", "".join(map(str, range(3 * i + 1)))) for i in range(8)],
    "near": [chat(f"{i} + {i + 1}?", f"{2 * i + 1}" * (i % 4 + 1), weight=0.5 if i == 3 else 1) for i in range(18)],
    "far": [chat(f"Which is the letter {i}?", "abcdefg"[i] * (5 - i)) for i in range(4)],
}


@dataclass(frozen=True)
class Document:
    """tokens, and what each weighs before the reduction, float64 [n]; the name that its losses are told apart by."""

    tokens: torch.Tensor
    weights: torch.Tensor
    source: str

    @staticmethod
    def of(row: Row, source: str) -> "Document":
        """<|im_start|> is 256, <|im_end|> is 257, all else is bytes; an answer and its end are learnt."""
        tokens: list[int] = []
        weights: list[float] = []
        for message in row["messages"]:
            header, content = f"{message['role']}\n".encode(), message["content"].encode()
            weight = message.get("weight", 1) if message["role"] == "assistant" else 0
            tokens += [256, *header, *content, 257, ord("\n")]
            weights += [0] * (1 + len(header)) + [weight] * (len(content) + 1) + [0]
        return Document(torch.tensor(tokens), torch.tensor(weights, dtype=torch.float64), source)


def documents(name: str, source: str = "") -> list[Document]:
    return [Document.of(row, source or name) for row in FILES[name]]


TRAINED = documents("sums", "chat") + documents("code")  # by number of the sample


# --- the reference -----------------------------------------------------------------------------------------


def expected(model: Any, batch: Sequence[Document], power: float = 1.0) -> tuple[torch.Tensor, Record]:
    """The objective, with gradient, where a token of n in a sample counts its weight / n**power; and the record."""
    objective, weight, nll, correct = torch.zeros((), dtype=torch.float64), 0.0, [], 0
    for one in batch:
        scores, labels = model(input_ids=one.tokens[None]).logits[0, :-1], one.tokens[1:]
        learnt = one.weights[1:] > 0
        losses = torch.nn.functional.cross_entropy(scores[learnt], labels[learnt], reduction="none")
        objective = objective + (one.weights[1:][learnt] * losses).sum() / len(losses) ** power
        weight += float(one.weights[1:].sum()) / len(losses) ** power
        correct += int((scores.argmax(-1) == labels)[learnt].sum())
        nll.append(losses.detach().numpy())
    means, count = np.array([each.mean() for each in nll]), sum(map(len, nll))
    record = {
        "lm loss": float(objective.detach()) / weight,
        "nll": sum(each.sum() for each in nll) / count,
        "token accuracy": correct / count,
        "perplexity/avg": np.exp(means).mean(),
        "perplexity/min": np.exp(means).min(),
        "perplexity/max": np.exp(means).max(),
        "documents": len(batch),
        "sequences": len(batch),
        "tokens/supervised": count,
        "tokens/real": sum(len(one.tokens) for one in batch),
        "tokens/aligned": sum(-(-len(one.tokens) // 32) * 32 for one in batch),
        "sample loss": means.mean(),
    }
    for source in {one.source for one in batch}:
        of_source = np.concatenate([each for each, one in zip(nll, batch, strict=True) if one.source == source])
        record[f"loss by source/{source}/loss"] = of_source.mean()
        record[f"loss by source/{source}/tokens"] = len(of_source)
    return objective / weight, record


def steps_of(model: Any, batches: Sequence[Sequence[Document]], held_out: dict[str, list[Document]]) -> list[Record]:
    """The records of a run that trains `model` on these batches and evaluates after steps 0, 3 and 6."""
    matrices, others = ([p for p in model.parameters() if (p.dim() > 1) is is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer, records = torch.optim.AdamW(groups, betas=BETAS, eps=1e-8), evaluated(model, 0, held_out)
    for step, batch in enumerate(batches, 1):
        model.zero_grad()
        loss, record = expected(model, batch)
        loss.backward()
        norm, rate = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP), LR * min(1.0, step / WARM_UP)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        del record["sample loss"]  # of held-out sets only
        records.append({"kind": "train", "step": step, **record, "grad-norm": float(norm), "learning-rate": rate})
        records += evaluated(model, step, held_out) if step % 3 == 0 else []
    return records


@torch.no_grad()
def evaluated(model: Any, step: int, held_out: dict[str, list[Document]]) -> list[Record]:
    return [{"kind": "eval", "step": step, "set": n, **expected(model, batch)[1]} for n, batch in held_out.items()]


# --- runs ----------------------------------------------------------------------------------------------------


def run(folder: Path, overrides: list[str], world_size: int) -> str:
    """What rank 0 printed of a run on FILES, in `folder`/run."""
    for name, rows in FILES.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (code, out, told), *_ = start(
        folder, ["parallel.cp=1", "data.seq_length=128", "data.num_workers=1", *overrides], world_size
    )
    assert code == 0, told
    return out


def seen(folder: Path) -> list[tuple[int, int, list[int]]]:
    """(epoch, batch, samples) of each step."""
    rows = [json.loads(line) for line in (folder / "run" / "seen.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [(row["epoch"], row["batch"], row["samples"]) for row in rows]


def logged(folder: Path) -> list[Record]:
    """metrics.jsonl but for the beginning, by flat names."""
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [flattened(line) for line in lines if line["kind"] != "start"]


def flattened(record: Record, prefix: str = "") -> Record:
    found: Record = {}
    for name, value in record.items():
        found |= flattened(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: value}
    return found


def check(found: list[Record], wanted: list[Record]) -> None:
    """Everything that is wanted of each record; counts and names exactly."""
    assert len(found) == len(wanted)
    for record, numbers in zip(found, wanted, strict=True):
        for name, value in numbers.items():
            close = pytest.approx(value, rel=TOLERANCE) if isinstance(value, float) else value
            assert record[name] == close, (record["kind"], record["step"], name)


@dataclass(frozen=True)
class Run:
    folder: Path
    told: str
    model: Any  # transformers' model of the weights that it began with, float64


@pytest.fixture(scope="module")
def by_epochs(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks, from weights of transformers: chat twice an epoch, half of code, and two held-out sets."""
    folder = tmp_path_factory.mktemp("by_epochs")
    source = hf.save(folder / "source", "qwen3")
    import_hf(source, folder / "imported", QUIET)
    sources = (
        f"{{chat: {{files: {folder}/sums.jsonl, epochs: 2.0}}, code: {{files: {folder}/code.jsonl, epochs: 0.5}}}}"
    )
    steps = ["train.num_steps=6", "train.eval_every=3", "optim.schedule=constant", f"optim.warmup_steps={WARM_UP}"]
    optim = [f"optim.lr={LR}", f"optim.weight_decay={DECAY}", f"optim.clip_grad={CLIP}"]
    data = [f"data.train={sources}", f"data.eval={{near: {folder}/near.jsonl, far: {folder}/far.jsonl}}"]
    start_from = [*recipe_of(source), f"model.init_from={folder}/imported", "run.seed=77"]
    told = run(folder, [*start_from, *data, *steps, *optim, "loss.reduction=sample"], 2)
    return Run(folder, told, hf.load(source).double())


# By hand: chat's samples are 0 to 5 and code's 6 to 13.
BY_EPOCHS: list[tuple[int, int, list[int]]] = [
    (0, 0, [1, 3, 5, 13]),
    (0, 1, [2, 4, 6, 9]),
    (0, 2, [0, 0, 1, 2, 5]),
    (0, 3, [3, 4, 12]),
    (1, 0, [0, 1, 2, 4, 4]),
    (1, 1, [2, 5, 5, 7]),
]


def test_sources_by_epochs_and_the_seed_say_what_is_seen(by_epochs: Run) -> None:
    assert seen(by_epochs.folder) == BY_EPOCHS
    whole = Counter(i for epoch, _, samples in BY_EPOCHS for i in samples if epoch == 0)
    assert {i: whole[i] for i in range(6)} == dict.fromkeys(range(6), 2)
    tokens = sum(len(TRAINED[i].tokens) for i in whole if i >= 6)
    assert abs(tokens - 0.5 * sum(len(one.tokens) for one in TRAINED[6:])) < 67  # the longest of them


def test_the_log_is_that_of_a_plain_loop(by_epochs: Run, tmp_path: Path) -> None:
    """And so are the weights in the checkpoint."""
    found, held_out = logged(by_epochs.folder), {name: documents(name) for name in ("near", "far")}
    assert found[0]["set"] == "near" and found[0]["tokens/padded"] > 2 * 2 * 128  # more than two batches of two packs
    batches = [[TRAINED[i] for i in samples] for _, _, samples in BY_EPOCHS]
    check(found, steps_of(by_epochs.model, batches, held_out))
    export_hf(by_epochs.folder / "run", tmp_path / "exported", QUIET)
    trained = dict(hf.load(tmp_path / "exported").double().named_parameters())
    check_parameters(trained, dict(by_epochs.model.named_parameters()), TOLERANCE)


@pytest.fixture(scope="module")
def by_weights(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One rank, from random weights, which so small a learning rate leaves as they are: as much of chat as of code."""
    folder = tmp_path_factory.mktemp("by_weights")
    source = hf.save(folder / "source", "qwen3")  # of which only the sizes are used
    sources = f"{{chat: {{files: {folder}/sums.jsonl, weight: 2}}, code: {{files: {folder}/code.jsonl, weight: 2}}}}"
    data = [f"data.train={sources}", f"data.eval=[{folder}/near.jsonl, {folder}/far.jsonl]"]
    more = [
        "run.seed=78",
        "train.num_steps=null",
        "train.num_steps=null",
        "train.num_epochs=1",
        "optim.lr=1e-30",
        "loss.reduction=sqrt",
        "model.init_std=0.1",
    ]
    told = run(folder, [*recipe_of(source), *data, *more], 1)
    export_hf(folder / "run", folder / "exported", QUIET, like=source)
    return Run(folder, told, hf.load(folder / "exported").double())


BY_WEIGHTS: list[tuple[int, int, list[int]]] = [
    (0, 0, [2, 7, 8, 9]),
    (0, 1, [0, 1, 3, 11, 12]),
    (0, 2, [1, 4, 4, 6]),
    (0, 3, [2, 10, 13]),
    (0, 4, [3, 5, 5]),
]


def test_sources_by_weights_are_seen_equally(by_weights: Run) -> None:
    assert seen(by_weights.folder) == BY_WEIGHTS
    count = Counter(i for _, _, samples in BY_WEIGHTS for i in samples)
    assert [count[i] for i in range(6, 14)] == [1] * 8 and {count[i] for i in range(6)} == {1, 2}
    tokens = sum(count[i] * len(TRAINED[i].tokens) for i in range(6))
    assert abs(tokens - sum(len(one.tokens) for one in TRAINED[6:])) < 45  # the longest of chat


def test_random_weights_follow_from_the_seed_and_give_the_losses_of_transformers(by_weights: Run) -> None:
    digest = hashlib.sha256(b"78:embedding.word_embeddings.weight()").digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    drawn = 0.1 * torch.randn(384, 32, generator=generator)  # 301 tokens, padded to a multiple of 128
    torch.testing.assert_close(by_weights.model.model.embed_tokens.weight.float(), drawn[:301])
    model, held_out = by_weights.model, documents("near") + documents("far")
    wanted = [{"kind": "eval", "step": 0, "set": "eval", **expected(model, held_out, 0.5)[1]}]
    for step, (_, _, samples) in enumerate(BY_WEIGHTS, 1):
        record = expected(model, [TRAINED[i] for i in samples], 0.5)[1]
        del record["sample loss"]
        wanted.append({"kind": "train", "step": step, **record})
    check(logged(by_weights.folder), [*wanted, {**wanted[0], "step": len(BY_WEIGHTS)}])
