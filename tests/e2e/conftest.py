"""What the end-to-end tests share: the task."""

import pytest

from tests.support.models.tiny_task import TinyTask, make_tiny_task


@pytest.fixture(scope="session")
def task(tmp_path_factory) -> TinyTask:
    return make_tiny_task(tmp_path_factory.mktemp("task"))
