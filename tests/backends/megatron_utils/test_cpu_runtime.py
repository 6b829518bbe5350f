"""Each lift is needed: without it, and only it, the wheel fails on CPU. If one of these tests fails, the installed
megatron-core no longer makes that assumption and the lift can go."""

import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

import pytest

from slime.backends.megatron_utils import cpu_runtime
from tests.support.models.tiny_model import tiny_args, write_tiny_model
from tests.support.processes.distributed import run_distributed

TRAINING = {
    "num_rollout": 1,
    "rollout_batch_size": 1,
    "n_samples_per_prompt": 1,
    "global_batch_size": 1,
    "optimizer": "adam",
    "lr": 1e-3,
    "lr_decay_style": "constant",
    "weight_decay": 0.0,
    "clip_grad": 1.0,
    "log_num_zeros_in_grad": True,
}
EXPERTS = {
    "num_experts": 3, "moe_router_topk": 2, "moe_ffn_hidden_size": 16, "moe_router_load_balancing_type": "none",
    "moe_shared_expert_intermediate_size": 16, "moe_shared_expert_overlap": True,
}  # fmt: skip
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _import_megatron():
    import megatron.core.models.gpt
    import megatron.core.optimizer  # noqa: F401


def _check_imports(moment):
    if "torch._dynamo" in sys.modules:
        raise RuntimeError(f"{moment} imported the compiler")


def _refuse_copies_in_place():
    """Megatron takes these functions over when it is imported."""
    import torch.distributed as dist

    def refusing(collective):
        def call(output, input_, *args, **kwargs):
            if output.data_ptr() == input_.data_ptr():
                raise RuntimeError(f"{collective.__name__} copied what was in its place")
            return collective(output, input_, *args, **kwargs)

        return call

    for name in ("reduce_scatter_tensor", "all_gather_into_tensor"):
        setattr(dist, name, refusing(getattr(dist, name)))


def _check_seeds(args):
    import torch

    from tests.support.processes import megatron_worker as megatron

    drawn = set()
    for args.seed in (1, 2):
        megatron.start(args)
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        with get_cuda_rng_tracker().fork():
            drawn.add(torch.rand(()).item())
    if len(drawn) == 1:
        raise RuntimeError("the seed has no effect")


def _train(args):
    """One packed training step with dropout and recomputation through Megatron's schedule; experts start at random."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from tests.support.processes import megatron_worker as megatron

    if getattr(args, "num_experts", None):
        megatron.start(args)
        from slime.backends.megatron_utils.model_provider import setup_model

        chunks = setup_model(args)
    else:
        chunks = megatron.load_model(args)
    from slime.backends.megatron_utils.optimizer import build_optimizer_and_scheduler

    optimizer, _ = build_optimizer_and_scheduler(args, chunks)
    config = chunks[0].config
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    sequences = [[1, 2, 3, 4], [5, 6]]

    def forward_step(_, chunk):
        logits = megatron.packed_forward(chunk, sequences)
        return logits, lambda output: (megatron.next_token_loss(output, sequences), {})

    chunks[0].train()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=None,
        model=chunks,
        num_microbatches=1,
        seq_length=6,
        micro_batch_size=1,
        forward_only=False,
    )
    optimizer.step()
    return chunks, optimizer


def _compute_in_parts():
    """A part of a pass, forwards and backwards, as the schedule has it that computes while tokens travel."""
    import torch
    from megatron.core.models.common import model_chunk_schedule_plan
    from megatron.core.pipeline_parallel import utils

    utils.set_streams()
    event = model_chunk_schedule_plan.torch.cuda.Event()
    part = utils.ScheduleNode(lambda given: 2 * given, utils.get_comm_stream(), event, free_input=True)
    given = torch.ones(3, requires_grad=True) * 1
    gradient = part.forward(given).detach()
    if part.backward(gradient).tolist() != [4.0] * 3 or given.untyped_storage().size():
        raise RuntimeError("a part computed something else, or kept what it was to free")


def _save_and_load(chunks, optimizer):
    import torch
    from megatron.core import dist_checkpointing

    from tests.support.processes import megatron_worker as megatron

    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        dist_checkpointing.save(megatron.sharded_state(chunks, optimizer, is_loading=False), directory)
        loaded = dist_checkpointing.load(megatron.sharded_state(chunks, optimizer, is_loading=True), directory)
        optimizer.load_state_dict(loaded["optimizer"])


def _scenario(hf_dir, left_out):
    """Everything that training needs of the wheel, without the lifts `left_out`."""
    import torch.distributed as dist

    cpu_runtime.install(without=frozenset(left_out))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    _refuse_copies_in_place()
    _import_megatron()
    _check_imports("importing megatron.core")
    options = {**TRAINING, **RECOMPUTE, "hidden_dropout": 0.1}
    _check_seeds(tiny_args(hf_dir, **options))
    trained = _train(tiny_args(hf_dir, **options))
    _compute_in_parts()
    _check_imports("training")
    _save_and_load(*trained)
    _check_imports("a checkpoint")
    for precision in ({"bf16": True}, {"fp16": True, "initial_loss_scale": 1.0}):
        _train(tiny_args(hf_dir, **options, **precision))
    _train(tiny_args(hf_dir, **options, **EXPERTS))


def _error_in_fork(function, *args):
    """The last line of what `function` raised in a forked process, or None."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            function(*args)
        except BaseException as error:
            os.write(write, (f"{type(error).__name__}: {error}".splitlines()[0] or "error").encode()[:4000])
        for process in multiprocessing.active_children():  # of the checkpoint's writer
            process.kill()
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        outcome = pipe.read().decode()
    os.waitpid(child, 0)
    return outcome or None


def _run_each(hf_dir, left_out):
    """{lift left out: its error or None}, for this rank's part of `left_out`. Forked after torch and before megatron.core is
    imported: quick and clean."""
    import torch  # noqa: F401

    mine = left_out[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]
    return {lift: _error_in_fork(_scenario, hf_dir, [lift]) for lift in mine}


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("hf")
    write_tiny_model(directory, vocab_size=40, layers=1)
    return str(directory)


@pytest.fixture(scope="module")
def without_each(hf_dir):
    lifts = cpu_runtime.lift_names()
    first, second = run_distributed(_run_each, 2, (hf_dir, lifts), timeout=300, start_method="spawn")
    return {**first, **second}


@pytest.fixture(scope="module")
def errors(hf_dir):
    """Of what is tried in a process each, with all lifts: its error or None."""
    return run_distributed(_try_each, 1, (hf_dir,), start_method="spawn")[0]


def _try_each(hf_dir):
    import torch  # noqa: F401

    return {
        "scenario": _error_in_fork(_scenario, hf_dir, []),
        "torch": _error_in_fork(_look_at_torch),
        "kernels": _error_in_fork(_import_beside_kernels),
        "late": _error_in_fork(_install_too_late),
        "cuda": _error_in_fork(_install_with_cuda),
    }


def test_with_all_lifts_the_wheel_trains_saves_and_loads(errors):
    assert errors["scenario"] is None


# What one rank alone does not need.
UNEVEN_PARTS = "megatron.core.tensor_parallel.mappings"
DEFAULT_STREAM = "torch.cuda.default_stream"
OF_SEVERAL_RANKS = (UNEVEN_PARTS, DEFAULT_STREAM)


@pytest.mark.slow
@pytest.mark.parametrize("lift", [name for name in cpu_runtime.lift_names() if name not in OF_SEVERAL_RANKS])
def test_the_wheel_fails_without_the_lift(without_each, lift):
    assert without_each[lift] is not None


def _gather_uneven_parts(left_out):
    """What comes of one row of this rank and two rows of the other: gathered, and summed and given back; or the error."""
    import torch
    import torch.distributed as dist

    cpu_runtime.install(without=frozenset(left_out))
    dist.init_process_group("gloo")
    from megatron.core.tensor_parallel import mappings

    rank, sizes, group = dist.get_rank(), [1, 2], dist.group.WORLD
    found = []
    for own in (torch.full((sizes[rank], 2), float(rank + 1)), torch.empty(0, 2)):
        splits = sizes if len(own) else [0, 0]
        try:
            whole = mappings._gather_along_first_dim(own, group, splits)
            part = mappings._reduce_scatter_along_first_dim(whole * (rank + 1), group, splits)
        except RuntimeError as error:
            return str(error)
        found.append((whole.tolist(), part.tolist()))
    return found


@pytest.mark.slow
def test_ranks_may_bring_different_numbers_of_tokens():
    whole = [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    ranks = run_distributed(_gather_uneven_parts, 2, ([],), start_method="spawn")
    assert ranks == [[(whole, part), ([], [])] for part in ([[3.0, 3.0]], [[6.0, 6.0], [6.0, 6.0]])]
    assert all(
        "size" in error for error in run_distributed(_gather_uneven_parts, 2, ([UNEVEN_PARTS],), start_method="spawn")
    )


def _train_with_two_optimizers(hf_dir, left_out):
    """The error of a step of two ranks with an optimizer each, or None."""
    cpu_runtime.install(without=frozenset(left_out))
    options = {"data_parallel_size": 2, "num_distributed_optimizer_instances": 2, "overlap_grad_reduce": True}
    try:
        _train(tiny_args(hf_dir, **TRAINING, **options))
    except (AssertionError, RuntimeError) as error:
        return str(error)


@pytest.mark.slow
def test_optimizers_of_parts_of_the_ranks_need_streams(hf_dir):
    assert run_distributed(_train_with_two_optimizers, 2, (hf_dir, []), start_method="spawn") == [None, None]
    errors = run_distributed(_train_with_two_optimizers, 2, (hf_dir, [DEFAULT_STREAM]), start_method="spawn")
    assert all("CUDA" in error for error in errors)


def _look_at_torch():
    import sys

    import torch

    original = (torch.zeros, torch.compile, torch.Tensor.type, torch.cuda.current_device, torch.cuda.synchronize)
    cpu_runtime.install()
    finders = list(sys.meta_path)
    cpu_runtime.install()
    idempotent = sys.meta_path == finders
    import megatron.core.tensor_parallel as tensor_parallel

    seen = (torch.zeros, torch.compile, torch.Tensor.type, torch.cuda.current_device, torch.cuda.synchronize)
    assert seen == original
    assert idempotent
    assert tensor_parallel.random.torch.cuda.current_device().type == "cpu"


def test_only_megatron_sees_the_lifts(errors):
    assert errors["torch"] is None


# What the optimizers of megatron.core take from packages of kernels.
KERNELS = {
    "transformer_engine": "__version__ = '2.9.0'",
    "transformer_engine.pytorch.optimizers": "multi_tensor_applier = multi_tensor_l2norm = multi_tensor_scale = print\n"
    "class FusedAdam: pass\nclass FusedSGD: pass",
    "apex.multi_tensor_apply": "multi_tensor_applier = print",
    "apex.optimizers": "class FusedAdam: pass\nclass FusedSGD: pass",
    "amp_C": "multi_tensor_l2norm = multi_tensor_scale = print",
}


def _import_beside_kernels():
    import torch

    with tempfile.TemporaryDirectory() as directory:
        for name, code in KERNELS.items():
            place = Path(directory, *name.split("."), "__init__.py")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(code)
        sys.path.insert(0, directory)
        cpu_runtime.install()
        import megatron.core.optimizer as optimizer
        from megatron.core import utils
        from megatron.core.optimizer import clip_grads

    assert clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm
    assert clip_grads.multi_tensor_scale_impl is utils.local_multi_tensor_scale
    assert optimizer.USING_PYTORCH_OPTIMIZER and optimizer.Adam is torch.optim.AdamW


def test_kernels_that_are_installed_are_not_used_on_a_cpu(errors):
    """The host of a GPU has them, too."""
    assert errors["kernels"] is None


def _install_with_cuda():
    os.environ["SLIME_ACCELERATOR"] = "cuda"
    before = list(sys.meta_path)
    cpu_runtime.install()
    assert sys.meta_path == before


def test_does_nothing_where_the_accelerator_is_cuda(errors):
    assert errors["cuda"] is None


def _install_too_late():
    import megatron.core  # noqa: F401

    with pytest.raises(RuntimeError, match="before megatron.core is imported"):
        cpu_runtime.install()


def test_refuses_to_come_after_megatron(errors):
    assert errors["late"] is None
