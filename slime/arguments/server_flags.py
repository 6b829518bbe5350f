"""What a run says of the flags of its engines and router, wherever they are given: which it refuses, and what is no share."""

_OWN_ENGINES = "the run starts its engines and registers them with the router; drop it"
_FOUND_ENGINES = "engines that the router finds by itself would not get the trainer's weights; drop it"
_OWN_ADDRESS = "it binds the address that its node announces; set SLIME_HOST_IP there for another one"
_ONE_KEY = "router and engines of a run share one key; give it as --router-api-key"
_HTTP_ONLY = "engines are controlled over HTTP; drop it"

# Flags that every server accepts and that a run cannot leave to the user: attribute → reason and way out. Here, and not
# missing from the command line, so that whoever types one reads why.
REFUSED: dict[str, str] = {
    "sglang_host": f"an engine is not free to choose: {_OWN_ADDRESS}",
    "sglang_api_key": _ONE_KEY,
    "sglang_admin_api_key": f"control requests carry the same key as all others: {_ONE_KEY}",
    "sglang_tokenizer_path": "the run encodes prompts with the tokenizer of --hf-checkpoint, and engines must agree; "
    "put the tokenizer there",
    "sglang_skip_tokenizer_init": "rollouts need the text of responses; drop it",
    "sglang_is_embedding": "rollouts need engines that generate; drop it",
    "sglang_weight_version": "the run numbers the versions of its weights; drop it",
    "sglang_allow_auto_truncate": "the trainer would learn from prompts of which the engine saw a part; give "
    "--rollout-max-prompt-len, which leaves out prompts that are too long",
    "sglang_delete_ckpt_after_loading": "it deletes --hf-checkpoint, which the run reads again; drop it",
    "sglang_checkpoint_engine_wait_weights_before_ready": "weights are pushed to engines that are ready, so the engine "
    "and the run would wait for each other; drop it",
    "sglang_gated_launch_port": "nobody in a run opens that gate, so the engine would never be ready; drop it",
    "sglang_grpc_mode": _HTTP_ONLY,
    "sglang_smg_grpc_mode": _HTTP_ONLY,
    "sglang_use_ray": "engines already live in Ray actors; drop it",
    "router_host": f"the router of a run is not free to choose: {_OWN_ADDRESS}, or start a router yourself and give "
    "--sglang-router-ip and --sglang-router-port",
    "router_port": "the router of a run takes a free port; start a router yourself and give --sglang-router-ip and "
    "--sglang-router-port",
    "router_worker_urls": _OWN_ENGINES,
    "router_prefill_urls": _OWN_ENGINES,
    "router_decode_urls": _OWN_ENGINES,
    "router_mini_lb": "it belongs to another program than the router; drop it",
    "router_enable_igw": "one router serves one model; drop it",
    "router_service_discovery": _FOUND_ENGINES,
    "router_service_discovery_port": _FOUND_ENGINES,
    "router_service_discovery_namespace": _FOUND_ENGINES,
    "router_selector": _FOUND_ENGINES,
    "router_prefill_selector": _FOUND_ENGINES,
    "router_decode_selector": _FOUND_ENGINES,
}


def share_problem(share: float | None) -> str | None:
    """What is wrong with a share of the GPU's memory; None (unset) is right."""
    wrong = share is not None and not 0 < share < 1
    return "it is a share of the GPU's memory, such as 0.8" if wrong else None
