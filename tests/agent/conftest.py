"""A Docker and a service of sandboxes, for tests that need neither."""

import os
import sys

import pytest

from tests.support.processes.fake_sandboxes import DOCKER, Service


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """A `docker` on PATH; the directory in which its containers are."""
    home = tmp_path / "containers"
    home.mkdir()
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(DOCKER.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_DOCKER", str(home))
    return home


@pytest.fixture
def service(monkeypatch):
    running = Service()
    monkeypatch.setitem(sys.modules, "e2b", running.module)
    for name in list(os.environ):
        if name.startswith(("SLIME_AGENT_", "SWE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SLIME_AGENT_SANDBOX_IMAGE_METADATA_KEY", "image_of")
    return running
