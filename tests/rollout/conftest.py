"""A checkpoint for the client's checks, and a server that speaks the engines' generation protocol."""

import pytest

from slime.utils.misc import SingletonMeta
from tests.support.models.rollout_args import make_checkpoint
from tests.support.processes.fake_generate_server import FakeGenerateServer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def server():
    SingletonMeta.clear_instances()
    with FakeGenerateServer() as running:
        yield running
    SingletonMeta.clear_instances()
