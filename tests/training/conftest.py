"""A process group of one rank, without processes."""

import pytest
import torch.distributed as dist


@pytest.fixture
def alone(monkeypatch):
    """A group of one rank, without processes."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(dist, "all_reduce", lambda values, operation, group: None)
    monkeypatch.setattr(dist, "all_gather_object", lambda gathered, value, group: gathered.__setitem__(0, value))
