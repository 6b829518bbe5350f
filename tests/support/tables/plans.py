"""Command lines for tests of plans. They use flags only: none of their files exists."""

import argparse

from slime.arguments import parse_args

_RUN = (
    "--hf-checkpoint /nowhere/model --ref-load /nowhere/model --prompt-data /nowhere/prompts.jsonl --num-rollout 10 "
    "--rm-type math --dry-run --dry-run-gpu-memory-gib 80"
)
_DENSE = (
    "--num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --kv-channels 128 --qk-layernorm --swiglu --disable-bias-linear --normalization RMSNorm "
    "--norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 151936"
)
_EXPERTS = (
    "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 4 --kv-channels 128 --qk-layernorm --swiglu --disable-bias-linear --normalization RMSNorm "
    "--norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 151936 --untie-embeddings-and-output-weights "
    "--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768"
)
# A dense model of 4 B parameters trains on 4 GPUs, and one engine has two more.
SMALL = (
    f"{_RUN} {_DENSE} --actor-num-gpus-per-node 4 --rollout-num-gpus 2 --rollout-num-gpus-per-engine 2 "
    "--tensor-model-parallel-size 2 --sequence-parallel --rollout-batch-size 32 --n-samples-per-prompt 8 "
    "--num-steps-per-rollout 2 --rollout-max-prompt-len 1024 --rollout-max-response-len 7168 --use-dynamic-batch-size "
    "--max-tokens-per-gpu 16384 --sglang-mem-fraction-static 0.8 --wandb-key topsecret"
)
# A model with experts trains and serves in turns on two nodes.
TWO_NODES = (
    f"{_RUN} {_EXPERTS} --actor-num-nodes 2 --actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 8 "
    "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2 --expert-model-parallel-size 8 "
    "--expert-tensor-parallel-size 1 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 "
    "--rollout-max-context-len 32768 --use-dynamic-batch-size --max-tokens-per-gpu 20480 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1 --sglang-mem-fraction-static 0.7"
)


def planned(command: str, *words: str) -> argparse.Namespace:
    """The checked arguments of a command line and further words."""
    return parse_args(argv=[*command.split(), *words])
