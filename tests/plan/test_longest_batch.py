"""What the longest micro-batches of a run are, worked out by hand, and what is told of a probe with them."""

import pytest
import torch

from slime.arguments.config_files.role_config import critic_args
from slime.estimates.training_memory import worst_rank
from slime.plan import make_plan
from slime.plan.critic_memory import planned_critic
from slime.plan.longest_batch import (
    ProbedMemory,
    described,
    longest_micro_batches,
    out_of_memory,
    planned_peak,
    probe_line,
)
from slime.plan.setup import parallel_layout, step_memory
from slime.plan.structure import GIB
from tests.support.tables.plans import SMALL, TWO_NODES, planned

BUDGET = "--use-dynamic-batch-size --max-tokens-per-gpu 16384"
PROMPT, RESPONSE = "--rollout-max-prompt-len 1024", "--rollout-max-response-len 7168"
FEW = SMALL.replace("--rollout-batch-size 32 --n-samples-per-prompt 8 --num-steps-per-rollout 2",
    "--rollout-batch-size 2 --n-samples-per-prompt 2 --num-steps-per-rollout 1")  # fmt: skip
WITHOUT_SHARDS = SMALL.replace("--tensor-model-parallel-size 2 --sequence-parallel", "")
LONGEST = (8192, 8191)
FULL = " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def longest(command, *words, **changed):
    args = planned(command, *words)
    vars(args).update(changed)
    return longest_micro_batches(args)


@pytest.mark.parametrize(
    ("command", "words", "expected"),
    [
        # 16,384 tokens hold two of 1,024 + 7,168.
        (SMALL, [], [[LONGEST] * 2] * 2),
        # What is left of the budget holds a shorter one, all but a token of which may be a response.
        (SMALL, ["--max-tokens-per-gpu", "20000"], [[LONGEST, LONGEST, (3616, 3615)]] * 2),
        # A token alone is no sample.
        (SMALL, ["--max-tokens-per-gpu", "16385"], [[LONGEST] * 2] * 2),
        # Of each context-parallel rank.
        (SMALL, ["--context-parallel-size", "2"], [[LONGEST] * 4] * 2),
        # Above the budget a sample is alone, and not cut.
        (SMALL, ["--max-tokens-per-gpu", "5000"], [[LONGEST]] * 2),
        (SMALL, ["--max-tokens-per-gpu", "5000", "--context-parallel-size", "2"], [[LONGEST, (1808, 1807)]] * 2),
        # The other of two ranks has one of the four samples of a step, which has one micro-batch on each.
        (FEW, ["--max-tokens-per-gpu", "65536"], [[LONGEST] * 3]),
        (SMALL.replace(BUDGET, "--micro-batch-size 4"), [], [[LONGEST] * 4] * 2),
        # As many as the first stage holds at once.
        (WITHOUT_SHARDS, ["--pipeline-model-parallel-size", "4"], [[LONGEST] * 2] * 4),
        # Where nothing limits a sample, it is as long as the budget.
        (SMALL.replace(PROMPT, "").replace(RESPONSE, ""), [], [[(16384, 16383)]] * 2),
    ],
)  # fmt: skip
def test_the_longest_micro_batches_worked_out_by_hand(command, words, expected):
    assert longest(command, *words) == expected


def test_a_context_limits_both_sides_of_a_sample():
    assert longest(SMALL, rollout_max_context_len=4000) == [[*[(4000, 3999)] * 4, (384, 383)]] * 2


def test_without_any_limit_nothing_is_known():
    command = SMALL.replace(PROMPT, "").replace(RESPONSE, "").replace(BUDGET, "")
    # Megatron's length of sequences is assumed.
    assert longest(command, seq_length=4096) == [[(4096, 4095)]] * 2
    assert longest(command, seq_length=None) == []


def test_an_interleaved_pipeline_gets_two_groups():
    words = ["--pipeline-model-parallel-size", "4", "--num-virtual-stages-per-pipeline-rank", "3"]
    assert len(longest(WITHOUT_SHARDS, *words)) == 8


def test_of_functions_that_make_more_samples_the_budget_alone_is_known():
    words = ["--max-tokens-per-gpu", "65536"]
    assert len(longest(FEW, *words, custom_generate_function_path="a.b")[0]) == 8
    assert len(longest(FEW, *words, rollout_function_path="mine.generate")[0]) == 8


def test_the_plan_beside_it_is_that_of_these_micro_batches():
    args = planned(TWO_NODES)
    batches = longest_micro_batches(args)
    # 32,768 tokens are above the budget of 20,480.
    assert batches == [[(32768, 32767)]] * 2
    expected = worst_rank(step_memory(args, parallel_layout(args), 32768, 2)).total
    assert planned_peak(args, batches) == expected > planned_peak(args, [[(20480, 100)]] * 2)
    args.train_backend = "fsdp"
    assert planned_peak(args, batches) is None
    # Two ranks share the tokens.
    args = planned(SMALL, "--context-parallel-size", "2")
    expected = worst_rank(step_memory(args, parallel_layout(args), 16384, 2)).total
    assert planned_peak(args, longest_micro_batches(args)) == expected


def test_the_plan_beside_that_of_a_critic_is_of_a_critic():
    """It has no layers that predict further tokens, and sends nothing to engines."""
    args = planned(SMALL, "--advantage-estimator", "ppo", "--mtp-num-layers", "1", "--enable-mtp-training")
    critic, batches = critic_args(args), longest_micro_batches(args)
    expected = worst_rank(step_memory(planned_critic(critic), parallel_layout(critic), 16384, 2)).total
    assert planned_peak(critic, batches) == expected
    # Of the actor the same plan is another one: the two of them would not be told apart otherwise.
    assert worst_rank(step_memory(critic, parallel_layout(critic), 16384, 2)).total > expected


def test_the_line_tells_the_rank_with_most():
    args, batches = planned(SMALL), [[LONGEST] * 2] * 2
    ranks = [
        ProbedMemory(GIB, 2 * GIB, {"log-probs": 4 * GIB, "a step": peak * GIB}, free * GIB, 80 * GIB)
        for peak, free in ((5, 70), (7, 71))
    ]
    plan = planned_peak(args, batches) / GIB
    assert probe_line(args, batches, ranks) == (
        "memory probe of the actor, 2 micro-batches of 16384 tokens (2 samples, the longest 8192): rank 1: peak of tensors "
        "log-probs 4.00 GiB, a step 7.00 GiB (1.00 GiB before it; 2.00 GiB held for optimizer state to come); planned "
        f"{plan:.2f} GiB; free at least 70.00 of 80.00 GiB on the device of a rank"
    )


def test_a_device_that_counts_no_peaks_has_none_to_tell():
    args, batches = planned(SMALL), [[LONGEST] * 2] * 2
    line = probe_line(args, batches, [ProbedMemory(GIB, 0, None, GIB, 4 * GIB)])
    assert "rank 0: the device counts no peaks of tensors; planned" in line


def test_prompts_that_no_flag_limits_are_named():
    args = planned(SMALL.replace(PROMPT, ""))
    assert described(args, longest_micro_batches(args)) == (
        "2 micro-batches of 16384 tokens (3 samples, the longest 7168, prompts not counted)"
    )
    args = planned(SMALL, "--context-parallel-size", "2", "--max-tokens-per-gpu", "4096")
    assert described(args, longest_micro_batches(args)) == (
        "2 micro-batches of 8192 tokens on 2 context-parallel ranks (a sample, the longest 8192)"
    )


@pytest.mark.parametrize(
    ("words", "lower", "give"),
    [
        ([], "--max-tokens-per-gpu", "--recompute-granularity full"),
        (["--max-tokens-per-gpu", "5000"], "--rollout-max-response-len", "--context-parallel-size"),
        (["--gradient-checkpointing"], "--max-tokens-per-gpu", "--tensor-model-parallel-size, --optimizer-cpu-offload"),
    ],
)
def test_an_error_names_the_flags_that_help(words, lower, give):
    args = planned(SMALL, *words)
    error = torch.OutOfMemoryError("Tried to allocate 5 GiB.\nmore")
    message = out_of_memory(args, "actor rank 3 in a step", longest_micro_batches(args), "79.00 GiB at the peak", error)
    assert message.startswith("--memory-probe: memory ran out on actor rank 3 in a step, with 2 micro-batches of ")
    assert f"Lower {lower}; or give a larger --context-parallel-size" in message and give in message
    assert "79.00 GiB at the peak" in message and message.endswith("--no-memory-probe (Tried to allocate 5 GiB.)")
    assert ("--recompute-granularity" in message) == ("--gradient-checkpointing" not in words)


def test_flags_that_help_do_not_contradict_those_of_the_run():
    experts = TWO_NODES.replace(FULL, "")
    for words, more in (((), ""), (("--moe-layer-recompute",), " without --moe-layer-recompute")):
        args = planned(experts, *words)
        message = out_of_memory(args, "actor rank 0", longest_micro_batches(args), "much", torch.OutOfMemoryError())
        assert f"{FULL.strip()}{more}, a larger --tensor-model-parallel-size" in message
        parts = make_plan(args).memory.training.parts
        assert any(f"{FULL.strip()}{more}, --max-tokens-per-gpu" in (part.lower or "") for part in parts)


def test_an_error_names_flags_of_static_micro_batches_and_of_fsdp():
    def told(command, **changed):
        args = planned(command)
        vars(args).update(changed)
        return out_of_memory(args, "actor rank 0 in a step", [[LONGEST] * 2], "much", torch.OutOfMemoryError())

    static = told(SMALL.replace(BUDGET, "--micro-batch-size 2"))
    assert "Lower --micro-batch-size, --rollout-max-response-len; or" in static and static.endswith(
        "(OutOfMemoryError)"
    )
    fsdp = told(SMALL, train_backend="fsdp", gradient_checkpointing=False, fsdp_cpu_offload=False)
    assert "give a larger --context-parallel-size, --gradient-checkpointing, --fsdp-cpu-offload; or go on" in fsdp
    fsdp = told(SMALL, train_backend="fsdp", gradient_checkpointing=True, fsdp_cpu_offload=True)
    assert "give a larger --context-parallel-size; or go on" in fsdp
