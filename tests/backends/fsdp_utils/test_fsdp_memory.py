"""What the backend does about memory, and what it must not change: blocks that are computed once more, parameters on the host,
float32 masters of passes in bfloat16, and the sleep of a rank that shares its device."""

import functools
from unittest import mock

import pytest

from tests.support.models.grpo_batch import TRAINED_TOKENS, bounds_of_batch
from tests.support.models.tiny_model import write_tiny_model
from tests.support.oracles.rounding import assert_equal_metrics, assert_equal_weights, bound_of_weights
from tests.support.processes.distributed import run_distributed
from tests.support.processes.layout_steps import layout_args, shard

VOCABULARY, LAYERS = 131, 2
LARGE_VOCABULARY = 16_384
CLIP = 0.01
SETTINGS = {
    "plain": {},
    "recomputed": {"gradient_checkpointing": True},
    "on the host": {"fsdp_cpu_offload": True},
    "moments on the host": {"optimizer_cpu_offload": True},
    "clipped": {"clip_grad": CLIP},
    "clipped on the host": {"clip_grad": CLIP, "fsdp_cpu_offload": True},
}
# Ranks by data and context parallelism.
LAYOUTS = {"one rank": (1, 1), "two ranks": (2, 1), "ranks that share samples": (1, 2)}


class Trained:
    """A backend, and its part of a batch."""

    def __init__(self, args):
        from slime.training.advantages import compute_advantages_and_returns
        from tests.support.processes.megatron_worker import load_backend

        self.args, self.backend = args, load_backend(args)
        self.data = shard(args, self.backend.groups.data_rank, self.backend.groups.cp)
        self.data["log_probs"] = self.data["ref_log_probs"]
        compute_advantages_and_returns(args, self.data)

    def step(self):
        from slime.training.train_step import train_one_step

        return train_one_step(self.args, self.backend, self.data, 0, 0)

    def gradients(self):
        return {name: p.grad.full_tensor().numpy() for name, p in self.backend.model.named_parameters()}

    def whole(self):
        return {name: p.detach().full_tensor().clone() for name, p in self.backend.model.named_parameters()}


def run_settings(hf_dir, layout, settings):
    """Per setting two steps: metrics, gradients, weights, and how often feed-forward networks were computed in the first."""
    import numpy as np

    size, context = layout
    results = {}
    for name, flags in settings.items():
        args = layout_args(
            hf_dir, train_backend="fsdp", data_parallel_size=size, context_parallel_size=context, **flags
        )
        run, calls = Trained(args), []
        for layer in run.backend.model.model.layers:
            # Computed once more, it may end as soon as all is there that the backward pass needs.
            layer.mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(None))
        metrics, gradients = [run.step()], [run.gradients()]
        count, batches = len(calls), run.data["num_microbatches"][0]
        metrics.append(run.step())
        gradients.append(run.gradients())
        means = [float(np.abs(np.concatenate([g.ravel() for g in of_step.values()])).mean()) for of_step in gradients]
        results[name] = {
            "metrics": metrics, "gradients": gradients, "calls": count / batches / LAYERS, "weights": run.whole(),
            "bound": bound_of_weights(args, means, TRAINED_TOKENS),
        }  # fmt: skip
    return results


def run_in_16_bits(hf_dir, size):
    """A step in bfloat16 with so small a learning rate that bfloat16 could not hold what it changes."""
    import torch

    from slime.training.model_states import REFERENCE, ModelStates
    from slime.training.train_step import forward_log_probs

    args = layout_args(hf_dir, train_backend="fsdp", data_parallel_size=size, bf16=True, lr=1e-6, adam_eps=1e-12)
    run = Trained(args)
    held = ModelStates(run.backend.live_tensors)
    held.capture(REFERENCE)
    before = run.whole()
    metrics = [run.step() for _ in range(3)]
    after = run.whole()
    pushed = dict(run.backend.stage_tensors()())

    def log_probs():
        return forward_log_probs(args, run.backend, run.data, with_entropy=False)["log_probs"]

    logits = run.backend.forward(run_batches(run), lambda batch, logits: {"dtype": [logits.dtype]})
    actor = log_probs()
    with held(REFERENCE):
        reference, of_reference = log_probs(), run.whole()
    return {
        "finite": all(torch.isfinite(torch.tensor(step["grad_norm"])) for step in metrics),
        "moved": {name: float((after[name] != before[name]).float().mean()) for name in before},
        "most": max(float((after[name] - before[name]).abs().max()) for name in before),
        "lost": {name: float((after[name].bfloat16() == before[name].bfloat16()).float().mean()) for name in before},
        "live": {tensor.dtype for _, tensor in run.backend.live_tensors()},
        "moments": {value.dtype for state in run.backend.optimizer.state.values() for value in state.values()},
        "pushed": {name: tensor.dtype for name, tensor in pushed.items()},
        "is_rounded": all(torch.equal(tensor, after[name].bfloat16()) for name, tensor in pushed.items()),
        "logits": {dtype for batch in logits for dtype in batch["dtype"]},
        "is_reference": all(torch.equal(of_reference[name], before[name]) for name in before),
        "is_back": all(torch.equal(a, b) for a, b in zip(actor, log_probs(), strict=True)),
        "differ": any(not torch.equal(a, b) for a, b in zip(actor, reference, strict=True)),
    }


def run_batches(run):
    from slime.training.train_step import micro_batches

    return micro_batches(run.args, run.data, run.data["micro_batch_indices"])


def sleepers(hf_dir, size, flags):
    """Two steps with a sleep in between, and two without: bytes of all tensors and of the process, awake and asleep."""
    import numpy as np

    from slime.scheduling.device_turns import Holds
    from slime.training.resident_memory import ResidentMemory
    from slime.utils.device import get_accelerator

    args = layout_args(
        hf_dir, train_backend="fsdp", data_parallel_size=size, padded_vocab_size=LARGE_VOCABULARY, **flags
    )
    run = Trained(args)
    run.step()
    run.backend.forward(run_batches(run), lambda batch, logits: {})
    memory, model = ResidentMemory(run.backend.residents), run.backend.model
    weights = sum(part.nbytes for _, part in run.backend.live_tensors())
    before = moments(run)
    sizes, resident = [allocated()], [get_accelerator().memory_allocated()]
    for holds in (Holds.WEIGHTS, Holds.NOTHING):
        memory.hold(holds)
        sizes.append(allocated())
    resident.append(get_accelerator().memory_allocated())
    memory.hold(Holds.ALL)
    after = moments(run)
    gathered = sum(parameter.untyped_storage().nbytes() for parameter in gathered_parameters(model))
    run.step()
    again = run.whole()
    awake = Trained(args)
    for _ in range(2):
        awake.step()
    expected = awake.whole()
    return {
        "weights": weights, "sizes": sizes, "resident": resident, "gathered": gathered,
        "is_whole": bool(before) and all(np.array_equal(after[name], moment) for name, moment in before.items()),
        "is_same": all(weight.equal(expected[name]) for name, weight in again.items()),
    }  # fmt: skip


def built(hf_dir, size):
    """Bytes of all tensors that are made on the way to a model and its weights, those of its parts, and random weights."""
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    from tests.support.processes.megatron_worker import load_backend

    class Made(TorchDispatchMode):
        nbytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func._schema.name.startswith("aten::empty") and result.device.type != "meta":
                self.nbytes += (result.to_local() if isinstance(result, DTensor) else result).nbytes
            return result

    args = layout_args(hf_dir, train_backend="fsdp", data_parallel_size=size, padded_vocab_size=LARGE_VOCABULARY)
    with Made() as made:
        backend = load_backend(changed(args, num_rollout=0))
    parts = sum(part.nbytes for _, part in backend.live_tensors())
    drawn = load_backend(changed(args, num_rollout=0), loads=False)
    weights = {name: p.detach().full_tensor().numpy().copy() for name, p in drawn.model.named_parameters()}
    return made.nbytes, parts, weights


def changed(args, **values):
    from types import SimpleNamespace

    return SimpleNamespace(**{**vars(args), **values})


def allocated():
    """Bytes of all tensors of this process."""
    import gc

    import torch

    gc.collect()
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    with torch.no_grad():
        local = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in local}
    return sum(storages.values())


def gathered_parameters(model):
    """What FSDP gathered parameters into, as far as it is there still."""
    groups = [module._get_fsdp_state()._fsdp_param_group for module in model.modules() if hasattr(module, "unshard")]
    return [output for group in groups for parameter in group.fsdp_params for output in parameter.all_gather_outputs]


def moments(run):
    """What the optimizer knows of this rank's part of each parameter."""
    states = {name: run.backend.optimizer.state[p] for name, p in run.backend.model.named_parameters()}
    return {
        (name, kind): (value.to_local() if hasattr(value, "to_local") else value).detach().clone().numpy().copy()
        for name, state in states.items() for kind, value in state.items()
    }  # fmt: skip


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, vocab_size=VOCABULARY, layers=LAYERS)
    return str(directory)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """16 MiB of weights."""
    directory = tmp_path_factory.mktemp("large")
    write_tiny_model(directory, vocab_size=LARGE_VOCABULARY, layers=1, hidden=128)
    return str(directory)


@pytest.fixture(scope="module")
def ranks_of(hf_dir, selected):
    """A function: what every rank of a layout finds with each setting; once, and without settings that no test asks for."""
    on_host = {case["layout"] for case in selected(test_what_lies_on_the_host_is_trained_alike)}

    @functools.cache
    def found(layout):
        (size, context), settings = LAYOUTS[layout], SETTINGS
        if layout not in on_host:
            settings = {name: flags for name, flags in SETTINGS.items() if "on the host" not in name}
        return run_distributed(run_settings, size * context, (hf_dir, (size, context), settings), timeout=300)

    return found


def assert_same(found, expected):
    import numpy as np

    assert found["metrics"] == expected["metrics"]
    for of_step, wanted in zip(found["gradients"], expected["gradients"], strict=True):
        assert of_step.keys() == wanted.keys() and all(np.array_equal(of_step[name], wanted[name]) for name in wanted)
    assert all(found["weights"][name].equal(weight) for name, weight in expected["weights"].items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_are_computed_once_more_and_give_the_same_gradients(ranks_of, layout):
    for rank in ranks_of(layout):
        assert (rank["plain"]["calls"], rank["recomputed"]["calls"]) == (1, 2)
        assert_same(rank["recomputed"], rank["plain"])


@pytest.mark.parametrize(
    "layout", ["one rank", "two ranks", pytest.param("ranks that share samples", marks=pytest.mark.slow)]
)
def test_what_lies_on_the_host_is_trained_alike(ranks_of, layout):
    for rank in ranks_of(layout):
        assert_same(rank["moments on the host"], rank["plain"])
        assert_same(rank["on the host"], rank["plain"])
        assert_same(rank["clipped on the host"], rank["clipped"])


def test_moments_are_on_the_device_for_an_update_alone():
    import torch

    from slime.backends.fsdp_utils.backend import FSDPBackend
    from tests.support.models.args import default_args

    made = FSDPBackend(default_args(optimizer_cpu_offload=True))
    made.model = torch.nn.Linear(2, 2)
    made.optimizer = torch.optim.AdamW(made.model.parameters())
    for parameter in made.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    events = []
    made.optimizer.register_step_post_hook(lambda *_: events.append("update"))
    with mock.patch.object(made, "_put_moments", lambda device: events.append(device.type)):
        made._update()
    assert events == ["cpu", "update", "cpu"]
    made._put_moments(torch.device("meta"))
    for state in made.optimizer.state.values():
        assert {name: value.device.type for name, value in state.items()} == {
            "step": "cpu", "exp_avg": "meta", "exp_avg_sq": "meta",
        }  # fmt: skip


class Queued:
    """A tensor whose copies are noted: (their device, whether the host waits for each)."""

    ndim = 1

    def __init__(self, events):
        self.events = events

    def to(self, device, non_blocking=False):
        self.events.append((device.type, not non_blocking))
        return self


@pytest.fixture
def waits(monkeypatch):
    """A list in which it is noted when the host waits for the device."""
    from slime.backends.fsdp_utils import backend

    events = []
    device = mock.Mock(synchronize=lambda: events.append("waited"))
    monkeypatch.setattr(backend, "get_accelerator", lambda: device)
    return events


def test_the_host_waits_for_all_moments_together(waits):
    import torch

    from slime.backends.fsdp_utils.backend import FSDPBackend
    from tests.support.models.args import default_args

    made = FSDPBackend(default_args(optimizer_cpu_offload=True))
    state = {"step": torch.zeros(()), "exp_avg": Queued(waits), "exp_avg_sq": Queued(waits)}
    made.optimizer = mock.Mock(state={"of one": dict(state), "of another": dict(state)})
    made._put_moments(torch.device("cpu"))
    assert waits == [("cpu", False)] * 4 + ["waited"]


@pytest.mark.parametrize("flags, ends", [({}, []), ({"fsdp_cpu_offload": True}, ["waited"])])
def test_weights_on_the_host_are_free_to_change_after_a_pass(waits, flags, ends):
    from slime.backends.fsdp_utils.backend import FSDPBackend
    from tests.support.models.args import default_args

    made = FSDPBackend(default_args(**flags))
    with mock.patch.object(made, "_logits", lambda batch: waits.append(batch)):
        assert made.forward(["one", "two"], lambda batch, logits: {batch: logits}) == [{"one": None}, {"two": None}]
    assert waits == ["one", "two", *ends]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_all_ranks_are_clipped_together(ranks_of, layout):
    import numpy as np

    def norm(gradients):
        return float(np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in gradients.values())))

    bounds, expected = bounds_of_batch(padded_vocab_size=VOCABULARY), ranks_of("one rank")[0]["clipped"]
    for rank in ranks_of(layout):
        found = rank["clipped"]
        assert found["metrics"][0]["grad_norm"] == pytest.approx(norm(rank["plain"]["gradients"][0]), rel=1e-6)
        assert found["metrics"][0]["grad_norm"] > 2 * CLIP
        assert norm(found["gradients"][0]) == pytest.approx(CLIP, rel=1e-4)
        for step, of_one in zip(found["metrics"], expected["metrics"], strict=True):
            assert_equal_metrics(step, of_one, bounds)
        assert_equal_weights(found["weights"], expected["weights"], expected["bound"])


@pytest.mark.parametrize("size", [1, 2])
def test_updates_too_small_for_bfloat16_are_not_lost(hf_dir, size):
    import torch

    for rank in run_distributed(run_in_16_bits, size, (hf_dir, size)):
        assert rank["finite"] and rank["logits"] == {torch.bfloat16}
        assert rank["live"] == rank["moments"] == {torch.float32}
        # Of the embedding only rows of tokens that came.
        assert all(share > 0.9 for name, share in rank["moved"].items() if "embed_tokens" not in name)
        assert 1e-6 < rank["most"] < 1e-5 and all(share > 0.9 for share in rank["lost"].values())
        assert set(rank["pushed"].values()) == {torch.bfloat16} and rank["is_rounded"]
        assert rank["is_reference"] and rank["is_back"] and rank["differ"]


ON_HOST = {"fsdp_cpu_offload": True}


@pytest.mark.parametrize(
    "flags, size", [({}, 1), ({}, 2), (ON_HOST, 2), pytest.param(ON_HOST, 1, marks=pytest.mark.slow)]
)
def test_what_sleeps_leaves_the_memory_and_comes_back(large, flags, size):
    for rank in run_distributed(sleepers, size, (large, size, flags)):
        weights, (awake, light, asleep), (before, after) = rank["weights"], rank["sizes"], rank["resident"]
        # Weights, two moments and gradients; nothing that was gathered.
        assert 4 * weights <= awake < 4.2 * weights
        assert weights <= light < 1.2 * weights
        assert asleep < 0.2 * weights
        assert before - after > 3.6 * weights
        assert rank["gathered"] == 0
        assert rank["is_whole"] and rank["is_same"]


def test_no_rank_has_memory_for_the_whole_model_and_random_weights_are_the_same_in_every_layout(large):
    (one,), two = (run_distributed(built, size, (large, size)) for size in (1, 2))
    whole = one[1]
    for made, parts, weights in two:
        assert parts < 0.51 * whole and made < 1.2 * parts
        assert all((weights[name] == weight).all() for name, weight in one[2].items())
    assert any(weight.std() > 0 for weight in one[2].values())
