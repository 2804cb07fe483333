"""Write a golden checkpoint of two ranks under a name that must not exist yet, with the settings that it is about:

python -m tests.golden 2-dense-fp32 parallel.cp=2 parallel.distributed_optimizer=true
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

from tests.builders import chats
from tests.golden import CUT, FOLDER, LAST
from tests.launching import records, start

SMALL = [
    "model.hidden_size=8",
    "model.ffn_hidden_size=16",
    "model.num_attention_heads=2",
    "model.tie_embeddings=true",
    "train.global_batch_size=2",
    "optim.lr=1e-2",  # a state of the optimizer that is lost is seen
    f"train.num_steps={LAST}",
    f"checkpoint.save_every={CUT}",
    "checkpoint.keep_last=9",
    "log.tensorboard=false",
]


def main() -> None:
    target = FOLDER / sys.argv[1]
    overrides = [*SMALL, *sys.argv[2:]]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        chats(folder, 40)
        for code, out, err in start(folder, overrides):
            assert code == 0, out + err
        target.mkdir()
        shutil.copy2(folder / "chat.jsonl", target)
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
