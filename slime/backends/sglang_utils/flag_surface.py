"""The flags of the installed SGLang server: `python -m slime.backends.sglang_utils.flag_surface` prints them as JSON.

Every field of `ServerArgs` is `--sglang-<field>` and lives in `args.sglang_<field>`. All spellings that a field has on
sglang's own command line, and the short ones in common use, set that one attribute, so they cannot disagree. None means
"not given": then our default or the server's own holds, which the help tells.

Values are converted while they are parsed, in the driver. The few types that only sglang knows stay text and are
converted in the server process by sglang's own parser (`server_process`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from slime.arguments.surface import FlagSpec

# Fields that follow from the run, so that a value of the user could only contradict them.
NOT_EXPOSED = frozenset(
    {
        "base_gpu_id",
        "config",
        "dist_init_addr",
        "enable_memory_saver",
        "enable_return_routed_experts",
        "gpu_id_step",
        "model_path",
        "nccl_port",
        "nnodes",
        "node_rank",
        "port",
        "random_seed",
        "skip_server_warmup",
        "trust_remote_code",
    }
)

# What a run gives a server where the user says nothing.
RUN_DEFAULTS: dict[str, Any] = {
    "log_level": "warning",
    "enable_metrics": True,
    "enable_draft_weights_cpu_backup": True,
}

# Without a GPU: the attention and sampling code that torch has, full precision (the log-probs of trainer and engine are
# compared in float32), no graphs or overlap (both are CUDA features), a small KV cache (else 16 GB are taken), a
# scheduler that sleeps when idle (else it burns a core).
CPU_DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "dtype": "float32",
    "disable_overlap_schedule": True,
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "max_total_tokens": 32768,
    "max_running_requests": 64,
    "sleep_on_idle": True,
    "enable_metrics": False,
}

# Spellings in common use that sglang 0.5.21 does not have (itself it takes any unique beginning of a name).
_MORE_SPELLINGS = {
    "cuda_graph_bs_decode": "cuda_graph_bs",
    "cuda_graph_max_bs_decode": "cuda_graph_max_bs",
    "dp_size": "dp",
    "ep_size": "ep",
    "pp_size": "pp",
    "tp_size": "tp",
}

# Name of the function by which sglang's command line reads a value → name of our type. Others are kept as text.
_TYPES = {
    "str": "str",
    "int": "int",
    "float": "float",
    "human_readable_int": "human_int",
    "loads": "json_any",
    "json_list_type": "json_any",
}


def describe() -> list[FlagSpec]:
    """One description for every field that sglang's command line knows; imports sglang.

    Fields that even sglang keeps off its command line (callbacks, notes of its own resolution) are left out.
    """
    from slime.backends.sglang_utils import cpu_runtime

    cpu_runtime.install()
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    fields = set(ServerArgs.__struct_fields__) - NOT_EXPOSED
    known_spellings = {option for action in parser._actions for option in action.option_strings}
    return [
        spec
        for action in parser._actions
        if action.dest in fields
        for spec in _describe_action(action, known_spellings)
    ]


def _describe_action(action: argparse.Action, known_spellings: set[str]) -> Iterator[FlagSpec]:
    flags = _spellings(action, known_spellings)
    negative = tuple(flag for flag in flags if flag.startswith("--sglang-no-"))
    common: dict[str, Any] = {
        "dest": f"sglang_{action.dest}",
        "help": _help(action),
        "metadata": {"field": action.dest, "server_default": action.default},
    }
    if action.nargs == 0:
        yield FlagSpec(tuple(flag for flag in flags if flag not in negative), action="bool", **common)
    else:
        yield FlagSpec(
            flags,
            type=_TYPES.get(getattr(action.type, "__name__", "str"), "str"),
            nargs=action.nargs,
            const=action.const,
            choices=tuple(sorted(action.choices)) if action.choices else None,
            **common,
        )
    if negative:
        off = {**common, "help": f"same as --no-{flags[0].removeprefix('--')}"}
        yield FlagSpec(negative, action="store_false", **off)


def _spellings(action: argparse.Action, known_spellings: set[str]) -> tuple[str, ...]:
    names = [action.dest, *(option.removeprefix("--") for option in action.option_strings)]
    short = _MORE_SPELLINGS.get(action.dest, "")
    if short and "--" + short.replace("_", "-") not in known_spellings:
        names.append(short)
    return tuple(dict.fromkeys(f"--sglang-{name.replace('_', '-')}" for name in names))


def _help(action: argparse.Action) -> str:
    text = "" if action.help in (None, argparse.SUPPRESS) else " ".join(action.help.split())
    default = f"server default: {'none' if action.default is None else json.dumps(action.default)}"
    for table, where in ((RUN_DEFAULTS, "in a run"), (CPU_DEFAULTS, "on CPU")):
        if action.dest in table:
            default += f"; {where}: {json.dumps(table[action.dest])}"
    return f"{text or 'field of ServerArgs'} [{default}]"


def main() -> None:
    """Print the descriptions as one line of JSON."""
    print(json.dumps([dataclasses.asdict(spec) for spec in describe()]))


if __name__ == "__main__":
    main()
