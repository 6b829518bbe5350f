"""Plug-ins as users of such frameworks have them: by the import paths and signatures that are documented, and nothing else."""

import inspect

import pytest

from slime.plugins import check

COMMON = """
import asyncio
import slime
from slime.utils.types import Sample
from slime.utils.misc import SingletonMeta, load_function, group_by
from slime.utils.async_utils import run
from slime.utils.http_utils import get, post
from slime.utils.processing_utils import load_tokenizer
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer, pop_first
from slime.rollout.filter_hub.base_types import DynamicFilterOutput, MetricGatherer, call_dynamic_filter
from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from slime.rollout.rm_hub import async_rm, batched_async_rm, grade_answer_verl, remote_rm
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.ifbench import compute_ifbench_reward
from slime.rollout.rm_hub.math_dapo_utils import compute_score, normalize_final_answer
from slime.rollout.rm_hub.math_utils import extract_answer, last_boxed_only_string, remove_boxed
from slime.rollout.sglang_rollout import GenerateState, abort, eval_rollout, generate, generate_and_rm, get_model_url
"""

SEARCH = '''
SEMAPHORE = asyncio.Semaphore(8)

async def generate(args, sample: Sample, sampling_params) -> Sample:
    """Turn by turn over HTTP, tokens and masks kept by hand."""
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    ids, mask, log_probs, text = [], [], [], ""
    for turn in range(2):
        payload = {"input_ids": prompt_ids + ids, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, payload)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        new = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        ids += new
        mask += [1] * len(new)
        log_probs += [item[0] for item in output["meta_info"]["output_token_logprobs"]]
        text += output["text"]
        if "<search>" not in output["text"]:
            break
        async with SEMAPHORE:
            found = " <information>4</information> "
        found_ids = state.tokenizer(found, add_special_tokens=False)["input_ids"]
        ids += found_ids
        mask += [0] * len(found_ids)
        log_probs += [0.0] * len(found_ids)
        text += found
    sample.tokens = prompt_ids + ids
    sample.response_length = len(ids)
    sample.response = text
    sample.loss_mask = mask
    sample.rollout_log_probs = log_probs
    sample.status = Sample.Status.COMPLETED
    return sample

async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    score = compute_score(sample.response, sample.label, strict_box_verify=True)
    sample.metadata["acc"] = score["acc"]
    return score
'''

TEXT = '''
async def generate(args, sample: Sample, sampling_params) -> Sample:
    """Turn by turn over HTTP, as a text that is tokenised here."""
    assert not args.partial_rollout
    state, text, ids, mask = GenerateState(args), "", [], []
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    for turn in range(3):
        output = await post(url, {"text": sample.prompt + text, "sampling_params": sampling_params})
        for part, trained in ((output["text"], 1), (" <information>4</information> ", 0)):
            part_ids = state.tokenizer(part, add_special_tokens=False)["input_ids"]
            text, ids, mask = text + part, ids + part_ids, mask + [trained] * len(part_ids)
            if "<answer>" in part:
                sample.tokens = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"] + ids
                sample.response, sample.response_length, sample.loss_mask = text, len(ids), mask
                sample.status = Sample.Status.COMPLETED
                return sample
    raise AssertionError(text)
'''

FAN_OUT = '''
import copy
import torch
from slime.rollout.sglang_rollout import generate_rollout_async

async def solve(args, sample, sampling_params):
    """A solver and a critic of its answer: two samples of one execution, rewarded here."""
    first = await generate(args, sample, sampling_params)
    second = copy.deepcopy(sample)
    second.prompt = f"{sample.prompt} Is {first.response} right?"
    second.tokens, second.response, second.response_length, second.loss_mask = [], "", 0, None
    second.rollout_log_probs, second.status = None, Sample.Status.PENDING
    second = await generate(args, second, sampling_params.copy())
    for one in (first, second):
        one.reward = 1.0 if "4" in one.response else 0.0
    return [first, second]

async def batched(args, samples, **kwargs):
    rewards = await asyncio.gather(*(async_rm(args, sample) for sample in []))
    return [len(rewards) + 1.0 for _ in samples]

def keep(args, samples: list[Sample], **kwargs):
    return DynamicFilterOutput(keep=len({s.get_reward_value(args) for s in samples}) >= 1, reason="none")

class Source(RolloutDataSourceWithBuffer):
    def __init__(self, args):
        super().__init__(args)
        self.asked = 0
    def get_samples(self, num_samples):
        self.asked += num_samples
        return super().get_samples(num_samples)

def keep_by_tensor(args, samples, **kwargs):
    keep = torch.tensor([s.get_reward_value(args) for s in samples], dtype=torch.float64).std() >= 0.0
    return DynamicFilterOutput(keep=keep, reason=None if keep else "zero_std")

def wrapped_rollout(args, rollout_id, data_source, evaluation=False):
    """The shipped step and evaluation, awaited here."""
    if evaluation:
        output, _ = run(eval_rollout(args, rollout_id))
        return output
    output, aborted_samples = run(generate_rollout_async(args, rollout_id, data_source.get_samples))
    data_source.add_samples(aborted_samples)
    return output

def generate_rollout(args, rollout_id, data_buffer, evaluation=False):
    """A loop of its own, the oldest form: a bare list of groups comes back."""
    state = GenerateState(args)
    groups = data_buffer.get_samples(args.rollout_batch_size)
    async def all_of_them():
        return await asyncio.gather(*(
            generate_and_rm(args, sample, state.sampling_params.copy(), evaluation=evaluation)
            for group in groups for sample in group
        ))
    flat = run(all_of_them())
    n = args.n_samples_per_prompt
    return [list(flat[i : i + n]) for i in range(0, len(flat), n)]
'''

TRAINER = """
import torch
from slime.backends.megatron_utils.cp_utils import get_sum_of_sample_mean, slice_log_prob_with_cp
from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
from slime.utils.ppo_utils import compute_approx_kl, compute_policy_loss, get_grpo_returns

def loss(args, batch, logits, sum_of_sample_mean):
    log_probs = torch.cat(get_log_probs_and_entropy(
        logits, args=args, unconcat_tokens=batch["unconcat_tokens"], total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"], with_entropy=False)["log_probs"])
    old = torch.cat(batch["log_probs"])
    pg_loss, clipfrac = compute_policy_loss(old - log_probs, torch.cat(batch["advantages"]), args.eps_clip, args.eps_clip_high)
    loss = sum_of_sample_mean(pg_loss)
    return loss, {"loss": loss.clone().detach(), "clipfrac": sum_of_sample_mean(clipfrac).clone().detach()}

def advantages(args, rollout_data):
    returns = get_grpo_returns(torch.tensor(rollout_data["rewards"]), rollout_data["log_probs"])
    rollout_data["advantages"], rollout_data["returns"] = returns, returns

def constant_length(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    masks = [slice_log_prob_with_cp(*row) for row in zip(loss_masks, total_lengths, response_lengths)]
    return lambda x: (x * torch.cat(masks)).sum() / 1000
"""
CASES = {
    "turns over HTTP and a dict of rewards": (
        SEARCH, {"custom-generate-function": "generate", "custom-rm": "reward_func"}, "--reward-key score"
    ),
    "turns of text": (TEXT, {"custom-generate-function": "generate"}, ""),
    "a filter of tensors": (FAN_OUT, {"dynamic-sampling-filter": "keep_by_tensor"}, ""),
    "the shipped loop, wrapped": (
        FAN_OUT, {"rollout-function": "wrapped_rollout", "eval-function": "wrapped_rollout"}, ""
    ),
    "several samples of an execution": (
        FAN_OUT, {"custom-generate-function": "solve", "dynamic-sampling-filter": "keep"}, ""
    ),
    "a loop, a source and batches": (
        FAN_OUT, {"rollout-function": "generate_rollout", "data-source": "Source", "custom-rm": "batched"}, ""
    ),
    "group rewards": (FAN_OUT, {"custom-rm": "batched"}, "--group-rm"),
    "the loss": (TRAINER, {"custom-loss-function": "loss"}, ""),
    "advantages and reduction": (
        TRAINER, {"custom-advantage-function": "advantages", "custom-pg-loss-reducer-function": "constant_length"}, ""
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_plug_ins_of_the_documented_kind_run_unchanged(case, tmp_path):
    source, functions, more = CASES[case]
    file = tmp_path / "own.py"
    file.write_text(COMMON + source)
    words = [word for flag, name in functions.items() for word in (f"--{flag}-path", f"{file}:{name}")]
    answers = ["<search>2+2</search>", r"<answer> so \boxed{4}"] if source in (SEARCH, TEXT) else None
    findings = check([*words, *more.split()], answers=answers)
    assert {f.record.flag: f.problems for f in findings} == {f"--{flag}-path": () for flag in functions}


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("rollout.rm_hub.math_dapo_utils.compute_score", "solution_str ground_truth strict_box_verify"),
        ("rollout.rm_hub.gpqa.compute_gpqa_reward", "response label metadata"),
        ("rollout.rm_hub.ifbench.compute_ifbench_reward", "response label metadata"),
        ("rollout.rm_hub.remote_rm", "args sample kwargs"),
        ("rollout.rm_hub.async_rm", "args sample evaluation kwargs"),
        ("rollout.rm_hub.batched_async_rm", "args samples evaluation kwargs"),
        ("rollout.sglang_rollout.generate", "args sample sampling_params"),
        ("rollout.sglang_rollout.generate_and_rm", "args sample sampling_params evaluation"),
        ("rollout.sglang_rollout.generate_and_rm_group", "args group sampling_params evaluation"),
        ("rollout.sglang_rollout.get_model_url", "args model_name endpoint"),
        ("rollout.filter_hub.base_types.should_drop_dynamic_filter_output", "out remaining_batch_size target_data_size"),
        ("utils.http_utils.post", "url payload max_retries headers json"),
        ("utils.misc.should_run_periodic_action", "rollout_id interval num_rollout_per_epoch num_rollout"),
        ("utils.misc.decode_int32_meta_array", "meta keys"),
        ("utils.data.filter_long_prompt", "samples tokenizer processor max_length"),
        ("utils.ppo_utils.compute_approx_kl", "log_probs log_probs_base kl_loss_type importance_ratio"),
        ("utils.ppo_utils.compute_policy_loss", "ppo_kl advantages eps_clip eps_clip_high eps_clip_c"),
        ("utils.ppo_utils.compute_cispo_loss", "ppo_kl log_probs advantages eps_clip eps_clip_high"),
        ("utils.ppo_utils.compute_gspo_kl", "full_log_probs full_old_log_probs local_log_probs loss_masks"),
        ("utils.ppo_utils.compute_opsm_mask", "args full_log_probs full_old_log_probs advantages loss_masks"),
        ("utils.ppo_utils.get_grpo_returns", "rewards kl"),
        (
            "utils.ppo_utils.get_reinforce_plus_plus_returns",
            "rewards kl loss_masks response_lengths total_lengths kl_coef gamma",
        ),
        ("utils.ppo_utils.get_reinforce_plus_plus_baseline_advantages", "rewards kl loss_masks kl_coef"),
        ("utils.ppo_utils.vanilla_gae", "rewards values gamma lambd"),
        ("utils.ppo_utils.chunked_gae", "rewards values gamma lambd chunk_size"),
        ("backends.megatron_utils.cp_utils.get_logits_and_tokens_offset_with_cp", "total_length response_length"),
        ("backends.megatron_utils.cp_utils.all_gather_with_cp", "tensor total_length response_length"),
        ("backends.megatron_utils.cp_utils.slice_with_cp", "tokens pad_value"),
        ("backends.megatron_utils.cp_utils.slice_log_prob_with_cp", "log_prob total_length response_length"),
    ],
)  # fmt: skip
def test_helpers_take_the_documented_arguments(path, parameters):
    from slime.utils.plugin_loader import load_function

    found = list(inspect.signature(load_function(f"slime.{path}")).parameters)
    assert found[: len(parameters.split())] == parameters.split()
