"""The launch scripts with their settings, written down by hand as a second source beside the scripts.

Columns: model script | actor nodes, GPUs per node, rollout GPUs (- = shared with training, 0 = no engines) | TP, PP, CP,
EP, layers of the last stage | prompts per rollout, samples per prompt, rollouts per optimizer step (or `steps`: four steps
per rollout) | longest response, tokens per GPU | GPUs per engine, memory share of the engine.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tests.support.tables.shell_arrays import ROOT
from tools.published_models import PUBLISHED_MODELS

SCRIPTS_DIR = ROOT / "scripts"
# The keys are paths below scripts/, without `.sh`.
SCRIPTS = {
    str(path.relative_to(SCRIPTS_DIR).with_suffix("")): path
    for path in sorted([*SCRIPTS_DIR.glob("run-*.sh"), *SCRIPTS_DIR.glob("low_precision/run-*.sh")])
}

_ROWS = """
run-qwen3-4B                     qwen3-4B            1 8   -  2 1 1  1  -   32 8  256  8192  9216  2 0.7
run-qwen3-4B-amd                 qwen3-4B            1 8   -  2 1 1  1  -   32 8  256  8192  9216  2 0.7
run-qwen3-4B-fsdp                qwen3-4B            1 8   -  - - 1  -  -   32 8  256  8192  9216  2 0.7
run-glm4-9B                      glm4-9B             1 4   4  2 1 2  1  -   32 8  256  8192  4608  2 -
run-qwen3-32B                    qwen3-32B           1 8   -  8 1 1  1  -   32 8  256  8192 20480  8 0.7
run-qwen3-30B-A3B                qwen3-30B-A3B       1 8   -  4 1 1  8  -   32 8  256  8192 20480  8 0.7
run-qwen3-235B-A22B              qwen3-235B-A22B     8 8  64  4 4 2 16 22    8 8   64  8192 16384 32 0.7
run-qwen3-next-80B-A3B           qwen3-next-80B-A3B  4 8   -  2 4 2  8  -    8 8   64 32768  8192  8 0.8
run-qwen3.5-27B                  qwen3.5-27B         4 8   -  4 2 2  1  -    8 8   64 32768  8192  2 0.75
run-glm4.7-30B-A3B               glm4.7-30B-A3B      1 8   -  2 1 2  8  -  128 8 1024 32768 32768  8 0.8
run-glm4.7-355B-A32B             glm4.7-355B-A32B    8 8   -  8 4 2 16  -  128 8 steps 32768 16384 32 0.7
run-glm5-744B-A40B               glm5-744B-A40B     32 8   -  4 4 2 32 18    8 8   64 32768 16384 64 0.7
run-glm5.2-744B-A40B             glm5.2-744B-A40B   32 8   -  4 8 8 32  8    8 8   64 65536  8192 64 0.7
run-deepseek-r1                  deepseek-r1        16 8   -  8 4 4 32 13  128 8 steps 32768 16384 64 0.7
run-kimi-k2-Instruct             kimi-k2-instruct   32 8   -  8 8 4 32  5  128 8 steps 32768 16384 16 0.7
run-kimi-k2-Thinking             kimi-k2-thinking   32 8   -  8 8 4 32  5  128 8 steps 16384 16384 16 0.7
run-moonlight-16B-A3B            moonlight-16B-A3B   1 8   -  4 1 1  8  -  128 8 steps  4096  8192  8 0.7
run-minimax-m2                   minimax-m2         16 8   -  2 2 1  4  -  128 8 steps 32768  8192 16 0.7
run-mimo-7B-rl-eagle             mimo-7B-rl          1 8   -  2 1 1  1  -   32 8  256  8192  9216  1 0.7
run-qwen2.5-0.5B-reproducibility qwen2.5-0.5B        1 8   -  1 1 1  1  -   32 8  256  1024  9216  1 0.7
run-qwen2.5-0.5B-gb10-smoke      qwen2.5-0.5B        1 1   -  1 1 1  1  -    2 2    4   256  2048  1 0.4
run-qwen3-4B-base-sft            qwen3-4B            1 8   0  1 1 1  1  -  128 -  128     -  9216  - -
run-qwen3.5-35B-A3B-sft          qwen3.5-35B-A3B     1 8   0  2 1 1  8  -  128 -  128     -  8192  - -
run-qwen3-235B-A22B-sft          qwen3-235B-A22B     4 8   0  4 1 1 32  -  128 -  128     -  9216  - -
low_precision/run-qwen3-4b-fp8            qwen3-4B          1 8 -  2 1 1  1  -   32 8  256  8192  9216  2 0.7
low_precision/run-qwen3-30b-a3b-fp8       qwen3-30B-A3B     1 8 -  4 1 1  8  -   32 8  256  8192 16384  8 0.7
low_precision/run-qwen3-30B-A3B-int4      qwen3-30B-A3B     1 8 -  4 1 1  8  -   32 8  256  8192 16384  8 0.7
low_precision/run-qwen3-235B-A22B-int4    qwen3-235B-A22B   8 8 -  4 4 2 16 22    8 8   64  8192 16384  8 0.7
low_precision/run-moonlight-16B-A3B-int4  moonlight-16B-A3B 1 8 -  4 1 1  8  -  128 8 steps  8192  8192  8 0.7
low_precision/run-kimi-k2-Thinking-int4   kimi-k2-thinking 32 8 -  8 8 4 32  5  128 8 steps 16384 16384 16 0.7
"""

_CPU_OPTIMIZER = "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer"
_EAGLE = (
    "--sglang-speculative-algorithm=EAGLE --sglang-speculative-num-steps=3 --sglang-speculative-eagle-topk=1 "
    "--sglang-speculative-num-draft-tokens=4"
)
_MTP = "--enable-mtp-training --mtp-num-layers=1"
_FILTER = (
    "--dynamic-sampling-filter-path="
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
)  # fmt: skip
_GSPO = "--advantage-estimator=gspo --eps-clip=4e-4"
_SFT = (
    "--loss-type=sft_loss --rollout-function-path=slime.rollout.sft_rollout.generate_rollout "
    "--disable-compute-advantages-and-returns --debug-train-only"
)
_FP8 = "--fp8-format=e4m3 --fp8-recipe=blockwise --use-tis"
_INT4 = "--rollout-temperature=0.8 --use-tis"
# The tokenizers of Moonlight and Kimi K2, and the config of MiMo, are code beside the checkpoint.
_OWN_CODE = "--trust-remote-code"

# The settings of a script that differ from the shared ones.
NOTES = {
    "run-qwen3-4B": "--advantage-estimator=grpo --eps-clip=0.2 --eps-clip-high=0.28 --kl-loss-coef=0.00 "
    "--kl-loss-type=low_var_kl --lr=1e-6 --lr-decay-style=constant --weight-decay=0.1 --adam-beta1=0.9 --adam-beta2=0.98 "
    "--recompute-granularity=full --recompute-method=uniform --recompute-num-layers=1 --attention-dropout=0.0 "
    "--hidden-dropout=0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --rollout-temperature=1 "
    "--rm-type=deepscaler",
    "run-qwen3-4B-amd": "--no-offload-train --no-offload-rollout --no-gradient-accumulation-fusion",
    "run-qwen3-4B-fsdp": "--train-backend=fsdp --gradient-checkpointing",
    "run-qwen3-32B": _CPU_OPTIMIZER,
    "run-qwen3-30B-A3B": _CPU_OPTIMIZER,
    "run-qwen3-235B-A22B": _GSPO,
    "run-qwen3-next-80B-A3B": f"{_GSPO} {_EAGLE}",
    "run-qwen3.5-27B": _EAGLE,
    "run-glm4.7-30B-A3B": f"{_EAGLE} {_MTP} --sglang-dp-size=2",
    "run-glm4.7-355B-A32B": "--advantage-estimator=gspo --eps-clip=1e-4 --eps-clip-high=2e-4 --use-tis "
    f"--over-sampling-batch-size=256 {_FILTER} {_EAGLE}",
    "run-glm5-744B-A40B": f"--prefill-num-servers=1 {_EAGLE}",
    "run-glm5.2-744B-A40B": "--use-tis",
    "run-deepseek-r1": f"--over-sampling-batch-size=256 {_FILTER} {_EAGLE} --sglang-moe-dense-tp-size=1 "
    "--sglang-moe-a2a-backend=deepep",
    "run-kimi-k2-Instruct": f"--rm-type=math {_OWN_CODE}",
    "run-kimi-k2-Thinking": f"--rm-type=math --use-tis {_OWN_CODE}",
    "run-moonlight-16B-A3B": f"--rm-type=math {_OWN_CODE}",
    "run-minimax-m2": _FILTER,
    "run-mimo-7B-rl-eagle": f"{_EAGLE} {_MTP} {_OWN_CODE}",
    "run-qwen2.5-0.5B-reproducibility": "--deterministic-mode --sglang-enable-deterministic-inference --rm-type=math",
    "run-qwen2.5-0.5B-gb10-smoke": "--num-rollout=1",
    "run-qwen3-4B-base-sft": _SFT,
    "run-qwen3.5-35B-A3B-sft": _SFT,
    "run-qwen3-235B-A22B-sft": _SFT,
    "low_precision/run-qwen3-4b-fp8": _FP8,
    "low_precision/run-qwen3-30b-a3b-fp8": f"{_FP8} {_CPU_OPTIMIZER}",
    "low_precision/run-qwen3-30B-A3B-int4": _INT4,
    "low_precision/run-qwen3-235B-A22B-int4": _INT4,
    "low_precision/run-moonlight-16B-A3B-int4": f"{_INT4} {_OWN_CODE}",
    "low_precision/run-kimi-k2-Thinking-int4": f"{_INT4} --sglang-enable-dp-attention --sglang-dp-size=2 {_OWN_CODE}",
}

_COLUMNS = (
    "--actor-num-nodes", "--actor-num-gpus-per-node", "--rollout-num-gpus", "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size", "--context-parallel-size", "--expert-model-parallel-size",
    "--decoder-last-pipeline-num-layers", "--rollout-batch-size", "--n-samples-per-prompt", "--global-batch-size",
    "--rollout-max-response-len", "--max-tokens-per-gpu", "--rollout-num-gpus-per-engine", "--sglang-mem-fraction-static",
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """One row: the model script, the flags with a value (None: must be absent) and switches or values of its notes."""

    model: str
    flags: dict[str, str | None]

    def size(self, flag: str) -> int:
        """The number after `flag`; 1 if the flag is absent."""
        return int(self.flags[flag] or 1)


def launches() -> dict[str, Launch]:
    """Path of each launch script below scripts/, without `.sh` → the settings that it must have."""
    return {row[0]: _launch(row) for row in map(str.split, _ROWS.strip().splitlines())}


def value_of(words: list[str], flag: str) -> str | None:
    """The value of the last occurrence of `flag` in the words of a command, "" for a switch; None if the flag is absent."""
    places = [place for place, word in enumerate(words) if word == flag]
    if not places:
        return None
    following = words[places[-1] + 1 : places[-1] + 2]
    return following[0] if following and not following[0].startswith("--") else ""


def write_configs(words: list[str], row: Launch, **changed: object) -> None:
    """Write the published config, with `changed` entries and nothing else, into the directories that a run's words name."""
    for flag in ("--hf-checkpoint", "--ref-load"):
        directory = Path(value_of(words, flag))
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps({**PUBLISHED_MODELS[row.model], **changed}))


def _launch(row: list[str]) -> Launch:
    flags: dict[str, str | None] = {
        flag: None if cell == "-" else cell for flag, cell in zip(_COLUMNS, row[2:], strict=True)
    }
    flags["--colocate"] = "" if flags["--rollout-num-gpus"] is None else None
    if flags["--rollout-num-gpus"] == "0":
        flags["--rollout-num-gpus"] = None
    flags["--num-steps-per-rollout"] = None
    if flags["--global-batch-size"] == "steps":
        flags.update({"--global-batch-size": None, "--num-steps-per-rollout": "4"})
    flags["--sequence-parallel"] = "" if int(flags["--tensor-model-parallel-size"] or 1) > 1 else None
    for note in NOTES.get(row[0], "").split():
        flag, _, value = note.partition("=")
        flags[flag] = value
    return Launch(row[1], flags)
