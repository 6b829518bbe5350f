"""INT4 and INT8 checkpoints by GPTQ (Frantar et al. 2022, arXiv 2210.17323): rounding that changes outputs on samples little.

It goes layer by layer: the inputs of each matrix are observed on the samples, its columns are rounded one after the other, and
later columns make up for the loss of each. The next layer gets the outputs of the rounded one. Memory holds one decoder layer,
the hidden states of all samples, and second moments of inputs up to a bound; transformers computes the layers.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from slime.utils.data_files import read_file
from slime.utils.device import get_accelerator
from slime.utils.errors import UserError
from slime.weights.hf_reader import FUSED_EXPERTS, SafetensorsDirectory, fused_ending, places_of_matrices
from slime.weights.quantisers import (
    NEVER_PACKED,
    pack_integers,
    quantisation_settings,
    quantise_integers,
    scale_and_zero,
    unpack_integers,
)
from tools.conversion.hugging_face import (
    finish_hf_checkpoint,
    integer_recipe,
    places_of,
    quantised_matrices,
    read_config,
    reopen_hf_checkpoint,
    shard_name,
)
from tools.conversion.units import Conversion, Unit, write_streamed_shard

logger = logging.getLogger(__name__)

# After so many columns their losses are spread over the rest of the matrix at once.
_BLOCK = 128
# With inputs from fewer tokens too little is known about a matrix.
LEAST_TOKENS = 64
# The most bytes of second moments that one pass over the samples gathers.
_MOMENT_BYTES = 4 * 1024**3


def round_columns(
    weight: torch.Tensor, moment: torch.Tensor, bits: int, group_size: int, dampening: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers (int8) [rows, columns] and scales [rows, columns / group_size], in the dtype of `weight`.

    Args:
        moment: float32 [columns, columns], the sum of x xᵀ over inputs x, up to a factor: half the Hessian of the output's
            squared error, equation 2.
        dampening: the share of the diagonal's mean that is added to the diagonal.

    Raises:
        torch.linalg.LinAlgError: the moment is not a positive matrix, for example because inputs are not finite.
    """
    columns, least = weight.shape[1], -(1 << (bits - 1))
    hessian, diagonal = moment.clone(), moment.diagonal().clone()
    # For an input that is always zero: its column makes up for no other, and no other for it.
    diagonal[diagonal == 0] = 1
    hessian.diagonal().copy_(diagonal + dampening * diagonal.mean())
    # Row i has the shares of column i's loss for the columns from i on, after those before are fixed (section 3.3, step 3).
    shares = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    left = weight.to(torch.float32, copy=True)
    integers, scales = torch.empty_like(weight, dtype=torch.int8), []
    block = max(_BLOCK // group_size, 1) * group_size
    for start in range(0, columns, block):
        stop = min(start + block, columns)
        losses = torch.empty_like(left[:, start:stop])
        for column in range(start, stop):
            if column % group_size == 0:
                group = left[:, column : column + group_size].to(weight.dtype)
                scale, _ = scale_and_zero(group.amin(1), group.amax(1), bits, True)
                scales.append(scale)
            rounded = (left[:, column] / scale.float()).round_().clamp_(least, -least - 1)
            integers[:, column] = rounded
            # Engines multiply in the dtype of the scale.
            loss = (left[:, column] - (rounded.to(scale.dtype) * scale).float()) / shares[column, column]
            left[:, column:stop] -= torch.outer(loss, shares[column, column:stop])
            losses[:, column - start] = loss
        left[:, stop:] -= losses @ shares[start:stop, stop:]
    return integers, torch.stack(scales, dim=1)


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix of a layer as its model holds it; its rows are those of the stored weights `names`, one after the other."""

    names: tuple[str, ...]
    weight: torch.Tensor


class Moments(TorchFunctionMode):
    """In its block the inputs x of the given matrices are summed up: `sums` holds x xᵀ, `tokens` how many inputs there were."""

    def __init__(self, matrices: Sequence[Matrix]) -> None:
        super().__init__()
        self.tokens: collections.Counter[tuple[str, ...]] = collections.Counter()
        self.sums = {
            matrix.names: matrix.weight.new_zeros((matrix.weight.shape[1],) * 2, dtype=torch.float32)
            for matrix in matrices
        }
        # By address, because an expert's matrix is a part of a tensor of all experts.
        self._names = {(matrix.weight.data_ptr(), matrix.weight.shape): matrix.names for matrix in matrices}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            names = self._names.get((args[1].data_ptr(), args[1].shape))
            if names is not None:
                inputs = args[0].flatten(0, -2).float()
                self.sums[names].addmm_(inputs.T, inputs)
                self.tokens[names] += len(inputs)
        return func(*args, **(kwargs or {}))


class _Caught(Exception):
    """Carries the arguments of a layer's call out of the model."""

    def __init__(self, *call: Any) -> None:
        self.call = call


class LayeredModel:
    """A model of transformers whose decoder layers get their weights only when it is their turn.

    Raises:
        UserError: transformers does not know the model, or has other names for its tensors than the checkpoint.
    """

    def __init__(self, source: Path, trust_remote_code: bool, device: torch.device) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        self._source, self._stored, self._device = source, SafetensorsDirectory(source), device
        try:
            config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
            # Beside a vision tower the language model has other names, and not every one is also a model of its own.
            is_language_model = config.get_text_config() is config
            kind = AutoModelForCausalLM if is_language_model else AutoModelForImageTextToText
            with torch.device("meta"):
                # Eager experts are computed one by one, so that the inputs of each can be observed.
                self._model = kind.from_config(
                    config, trust_remote_code=trust_remote_code, experts_implementation="eager"
                ).eval()
        except (ValueError, OSError, ImportError) as error:
            raise UserError(f"{source} is no model that transformers builds: {error}") from error
        self._decoder = self._model.get_decoder()
        self.layers = list(self._decoder.layers)
        self._prefix = next(name for name, module in self._model.named_modules() if module is self._decoder.layers)
        self._gives_tuples, self._wanted = False, 0
        for index, layer in enumerate(self.layers):
            layer.forward = functools.partial(self._pass, index)
        for name, module in list(self._decoder.named_children()):
            if module is self._decoder.layers:
                continue
            if any(True for _ in module.parameters()):
                self._fill(module, f"{self._prefix.removesuffix('layers')}{name}")
            else:
                # Tables of positions follow from the config; no checkpoint has them.
                setattr(self._decoder, name, type(module)(config.get_text_config()).to(device))

    def prefix(self, index: int) -> str:
        """The beginning of the names of a layer's tensors."""
        return f"{self._prefix}.{index}."

    def load(self, index: int) -> list[Matrix]:
        """Give a layer its weights; returns its matrices."""
        layer = self.layers[index]
        self._fill(layer, f"{self._prefix}.{index}")
        found = []
        for key, weight in layer.named_parameters():
            name = self.prefix(index) + key
            fused = fused_ending(name)
            if weight.ndim == 2:
                found.append(Matrix((name,), weight.data))
            elif fused is not None and weight.ndim == 3:
                found += [Matrix(_of_expert(name, fused, expert), matrix) for expert, matrix in enumerate(weight.data)]
        return found

    def unload(self, index: int) -> None:
        self.layers[index].to("meta")

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The first layer's input for a sample of tokens [1, length]."""
        return self._call(0, tokens)[0]

    def forward(self, index: int, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """A layer's output for `hidden` [1, length, hidden size]."""
        _, arguments, options = self._call(index, tokens)
        layer = self.layers[index]
        made = type(layer).forward(layer, hidden, *arguments, **options)
        self._gives_tuples = isinstance(made, tuple)
        return made[0] if self._gives_tuples else made

    def _call(self, index: int, tokens: torch.Tensor) -> tuple[torch.Tensor, Any, Any]:
        """(hidden states, further arguments, options) of the decoder's call of a layer; those before it pass their input on."""
        self._wanted = index
        try:
            self._decoder(input_ids=tokens.to(self._device), use_cache=False)
        except _Caught as caught:
            return caught.call
        raise UserError(f"{self._source}: transformers runs no layer {index} of it")

    def _pass(self, index: int, hidden: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if index == self._wanted:
            raise _Caught(hidden, arguments, options)
        return (hidden,) if self._gives_tuples else hidden

    def _fill(self, module: torch.nn.Module, prefix: str) -> None:
        state = {key: self._read(f"{prefix}.{key}").to(self._device) for key in module.state_dict()}
        module.load_state_dict(state, assign=True)
        left = [name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta]
        if left:
            raise UserError(f"{self._source}: nothing is known of {prefix}.{left[0]}, which transformers computes with")

    def _read(self, name: str) -> torch.Tensor:
        names = self._stored.names()
        if name in names:
            return self._stored.tensor(name)[...].clone()
        fused = fused_ending(name)
        experts: list[torch.Tensor] = []
        while fused is not None and set(parts := _of_expert(name, fused, len(experts))) <= names:
            experts.append(torch.cat([self._stored.tensor(part)[...] for part in parts]))
        if not experts:
            raise UserError(f"{self._source} has no {name}, as transformers calls a tensor of the model")
        return torch.stack(experts)


def _of_expert(name: str, fused: str, expert: int) -> tuple[str, ...]:
    layer = name.removesuffix(fused)
    return tuple(f"{layer}.experts.{expert}.{part}" for part in FUSED_EXPERTS[fused])


def calibrate_checkpoint(source: Path, target: Path, data: Path, options: argparse.Namespace) -> None:
    """Write `source` with its matrices rounded by GPTQ as `target`; see `Conversion` for errors.

    Args:
        data: a directory of .jsonl or .parquet files, whose rows have `text`, or `messages` for the chat template.
        options: those of `tools/convert_hf_to_int4.py`.

    Raises:
        UserError: `source` is quantised already; there are no samples; or transformers does not know the model.
    """
    if quantisation_settings(source) is not None:
        raise UserError(f"{source} is quantised already: make a plain one of it first (tools/fp8_cast_bf16.py)")
    places, size = places_of(source, places_of_matrices), options.quant_group_size
    chosen, left = quantised_matrices(places, (*NEVER_PACKED, *options.ignore_rules), size)
    recipe = integer_recipe(options.bits, size, True)
    config = {**read_config(source), "quantization_config": {**recipe.settings, recipe.ignored: left}}
    model = LayeredModel(source, options.trust_remote_code, get_accelerator().device())
    samples = read_samples(data, source, options)
    units, rest = [], dict(places)
    for index in range(len(model.layers)):
        names = [name for name in sorted(rest) if name.startswith(model.prefix(index))]
        units.append(Unit(index, tuple(names), sum(place.stop - place.start for place in map(rest.pop, names))))
    units.append(Unit(len(units), tuple(sorted(rest)), sum(place.stop - place.start for place in rest.values())))
    work = Calibration(source, model, samples, frozenset(chosen), options.bits, size, options.dampening_frac)
    noted = {name: str(value) for name, value in sorted(vars(options).items()) if name != "force"}
    nearest = Conversion(source, target, {"config": config, **noted}, 1, options.force, (data,)).run(
        units,
        work.write,
        lambda draft, results: finish_hf_checkpoint(source, config, draft, len(results)),
        reopen_hf_checkpoint,
    )
    # This includes layers that an earlier attempt has written.
    rounded = [name for names in nearest for name in names]
    if rounded:
        logger.warning(
            "%d matrices are rounded to nearest: fewer than %d tokens reached them, or their inputs are not finite: %s",
            len(rounded), LEAST_TOKENS, ", ".join(rounded[:5]),
        )  # fmt: skip


def read_samples(data: Path, source: Path, options: argparse.Namespace) -> list[torch.Tensor]:
    """The tokens [1, length] of the first rows of the files in `data`, in the order of the files' names.

    Raises:
        UserError: there are none, or a row has neither `text` nor `messages`.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=options.trust_remote_code)
    samples: list[torch.Tensor] = []
    for path in sorted(path for path in data.rglob("*") if path.suffix in (".jsonl", ".parquet")):
        for row in read_file(str(path), "--data-dir"):
            if len(samples) == options.num_calibration_samples:
                return samples
            text, is_rendered = row.get("text"), False
            if text is None and "messages" in row:
                # The template writes the special tokens.
                text, is_rendered = tokenizer.apply_chat_template(row["messages"], tokenize=False), True
            if not isinstance(text, str):
                raise UserError(f"--data-dir: a row of {path} has neither `text` nor `messages`")
            tokens = tokenizer(text, return_tensors="pt", add_special_tokens=not is_rendered)["input_ids"][
                :, : options.max_sequence_length
            ]
            if tokens.numel():
                samples.append(tokens)
    if not samples:
        raise UserError(f"--data-dir {data} has no sample: give a directory of .jsonl or .parquet files with `text`")
    return samples


class Calibration:
    """Writes the units of a model; each layer is rounded for the outputs of the rounded layers before it."""

    def __init__(
        self,
        source: Path,
        model: LayeredModel,
        samples: Sequence[torch.Tensor],
        chosen: frozenset[str],
        bits: int,
        group_size: int,
        dampening: float,
    ) -> None:
        self._source, self._model, self._samples, self._chosen = source, model, samples, chosen
        self._bits, self._group_size, self._dampening = bits, group_size, dampening
        self._hidden: list[torch.Tensor] = []
        # The number of the layer whose input `_hidden` is.
        self._at = 0

    @torch.no_grad()
    def write(self, draft: Path, unit: Unit) -> tuple[Path, list[str]]:
        """Write a unit, for `Conversion.run`. Returns the file, and the weights about whose inputs too little was known. Layers
        that an earlier process has written are only computed again."""
        file, made = draft / shard_name(unit.index), {}
        if unit.index < len(self._model.layers):
            if not self._hidden:
                self._hidden = [self._model.embed(sample) for sample in self._samples]
            while self._at < unit.index:
                matrices = self._model.load(self._at)
                written = _parts_of_file(draft / shard_name(self._at))
                self._go_on(matrices, written)
            matrices = self._model.load(unit.index)
            made = self._rounded(matrices)
            self._go_on(matrices, made)
        write_streamed_shard(file, self._tensors(unit, made), 4 * len(unit.names))
        return file, [name for name in unit.names if name in self._chosen and name not in made]

    def _tensors(
        self, unit: Unit, made: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        stored = SafetensorsDirectory(self._source)
        for name in unit.names:
            if name not in self._chosen:
                yield name, stored.tensor(name)[...]
                continue
            parts = made.get(name)
            if parts is None:
                parts = quantise_integers(stored.tensor(name)[...], self._bits, self._group_size, True)
            yield from ((name.removesuffix("weight") + part, tensor) for part, tensor in parts.items())

    def _rounded(self, matrices: Sequence[Matrix]) -> dict[str, dict[str, torch.Tensor]]:
        """The parts of the weights of a layer, by name, without weights about whose inputs too little is known."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for group in _within_bound([matrix for matrix in matrices if set(matrix.names) <= self._chosen]):
            moments = Moments(group)
            with moments:
                for sample, hidden in zip(self._samples, self._hidden, strict=True):
                    self._model.forward(self._at, sample, hidden)
            for matrix in group:
                moment = moments.sums.pop(matrix.names)
                if moments.tokens[matrix.names] < LEAST_TOKENS:
                    continue
                try:
                    integers, scale = round_columns(
                        matrix.weight, moment, self._bits, self._group_size, self._dampening
                    )
                except torch.linalg.LinAlgError:
                    continue
                split = zip(integers.cpu().chunk(len(matrix.names)), scale.cpu().chunk(len(matrix.names)), strict=True)
                for name, (own, own_scale) in zip(matrix.names, split, strict=True):
                    found[name] = {
                        "weight_packed": pack_integers(own, self._bits),
                        "weight_scale": own_scale.contiguous(),
                        "weight_shape": torch.tensor(own.shape),
                    }
        return found

    def _go_on(self, matrices: Sequence[Matrix], made: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take the samples through the layer with rounded weights, as engines will compute it."""
        for matrix in matrices:
            rows = matrix.weight.chunk(len(matrix.names))
            for name, weight in zip(matrix.names, rows, strict=True):
                if name not in self._chosen:
                    continue
                parts = made.get(name) or quantise_integers(weight.cpu(), self._bits, self._group_size, True)
                integers = unpack_integers(parts["weight_packed"], self._bits, weight.shape[1])
                scale = parts["weight_scale"]
                groups = integers.view(*scale.shape, self._group_size).to(scale.dtype)
                weight.copy_((groups * scale[..., None]).view(weight.shape))
        for number, (sample, hidden) in enumerate(zip(self._samples, self._hidden, strict=True)):
            self._hidden[number] = self._model.forward(self._at, sample, hidden)
        self._model.unload(self._at)
        self._at += 1


def _parts_of_file(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The parts of the quantised weights of a file, by name."""
    from safetensors.torch import load_file

    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(path).items():
        module, _, part = name.rpartition(".")
        if part.startswith("weight_"):
            found.setdefault(f"{module}.weight", {})[part] = tensor
    return found


def _within_bound(matrices: Sequence[Matrix]) -> Iterator[list[Matrix]]:
    """The matrices in groups whose moments fit into the bound of memory."""
    group: list[Matrix] = []
    nbytes = 0
    for matrix in matrices:
        size = 4 * matrix.weight.shape[1] ** 2
        if group and nbytes + size > _MOMENT_BYTES:
            yield group
            group, nbytes = [], 0
        group.append(matrix)
        nbytes += size
    if group:
        yield group
