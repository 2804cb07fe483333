"""Whole runs of `sft train`: sources, seed, reduction and held-out sets reach the engine.

The runs start as a user starts them.  The samples of each step are literals.  The expected log comes from transformers,
in a plain float64 loop over single chats that shares no code with ours: it tokenises, weighs, averages, and steps by
itself.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sft.console import QUIET
from sft.weights.export.export_hf import export_hf
from tests.launching import start
from tests.ranks.hf_models import recipe_of
from tests.ranks.scenarios import check_parameters
from tests.unit.fixtures import hf

# Relative tolerance: fp32 against float64, over six Adam steps.
TOLERANCE = 1e-5
LR, WARM_UP, DECAY, CLIP, BETAS = 3e-3, 2, 0.1, 0.5, (0.9, 0.95)
EDGE = 32  # boundary of the position buckets of this test

Row = dict[str, Any]
Record = dict[str, Any]


# --- chats, and their tokens -------------------------------------------------------------------------------


def chat(question: str, answer: str, **more: Any) -> Row:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]}


# Answers of unequal length, two of them with a smaller weight: means over samples, over tokens and by weight all
# differ.
FILES: dict[str, list[Row]] = {
    "sums": [chat(f"{i} + {i}?", f"{2 * i} " * (i + 1), weight=0.25 if i == 2 else 1) for i in range(6)],
    "code": [chat(f"Count to {3 * i}.", "".join(map(str, range(3 * i + 1)))) for i in range(8)],
    "near": [chat(f"{i} + {i + 1}?", f"{2 * i + 1}" * (i % 4 + 1), weight=0.5 if i == 3 else 1) for i in range(15)],
    "far": [chat(f"Which is the letter {i}?", "abcdefg"[i] * (5 - i)) for i in range(4)],
}


@dataclass(frozen=True)
class Document:
    """tokens; weights before the reduction, float64 [n]; name: name of the source or held-out set in metrics"""

    tokens: torch.Tensor
    weights: torch.Tensor
    source: str

    @staticmethod
    def of(row: Row, source: str) -> "Document":
        """<|im_start|> is 256, <|im_end|> is 257, all other ids are bytes; an answer and its <|im_end|> are
        supervised."""
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
    """The objective with its gradient, and the record.  A token of a sample with n supervised tokens counts its weight
    / n**power."""
    objective, weight, nll, correct = torch.zeros((), dtype=torch.float64), 0.0, [], 0
    for one in batch:
        scores, labels = model(input_ids=one.tokens[None]).logits[0, :-1], one.tokens[1:]
        learnt = one.weights[1:] > 0
        losses = torch.nn.functional.cross_entropy(scores[learnt], labels[learnt], reduction="none")
        objective = objective + (one.weights[1:][learnt] * losses).sum() / len(losses) ** power
        weight += float(one.weights[1:].sum()) / len(losses) ** power
        correct += int((scores.argmax(-1) == labels)[learnt].sum())
        nll.append(losses.detach().numpy())
    accuracy = correct / sum(map(len, nll))
    return objective / weight, {
        "lm loss": float(objective.detach()) / weight,
        "token accuracy": accuracy,
        **told_of(batch, nll),
    }


def told_of(batch: Sequence[Document], nll: list[np.ndarray]) -> Record:
    """The part of a record that follows from counts and from -log p of every supervised token of each document."""
    means, every = np.array([each.mean() for each in nll]), np.concatenate(nll)
    sources = np.repeat([one.source for one in batch], [len(each) for each in nll])
    # positions of the tokens that predict
    position = np.concatenate([np.flatnonzero(one.weights[1:] > 0) for one in batch])
    apart = {f"source/{source}": sources == source for source in set(sources.tolist())}
    apart |= {f"position/0-{EDGE}": position < EDGE, f"position/{EDGE}+": position >= EDGE}
    record: Record = {
        "nll": every.mean(),
        "perplexity/avg": np.exp(means).mean(),
        "perplexity/min": np.exp(means).min(),
        "perplexity/max": np.exp(means).max(),
        "documents": len(batch),
        "sequences": len(batch),
        "tokens/supervised": len(every),
        "tokens/real": sum(len(one.tokens) for one in batch),
        "tokens/aligned": sum(aligned(one) for one in batch),
        "sample loss": means.mean(),
    }
    for name, which in apart.items():
        record[f"loss by {name}/tokens"] = int(which.sum())
        record[f"loss by {name}/loss"] = every[which].mean() if which.any() else None
    return record


def aligned(one: Document) -> int:
    return -(-len(one.tokens) // 32) * 32


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
        del record["sample loss"]  # only held-out sets have it
        records.append({"kind": "train", "step": step, **record, "grad-norm": float(norm), "learning-rate": rate})
        records += evaluated(model, step, held_out) if step % 3 == 0 else []
    return records


@torch.no_grad()
def evaluated(model: Any, step: int, held_out: dict[str, list[Document]]) -> list[Record]:
    return [{"kind": "eval", "step": step, "set": n, **expected(model, batch)[1]} for n, batch in held_out.items()]


# --- runs ----------------------------------------------------------------------------------------------------


def run(folder: Path, overrides: list[str], world_size: int) -> str:
    """The output of rank 0, for a run on FILES in `folder`/run."""
    for name, rows in FILES.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (code, out, told), *_ = start(
        folder,
        ["parallel.cp=1", "data.seq_length=128", "data.num_workers=1", f"log.position_edges=[{EDGE}]", *overrides],
        world_size,
    )
    assert code == 0, told
    return out


def seen(folder: Path) -> list[tuple[int, int, list[int]]]:
    """(epoch, batch, samples) of each step of the run in `folder`."""
    rows = [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    chain = ""
    for row in rows:
        linked = json.dumps([chain, row["epoch"], row["batch"], row["samples"]], separators=(",", ":"))
        chain = hashlib.sha256(linked.encode()).hexdigest()
        assert row["chain"] == chain
    return [(row["epoch"], row["batch"], row["samples"]) for row in rows]


def logged(folder: Path) -> list[Record]:
    """The records of metrics.jsonl, without the first one, by flat names."""
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [flattened(line) for line in lines if line["kind"] != "start"]


def flattened(record: Record, prefix: str = "") -> Record:
    found: Record = {}
    for name, value in record.items():
        found |= flattened(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: value}
    return found


def check(found: list[Record], wanted: list[Record]) -> None:
    """Checks all values of `wanted` in each record; counts and names must be equal."""
    assert len(found) == len(wanted)
    for record, numbers in zip(found, wanted, strict=True):
        for name, value in numbers.items():
            close = pytest.approx(value, rel=TOLERANCE) if isinstance(value, float) else value
            assert record[name] == close, (record["kind"], record["step"], name)


@dataclass(frozen=True)
class Run:
    folder: Path
    told: str
    model: Any  # float64 transformers model with the weights from which the run starts


@pytest.fixture(scope="module")
def by_epochs(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on two ranks from weights of transformers: twice the source chat per epoch, half of the source code, and
    two held-out sets."""
    folder = tmp_path_factory.mktemp("by_epochs")
    source = hf.save(folder / "source", "qwen3")
    sources = (
        f"{{chat: {{files: {folder}/sums.jsonl, epochs: 2.0}}, code: {{files: {folder}/code.jsonl, epochs: 0.5}}}}"
    )
    keep = ["checkpoint.save_every=3", "checkpoint.keep_last=2", "checkpoint.keep_best=near/token accuracy"]
    steps = ["train.num_steps=6", "train.eval_every=3", "optim.schedule=constant", f"optim.warmup_steps={WARM_UP}"]
    optim = [f"optim.lr={LR}", f"optim.weight_decay={DECAY}", f"optim.clip_grad={CLIP}"]
    data = [f"data.train={sources}", f"data.eval={{near: {folder}/near.jsonl, far: {folder}/far.jsonl}}"]
    start_from = [
        *recipe_of(source),
        f"model.hf={source}",
        "model.init_from=null",
        "data.tokenizer=byte",
        "run.seed=77",
    ]
    told = run(folder, [*start_from, *data, *steps, *optim, *keep, "loss.reduction=sample"], 2)
    return Run(folder, told, hf.load(source).double())


# Samples 0 to 5 are of chat, 6 to 13 of code.  The literals are one recorded order; assertions check the rules that any
# order must obey.
BY_EPOCHS: list[tuple[int, int, list[int]]] = [
    (0, 0, [1, 3, 5, 13]),
    (0, 1, [2, 4, 6, 9]),
    (0, 2, [0, 0, 1, 2, 5]),
    (0, 3, [3, 4, 12]),
    (1, 0, [0, 1, 2, 4, 4]),
    (1, 1, [2, 5, 5, 7]),
]


def test_sources_by_epochs_and_the_seed_say_what_is_seen(by_epochs: Run) -> None:
    assert seen(by_epochs.folder / "run") == BY_EPOCHS
    whole = Counter(i for epoch, _, samples in BY_EPOCHS for i in samples if epoch == 0)
    assert {i: whole[i] for i in range(6)} == dict.fromkeys(range(6), 2)
    tokens = sum(len(TRAINED[i].tokens) for i in whole if i >= 6)
    # 67: tokens of the longest of these samples
    assert abs(tokens - 0.5 * sum(len(one.tokens) for one in TRAINED[6:])) < 67


def test_the_log_is_that_of_a_plain_loop(by_epochs: Run, tmp_path: Path) -> None:
    """The weights in the checkpoint also agree."""
    found, held_out = logged(by_epochs.folder), {name: documents(name) for name in ("near", "far")}
    assert found[0]["set"] == "near" and 2 * 256 < found[0]["tokens/padded"] <= 3 * 256  # three batches of two packs
    batches = [[TRAINED[i] for i in samples] for _, _, samples in BY_EPOCHS]
    check(found, steps_of(by_epochs.model, batches, held_out))
    export_hf(by_epochs.folder / "run", tmp_path / "exported", QUIET)
    ours, theirs = hf.load(tmp_path / "exported").double().state_dict(), by_epochs.model.state_dict()
    check_parameters(ours, theirs, TOLERANCE)


@pytest.fixture(scope="module")
def by_weights(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on one rank, in plain order, from random weights, which the tiny learning rate does not change."""
    folder = tmp_path_factory.mktemp("by_weights")
    source = hf.save(folder / "source", "qwen3")  # only its sizes are used
    sources = f"{{chat: {{files: {folder}/sums.jsonl, weight: 3}}, code: {{files: {folder}/code.jsonl, weight: 2}}}}"
    data = [f"data.train={sources}", f"data.eval=[{folder}/near.jsonl, {folder}/far.jsonl]"]
    more = ["run.seed=78", "train.num_steps=null", "train.num_epochs=2", "optim.lr=1e-30", "loss.reduction=sqrt"]
    more += ["model.init_std=0.1", f"data.cache_dir={folder}/cache"]
    told = run(folder, [*recipe_of(source), *data, *more, *LESS_USUAL], 1)
    export_hf(folder / "run", folder / "exported", QUIET, like=source)
    return Run(folder, told, hf.load(folder / "exported").double())


LESS_USUAL = [
    "data.shuffle=false",
    "log.every=3",
    "log.tensorboard=false",
    "log.peak_tflops=1e-6",
    "checkpoint.save_every=5",
    "checkpoint.save_last=false",
    "profile.torch.steps=[12]",
]
BY_WEIGHTS: list[tuple[int, int, list[int]]] = [
    (0, 0, [0, 1, 2, 3, 4]),
    (0, 1, [0, 1, 2, 3, 5]),
    (0, 2, [4, 4, 5, 5]),
    (0, 3, [1, 2, 3, 6]),
    (0, 4, [7, 8, 9, 10]),
    (0, 5, [11, 12, 13]),
    (1, 0, [0, 1, 2, 3, 4]),
    (1, 1, [0, 1, 2, 3, 5]),
    (1, 2, [4, 4, 5, 5]),
    (1, 3, [0, 1, 6, 7, 8]),
    (1, 4, [9, 10, 11, 12]),
    (1, 5, [13]),
]


def test_sources_by_weights_are_seen_by_shares_of_tokens(by_weights: Run) -> None:
    assert seen(by_weights.folder / "run") == BY_WEIGHTS
    for number in (0, 1):
        count = Counter(i for epoch, _, samples in BY_WEIGHTS for i in samples if epoch == number)
        assert [count[i] for i in range(6, 14)] == [1] * 8 and {count[i] for i in range(6)} == {2, 3}
        tokens = sum(count[i] * len(TRAINED[i].tokens) for i in range(6))
        # 45: tokens of the longest sample of chat
        assert abs(tokens - 3 / 2 * sum(len(one.tokens) for one in TRAINED[6:])) < 45


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


def test_what_the_log_and_the_folder_say_beside_losses(by_epochs: Run, by_weights: Run) -> None:
    start, *records = [json.loads(line) for line in (by_epochs.folder / "run/metrics.jsonl").read_text().splitlines()]
    sizes = {"world_size": 2, "tp": 1, "cp": 1, "pp": 1, "dp": 2, "ep": 1, "etp": 1}
    count = sum(param.numel() for param in by_epochs.model.parameters())
    assert (start["parameters"], start["num-steps"], start["layout"]) == (count, 6, sizes)
    assert all(0 < record["data-wait-share"] < 1 for record in records if record["kind"] == "train")
    ledgers = json.loads((by_epochs.folder / "run/data.json").read_text())
    kept = {name: [file["samples"] for file in ledger["files"].values()] for name, ledger in ledgers.items()}
    assert kept == {"train": [6, 8], "near": [15], "far": [4]}
    best = re.findall(r"^best so far: step (\d), near/token accuracy (.+)$", by_epochs.told, re.M)
    near = [record["token accuracy"] for record in records if record.get("set") == "near"]
    assert near[1] < near[2] and best == [("3", str(near[1])), ("6", str(near[2]))]
    assert "stopping takes a step (" not in by_epochs.told  # it fits into run.grace_s
    assert [int(step) for step in re.findall(r"^step +(\d+)/", by_weights.told, re.M)] == [3, 6, 9, 12]


def test_less_usual_keys_reach_their_place(by_weights: Run) -> None:
    folder = by_weights.folder / "run"
    assert sorted(path.name for path in (folder / "checkpoints").glob("iter_*")) == ["iter_0000005", "iter_0000010"]
    # The last step has no batch if steps are counted from 0.
    assert [path.name for path in (folder / "traces").iterdir()] == ["step_12"]
    assert not (folder / "tensorboard").exists() and not (folder / "cache").exists()
    train = [record for record in logged(by_weights.folder) if record["kind"] == "train"]
    assert all(record["mfu"] == pytest.approx(record["tflops-per-rank"] / 1e-6) for record in train)


def test_a_plan_is_followed_instead_of_the_seed(by_weights: Run, tmp_path: Path) -> None:
    folder, plan = by_weights.folder, tmp_path / "plan"
    digest = json.loads((folder / "run/data.json").read_text())["train"]["digest"]
    sizes = {"data.seq_length": 128, "data.doc_multiple": 32, "train.global_batch_size": 1}
    packs = [{"epoch": 0, "batch": 0, "packs": [[5, 0]]}, {"epoch": 0, "batch": 1, "packs": [[13]]}]
    lines = [{"format": "sft plan 1", "data": digest, **sizes}, *packs]
    plan.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = [f"data.train=[{folder}/sums.jsonl, {folder}/code.jsonl]", f"data.cache_dir={folder}/cache"]
    run(folder, [*data, f"run.dir={tmp_path}/run", f"data.plan={plan}"], 1)
    assert seen(tmp_path / "run") == [(0, 0, [0, 5]), (0, 1, [13])]
