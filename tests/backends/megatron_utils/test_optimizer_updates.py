"""Updates that are called off, states that are reset, and Adam without moments, inside Megatron's optimizers.

Adam on the weights themselves, with narrow states and in host memory, in Megatron's distributed optimizer.
"""

import math
from types import SimpleNamespace

import pytest
import torch

from tests.support.models.tiny_model import tiny_args, write_tiny_mixture, write_tiny_model
from tests.support.processes.distributed import run_distributed

VOCABULARY = 131

SEQUENCES = ([5, 9, 77, 100, 31, 8], [90, 3, 14, 15, 92, 65, 35])
LR, DECAY, CLIP = 3e-3, 0.1, 0.25
OPTIMIZER = {
    "num_rollout": 10, "rollout_batch_size": 2, "n_samples_per_prompt": 2, "global_batch_size": 4, "optimizer": "adam",
    "lr": LR, "min_lr": LR, "lr_decay_style": "constant", "lr_warmup_iters": 0, "lr_warmup_fraction": None,
    "lr_decay_iters": None, "weight_decay": DECAY, "adam_beta1": 0.9, "adam_beta2": 0.98, "adam_eps": 1e-8,
    "clip_grad": 1.0,
}  # fmt: skip
KINDS = {
    "distributed": {},
    "plain": {"use_distributed_optimizer": False},
    "bfloat16": {"bf16": True},
}


class Trainer:
    """Model and optimizer of this rank; all ranks of a data-parallel group train on the same sequences."""

    def __init__(self, args: SimpleNamespace) -> None:
        from tests.support.processes.megatron_worker import load_model

        self.chunks = load_model(args)
        from slime.backends.megatron_utils.optimizer import build_optimizer_and_scheduler

        self.optimizer, _ = build_optimizer_and_scheduler(args, self.chunks)

    def backward(self, factor: float = 1.0) -> None:
        from megatron.core.distributed import finalize_model_grads

        from tests.support.processes.megatron_worker import next_token_loss, packed_forward

        self.chunks[0].zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = next_token_loss(packed_forward(self.chunks[0], SEQUENCES), SEQUENCES)
        self.optimizer.scale_loss(loss * factor).backward()
        finalize_model_grads(self.chunks)

    def update(self, accepts=lambda norm, overflowed: True):
        from slime.backends.megatron_utils.optimizer import update_weights

        return update_weights(self.optimizer, accepts)

    def train(self):
        self.backward()
        return self.update()

    def weights(self) -> dict:
        return {name: parameter.detach().clone() for name, parameter in self.chunks[0].named_parameters()}

    def inner(self):
        return self.optimizer.chained_optimizers[0].optimizer

    def main_copies(self) -> list:
        return [param.detach().clone() for group in self.inner().param_groups for param in group["params"]]

    def main_parameters(self) -> list:
        """What a precision-aware optimizer has of `main_copies`."""
        from slime.backends.megatron_utils.adam import main_parameter

        params = [param for group in self.inner().param_groups for param in group["params"]]
        return [main_parameter(self.inner(), param).clone() for param in params]

    def scales(self) -> list[float]:
        """The loss scale of each part of the optimizer."""
        return [float(part.grad_scaler.scale) for part in self.optimizer.chained_optimizers]

    def gradients(self) -> list:
        """What the optimizer has of the gradients, without the loss scale."""
        parts = [part.optimizer for part in self.optimizer.chained_optimizers]
        return [param.grad.clone() for inner in parts for group in inner.param_groups for param in group["params"]]

    def moments(self) -> float:
        """Largest absolute entry of all moments, and the step counts."""
        import torch

        tensors = [tensor for state in self.inner().state.values() for tensor in state.values()]
        tensors = [tensor for tensor in tensors if torch.is_tensor(tensor) and tensor.numel()]
        steps = [group.get("step", 0) for group in self.inner().param_groups if group["params"]]
        return max(float(tensor.abs().max()) for tensor in tensors), steps


def same(left, right) -> bool:
    import torch

    pairs = zip(left.values(), right.values(), strict=True) if isinstance(left, dict) else zip(left, right, strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def reset_worker(cases) -> dict:
    """Two steps, a reset, one step; beside it one step of a new optimizer from the same weights."""
    import torch

    results = {}
    for name, args in cases.items():
        trainer = Trainer(args)
        from slime.backends.megatron_utils.optimizer import reset_optimizer_states

        reset_optimizer_states(trainer.optimizer)  # nothing to forget yet
        trainer.train()
        trainer.train()
        before, weights, copies = trainer.moments(), trainer.weights(), trainer.main_copies()
        reset_optimizer_states(trainer.optimizer)
        kept = same(weights, trainer.weights()) and same(copies, trainer.main_copies())
        after = trainer.moments()
        lr = [group["lr"] for group in trainer.inner().param_groups]
        trainer.train()

        new = Trainer(args)
        with torch.no_grad():
            for parameter, weight in zip(new.chunks[0].parameters(), weights.values(), strict=True):
                parameter.copy_(weight)
            new.optimizer.reload_model_params()
            for group, of_old in zip(new.inner().param_groups, split_like(new, copies), strict=True):
                for copy, old in zip(group["params"], of_old, strict=True):
                    copy.copy_(old)
        new.train()
        results[name] = (before, kept, after, lr, same(trainer.weights(), new.weights()))
    return results


def split_like(trainer, flat) -> list:
    rest, groups = list(flat), []
    for group in trainer.inner().param_groups:
        groups.append([rest.pop(0) for _ in group["params"]])
    return groups


def refused_worker(cases) -> dict:
    """Updates that nobody takes: refused ones, with gradients that are not finite, with an overflow of float16."""
    results = {}
    for name, args in cases.items():
        trainer = Trainer(args)
        asked = []

        def refuse(norm, overflowed, asked=asked):
            asked.append((norm, overflowed))
            return False

        trainer.backward()
        weights = trainer.weights()
        refused = trainer.update(refuse)
        trainer.backward(math.inf)
        infinite = trainer.update(refuse)
        untouched = same(weights, trainer.weights()) and not any(trainer.inner().state.values())
        taken = trainer.train()
        results[name] = (refused, infinite, untouched, taken, same(weights, trainer.weights()), asked)
    fp16 = Trainer(cases["fp16"])
    weights, scale = fp16.weights(), float(fp16.optimizer.get_loss_scale())
    fp16.backward(math.inf)
    overflow = fp16.update()
    lowered = float(fp16.optimizer.get_loss_scale()) < scale
    results["overflow"] = (overflow, same(weights, fp16.weights()), lowered)
    return results


def mixture_worker(directory) -> dict:
    """With float16 and experts, per kind of the parameter whose gradient overflows: whether the update was taken, the loss
    scales after it, and whether the next gradients are those of a run that began with the lower scale."""
    flags = {**OPTIMIZER, "fp16": True, "loss_scale_window": 1000.0, "hysteresis": 1}
    lower = Trainer(tiny_args(directory, **flags, initial_loss_scale=2.0**9))
    lower.backward()
    lower.update(lambda norm, overflowed: False)
    results = {}
    for kind in ("dense", "expert"):
        trainer = Trainer(tiny_args(directory, **flags, initial_loss_scale=2.0**10))
        trainer.backward()
        named = [p for name, p in trainer.chunks[0].named_parameters() if (".experts." in name) == (kind == "expert")]
        named[-1].main_grad.view(-1)[0] = math.inf
        taken, scales = trainer.update().taken, trainer.scales()
        trainer.backward()
        trainer.update(lambda norm, overflowed: False)
        results[kind] = (taken, scales, trainer.scales(), same(trainer.gradients(), lower.gradients()))
    return results


def stateless_worker(cases) -> dict:
    import torch

    results = {}
    for name, args in cases.items():
        trainer = Trainer(args)
        steps = []
        for _ in range(2):
            trainer.backward()
            before = trainer.main_copies()
            trainer.update()
            groups = [group for group in trainer.inner().param_groups for _ in group["params"]]
            gradients = [param.grad for group in trainer.inner().param_groups for param in group["params"]]
            expected = [
                copy * (1 - LR * group["weight_decay"]) - LR * gradient / (gradient.abs() + 1e-8)
                for copy, gradient, group in zip(before, gradients, groups, strict=True)
            ]
            differences = [a - b for a, b in zip(trainer.main_copies(), expected, strict=True)]
            steps.append(max(float(d.abs().max()) for d in differences if d.numel()))
        kept = [value for state in trainer.inner().state.values() for value in state.values() if torch.is_tensor(value)]
        results[name] = (type(trainer.inner()).__name__, steps, len(kept))
    usual = Trainer(SimpleNamespace(**{**vars(args), "use_stateless_adam": False}))
    return {**results, "usual": type(usual.inner()).__name__}


def clipped_worker(hf_dir) -> dict:
    """Gradient norm and first moments of a first step, by limit; the update itself hardly depends on the gradient's size."""
    import torch

    results = {}
    for limit in (0.0, CLIP, 1e6):
        for name, args in cases(hf_dir, clip_grad=limit).items():
            trainer = Trainer(args)
            update = trainer.train()
            moments = [state["exp_avg"].flatten() for state in trainer.inner().state.values()]
            results[name, limit] = (update.grad_norm, torch.cat(moments).double().norm().item())
    return results


ON_HOST = {
    "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, "overlap_cpu_optimizer_d2h_h2d": True,
    "store_param_remainders": False, "pin_cpu_params": False,
}  # fmt: skip
HOST_NARROW = {
    "optimizer_cpu_offload": True, "use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "fp16", "main_params_dtype": "fp16", "use_torch_optimizer_for_cpu_offload": True,
}  # fmt: skip
NARROW = {
    "use_precision_aware_optimizer": True, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "bf16",
    "main_grads_dtype": "bf16", "accumulate_allreduce_grads_in_fp32": False,
}  # fmt: skip
BF16 = {"bf16": True}
ON_WEIGHTS = {
    "fp32": {},
    "fp32, half on the host": ON_HOST,
    "bf16": BF16,
    "bf16, half on the host": {**BF16, **ON_HOST},
    "bf16, remainders": {**BF16, "use_precision_aware_optimizer": True},
    "bf16, narrow": {**BF16, **NARROW},
    "bf16, narrow on the host": {**BF16, **HOST_NARROW},
}


def on_weights_worker(hf_dir) -> dict:
    """Per kind: norm, zeros of the gradient, float32 values and weights after each of three steps; dtypes and bytes of the
    states."""
    results = {}
    for kind, flags in ON_WEIGHTS.items():
        flags = {"accumulate_allreduce_grads_in_fp32": True, "clip_grad": CLIP, "log_num_zeros_in_grad": True, **flags}
        trainer = Trainer(tiny_args(hf_dir, **{**OPTIMIZER, **flags}))
        steps = []
        for _ in range(3):
            update = trainer.train()
            values = trainer.main_copies() if kind in ("fp32", "bf16") else trainer.main_parameters()
            steps.append((update.grad_norm, update.zeros, [value.view(-1) for value in values], trainer.weights()))
        states = trainer.inner().state.values()
        results[kind] = {
            "class": type(trainer.inner()).__name__,
            "steps": steps,
            "dtypes": {name: tensor.dtype for state in states for name, tensor in state.items()},
            "bytes": sum(tensor.nbytes for state in states for tensor in state.values()),
            "entries": sum(copied.numel() for copied in trainer.main_copies()),
            "gradients": {parameter.main_grad.dtype for parameter in trainer.chunks[0].parameters()},
        }
    return results


def worker(hf_dir) -> dict:
    """One launch for all: most of a test's time is the start of its ranks."""
    fp16 = {"fp16": True, "initial_loss_scale": 2.0**10, "loss_scale_window": 1000.0, "hysteresis": 1}
    return {
        "reset": reset_worker(cases(hf_dir)),
        "refused": refused_worker(cases(hf_dir, {**KINDS, "fp16": fp16})),
        "stateless": stateless_worker(cases(hf_dir, use_stateless_adam=True)),
        "clipped": clipped_worker(hf_dir),
        "on weights": on_weights_worker(hf_dir),
    }


def cases(hf_dir, kinds=KINDS, **flags) -> dict:
    return {name: tiny_args(hf_dir, **{**OPTIMIZER, **kind, **flags}) for name, kind in kinds.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What `worker` returned on two data-parallel ranks."""
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory)
    return run_distributed(worker, 2, (str(directory),), timeout=240)


def test_an_overflow_of_one_part_lowers_the_loss_scale_of_all(tmp_path):
    write_tiny_mixture(tmp_path, "qwen3_moe", vocab_size=128)
    (found,) = run_distributed(mixture_worker, 1, (str(tmp_path),), timeout=120)
    assert found == dict.fromkeys(("dense", "expert"), (False, [2.0**9] * 2, [2.0**9] * 2, True))


def test_reset_forgets_moments_and_steps_and_keeps_the_float32_copies(ranks):
    for rank in ranks:
        for name, (before, kept, after, lr, equals_new) in rank["reset"].items():
            largest, steps = before
            assert largest > 0 and set(steps) == {2}, name
            assert kept, name
            assert after[0] == 0 and set(after[1]) == {0}, name
            assert set(lr) == {LR}, name
            assert equals_new, f"{name}: the step after a reset is not that of a new optimizer"


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_above_the_limit_are_clipped_to_it(ranks, kind):
    for rank in ranks:
        (norm, free), (_, clipped), (_, below) = (rank["clipped"][kind, limit] for limit in (0.0, CLIP, 1e6))
        assert norm > CLIP
        assert below == free
        assert clipped == pytest.approx(free * CLIP / norm, rel=1e-5)
        # What is reported is the norm before clipping.
        assert rank["clipped"][kind, CLIP][0] == norm


def test_o2_the_gradient_norm_is_reported_when_no_update_is_taken(ranks):
    for rank in ranks:
        results = rank["refused"]
        for name in KINDS:
            refused, infinite, untouched, taken, unchanged, asked = results[name]
            assert not refused.taken and 0 < refused.grad_norm < math.inf, name
            assert not infinite.taken and not math.isfinite(infinite.grad_norm), name
            assert untouched, name
            assert taken.taken and taken.grad_norm == refused.grad_norm and not unchanged, name
            assert [norm for norm, _ in asked] == pytest.approx([refused.grad_norm, infinite.grad_norm], nan_ok=True)
            assert not any(overflowed for _, overflowed in asked)
        overflow, unchanged, lowered = results["overflow"]
        assert not overflow.taken and not math.isfinite(overflow.grad_norm) and unchanged and lowered


@pytest.mark.parametrize("kind", ["fp32, half on the host", "bf16, half on the host"])
def test_on_the_weights_themselves_and_on_the_host_steps_are_the_usual_ones_bit_for_bit(ranks, kind):
    for rank in ranks:
        usual, found = rank["on weights"][kind.partition(",")[0]], rank["on weights"][kind]
        assert (usual["class"], found["class"]) == ("Adam", "PrecisionAwareAdam")
        for (norm, zeros, copies, weights), own in zip(usual["steps"], found["steps"], strict=True):
            assert own[:2] == (norm, zeros)
            assert same(copies, own[2]) and weights.keys() == own[3].keys() and same(weights, own[3])


def test_with_remainders_a_step_is_the_usual_one_but_for_weights_halfway_between_two(ranks):
    usual, found = ([rank["on weights"][kind]["steps"] for rank in ranks] for kind in ("bf16", "bf16, remainders"))
    for theirs, ours in zip(usual, found, strict=True):
        assert ours[0][:2] == theirs[0][:2]
        assert same(theirs[0][2], ours[0][2])
        for _, _, copies, weights in theirs[:1]:
            halfway = sum(int((main.view(torch.int32) & 0xFFFF == 0x8000).sum()) for main in copies)
            different = sum(int((weight != ours[0][3][name]).sum()) for name, weight in weights.items())
            # Of the other rank's part too, of which this one knows the weights only.
            assert different <= 2 * halfway + 4
        # From there on another weight gives other gradients.
        for step in (1, 2):
            assert ours[step][0] == pytest.approx(theirs[step][0], rel=0.01)


def test_states_have_the_dtypes_and_bytes_of_the_flags(ranks):
    """Bytes per parameter: 4 + 4 moments and, of bfloat16 weights, 2 for the remainder or 4 for the whole value."""
    sizes = {
        "fp32": 8, "bf16": 8, "fp32, half on the host": 8, "bf16, half on the host": 12, "bf16, remainders": 10,
        "bf16, narrow": 2 + 1 + 2, "bf16, narrow on the host": 2 + 2 + 2,
    }  # fmt: skip
    dtypes = {
        "bf16, narrow": {"exp_avg": torch.uint8, "exp_avg_sq": torch.bfloat16, "master_param": torch.int16},
        "bf16, narrow on the host": {
            "exp_avg": torch.bfloat16, "exp_avg_sq": torch.float16, "master_param": torch.float16
        },
    }  # fmt: skip
    for rank in ranks:
        found = rank["on weights"]
        assert {kind: each["bytes"] / each["entries"] for kind, each in found.items()} == sizes
        assert {kind: found[kind]["dtypes"] for kind in dtypes} == dtypes
        assert found["bf16, narrow"]["gradients"] == {torch.bfloat16}
        assert found["bf16, remainders"]["gradients"] == {torch.float32}
        # A step of Adam is about as large as the learning rate.
        for kind in dtypes:
            for theirs, ours in zip(found["bf16"]["steps"], found[kind]["steps"], strict=True):
                assert ours[0] == pytest.approx(theirs[0], rel=0.02), kind
                differences = [main - own for main, own in zip(theirs[2], ours[2], strict=True)]
                assert max(float(d.abs().max()) for d in differences if d.numel()) < 3 * LR, kind


def test_stateless_adam_takes_the_place_of_megatrons(ranks):
    for rank in ranks:
        results = dict(rank["stateless"])
        # The replacement ends with the building.
        assert results.pop("usual") == "Adam"
        for name, (kind, differences, kept) in results.items():
            assert kind == "StatelessAdam" and kept == 0, name
            assert max(differences) < 1e-7, name
