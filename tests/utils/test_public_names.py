"""Users' plug-ins import these: module → names, and how they are called."""

import dataclasses
import importlib
import inspect

import pytest

from slime.agent.trajectory import TurnRecord
from slime.arguments.groups import OWN_FLAGS

PUBLIC_NAMES = {
    "slime.data": "Sample RolloutDataSource RolloutDataSourceWithBuffer",
    "slime.utils.types": "Sample ParamInfo RolloutBatch MultimodalType MultimodalTypes",
    "slime.utils.http_utils": "post get get_rollout_num_engines init_http_client find_available_port is_port_available "
    "get_host_info",
    "slime.utils.misc": "load_function SingletonMeta should_run_periodic_action decode_int32_meta_array Box group_by "
    "get_free_port get_current_node_ip chunk_named_params_by_size",
    "slime.utils.async_utils": "run get_async_loop",
    "slime.utils.data": "Dataset read_file filter_long_prompt process_rollout_data get_source",
    "slime.utils.processing_utils": "load_tokenizer load_processor build_processor_kwargs process_vision_info "
    "encode_image_for_rollout_engine",
    "slime.utils.mask_utils": "MultiTurnLossMaskGenerator",
    "slime.utils.ppo_utils": "compute_approx_kl compute_policy_loss compute_cispo_loss compute_gspo_kl compute_opsm_mask "
    "get_grpo_returns get_reinforce_plus_plus_returns get_reinforce_plus_plus_baseline_advantages "
    "get_advantages_and_returns_batch vanilla_gae chunked_gae chunked_discounted_returns "
    "calculate_log_probs_and_entropy",
    "slime.utils.arguments": "parse_args parse_megatron_role_args slime_validate_args",
    "slime.utils.eval_config": "EvalDatasetConfig build_eval_dataset_configs",
    "slime.utils.dp_schedule": "build_dp_schedule",
    "slime.utils.seqlen_balancing": "karmarkar_karp greedy_partition get_seqlen_balanced_partitions first_fit_pack "
    "expand_bins_by_splitting get_reverse_idx",
    "slime.utils.distributed_utils": "distributed_masked_whiten init_process_group get_gloo_group init_gloo_group",
    "slime.utils.accelerator": "Accelerator register_accelerator get_accelerator",
    "slime.utils.flops_utils": "calculate_fwd_flops",
    "slime.utils.health_monitor": "HealthChecks",
    "slime.utils.memory_utils": "clear_memory available_memory print_memory",
    "slime.utils.reloadable_process_group": "get_gloo_group init_gloo_group init_process_group",
    "slime.utils.external_utils.command_utils": "execute_train convert_checkpoint exec_command",
    "slime.rollout.sglang_rollout": "GenerateState generate generate_and_rm generate_and_rm_group generate_rollout "
    "generate_rollout_async eval_rollout abort get_model_url",
    "slime.rollout.rm_hub": "async_rm batched_async_rm remote_rm grade_answer_verl get_deepscaler_rule_based_reward",
    "slime.rollout.rm_hub.math_utils": "extract_answer extract_boxed_answer remove_boxed last_boxed_only_string "
    "grade_answer_mathd grade_answer_sympy grade_answer_verl",
    "slime.rollout.rm_hub.math_dapo_utils": "compute_score normalize_final_answer remove_boxed",
    "slime.rollout.rm_hub.f1": "f1_score",
    "slime.rollout.rm_hub.gpqa": "compute_gpqa_reward",
    "slime.rollout.rm_hub.deepscaler": "get_deepscaler_rule_based_reward",
    "slime.rollout.rm_hub.ifbench": "compute_ifbench_reward",
    "slime.rollout.filter_hub.base_types": "DynamicFilterOutput call_dynamic_filter should_drop_dynamic_filter_output "
    "MetricGatherer",
    "slime.rollout.filter_hub.dynamic_sampling_filters": "check_reward_nonzero_std check_reward_nonzero_std_with_fallback",
    "slime.rollout.base_types": "RolloutFnTrainOutput RolloutFnEvalOutput call_rollout_fn",
    "slime.rollout.sample_hooks": "apply_rollout_sample_hooks",
    "slime.rollout.forge_load": "generate_rollout",
    "slime.rollout.sglang_streaming_rollout": "generate_streaming",
    "slime.rollout.sleep_rollout": "sleep",
    "slime.rollout.data_source": "DataSource RolloutDataSource RolloutDataSourceWithBuffer pop_first",
    "slime.rollout.fully_async_rollout": "AsyncRolloutWorker generate_rollout_fully_async",
    "slime.rollout.sft_rollout": "generate_rollout",
    "slime.rollout.on_policy_distillation": "reward_func post_process_rewards",
    "slime.ray.placement_group": "create_placement_groups create_rollout_manager create_training_models",
    "slime.ray.rollout_validation": "flatten_rollout_output",
    "slime.observability.logging_utils": "configure_logger init_tracking finish_tracking log",
    "slime.observability.tensorboard_utils": "TensorBoardTracker",
    "slime.observability.trace_utils": "trace_span trace_function trace_event bind_trace bind_trace_carrier export_trace "
    "import_trace trace_next_attempt build_sglang_meta_trace_attrs",
    # Their names are for tools and tests, and may be others in another version.
    "slime.observability.rollout_metrics": "",
    "slime.observability.rollout_data_utils": "",
    "slime.observability.train_data_utils": "",
    "slime.observability.train_metric_utils": "",
    "slime.observability.timer": "Timer timer inverse_timer with_defer",
    "slime.backends.megatron_utils.cp_utils": "get_logits_and_tokens_offset_with_cp get_sum_of_sample_mean "
    "all_gather_with_cp slice_with_cp slice_log_prob_with_cp",
    "slime.backends.megatron_utils.loss": "compute_advantages_and_returns policy_loss_function value_loss_function "
    "sft_loss_function loss_function get_log_probs_and_entropy get_values vanilla_tis_function icepop_function "
    "apply_opd_kl_to_advantages",
    "slime.backends.megatron_utils.megatron_to_hf": "convert_to_hf remove_padding",
    "slime.backends.megatron_utils.hf_to_megatron": "load_hf_weights",
    "slime.backends.megatron_utils.arguments": "set_default_megatron_args",
    "slime.backends.megatron_utils.initialize": "init",
    "slime.backends.megatron_utils.model_provider": "get_model_provider_func",
    "slime.backends.megatron_utils.stateless_adam": "StatelessAdam",
    "slime.backends.sglang_utils.arguments": "ServerArguments compute_server_arguments",
    "slime.backends.sglang_utils.external": "ExternalEngineInfo discover_external_engines normalize_external_engine_addr",
    "slime.backends.sglang_utils.sglang_engine": "SGLangEngine",
    "slime.backends.sglang_utils.sglang_config": "SglangConfig ModelConfig ServerGroupConfig",
    "slime.agent.trajectory": "TurnRecord TrajectoryManager",
    "slime.agent.adapters": "BaseAdapter OpenAIAdapter AnthropicAdapter parse_model_output",
    "slime.agent.harness": "HarnessContext BaseHarness ClaudeCodeHarness CodexHarness run_agent install_npm_cli install_node22",
    "slime.agent.aiohttp_threaded": "run_app_in_thread FilteredAccessLogger",
    "slime.agent.sandbox": "Sandbox exec_and_wait EXIT_TIME_BUDGET_EXCEEDED E2BSandbox LocalSandbox DockerSandbox",
    "slime.plugins": "check",
    "slime_plugins.models.flash_dot_product_attention": "",
    "slime_plugins.models.glm4": "get_glm_spec",
    "slime_plugins.models.glm5.glm5": "get_glm5_spec",
    "slime_plugins.models.hf_attention": "",
    "slime_plugins.models.learnable_softmax_attention": "",
    "slime_plugins.models.minimax_m2": "get_minimax_m2_layer_spec",
    "slime_plugins.models.qwen3_5": "get_qwen3_5_spec",
    "slime_plugins.models.qwen3_5_vl": "get_qwen3_5_vl_model_provider",
    "slime_plugins.models.qwen3_next": "get_qwen3_next_spec",
    "slime_plugins.models.qwen_gdn_backend": "",
    "slime_plugins.rollout_buffer": "",
}

# As users may call them: in this order, by position up to `*`, and with these defaults. Others may follow.
SIGNATURES = {
    "slime.utils.http_utils:post": "url, payload, max_retries=60, headers=None, *, json",
    "slime.utils.http_utils:get": "url",
    "slime.utils.http_utils:get_rollout_num_engines": "args",
    "slime.utils.http_utils:init_http_client": "args",
    "slime.utils.http_utils:find_available_port": "base",
    "slime.utils.misc:SingletonMeta.clear_instances": "",
    "slime.utils.misc:Box": "inner",
    "slime.utils.misc:should_run_periodic_action": "rollout_id, interval, num_rollout_per_epoch=None, num_rollout=None",
    "slime.utils.misc:decode_int32_meta_array": "meta, keys",
    "slime.utils.async_utils:run": "coro",
    "slime.utils.data:Dataset": "path, tokenizer, processor, max_length, *, prompt_key, multimodal_keys, label_key, tool_key, "
    "metadata_key, seed, apply_chat_template, apply_chat_template_kwargs",
    "slime.utils.data:read_file": "path",
    "slime.utils.data:filter_long_prompt": "samples, tokenizer, processor, max_length",
    "slime.utils.data:process_rollout_data": "args, refs, dp_rank, dp_size",
    "slime.utils.processing_utils:process_vision_info": "prompt, processor",
    "slime.utils.processing_utils:encode_image_for_rollout_engine": "image",
    "slime.utils.mask_utils:MultiTurnLossMaskGenerator": "tokenizer, tokenizer_type='qwen'",
    "slime.utils.mask_utils:MultiTurnLossMaskGenerator.get_loss_mask": "self, messages, tools=None",
    "slime.utils.mask_utils:MultiTurnLossMaskGenerator.get_response_lengths": "self, masks",
    "slime.utils.mask_utils:MultiTurnLossMaskGenerator.get_text_from_loss_mask": "self, token_ids, loss_mask",
    "slime.utils.mask_utils:MultiTurnLossMaskGenerator.get_loss_mask_with_multimodal_alignment": "self, messages, input_ids, "
    "tools=None",
    "slime.utils.ppo_utils:compute_approx_kl": "log_probs, log_probs_base, kl_loss_type, importance_ratio=None",
    "slime.utils.ppo_utils:compute_policy_loss": "ppo_kl, advantages, eps_clip, eps_clip_high, eps_clip_c=None",
    "slime.utils.ppo_utils:compute_cispo_loss": "ppo_kl, log_probs, advantages, eps_clip, eps_clip_high",
    "slime.utils.ppo_utils:compute_gspo_kl": "full_log_probs, full_old_log_probs, local_log_probs, loss_masks",
    "slime.utils.ppo_utils:compute_opsm_mask": "args, full_log_probs, full_old_log_probs, advantages, loss_masks",
    "slime.utils.ppo_utils:get_grpo_returns": "rewards, kl",
    "slime.utils.ppo_utils:get_reinforce_plus_plus_returns": "rewards, kl, loss_masks, response_lengths, total_lengths, "
    "kl_coef, gamma",
    "slime.utils.ppo_utils:get_reinforce_plus_plus_baseline_advantages": "rewards, kl, loss_masks, kl_coef",
    "slime.utils.ppo_utils:get_advantages_and_returns_batch": "total_lengths, response_lengths, values_list, rewards_list, "
    "gamma, lambd, chunked=True",
    "slime.utils.ppo_utils:vanilla_gae": "rewards, values, gamma, lambd",
    "slime.utils.ppo_utils:chunked_gae": "rewards, values, gamma, lambd, chunk_size=128",
    "slime.utils.ppo_utils:chunked_discounted_returns": "rewards, discount, chunk_size=128",
    "slime.utils.ppo_utils:calculate_log_probs_and_entropy": "logits, tokens, tp_group, with_entropy=False, chunk_size=-1, "
    "log_prob_keep_mask=None, with_entropy_grad=True",
    "slime.utils.arguments:parse_args": "add_custom_arguments=None",
    "slime.utils.eval_config:build_eval_dataset_configs": "args, raw_config, defaults",
    "slime.utils.dp_schedule:build_dp_schedule": "args, train_parallel_config, total_lengths, *, global_batch_size, "
    "rollout_indices",
    "slime.utils.distributed_utils:distributed_masked_whiten": "values, mask, process_group=None, shift_mean=True, "
    "epsilon=1e-8",
    "slime.utils.types:Sample.to_dict": "self",
    "slime.utils.types:Sample.from_dict": "d",
    "slime.utils.types:Sample.get_reward_value": "self, args",
    "slime.utils.types:Sample.reset_for_retry": "self",
    "slime.utils.types:Sample.append_response_tokens": "self, args=None, *, tokens=None, log_probs=None, trainable=True, "
    "meta_info=None, text=None, update_terminal_info=True",
    "slime.utils.types:ParamInfo": "name, dtype, shape, attrs, size, src_rank",
    "slime.utils.types:MultimodalType": "name, placeholder",
    "slime.utils.types:MultimodalTypes.all": "",
    "slime.utils.types:MultimodalTypes.get": "name",
    "slime.rollout.sglang_rollout:generate": "args, sample, sampling_params",
    "slime.rollout.sglang_rollout:generate_and_rm": "args, sample, sampling_params, evaluation=False",
    "slime.rollout.sglang_rollout:generate_and_rm_group": "args, group, sampling_params, evaluation=False",
    "slime.rollout.sglang_rollout:generate_rollout": "args, rollout_id, data_source, evaluation=False",
    "slime.rollout.sglang_rollout:eval_rollout": "args, rollout_id",
    "slime.rollout.sglang_rollout:get_model_url": "args, model_name, endpoint='/generate'",
    "slime.rollout.sft_rollout:generate_rollout": "args, rollout_id, data_source, evaluation=False",
    "slime.rollout.forge_load:generate_rollout": "args, rollout_id, data_source, evaluation=False",
    "slime.rollout.rm_hub:async_rm": "args, sample, **kw",
    "slime.rollout.rm_hub:batched_async_rm": "args, samples, **kw",
    "slime.rollout.data_source:RolloutDataSourceWithBuffer.get_metadata": "self",
    "slime.rollout.data_source:RolloutDataSourceWithBuffer.update_metadata": "self, metadata",
    "slime.rollout.data_source:RolloutDataSourceWithBuffer.get_buffer_length": "self",
    "slime.rollout.filter_hub.base_types:call_dynamic_filter": "fn, *a, **kw",
    "slime.rollout.filter_hub.base_types:should_drop_dynamic_filter_output": "out, *, remaining_batch_size, target_data_size",
    "slime.rollout.filter_hub.base_types:DynamicFilterOutput": "keep, reason=None, keep_when_insufficient=False",
    "slime.rollout.filter_hub.base_types:MetricGatherer.on_dynamic_filter_drop": "self, reason",
    "slime.rollout.filter_hub.base_types:MetricGatherer.collect": "self",
    "slime.rollout.base_types:RolloutFnTrainOutput": "samples, metrics=None",
    "slime.rollout.base_types:RolloutFnEvalOutput": "data, metrics=None",
    "slime.rollout.base_types:call_rollout_fn": "fn, *args, evaluation, **kw",
    "slime.ray.placement_group:create_placement_groups": "args",
    "slime.ray.placement_group:create_rollout_manager": "args, pg",
    "slime.ray.placement_group:create_training_models": "args, pgs, rollout_manager, actor_cls=None",
    "slime.observability.logging_utils:log": "args, metrics, step_key",
    "slime.backends.megatron_utils.cp_utils:get_logits_and_tokens_offset_with_cp": "total_length, response_length",
    "slime.backends.megatron_utils.cp_utils:get_sum_of_sample_mean": "total_lengths, response_lengths, loss_masks, "
    "sample_denoms=None, calculate_per_token_loss=False",
    "slime.backends.megatron_utils.cp_utils:all_gather_with_cp": "tensor, total_length, response_length",
    "slime.backends.megatron_utils.cp_utils:slice_with_cp": "tokens, pad_value",
    "slime.backends.megatron_utils.cp_utils:slice_log_prob_with_cp": "log_prob, total_length, response_length",
    "slime.backends.megatron_utils.loss:compute_advantages_and_returns": "args, rollout_data",
    "slime.backends.megatron_utils.arguments:set_default_megatron_args": "args",
    "slime.backends.megatron_utils.megatron_to_hf:convert_to_hf": "args, model_name, name, param, quantization_config=None",
    "slime.backends.sglang_utils.sglang_config:SglangConfig.from_yaml": "path",
    "slime.agent.trajectory:TurnRecord": "prompt_ids, output_ids, finish_reason, output_log_probs=[], ill_formed=False",
    "slime.agent.trajectory:TrajectoryManager": "fork_threshold_tokens=1024",
    "slime.agent.trajectory:TrajectoryManager.has_session": "self, sid",
    "slime.agent.trajectory:TrajectoryManager.turn_count": "self, sid",
    "slime.agent.trajectory:TrajectoryManager.record_turn": "self, sid, *, turn, prompt_messages, response_message, "
    "metadata=None",
    "slime.agent.trajectory:TrajectoryManager.get_trajectory": "self, sid, *, base_sample, reward=0.0, extra_metadata=None, "
    "max_sample_tokens=0",
    "slime.agent.trajectory:TrajectoryManager.drop_session": "self, sid",
    "slime.agent.adapters:BaseAdapter": "tokenizer, sglang_url, tool_parser, reasoning_parser, max_turns_per_sid, "
    "fork_threshold_tokens, debug_callback",
    "slime.agent.adapters:BaseAdapter.open_session": "self, sid, sampling_defaults, max_context_tokens",
    "slime.agent.adapters:BaseAdapter.shutdown_session": "self, sid, wait_timeout=5",
    "slime.agent.adapters:BaseAdapter.drop_session": "self, sid",
    "slime.agent.adapters:parse_model_output": "text, tools_schema, tool_parser_name, reasoning_parser_name",
    "slime.agent.aiohttp_threaded:run_app_in_thread": "app, *, host='127.0.0.1', port=0, thread_name, start_timeout_sec=15, "
    "runner_kwargs",
    "slime.agent.harness:HarnessContext": "workdir, session_id, adapter_url, model_label='slime-actor'",
    "slime.agent.harness:BaseHarness.install_cli": "self, sb",
    "slime.agent.harness:BaseHarness.write_config": "self, sb, ctx",
    "slime.agent.harness:BaseHarness.launch_and_wait": "self, sb, ctx, prompt, time_budget_sec",
    "slime.agent.harness:BaseHarness.run": "self, sb, *, workdir, session_id, adapter_url, time_budget_sec, prompt",
    "slime.agent.sandbox:Sandbox.exec": "self, cmd, *, user='root', env=None, timeout=120, check=False, idempotent=True",
    "slime.agent.sandbox:Sandbox.write_file": "self, path, content, *, user",
    "slime.agent.sandbox:Sandbox.read_file": "self, path, *, user",
    "slime.agent.sandbox:exec_and_wait": "sb, *, cmd, time_budget_sec, tag, user, env, workdir, out_file, want_output",
}

# (place, parameter) → what is there instead. None means the flag whose default is the public one, so that a run may change it.
OTHER_DEFAULTS = {
    ("slime.utils.http_utils:post", "max_retries"): None,
    # A list of its own for every record.
    ("slime.agent.trajectory:TurnRecord", "output_log_probs"): dataclasses._HAS_DEFAULT_FACTORY,
}


@pytest.mark.parametrize("module", PUBLIC_NAMES)
def test_public_names_are_there(module):
    found = importlib.import_module(module)
    assert [name for name in PUBLIC_NAMES[module].split() if not hasattr(found, name)] == []


@pytest.mark.parametrize("place", SIGNATURES)
def test_calls_as_they_are_public_are_possible(place):
    module, _, path = place.partition(":")
    found = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    ours = inspect.signature(found).parameters
    public = inspect.signature(eval(f"lambda {SIGNATURES[place]}: None")).parameters
    by_position = [name for name, one in public.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(by_position)] == by_position
    for name, one in public.items():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            assert one.kind in [other.kind for other in ours.values()]
            continue
        assert ours[name].kind in ({one.kind} if name in by_position else {one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD})
        if one.default is not one.empty:
            assert ours[name].default == OTHER_DEFAULTS.get((place, name), one.default), name
    more = [one for name, one in ours.items() if name not in public]
    assert all(one.default is not one.empty for one in more if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD))


def test_other_defaults_come_to_the_same():
    assert OWN_FLAGS["http_max_retries"].default == 60
    assert TurnRecord([], [], "stop").output_log_probs == []
