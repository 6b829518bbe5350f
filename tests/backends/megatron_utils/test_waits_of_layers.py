"""An optimizer step waits for the device as often for many layers and samples as for few."""

from collections import Counter

from tests.support.models.tiny_model import write_tiny_model
from tests.support.models.train_steps import make_args, shard_of
from tests.support.oracles.device_waits import Waiting, counted_waits
from tests.support.processes.distributed import run_distributed


def worker(cases):
    """What is waited for in a forward pass and in an optimizer step, by case: (directory, how often each sample is there)."""
    from tests.support.processes.megatron_worker import load_backend

    return {name: waits(make_args(hf_dir), times, load_backend) for name, (hf_dir, times) in cases.items()}


def waits(args, times, load_backend):
    backend = load_backend(args)
    from slime.training.advantages import compute_advantages_and_returns
    from slime.training.train_step import forward_log_probs, train_one_step

    data = shard_of(args, 0)
    samples = len(data["tokens"])
    for name, rows in data.take(range(samples)).items():
        data[name] = rows * times
    halves = [list(range(samples * times))[half::2] for half in range(2)]
    data.update(micro_batch_indices=halves, num_microbatches=[2])
    compute_advantages_and_returns(args, data)
    with counted_waits() as counted, Waiting() as waiting:
        forward_log_probs(args, backend, data, with_entropy=True)
        train_one_step(args, backend, data, 0, 0)
    return dict(counted), dict(Counter(waiting.operations))


def test_waits_do_not_grow_with_layers_and_samples(tmp_path):
    """Nor with layers that come from a spec of the family's own, as those of GLM-4 do."""
    for layers in (2, 4):
        for model_type in ("qwen3", "glm4"):
            write_tiny_model(tmp_path / model_type / str(layers), model_type=model_type, layers=layers)
    shallow, deep = str(tmp_path / "qwen3" / "2"), str(tmp_path / "qwen3" / "4")
    cases = {"few": (shallow, 1), "more layers": (deep, 1), "more samples": (shallow, 3)}
    own_spec = {f"glm4 {layers}": (str(tmp_path / "glm4" / str(layers)), 1) for layers in (2, 4)}
    ((found),) = run_distributed(worker, 1, ({**cases, **own_spec},))
    assert found["few"] == found["more layers"] == found["more samples"]
    assert found["glm4 2"] == found["glm4 4"]
