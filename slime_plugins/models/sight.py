"""Models of Qwen with their vision tower: the language model is trained on texts and images, and the tower is not trained.

The tower is that of transformers, with the weights `model.visual.*` of `--hf-checkpoint`. They are not parameters of the
trained model: no gradient reaches them, the trainer's checkpoints do not have them, pushes leave engines those that they have,
and exports have them as they are stored. The tower is read when the first images come, so a run on texts never has it.

In a sample's tokens an image is one placeholder token per feature that the tower makes of it. On the first pipeline stage the
features replace the embeddings of these tokens. Some towers make further sets of features, one for each of the first decoder
layers, which are added to these layers' outputs for the image's tokens (DeepStack, arXiv 2406.04334), on whichever stage the
layers are. On every stage a row has three positions, of time, height and width, from 0 on in each sample. For a text the three
are equal. If an image's first token has the position p, the feature at (t, h, w) of its grid has (p + t, p + h, p + w), and
the text behind it goes on after the largest height or width. The channels of a head use the three in turn (interleaved
multimodal rotary embedding, Qwen3-VL, arXiv 2511.21631).

In a tensor-parallel or context-parallel group every rank that has rows of images runs the tower on all images of its
micro-batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from slime.backends.megatron_utils.config_fields import params_dtype
from slime.backends.megatron_utils.layer_spec import RotaryByPosition
from slime.backends.megatron_utils.model_provider import get_model_provider_func
from slime.backends.megatron_utils.prediction_layers import trains_prediction_layers
from slime.training.columns import IMAGES
from slime.training.packed_stream import PackedStream
from slime.training.rollout_data import MicroBatch
from slime.utils.device import get_accelerator
from slime.utils.errors import UserError
from slime.weights.hf_reader import SafetensorsDirectory

_TOWER = "model.visual."
_PIXELS, _GRIDS = "pixel_values", "image_grid_thw"


def seeing_model(
    args: Any, pre_process: bool, post_process: bool, vp_stage: int | None, sections: Sequence[int]
) -> GPTModel:
    """The model of the checkpoint, which takes images.

    Args:
        sections: how many pairs of channels are rotated by time, height and width, if the config does not say it.
    """
    model = get_model_provider_func(args)(pre_process, post_process, vp_stage)
    model.sight = Sight(args, model, sections)
    return model


class Sight:
    """Lets a model chunk take images, by hooks. It is not a module, so nothing of it is trained, saved or drawn at random.

    Raises:
        UserError: images come, or --multimodal-keys say that they will, and flags, model or tokens do not fit them.
    """

    def __init__(self, args: Any, model: GPTModel, sections: Sequence[int]) -> None:
        self._args, self._sections = args, sections
        self._rotary: _RotaryOfImages | None = None
        if isinstance(model.rotary_pos_emb, RotaryByPosition):
            self._rotary = model.rotary_pos_emb = _RotaryOfImages(model.rotary_pos_emb)
        if args.multimodal_keys:
            self._require_own_parts()
        # (rows of this rank's stream that are image tokens, their features) of the pass that is under way.
        self._features: tuple[torch.Tensor, torch.Tensor] | None = None
        model.register_forward_pre_hook(self._look, with_kwargs=True)
        if model.pre_process:
            model.embedding.register_forward_hook(self._replace)
        for layer in model.decoder.layers:
            layer.register_forward_hook(self._add, with_kwargs=True)

    @cached_property
    def config(self) -> Any:
        """The config of the whole model, with transformers' defaults for what it leaves out."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(self._args.hf_checkpoint)
        if not hasattr(config, "vision_config"):
            raise UserError(
                f"--hf-checkpoint {self._args.hf_checkpoint} is a {config.model_type} without a vision tower, and samples have "
                "images; take a model that sees images, or data without them"
            )
        return config

    @cached_property
    def tower(self) -> torch.nn.Module:
        """The vision tower with the checkpoint's weights, on the device."""
        from transformers import AutoModel

        stored = SafetensorsDirectory(self._args.hf_checkpoint)
        names = [name for name in stored.names() if name.startswith(_TOWER)]
        # The random weights are overwritten, and other random numbers must not depend on them.
        with torch.random.fork_rng(devices=[]):
            tower = AutoModel.from_config(self.config.vision_config, dtype=params_dtype(self._args))
        wanted = tower.state_dict().keys()
        if wanted != {name.removeprefix(_TOWER) for name in names}:
            raise UserError(
                f"--hf-checkpoint {self._args.hf_checkpoint} has {len(names)} weights {_TOWER}*, and its config tells "
                f"of a vision tower with {len(wanted)}, not all of which are among them; samples have images, so the tower "
                "must be there"
            )
        tower.load_state_dict({name.removeprefix(_TOWER): stored.tensor(name)[...] for name in names})
        return tower.to(get_accelerator().current_device()).requires_grad_(False).eval()

    def constants(self) -> Iterator[torch.Tensor]:
        """The tensors that the chunk has on the device beside its parameters and buffers."""
        if "tower" in vars(self):
            yield from self.tower.parameters()
            yield from self.tower.buffers()

    def _look(self, model: GPTModel, args: tuple, inputs: dict[str, Any]) -> None:
        """Before the chunk runs: set the positions and features of its rows, if the batch has images."""
        packed = inputs.get("packed_seq_params")
        batch = getattr(packed, "batch", None)
        self._features = None
        if self._rotary is not None:
            self._rotary.positions = None
        if batch is None or not any(batch.get(IMAGES, ())):
            return
        self._require_own_parts()
        stream = batch.stream
        images = _images_of(batch, self.config)
        self._rotary.positions = rows_of_positions(stream, [one and one.positions for one in images], batch)
        self._rotary.axes = self._axes()
        depth = len(getattr(self.config.vision_config, "deepstack_visual_indexes", ()))
        taking = {layer.layer_number for layer in model.decoder.layers if layer.layer_number <= depth}
        if not model.pre_process and not taking:
            return
        found = self._features_of(model, stream, batch, images)
        if found is None:
            return
        rows, (of_embedding, *of_layers) = found
        if model.pre_process:
            self._features = rows, of_embedding
        # They are put beside the batch, because layers that are recomputed need them again after later passes have begun.
        packed.added = {number: (rows, added) for number, added in enumerate(of_layers, 1) if number in taking}

    def _require_own_parts(self) -> None:
        if self._rotary is None:
            raise UserError(
                "samples have images, whose rows have positions of their own, and Transformer Engine's attention finds "
                "positions by itself; give --transformer-impl local"
            )
        if trains_prediction_layers(self._args):
            raise UserError(
                "--enable-mtp-training: layers for multi-token prediction are trained on tokens alone, and samples have "
                "images; leave the flag out, or train on texts"
            )

    def _axes(self) -> torch.Tensor:
        """Which of the three positions (0, 1, 2) rotates each channel, int64 [rotated channels of a head]."""
        rope = getattr(self.config, "text_config", self.config).rope_parameters
        pairs = len(self._rotary.rotary.rotary.inv_freq)
        sections = rope.get("mrope_section", self._sections)
        axes = torch.zeros(pairs, dtype=torch.int64)
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = axis
        return axes.repeat(2).to(get_accelerator().current_device(), non_blocking=True)

    def _features_of(
        self, model: GPTModel, stream: PackedStream, batch: MicroBatch, images: Sequence[_Images | None]
    ) -> tuple[torch.Tensor, list[torch.Tensor]] | None:
        """(rows of this rank's hidden states, their sets of features, each [rows, hidden]). The first set replaces embeddings,
        the next ones are for the first layer, the second, …. None if this rank has no row of an image."""
        # Samples of one prompt share its images, which are computed once.
        distinct = {id(one.pixels): one for one in images if one is not None}
        starts, count = {}, 0
        for key, one in distinct.items():
            starts[key] = count
            count += one.count
        numbers = []
        for tokens, one in zip(batch["tokens"], images, strict=True):
            of_sample = torch.zeros(len(tokens), dtype=torch.int64)
            if one is not None:
                of_sample[one.places] = 1 + starts[id(one.pixels)] + torch.arange(one.count)
            numbers.append(of_sample)
        of_rank = stream.rows_of(numbers)
        if model.config.sequence_parallel:
            group = parallel_state.get_tensor_model_parallel_group()
            of_rank = of_rank.chunk(group.size())[group.rank()]
        rows = of_rank.nonzero().flatten()
        if not len(rows):
            return None
        device = get_accelerator().current_device()
        features = self._look_at(list(distinct.values()), device)
        chosen = (of_rank[rows] - 1).to(device, non_blocking=True)
        return rows.to(device, non_blocking=True), [kind.index_select(0, chosen) for kind in features]

    @torch.no_grad()
    def _look_at(self, images: Sequence[_Images], device: torch.device) -> list[torch.Tensor]:
        pixels = torch.from_numpy(np.concatenate([one.pixels for one in images]))
        grids = torch.from_numpy(np.concatenate([one.grids for one in images]))
        tower = self.tower
        seen = tower(pixels.to(device, tower.dtype), grid_thw=grids.to(device), return_dict=True)
        return [seen.pooler_output, *(seen.get("deepstack_features") or ())]

    def _replace(self, embedding: torch.nn.Module, args: tuple, embedded: torch.Tensor) -> torch.Tensor:
        """After the embedding, [T (with sequence parallelism: this rank's part of T), 1, hidden]: replace the images' rows."""
        if self._features is None:
            return embedded
        (rows, features), self._features = self._features, None
        return embedded.index_copy(0, rows, features[:, None].to(embedded.dtype))

    def _add(
        self, layer: torch.nn.Module, args: tuple, inputs: dict[str, Any], output: tuple[torch.Tensor, Any]
    ) -> tuple[torch.Tensor, Any]:
        """After a decoder layer: add features to its hidden states, which have the same rows as embeddings."""
        added = getattr(inputs.get("packed_seq_params"), "added", {})
        if layer.layer_number not in added:
            return output
        rows, features = added[layer.layer_number]
        hidden, context = output
        return hidden.index_add(0, rows, features[:, None].to(hidden.dtype)), context


class _RotaryOfImages(RotaryByPosition):
    """Wraps the model's rotary embedding, which has one position per row, for passes with three.

    Attributes:
        positions: int64 [3, T]; None: the pass has one position per row, and the wrapped embedding is used.
        axes: see `Sight._axes`.
    """

    def __init__(self, rotary: RotaryByPosition) -> None:
        super().__init__(rotary)
        self.positions: torch.Tensor | None = None
        self.axes: torch.Tensor | None = None

    def forward(self, max_seq_len: int, **layout: Any) -> torch.Tensor:
        """Frequencies [T, 1, 1, rotated channels]."""
        if self.positions is None:
            return self.rotary(max_seq_len, **layout)
        # An image has at least as many tokens as positions, so no position lies beyond the end of the table.
        of_positions = self.rotary.rotary.get_emb(max_seq_len)
        frequencies, *others = (of_positions.index_select(0, rows) for rows in self.positions)
        for axis, rows in enumerate(others, 1):
            frequencies = torch.where(self.axes == axis, rows, frequencies)
        return frequencies


class _Images:
    """The images of a sample and where they stand in it, on the host.

    Attributes:
        pixels, grids: the processor's results, [patches, values of a patch] and int64 [images, 3] in patches.
        places: positions of the placeholder tokens in the sample, int64 [features].
        positions: of time, height and width, int64 [3, tokens].
    """

    def __init__(self, inputs: Mapping[str, Any], tokens: torch.Tensor, mask: torch.Tensor, config: Any) -> None:
        if any("video" in name and value is not None for name, value in inputs.items()):
            raise UserError("the sample has videos; models are trained on texts and images")
        missing = [name for name in (_PIXELS, _GRIDS) if inputs.get(name) is None]
        if missing:
            raise UserError(
                f"its multimodal_train_inputs have no {' and no '.join(missing)}; they must be what the processor of "
                "--hf-checkpoint gives"
            )
        self.pixels, self.grids = np.asarray(inputs[_PIXELS]), np.asarray(inputs[_GRIDS], np.int64)
        merged = config.vision_config.spatial_merge_size
        patches = int(self.grids.prod(-1).sum())
        if len(self.pixels) != patches:
            raise UserError(f"its pixel_values are of {len(self.pixels)} patches, and its image_grid_thw has {patches}")
        shapes = [(t, h // merged, w // merged) for t, h, w in self.grids.tolist()]
        counts = list(map(math.prod, shapes))
        self.count = sum(counts)
        is_feature = tokens == config.image_token_id
        of_prompt, of_response = is_feature.tensor_split([len(tokens) - len(mask)])
        # A placeholder that the model has generated is text. It is trained, or one too many where the mask leaves it out.
        of_response &= ~mask
        told = int(is_feature.sum())
        if told > self.count:
            _leave_out_generated(of_response, int(of_prompt.sum()), counts)
        self.places = is_feature.nonzero().flatten()
        if len(self.places) != self.count:
            raise UserError(
                f"it has {told} placeholder tokens of images (id {config.image_token_id}) outside of what is trained, and its "
                f"{len(shapes)} images have {self.count} features; the tokens must be those that the processor of "
                "--hf-checkpoint makes of the prompt with these images, and what the model has written itself must be trained "
                "where it cannot be told apart from them (loss_mask), or the sample left out (remove_sample)"
            )
        self.positions = image_positions(len(tokens), self.places.tolist(), shapes)


def _leave_out_generated(of_response: torch.Tensor, of_prompt: int, counts: Sequence[int]) -> None:
    """Clear in `of_response`, the masked placeholders of a response, those that the model has generated.

    An image is a run of as many placeholders as it has features. Nothing is cleared if that tells several ways, or none, in
    which the images behind the prompt's are runs of the response in their order.

    Args:
        of_response: bool [response].
        of_prompt: the number of placeholders in the prompt.
        counts: the features of each image.
    """
    ends = list(itertools.accumulate(counts, initial=0))
    if of_prompt not in ends:
        return
    values, lengths = of_response.unique_consecutive(return_counts=True)
    # Features that have their place → which runs they are in, in at most two ways: more are not needed to know of several.
    ways: dict[int, list[frozenset[int]]] = {of_prompt: [frozenset()]}
    for run, (is_placeholder, length) in enumerate(zip(values.tolist(), lengths.tolist(), strict=True)):
        if not is_placeholder:
            continue
        for placed in sorted(ways, reverse=True):
            if placed + length in ends:
                longer = ways.get(placed + length, []) + [runs | {run} for runs in ways[placed]]
                ways[placed + length] = longer[:2]
    found = ways.get(ends[-1], [])
    if len(found) == 1:
        of_images = torch.zeros(len(values), dtype=torch.bool)
        of_images[list(found[0])] = True
        of_response &= of_images.repeat_interleave(lengths)


def _images_of(batch: MicroBatch, config: Any) -> list[_Images | None]:
    """The images of each sample; None for a text. It waits once for the device."""
    seeing = [sample for sample, inputs in enumerate(batch[IMAGES]) if inputs]
    tokens, masks = ([batch[name][sample] for sample in seeing] for name in ("tokens", "loss_masks"))
    # Masks are ones and zeros, of whatever dtype.
    on_host = torch.cat([*tokens, *(mask.to(tokens[0]) for mask in masks)]).cpu()
    parts = on_host.split([len(row) for row in (*tokens, *masks)])
    found: list[_Images | None] = [None] * len(batch[IMAGES])
    for sample, of_sample, mask in zip(seeing, parts, parts[len(seeing) :], strict=False):
        try:
            found[sample] = _Images(batch[IMAGES][sample], of_sample, mask.bool(), config)
        except UserError as error:
            raise UserError(f"sample {batch['sample_indices'][sample]}: {error}") from error
    return found


def image_positions(length: int, places: Sequence[int], shapes: Sequence[tuple[int, int, int]]) -> torch.Tensor:
    """Positions of time, height and width of the tokens of a sample, int64 [3, length].

    Args:
        places: the positions of the placeholder tokens, ascending, image after image.
        shapes: (time, height, width) of each image in features; in all there are as many features as places.

    Raises:
        UserError: the tokens of an image are not contiguous.
    """
    parts, place, position, first = [torch.empty(3, 0, dtype=torch.int64)], 0, 0, 0
    for number, shape in enumerate(shapes):
        count = math.prod(shape)
        start = places[first]
        if places[first + count - 1] != start + count - 1:
            raise UserError(f"between the {count} placeholder tokens of its image {number} stand others")
        parts.append(torch.arange(position, position + start - place).expand(3, -1))
        position += start - place
        parts.append(torch.cartesian_prod(*map(torch.arange, shape)).T + position)
        position += max(shape[1:])
        place, first = start + count, first + count
    parts.append(torch.arange(position, position + length - place).expand(3, -1))
    return torch.cat(parts, dim=1)


def rows_of_positions(
    stream: PackedStream, positions: Sequence[torch.Tensor | None], batch: MicroBatch
) -> torch.Tensor:
    """The three positions of each of this rank's rows, int64 [3, T] on the device of the stream.

    Args:
        positions: [3, length] of each sample on the host; None for a text.
    """
    lengths = [len(tokens) for tokens in batch["tokens"]]
    # Only shifts are added, so padding keeps the positions that the stream gives it.
    shifts = [
        torch.zeros(3, length, dtype=torch.int64) if of_sample is None else of_sample - torch.arange(length)
        for of_sample, length in zip(positions, lengths, strict=True)
    ]
    of_rows = torch.stack([stream.rows_of([shift[axis] for shift in shifts]) for axis in range(3)])
    return stream.position_ids + of_rows.to(stream.position_ids.device, non_blocking=True)
