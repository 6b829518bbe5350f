"""Hugging Face checkpoint -> this rank's Megatron parameters.

Tensors are streamed: each is read, arranged, cut and copied into its parameter before the next, so the memory needed
beside the model is that of the largest parameter. Names are compared first; nothing is loaded from a checkpoint whose
names do not fit.

Reading an HF model directory tensor by tensor.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from slime.arguments.config_files.role_config import ACTOR, CRITIC
from slime.arguments.hf_config import read_hf_config
from slime.backends.megatron_utils.hf_conversion.families import Family, Rule, family_of_directory
from slime.backends.megatron_utils.hf_conversion.layouts import ModelShape
from slime.utils.errors import UserError

logger = logging.getLogger(__name__)

# Global name, parameter, and what it is made of.
Plan = list[tuple[str, torch.nn.Parameter, Rule, tuple[str, ...]]]

_LISTED = 20
_HEAD = "lm_head.weight"


@torch.no_grad()
def load_hf_weights(args: Any, model_chunks: Iterable[torch.nn.Module], hf_dir: str | Path) -> int:
    """Fill the parameters of `model_chunks` from the HF directory `hf_dir`, converted to the parameters' dtype.

    Collective over the pipeline group; all its stages raise the same error.

    Returns:
        0, the iteration at which such a run starts.

    Raises:
        UserError: unsupported `model_type`; tensors missing or surplus (all are listed); a shape that the flags
        contradict.
    """
    from slime.backends.megatron_utils.pipeline_stages import gather_from_stages

    family = family_of_directory(hf_dir)
    source = SafetensorsDirectory(hf_dir)
    plan = _plan(family, model_chunks)
    needed = gather_from_stages({hf_name for *_, hf_names in plan for hf_name in hf_names})
    _check_names(set().union(*needed), source, family, hf_dir, getattr(args, "role", ACTOR) == CRITIC)
    message = None
    try:
        _fill(plan, source, ModelShape.from_args(args), hf_dir)
    except UserError as error:
        message = str(error)
    # A tensor that does not fit is met by the stage that holds it; the others are not left alone with what comes next.
    messages = [found for found in gather_from_stages(message) if found is not None]
    if messages:
        raise UserError(messages[0])
    return 0


def _fill(plan: Plan, source: SafetensorsDirectory, shape: ModelShape, hf_dir: str | Path) -> None:
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    for name, parameter, rule, hf_names in plan:
        tensors = [source.tensor(hf_name) for hf_name in hf_names]
        shard = rule.layout.shard(rule.layout.merge(tensors, shape), rank, size)
        if shard.shape != parameter.shape:
            raise UserError(
                f"{hf_dir}: {', '.join(hf_names)} of shape {[list(tensor.shape) for tensor in tensors]} give "
                f"{list(shard.shape)} for {name}, but the model flags ask for {list(parameter.shape)}; make the shape flags "
                "agree with the checkpoint's config.json"
            )
        parameter.copy_(shard)


def expected_hf_names(hf_dir: str | Path) -> set[str]:
    """Names of the tensors that the export of a model of this directory has: those on disk, a tied head and buffers
    without weights left out.

    Raises:
        UserError: unsupported `model_type`, or no safetensors files.
    """
    names = SafetensorsDirectory(hf_dir).names()
    family = family_of_directory(hf_dir)
    return {name for name in names if not _may_be_ignored(name, family, hf_dir)}


def _plan(family: Family, model_chunks: Iterable[torch.nn.Module]) -> Plan:
    from slime.backends.megatron_utils.parameter_names import global_named_parameters
    from slime.backends.megatron_utils.value_head import is_value_head

    named = [item for chunk in model_chunks for item in global_named_parameters(chunk)]
    # No directory of a language model has a critic's head, and not all have layers for multi-token prediction; those keep
    # the weights that they have.
    kept = [(name, parameter) for name, parameter in named if not is_value_head(parameter)]
    found = [(name, parameter, *family.find(name)) for name, parameter in kept if not family.leaves_out(name)]
    if len(found) < len(kept) and _speaks_for_its_stage():
        logger.info(
            "layers for multi-token prediction are not in this checkpoint and keep their weights, at first random ones"
        )
    return found


def _speaks_for_its_stage() -> bool:
    from megatron.core import parallel_state

    is_first_replica = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    return is_first_replica and parallel_state.get_tensor_model_parallel_rank() == 0


def _check_names(
    needed: set[str], source: SafetensorsDirectory, family: Family, hf_dir: str | Path, is_critic: bool
) -> None:
    """Args: is_critic: the model has a head of its own, and predicts no tokens."""
    present = source.names()
    if is_critic:
        present = {name for name in present if name != _HEAD and not family.is_prediction(name)}
    missing = sorted(needed - present)
    surplus = sorted(name for name in present - needed if not _may_be_ignored(name, family, hf_dir))
    problems = [
        f"{len(names)} {what}: {', '.join(names[:_LISTED])}{', ...' if len(names) > _LISTED else ''}"
        for what, names in (("missing", missing), ("not in the model", surplus))
        if names
    ]
    if problems:
        raise UserError(
            f"{hf_dir} does not fit the model flags (layers, tied or untied embeddings, biases, norms): "
            f"{'; '.join(problems)}"
        )


def _may_be_ignored(name: str, family: Family, hf_dir: str | Path) -> bool:
    if name == _HEAD:
        return bool(read_hf_config(hf_dir, flag="checkpoint").get("tie_word_embeddings", False))
    return family.ignored.search(name) is not None


_INDEX = "model.safetensors.index.json"


class SafetensorsDirectory:
    """The tensors of all safetensors files of a directory, by name. Files are mapped, a tensor is read when asked for.

    Raises:
        UserError: the directory has no safetensors file, or the index names a file or tensor that is not there.
    """

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        self._files: dict[str, Any] = {}
        self._file_of = self._read_index()

    def names(self) -> set[str]:
        return set(self._file_of)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name`, on the CPU, in the dtype it is stored in."""
        file_name = self._file_of[name]
        try:
            return self._open(file_name).get_tensor(name)
        except SafetensorError as error:
            raise UserError(f"{self._directory / file_name}: tensor {name} cannot be read: {error}") from error

    def _read_index(self) -> dict[str, str]:
        index = self._directory / _INDEX
        if index.is_file():
            return json.loads(index.read_text())["weight_map"]
        files = sorted(self._directory.glob("*.safetensors"))
        if not files:
            raise UserError(f"{self._directory} holds no *.safetensors file")
        return {name: file.name for file in files for name in self._open(file.name).keys()}  # noqa: SIM118

    def _open(self, file_name: str) -> Any:
        if file_name not in self._files:
            path = self._directory / file_name
            try:
                self._files[file_name] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path} cannot be read: {error}") from error
        return self._files[file_name]
