"""Equal prompts are found in trees, too: the first text of a tree has the digests of the same plain sample."""

import numpy as np

from sft.data.inspect.findings import _digests
from tests.tree_samples import nested

BYTES = 16  # of a digest; the digests are those of all tokens, of the prompt and of the prompt with the first answer


def test_the_first_text_of_a_tree_has_the_digests_of_a_plain_sample() -> None:
    """The first text supervises its tokens 30 to 49, a branch after 30 tokens of the trunk."""
    tree, texts = nested(5, 301)
    none, own = np.zeros(0, dtype=np.int64), (np.array([30]), np.array([50]))
    of_tree = _digests(tree, none, none, has_prompt=True)
    plain = _digests(texts[0], *own, has_prompt=True)
    other = _digests(nested(6, 301)[1][0], *own, has_prompt=True)
    assert of_tree[BYTES:] == plain[BYTES:] and of_tree[:BYTES] != plain[:BYTES]
    assert other[BYTES : 2 * BYTES] != plain[BYTES : 2 * BYTES]
