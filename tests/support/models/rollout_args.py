"""The arguments that the generation loop reads, and a data source that counts the groups that go out and come back."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime.utils import eval_config
from slime.utils.types import Sample
from tests.support.models.tokenizer import save_tokenizer

VOCAB_SIZE = 300
CONTEXT_LENGTH = 256


def make_checkpoint(directory: Path) -> str:
    """A directory with a tokenizer and the two numbers of config.json that the client needs; no weights."""
    save_tokenizer(directory)
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": CONTEXT_LENGTH}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def make_args(checkpoint: str, port: int = 1, **overrides: Any) -> SimpleNamespace:
    """Arguments of a step of 2 groups of 2 samples, graded by a coin, against a server on `port` of this machine."""
    values: dict[str, Any] = {
        **dict.fromkeys(flag for flags in eval_config._FLAGS.values() for flag in flags),
        "hf_checkpoint": checkpoint,
        "vocab_size": VOCAB_SIZE,
        "use_critic": False,
        "trust_remote_code": False,
        "sglang_router_ip": "127.0.0.1",
        "sglang_router_port": port,
        "sglang_server_concurrency": 16,
        "rollout_num_engines": 1,
        "rollout_num_gpus": 1,
        "router_api_key": None,
        "data_source_path": "tests.support.models.rollout_args.CountingDataSource",
        "allow_bad_rows": False,
        "log_samples_interval": 10,
        "eval_max_context_len": None,
        **dict.fromkeys(("router_policy", "router_prefill_policy", "router_decode_policy")),
        "http_request_timeout": 120.0,
        "http_control_timeout": 60.0,
        "http_max_retries": 3,
        "abort_timeout": 60.0,
        "use_fault_tolerance": False,
        "apply_chat_template": False,
        "apply_chat_template_kwargs": {},
        "rollout_batch_size": 2,
        "over_sampling_batch_size": 2,
        "n_samples_per_prompt": 2,
        "rollout_seed": 42,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_max_context_len": None,
        "rollout_max_response_len": 8,
        "rollout_stop": None,
        "max_turns": None,
        "use_rollout_routing_replay": False,
        "true_on_policy_mode": False,
        "train_backend": "megatron",
        "custom_model_provider_path": None,
        "rollout_stop_token_ids": None,
        "rollout_skip_special_tokens": False,
        "custom_generate_function_path": None,
        "rollout_sample_hook_path": [],
        "dynamic_sampling_filter_path": None,
        "buffer_filter_path": None,
        "rollout_all_samples_process_path": None,
        "partial_rollout": False,
        "mask_offpolicy_in_partial_rollout": False,
        "keep_surplus_groups": False,
        "max_weight_staleness": None,
        "async_buffer_size": 1,
        "update_weights_interval": 1,
        "group_rm": False,
        "rm_type": "random",
        "rm_url": None,
        "custom_rm_path": None,
        "rm_concurrency": 64,
        "rm_timeout": 120.0,
        "rm_model_path": None,
        "reward_key": None,
        "eval_reward_key": None,
        "custom_reward_post_process_path": None,
        "custom_convert_samples_to_train_data_path": None,
        "eval_datasets": [],
        "eval_max_prompt_len": None,
        "n_samples_per_eval_prompt": 1,
        "metadata_key": "metadata",
        "tool_key": "tools",
        "sglang_enable_deterministic_inference": False,
        "sglang_speculative_algorithm": None,
        "sglang_speculative_num_steps": None,
        "served_models": None,
        "rollout_external_engine_infos": None,
        "sglang_context_length": None,
        "sglang_model_routers": {},
        "use_tis": False,
        "custom_tis_function_path": None,
        "use_rollout_logprobs": False,
    }
    unknown = set(overrides) - set(values)
    assert not unknown, unknown
    return SimpleNamespace(**{**values, **overrides})


class CountingDataSource:
    """Hands out numbered groups of prompts, at most `limit` of them. Groups that were given back go out first."""

    def __init__(self, n_samples_per_prompt: int, limit: int | None = None) -> None:
        self.n = n_samples_per_prompt
        self.limit = limit
        self.handed_out: list[int] = []
        self.returned: list[list[Any]] = []
        self._next_group = 0

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        groups = self.returned[:num_samples]
        del self.returned[:num_samples]
        while len(groups) < num_samples and (self.limit is None or self._next_group < self.limit):
            groups.append(self._new_group())
        return groups

    def add_samples(self, groups: list[list[Any]]) -> None:
        self.returned.extend(groups)

    def _new_group(self) -> list[Sample]:
        number = self._next_group
        self._next_group += 1
        self.handed_out.append(number)
        return [
            Sample(group_index=number, index=number * self.n + i, prompt=f"question {number}", label=str(number))
            for i in range(self.n)
        ]
