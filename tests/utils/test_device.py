import pytest

from slime.utils import device, env
from slime.utils.errors import UserError


@pytest.fixture(autouse=True)
def forget_the_accelerator():
    device.get_accelerator.cache_clear()
    yield
    device.get_accelerator.cache_clear()


def test_forced_cpu(monkeypatch):
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    accelerator = device.get_accelerator()
    assert (accelerator.name, accelerator.process_group_backend) == ("cpu", "gloo")
    assert accelerator.device(3).type == "cpu" and accelerator.memory_allocated() > 0
    assert device.gpus_on_this_machine() == 0


def test_unknown_backend_names_the_known_ones(monkeypatch):
    monkeypatch.setenv("SLIME_ACCELERATOR", "abacus")
    with pytest.raises(UserError, match="SLIME_ACCELERATOR=abacus is not known; registered: cpu, cuda"):
        device.get_accelerator()


def test_own_backend_can_be_registered(monkeypatch):
    class Abacus(device.Accelerator):
        name = "abacus"

    monkeypatch.setattr(device, "_FACTORIES", dict(device._FACTORIES))
    device.register_accelerator("abacus", Abacus)
    monkeypatch.setenv("SLIME_ACCELERATOR", "abacus")
    assert device.get_accelerator().name == "abacus"


@pytest.mark.parametrize(
    "value, expected", [(None, None), ("", []), ("-1", []), ("4,5", ["4", "5"]), (" GPU-a , GPU-b", ["GPU-a", "GPU-b"])]
)
def test_visible_devices(monkeypatch, value, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if value is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert env.visible_devices() == expected


@pytest.mark.parametrize("visible, expected", [(None, 4), ("", 0), ("2,3", 2)])
def test_hidden_gpus_do_not_count(monkeypatch, visible, expected):
    from ray._private.accelerators import NvidiaGPUAcceleratorManager

    monkeypatch.delenv("SLIME_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(device, "_torch_is_a_cpu_build", lambda: False)
    monkeypatch.setattr(NvidiaGPUAcceleratorManager, "get_current_node_num_accelerators", staticmethod(lambda: 4))
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device.gpus_on_this_machine() == expected


def test_actors_get_our_variables(monkeypatch):
    monkeypatch.setenv("SLIME_DEBUG", "1")
    monkeypatch.delenv("SLIME_ACCELERATOR", raising=False)
    environment = env.actor_environment()
    assert environment["SLIME_DEBUG"] == "1" and "SLIME_ACCELERATOR" not in environment
    assert environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
