"""Users' plug-ins import these: module → names. Arguments are tested where the things are."""

import importlib

import pytest

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
    "slime.utils.memory_utils": "clear_memory available_memory print_memory",
    "slime.utils.external_utils.command_utils": "execute_train convert_checkpoint exec_command",
    "slime.rollout.sglang_rollout": "GenerateState generate generate_and_rm generate_and_rm_group generate_rollout "
    "generate_rollout_async eval_rollout abort get_model_url",
    "slime.rollout.rm_hub": "async_rm batched_async_rm grade_answer_verl get_deepscaler_rule_based_reward",
    "slime.rollout.rm_hub.math_utils": "extract_answer extract_boxed_answer remove_boxed last_boxed_only_string "
    "grade_answer_mathd grade_answer_sympy grade_answer_verl",
    "slime.rollout.rm_hub.math_dapo_utils": "compute_score normalize_final_answer remove_boxed",
    "slime.rollout.rm_hub.f1": "f1_score",
    "slime.rollout.filter_hub.base_types": "DynamicFilterOutput call_dynamic_filter should_drop_dynamic_filter_output "
    "MetricGatherer",
    "slime.rollout.filter_hub.dynamic_sampling_filters": "check_reward_nonzero_std check_reward_nonzero_std_with_fallback",
    "slime.rollout.base_types": "RolloutFnTrainOutput RolloutFnEvalOutput call_rollout_fn",
    "slime.rollout.sample_hooks": "apply_rollout_sample_hooks",
    "slime.rollout.forge_load": "generate_rollout",
    "slime.rollout.sglang_streaming_rollout": "generate_streaming",
    "slime.rollout.sleep_rollout": "sleep",
    "slime.rollout.data_source": "DataSource RolloutDataSource RolloutDataSourceWithBuffer pop_first",
    "slime.rollout.sft_rollout": "generate_rollout",
    "slime.rollout.on_policy_distillation": "reward_func post_process_rewards",
    "slime.ray.placement_group": "create_placement_groups create_rollout_manager create_training_models",
    "slime.ray.rollout_validation": "flatten_rollout_output",
    "slime.observability.logging_utils": "configure_logger init_tracking finish_tracking log",
    "slime.observability.tensorboard_utils": "TensorBoardTracker",
    "slime.observability.timer": "Timer timer inverse_timer with_defer",
    "slime.backends.megatron_utils.cp_utils": "get_logits_and_tokens_offset_with_cp get_sum_of_sample_mean "
    "all_gather_with_cp slice_with_cp slice_log_prob_with_cp",
    "slime.backends.megatron_utils.loss": "compute_advantages_and_returns policy_loss_function value_loss_function "
    "sft_loss_function loss_function get_log_probs_and_entropy get_values vanilla_tis_function icepop_function "
    "apply_opd_kl_to_advantages",
    "slime.backends.sglang_utils.external": "ExternalEngineInfo discover_external_engines normalize_external_engine_addr",
    "slime.backends.sglang_utils.sglang_engine": "SGLangEngine",
    "slime.backends.sglang_utils.sglang_config": "SglangConfig ModelConfig ServerGroupConfig",
}


@pytest.mark.parametrize("module", PUBLIC_NAMES)
def test_public_names_are_there(module):
    found = importlib.import_module(module)
    assert [name for name in PUBLIC_NAMES[module].split() if not hasattr(found, name)] == []
