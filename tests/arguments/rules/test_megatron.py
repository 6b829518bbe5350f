"""Every rule of Megatron's flags, broken once: the message names flags, values and a way out."""

import argparse
import importlib.util

import pytest

from slime.arguments import parse_args
from slime.arguments.derivation import settle_precision
from slime.arguments.megatron.effects import ACTS_WITH, FIXED
from slime.arguments.megatron.values import derive_megatron_values
from slime.arguments.origins import Origin
from slime.arguments.rules.megatron import pipeline_layout
from slime.arguments.violations import Kind, broken
from slime.models.fsdp import FLASH_ATTENTION
from slime.utils.errors import UserError
from tests.support.models.args import command_line, default_args, parse, write_config
from tests.support.tables.rules import assert_violation, refusal, violations

FOUR = "--actor-num-gpus-per-node 4"


def test_group_query_attention_needs_its_groups(tmp_path):
    words = [word for word in command_line(tmp_path) if word != "--model-args-from-hf"]
    shape = "--num-layers 2 --hidden-size 66 --ffn-hidden-size 128 --num-attention-heads 4 --vocab-size 300"
    with pytest.raises(UserError) as error:
        parse_args(argv=[*words, *shape.split(), "--group-query-attention"])
    assert "--group-query-attention needs --num-query-groups, a divisor of --num-attention-heads 4" in str(error.value)
    assert "--hidden-size 66 is no multiple of --num-attention-heads 4; give --kv-channels" in str(error.value)
    assert "give --swiglu --disable-bias-linear --normalization RMSNorm, or --model-args-from-hf" in str(error.value)


def test_tensor_parallel_ranks_may_share_key_and_value_heads(tmp_path):
    """Four ranks with two heads, and six where they neither share nor divide."""
    assert parse(tmp_path, *FOUR.split(), "--tensor-model-parallel-size", "4").num_query_groups == 2
    lines = violations(tmp_path, f"{FOUR} --tensor-model-parallel-size 4 --num-attention-heads 12 --num-query-groups 6")
    assert [line for line in lines if "--tensor-model-parallel-size 4 does not divide --num-query-groups 6" in line]


def test_tensor_parallel_ranks_hold_whole_heads_of_linear_attention(tmp_path):
    words = f"{FOUR} --tensor-model-parallel-size 4 --linear-attention-freq 4 --linear-num-key-heads"
    message = "--tensor-model-parallel-size 4 does not divide --linear-num-key-heads 6; 3 would do"
    assert message in violations(tmp_path, f"{words} 6")
    assert not [line for line in violations(tmp_path, f"{words} 8") if "does not divide" in line]


def test_fsdp_packs_no_samples_for_linear_attention(tmp_path):
    lines = violations(tmp_path, "--train-backend fsdp --linear-attention-freq 4")
    assert [
        line for line in lines if line.startswith("--linear-attention-freq 4 is not built for --train-backend fsdp")
    ]


def test_the_projection_of_queries_keys_and_values_is_cut_evenly(tmp_path):
    """Two groups of keys and 48 heads of 16 channels: 832 = 2^6 x 13 channels, which 12 ranks cannot share."""
    shape = "--num-attention-heads 48 --kv-channels 16 --num-query-groups 2 --actor-num-gpus-per-node"
    (line,) = [
        line for line in violations(tmp_path, f"{shape} 12 --tensor-model-parallel-size 12") if "channels of" in line
    ]
    assert line.startswith(
        "--tensor-model-parallel-size 12 does not divide the 832 channels of queries, keys and values"
    )
    assert line.endswith("; --tensor-model-parallel-size 1 or 2 or 4 or 8 would do")
    lines = violations(tmp_path, f"{shape} 8 --tensor-model-parallel-size 8")
    assert not [line for line in lines if "channels of" in line]


@pytest.mark.parametrize("flag", ["--rotary-seq-len-interpolation-factor 2", "--softmax-scale 0.1"])
def test_latent_attention_has_its_own_scale_and_positions(tmp_path, flag):
    message = f"{flag} has no effect with --multi-latent-attention; drop it"
    assert message in violations(tmp_path, f"--multi-latent-attention {flag}")


def test_an_unknown_shape_names_what_is_missing(tmp_path):
    words = [word for word in command_line(tmp_path) if word != "--model-args-from-hf"]
    with pytest.raises(UserError, match="the model's shape is not known: give --num-layers, --hidden-size"):
        parse_args(argv=words)


def test_sparse_attention_models_may_gather_context(tmp_path):
    write_config(tmp_path / "dsa", architectures=["DeepseekV32ForCausalLM"], model_type="deepseek_v32")
    words = f"{FOUR} --context-parallel-size 2 --allgather-cp --hf-checkpoint {tmp_path / 'dsa'}"
    assert not any("works for DeepseekV32ForCausalLM" in line for line in violations(tmp_path, words))


def test_all_broken_rules_are_reported_together(tmp_path):
    lines = violations(tmp_path, "--sequence-parallel --bf16 --fp16 --recompute-method uniform")
    for word in ("--sequence-parallel", "--fp16", "--recompute-method"):
        assert [line for line in lines if word in line], word


def test_layouts_of_published_runs_break_no_rule(tmp_path):
    """Stages that an even split leaves one short, as DeepSeek V3 is run: 16 + 16 + 16 + 13 layers."""
    words = (
        "--num-layers 61 --actor-num-nodes 16 --actor-num-gpus-per-node 8 --pipeline-model-parallel-size 4 "
        "--tensor-model-parallel-size 2 --decoder-last-pipeline-num-layers 13"
    )
    text = "\n".join(violations(tmp_path, words))  # 61 layers are not what the config says, and pipelines are not built
    assert "evenly" not in text and "must divide" not in text


@pytest.mark.parametrize(
    "words",
    [
        "--num-layers 10 --decoder-first-pipeline-num-layers 4 --num-virtual-stages-per-pipeline-rank 2",
        "--num-layers 7 --account-for-embedding-in-pipeline-split --num-virtual-stages-per-pipeline-rank 2",
        "--num-layers 7 --account-for-loss-in-pipeline-split --num-layers-per-virtual-pipeline-stage 2",
    ],
)
def test_what_the_plan_can_split_breaks_no_rule(tmp_path, words):
    text = "\n".join(violations(tmp_path, f"--actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2 {words}"))
    assert not any(part in text for part in ("cannot be", "multiple", "divide", "would do"))


def test_an_objective_without_a_ratio_of_log_probs_may_have_noise(tmp_path):
    assert parse(tmp_path, "--hidden-dropout", "0.1", "--loss-type", "sft_loss").hidden_dropout == 0.1
    parse(tmp_path, "--hidden-dropout", "0.0")


@pytest.mark.parametrize("words", ["--moe-router-topk 8 --bf16 --fp16", "--num-experts 8", "--sequence-parallel"])
def test_runs_that_only_generate_are_not_asked(tmp_path, words):
    args = parse(tmp_path, "--debug-rollout-only", "--dry-run", *words.split())
    assert not args.has_trainer


@pytest.mark.parametrize(
    "words",
    ["--expert-tensor-parallel-size 1", "--moe-router-topk 1", "--tp-comm-overlap-ag", "--moe-aux-loss-coeff 0",
     "--use-persistent-ckpt-worker", "--attention-softmax-in-fp32", "--no-gradient-reduce-div-fusion",
     "--moe-router-topk-scaling-factor 1", "--loss-scale 1", "--mscale 1", "--rope-scaling-factor 1"],
)  # fmt: skip
def test_flags_that_ask_for_nothing_are_fine_anywhere(tmp_path, words):
    parse(tmp_path, *words.split())


@pytest.mark.parametrize(
    "flag",
    ["--moe-aux-loss-coeff", "--moe-z-loss-coeff", "--dsa-indexer-loss-coeff", "--decoupled-min-lr", "--qk-clip-alpha"],
)
def test_a_coefficient_of_one_asks_for_something(tmp_path, flag):
    assert any(
        line.startswith(f"{flag} 1.0 has nothing to act on without") for line in violations(tmp_path, f"{flag} 1")
    )


def test_every_entry_of_the_tables_is_asked_about(tmp_path):
    """Typing the flag of any entry, with a value that asks for something, is refused in a run."""
    from slime.arguments.rules.megatron import idle_flags, settled_values

    args = parse(tmp_path)
    for name, (value, _) in FIXED.items():
        other = _another(value)
        changed = _changed(args, name, other)
        assert [found for found in settled_values(changed) if str(value) in found.message], name
    for group in ACTS_WITH:
        for name in group.names:
            changed = _changed(args, name, 7)
            if not group.condition(changed):
                needs = set(broken(changed, group.needs).flags)
                assert [found for found in idle_flags(changed) if needs <= {*found.flags}], name


def _another(value):
    return not value if isinstance(value, bool) else 7


def _changed(args, name, value):
    return argparse.Namespace(**{**vars(args), name: value, "typed_flags": {*args.typed_flags, name}})


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ({}, {"moe_token_dispatcher_type": "allgather", "rope_type": "rope", "position_embedding_type": "rope",
              "virtual_pipeline_model_parallel_size": None, "accumulate_allreduce_grads_in_fp32": False}),
        ({"num_experts": 8}, {"moe_token_dispatcher_type": "alltoall"}),
        ({"moe_token_dispatcher_type": "flex"}, {"moe_token_dispatcher_type": "flex"}),
        ({"recompute_activations": True}, {"recompute_granularity": "selective", "recompute_modules": None}),
        ({"moe_layer_recompute": True}, {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "moe"]}),
        ({"moe_layer_recompute": True, "recompute_modules": ["moe", "mlp"]}, {"recompute_modules": ["moe", "mlp"]}),
        ({"moe_layer_recompute": True, "recompute_granularity": "full"}, {"recompute_granularity": "full"}),
        ({"bf16": True}, {"accumulate_allreduce_grads_in_fp32": True}),
        ({"bf16": True, "grad_reduce_in_bf16": True}, {"accumulate_allreduce_grads_in_fp32": False}),
        ({"bf16": True, "accumulate_allreduce_grads_in_fp32": False}, {"accumulate_allreduce_grads_in_fp32": False}),
        ({"use_rope_scaling": True, "rotary_scaling_factor": 32.0}, {"rope_scaling_factor": 32.0}),
        ({"use_rope_scaling": True, "rope_scaling_factor": 16.0}, {"rope_scaling_factor": 16.0}),
        ({"multi_latent_attention": True, "rope_type": None}, {"rope_type": "yarn"}),
        ({"position_embedding_type": "mrope", "use_rotary_position_embeddings": True}, {"position_embedding_type": "mrope"}),
        ({"max_position_embeddings": None, "seq_length": 32768}, {"max_position_embeddings": 32768}),
        ({"use_custom_fsdp": True}, {"use_megatron_fsdp": True}),
        ({"enable_cuda_graph": True}, {"cuda_graph_impl": "local"}),
        ({"external_cuda_graph": True}, {"cuda_graph_impl": "transformer_engine"}),
        ({"num_layers": 8, "pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 2},
         {"virtual_pipeline_model_parallel_size": 2}),
        ({"num_layers": 8, "pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 4},
         {"virtual_pipeline_model_parallel_size": 4}),
    ],
)  # fmt: skip
def test_values_that_follow(tmp_path, typed, expected):
    args = parse(tmp_path, "--dry-run")
    args.bf16 = args.accumulate_allreduce_grads_in_fp32 = False
    args = argparse.Namespace(**{**vars(args), **typed, "typed_flags": {*args.typed_flags, *typed}})
    settle_precision(args, on_gpus=False)
    assert derive_megatron_values(args) is args
    assert {name: getattr(args, name) for name in expected} == expected


@pytest.mark.parametrize("beside", ["", "grad_reduce_in_bf16: true\n"])
def test_a_file_may_say_that_gradients_are_not_added_up_in_float32(tmp_path, beside):
    (tmp_path / "own.yaml").write_text(f"bf16: true\naccumulate_allreduce_grads_in_fp32: false\n{beside}")
    args = parse(tmp_path, "--custom-config-path", str(tmp_path / "own.yaml"))
    assert not args.accumulate_allreduce_grads_in_fp32
    assert args.origins["accumulate_allreduce_grads_in_fp32"] is Origin.YAML


def test_sizes_give_the_data_parallel_size(tmp_path):
    words = "--dry-run --actor-num-gpus-per-node 8 --tensor-model-parallel-size 2 --context-parallel-size 2"
    args = parse(tmp_path, *words.split())
    assert (args.world_size, args.data_parallel_size) == (8, 2)


def test_messages_show_what_was_typed(tmp_path):
    (line,) = violations(tmp_path, "--moe-token-dispatcher-type allgather")
    assert line.startswith("--moe-token-dispatcher-type allgather has nothing to act on without --num-experts")
    assert violations(tmp_path, "--fp4-format e2m1")[0].startswith("--fp4-format e2m1: ")


TWO = "--num-layers 4 --actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2"
VIRTUAL = f"{TWO} --num-virtual-stages-per-pipeline-rank 2"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{VIRTUAL} --no-overlap-p2p-communication",
         "--no-overlap-p2p-communication with virtual pipeline stages: messages for different stages of a rank could be "
         "swapped; drop it"),
        (f"{VIRTUAL} --microbatch-group-size-per-virtual-pipeline-stage 1",
         "--microbatch-group-size-per-virtual-pipeline-stage 1 is below --pipeline-model-parallel-size 2; give at least 2, "
         "or drop it"),
        (f"{TWO} --pipeline-model-parallel-layout Ett|tt|L",
         "--pipeline-model-parallel-layout Ett|tt|L has 3 stages, no multiple of --pipeline-model-parallel-size 2"),
        (f"{TWO} --pipeline-model-parallel-layout Ett|tL",
         "--pipeline-model-parallel-layout Ett|tL has 3 layers, but --num-layers is 4"),
        (f"{TWO} --pipeline-model-parallel-layout tt|ttL",
         "--pipeline-model-parallel-layout tt|ttL must begin with its one E and end with its one L"),
        (f"{TWO} --pipeline-model-parallel-layout EttL|ttL",
         "--pipeline-model-parallel-layout EttL|ttL must begin with its one E and end with its one L"),
        (f"{TWO} --pipeline-model-parallel-layout Ett|ttX",
         "--pipeline-model-parallel-layout Ett|ttX: 'X' means nothing; E stands for the embedding, t for a layer, m for one of "
         "--mtp-num-layers, L for the loss, | ends a stage, and (t|)*4 repeats"),
        (f"{TWO} --pipeline-model-parallel-layout Ett|ttmL",
         "--pipeline-model-parallel-layout Ett|ttmL has 1 m, but --mtp-num-layers is 0"),
        (f"{TWO} --mtp-num-layers 2 --pipeline-model-parallel-layout Ett|ttm|m|L",
         "--pipeline-model-parallel-layout Ett|ttm|m|L: all m stand together, behind every t and in one of the last 2 stages"),
        (f"{TWO} --mtp-num-layers 1 --pipeline-model-parallel-layout Ett|ttm||L",
         "--pipeline-model-parallel-layout Ett|ttm||L: all m stand together, behind every t and in one of the last 2 stages"),
        (f"{TWO} --mtp-num-layers 1 --pipeline-model-parallel-layout Etttm|tL",
         "--pipeline-model-parallel-layout Etttm|tL: all m stand together, behind every t and in one of the last 2 stages"),
        (f"{VIRTUAL} --pipeline-model-parallel-layout Et|t|t|tL",
         "--num-virtual-stages-per-pipeline-rank and --pipeline-model-parallel-layout both split the layers; drop one of "
         "them"),
        (f"{TWO} --pipeline-model-parallel-comm-backend ucc",
         "--pipeline-model-parallel-comm-backend ucc: another kind of pipeline messages is not built yet; drop the flag "
         "(--dry-run plans with it)"),
    ],
)  # fmt: skip
def test_rule(tmp_path, words, message):
    assert_violation(tmp_path, words, message)


@pytest.mark.parametrize("layout", ["Ett|ttL", "Ett|ttm*2L", "Ettttm*2|L", "Ett|t|tmm|L"])
def test_layouts_that_are_taken(layout):
    sizes = {"num_layers": 4, "mtp_num_layers": 2, "pipeline_model_parallel_size": 2}
    assert not [*pipeline_layout(default_args(**sizes, pipeline_model_parallel_layout=layout))]


FOUR_LAYERS = "--hf-checkpoint {tmp}/four --pipeline-model-parallel-size 2"


@pytest.mark.parametrize(
    ("words", "virtual"),
    [
        ("--pipeline-model-parallel-size 2", None),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 1", None),
        (f"{FOUR_LAYERS} --virtual-pipeline-model-parallel-size 2", 2),
        (f"{FOUR_LAYERS} --virtual-pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", 2),
        (f"{FOUR_LAYERS} --virtual-pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", 2),
        (f"{FOUR_LAYERS} --virtual-pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et|t|t|tL", 2),
    ],
)
def test_pipelines_are_accepted(tmp_path, words, virtual):
    write_config(tmp_path / "four", num_hidden_layers=4)
    words = words.format(tmp=tmp_path)
    args = parse(tmp_path, "--actor-num-gpus-per-node", "2", *words.split())
    assert args.pipeline_model_parallel_size == 2
    assert args.virtual_pipeline_model_parallel_size == virtual


@pytest.mark.parametrize(
    "words",
    [
        "--lr-warmup-iters 3",
        "--lr-warmup-iters 4 --lr-decay-iters 5",
        "--start-weight-decay 0.1 --end-weight-decay 0.1",
        "--start-weight-decay 0.1 --end-weight-decay 0.2 --weight-decay-incr-style linear",
        "--lr-warmup-iters 100 --debug-rollout-only",
        "--lr-decay-style WSD --lr-wsd-decay-iters 4",
        "--lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-warmup-iters 2",
        "--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-warmup-fraction 0.1 --lr-decay-iters 10",
    ],
)
def test_what_the_scheduler_can_do(tmp_path, words):
    parse(tmp_path, *words.split())


@pytest.mark.parametrize(
    "module, words, unasked",
    [
        ("fused_weight_gradient_mlp_cuda", "--gradient-accumulation-fusion", ""),
        *(
            ("transformer_engine", f"--recompute-modules core_attn {name} --recompute-granularity selective",
             "--recompute-modules core_attn mlp --recompute-granularity selective")
            for name in ("layernorm", "moe_act")
        ),
    ],
)  # fmt: skip
def test_an_extension_that_is_not_installed_is_missed_where_it_was_asked_for(
    tmp_path, monkeypatch, module, words, unasked
):
    """Elsewhere the ranks find out; a plan may be for a machine that has it."""
    installed = importlib.util.find_spec

    def without(name, *more):
        return None if name == module else installed(name, *more)

    monkeypatch.setattr("importlib.util.find_spec", without)
    assert parse(tmp_path, *unasked.split()).gradient_accumulation_fusion
    (found,) = refusal(tmp_path, words)
    assert found.flags == (words.split()[0],) and found.kind is Kind.MISSING
    assert parse(tmp_path, *words.split(), "--dry-run").plan_notes == [found.message]
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: installed("json"))
    parse(tmp_path, *words.split())


@pytest.mark.parametrize("name", FLASH_ATTENTION)
@pytest.mark.parametrize(
    "on_gpus, has_package", [(False, True), (True, False), (None, False), (True, True), (None, True)]
)
def test_flash_attention_that_has_no_package_or_no_gpu_is_missed(tmp_path, monkeypatch, name, on_gpus, has_package):
    """On another machine ranks find out; with Megatron the flag is refused, and the package found by itself."""
    installed, module = importlib.util.find_spec, FLASH_ATTENTION[name][0]

    def find(asked, *more):
        return (installed("json") if has_package else None) if asked == module else installed(asked, *more)

    monkeypatch.setattr("importlib.util.find_spec", find)
    monkeypatch.setattr("slime.arguments.derivation.expects_gpus", lambda args: on_gpus)
    words = f"--train-backend fsdp --attn-implementation {name}"
    if on_gpus is not False and has_package:
        parse(tmp_path, *words.split())
        return
    (found,) = refusal(tmp_path, words)
    assert found.flags == ("--attn-implementation",) and found.kind is Kind.MISSING
    assert parse(tmp_path, *words.split(), "--dry-run").plan_notes == [found.message]
    parse(tmp_path, *words.split(), "--debug-rollout-only")
