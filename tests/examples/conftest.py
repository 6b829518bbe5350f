import pytest

from slime.utils.misc import SingletonMeta
from tests.support.models.rollout_args import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def fresh_state():
    SingletonMeta.clear_instances()
    yield
    SingletonMeta.clear_instances()
