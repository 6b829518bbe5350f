"""Optimizer and schedule: sharded over ranks they do what torch.optim.AdamW does on one, or SGD, and they resume."""

import copy
import functools
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.support.models.args import default_args
from tests.support.models.tiny_model import tiny_args, write_tiny_model
from tests.support.oracles.device_waits import Waiting, counted_waits
from tests.support.processes.distributed import run_distributed

VOCABULARY = 131
GLOBAL_BATCH_SIZE = 4
STEPS = 4
SCHEDULE = {
    "num_rollout": 10,
    "rollout_batch_size": 2,
    "n_samples_per_prompt": 2,
    "global_batch_size": GLOBAL_BATCH_SIZE,
    "optimizer": "adam",
    "lr": 3e-3,
    "min_lr": 1e-4,
    "lr_decay_style": "cosine",
    "lr_warmup_iters": 2,
    "lr_warmup_fraction": None,
    "lr_decay_iters": None,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.98,
    "adam_eps": 1e-8,
    "clip_grad": 1.0,
}


TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
SGD = {"optimizer": "sgd", "sgd_momentum": 0.8, "use_distributed_optimizer": False}
OF_TORCH = {
    "adam": functools.partial(torch.optim.AdamW, betas=(0.9, 0.98), eps=1e-8),
    "sgd": functools.partial(torch.optim.SGD, momentum=0.8),
}


def _sequences():
    generator = torch.Generator().manual_seed(3)
    lengths = (16, 40, 8, 24)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def _learning_rate(step):
    """Linear warmup over 2 steps, then cosine from 3e-3 to 1e-4 up to step 10."""
    if step <= 2:
        return 3e-3 * step / 2
    return 1e-4 + (3e-3 - 1e-4) * 0.5 * (1 + math.cos(math.pi * (step - 2) / 8))


def _reference(model, name="adam"):
    """Gradient norms per step and the weights after all steps, by transformers and torch.optim."""
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    plain = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = OF_TORCH[name](groups, lr=0.0)
    sequences = _sequences()
    tokens = sum(len(sequence) - 1 for sequence in sequences)
    norms = []
    for step in range(STEPS):
        losses = [
            F.cross_entropy(model(torch.tensor([s])).logits[0, :-1], torch.tensor(s[1:]), reduction="sum")
            for s in sequences
        ]
        optimizer.zero_grad()
        (sum(losses) / tokens).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step)
        optimizer.step()
    return norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


def _start_training(args):
    from tests.support.processes import megatron_worker as megatron

    chunks = megatron.load_model(args)
    from slime.backends.megatron_utils.optimizer import build_optimizer_and_scheduler

    return chunks, *build_optimizer_and_scheduler(args, chunks)


def _train(chunks, optimizer, scheduler, steps):
    """(gradient norm, learning rate used) per step; each data-parallel rank takes its share of the sequences."""
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    from tests.support.processes import megatron_worker as megatron

    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    sequences = _sequences()
    tokens = sum(len(sequence) - 1 for sequence in sequences)
    history = []
    for _ in range(steps):
        chunks[0].zero_grad_buffer()
        optimizer.zero_grad()
        mine = sequences[rank::size]
        loss = megatron.next_token_loss(megatron.packed_forward(chunks[0], mine), mine)
        (loss / tokens * size).backward()
        finalize_model_grads(chunks)
        learning_rate = optimizer.param_groups[0]["lr"]
        _, norm, _ = optimizer.step()
        scheduler.step(increment=GLOBAL_BATCH_SIZE)
        history.append((float(norm), learning_rate))
    return history


def _export(args, chunks):
    from tests.support.processes.megatron_worker import whole_weights

    return whole_weights(args, chunks)


def _save_then_load_into_fresh_ones(args, directory, training):
    """Save after half of the steps and train on from the saved state with new objects."""
    from pathlib import Path

    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    from slime.backends.megatron_utils.parameter_names import unwrap_model
    from tests.support.processes import megatron_worker as megatron

    chunks, optimizer, scheduler = training
    if dist.get_rank() == 0:
        Path(directory).mkdir()
    dist.barrier()
    dist_checkpointing.save(megatron.sharded_state(chunks, optimizer, is_loading=False), directory)
    schedule = copy.deepcopy(scheduler.state_dict())

    args.num_rollout = 20  # a longer run: Megatron would refuse the other length of the schedule
    args.lr_decay_iters = 10
    chunks, optimizer, scheduler = _start_training(args)
    with torch.no_grad():
        state = dist_checkpointing.load(megatron.sharded_state(chunks, optimizer, is_loading=True), directory)
        unwrap_model(chunks[0]).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(schedule)
    return chunks, optimizer, scheduler


def _worker(hf_dir, layouts, checkpoint):
    results = []
    for layout in layouts:
        args = tiny_args(hf_dir, **{**SCHEDULE, **layout})
        training = _start_training(args)
        history = _train(*training, STEPS)
        results.append((history, _export(args, training[0])))

    args = tiny_args(hf_dir, **{**SCHEDULE, **layouts[-1]})
    training = _start_training(args)
    history = _train(*training, STEPS // 2)
    training = _save_then_load_into_fresh_ones(args, checkpoint, training)
    history += _train(*training, STEPS - STEPS // 2)
    resumed = (history, _export(args, training[0]))
    return results, resumed


@pytest.mark.parametrize(
    ("optimizer", "world_size", "layouts"),
    [
        ("adam", 1, [{}]),
        ("adam", 2, [TENSOR, {"use_distributed_optimizer": False}, {}]),
        pytest.param("sgd", 2, [{**SGD, **TENSOR}, SGD], marks=pytest.mark.slow),
    ],
    ids=["one rank", "two ranks", "two ranks, SGD"],
)
def test_training_equals_that_of_torch_and_resumes_bitwise(tmp_path, optimizer, world_size, layouts):
    norms, weights = _reference(write_tiny_model(tmp_path / "hf", vocab_size=VOCABULARY), optimizer)
    arguments = (str(tmp_path / "hf"), layouts, str(tmp_path / "checkpoint"))
    for results, resumed in run_distributed(_worker, world_size, arguments):
        for history, trained in results:
            for step, (norm, learning_rate) in enumerate(history):
                assert norm == pytest.approx(norms[step], rel=1e-5)
                assert learning_rate == pytest.approx(_learning_rate(step), abs=1e-12)
            for name, expected in weights.items():
                torch.testing.assert_close(trained[name], expected, rtol=0, atol=2e-5, msg=name)
        history, trained = results[-1]
        assert resumed[0] == history
        assert all(torch.equal(resumed[1][name], trained[name]) for name in trained)


def _bfloat16_worker(hf_dir):
    args = tiny_args(hf_dir, bf16=True, **SCHEDULE)
    training = _start_training(args)
    history = _train(*training, STEPS)
    return history, _export(args, training[0])


def test_bfloat16_stays_near_float32(tmp_path):
    norms, weights = _reference(write_tiny_model(tmp_path / "hf", vocab_size=VOCABULARY))
    ((history, trained),) = run_distributed(_bfloat16_worker, 1, (str(tmp_path / "hf"),))
    assert [norm for norm, _ in history] == pytest.approx(norms, rel=0.05)
    for name, expected in weights.items():
        assert trained[name].dtype == torch.bfloat16
        torch.testing.assert_close(trained[name].float(), expected, rtol=0.02, atol=0.02, msg=name)


def _schedule_worker():
    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    from slime.arguments.sizes import train_iterations
    from slime.backends.megatron_utils.optimizer import OptimizerParamScheduler, build_optimizer_config
    from slime.training.parameter_schedule import schedule_settings

    def scheduler(**changes):
        args = default_args(**{**SCHEDULE, **changes})
        optimizer = SimpleNamespace(param_groups=[{"wd_mult": 0.5}, {}])
        return OptimizerParamScheduler(optimizer, **schedule_settings(args))

    found = {
        "iterations": train_iterations(default_args(**{**SCHEDULE, "global_batch_size": 3})),
        "fraction": scheduler(lr_warmup_fraction=0.3).lr_warmup_steps,
        "decay_iterations": scheduler(lr_decay_iters=7).lr_decay_steps,
        "weight_decay": [group["weight_decay"] for group in scheduler().optimizer.param_groups],
        "no_minimum": build_optimizer_config(default_args(lr=1.0)).min_lr,
    }
    of_phase = scheduler(lr_decay_style="WSD", lr_wsd_decay_iters=8)
    found["last_phase"] = (of_phase.wsd_decay_steps, of_phase.lr_decay_steps - of_phase.lr_warmup_steps)
    wrong = {
        "empty": {"num_rollout": 0},
        "warmup": {"lr_warmup_iters": 10},
        "long_phase": {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 9},
    }
    for name, changes in wrong.items():
        try:
            scheduler(**changes)
        except ValueError as error:
            found[name] = str(error)
    return found


def test_schedule_counts_rollouts():
    (found,) = run_distributed(_schedule_worker, 1)
    assert found["iterations"] == 10 * 2 * 2 // 3
    assert found["fraction"] == 12  # .3 of 10 iterations of 4 rollouts
    assert found["decay_iterations"] == 28
    assert found["weight_decay"] == [0.05, 0.1]
    assert found["no_minimum"] == 0.0
    assert "--num-rollout 0" in found["empty"]
    assert "--lr-warmup-iters" in found["warmup"]
    assert found["last_phase"] == (32, 32) and "--lr-wsd-decay-iters" in found["long_phase"]


def test_the_norm_of_all_tensors_is_that_of_their_norms_and_nothing_is_waited_for():
    # It imports Megatron: seconds, which this test alone costs then, and not whoever collects it.
    from slime.backends.megatron_utils.optimizer import l2_norm

    tensors = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (1, 7, 300, 4096)]
    for dtype in (torch.float32, torch.bfloat16):
        of_dtype = [tensor.to(dtype) for tensor in tensors]
        with Waiting() as waiting, counted_waits() as counted:
            norm, per_tensor = l2_norm(2048 * 32, torch.zeros(1, dtype=torch.int), [of_dtype], False)
        assert waiting.operations == [] and not counted
        expected = torch.norm(torch.tensor([[float(torch.norm(tensor.float())) for tensor in of_dtype]]))
        assert (
            norm.tolist() == pytest.approx([float(expected)], rel=1e-6)
            and norm.dtype == torch.float32
            and per_tensor is None
        )


def test_what_an_update_will_take_is_counted_in_the_dtypes_of_each_adam():
    """Transformer Engine's is not installed here. What is in host memory takes nothing of the device."""
    from slime.backends.megatron_utils.adam import HostShare, PrecisionAwareAdam
    from slime.backends.megatron_utils.optimizer import bytes_to_come

    weight = torch.nn.Parameter(torch.zeros(10, dtype=torch.bfloat16))
    dtypes = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.float32, "master_param": torch.float32}

    def of_engine(state=(), **values):
        inner = SimpleNamespace(
            param_groups=[{"params": [weight]}], state=dict(state), name_to_dtype_map=dtypes, **values
        )
        return bytes_to_come(SimpleNamespace(optimizer=inner))

    assert of_engine() == 10 * (2 + 4)
    assert of_engine(master_weights=True) == 10 * (2 + 4 + 4)
    assert of_engine(master_weights=True, store_param_remainders=True) == 10 * (2 + 4 + 2)
    assert of_engine({weight: {"exp_avg": weight}}) == 0
    for momentum, size in ((0.9, 10 * 2), (0.0, 0)):
        sgd = torch.optim.SGD([weight], lr=1.0, momentum=momentum)
        assert bytes_to_come(SimpleNamespace(optimizer=sgd)) == size

    def of_ours(**settings):
        return bytes_to_come(SimpleNamespace(optimizer=PrecisionAwareAdam([weight], lr=1.0, **settings)))

    assert of_ours(exp_avg_dtype=torch.bfloat16) == 10 * (2 + 4 + 2)
    assert of_ours(store_param_remainders=False, master_weight_dtype=torch.float16) == 10 * (4 + 4 + 2)
    assert of_ours(host=HostShare(fraction=1.0)) == 0


def test_transformer_engines_adam_is_not_told_which_parameters_have_remainders():
    """It asks when it creates their states; Megatron calls it with the parameter alone, and its own step with an answer."""
    from slime.backends.megatron_utils.optimizer import creating_states_alone

    class FusedAdam(torch.optim.SGD):
        store_param_remainders = True

        def initialize_state(self, param, store_param_remainders):
            self.state[param]["has_remainder"] = store_param_remainders

    weights = [torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)]
    adam = creating_states_alone(FusedAdam)(weights)
    for remainders, expected in ((True, [True, False]), (False, [False, False])):
        adam.store_param_remainders = remainders
        for weight in weights:
            adam.initialize_state(weight)
        assert [adam.state[weight]["has_remainder"] for weight in weights] == expected
    adam.initialize_state(weights[0], True)
    assert adam.state[weights[0]]["has_remainder"]


def test_layers_in_fp8_change_nothing_about_the_optimizer(monkeypatch):
    """Transformer Engine is not there. Its Adam is stood in for by the arguments that Megatron looks for."""
    from megatron.core.optimizer import distrib_optimizer, optimizer_config

    from slime.backends.megatron_utils.optimizer import build_optimizer_config

    class FusedAdam:
        def __init__(self, master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype, use_decoupled_grad):
            pass

    for name in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[name].FusedAdam = FusedAdam
    monkeypatch.setattr(distrib_optimizer, "USING_TE_OPTIMIZER", True)
    monkeypatch.setattr(optimizer_config, "is_te_min_version", lambda version: True)
    flags = {
        "bf16": True,
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": "bf16",
        "use_distributed_optimizer": True,
    }
    plain = build_optimizer_config(default_args(lr=1.0, **flags))
    assert plain.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8"):
        assert build_optimizer_config(default_args(lr=1.0, fp8="e4m3", fp8_recipe=recipe, **flags)) == plain
