"""The table of plug-in points: where users' functions are called, and what they are given there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class Call(NamedTuple):
    """What a function is given.

    Attributes:
        given: by position; names for readers, which do not count.
        named: by name, whether it has such parameters or not.
        offered: by name, if it has such parameters.
        fits: whether a function with parameters of these names, in order, is called so.
        takes_more: whether users' own callers may give it more by name.
    """

    given: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    offered: tuple[str, ...] = ()
    fits: Callable[[tuple[str, ...]], bool] = lambda names: True
    takes_more: bool = False


def _is_of_group(names: tuple[str, ...]) -> bool:
    return names[1:2] == ("samples",)


def _of_samples(*offered: str) -> tuple[Call, ...]:
    """The calls of a function that grades or judges. One that names what it is given may get more from users' own callers; of
    any other, which was written for another framework, nobody knows what more it is to be given."""

    def names_it(names: tuple[str, ...]) -> bool:
        return names[1:2] in (("sample",), ("samples",))

    call = Call(("args", "samples"), offered=offered)
    return call._replace(fits=names_it, takes_more=True), call


@dataclass(frozen=True)
class Point:
    """A place where a user's function is called.

    Attributes:
        call: its signature, and the required result, as readers are told.
        calls: what it is given; the first that fits counts. None is listed where classes or modules are looked into.
        keeps_samples: whether it must not change samples.
        words: further flags that a run needs to make use of it.
        in_megatron: whether a real training rank calls it, which takes some seconds to start.
        in_python: whether a user's own driver passes it; no flag of a run names it.
    """

    call: str
    calls: tuple[Call, ...] = ()
    keeps_samples: bool = False
    words: tuple[str, ...] = ()
    # Whether a run goes on if the function raises.
    is_forgiven: bool = False
    in_megatron: bool = False
    in_python: bool = False


_REWARD = (
    "fn(args, sample) → float or dict; fn(args, samples) → list; or a class with compute_reward(prompts, responses)"
)
_GIVEN_TO_TIS = (
    "args", "pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths", "cp",
    "step_statistics",
)  # fmt: skip
_TIS = "fn(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kw) → (pg_loss, masks, metrics)"
_ROLLOUT = Call(("args", "rollout_id", "data_source"), named=("evaluation",))
_PROVIDER = Call(("pre_process", "post_process"), offered=("vp_stage", "config", "args"))
# The constructor of a reward that is a class, and its method.
REWARD_CLASS = Call(offered=("args", "model_path"))
REWARD_METHOD = Call(("prompts", "responses"), offered=("labels", "samples"))
POINTS = {
    "--rollout-function-path": Point(
        "fn(args, rollout_id, data_source, evaluation=False) → RolloutFnTrainOutput, or a list of groups",
        (_ROLLOUT,),
    ),
    "--eval-function-path": Point(
        "fn(args, rollout_id, data_source, evaluation=True) → RolloutFnEvalOutput, or {set: {rewards, truncated, samples}}",
        (_ROLLOUT,),
    ),
    "--custom-generate-function-path": Point(
        "async fn(args, sample, sampling_params[, evaluation]) → Sample or list of them; fn(args, samples, evaluation) → list",
        (
            Call(("args", "samples"), offered=("evaluation", "sampling_params"), fits=_is_of_group),
            Call(("args", "sample", "sampling_params"), offered=("evaluation",)),
        ),
    ),
    "--rollout-sample-hook-path": Point(
        "fn(args, sample, *, rollout_id=None, evaluation=False) → Sample or None",
        (Call(("args", "sample"), offered=("rollout_id", "evaluation")),),
    ),
    "--custom-rm-path": Point(_REWARD, _of_samples("evaluation")),
    "--dynamic-sampling-filter-path": Point(
        "fn(args, samples, **kw) → DynamicFilterOutput(keep, reason) or bool", _of_samples(), keeps_samples=True
    ),
    "--buffer-filter-path": Point(
        "fn(args, rollout_id, buffer, num_samples) → groups, taken out of buffer",
        (Call(("args", "rollout_id", "buffer", "num_samples")),),
    ),
    "--rollout-sample-filter-path": Point(
        "fn(args, data): sets remove_sample of samples; returns nothing", (Call(("args", "data")),)
    ),
    "--rollout-all-samples-process-path": Point(
        "fn(args, all_groups, data_source): returns nothing",
        (Call(("args", "all_groups", "data_source")),),
        keeps_samples=True,
    ),
    "--custom-reward-post-process-path": Point(
        "fn(args, samples) → (raw rewards, rewards), one for each sample", (Call(("args", "samples")),)
    ),
    "--custom-convert-samples-to-train-data-path": Point(
        "fn(args, samples) → {tokens, response_lengths, rewards, raw_reward, truncated, sample_indices, loss_masks}",
        (Call(("args", "samples")),),
    ),
    "--data-source-path": Point(
        "class(args) with get_samples(num_samples) → groups or prompts, and add_samples(groups)",
        (Call(("dataset", "args"), fits=lambda names: names[:1] == ("dataset",)), Call(("args",))),
    ),
    "--custom-rollout-log-function-path": Point(
        "fn(rollout_id, args, samples, rollout_extra_metrics, rollout_time) → True to leave out the usual metrics",
        (Call(("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time")),),
        keeps_samples=True,
        is_forgiven=True,
    ),
    "--custom-eval-rollout-log-function-path": Point(
        "fn(rollout_id, args, data, extra_metrics) → True to leave out the usual metrics",
        (Call(("rollout_id", "args", "data", "extra_metrics")),),
        is_forgiven=True,
    ),
    "--rollout-data-postprocess-path": Point(
        "fn(args, rollout_id, rollout_data): edits in place, on each training rank",
        (Call(("args", "rollout_id", "rollout_data")),),
    ),
    "--custom-advantage-function-path": Point(
        "fn(args, rollout_data): sets advantages and returns, lists of tensors shaped as log_probs",
        (Call(("args", "rollout_data")),),
    ),
    "--custom-loss-function-path": Point(
        "fn(args, batch, logits, sum_of_sample_mean) → (loss, {name: scalar tensor})",
        (Call(("args", "batch", "logits", "sum_of_sample_mean")),),
        words=("--loss-type", "custom_loss"),
    ),
    "--custom-tis-function-path": Point(_TIS, (Call(named=_GIVEN_TO_TIS),), words=("--use-tis",)),
    "--custom-pg-loss-reducer-function-path": Point(
        "fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss[, rollout_mask_sums]) → fn(flat tensor)",
        (
            Call(
                ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"),
                offered=("rollout_mask_sums",),
            ),
        ),
    ),
    "--custom-update-weight-post-write-path": Point(
        "fn(args, version_dir, rollout_engines), on each training rank when its files are written",
        (Call(("args", "version_dir", "rollout_engines")),),
        words=("--update-weight-transport", "disk"),
    ),
    "--sglang-custom-pull-weights-pre-read-hook": Point(
        "fn(source_dir, target_version), on each host of engines before it reads what a push has written",
        (Call(("source_dir", "target_version")),),
        words=("--update-weight-transport", "disk"),
    ),
    "--custom-model-provider-path": Point(
        "fn(pre_process, post_process[, vp_stage][, config][, args]) → GPTModel",
        (_PROVIDER,),
        in_megatron=True,
    ),
    "--spec": Point(
        "fn(args, config, vp_stage) → spec of the layers; or, with a parameter pre_process, what a model provider is",
        (_PROVIDER._replace(fits=lambda names: "pre_process" in names), Call(("args", "config", "vp_stage"))),
        in_megatron=True,
    ),
    "--custom-megatron-init-path": Point(
        "fn(args), on each rank once Megatron is initialised", (Call(("args",)),), in_megatron=True
    ),
    "--custom-megatron-before-log-prob-hook-path": Point(
        "fn(args, model, store_prefix), before each pass without gradient",
        (Call(("args", "model", "store_prefix")),),
        in_megatron=True,
    ),
    "--custom-megatron-before-train-step-hook-path": Point(
        "fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler), when gradients are zero",
        (Call(("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler")),),
        in_megatron=True,
    ),
    "--actor-cls": Point(
        "class(args, rank, world_size, local_rank) for create_training_models, with rendezvous_address(), init(address) → "
        "first rollout, train(rollout_id, shards) → [(metrics, step key)], open_weight_push() → Opening, dispose()",
        in_python=True,
    ),
    "--adapter-cls": Point(
        "class(tokenizer, sglang_url), a subclass of OpenAIAdapter or AnthropicAdapter of slime.agent.adapters: its endpoint "
        "answers two turns, and finish_session(sid, base_sample=…) → samples",
        in_python=True,
    ),
    "--buffer-generator": Point(
        "module with TASK_TYPE and run_rollout(data), in a process of its own, which sends items {uid, instance_id, messages, "
        "reward, extra_info} to data['remote_buffer_url']",
        in_python=True,
    ),
    "--accelerator": Point(
        "class() for register_accelerator: a subclass of slime.utils.device.Accelerator with a name of its own",
        in_python=True,
    ),
    "--sandbox-cls": Point(
        "class(), an async context manager with sandbox_id, async exec(cmd, *, user, env, timeout, check, idempotent) → "
        "(status, out, err), write_file(path, content, *, user), read_file(path, *, user) → text",
        in_python=True,
    ),
    "--harness-cls": Point(
        "class() with name and async run(sb, *, workdir, session_id, adapter_url, time_budget_sec, prompt) → exit status; "
        "a subclass of slime.agent.harness.BaseHarness has launch_and_wait(sb, ctx, prompt, time_budget_sec)",
        in_python=True,
    ),
}
