"""Keeps checkpoints that earlier versions of this trainer wrote, each in a folder that no later change may touch.

    NAME/chat.jsonl        the data
    NAME/model/            the Hugging Face folder whose weights the run trained, or froze for LoRA; some have none
    NAME/checkpoints/      the checkpoints that the run had after step 3
    NAME/expected.json     the overrides of the recipe, and the losses of steps 4 to 6 without a restart

A change of the content of checkpoints adds a folder: `python -m tests.golden NAME SETTINGS`, with the settings that the
change affects.
`tests/ranks/test_golden.py` resumes each one.
"""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
CUT, LAST = 3, 6  # steps: the checkpoint's, and the last one


def with_base(folder: Path) -> list[str]:
    """Overrides for a run in `folder` on the weights of folder/model, if there are any."""
    if not (folder / "model").exists():
        return []
    return [f"model.hf={folder}/model", "model.init_from=null", "data.tokenizer=byte"]


def expected(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name / "expected.json").read_text())
