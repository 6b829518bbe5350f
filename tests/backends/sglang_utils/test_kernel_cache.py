"""Where servers keep the kernels that they compile."""

import stat
from importlib import metadata

from slime.backends.sglang_utils.server_arguments import kernel_cache


def test_kernels_are_kept_for_the_user_alone_and_by_version(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = kernel_cache()
    assert path.parent == tmp_path / "slime" and stat.S_IMODE(path.stat().st_mode) == 0o700
    assert path.name == f"sglang-{metadata.version('sglang')}-torch-{metadata.version('torch')}"
    (path / "kernel").touch()
    assert kernel_cache() == path and (path / "kernel").exists()
    monkeypatch.setattr(metadata, "version", lambda name: "9")
    assert kernel_cache() == tmp_path / "slime/sglang-9-torch-9"


def test_a_checkout_that_was_never_installed_has_kernels_too(monkeypatch, tmp_path):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(metadata, "version", version)
    assert kernel_cache().name == "sglang-source-torch-source"


def test_a_directory_that_others_may_write_is_not_trusted(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernel_cache().chmod(0o770)
    assert kernel_cache() is None


def test_without_a_place_for_kernels_sglang_chooses_one(monkeypatch, tmp_path):
    (tmp_path / "slime").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_cache() is None
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "nowhere")
    assert kernel_cache() is None
