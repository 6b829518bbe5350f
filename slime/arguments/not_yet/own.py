"""Rows for our own flags, in the order of their groups."""

from slime.arguments.not_yet.row import NotYet

_OFFLOAD = "sharing GPUs between training and engines"
_FSDP = "the FSDP backend"
_ASYNC = "the asynchronous loop"
_DISK = "weight transport through files"
_DELTA = "delta weight transport"
_FAULTS = "fault tolerance"
_MEDIA = "a data set with images, video or audio"
_MEMORY = "recording memory"
_CI = "checking the numbers of a test run"
_BUFFER_SERVICE = "the client of the rollout buffer service"
_MEGATRON_HOOKS = "hooking into Megatron"
_DEEPGEMM = "block-FP8 forward in the trainer"

_PLACEMENT = (
    NotYet("colocate", _OFFLOAD),
    NotYet("offload", _OFFLOAD),
    NotYet("offload_train", _OFFLOAD),
    NotYet("offload_rollout", _OFFLOAD),
    NotYet("train_backend", _FSDP, works=("megatron",)),
    NotYet("max_restarts", "restarting training by itself", works=(0,)),
)

_WEIGHTS = (
    NotYet("release_train", "ending the trainer during generation"),
    NotYet("recompute_loss_function", "recomputing the loss"),
    NotYet("async_save", "saving in the background"),
    NotYet("update_weight_mode", _DELTA, works=("full",)),
    NotYet("update_weight_transport", _DISK, works=("nccl",)),
    NotYet("update_weights_interval", _ASYNC, works=(1,)),
    NotYet("update_weights_in_flight", "swapping weights under running requests"),
    NotYet("update_weight_disk_dir", _DISK),
    NotYet("update_weight_disk_keep_files", _DISK),
    NotYet("update_weight_delta_encoding", _DELTA, works=("xor",)),
    NotYet("update_weight_delta_checksum", _DELTA, works=("xxh3-128",)),
    NotYet("update_weight_local_checkpoint_dir", _DISK),
    NotYet("custom_update_weight_post_write_path", _DISK),
    NotYet("custom_model_provider_path", "an own model provider"),
    NotYet("qwen_gdn_backend", "a gated-delta-net layer", works=("fla",)),
    NotYet("use_gated_attention", "gated attention"),
    NotYet("post_self_attn_layernorm", "a further norm in a layer"),
    NotYet("post_mlp_layernorm", "a further norm in a layer"),
)

_ROLLOUT = (
    NotYet("rollout_external_engine_addrs", "serving by engines that the run did not start"),
    NotYet("rollout_data_transport", "another transport of batches than the object store", works=("object-store",)),
    NotYet("async_buffer_size", _ASYNC, works=(1,)),
    NotYet("max_weight_staleness", "a limit on the age of samples"),
    NotYet("multimodal_keys", _MEDIA),
    NotYet("streaming_data", "reading data on demand"),
    NotYet("num_data_workers", "preparing prompts in further processes", works=(0,)),
    NotYet("use_fault_tolerance", _FAULTS),
    NotYet("rollout_health_check_interval", _FAULTS, works=(30.0,)),
    NotYet("rollout_health_check_timeout", _FAULTS, works=(30.0,)),
    NotYet("rollout_health_check_first_wait", _FAULTS, works=(0.0,)),
    NotYet("use_distributed_post", "a client process on every node"),
    NotYet("rollout_buffer_url", _BUFFER_SERVICE),
    NotYet("fetch_trajectory_retry_times", _BUFFER_SERVICE, works=(-1,)),
    NotYet("rollout_task_type", _BUFFER_SERVICE, works=("math",)),
)

_OBJECTIVE = (
    NotYet("use_rollout_routing_replay", "asking the engines for the experts that they chose"),
    NotYet("true_on_policy_mode", "the proof of bitwise equal log-probs"),
)

_TRAINER = (
    NotYet("attn_implementation", _FSDP, works=("auto",)),
    NotYet("fsdp_cpu_offload", _FSDP),
    NotYet("custom_megatron_init_path", _MEGATRON_HOOKS),
    NotYet("custom_megatron_before_log_prob_hook_path", _MEGATRON_HOOKS),
    NotYet("custom_megatron_before_train_step_hook_path", _MEGATRON_HOOKS),
    NotYet("megatron_deepgemm_forward_layers", _DEEPGEMM),
    NotYet("megatron_deepgemm_forward_modules", _DEEPGEMM),
    NotYet("megatron_deepgemm_moe_forward_layers", _DEEPGEMM),
    NotYet("megatron_deepgemm_moe_forward_modules", _DEEPGEMM, works=(["mlp.experts"],)),
)

_DEBUGGING = (
    NotYet("log_multi_turn", "counting the turns of dialogues"),
    NotYet("load_forge_rollout_data", "replaying a dump beside living engines"),
    NotYet("memory_probe", "the probe of the longest micro-batch"),
    NotYet("record_memory_history", _MEMORY),
    NotYet("memory_recorder", _MEMORY, works=("torch",)),
    NotYet("memory_snapshot_dir", _MEMORY, works=(".",)),
    NotYet("memory_snapshot_num_steps", _MEMORY),
    NotYet("profile_target", "profiling", works=(["train_overall"],)),
    NotYet("ci_test", _CI),
    NotYet("ci_disable_kl_checker", _CI),
    NotYet("ci_train_rollout_logprob_abs_diff_threshold", _CI, works=(0.1,)),
    NotYet("ci_save_grad_norm", _CI),
    NotYet("ci_load_grad_norm", _CI),
)

ROWS: tuple[NotYet, ...] = (*_PLACEMENT, *_WEIGHTS, *_ROLLOUT, *_OBJECTIVE, *_TRAINER, *_DEBUGGING)
