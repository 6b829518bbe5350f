"""How training ranks are divided: by tensor, pipeline and context parallelism; what is left is data parallelism."""

import argparse
import math

MODEL_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def model_parallel_size(args: argparse.Namespace) -> int:
    """The ranks that share a sample's work."""
    return math.prod(getattr(args, name) for name in MODEL_PARALLEL)


def divides_the_ranks(args: argparse.Namespace) -> bool:
    """Whether the training ranks can be divided into model-parallel groups."""
    return args.world_size % model_parallel_size(args) == 0


def data_parallel_size(args: argparse.Namespace) -> int:
    """The number of those groups; at least 1, also where the ranks cannot be divided."""
    return max(1, args.world_size // model_parallel_size(args))
