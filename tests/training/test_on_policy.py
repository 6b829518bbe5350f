"""`--true-on-policy-mode`: what is compared, over all ranks, and what a run that is stopped is told."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

from slime.algorithms.mismatch import WorstToken
from slime.training import on_policy
from slime.training.context_parallel import NO_CONTEXT_PARALLEL, ContextParallel
from slime.training.on_policy import Finding, OnPolicyProof, describe, expect_proof, is_proved, likely_cause
from slime.training.rollout_data import RolloutData
from slime.utils.errors import RunError, UserError
from tests.support.models.args import default_args, write_config
from tests.support.models.grpo_batch import ADVANTAGES, make_samples
from tests.support.models.tiny_model import write_tiny_model
from tests.support.models.train_steps import make_args, shard_of
from tests.support.oracles.device_waits import Waiting
from tests.support.processes.distributed import run_distributed

LIMIT = "--ci-train-rollout-logprob-abs-diff-threshold"
# Two samples of a prompt of one token and responses of 3 and 2, of which one token is not trained.
ENGINE = [[-1.0, -2.0, -3.0], [-0.5, -0.25]]
MASKS = [[1, 0, 1], [1, 1]]


def data_of(engine=ENGINE, cp=NO_CONTEXT_PARALLEL, **columns):
    lengths = [len(mask) for mask in MASKS]
    whole = {
        "tokens": [torch.zeros(length + 1, dtype=torch.int64) for length in lengths],
        "total_lengths": [length + 1 for length in lengths],
        "response_lengths": lengths,
        "loss_masks": [torch.tensor(mask, dtype=torch.int32) for mask in MASKS],
        "sample_indices": [40, 41],
        "positions": [0, 1],
        **({} if engine is None else {"rollout_log_probs": [torch.tensor(row) for row in engine]}),
        **columns,
    }
    return RolloutData.of_rank(whole, cp)


def proof_of(data, limit=0.0, **values):
    args = default_args(
        ci_train_rollout_logprob_abs_diff_threshold=limit, hf_checkpoint="/none", params_dtype_name="float32",
        rollout_num_gpus=0, on_gpus=None, **values,
    )  # fmt: skip
    groups = SimpleNamespace(is_last_stage=True, data_rank=0)
    return OnPolicyProof(args, "rollout 3, step 0", groups, data, [[0], [1]], group="alone")


@pytest.fixture
def one_rank(alone, monkeypatch):
    monkeypatch.setattr(on_policy, "all_reduce_max", lambda values, group: values)


def test_equal_log_probs_of_trained_tokens_go_on(one_rank):
    data = data_of()
    proof = proof_of(data)
    # What stands at the masked token is read by nobody.
    proof.compare(data.take([0]), torch.tensor([-1.0, math.nan, -3.0]))
    proof.compare(data.take([1]), torch.tensor([-0.5, -0.25]))
    proof.require()
    assert proof.largest == 0.0


def test_the_largest_difference_is_told_with_its_place(one_rank):
    data = data_of(weight_version_spans=[[("6", 0, 3)], [("6", 0, 1), ("5", 1, 2)]], live_weight_version=6)
    proof = proof_of(data)
    proof.compare(data.take([0]), torch.tensor([-1.0, 7.0, -3.5]))
    proof.compare(data.take([1]), torch.tensor([-0.5, -1.0]))
    with pytest.raises(RunError) as told:
        proof.require()
    assert proof.largest == 0.75
    assert str(told.value) == (
        "rollout 3, step 0: log-probs of engine and trainer differ by 0.75 at response token 1 of sample 41 (engine -0.25, "
        f"trainer -1), more than {LIMIT} 0 allows (--true-on-policy-mode); 2 of 4 trained tokens, in 2 of 2 samples, differ "
        "by more. Likely cause: weights of version 5 made the token, and the trainer has version 6: an engine missed a push. "
        "The weights are not updated; --save-debug-train-data shows the samples"
    )


@pytest.mark.parametrize(
    ("spans", "missed"),
    [
        # The end of a span is the first token that its weights did not make.
        ([("6", 0, 2), ("5", 2, 3)], True),
        ([("5", 0, 2), ("6", 2, 3)], False),
        ([("5", 0, 2)], False),
    ],
)
def test_a_push_was_missed_where_other_weights_made_the_very_token(one_rank, spans, missed):
    data = data_of(weight_version_spans=[spans, [("6", 0, 2)]], live_weight_version=6)
    proof = proof_of(data)
    proof.compare(data, torch.tensor([-1.0, -2.0, -4.0, -0.5, -0.25]))
    with pytest.raises(RunError, match="at response token 2 of sample 40") as told:
        proof.require()
    assert ("weights of version 5 made the token" in str(told.value)) == missed


def test_a_typed_threshold_is_a_bound_that_may_be_reached(one_rank):
    data = data_of()
    at, above = proof_of(data, 0.5), proof_of(data, 0.4999)
    for proof in (at, above):
        proof.compare(data, torch.tensor([-1.5, 0.0, -3.0, -0.5, -0.25]))
    at.require()
    assert at.largest == 0.5
    with pytest.raises(
        RunError, match=r"differ by 0\.5 at response token 0 of sample 40 .*; 1 of 4 trained tokens, in 1 of 2"
    ):
        above.require()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_no_equal_number(one_rank, value):
    data = data_of()
    proof = proof_of(data, limit=1e9)
    proof.compare(data, torch.tensor([-1.0, 0.0, value, -0.5, -0.25]))
    with pytest.raises(
        RunError, match="differ by inf at response token 2 of sample 40 .* its weights or logits are none"
    ):
        proof.require()


def test_samples_without_log_probs_of_the_engine_prove_nothing(one_rank):
    proof = proof_of(data_of(engine=None), limit=1e9)
    proof.compare(data_of(engine=None), torch.tensor([-1.0, 0.0, -3.0, -0.5, -0.25]))
    with pytest.raises(RunError, match="differ by inf .*the samples have no log-probs of the engine"):
        proof.require()
    untrained = {"loss_masks": [torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)]}
    nothing = data_of(engine=None, **untrained)
    proof = proof_of(nothing)
    proof.compare(nothing, torch.zeros(5))
    proof.require()


def test_log_probs_of_the_pass_are_compared_beside_those_of_training(one_rank):
    rows = [torch.tensor(row) for row in ENGINE]
    rows[1] = rows[1] - 0.125
    data = data_of(log_probs=rows)
    proof = proof_of(data)
    proof.compare(data, torch.tensor([-1.0, 0.0, -3.0, -0.5, -0.25]))
    with pytest.raises(
        RunError, match=r"differ by 0\.125 at response token 0 of sample 41 .*; 2 of 4 trained tokens, in 1 of 2"
    ):
        proof.require()


def test_a_loss_that_is_made_twice_counts_once(one_rank):
    data = data_of()
    proof = proof_of(data)
    proof.compare(data, torch.tensor([-9.0, 0.0, -3.0, -0.5, -0.25]))
    proof.compare(data, torch.tensor([-1.0, 0.0, -3.0, -0.5, -0.25]))
    proof.require()
    assert proof.largest == 0.0


def test_nothing_is_waited_for_while_the_step_computes(one_rank):
    data = data_of()
    for name in ("rollout_log_probs", "loss_masks"):
        data[name] = [row.to("meta") for row in data[name]]
    proof = proof_of(data)
    with Waiting() as waiting:
        proof.compare(data, torch.empty(5, device="meta"))
    assert waiting.operations == []


def test_a_rank_that_has_no_tokens_answers_too(one_rank):
    groups = SimpleNamespace(is_last_stage=False, data_rank=0)
    proof = OnPolicyProof(default_args(), "here", groups, RolloutData(), [[]], group="alone")
    proof.require()
    assert proof.largest == 0.0


def test_a_part_of_a_context_has_its_place_in_the_response(one_rank):
    """A prompt of 1 and a response of 7 over two ranks: rank 1 predicts response tokens 1 to 4."""
    row = [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0]
    data = RolloutData.of_rank({
        "total_lengths": [8], "response_lengths": [7], "loss_masks": [torch.ones(7, dtype=torch.int32)], "positions": [0],
        "sample_indices": [9], "rollout_log_probs": [torch.tensor(row)],
    }, ContextParallel(2, 1, None))  # fmt: skip
    own = data["rollout_log_probs"][0]
    assert 0 < len(own) < 7
    proof = proof_of(RolloutData())
    proof.compare(data, own + torch.tensor([0.0] * (len(own) - 1) + [0.5]))
    place = row.index(float(own[-1]))
    with pytest.raises(RunError, match=rf"differ by 0\.5 at response token {place} of sample 9 "):
        proof.require()


def test_samples_count_once_however_many_ranks_share_them():
    worst = WorstToken(9, 3, -1.5, -1.0)
    # Of two samples, of which one differs in both of its parts; the first part is on two ranks.
    reports = [on_policy._Report(worst, None, {(0, 4, part): (1, 2), (0, 5, part): (0, 2)}) for part in (0, 0, 1)]
    found = on_policy._joined(reports, None)
    assert (found.token, found.tokens, found.samples) == (worst, (2, 8), (1, 2))


def test_who_is_proved():
    assert is_proved(default_args(true_on_policy_mode=True), "actor")
    assert not is_proved(default_args(), "actor")
    assert not is_proved(default_args(true_on_policy_mode=True), "critic")
    assert not is_proved(default_args(true_on_policy_mode=True, loss_type="sft_loss"), "actor")


def test_a_rollout_of_several_steps_is_refused_before_the_first():
    args = default_args(true_on_policy_mode=True, global_batch_size=8, has_engines=True)
    data = RolloutData({"num_microbatches": [2]})
    expect_proof(args, 4, data, 11)
    assert data["live_weight_version"] == 11
    with pytest.raises(UserError, match="rollout 4 brings 2 optimizer steps.*--global-batch-size 8"):
        expect_proof(args, 4, RolloutData({"num_microbatches": [2, 1]}), 11)
    args.true_on_policy_mode, plain = False, RolloutData({"num_microbatches": [2, 1]})
    expect_proof(args, 4, plain, 11)
    assert "live_weight_version" not in plain
    args.true_on_policy_mode, args.has_engines = True, False
    dumped = RolloutData({"num_microbatches": [1]})
    expect_proof(args, 4, dumped, 0)
    assert "live_weight_version" not in dumped, "samples of another run have its versions"


def finding(difference=1e-6, train=None, made_by=None, live=None, samples=(4, 4)):
    train = -1.0 - difference if train is None else train
    return Finding(WorstToken(7, 2, train, -1.0), made_by, live, (5, 40), samples)


MINE = {"custom_generate_function_path": "mine.py:generate"}
LARGE = 0.01
CAUSES = {
    "engine without log-probs": ({}, Finding(WorstToken(7, 2, -1.0, math.nan), None, None, (1, 1), (1, 1)), "no log-probs of"),
    "trainer's NaN": ({}, finding(train=math.nan), "no finite number"),
    "stale": (MINE, finding(made_by=3, live=4), "weights of version 3 .* version 4: .*missed a push, or --custom-generate"),
    "weights that are gone": ({}, finding(made_by=5, live=4), "weights of version 5 .* version 4"),
    "of this version": ({}, finding(made_by=4, live=4), "^kernels add"),
    "some samples, and a function": (MINE, finding(samples=(1, 16)), "^15 other samples agree.*--custom-generate"),
    "a hook": (
        {"rollout_sample_hook_path": ["a.f", "b.g"]}, finding(samples=(1, 3)), "^2 other .*--rollout-sample-hook-path a.f b.g$",
    ),
    "some samples, and none": ({}, finding(samples=(1, 16)), "^kernels add"),
    "experts": ({"num_experts": 8}, finding(LARGE), "--use-rollout-routing-replay"),
    "replayed experts": ({"num_experts": 8, "use_rollout_routing_replay": True}, finding(), "^kernels add"),
    "products in 8 bits": ({"fp8": "e4m3"}, finding(LARGE), "the trainer multiplies in FP8 .--fp8-format e4m3"),
    "keys in 8 bits": ({"sglang_kv_cache_dtype": "fp8_e5m2"}, finding(LARGE), "--sglang-kv-cache-dtype fp8_e5m2, and"),
    "another precision": ({"sglang_dtype": "bfloat16"}, finding(LARGE), "--sglang-dtype bfloat16, and the trainer in float32"),
    "the same precision": ({"sglang_dtype": "float", "sglang_kv_cache_dtype": "auto"}, finding(), "^kernels add"),
    "rounding of float32": ({}, finding(1e-3), "^kernels add"),
    "more than rounding": ({}, finding(2e-3), "other weights.*--check-weight-update-equal"),
    "rounding of bfloat16": ({"params_dtype_name": "bfloat16"}, finding(0.5), "^kernels add"),
    "more than that": ({"params_dtype_name": "bfloat16"}, finding(2.0), "other weights"),
    "temperature": ({"rollout_temperature": 0.7}, finding(LARGE), "--rollout-temperature 0.7; SGLANG_RETURN_ORIGINAL_LOGPROB"),
    "sampling by a function": (
        {"rollout_top_p": 0.9, "rollout_top_k": 50, **MINE}, finding(LARGE),
        "--rollout-top-p 0.9 and --rollout-top-k 50; requests of --custom-generate-function-path mine.py:generate",
    ),
    "temperature within rounding": ({"rollout_temperature": 0.7}, finding(), "^kernels add"),
    "a function, all samples": (MINE, finding(LARGE), "what may have changed the engine's log-probs is --custom-generate"),
    "no GPU": ({"on_gpus": False}, finding(), f"^without a GPU .* float32 .*give {LIMIT} 1e-"),
    "other sizes": ({"tensor_model_parallel_size": 4}, finding(), "4 ranks by --tensor-model.* 1 by --rollout-num"),
    "kernels": (
        {"sglang_attention_backend": "fa3", "sglang_rl_on_policy_target": None, "attention_backend": "flash"}, finding(),
        "--sglang-attention-backend fa3, --sglang-rl-on-policy-target None in the engine, --transformer-impl .*"
        "--attention-backend flash in the trainer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_the_likely_cause_is_what_can_be_seen(tmp_path, name):
    changes, found, expected = CAUSES[name]
    plain = {"hf_checkpoint": str(write_config(tmp_path)), "params_dtype_name": "float32", "on_gpus": True}
    args = default_args(**{**plain, "rollout_num_gpus": 1, **changes})
    assert re.search(expected, likely_cause(args, found)), likely_cause(args, found)
    assert likely_cause(args, found) in describe(args, found)


def test_a_quantised_checkpoint_is_a_cause(tmp_path):
    directory = write_config(tmp_path, quantization_config={"quant_method": "fp8"})
    args = default_args(hf_checkpoint=str(directory), params_dtype_name="bfloat16", rollout_num_gpus=1, on_gpus=True)
    assert "--hf-checkpoint is quantised" in likely_cause(args, finding())


def spoiled_steps(cases):
    """Steps of the ranks whose engine tells what the trainer computes, but for one token of one sample; per case what came of
    it, and whether the weights are as they were."""
    from tests.support.processes.megatron_worker import load_backend

    results = {}
    for name, args in cases.items():
        backend = load_backend(args)
        from slime.training.advantages import compute_advantages_and_returns
        from slime.training.train_step import forward_log_probs, train_one_step

        data = RolloutData.of_rank(shard_of(args, backend.groups.data_rank), backend.groups.cp)
        log_probs = forward_log_probs(args, backend, data, with_entropy=False)
        if backend.groups.is_last_stage:
            data["rollout_log_probs"] = [row.clone() for row in log_probs["log_probs"]]
            data.update(log_probs)
            if args.loss_type == "policy_loss" and args.advantage_estimator == "grpo":
                # As where the pass is left out: the training pass alone tells the log-probs.
                del data["log_probs"]
            compute_advantages_and_returns(args, data)
            if SPOILED in data["sample_indices"] and name.startswith("spoiled"):
                row = data["rollout_log_probs"][data["sample_indices"].index(SPOILED)]
                own = data.cut([torch.arange(length) for length in data["response_lengths"]])
                row += 0.25 * (own[data["sample_indices"].index(SPOILED)] == TOKEN)
        before = [parameter.detach().clone() for parameter in backend.model[0].parameters()]
        try:
            result = train_one_step(args, backend, data, 5, 0)
        except RunError as error:
            result = str(error)
        same = all(a.equal(b) for a, b in zip(before, backend.model[0].parameters(), strict=True))
        results[name] = result, same
    return results


# A sample with untrained tokens in between, and one of its trained tokens.
SPOILED, TOKEN = 2, 4
LAYOUTS = {
    "dp2": {"data_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2 one stream": {"data_parallel_size": 2, "max_tokens_per_gpu": 1000, "recompute_loss_function": True},
    "tp2 static": {"tensor_model_parallel_size": 2, "use_dynamic_batch_size": False, "micro_batch_size": 1},
    "dp2 gspo": {"data_parallel_size": 2, "advantage_estimator": "gspo"},
    "dp2 custom": {
        "data_parallel_size": 2, "loss_type": "custom_loss", "custom_loss_function_path": f"{__file__}:no_loss",
    },
}  # fmt: skip


def no_loss(args, batch, logits, reduce):
    return logits.float().sum() * 0, {}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, tied=True)
    mode = {
        "true_on_policy_mode": True, "ci_train_rollout_logprob_abs_diff_threshold": 1e-5, "rollout_num_gpus": 1,
        "on_gpus": False, "custom_generate_function_path": "mine.py:generate",
    }  # fmt: skip
    cases = {
        f"{kind} {name}": make_args(directory, **mode, **layout)
        for name, layout in LAYOUTS.items()
        for kind in ("spoiled", "equal")
    }
    within = {**mode, "ci_train_rollout_logprob_abs_diff_threshold": 0.5, "data_parallel_size": 2}
    cases["spoiled within"] = make_args(directory, **within)
    return run_distributed(spoiled_steps, 2, (cases,), timeout=300)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_token_of_one_rank_stops_all_ranks_with_one_message(ranks, layout):
    (message, unchanged), (other, others_unchanged) = (rank[f"spoiled {layout}"] for rank in ranks)
    assert message == other and unchanged and others_unchanged
    trained = [sum(s.loss_mask or [1] * s.response_length) for s in make_samples(300)]
    assert len(trained) == len(ADVANTAGES)
    counts = rf"1 of {sum(trained)} trained tokens, in 1 of {sum(map(bool, trained))} samples, differ by more\."
    assert re.match(
        r"rollout 5, step 0: log-probs of engine and trainer differ by 0\.2(5|4999)\d* at "
        rf"response token {TOKEN} of sample {SPOILED} \(engine -[\d.]+, trainer -[\d.]+\), "
        rf"more than {LIMIT} 1e-05 allows \(--true-on-policy-mode\); {counts} "
        r"Likely cause: \d other samples agree, .*--custom-generate-function-path mine\.py:generate\. ",
        message,
    ), message


@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_log_probs_agree_the_step_is_taken_and_tells_the_largest_difference(ranks, layout):
    for rank in ranks:
        metrics, unchanged = rank[f"equal {layout}"]
        assert 0 <= metrics["mismatch_max_abs"] <= 1e-5 and metrics["skipped_steps"] == 0
        assert not unchanged
    first, second = (rank[f"equal {layout}"][0] for rank in ranks)
    assert first["mismatch_max_abs"] == second["mismatch_max_abs"]


def test_a_difference_within_the_bound_is_told(ranks):
    told = [rank["spoiled within"][0] for rank in ranks]
    assert [metrics["mismatch_max_abs"] for metrics in told] == pytest.approx([0.25] * 2, abs=1e-4)
    assert not any(rank["spoiled within"][1] for rank in ranks), "the step is taken"
