"""A step of a run without a model, which calls the users' functions that its command line names."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.arguments import parse_args
from slime.arguments.flag import attribute_of
from slime.arguments.paths import MANAGER_PLUG_INS, load_plug_ins
from slime.plugins.from_python import (
    ACCELERATOR,
    ACTOR_CLS,
    ADAPTER_CLS,
    BUFFER_GENERATOR,
    HARNESS_CLS,
    SANDBOX_CLS,
    take_paths,
    try_accelerator,
    try_adapter,
    try_generator,
    try_harness,
    try_rank,
    try_sandbox,
)
from slime.plugins.recorder import FORGIVEN, LATE, Recorder
from slime.ray.rollout_pipeline import RolloutPipeline, batch_schedule, flatten_rollout_output
from slime.rollout.attempts import as_partial_group
from slime.rollout.base_types import leaves
from slime.rollout.custom_generate import GENERATE_FLAG, resolve_generate_function
from slime.rollout.draws import draw_groups
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import generate_and_rm_group, is_aborted
from slime.rollout.generation_call import GenerationCall
from slime.rollout.rm_hub.grading import clear_reward_instances
from slime.rollout.train_data import convert_samples_to_train_batch
from slime.utils import async_utils
from slime.utils.errors import RunError, UserError
from slime.utils.http_utils import close_http_client
from slime.utils.misc import SingletonMeta, get_free_port, near_name
from slime.utils.plugin_loader import accepted_keywords, call_plug_in, calling_user_code, observing_plug_ins
from slime.utils.plugin_points import POINTS
from slime.utils.ports import host_for_url
from slime.utils.processing_utils import load_tokenizer
from slime.utils.run_values import with_run_values

if TYPE_CHECKING:
    from slime.training.rollout_data import RolloutData

# An answer that an engine aborts, other than any that it finishes.
_CUT_OFF = "Let me see:"
ANSWER = "I add both numbers. Answer: \\boxed{4}"
_POLL_S = 0.05
_HOST = "127.0.0.1"
_PRE_READ_FLAG = "--sglang-custom-pull-weights-pre-read-hook"
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64,
    "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "vocab_size": 300, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Finding:
    """The result of checking one function."""

    record: Recorder
    problems: tuple[str, ...]

    def text(self) -> str:
        """The finding as it is printed."""
        record = self.record
        lines = [
            f"{record.flag} {record.path}",
            f"  defined as  {record.signature}",
            f"  called as   {POINTS[record.flag].call}",
        ]
        if record.calls:
            lines.append(f"  given       {record.given}")
            lines.append(f"  returned    {record.returned or 'nothing: no call came to its end'}")
        if record.changed:
            lines.append(f"  changed     {', '.join(sorted(record.changed))} of samples")
        if record.seconds:
            middle, longest = statistics.median(record.seconds), max(record.seconds)
            lines.append(f"  cost        {record.calls} calls, {middle:.4f} s in the middle, {longest:.4f} s at most")
        return "\n".join(
            [*lines, *(f"  PROBLEM     {problem}" for problem in self.problems or ())]
            + ([] if self.problems else ["  fine"])
        )


def check(
    words: Sequence[str],
    *,
    answers: Sequence[str] | None = None,
    time_limit: float = 20.0,
    add_custom_arguments: Callable[[argparse.ArgumentParser], argparse.ArgumentParser] | None = None,
) -> list[Finding]:
    """Let the framework call the functions that are named by `words`, which are flags of a run.

    Args:
        answers: texts of the engine, one for each turn of a conversation; after the last one they begin anew.
        time_limit: seconds for a call of any function.
        add_custom_arguments: the function that a user's own driver passes to `parse_args`; its flags may be among `words`.

    Raises:
        UserError: no function is named, or a run would refuse the flags.
    """
    named = [flag for flag in POINTS if flag in {word.partition("=")[0] for word in words}]
    in_python, words = take_paths(words)
    if not named:
        slips = {word: near_name(word, POINTS) for word in (word.partition("=")[0] for word in words)}
        near = next((f"did you mean {flag}, not {word}?" for word, flag in slips.items() if flag is not None), None)
        raise UserError(f"no plug-in is named; {near or 'give one of ' + ', '.join(POINTS)}")
    if not time_limit > 0:
        raise UserError(f"--time-limit {time_limit:g}: it must be above 0")
    with tempfile.TemporaryDirectory(prefix="slime-plugins-") as directory:
        args = parse_args(add_custom_arguments, argv=_command_line(Path(directory), words, named, time_limit))
        records: dict[tuple[str, str], Recorder] = {}
        watched: dict[tuple[str, str, Any], Any] = {}
        lock = threading.Lock()

        def observe(flag: str | None, path: str, found: Any) -> Any:
            if flag not in named or POINTS[flag].in_python:
                return found
            with lock:
                record = records.setdefault((flag, path), Recorder(flag, path))
                if (flag, path, found) not in watched:
                    watched[flag, path, found] = record.watched(found)
                return watched[flag, path, found]

        interruption = _Interruption()
        with observing_plug_ins(observe), _engine(args, answers or [ANSWER], interruption) as engine:
            host, port = engine
            models = {"default": (host_for_url(host), port)}
            args_of_run = with_run_values(
                args, rollout_num_engines=1, sglang_router_ip=host, sglang_router_port=port, sglang_model_routers=models
            )
            failure = _run(lambda: _step(args_of_run, named, in_python, records, interruption), records, time_limit)
    paths = in_python | {flag: str(vars(args)[attribute_of(flag)]) for flag in named if not POINTS[flag].in_python}
    return _findings(paths, records, failure)


def _command_line(directory: Path, words: Sequence[str], named: Sequence[str], time_limit: float) -> list[str]:
    (directory / "config.json").write_text(json.dumps(_CONFIG))
    _write_tokenizer(directory)
    if ACTOR_CLS in named:
        _write_weights(directory)
    rows = [{"prompt": f"What is {i}+{i}?", "label": str(2 * i), "metadata": {"row": i}} for i in range(1, 5)]
    (directory / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluates = {"--eval-function-path", "--custom-eval-rollout-log-function-path"} & set(named)
    given = {word.partition("=")[0] for word in words}
    defaults = {
        "--hf-checkpoint": [str(directory)], "--prompt-data": [str(directory / "prompts.jsonl")], "--num-rollout": ["4"],
        "--label-key": ["label"], "--metadata-key": ["metadata"], "--rollout-max-response-len": ["1024"],
        "--rollout-batch-size": ["2"], "--n-samples-per-prompt": ["2"], "--rollout-num-gpus": ["1"],
        "--actor-num-gpus-per-node": ["1"], "--model-args-from-hf": [], "--http-request-timeout": [str(time_limit)],
        "--rm-timeout": [str(time_limit)],
        # One sample after the other, so that the report is about the first one, and the same at every try.
        "--sglang-server-concurrency": ["1"],
    }  # fmt: skip
    if {"--custom-update-weight-post-write-path", _PRE_READ_FLAG} & set(named):
        defaults["--update-weight-disk-dir"] = [str(directory / "pushes")]
    if _PRE_READ_FLAG in named:
        defaults["--update-weight-local-checkpoint-dir"] = [str(directory / "local")]
    if "--custom-rm-path" not in named:
        defaults["--rm-type"] = ["math"]
    if evaluates:
        defaults |= {"--eval-interval": ["1"], "--eval-prompt-data": ["sums", str(directory / "prompts.jsonl")]}
    own = [word for flag, value in defaults.items() if flag not in given for word in (flag, *value)]
    needed = [word for flag in named for word in POINTS[flag].words if POINTS[flag].words[0] not in given]
    return [*own, *needed, *words]


def _write_tokenizer(directory: Path) -> None:
    """Write a tokenizer that has a token for each byte, and the special tokens of a conversation."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: number for number, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    whole.chat_template = _TEMPLATE
    whole.save_pretrained(str(directory))


def _write_weights(directory: Path) -> None:
    """Write random weights, since the names in a push are compared with those in the checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory)).save_pretrained(directory)


@dataclass
class _Interruption:
    """Whether the engine is to abort its answers, and whether it has done so."""

    wanted: bool = False
    happened: bool = False


@contextlib.contextmanager
def _engine(args: argparse.Namespace, answers: Sequence[str], interruption: _Interruption) -> Iterator[tuple[str, int]]:
    """Serve a stand-in for a router with one engine; yields its address."""
    from aiohttp import web

    tokenizer = load_tokenizer(args.hf_checkpoint, args.trust_remote_code)
    # The turn of a conversation, by the tokens, or the characters, that were sent for it.
    turns: dict[tuple[int | str, ...], int] = {}

    async def generate(request: web.Request) -> web.Response:
        payload = await request.json()
        # A request has either token ids or a text.
        sent = tuple(payload.get("input_ids") or payload.get("text") or ())
        turns[sent] = max((turn + 1 for ids, turn in turns.items() if ids != sent == ids + sent[len(ids) :]), default=0)
        text = _CUT_OFF if interruption.wanted else answers[turns[sent] % len(answers)]
        ids = tokenizer.encode(text, add_special_tokens=False)
        # As an engine: the token that ends a turn counts, and stands in the text unless the run leaves such tokens out.
        if not interruption.wanted and ids[-1:] != [tokenizer.eos_token_id]:
            ids.append(tokenizer.eos_token_id)
        params = payload["sampling_params"]
        budget = params.get("max_new_tokens", len(ids))
        ended = {"type": "length"} if len(ids) > budget else {"type": "stop", "matched": ids[-1]}
        if interruption.wanted:
            ended, interruption.happened = {"type": "abort"}, True
        meta = {
            "output_token_logprobs": [[-0.5, token, None] for token in ids[:budget]],
            "finish_reason": ended,
            "weight_version": "1",
            "completion_tokens": min(len(ids), budget),
        }
        if payload.get("logprob_start_len") is not None:
            meta["input_token_logprobs"] = [[-0.5, token, None] for token in payload.get("input_ids", ())]
        text = tokenizer.decode(ids[:budget], skip_special_tokens=params.get("skip_special_tokens", True))
        return web.json_response({"text": text, "meta_info": meta})

    async def idle(request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}], "workers": []})

    app = web.Application(client_max_size=2**28)
    app.router.add_post("/generate", generate)
    app.router.add_route("*", "/{other:.*}", idle)
    served = run_app_in_thread(app, thread_name="slime-plugins-engine", runner_kwargs={"shutdown_timeout": 0.2})
    try:
        yield served.host, served.port
    finally:
        served.stop(60)


def _step(
    args: argparse.Namespace,
    named: Sequence[str],
    in_python: dict[str, str],
    records: dict[tuple[str, str], Recorder],
    interruption: _Interruption,
) -> None:
    """Run one rollout, an evaluation if it was asked for, and the training rank's part up to the loss; then try the parts of a
    user's own driver in `in_python` (word → path)."""
    SingletonMeta.clear_instances()
    clear_reward_instances()
    try:
        load_plug_ins(args, MANAGER_PLUG_INS)
        pipeline = RolloutPipeline(args)
        if "--buffer-filter-path" in named:
            pipeline.data_source.add_samples(pipeline.data_source.get_samples(1))
        samples, metrics = pipeline.samples_of(0)
        if "--data-source-path" in named:
            with calling_user_code("--data-source-path", args.data_source_path, "groups that were not used"):
                pipeline.data_source.add_samples(draw_groups(args, pipeline.data_source, 1, 1))
        batch = convert_samples_to_train_batch(args, samples)
        if args.custom_rollout_log_function_path is not None:
            pipeline.logged_by_user(0, samples, metrics or {}, 1.0)
        if args.eval_interval is not None:
            pipeline.evaluate(0)
        if GENERATE_FLAG in named:
            record = records[GENERATE_FLAG, args.custom_generate_function_path]
            async_utils.run(_generate_otherwise(args, pipeline.data_source, record, interruption))
        if BUFFER_GENERATOR in in_python:
            path = in_python[BUFFER_GENERATOR]
            record = records[BUFFER_GENERATOR, path] = Recorder(BUFFER_GENERATOR, path)
            groups = try_generator(record, args, pipeline.data_source)
            convert_samples_to_train_batch(args, flatten_rollout_output(groups))
    finally:
        with contextlib.suppress(RuntimeError):
            async_utils.run(close_http_client())
        SingletonMeta.clear_instances()
        clear_reward_instances()
    _train(args, batch, named)
    tries = {
        ACTOR_CLS: lambda record: try_rank(record, args, batch),
        ACCELERATOR: try_accelerator,
        ADAPTER_CLS: lambda record: try_adapter(record, args),
        SANDBOX_CLS: try_sandbox,
        HARNESS_CLS: try_harness,
    }
    for flag, path in in_python.items():
        if flag == BUFFER_GENERATOR:
            continue
        record = records[flag, path] = Recorder(flag, path)
        tries[flag](record)


async def _generate_otherwise(
    args: argparse.Namespace, source: Any, record: Recorder, interruption: _Interruption
) -> None:
    """Have the function that generates called for an evaluation, if it is told, and with `--partial-rollout` once more for
    answers that were cut off."""
    params = GenerateState(args).sampling_params
    prompts = draw_groups(args, source, 1, 1)[0]
    if accepted_keywords(resolve_generate_function(args, prompts[0]).function, {"evaluation": True}):
        with GenerationCall(0, evaluation=True).under_way():
            await generate_and_rm_group(args, prompts, params, evaluation=True)
    if not args.partial_rollout:
        return
    interruption.wanted = True
    with GenerationCall(1).under_way():
        begun = await generate_and_rm_group(args, prompts, params)
    interruption.wanted = False
    if interruption.happened and not is_aborted(begun):
        record.note(
            f"an engine aborted an answer, and what it returned is {leaves(begun)[0].status.value}: as ABORTED it would be "
            "continued (--partial-rollout), so return it with the status that append_response_tokens gives it"
        )
    begun = as_partial_group(args, prompts, begun, 1)
    with GenerationCall(2).under_way():
        continued = await generate_and_rm_group(args, begun, params)
    for before, after in zip(begun, continued, strict=True):
        held = list(leaves(before)[0].tokens)
        if held != list(leaves(after)[0].tokens)[: len(held)]:
            record.note(
                f"it was given an answer that had been cut off, and dropped the {len(held)} tokens that this had: with "
                "--partial-rollout it has to continue from sample.tokens (generate and dialogue do); or leave out the flag"
            )


def _train(args: argparse.Namespace, batch: dict[str, Any], named: Sequence[str]) -> None:
    import torch

    from slime.training.advantages import compute_advantages_and_returns
    from slime.training.loss import loss_function
    from slime.training.rollout_batch import split_for_data_parallel, to_tensors
    from slime.training.rollout_data import require_entries

    args = with_run_values(args, rank=0)
    data = to_tensors(split_for_data_parallel(batch, batch_schedule(args, batch))[0], "cpu")
    data.setdefault("log_probs", [torch.full((length,), -0.5) for length in data["response_lengths"]])
    data.setdefault("ref_log_probs", [torch.full((length,), -0.6) for length in data["response_lengths"]])
    if any(POINTS[flag].in_megatron for flag in named):
        _train_in_megatron(args, data)
    compute_advantages_and_returns(args, data)
    flag = "--rollout-data-postprocess-path"
    call_plug_in(flag, args.rollout_data_postprocess_path, "rollout 0", args, 0, data)
    require_entries(data, f"{flag} {args.rollout_data_postprocess_path}")
    micro_batch = data.micro_batch(range(len(data["total_lengths"])), pad_multiple=4)
    generator = torch.Generator().manual_seed(0)
    shape = (len(micro_batch.stream.tokens), args.padded_vocab_size or args.vocab_size or _CONFIG["vocab_size"])
    logits = torch.randn(*shape, generator=generator).requires_grad_()
    loss, _ = loss_function(args, micro_batch, logits, None, role="actor")
    loss.backward()
    for flag, path, given in (
        (
            "--custom-update-weight-post-write-path",
            args.custom_update_weight_post_write_path,
            (args, args.hf_checkpoint, []),
        ),
        (_PRE_READ_FLAG, args.sglang_custom_pull_weights_pre_read_hook, (args.hf_checkpoint, 1)),
    ):
        call_plug_in(flag, path, "weights 1", *given)


def _train_in_megatron(args: argparse.Namespace, data: RolloutData) -> None:
    """Start a training rank with random weights, and run two passes without gradient, and a step."""
    from slime.arguments.checkpoints import REFERENCE, WeightSource
    from slime.training.advantages import compute_advantages_and_returns
    from slime.training.backend import make_backend
    from slime.training.train_step import forward_log_probs, train_one_step

    # The engine's log-probs are made up, so they cannot equal the trainer's.
    args = argparse.Namespace(**{**vars(args), "true_on_policy_mode": False})
    backend = make_backend(args)
    with _environment(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR=_HOST, MASTER_PORT=str(get_free_port())):
        try:
            backend.place()
            backend.load(WeightSource("random"))
            for prefix in ("", f"{REFERENCE}_"):
                data.update(forward_log_probs(args, backend, data, with_entropy=False, prefix=prefix))
            compute_advantages_and_returns(args, data)
            train_one_step(args, backend, data, 0, 0)
        finally:
            backend.close()


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _run(step: Callable[[], None], records: dict[Any, Recorder], time_limit: float) -> str | None:
    """Run the step. Returns the error that ended it, if any; a call that takes more than twice the time limit ends it, too."""
    failures: list[str] = []

    def work() -> None:
        try:
            step()
        except (UserError, RunError, TypeError, ValueError) as error:
            failures.append(str(error))
        except BaseException:
            failures.append(traceback.format_exc())

    thread = threading.Thread(target=work, name="slime-plugins-step", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_POLL_S)
        # These two start processes, which take long, and have time limits of their own.
        for record in [record for record in list(records.values()) if record.flag not in (ACTOR_CLS, BUFFER_GENERATOR)]:
            for caller, started in list(record.running.values()):
                # Twice the limit, so that calls to which the framework's own limit applies end by that first.
                if time.monotonic() - started > time_limit * 2 + 5 * _POLL_S:
                    return _hanging(record, caller, time_limit)
    return failures[0] if failures else None


def _hanging(record: Recorder, caller: threading.Thread, time_limit: float) -> str:
    frame = sys._current_frames().get(caller.ident)
    where = "".join(traceback.format_stack(frame)[-4:]) if frame is not None else ""
    return f"{record.flag} {record.path} did not return within {time_limit:g} s; it is here:\n{where}"


def _findings(paths: dict[str, str], records: dict[tuple[str, str], Recorder], failure: str | None) -> list[Finding]:
    for flag, path in paths.items():
        if flag not in {record.flag for record in records.values()}:
            records[flag, ""] = Recorder(flag, path)
    # The message names the function that is to blame.
    blamed = [record for record in records.values() if failure and f"{record.flag} {record.path}" in failure]
    findings = []
    for record in records.values():
        problems = list(record.problems)
        if record.running and POINTS[record.flag].is_forgiven and record not in blamed:
            problems.append(f"{LATE}; {FORGIVEN}")
        if record in blamed:
            problems.append(failure)
        elif failure and not record.calls:
            problems.append(f"not called: the step ended before{'' if blamed else f', with: {failure}'}")
        elif failure and not blamed:
            problems.append(f"the step ended with: {failure}")
        elif not record.calls:
            problems.append("nothing called it: another flag takes its place, or the step has no use for it")
        findings.append(Finding(record, tuple(problems)))
    return findings
