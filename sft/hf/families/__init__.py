"""The table of families: one `Family` for each supported `model_type`.

`rules.py` holds what families share, and `family.py` explains the letters of a shape.  The other files declare the
families: `dense.py` and `experts.py`.
"""

from sft.hf.families.dense import DENSE
from sft.hf.families.experts import EXPERTS

FAMILIES = {family.model_type: family for family in (*DENSE, *EXPERTS)}
