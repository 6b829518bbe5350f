from pathlib import Path

import pytest

from slime.utils import env


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"XDG_CACHE_HOME": "/scratch/cache", "HOME": "/home/a"}, Path("/scratch/cache")),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/a"}, Path("/home/a/.cache")),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/a"}, Path("/home/a/.cache")),
        ({"HOME": "nowhere"}, None),
    ],
)
def test_cache_home(monkeypatch, variables, expected):
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert env.cache_home() == expected
