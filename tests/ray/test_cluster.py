"""Our own Ray: who can read its token, and who can reach it."""

import os
import stat

import pytest

from slime.ray import cluster


@pytest.fixture
def home(tmp_path, monkeypatch):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    # What `mkdir` and `open` leave to the user's umask must not matter.
    before = os.umask(0o022)
    yield tmp_path
    os.umask(before)


def mode(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_token_that_is_made_can_be_read_by_its_owner_only(home):
    cluster.settle_token()
    token = home / ".ray/auth_token"
    assert (mode(token), mode(token.parent)) == (0o600, 0o700)
    assert len(token.read_text()) == 64
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]


def test_a_token_that_is_there_is_kept_and_closed_to_others(home):
    token = home / ".ray/auth_token"
    token.parent.mkdir()
    token.write_text("a" * 64)
    token.chmod(0o644)
    cluster.settle_token()
    assert (mode(token), token.read_text()) == (0o600, "a" * 64)


@pytest.mark.parametrize(
    "name, value",
    [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "t" * 64), ("RAY_AUTH_TOKEN_PATH", "/somewhere/token")],
)
def test_a_token_from_elsewhere_makes_no_file(home, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    cluster.settle_token()
    assert list(home.iterdir()) == []


def test_a_node_that_is_slow_to_start_is_waited_for(monkeypatch):
    answers = iter([RuntimeError("not there yet")] * 3)

    def get_node(address, node_id):
        for error in answers:
            raise error
        return {"node_id": node_id}

    monkeypatch.setattr(cluster.services, "get_node", get_node)
    with cluster._patience_with_node():
        assert cluster.services.get_node("address", "7") == {"node_id": "7"}
    assert cluster.services.get_node is get_node


def test_a_node_that_never_starts_is_given_up(monkeypatch):
    def get_node(address, node_id):
        raise RuntimeError("not there")

    monkeypatch.setattr(cluster.services, "get_node", get_node)
    monkeypatch.setattr(cluster, "_NODE_SECONDS", 0.3)
    with cluster._patience_with_node(), pytest.raises(RuntimeError, match="not there"):
        cluster.services.get_node("address", "7")
