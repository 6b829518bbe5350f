import pytest

from tests.support.models.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    """A model whose output layer is its own."""
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, tied=False)
    return directory
