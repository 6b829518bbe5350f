"""The checks of every family: it has the logits, chosen experts and gradients of its reference, and exports its checkpoint
with the same bits.

`run_families` is a worker for `run_distributed`; the other functions compare its results in the test's process.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.support.models.tiny_families import LAYOUTS, VOCABULARY
from tests.support.models.tiny_model import tiny_args

LENGTHS = (7, 16, 33, 2, 6)
# Logits in float32, absolute.
LOGITS = 5e-6


def sequences() -> list[list[int]]:
    """Random token ids, the same at every call."""
    import torch

    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def run_families(
    directories: Mapping[str | None, Mapping[str, str]],
) -> dict[str | None, dict[str, SimpleNamespace | str]]:
    """The results of this rank by layout and family. On one rank, the traceback of a family that failed is its result.

    Args:
        directories: name of a layout (None: one rank) -> name -> directory of a tiny model.

    Returns:
        exported: the tensors that the rank's pipeline stage sends, by HF name.
        not_contiguous, larger_storage: exported tensors that are not contiguous, and those whose storage is larger than they.
        logits: [tokens, padded vocabulary] of the packed sequences; None if one call does not run the whole model.
        chosen: for each layer with a router, the experts of each token, bool [tokens, experts]; None as for logits.
        gradients: the gradients of the summed next-token loss, by HF name; None as for logits.
    """
    from tests.support.processes import megatron_worker as megatron

    found: dict[str | None, dict[str, SimpleNamespace | str]] = {}
    for layout, models in directories.items():
        sizes = LAYOUTS[layout] if layout else {}
        megatron.start(tiny_args(next(iter(models.values())), **sizes))
        found[layout] = {}
        for name, directory in models.items():
            try:
                found[layout][name] = run_family(tiny_args(directory, **sizes))
            except Exception:
                if layout is not None:
                    # With several ranks the others would wait for this one.
                    raise
                found[layout][name] = traceback.format_exc()
    return found


def run_family(args: Any) -> SimpleNamespace:
    """The results of `run_families` for one model."""
    from megatron.core.distributed import finalize_model_grads

    from slime.backends.megatron_utils.hf_conversion import (
        iter_stage_named_tensors,
        load_hf_weights,
        names_of_stage,
    )
    from slime.backends.megatron_utils.model_provider import setup_model
    from tests.support.processes import megatron_worker as megatron

    chunks = setup_model(args)
    load_hf_weights(args, chunks, args.hf_checkpoint)
    found = SimpleNamespace(exported={}, not_contiguous=[], larger_storage=[], logits=None, chosen=None, gradients=None)
    for name, tensor in iter_stage_named_tensors(args, chunks, names_of_stage(args, chunks)):
        assert name not in found.exported
        found.exported[name] = tensor.clone().cpu()
        if not tensor.is_contiguous():
            found.not_contiguous.append(name)
        if tensor.untyped_storage().nbytes() > tensor.nbytes:
            found.larger_storage.append(name)
    if args.pipeline_model_parallel_size > 1 or args.context_parallel_size > 1:
        return found
    chunks[0].train()
    with megatron.routing_maps(chunks[0]) as maps:
        logits = megatron.packed_forward(chunks[0], sequences())
    found.logits = megatron.gather_vocabulary(logits).cpu()
    found.chosen = [chosen.cpu() for chosen in megatron.gather_tokens(args, maps)]
    # This comes last: Megatron's cross entropy overwrites the logits.
    megatron.next_token_loss(logits, sequences()).backward()
    finalize_model_grads(chunks)
    found.gradients = {name: gradient.cpu() for name, gradient in megatron.hf_gradients(args, chunks).items()}
    return found


@dataclass(frozen=True)
class Expected:
    """The results of the reference: logits [tokens, vocabulary]; for each layer with a router the experts of each token, bool
    [tokens, experts]; gradients by the names of the checkpoint."""

    logits: Any
    chosen: Sequence[Any]
    gradients: Mapping[str, Any]


def reference(model: Any, directory: Path) -> Expected:
    """Run the reference of a tiny model. Its gradients are saved to `directory` as weights, which gives them their HF names."""
    import torch
    import torch.nn.functional as F

    chosen: dict[str, list[torch.Tensor]] = {}

    def choose(name: str, experts: Any, inputs: tuple) -> None:
        # All classes of transformers call their experts with hidden states, indices of experts [tokens, chosen], and weights.
        numbers = inputs[1]
        none = torch.zeros(len(numbers), experts.num_experts, dtype=torch.bool)
        chosen.setdefault(name, []).append(none.scatter(1, numbers, True))

    hooks = [
        module.register_forward_pre_hook(functools.partial(choose, name))
        for name, module in model.named_modules()
        if name.endswith(".mlp.experts")
    ]
    logits = [model(torch.tensor([sequence])).logits[0] for sequence in sequences()]
    for hook in hooks:
        hook.remove()
    losses = [
        F.cross_entropy(rows[:-1], torch.tensor(sequence[1:]), reduction="sum")
        for rows, sequence in zip(logits, sequences(), strict=True)
    ]
    sum(losses).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad if parameter.grad is not None else torch.zeros_like(parameter))
    model.save_pretrained(directory)
    stored = stored_tensors(directory)
    # A router's bias is no parameter and has no gradient; a training step moves it unless the family keeps it fixed.
    gradients = {
        name: stored[name] for name in of_trained_parts(stored) if not name.endswith("e_score_correction_bias")
    }
    return Expected(torch.cat(logits).detach(), [torch.cat(of_layer) for of_layer in chosen.values()], gradients)


def assert_like_reference(found: SimpleNamespace, expected: Expected) -> None:
    """Logits, chosen experts and gradients are the reference's, and the padding of the vocabulary enters no softmax."""
    import torch

    assert len(found.chosen) == len(expected.chosen)
    for number, (of_layer, of_reference) in enumerate(zip(found.chosen, expected.chosen, strict=True)):
        assert torch.equal(of_layer, of_reference), f"layer {number} of those with experts"
    torch.testing.assert_close(found.logits[:, :VOCABULARY], expected.logits, rtol=0, atol=LOGITS)
    assert (found.logits[:, VOCABULARY:] < -1e8).all(), "padding rows of the vocabulary must not enter a softmax"
    # A reference without layers for multi-token prediction has no gradients for them.
    assert expected.gradients.keys() <= found.gradients.keys()
    for name, gradient in expected.gradients.items():
        scale = gradient.abs().max().item()
        assert (found.gradients[name] - gradient).abs().max().item() <= 2e-5 * max(scale, 1e-3), name


def stored_tensors(directory: Path) -> dict[str, Any]:
    """The tensors of a checkpoint. A tensor of all experts is split into one for each."""
    from slime.weights.hf_reader import SafetensorsDirectory

    source = SafetensorsDirectory(directory)
    return {name: source.tensor(name)[...] for name in source.names()}


def of_trained_parts(names: Iterable[str]) -> list[str]:
    """The HF names that are not of a vision tower."""
    return [name for name in names if not name.startswith("model.visual.")]


def assert_gives_checkpoint_back(stages: Sequence[SimpleNamespace], directory: Path) -> None:
    """All stages together send every tensor of the checkpoint once, with the same bits."""
    stored = stored_tensors(directory)
    sent = [pair for stage in stages for pair in stage.exported.items()]
    assert sorted(name for name, _ in sent) == sorted(of_trained_parts(stored))
    different = [name for name, tensor in sent if tensor.dtype != stored[name].dtype or not tensor.equal(stored[name])]
    assert different == []
