"""Checkpoints as this trainer wrote them at some time, each a folder that no later change touches.

    NAME/chat.jsonl        the data
    NAME/checkpoints/      what the run left after step 3
    NAME/expected.json     the overrides of the recipe, and what the steps 4 to 6 were when it went on at once

A change of what is stored adds a folder: `python -m tests.golden NAME`, with the settings that it is about.
`tests/ranks/test_golden.py` resumes each one.
"""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
CUT, LAST = 3, 6  # steps: the checkpoint's, and the last one


def expected(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name / "expected.json").read_text())
