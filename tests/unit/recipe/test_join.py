"""Ranks that have looked up different commits of a hub name are refused.  tests/ranks/test_join.py joins real ranks."""

import pytest

from sft.errors import ConfigError
from sft.recipe.join import check_commits


def test_ranks_of_different_commits_are_refused() -> None:
    one, other = {"a/b": "1" * 40}, {"a/b": "2" * 40}
    check_commits([one, one, one])
    check_commits([{}, {}])
    with pytest.raises(ConfigError, match=f"a/b is commit {'1' * 40} on rank 0, but commit {'2' * 40} on rank 2"):
        check_commits([one, one, other])
    with pytest.raises(ConfigError, match="a/b is a folder on rank 0, but commit"):
        check_commits([{}, other])
