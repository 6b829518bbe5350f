"""Pushes weights to SGLang's model of a checkpoint and to the draft model that it makes of the layer for multi-token
prediction, and reports the tensors in both. Run it in a process of its own: the CPU adapter changes how sglang is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Tensors that latent attention derives from its weights when they are loaded.
_DERIVED = ("w_kc", "w_vc")
_LOOKED_UP = (
    "fused_sigmoid_mul_cpu", "fused_qk_gemma_rmsnorm_cpu", "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)  # fmt: skip


def receive(directories: Mapping[str, str], max_bytes: int) -> dict[str, SimpleNamespace]:
    """Push weights in buckets of `max_bytes` to the models of each directory. Returns the results by name of the directory.

    Returns:
        loaded: names of the loaded tensors by model ("target", "draft"). lost: tensors that a reset changed and a push of the
        whole checkpoint did not restore; without_layer: the same for a push without the layer. shared: tensors of the draft
        that are the target's own.
    """
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    import torch
    import transformers

    from slime.backends.sglang_utils import cpu_runtime

    cpu_runtime.install()
    # Importing Qwen3.5 asks for these operators; only a forward pass calls them.
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for operator in _LOOKED_UP:
        library.define(f"{operator}(Tensor x) -> ()")
    # The draft calls it when it gets the target's embedding.
    torch.cuda.synchronize = lambda *device: None
    # The server's arguments choose kernels of sparse attention by it.
    torch.cuda.get_device_capability = lambda *device: (9, 0)
    # Published MiMo checkpoints bring a config class of their own.
    transformers.AutoConfig.register("mimo", type("MiMoConfig", (transformers.Qwen2Config,), {"model_type": "mimo"}))
    return {name: _receive(Path(directory), max_bytes) for name, directory in directories.items()}


def _receive(directory: Path, max_bytes: int) -> SimpleNamespace:
    import torch

    from slime.weights.buckets import split_into_buckets
    from slime.weights.hf_reader import SafetensorsDirectory

    target, draft = _load(directory)
    # SGLang's draft worker does the same.
    draft.set_embed_and_head(*target.get_embed_and_head())
    models = {"target": target, "draft": draft}
    loaded = {role: _tensors(model) for role, model in models.items()}
    own = {tensor.data_ptr() for tensor in target.parameters()}
    shared = {name for name, tensor in draft.named_parameters() if tensor.data_ptr() in own}
    whole, layer = _names(directory)
    stored = SafetensorsDirectory(directory)
    lost = []
    for names in (whole, [name for name in whole if name not in layer]):
        generator = torch.Generator().manual_seed(1)
        for model in models.values():
            for tensor in model.parameters():
                tensor.data.copy_(torch.randn(tensor.shape, generator=generator))
        _push(models, split_into_buckets(((name, stored.tensor(name)[...]) for name in names), max_bytes))
        after = {role: _tensors(model) for role, model in models.items()}
        lost.append({
            role: {name for name, tensor in tensors.items() if not torch.equal(tensor, after[role][name])}
            for role, tensors in loaded.items()
        })  # fmt: skip
    names = {role: set(tensors) for role, tensors in loaded.items()}
    return SimpleNamespace(loaded=names, lost=lost[0], without_layer=lost[1], shared=shared)


def _names(directory: Path) -> tuple[list[str], set[str]]:
    """Returns (names of the tensors of a push, those of them that belong to the layer)."""
    from slime.arguments.hf_config import read_hf_config
    from slime.models.families import FAMILIES
    from slime.weights.buckets import loading_order
    from slime.weights.hf_reader import SafetensorsDirectory

    config = read_hf_config(directory)
    family, layers = FAMILIES[config["model_type"]], config["num_hidden_layers"]
    names = SafetensorsDirectory(directory).names()
    of_layer = {name for name in names if family.is_stored_prediction(name, layers)}
    # These names are always part of the trainer's layer.
    of_layer |= {name for name in names if family.is_prediction(name)}
    behind = {name for name in names if family.may_be_left_out(name, layers, 1)} - of_layer
    return sorted(names - behind, key=loading_order), of_layer


def _load(directory: Path) -> tuple[Any, Any]:
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp
    from sglang.srt.distributed import bootstrap
    from sglang.srt.layers.moe.utils import initialize_moe_config
    from sglang.srt.model_loader.loader import get_model_loader
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    from slime.backends.sglang_utils.server_arguments import CPU_DEFAULTS

    server_args = ServerArgs(**{**CPU_DEFAULTS, "model_path": str(directory), "skip_tokenizer_init": True})
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    if not bootstrap._PARALLEL_INITIALISED:
        bootstrap.init_parallel_runtime(server_args=server_args, device="cpu", dist_port=int(os.environ["MASTER_PORT"]))
    initialize_moe_config()
    models = []
    for is_draft in (False, True):
        config = ModelConfig.from_server_args(server_args, is_draft_model=is_draft)
        config = adjust_config_with_unaligned_cpu_tp(config, LoadConfig(), 1)
        loader = get_model_loader(LoadConfig(), config)
        models.append(loader.load_model(model_config=config, device_config=DeviceConfig("cpu", 0)))
    return models[0], models[1]


def _tensors(model: Any) -> dict[str, Any]:
    """Copies of the model's parameters, and of the tensors that latent attention makes of them."""
    found = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    for name, module in model.named_modules():
        derived = ((part, getattr(module, part, None)) for part in _DERIVED)
        found |= {f"{name}.{part}": tensor.clone() for part, tensor in derived if tensor is not None}
    return found


def _push(models: Mapping[str, Any], buckets: Any) -> None:
    """Load the buckets of a push as the scheduler of an engine does."""
    from sglang.srt.managers.io_struct import (
        BeginWeightUpdateReqInput,
        EndWeightUpdateReqInput,
        UpdateWeightsFromTensorReqInput,
    )
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    def worker(role: str) -> SimpleNamespace:
        updater = WeightUpdater.__new__(WeightUpdater)
        for name, value in {
            "get_model": lambda: models[role],
            "device": "cpu",
            "tp_rank": 0,
            "custom_weight_loaders": (),
        }.items():
            object.__setattr__(updater, name, value)
        runners = [(role, SimpleNamespace(weight_updater=updater))]
        return SimpleNamespace(weight_update_runners=lambda: runners, deserialize_own_rank=lambda payload: arrived[-1])

    manager = SchedulerWeightUpdaterManager(
        tp_worker=worker("target"), draft_worker=worker("draft"), tp_cpu_group=None, memory_saver_adapter=None,
        flush_cache=None, is_fully_idle=None, scheduler=SimpleNamespace(record_weight_version_change=lambda **told: None),
    )  # fmt: skip
    arrived: list[Any] = []
    assert manager.begin_weight_update(BeginWeightUpdateReqInput()).success
    for bucket in buckets:
        arrived.append(bucket)
        order = UpdateWeightsFromTensorReqInput(serialized_named_tensors=[b""], flush_cache=False)
        answer = manager.update_weights_from_tensor(order)
        assert answer.success, answer.message
    assert manager.end_weight_update(EndWeightUpdateReqInput()).success
