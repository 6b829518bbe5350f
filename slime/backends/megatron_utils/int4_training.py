"""Training of a model that engines serve in INT4: layers compute with the numbers that the engines will have.

With `OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1` every weight that is packed in `--hf-checkpoint`, of dense layers and of experts, is
rounded before it is used, to what the next push sends of it. The gradient passes the rounding unchanged (a straight-through
estimator: Bengio et al. 2013, arXiv 1308.3432), so the parameter, which optimizer and checkpoints have, keeps its digits.

A layer finds the rounded weight in the place of its parameter while it computes, and only then: names, gradient buffers and
pushes know the parameter alone. Groups lie along the columns. So fused rows, and rows of tensor-parallel ranks, are rounded as
if each stood alone, and a rank that has a part of the columns needs whole groups of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from slime.arguments.config_files.role_config import CRITIC
from slime.backends.megatron_utils.hf_conversion import family_of_run
from slime.backends.megatron_utils.parameter_names import global_named_parameters
from slime.utils import env
from slime.utils.errors import UserError
from slime.weights.hf_reader import SafetensorsDirectory
from slime.weights.quantisers import int4_scheme, quantisation_settings, rounded_as_int4

logger = logging.getLogger(__name__)


def round_weights_to_int4(args: Any, chunks: Sequence[torch.nn.Module]) -> None:
    """Have the layers of `chunks` compute with rounded weights, if the environment asks for it; a critic is not served.

    Raises:
        UserError: `--hf-checkpoint` is no INT4 checkpoint with groups of that size; a weight's columns on this rank are not
            whole groups; a kernel would add gradients into the parameter itself.
    """
    group_size = env.int4_training_group_size()
    if group_size is None or args.role == CRITIC:
        return
    directory = Path(args.hf_checkpoint)
    settings = quantisation_settings(directory) or {}
    scheme = int4_scheme(directory, settings) if settings.get("format") == "pack-quantized" else None
    found = None if scheme is None else (scheme.weights.num_bits, scheme.weights.group_size)
    if found != (4, group_size):
        what = "is not" if found is None else f"has {found[0]} bits and groups of {found[1]}, and is not"
        raise UserError(
            f"OPEN_TRAINING_INT4_GROUP_SIZE={group_size}: --hf-checkpoint {directory} {what} an INT4 checkpoint with groups of "
            f"{group_size}; name the one that engines serve, or leave OPEN_TRAINING_INT4_FAKE_QAT_FLAG out"
        )
    family, stored, count = family_of_run(args), SafetensorsDirectory(directory).names(), 0
    for chunk in chunks:
        places = {
            id(parameter): (module, name)
            for module in chunk.modules()
            for name, parameter in module.named_parameters(recurse=False)
        }
        for name, parameter in global_named_parameters(chunk):
            if family.leaves_out(name) or parameter.ndim != 2:
                continue
            _, hf_names = family.find(name)
            if all(hf_name.removesuffix("weight") + "weight_packed" in stored for hf_name in hf_names):
                _round_in_forward(name, *places[id(parameter)], scheme)
                count += 1
        if count and chunk.config.gradient_accumulation_fusion:
            raise UserError("--gradient-accumulation-fusion with INT4 training: give --no-gradient-accumulation-fusion")
    logger.info("%d weights of this rank are rounded to INT4 in groups of %d while layers compute", count, group_size)


def _round_in_forward(name: str, module: torch.nn.Module, attribute: str, scheme: Any) -> None:
    columns = module._parameters[attribute].shape[1]
    if columns % scheme.weights.group_size:
        raise UserError(
            f"INT4 training: {name} has {columns} columns on this rank, which are no whole groups of "
            f"{scheme.weights.group_size}; give a smaller --tensor-model-parallel-size or --expert-tensor-parallel-size"
        )

    def put(module: torch.nn.Module, _: Any) -> None:
        # What stands in a module's own dictionary is found before its parameters.
        module.__dict__[attribute] = _Rounded.apply(module._parameters[attribute], scheme)

    def take_away(module: torch.nn.Module, *_: Any) -> None:
        module.__dict__.pop(attribute, None)

    module.register_forward_pre_hook(put)
    module.register_forward_hook(take_away, always_call=True)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, weight: torch.Tensor, scheme: Any) -> torch.Tensor:
        return rounded_as_int4(weight, scheme)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
