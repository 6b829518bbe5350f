"""What flags have training ranks do beside their optimizer steps: collect, wait, compare, measure."""

import datetime
import gc
import math
import time
from types import SimpleNamespace

import pytest
import torch

from slime.backends.megatron_utils import initialize
from slime.utils.device import Accelerator
from slime.utils.errors import RunError
from tests.support.models.args import default_args
from tests.support.models.tiny_model import write_tiny_mixture, write_tiny_model
from tests.support.processes.distributed import run_distributed
from tests.support.processes.layout_steps import LayoutRun, assert_equal_runs, layout_args, train_steps
from tests.support.processes.resumed_run import digest, lines_of_slime

TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
DATA = {"data_parallel_size": 2}
SPREAD = {**TENSOR, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
EXPERTS = {**DATA, "expert_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}


class Recording(Accelerator):
    """A device that notes what it is asked for."""

    def __init__(self):
        self.calls = []

    def synchronize(self):
        self.calls.append("synchronize")

    def release_cached_memory(self):
        self.calls.append("release")


@pytest.fixture
def device(monkeypatch):
    device = Recording()
    monkeypatch.setattr(initialize, "get_accelerator", lambda: device)
    return device


def calls_of_steps(device, count=3, **flags):
    """What the device is asked for, by step: before the update, and after the step."""
    housekeeping = initialize.Housekeeping(default_args(**flags))
    found = []
    for _ in range(count):
        housekeeping.before_update()
        before = device.calls.copy()
        device.calls.clear()
        housekeeping.after_step()
        found.append((before, device.calls.copy()))
        device.calls.clear()
    return found


def test_nothing_is_done_unasked(device):
    assert calls_of_steps(device) == [([], [])] * 3
    assert gc.isenabled()


def test_the_device_is_waited_for_at_the_interval(device):
    assert calls_of_steps(device, train_sync_interval=2) == [([], []), ([], ["synchronize"]), ([], [])]


def test_unused_memory_is_given_back_before_updates_and_at_the_second_level_after_them(device):
    assert calls_of_steps(device, 1, empty_unused_memory_level=1) == [(["release"], [])]
    assert calls_of_steps(device, 1, empty_unused_memory_level=2) == [(["release"], ["release"])]


@pytest.mark.parametrize("interval, expected", [(0, [1, 1, 1]), (2, [1, 2, 2])])
def test_garbage_is_collected_at_the_interval_and_by_nobody_else(interval, expected):
    collections = []

    def note(phase, info):
        if phase == "stop" and info["generation"] == 2:
            collections.append(info)

    gc.callbacks.append(note)
    try:
        housekeeping = initialize.Housekeeping(default_args(manual_gc=True, manual_gc_interval=interval))
        housekeeping.begin()
        found = []
        for _ in range(3):
            assert not gc.isenabled()
            housekeeping.after_step()
            found.append(len(collections))
        housekeeping.close()
        assert gc.isenabled() and found == expected
    finally:
        gc.enable()
        gc.callbacks.remove(note)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    write_tiny_model(root / "tied", tied=True, vocab_size=128)
    write_tiny_mixture(root / "experts", "qwen2_moe", vocab_size=128)
    return root


def limited(args):
    """Limits of this rank's groups, in seconds, before and after the first step; then how long rank 0 waits for one that does
    not come, and what it is told."""
    import torch.distributed as dist

    run = LayoutRun(args)
    from megatron.core import parallel_state

    groups = parallel_state.get_data_parallel_group(), dist.group.WORLD

    def limits():
        return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]

    before = limits()
    run.prepare()
    run.step()
    after, start, told = limits(), time.monotonic(), ""
    if dist.get_rank() == 0:
        try:
            dist.all_reduce(torch.zeros(1), group=groups[0])
        except RuntimeError as error:
            told = str(error)
    return before, after, time.monotonic() - start, told


def test_after_the_first_step_ranks_wait_for_each_other_for_less_time(root):
    args = layout_args(root / "tied", **DATA, distributed_timeout_minutes=7, distributed_timeout_seconds_after_init=2)
    (before, after, seconds, told), (*_, other, _) = run_distributed(limited, 2, (args,))
    assert before[0] == datetime.timedelta(minutes=7)
    assert set(after) == {datetime.timedelta(seconds=2)}
    assert "imed out" in told or "closed by peer" in told or "onnection" in told
    assert seconds < 60 and other < 1


def compared(cases):
    """By case: what a run is told in which of three steps, when a weight of rank 1 was changed before the first."""
    import torch.distributed as dist

    found = {}
    for name, (args, changed) in cases.items():
        # No file has biases for the routers of this family.
        run = LayoutRun(args, loads=not args.moe_router_enable_expert_bias)
        run.prepare()
        from slime.backends.megatron_utils.parameter_names import global_named_weights

        weights = dict(global_named_weights(run.model[0]))
        if changed is not None and dist.get_rank() == 1:
            with torch.no_grad():
                weights[changed].view(-1)[0] += 1e-3
        found[name] = None
        for step in range(3):
            try:
                run.step()
            except RunError as error:
                found[name] = step, str(error)
                break
    return found


def test_replicas_that_differ_end_the_run_by_name(root):
    norm, dense = "decoder.final_layernorm.weight", {"use_distributed_optimizer": False, **DATA}
    expert = "decoder.layers.1.mlp.experts.local_experts.2.linear_fc2.weight"
    bias, biased = "decoder.layers.1.mlp.router.expert_bias", {"moe_router_score_function": "sigmoid"}
    interval = {"check_weight_hash_across_dp_replicas_interval": 2}
    cases = {
        "equal": (layout_args(root / "tied", **dense, **interval), None),
        "norm": (layout_args(root / "tied", **dense, **interval), norm),
        "expert": (layout_args(root / "experts", **dense, **interval), expert),
        "bias": (
            layout_args(root / "experts", **dense, **interval, **biased, moe_router_enable_expert_bias=True),
            bias,
        ),
        "unasked": (layout_args(root / "tied", **dense), norm),
    }
    first, second = run_distributed(compared, 2, (cases,))
    assert first == second
    assert first["equal"] is first["unasked"] is None
    for case, name in {"norm": norm, "expert": expert, "bias": bias}.items():
        step, message = first[case]
        assert step == 1
        assert message.startswith("--check-weight-hash-across-dp-replicas-interval 2: after rollout 0, step 0")
        assert f"{name} differs on ranks 1. Resume from a checkpoint" in message


def norms(cases):
    """By case: the norm that a step tells, and that of the weights of an export after it."""
    found = {}
    for name, args in cases.items():
        run = LayoutRun(args)
        run.prepare()
        told = run.step().get("params_norm")
        squares = [float((weight.astype("float64") ** 2).sum()) for weight in run.weights().values()]
        found[name] = told, math.sqrt(sum(squares))
    return found


def test_the_norm_of_all_weights_counts_each_once(root):
    flags = {"log_params_norm": True, "padded_vocab_size": 128}
    one = {name: layout_args(root / name, **flags) for name in ("tied", "experts")}
    one["unasked"] = layout_args(root / "tied")
    (found,) = run_distributed(norms, 1, (one,))
    assert found.pop("unasked")[0] is None
    layouts = {
        ("tied", "tensor"): TENSOR, ("tied", "pipeline"): PIPELINE, ("tied", "data"): DATA, ("tied", "context"): CONTEXT,
        ("experts", "spread"): SPREAD, ("experts", "data"): EXPERTS, ("experts", "cut"): TENSOR,
    }  # fmt: skip
    cases = {case: layout_args(root / case[0], **flags, **sizes) for case, sizes in layouts.items()}
    for rank in [found, *run_distributed(norms, 2, (cases,))]:
        for told, expected in rank.values():
            assert told == pytest.approx(expected, rel=1e-6)


def throughputs(cases):
    """By case what a step tells that takes 1.5 s on the first rank and 2.5 s on the second, and the lengths of this rank's
    samples."""
    import torch.distributed as dist

    from slime.training import train_step

    found = {}
    for name, args in cases.items():
        run = LayoutRun(args)
        run.prepare()
        clock = iter([0.0, 1.5 + dist.get_rank()])
        train_step.time = SimpleNamespace(perf_counter=lambda clock=clock: next(clock))
        told = run.step()
        lengths = [len(tokens) for tokens in run.data["tokens"]]
        found[name] = told.get("tflops_per_gpu"), told.get("world_size"), lengths
    return found


def test_operations_per_second_are_those_of_all_samples_over_all_ranks(root):
    from slime.models.shape_of_flags import calculate_fwd_flops

    flags = {"log_throughput": True, "log_world_size_to_tensorboard": True}
    cases = {
        name: layout_args(root / "tied", **flags, **sizes) for name, sizes in {"data": DATA, "context": CONTEXT}.items()
    }
    ranks = run_distributed(throughputs, 2, ({**cases, "unasked": layout_args(root / "tied", **DATA)},))
    # Of a context-parallel group each rank has all of them.
    (*_, lengths), (*_, same) = (rank["context"] for rank in ranks)
    assert lengths == same and sorted(lengths) == sorted(length for rank in ranks for length in rank["data"][2])
    # A backward pass is two more.
    expected = 3 * calculate_fwd_flops(lengths, cases["data"]) / (1.5 + 2.5) / 1e12
    for rank in ranks:
        assert rank["unasked"][:2] == (None, None)
        for name in cases:
            assert rank[name][:2] == (pytest.approx(expected), 2.0), name


TIMERS = {
    1: ["forward-backward", "all-grads-sync", "optimizer-inner-step", "params-all-gather"],
    2: ["forward-compute", "backward-compute"],
}
# A stage alone has the one or the other.
MESSAGES = ["forward-send", "forward-recv"]


def timed_steps(cases):
    """By case, what this rank says while it takes a step, and the weights behind it."""
    found = {}
    for name, args in cases.items():
        run = LayoutRun(args)
        run.prepare()
        with lines_of_slime() as lines:
            run.step()
        found[name] = [line for line in lines if "across ranks" in line], digest(run.backend.model[0].parameters())
    return found


def test_timers_of_megatron_are_told_by_the_first_rank_for_all(root):
    flags = {"unasked": {}, **{level: {"timing_log_level": level} for level in TIMERS}}
    flags["each"] = {"timing_log_level": 2, "timing_log_option": "all"}
    for layout, messages in ((DATA, []), (PIPELINE, MESSAGES)):
        cases = {name: layout_args(root / "tied", **values, **layout) for name, values in flags.items()}
        first, second = run_distributed(timed_steps, 2, (cases,))
        assert not any(lines for lines, _ in second.values())
        nothing, unwatched = first.pop("unasked")
        assert not nothing
        for name, ((line,), weights) in first.items():
            assert line.startswith("rollout 0, step 0: ")
            expected = TIMERS[1] if name == 1 else TIMERS[1] + TIMERS[2] + messages
            told = [
                timer
                for timer in (*TIMERS[1], *TIMERS[2], *MESSAGES)
                if f"    {timer} ." in line or f"  {timer}:" in line
            ]
            assert told == expected, (layout, name, line)
            assert "rank  1: " in line if name == "each" else "(min, max) time" in line
            # They look on.
            assert weights == unwatched


def random_starts(cases):
    """By case: a random number as dropout draws them, and a random matrix of the model, drawn as on a GPU."""
    from tests.support.processes import megatron_worker as megatron

    found = {}
    for name, args in cases.items():
        megatron.start(args)
        number = torch.rand(()).item()
        from slime.backends.megatron_utils import model_provider, transformer_config

        transformer_config.get_accelerator = lambda: SimpleNamespace(name="cuda")
        (chunk,) = model_provider.setup_model(args)
        found[name] = number, {name: weight.detach().numpy().copy() for name, weight in chunk.named_parameters()}
    return found


def test_data_parallel_ranks_draw_apart_and_start_alike(root):
    flags = {"apart": {"data_parallel_random_init": True}, "together": {}}
    cases = {name: layout_args(root / "experts", **EXPERTS, **flags[name]) for name in flags}
    first, second = run_distributed(random_starts, 2, (cases,))
    assert first["together"][0] == second["together"][0] == first["apart"][0]
    assert first["apart"][0] != second["apart"][0]
    shared = [name for name in first["apart"][1] if ".experts." not in name]
    assert len(shared) > 10
    for case in flags:
        assert all((first[case][1][name] == second[case][1][name]).all() for name in shared)


def buckets(cases):
    """By case: gradient buckets of this rank."""
    from tests.support.processes import megatron_worker as megatron

    found = {}
    for name, args in cases.items():
        (chunk,) = megatron.load_model(args)
        found[name] = sum(len(buffer.buckets) for buffer in chunk.buffers)
    return found


def test_gradients_travel_in_as_many_buckets_as_asked_for(root):
    """Not more, and hardly fewer: a bucket ends behind a whole weight."""
    counts = {"one": 1, "four": 4}
    cases = {
        name: layout_args(root / "tied", **DATA, overlap_grad_reduce=True, ddp_num_buckets=n)
        for name, n in counts.items()
    }
    for rank in run_distributed(buckets, 2, (cases,)):
        assert rank["one"] == 1 and 3 <= rank["four"] <= 4


def reduced(args):
    """The largest distance of this rank's shard of reduced gradients from their sum, in float32, rounded once; and from the
    shard that is added up in 16 bits."""
    import torch.distributed as dist

    from tests.support.processes import megatron_worker as megatron

    (chunk,) = megatron.load_model(args)
    (buffer,) = chunk.buffers
    rank, ranks = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(rank)
    buffer.grad_data.copy_(torch.randn(buffer.grad_data.shape, generator=draw))
    # Megatron averages.
    parts = [torch.empty_like(buffer.grad_data) for _ in range(ranks)]
    dist.all_gather(parts, buffer.grad_data / ranks)
    chunk.finish_grad_sync()
    in_16_bits = parts[0]
    for part in parts[1:]:
        in_16_bits = in_16_bits + part
    expected = sum(part.float() for part in parts).bfloat16()
    own = slice(rank * len(expected) // ranks, (rank + 1) * len(expected) // ranks)
    distances = [(buffer.grad_data - other)[own].abs().max().item() for other in (expected, in_16_bits)]
    return buffer.grad_data.dtype, distances


def test_gradients_of_16_bits_may_be_added_in_32(root):
    """Of three and more ranks: of two the sum is rounded once in any case."""
    args = layout_args(
        root / "tied", bf16=True, grad_reduce_in_bf16=True, accumulate_allreduce_grads_in_fp32=False,
        ddp_reduce_scatter_with_fp32_accumulation=True, data_parallel_size=4,
    )  # fmt: skip
    for dtype, (exact, rounded) in run_distributed(reduced, 4, (args,)):
        assert dtype == torch.bfloat16 and exact == 0 and rounded > 0


def ordered(cases):
    """What `train_steps` gives, and by case (data rank, stage) of this rank."""
    from megatron.core import parallel_state

    found = {}
    for name, args in cases.items():
        steps = train_steps({name: args})[name]
        place = parallel_state.get_data_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
        found[name] = steps, place
    return found


@pytest.mark.slow
def test_stages_may_stand_beside_each_other(root):
    """Ranks that follow each other are stages of one pipeline, in place of data-parallel ranks of one stage."""
    sizes = {**PIPELINE, **DATA}
    cases = {name: layout_args(root / name, **sizes, use_tp_pp_dp_mapping=True) for name in ("tied", "experts")}
    cases["usual"] = layout_args(root / "tied", **sizes)
    (one,) = run_distributed(train_steps, 1, ({name: layout_args(root / name) for name in ("tied", "experts")},))
    ranks = run_distributed(ordered, 4, (cases,), timeout=300)
    assert [rank["tied"][1] for rank in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [rank["usual"][1] for rank in ranks] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    for name in ("tied", "experts"):
        assert_equal_runs([rank[name][0] for rank in ranks], one[name])
