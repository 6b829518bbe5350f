"""Flags of Megatron-Core: parallel layout, model shape, precision and optimizer."""

import argparse

TITLE = "Megatron"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    _add_parallelism(group)
    _add_model_shape(group)
    _add_precision(group)
    _add_optimizer(group)


def _add_parallelism(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tensor-model-parallel-size", type=int, default=1, help="ranks that share each layer")
    group.add_argument("--sequence-parallel", action="store_true", help="split norms over tensor-parallel ranks")
    group.add_argument("--recompute-granularity", choices=["full", "selective"], default=None, help="what to recompute")
    group.add_argument("--recompute-method", choices=["uniform", "block"], default=None, help="which layers")
    group.add_argument("--recompute-num-layers", type=int, default=None, help="layers per recomputed unit")


def _add_model_shape(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--num-layers", type=int, default=None, help="transformer layers")
    group.add_argument("--hidden-size", type=int, default=None, help="width of the residual stream")
    group.add_argument("--ffn-hidden-size", type=int, default=None, help="width of the MLP")
    group.add_argument("--num-attention-heads", type=int, default=None, help="query heads")
    group.add_argument("--group-query-attention", action="store_true", help="fewer key/value heads than query heads")
    group.add_argument("--num-query-groups", type=int, default=None, help="key/value heads")
    group.add_argument("--kv-channels", type=int, default=None, help="width of one head; unset: hidden / heads")
    group.add_argument("--normalization", choices=["RMSNorm"], default="RMSNorm", help="norm of the layers")
    group.add_argument("--norm-epsilon", type=float, default=1e-5, help="its epsilon")
    group.add_argument("--rotary-base", type=int, default=10000, help="RoPE base")
    group.add_argument(
        "--use-rotary-position-embeddings",
        dest="position_embedding_type",
        action="store_const",
        const="rope",
        default="rope",
        help="rotary position embeddings (always used)",
    )
    group.add_argument("--vocab-size", type=int, default=None, help="vocabulary of the model, without padding")
    group.add_argument("--make-vocab-size-divisible-by", type=int, default=128, help="padding of the vocabulary")
    group.add_argument("--max-position-embeddings", type=int, default=None, help="longest sequence of the model")
    group.add_argument("--swiglu", action="store_true", help="gated SiLU in the MLP")
    group.add_argument("--disable-bias-linear", action="store_true", help="linear layers without bias")
    group.add_argument("--add-qkv-bias", action="store_true", help="bias in the QKV projection")
    group.add_argument("--qk-layernorm", action="store_true", help="norm of queries and keys")
    group.add_argument(
        "--untie-embeddings-and-output-weights", action="store_true", help="output layer has its own weights"
    )
    group.add_argument("--attention-dropout", type=float, default=0.0, help="dropout in attention")
    group.add_argument("--hidden-dropout", type=float, default=0.0, help="dropout after attention and MLP")


def _add_precision(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--bf16", action="store_true", help="bfloat16 parameters (default on GPUs)")
    group.add_argument("--fp16", action="store_true", help="float16 parameters")
    group.add_argument(
        "--accumulate-allreduce-grads-in-fp32", action="store_true", help="accumulate and reduce gradients in float32"
    )
    group.add_argument("--attention-softmax-in-fp32", action="store_true", help="attention softmax in float32")
    group.add_argument("--deterministic-mode", action="store_true", help="only deterministic kernels")


def _add_optimizer(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--optimizer", choices=["adam"], default="adam", help="optimizer")
    group.add_argument("--lr", type=float, default=1e-6, help="learning rate")
    group.add_argument("--min-lr", type=float, default=0.0, help="lowest learning rate of a decaying schedule")
    group.add_argument(
        "--lr-decay-style",
        choices=["constant", "linear", "cosine", "inverse-square-root"],
        default="constant",
        help="shape of the learning rate schedule",
    )
    group.add_argument("--lr-decay-iters", type=int, default=None, help="length of the decay; unset: the whole run")
    group.add_argument("--lr-warmup-iters", type=int, default=0, help="optimizer steps of linear warm-up")
    group.add_argument("--lr-warmup-fraction", type=float, default=None, help="warm-up as share of the decay length")
    group.add_argument("--weight-decay", type=float, default=0.01, help="decoupled weight decay")
    group.add_argument("--adam-beta1", type=float, default=0.9, help="decay of the first moment")
    group.add_argument("--adam-beta2", type=float, default=0.999, help="decay of the second moment")
    group.add_argument("--adam-eps", type=float, default=1e-8, help="epsilon of Adam")
    group.add_argument("--clip-grad", type=float, default=1.0, help="gradient norm limit; 0: no clipping")
    group.add_argument(
        "--use-distributed-optimizer",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="shard the optimizer state over data-parallel ranks",
    )
