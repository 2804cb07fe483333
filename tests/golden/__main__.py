"""Writes a golden checkpoint of two ranks, with the given settings, under a name that must not exist yet:

python -m tests.golden 2-dense-fp32 parallel.cp=2 parallel.distributed_optimizer=true

The model is a small one with random weights, or with --base the folder of a small Hugging Face model, which is kept:

python -m tests.golden 2-lora-fp32 --base qwen3_moe lora.rank=2
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

from tests.builders import chats
from tests.golden import CUT, FOLDER, LAST, with_base
from tests.launching import records, start
from tests.unit.fixtures import hf

SMALL = [
    "model.hidden_size=8",
    "model.ffn_hidden_size=16",
    "model.num_attention_heads=2",
    "train.global_batch_size=2",
    "optim.lr=1e-2",  # a state of the optimizer that is lost is seen
    f"train.num_steps={LAST}",
    f"checkpoint.save_every={CUT}",
    "checkpoint.keep_last=9",
    "log.tensorboard=false",
]
SIZES = dict(hidden_size=8, intermediate_size=16, num_attention_heads=2, num_key_value_heads=2, head_dim=4)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.golden")
    parser.add_argument("name")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--base", metavar="FAMILY", help="a family of tests/unit/fixtures/hf.py")
    asked = parser.parse_intermixed_args()
    target = FOLDER / asked.name
    own = [] if asked.base else ["model.tie_embeddings=true"]
    overrides = [*SMALL, *own, *asked.overrides]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        chats(folder, 40)
        if asked.base:
            hf.save(folder / "model", asked.base, **SIZES)
        for code, out, err in start(folder, [*overrides, *with_base(folder)]):
            assert code == 0, out + err
        target.mkdir()
        shutil.copy2(folder / "chat.jsonl", target)
        if asked.base:
            shutil.copytree(folder / "model", target / "model")
        checkpoint = f"iter_{CUT:07}"
        shutil.copytree(folder / "run/checkpoints" / checkpoint, target / "checkpoints" / checkpoint)
        (target / "checkpoints/latest_checkpointed_iteration.txt").write_text(str(CUT))
        train = [record for record in records(folder, "train") if record["step"] > CUT]
        samples = [json.loads(line) for line in (folder / "run/seen.jsonl").read_text().splitlines()]
    content = {name: [record[name] for record in train] for name in ("lm loss", "grad-norm", "learning-rate")}
    content |= {"overrides": overrides, "samples": [row["samples"] for row in samples if row["step"] > CUT]}
    (target / "expected.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
