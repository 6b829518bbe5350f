"""The model that flags describe. Its logits and gradients, by family: `test_every_family.py`."""

import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
import torch.nn.functional as F

from slime.utils.errors import UserError
from tests.support.models.tiny_families import TINY_FAMILIES
from tests.support.models.tiny_model import tiny_args, write_tiny_model
from tests.support.processes.distributed import run_distributed
from tests.support.tables.model_scripts import script_flags

PAGE = Path(__file__).resolve().parents[3] / "docs/en/advanced/models.md"
VOCABULARY = 131
LENGTHS = (7, 16, 33, 2, 6)


def _sequences():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def _isolation(directory, sequences):
    from tests.support.processes import megatron_worker as megatron

    args = tiny_args(directory)
    chunks = megatron.load_model(args)
    with torch.no_grad():
        packed = megatron.packed_forward(chunks[0], sequences)
        alone = torch.cat([megatron.packed_forward(chunks[0], [sequence]) for sequence in sequences])
        others = [sequences[0], [token ^ 1 for token in sequences[1]], *sequences[2:]]
        changed = megatron.packed_forward(chunks[0], others)
    return packed, alone, changed


def test_l20_packed_samples_do_not_see_each_other(tmp_path):
    write_tiny_model(tmp_path, vocab_size=VOCABULARY)
    sequences = _sequences()
    ((packed, alone, changed),) = run_distributed(_isolation, 1, (str(tmp_path), sequences))
    torch.testing.assert_close(packed, alone, rtol=0, atol=2e-6)
    # With another second sequence every other sequence keeps its logits to the last bit.
    start, end = LENGTHS[0], LENGTHS[0] + LENGTHS[1]
    assert torch.equal(packed[:start], changed[:start])
    assert torch.equal(packed[end:], changed[end:])
    assert not torch.equal(packed[start:end], changed[start:end])


def _random_start(directory, layouts):
    from tests.support.processes import megatron_worker as megatron

    weights = []
    for layout in layouts:
        args = tiny_args(directory, padded_vocab_size=144, **layout)
        megatron.start(args)
        from slime.backends.megatron_utils.model_provider import setup_model

        before = torch.get_rng_state()
        chunks = setup_model(args)
        undisturbed = torch.equal(before, torch.get_rng_state())
        weights.append(megatron.whole_weights(args, chunks))
    return weights, undisturbed


def test_random_weights_depend_on_the_seed_only(tmp_path):
    write_tiny_model(tmp_path, vocab_size=VOCABULARY)
    layouts = [{}, {"tensor_model_parallel_size": 2}, {"seed": 5}]
    for (single, parallel, other_seed), undisturbed in run_distributed(_random_start, 2, (str(tmp_path), layouts)):
        assert undisturbed
        assert all(torch.equal(single[name], parallel[name]) for name in single)
        name = "model.layers.0.mlp.down_proj.weight"
        assert not torch.equal(single[name], other_seed[name])


def _configuration(directory):
    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    from slime.backends.megatron_utils.transformer_config import build_transformer_config

    args = tiny_args(
        directory, bf16=True, num_query_groups=1, rotary_interleaved=False, recompute_granularity="selective"
    )
    config = build_transformer_config(args)
    args.group_query_attention = False
    without_groups = build_transformer_config(args).num_query_groups
    del args.hidden_dropout
    args.typed_flags, args.apply_rope_fusion = {"apply_rope_fusion"}, False
    refusals = [
        _refusal(args, apply_rope_fusion=True),
        _refusal(args, fp8="hybrid"),
        _refusal(args, attention_backend="fused"),
        _refusal(args, recompute_granularity="full", recompute_method=None),
    ]
    unasked = SimpleNamespace(**{**vars(args), "masked_softmax_fusion": True})
    refusals.append(build_transformer_config(unasked).masked_softmax_fusion)
    latent = SimpleNamespace(**{**vars(args), "multi_latent_attention": True, "kv_lora_rank": 48, "rotary_base": 5})
    refusals.append(build_transformer_config(latent).kv_lora_rank)
    # Megatron's own layers of these kinds refuse context parallelism; a family's do not.
    split = {"context_parallel_size": 2, "experimental_attention_variant": "gated_delta_net"}
    refusals.append(_refusal(args, **split))
    shown = {
        name: getattr(config, name)
        for name in ("hidden_dropout", "layernorm_epsilon", "num_query_groups", "gated_linear_unit", "add_bias_linear",
                     "params_dtype", "recompute_granularity", "transformer_impl", "kv_channels")
    }  # fmt: skip
    return shown, config.activation_func is F.silu, without_groups, refusals


def _refusal(args, **changes):
    from slime.backends.megatron_utils.transformer_config import build_transformer_config

    try:
        build_transformer_config(SimpleNamespace(**{**vars(args), **changes}))
    except UserError as error:
        return str(error)
    return None


def test_configuration_follows_the_flags(tmp_path):
    write_tiny_model(tmp_path)
    ((config, silu, groups_without_gqa, refusals),) = run_distributed(_configuration, 1, (str(tmp_path),))
    assert config == {
        "hidden_dropout": 0.0,
        "layernorm_epsilon": 1e-6,
        "num_query_groups": 1,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "params_dtype": torch.bfloat16,
        "recompute_granularity": "selective",
        "transformer_impl": "local",
        "kv_channels": 16,
    }
    assert silu
    assert groups_without_gqa == 4
    fusion, fp8, attention, of_megatron, unasked, latent, of_variant = refusals
    assert "--apply-rope-fusion needs Transformer Engine" in fusion
    assert "--fp8-format hybrid needs Transformer Engine" in fp8
    assert "--attention-backend fused needs Transformer Engine" in attention
    assert "recompute_method" in of_megatron, "what Megatron refuses is an error of the user's too"
    assert unasked is False, "fusions that were not typed are left out where their kernels are missing"
    assert latent == 48 and of_variant is None


def _fusion_beside_transformer_engine(directory):
    """What the accumulation of weight gradients is with Transformer Engine: without Apex, typed, with Apex; and with Apex in
    INT4 training, typed and not."""
    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    from slime.backends.megatron_utils import transformer_config

    transformer_config.transformer_engine_available = lambda: True
    transformer_config.get_accelerator = lambda: SimpleNamespace(name="cuda")
    args = tiny_args(directory, transformer_impl="transformer_engine", gradient_accumulation_fusion=True)
    args.typed_flags = set()
    found = [transformer_config._layer_implementation_fields(args)]
    args.typed_flags = {"gradient_accumulation_fusion"}
    found.append(_refusal_of(transformer_config._layer_implementation_fields, args))
    sys.modules["fused_weight_gradient_mlp_cuda"] = SimpleNamespace()
    found.append(transformer_config._layer_implementation_fields(args))
    os.environ.update(OPEN_TRAINING_INT4_FAKE_QAT_FLAG="1", OPEN_TRAINING_INT4_GROUP_SIZE="32")
    for args.typed_flags in ({"gradient_accumulation_fusion"}, set()):
        found.append(transformer_config._layer_implementation_fields(args)["gradient_accumulation_fusion"])
    return found


def _flash_attention_beside_transformer_engine(directory, found):
    """What becomes of `--attention-backend flash` where Transformer Engine finds these of the two packages; and of auto."""
    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    from slime.backends.megatron_utils import transformer_config

    transformer_config.transformer_engine_available = lambda: True
    transformer_config.get_accelerator = lambda: SimpleNamespace(name="cuda")
    attention = "transformer_engine.pytorch.attention.dot_product_attention"
    parts = attention.split(".")
    stand_ins = {".".join(parts[:depth]): ModuleType("") for depth in range(1, len(parts) + 1)}
    stand_ins[f"{attention}.backends"] = backends = ModuleType("")
    sys.modules.update(stand_ins)
    outcomes = []
    for backend, (second, third) in (*(("flash", pair) for pair in found), ("auto", (False, False))):
        backends.fa_utils = SimpleNamespace(
            is_installed=second, v3_is_installed=third, version_required="2.1.1", max_version="2.8.3"
        )
        args = tiny_args(directory, transformer_impl="transformer_engine", attention_backend=backend)
        outcomes.append(_refusal_of(transformer_config._layer_implementation_fields, args))
    return outcomes


def _context_in_one_piece_beside_transformer_engine(directory):
    """What is said of it, by whether attention is latent."""
    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    from slime.backends.megatron_utils import transformer_config

    transformer_config.transformer_engine_available = lambda: True
    transformer_config.get_accelerator = lambda: SimpleNamespace(name="cuda")
    flags = {"transformer_impl": "transformer_engine", "context_parallel_size": 2, "allgather_cp": True}
    return [
        _refusal_of(
            transformer_config._layer_implementation_fields,
            tiny_args(directory, multi_latent_attention=is_latent, **flags),
        )
        for is_latent in (False, True)
    ]


def _flags_beside_transformer_engine(directory, flags):
    """What is said of each of `flags` beside its layers, and beside our own."""
    from slime.backends.megatron_utils import cpu_runtime

    cpu_runtime.install()
    from slime.backends.megatron_utils import transformer_config

    transformer_config.transformer_engine_available = lambda: True
    transformer_config.get_accelerator = lambda: SimpleNamespace(name="cuda")
    return [
        [
            _refusal_of(
                transformer_config._layer_implementation_fields, tiny_args(directory, transformer_impl=layers, **flag)
            )
            for flag in flags
        ]
        for layers in ("transformer_engine", "local")
    ]


def _refusal_of(function, args):
    try:
        function(args)
    except UserError as error:
        return str(error)
    return None


def test_weight_gradients_are_fused_where_the_extension_of_apex_imports(tmp_path):
    """Megatron's output layer asks for it beside Transformer Engine, too, and raises without it."""
    write_tiny_model(tmp_path)
    ((without, refusal, with_apex, *in_int4),) = run_distributed(_fusion_beside_transformer_engine, 1, (str(tmp_path),))
    assert without == {"transformer_impl": "transformer_engine", "gradient_accumulation_fusion": False}
    assert "--gradient-accumulation-fusion" in refusal and "fused_weight_gradient_mlp_cuda" in refusal
    assert with_apex == {"transformer_impl": "transformer_engine", "gradient_accumulation_fusion": True}
    # Rounded weights refuse it, and it has to be the user who asked for it.
    assert in_int4 == [True, False]


def test_latent_attention_takes_context_in_one_piece_beside_transformer_engine(tmp_path):
    """The core of its attention is ours in any layer."""
    write_tiny_model(tmp_path)
    ((plain, latent),) = run_distributed(_context_in_one_piece_beside_transformer_engine, 1, (str(tmp_path),))
    assert plain.startswith("--allgather-cp: Transformer Engine's attention knows only zigzag chunks; ")
    assert latent is None


def test_flash_attention_is_refused_where_transformer_engine_finds_no_kernel_of_it(tmp_path):
    """Asked for it, Transformer Engine switches all other kernels off, and would have none."""
    write_tiny_model(tmp_path)
    found = ((False, False), (True, False), (False, True))
    arguments = (str(tmp_path), found)
    ((refusal, *others),) = run_distributed(_flash_attention_beside_transformer_engine, 1, arguments)
    assert "--attention-backend flash: Transformer Engine takes flash-attn 2.1.1 to 2.8.3, or flash-attn-3" in refusal
    assert others == [None, None, None]


def test_what_layers_of_transformer_engine_do_otherwise_is_refused(tmp_path):
    write_tiny_model(tmp_path)
    flags = [
        {"cp_comm_type": "all_gather", "context_parallel_size": 2},
        {"fp32_residual_connection": True, "bf16": True},
    ]
    ((beside, alone),) = run_distributed(_flags_beside_transformer_engine, 1, (str(tmp_path), flags))
    assert beside[0].startswith("--cp-comm-type all_gather: ") and beside[1].startswith("--fp32-residual-connection: ")
    assert all("give --transformer-impl local" in refusal for refusal in beside) and alone == [None, None]


def decoder_without_final_norm(args, config, vp_stage):
    from megatron.core.transformer.identity_op import IdentityOp

    from slime.backends.megatron_utils.layer_spec import get_decoder_spec

    assert args.hf_checkpoint
    spec = get_decoder_spec(config, vp_stage)
    spec.layer_norm = IdentityOp
    return spec


def _final_norms(directory, specs):
    from tests.support.processes import megatron_worker as megatron

    names = []
    for spec in specs:
        args = tiny_args(directory, spec=spec)
        megatron.start(args)
        from slime.backends.megatron_utils.model_provider import get_model_provider_func

        names.append(type(get_model_provider_func(args)().decoder.final_layernorm).__name__)
    return names


def test_a_family_names_the_function_that_says_its_layers(tmp_path):
    write_tiny_model(tmp_path)
    specs = [None, [__name__, "decoder_without_final_norm"]]
    assert run_distributed(_final_norms, 1, (str(tmp_path), specs)) == [["RMSNorm", "IdentityOp"]]


def marked(pre_process, post_process, vp_stage=None, *, args):
    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    model = get_model_provider_func(args)(pre_process, post_process, vp_stage)
    model.is_marked = True
    return model


def no_layers(args, config, vp_stage):
    return None


def refused_layers(args, config, vp_stage):
    raise KeyError("no such layer")


# What `--spec` has, of which the first two are the function's module and name.
BY_SPEC = {
    "layers": ([__name__, "decoder_without_final_norm"], {}),
    "layers of a file": ([f"{__file__}:decoder_without_final_norm"], {"mtp_num_layers": 1}),
    "model": ([__name__, "marked"], {}),
    "model of a file": ([f"{__file__}:marked"], {}),
    "two models": ([__name__, "marked"], {"custom_model_provider_path": f"{__name__}.marked"}),
    "nothing": ([__name__, "no_layers"], {}),
    "raised": ([__name__, "refused_layers"], {}),
}


def _built_by_spec(directory):
    from tests.support.processes import megatron_worker as megatron

    found = {}
    for case, (spec, changes) in BY_SPEC.items():
        args = tiny_args(directory, spec=spec, **changes)
        megatron.start(args)
        from slime.backends.megatron_utils.model_provider import build_model

        try:
            model = build_model(args, pre_process=True, post_process=True, vp_stage=None)
            norm = type(model.decoder.final_layernorm).__name__
            found[case] = (getattr(model, "is_marked", False), norm, hasattr(model, "mtp"))
        except UserError as error:
            found[case] = str(error)
    found["name"] = __name__
    return found


def test_spec_names_what_says_the_layers_or_builds_the_model(tmp_path):
    """A provider, which the parameter `pre_process` tells, may start from our own model, with the layers of the family."""
    write_tiny_model(tmp_path)
    (found,) = run_distributed(_built_by_spec, 1, (str(tmp_path),))
    assert found["layers"] == (False, "IdentityOp", False) and found["layers of a file"] == (False, "IdentityOp", True)
    assert found["model"] == found["model of a file"] == (True, "RMSNorm", False)
    # The rank has this file under a name of its own.
    own = found["name"]
    said = {
        "two models": f"--spec {own}.marked builds the whole model, and so does --custom-model-provider-path {own}.marked",
        "nothing": f"--spec {own}.no_layers returned NoneType; expected a ModuleSpec or TransformerBlockSubmodules",
        "raised": f"--spec {own}.refused_layers raised KeyError for the layers of a model chunk with vp_stage None",
    }
    for case, message in said.items():
        assert found[case].startswith(message), found[case]


def _rope_frequencies(directory, changes):
    from tests.support.processes import megatron_worker as megatron

    found = []
    for change in changes:
        args = tiny_args(directory, **change)
        megatron.start(args)
        from slime.backends.megatron_utils.model_provider import get_model_provider_func

        rope = get_model_provider_func(args)().rotary_pos_emb.rotary
        found.append((rope.inv_freq.tolist(), rope.seq_len_interpolation_factor))
    return found


def test_rope_follows_its_flags(tmp_path):
    """Frequencies as transformers computes them for Llama 3.1, and of a head that is rotated in part."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    write_tiny_model(tmp_path)
    scaled = {"use_rope_scaling": True, "rope_scaling_factor": 32.0, "rotary_base": 500000}
    changes = [scaled, {"rotary_percent": 0.5}, {"rotary_seq_len_interpolation_factor": 4}]
    ((llama, half, interpolated),) = run_distributed(_rope_frequencies, 1, (str(tmp_path), changes))
    parameters = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(head_dim=16, max_position_embeddings=131072, rope_parameters=parameters)
    torch.testing.assert_close(torch.tensor(llama[0]), LlamaRotaryEmbedding(config).inv_freq)
    # 16 channels per head, the first half rotated: 4 frequencies.
    torch.testing.assert_close(torch.tensor(half[0]), 10000.0 ** -(torch.arange(0, 8, 2) / 8))
    assert interpolated[1] == 4


def half_logits(pre_process, post_process, vp_stage=None, *, args, config):
    """Without anything that this package adds to Megatron's model."""
    from megatron.core.models.gpt import GPTModel

    from slime.backends.megatron_utils.layer_spec import get_decoder_spec

    class HalfLogits(GPTModel):
        def forward(self, *args, **options):
            return super().forward(*args, **options) / 2

    return HalfLogits(
        config, get_decoder_spec(config, vp_stage), vocab_size=args.padded_vocab_size, pre_process=pre_process,
        max_sequence_length=args.max_position_embeddings, position_embedding_type="rope", post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights, rotary_base=args.rotary_base,
    )  # fmt: skip


def two_more_weights(pre_process, post_process, vp_stage=None, *, args):
    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    model = get_model_provider_func(args)(pre_process, post_process, vp_stage)
    model.decoder.layers[1].extra = torch.nn.Linear(2, 1)
    return model


def a_tower(pre_process, post_process):
    return torch.nn.Linear(2, 2)


def summed_losses(pre_process, post_process, *, args, config):
    config.calculate_per_token_loss = True
    return half_logits(pre_process, False, args=args, config=config)


def without_arguments():
    raise AssertionError("called")


def _paths(*functions):
    return [f"{__name__}.{function.__name__}" for function in functions]


REFUSED = _paths(a_tower, summed_losses, without_arguments, two_more_weights)


def _provided(plain, fitting, with_tower, of_script):
    from tests.support.processes import megatron_worker as megatron

    cases = [(plain, path) for path in (None, *fitting, *REFUSED)] + [(with_tower, None), (with_tower, of_script)]
    found = []
    for directory, path in cases:
        args = tiny_args(directory, custom_model_provider_path=path)
        try:
            chunks = megatron.load_model(args)
            with torch.no_grad():
                logits = megatron.packed_forward(chunks[0], _sequences())
            found.append((logits, sorted(megatron.whole_weights(args, chunks))))
        except UserError as error:
            found.append(str(error))
    from slime.backends.megatron_utils.model_provider import build_model

    try:
        build_model(tiny_args(plain, custom_model_provider_path=REFUSED[0]), True, False, vp_stage=0)
    except UserError as error:
        found.append(str(error))
    return found


def test_a_function_of_the_users_builds_the_model(tmp_path):
    write_tiny_model(tmp_path / "plain", vocab_size=VOCABULARY)
    TINY_FAMILIES["qwen3_5_moe"].save(tmp_path / "tower")
    (script,) = script_flags()["qwen3.5-35B-A3B-vl"]["--custom-model-provider-path"]
    (of_page,) = re.findall(r"^```python\n# my_model.py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "my_model.py").write_text(of_page)
    fitting = [*_paths(half_logits), f"{tmp_path}/my_model.py:provider"]
    (found,) = run_distributed(_provided, 1, (str(tmp_path / "plain"), fitting, str(tmp_path / "tower"), script))
    (logits, names), (half, names_of_half), (same, _), *refused, own, of_script, virtual = found
    assert names_of_half == names and not torch.equal(logits, half) and torch.equal(same, logits)
    # The last columns are the vocabulary's padding.
    assert (half[:, VOCABULARY:] < -1e8).all()
    torch.testing.assert_close(half[:, :VOCABULARY], logits[:, :VOCABULARY] / 2, rtol=0, atol=1e-7)
    # Of a model with a vision tower the language model is built, as without the function.
    assert torch.equal(own[0], of_script[0]) and own[1] == of_script[1]
    assert all(name.startswith(("model.language_model.", "lm_head.")) for name in of_script[1])
    # What cannot be trained is refused, with the flag.
    said = (
        "returned torch.nn.modules.linear.Linear; expected a GPTModel",
        "post_process False (the run: True), config.calculate_per_token_loss True (the run: False)",
        "raised TypeError for a model chunk with {'pre_process': True",
        "returned a model with decoder.layers.1.extra.weight, which has no tensor in checkpoints of qwen3",
    )
    for path, message, part in zip(REFUSED, refused, said, strict=True):
        assert message.startswith("--custom-model-provider-path ") and part in message, message
        assert path.rpartition(".")[2] in message
    assert "with virtual pipeline stages the function has to take vp_stage" in virtual
