"""Writes scripts/models/*.sh: the flags that the family of each published model derives from its config.json.

    python tools/write_model_scripts.py                    # writes the scripts that changed
    python tools/write_model_scripts.py --check            # writes nothing; status 1 when a script is out of date
    python tools/write_model_scripts.py --config MODEL     # prints the script of the Hugging Face directory MODEL

Scripts that only change the name or the depth of one of these are written by hand.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime.arguments.hf_config import SUPPLEMENTS, read_hf_config, spelling, text_config_of  # noqa: E402
from slime.models.config_entries import partial_rope  # noqa: E402
from slime.models.families import family_of, model_args_from_hf  # noqa: E402
from slime.utils.errors import UserError  # noqa: E402
from slime.utils.filesystem import write_text_atomically  # noqa: E402
from tools.command_line import run_tool  # noqa: E402
from tools.published_models import PUBLISHED_MODELS  # noqa: E402

COMMAND = "python tools/write_model_scripts.py"
DIRECTORY = Path("scripts/models")


@dataclass(frozen=True)
class Model:
    """A published model with a script of its own.

    checkpoint: its name on the hub.
    hint: an additional sentence for the reader of the script.
    adds, omits: flags (names in `args`) that its script has beyond those of `is_written`, or lacks because they are Megatron's
        defaults.
    words: flags that do not follow from a config.
    """

    checkpoint: str
    hint: str = ""
    adds: tuple[str, ...] = ()
    omits: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


_LLAMA = {"adds": ("kv_channels", "max_position_embeddings")}
_SEES = {"words": ("--custom-model-provider-path slime_plugins.models.qwen3_vl.get_qwen3_vl_model_provider",)}
_GLM_MOE = {"omits": ("layernorm_epsilon",)}
MODELS = {
    "qwen2.5-0.5B": Model("Qwen/Qwen2.5-0.5B-Instruct"),
    "qwen2.5-1.5B": Model("Qwen/Qwen2.5-1.5B-Instruct", "Its R1 distillation: MODEL_ARGS_ROTARY_BASE=10000."),
    "qwen2.5-3B": Model("Qwen/Qwen2.5-3B-Instruct"),
    "qwen2.5-7B": Model("Qwen/Qwen2.5-7B-Instruct"),
    "qwen2.5-32B": Model(
        "Qwen/Qwen2.5-32B", "Instruct variants have another epsilon; the comparison with the config tells."
    ),
    "qwen3-0.6B": Model("Qwen/Qwen3-0.6B"),
    "qwen3-1.7B": Model("Qwen/Qwen3-1.7B"),
    "qwen3-4B": Model("Qwen/Qwen3-4B"),
    "qwen3-4B-Instruct-2507": Model("Qwen/Qwen3-4B-Instruct-2507"),
    "qwen3-8B": Model("Qwen/Qwen3-8B"),
    "qwen3-vl-8B": Model("Qwen/Qwen3-VL-8B-Instruct", **_SEES),
    "qwen3-14B": Model("Qwen/Qwen3-14B"),
    "qwen3-32B": Model("Qwen/Qwen3-32B"),
    "llama3-8B": Model("meta-llama/Meta-Llama-3-8B", **_LLAMA),
    "llama3-70B": Model("meta-llama/Meta-Llama-3-70B", **_LLAMA),
    "llama3.1-8B-Instruct": Model("meta-llama/Llama-3.1-8B-Instruct", **_LLAMA),
    "llama3.2-3B-Instruct": Model("meta-llama/Llama-3.2-3B-Instruct", **_LLAMA),
    "glm4-9B": Model("THUDM/GLM-4-9B-0414", omits=("kv_channels",)),
    "glm4-32B": Model(
        "THUDM/GLM-4-32B-0414", adds=("max_position_embeddings",), omits=("kv_channels",), words=("--seq-length 32768",)
    ),
    "mimo-7B-rl": Model("XiaomiMiMo/MiMo-7B-RL", adds=("max_position_embeddings",), omits=("kv_channels",)),
    "qwen3.5-0.8B": Model("Qwen/Qwen3.5-0.8B"),
    "qwen3.5-4B": Model("Qwen/Qwen3.5-4B"),
    "qwen3.5-9B": Model("Qwen/Qwen3.5-9B"),
    "qwen3.5-27B": Model("Qwen/Qwen3.5-27B"),
    "qwen3-30B-A3B": Model("Qwen/Qwen3-30B-A3B"),
    "qwen3-235B-A22B": Model("Qwen/Qwen3-235B-A22B"),
    "qwen3-vl-30B-A3B": Model("Qwen/Qwen3-VL-30B-A3B-Instruct", **_SEES),
    "qwen3-next-80B-A3B": Model("Qwen/Qwen3-Next-80B-A3B-Thinking"),
    "qwen3.5-35B-A3B": Model("Qwen/Qwen3.5-35B-A3B"),
    "glm4.5-106B-A12B": Model("zai-org/GLM-4.5-Air", **_GLM_MOE),
    "glm4.5-355B-A32B": Model("zai-org/GLM-4.5", **_GLM_MOE),
    "glm4.7-30B-A3B": Model("zai-org/GLM-4.7-Flash", **_GLM_MOE),
    "glm5-744B-A40B": Model("zai-org/GLM-5", **_GLM_MOE),
    "glm5.2-744B-A40B": Model("zai-org/GLM-5.2", **_GLM_MOE),
    "deepseek-v3": Model("deepseek-ai/DeepSeek-V3"),
    "kimi-k2": Model("moonshotai/Kimi-K2-Instruct"),
    "kimi-k2-thinking": Model("moonshotai/Kimi-K2-Thinking"),
    "moonlight": Model(
        "moonshotai/Moonlight-16B-A3B",
        adds=("rotary_percent",),
        words=("--no-masked-softmax-fusion", "--moe-token-drop-policy probs"),
    ),
    "minimax-m2": Model("MiniMaxAI/MiniMax-M2"),
}

# Two shell variables can change a model.
_VARIABLES = {"num_layers": '"$(num_layers {})"', "rotary_base": '"$(rotary_base {})"'}
_WHERE_FALSE = {
    "add_bias_linear": "--disable-bias-linear",
    "add_position_embedding": "--no-position-embedding",
    "apply_rope_fusion": "--no-rope-fusion",
}
_YARN = ("rotary_scaling_factor", "mscale", "mscale_all_dim")


def is_written(name: str, told: dict[str, Any], config: dict[str, Any]) -> bool:
    """Whether a script has the flag of `args.{name}`. A run takes all others from the config, or has their values by default.

    Args:
        told: all flags that follow from the config.
    """
    value = told[name]
    if name == "kv_channels":
        return told["multi_latent_attention"] or config.get("head_dim") is not None
    if name == "rotary_percent":
        return partial_rope in family_of(config).parts
    if name in _YARN:
        return "mscale" in told or told["use_rope_scaling"]
    # Readers of a script look for the update rate of the routers' biases.
    if name == "max_position_embeddings" or (name in SUPPLEMENTS and name != "moe_router_bias_update_rate"):
        return False
    return value is not None and (value is not False or name in _WHERE_FALSE)


def flag_lines(config: dict[str, Any], model: Model) -> Iterator[str]:
    """The lines of `MODEL_ARGS`, each a flag with its values."""
    told = model_args_from_hf(config)
    for name, value in told.items():
        if name in model.adds or (is_written(name, told, config) and name not in model.omits):
            yield from _lines_of(name, value, told)
    yield from model.words


def _lines_of(name: str, value: Any, told: dict[str, Any]) -> Iterator[str]:
    if name == "position_embedding_type" and not told["num_experts"] and "linear_attention_freq" not in told:
        yield "--use-rotary-position-embeddings"
    elif name == "moe_layer_freq":
        dense = 0 if value == 1 else value.count(0)
        if value != 1 and value != [0] * dense + [1] * (len(value) - dense):
            raise UserError(f"moe_layer_freq {value}: no pattern of the first layers dense")
        yield f'--moe-layer-freq "$(moe_layer_freq {told["num_layers"]} {dense})"'
    elif value is False:
        yield _WHERE_FALSE[name]
    elif value is True:
        if name == "attention_output_gate":
            yield "--use-gated-attention"
        yield spelling(name)
    else:
        yield f"{spelling(name)} {_VARIABLES.get(name, '{}').format(_written(value))}"


def _written(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(value)
    return f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else str(value)


def script(config: dict[str, Any], model: Model) -> str:
    """The bash script of a model.

    Args:
        config: the config of its language model (`read_hf_config`, `text_config_of`).

    Raises:
        UserError: the config belongs to no known family, lacks an entry that its family needs, or has dense layers after layers
            with experts.
    """
    kind = "mixture of experts" if model_args_from_hf(config)["num_experts"] else "dense"
    lines = [
        "#!/usr/bin/env bash",
        f"# {model.checkpoint} ({kind}). {model.hint}".rstrip(),
        f"# Written by `{COMMAND}`; to change the flags, change a copy.",
        'source "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"',
        "",
        "MODEL_ARGS=(",
        *(f"  {line}" for line in flag_lines(config, model)),
        ")",
    ]
    return "\n".join(lines) + "\n"


def generated_files() -> dict[Path, str]:
    """Path in the repository → its up-to-date content."""
    return {
        DIRECTORY / f"{name}.sh": script(text_config_of(PUBLISHED_MODELS[name]), model)
        for name, model in MODELS.items()
    }


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 when a script is out of date")
    parser.add_argument("--config", type=Path, help="a Hugging Face directory: print the script of this model")
    options = parser.parse_args(words)
    if options.config is not None:
        print(script(read_hf_config(options.config, flag="--config"), Model(str(options.config))), end="")
        return 0
    stale = {path: text for path, text in generated_files().items() if _content(path) != text}
    for path, text in stale.items():
        if not options.check:
            write_text_atomically(ROOT / path, text)
            (ROOT / path).chmod(0o755)
        print(f"{path} {'is out of date' if options.check else 'written'}")
    return int(bool(stale) and options.check)


def _content(path: Path) -> str | None:
    return (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else None


if __name__ == "__main__":
    run_tool(main)
