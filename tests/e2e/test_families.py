"""Every family that SGLang serves on the CPU: five rollouts of GRPO, after each of which trainer and engine agree; and exports
that are served as what the run ended with."""

import contextlib

import pytest

from tests.support.models.tiny_task import TinyTask, make_tiny_task
from tests.support.processes.plain_engine import KEY, PlainEngine
from tests.support.processes.train_process import TrainProcess

LOG_PROB_GATE = 1e-5
ROLLOUTS = range(5)
_EXPERTS = {
    "tie": False, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32,
    "n_shared_experts": 1,
}  # fmt: skip
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
# SGLang reads entries that published configs have, and classes of transformers do not.
_LATENT = {
    **_EXPERTS, "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16, "n_group": 4, "topk_group": 2, "moe_layer_freq": 1,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512, "mscale": 1.0,
        "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
    },
}  # fmt: skip
# Of a prompt and its answer, five keys for each token. With few heads several keys have a score of exactly 0, and of these any
# may be taken.
_INDEXER = {"index_topk": 5, "index_n_heads": 32, "index_head_dim": 32}
_TOWER = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64, "patch_size": 2,
    "num_position_embeddings": 4, "temporal_patch_size": 1,
}  # fmt: skip
_SEEING = {
    "vision": {**_TOWER, "deepstack_visual_indexes": [0]},
    # Text has the same positions in time, height and width.
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]},
}  # fmt: skip
# A layer with linear attention, two values per key, and one with softmax attention.
_DELTA_NET = {
    "tie": False, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
_GATED_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64,
}  # fmt: skip
_HALF_ROTATED = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}
_GLM4 = {"model_type": "glm4", "attention_bias": True, "tie": False, **_HALF_ROTATED}
_GLM4_MOE = {
    **_EXPERTS, **_ONE_GROUP, **_HALF_ROTATED, "model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": True,
}  # fmt: skip
# It refuses this with latent attention on CPU.
_DETERMINISTIC, _TRUSTED = "--sglang-enable-deterministic-inference", "--trust-remote-code"
# Types whose config is code that lies beside the checkpoint.
OF_CODE = ("mimo",)
# Family -> its config, beside that of every tiny checkpoint.
SERVED = {
    "qwen2": {"model_type": "qwen2"},
    "qwen2 untied": {"model_type": "qwen2", "tie": False},
    "qwen3": {"model_type": "qwen3"},
    "qwen3 untied": {"model_type": "qwen3", "tie": False},
    "llama": {"model_type": "llama", "tie": False},
    "llama3": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "mimo": {"model_type": "mimo", "tie": False},
    "qwen2_moe": {"model_type": "qwen2_moe", "tie": False, **_GATED_EXPERTS},
    # SGLang holds a head of its own for this family; published models have one.
    "qwen3_moe": {
        "model_type": "qwen3_moe", "tie": False, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "norm_topk_prob": True,
    },
    "qwen3_next": {"model_type": "qwen3_next", **_DELTA_NET, **_GATED_EXPERTS},
    # On text, as the next ones.
    "qwen3_5": {"model_type": "qwen3_5", **_DELTA_NET, "vision": _TOWER},
    "qwen3_5 tied": {"model_type": "qwen3_5", **_DELTA_NET, "tie": True, "vision": _TOWER},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe", **_DELTA_NET, **_GATED_EXPERTS, "vision": _TOWER},
    "qwen3_vl": {"model_type": "qwen3_vl", **_SEEING},
    "qwen3_vl untied": {"model_type": "qwen3_vl", "tie": False, **_SEEING},
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe", "tie": False, **_SEEING, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
    "deepseek_v3": _LATENT,
    "moonlight": {
        **_LATENT, **_ONE_GROUP, "q_lora_rank": None, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    },
    "kimi_k2": {**_LATENT, **_ONE_GROUP, "model_type": "kimi_k2"},
    "deepseek_v32": {**_LATENT, **_INDEXER, "model_type": "deepseek_v32", "num_experts": 8},
    "glm_moe_dsa": {
        **_LATENT, **_ONE_GROUP, **_INDEXER, "model_type": "glm_moe_dsa", "num_hidden_layers": 4,
        "indexer_types": ["full", "shared", "full", "shared"], "indexer_rope_interleave": True,
    },
    "glm4_moe_lite": {
        **_LATENT, **_ONE_GROUP, "model_type": "glm4_moe_lite",
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    },
    "glm4_moe": _GLM4_MOE,
    "glm4_moe without norms": {**_GLM4_MOE, "use_qk_norm": False},
    "minimax_m2": {
        "model_type": "minimax_m2", "tie": False, "num_local_experts": 8, "num_experts_per_tok": 4, "head_dim": 16,
        "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer",
        "rotary_dim": 8, **_HALF_ROTATED,
    },
    "glm4": _GLM4,
    "glm4 without bias": {**_GLM4, "attention_bias": False},
}  # fmt: skip


def flags_of(name: str, task: TinyTask) -> list[str]:
    """Flags of generation and training, as far as the engine takes them for the family."""
    flags = [*task.rollout_flags, *task.train_flags]
    if "kv_lora_rank" in SERVED[name]:
        flags.remove(_DETERMINISTIC)
    if SERVED[name]["model_type"] in OF_CODE:
        flags.append(_TRUSTED)
    return flags


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_trainer_and_engine_agree_on_log_probs_after_every_weight_update(name, tmp_path):
    task = make_tiny_task(tmp_path / "task", **SERVED[name])
    flags = [
        *flags_of(name, task), "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1",
        "--num-rollout", str(len(ROLLOUTS)), "--check-weight-update-equal",
        # In many buckets.
        "--update-weight-buffer-size", "4096",
    ]  # fmt: skip
    with TrainProcess(flags, tmp_path / "run") as process:
        process.wait_for_success(300)
        process.assert_no_process_left()
    differences = process.scalars("train/train_rollout_logprob_abs_diff")
    assert sorted(differences) == list(ROLLOUTS)
    assert all(0 < difference <= LOG_PROB_GATE for difference in differences.values()), differences
    # The weights have moved meanwhile, by far more than that.
    assert process.scalars("train/kl_loss")[ROLLOUTS[-1]] > 10 * LOG_PROB_GATE


PROMPTS = [[5, 9, 77, 200, 31, 8, 90, 3], [4, 100, 119], [60, 2, 2, 17, 230]]


def generated_greedily(engine: PlainEngine) -> list[tuple[list[int], list[float]]]:
    """Token ids and log-probs of the likeliest answer to each of `PROMPTS`."""
    found = []
    for prompt in PROMPTS:
        sampling = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
        payload = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        rows = engine.ask("POST", "/generate", payload).json()["meta_info"]["output_token_logprobs"]
        found.append(([row[1] for row in rows], [row[0] for row in rows]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_an_export_generates_what_the_engine_of_the_run_does(name, tmp_path):
    """The engine is somebody else's, so that it is there when the run has ended, with the weights of the last push."""
    task = make_tiny_task(tmp_path / "task", **SERVED[name])
    words = [word.replace("--sglang-", "--") for word in flags_of(name, task) if word in (_DETERMINISTIC, _TRUSTED)]
    with contextlib.ExitStack() as stack:

        def serve(model) -> PlainEngine:
            engine = PlainEngine(model, tmp_path / f"{model.name}.log", words)
            stack.callback(engine.end)
            return engine

        engine = serve(task.model)
        before = generated_greedily(engine)
        flags = [
            *flags_of(name, task), "--actor-num-gpus-per-node", "1", "--num-rollout", "2",
            "--rollout-external-engine-addrs", engine.address, "--router-api-key", KEY,
            "--save", tmp_path / "checkpoints", "--save-interval", "2", "--save-hf", tmp_path / "export",
        ]  # fmt: skip
        TrainProcess(flags, tmp_path / "run").finish(300)
        assert engine.weight_version == "3"
        pushed = generated_greedily(engine)
        engine.end()
        fresh = serve(tmp_path / "export")
        # The first answers of a process may be rounded otherwise; those of the other engine are not its first either.
        generated_greedily(fresh)
        exported = generated_greedily(fresh)
    assert [tokens for tokens, _ in exported] == [tokens for tokens, _ in pushed]
    for (_, found), (_, expected) in zip(exported, pushed, strict=True):
        assert found == pytest.approx(expected, abs=1e-6)
    # Training moved them by more: of the first token the log-probs have the same tokens before them.
    assert max(abs(was[0] - now[0]) for (_, was), (_, now) in zip(before, pushed, strict=True)) > 1e-3


# Family -> how two training ranks share it.
ON_TWO_RANKS = {
    "deepseek_v3": ["--expert-model-parallel-size", "2"],
    "minimax_m2": ["--pipeline-model-parallel-size", "2"],
    "qwen3_next": ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_two_training_ranks_agree_with_the_engine_after_every_weight_update(name, tmp_path):
    task = make_tiny_task(tmp_path / "task", **SERVED[name])
    flags = [
        *flags_of(name, task), *ON_TWO_RANKS[name], "--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "1",
        "--num-rollout", "3", "--check-weight-update-equal", "--update-weight-buffer-size", "4096",
    ]  # fmt: skip
    process = TrainProcess(flags, tmp_path / "run").finish(300)
    differences = process.scalars("train/train_rollout_logprob_abs_diff")
    assert sorted(differences) == [0, 1, 2]
    assert all(0 < difference <= LOG_PROB_GATE for difference in differences.values()), differences
    assert process.scalars("train/kl_loss")[2] > 10 * LOG_PROB_GATE
