"""Lets the unmodified SGLang wheel serve on a machine without a GPU. It does nothing if there is CUDA.

`install()` runs once per server process, before sglang is imported; schedulers and detokenizers are forked from that
process and inherit it. Written for sglang 0.5.21 (torch 2.13.0, transformers 5.12.1). Every function below states the
assumption of those versions that it lifts.
"""

from __future__ import annotations

import collections
import functools
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from slime.utils.device import gpus_on_this_machine
from slime.weights.transports.shared_handles import HOST_BUCKET_BYTES

_INERT_PACKAGES = ("torchvision", "sgl_kernel", "triton")
# Models of text and images whose text sglang 0.5.21 can serve alone. Without a GPU it must: image processors need torchvision.
SEEING_MODELS = (
    "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)  # fmt: skip


def install() -> None:
    """Lift the CUDA assumptions of sglang 0.5.21. Must run before the first import of sglang.

    No effect if there are GPUs to use, by the same answer that decides about the server's arguments.
    """
    if gpus_on_this_machine() > 0:
        return
    if any(name == "sglang" or name.startswith("sglang.") for name in sys.modules):
        raise RuntimeError("the CPU adapter must be installed before sglang is imported")
    _define_seeded_sampling_hash()
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        _leave_compiler_out()
    _settle_feature_detection()
    missing = tuple(name for name in _INERT_PACKAGES if importlib.util.find_spec(name) is None)
    sys.meta_path.append(_InertPackageFinder(missing))
    sys.meta_path.insert(0, _PatchAfterImport(_PATCHES))


# ---------------------------------------------------------------------------------------------------------------------
# Packages that sglang imports at module level and never calls on the paths that a CPU server takes.
#
# torchvision (sglang 0.5.21, image processors): the index wheel needs libtorch_cuda and, if installed beside a CPU
#   torch, breaks transformers.
# sgl_kernel (sglang 0.5.21, `import sgl_kernel` in many layers): has no CPU wheel. Its submodules go on raising
#   ImportError, on which sglang falls back to torch. What it cannot do without is in cpu_delta_net.py and at the end here.
# triton (sglang 0.5.21, `@triton.jit` kernels): not installed with a CPU torch.


class _InertModule(types.ModuleType):
    """A module that has every attribute: classes for type-like names, no-op decorators, functions that refuse."""

    def __getattr__(self, name: str):
        if name == "__version__":
            return "3.0.0"
        if name.startswith("__"):
            raise AttributeError(name)
        value = _inert_attribute(self.__name__, name)
        setattr(self, name, value)
        return value


def _inert_attribute(module_name: str, name: str):
    if name[:1].isupper() or module_name.startswith("triton.language"):
        return type(name, (), {"__module__": module_name, "__init__": lambda self, *args, **kwargs: None})
    if module_name == "triton" and name in ("jit", "autotune", "heuristics"):
        return _leave_function_alone

    def refuse(*args, **kwargs):
        raise NotImplementedError(f"{module_name}.{name} is not available without a GPU")

    refuse.__name__ = name
    return refuse


def _leave_function_alone(*args, **kwargs):
    """Stands in for `@triton.jit` and for `@triton.autotune(...)`."""
    if len(args) == 1 and callable(args[0]) and not kwargs:
        return args[0]
    return lambda function: function


class _InertPackageFinder:
    """Last resort of the import system: serves inert modules for the packages that are not installed."""

    def __init__(self, packages: Sequence[str]):
        self._packages = packages

    def find_spec(self, fullname: str, path=None, target=None):
        root, _, submodule = fullname.partition(".")
        if root not in self._packages or (root == "sgl_kernel" and submodule):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=root != "sgl_kernel")

    def create_module(self, spec):
        return _InertModule(spec.name)

    def exec_module(self, module) -> None:
        """Nothing to run."""


def _settle_feature_detection() -> None:
    """torch 2.13.0 and transformers 5.12.1 look for triton and torchvision by import. Let them find out, and cache, that both
    are absent, before the inert modules become visible. Nor do they look for scipy, which transformers needs only for losses of
    models that find objects in images."""
    import torch.utils._triton
    import transformers.utils
    from transformers.utils import import_utils

    torch.utils._triton.has_triton_package()
    if not _compiler_is_left_out():
        _let_compiler_miss_triton()
    import_utils.is_torchvision_available()
    transformers.utils.is_scipy_available = import_utils.is_scipy_available = lambda: False


# ---------------------------------------------------------------------------------------------------------------------
# The compiler of torch 2.13.0, a quarter of the imports of a server that compiles nothing (`TORCHDYNAMO_DISABLE=1`, the
# default without a GPU). sglang 0.5.21 and transformers 5.12.1 import it to mark functions for it, and for one class of a
# module that needs nothing of it. Whoever asks for more of it imports it.


_COMPILER = "torch._dynamo"
_ALONE = f"{_COMPILER}._trace_wrapped_higher_order_op"


class _IdleCompiler(types.ModuleType):
    """Stands in for `torch._dynamo`: leaves functions as they are, and imports the real package for everything else."""

    allow_in_graph = assume_constant_result = staticmethod(lambda function: function)

    @staticmethod
    def disable(fn: Any = None, *args: Any, **options: Any) -> Any:
        return _leave_function_alone if fn is None else fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_import_compiler(), name)


def _leave_compiler_out() -> None:
    import torch

    if _COMPILER in sys.modules:
        return
    compiler = _IdleCompiler(_COMPILER)
    compiler.__path__ = [os.path.join(path, "_dynamo") for path in torch.__path__]
    sys.modules[_COMPILER] = torch._dynamo = compiler
    sys.meta_path.insert(0, _CompilerFinder())
    torch.compile = lambda model=None, **options: _leave_function_alone if model is None else model


def _compiler_is_left_out() -> bool:
    return isinstance(sys.modules.get(_COMPILER), _IdleCompiler)


def _import_compiler() -> types.ModuleType:
    if _compiler_is_left_out():
        del sys.modules[_COMPILER]
        _let_compiler_miss_triton()
    return importlib.import_module(_COMPILER)


def _let_compiler_miss_triton() -> None:
    """Import the part of the compiler that looks for triton by import, while not even the inert triton is there."""
    inert = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "triton"}
    sys.modules["triton"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("torch._inductor.runtime.triton_compat")
    finally:
        del sys.modules["triton"]
        sys.modules.update(inert)


class _CompilerFinder:
    """Imports the whole package before any of its modules, except for the one that does not need it. After that most modules
    are imported already."""

    def find_spec(self, fullname: str, path=None, target=None):
        if not fullname.startswith(f"{_COMPILER}.") or fullname == _ALONE:
            return None
        if not _compiler_is_left_out():
            return None
        _import_compiler()
        found = sys.modules.get(fullname)
        return None if found is None else importlib.machinery.ModuleSpec(fullname, _Imported(found))


class _Imported:
    """Loads a module that has been imported in the meantime."""

    def __init__(self, module: types.ModuleType):
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec):
        return self._module

    def exec_module(self, module) -> None:
        module.__spec__ = self._spec


# ---------------------------------------------------------------------------------------------------------------------
# Names inside sglang that are replaced right after their module was imported.


def _no_image_processors(module: types.ModuleType) -> None:
    """sglang 0.5.21 registers image processors at import; transformers 5.12.1 refuses that without torchvision."""
    module.register_image_processor = lambda *args, **kwargs: None


def _serve_text_of_seeing_models(module: types.ModuleType) -> None:
    """sglang 0.5.21, `--language-model-only`: the list of models that it takes lacks some whose layers can do without the part
    that sees."""
    module.ServerArgs.LANGUAGE_MODEL_ONLY_ARCHITECTURES += SEEING_MODELS


def _plain_host_memory(module: types.ModuleType) -> None:
    """sglang 0.5.21, `--enable-return-routed-experts`: host buffers are registered with CUDA; plain memory will do."""
    import torch

    def allocate(dims, dtype, device, *args, **kwargs):
        return torch.empty(dims, dtype=dtype, device=device)

    module.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def _allow_seeded_sampling(module: types.ModuleType) -> None:
    """sglang 0.5.21, `--enable-deterministic-inference`: the allowed attention backends are CUDA ones only."""
    module.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")


def _no_batch_invariant_kernels(module: types.ModuleType) -> None:
    """sglang 0.5.21, `--enable-deterministic-inference`: swaps matmuls for Triton kernels."""
    module.enable_batch_invariant_mode = lambda *args, **kwargs: None


def _weight_checker_without_cuda(module: types.ModuleType) -> None:
    """sglang 0.5.21, `/weights_checker` action `checksum`: calls `torch.cuda.synchronize()` around the hashing. The module gets
    a view of torch whose `cuda.synchronize` does nothing; torch itself stays as it is."""
    import torch

    cuda = types.SimpleNamespace(synchronize=lambda *args, **kwargs: None)
    module.torch = _ModuleView(torch, cuda=cuda)


def _keep_buckets_mapped(module: types.ModuleType) -> None:
    """sglang 0.5.21, `/update_weights_from_tensor`: frees the memory of a bucket as soon as it is loaded. On the host that
    unmaps it, and mapping it again for the next bucket costs more than half of a copy.

    A trainer has two such buffers, which it fills in turn and keeps from push to push, so the last two stay mapped here.
    """
    updater = module.WeightUpdater
    load_bucket = updater._update_weights_from_flattened_bucket
    last_buckets: collections.deque = collections.deque(maxlen=2)

    def load_bucket_and_keep_it(self, flattened_tensor_bucket_dict):
        loaded = load_bucket(self, flattened_tensor_bucket_dict)
        bucket = flattened_tensor_bucket_dict["flattened_tensor"]
        # The trainer does not keep larger buffers.
        if bucket.untyped_storage().nbytes() <= HOST_BUCKET_BYTES:
            last_buckets.append(bucket)
        return loaded

    updater._update_weights_from_flattened_bucket = load_bucket_and_keep_it


def _rotate_without_scaling(module: types.ModuleType) -> None:
    """sglang 0.5.21, latent attention on CPU: asserts that its rotary embedding is scaled (YaRN)."""
    wrapper = module.get_rope_wrapper

    def get_rope_wrapper(*args, rope_scaling=None, device=None, **options):
        if rope_scaling is None:
            return module.get_rope(*args, rope_scaling=rope_scaling, **options)
        return wrapper(*args, rope_scaling=rope_scaling, device=device, **options)

    module.get_rope_wrapper = get_rope_wrapper


def _attend_to_latent_vectors(module: types.ModuleType) -> None:
    """sglang 0.5.21, latent attention: for a prompt without cached prefix it computes keys and values of all heads, and
    torch_native then looks for these in the cache. But the cache has latent vectors, to which torch_native can attend
    directly."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    module.AttentionBackendRegistry.register("torch_native", lambda attention, forward_batch: AttnForwardMethod.MLA)


def _hide_sparse_attention(module: types.ModuleType) -> None:
    """sglang 0.5.21, keys that an indexer chooses: cache and attention backend of such a model are for GPUs. So whoever asks
    hears that it is one with latent attention alone. Functions that tell sizes of an indexer refuse such a model; they stay as
    they are."""
    asks_config = module.is_deepseek_dsa

    def is_deepseek_dsa(config: Any) -> bool:
        return False

    is_deepseek_dsa.asks_config = asks_config
    for name in ("dsa_layer_skips_topk", "get_dsa_index_head_dim", "get_dsa_index_n_heads", "get_dsa_index_topk"):
        names = {**vars(module), "is_deepseek_dsa": asks_config}
        setattr(module, name, types.FunctionType(getattr(module, name).__code__, names, name))
    module.is_deepseek_dsa = is_deepseek_dsa


def _choose_keys_on_the_host(module: types.ModuleType) -> None:
    """sglang 0.5.21, layers of DeepSeek and GLM-5: their indexer calls kernels for GPUs."""
    from slime.backends.sglang_utils.cpu_attention import Indexer

    module.is_deepseek_dsa = module.is_deepseek_dsa.asks_config
    module.Indexer = Indexer


def _attend_in_batches(module: types.ModuleType) -> None:
    """sglang 0.5.21, torch_native: walks through the requests of a batch in Python."""

    @module.register_attention_backend("torch_native")
    def create_batched_attention(runner):
        from slime.backends.sglang_utils.cpu_attention import BatchedAttention

        return BatchedAttention(runner)


def _norms_over_all_heads(module: types.ModuleType) -> None:
    """sglang 0.5.21, MiniMax-M2: its norms of queries and keys are kernels for CUDA, or for a CPU with AMX and sgl_kernel."""
    import torch

    def squares(query, key):
        return torch.stack([rows.float().square().sum(-1) for rows in (query, key)])

    def normed(query, key, query_weight, key_weight, sums, tp_world=1, eps=1e-5):
        rows_and_weights = zip((query, key), (query_weight, key_weight), sums, strict=True)
        return tuple(
            (rows.float() * torch.rsqrt(total / (rows.shape[-1] * tp_world) + eps)[:, None] * weight).to(rows.dtype)
            for rows, weight, total in rows_and_weights
        )

    module.rms_sumsq_serial, module.rms_apply_serial = squares, normed


def _gate_shared_experts(module: types.ModuleType) -> None:
    """sglang 0.5.21, experts as of Qwen2: the gate of those that all tokens share is a Triton kernel."""

    def add_gated(hidden_states, gate_weight, shared_output, final_hidden_states) -> None:
        gate = (hidden_states @ gate_weight).sigmoid()
        final_hidden_states += gate[:, None] * shared_output

    module.fused_gate_sigmoid_mul_add = add_gated


def _norm_of_gated_heads(module: types.ModuleType) -> None:
    """sglang 0.5.21, gated delta net: its norm is a Triton kernel, or one of sgl_kernel for a CPU with AMX."""
    from slime.backends.sglang_utils.cpu_delta_net import norm_and_gate

    for name in ("RMSNorm", "FusedRMSNormGated"):
        if hasattr(module, name):
            getattr(module, name).forward = norm_and_gate


def _load_while_receiving(module: types.ModuleType) -> None:
    """sglang 0.5.21, `/update_weights_from_distributed`: waits for all tensors of a bucket, and loads none before. On the host
    receiving and loading are copies, which two threads can make at the same time."""
    import torch

    updater = module.WeightUpdater
    receive = updater.receive_weights_from_distributed

    def start_to_receive(self, *, names, dtypes, shapes, group_name, load_format=None):
        if load_format is not None or group_name not in self._model_update_group:
            return receive(
                self, names=names, dtypes=dtypes, shapes=shapes, group_name=group_name, load_format=load_format
            )
        group, weights, arrivals = self._model_update_group[group_name], [], []
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            arrivals.append(torch.distributed.broadcast(weight, src=0, group=group, async_op=True))
            weights.append((name, weight))
        return _Arriving(weights, arrivals)

    updater.receive_weights_from_distributed = start_to_receive


class _Arriving:
    """Named tensors that can be iterated over repeatedly; each is yielded when it has arrived."""

    def __init__(self, weights: Sequence[tuple[str, Any]], arrivals: Sequence[Any]):
        self._weights, self._arrivals = weights, arrivals

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for weight, arrival in zip(self._weights, self._arrivals, strict=True):
            arrival.wait()
            yield weight


def _look_through_a_model_once(module: types.ModuleType) -> None:
    """sglang 0.5.21: at every bucket of weights, searches all modules of a model for caches that an update would not reach.
    They exist from the start of a server or never, and the search takes a third as long as the copy of a bucket."""
    name = "_unsupported_derived_weight_cache_error"
    setattr(module, name, functools.lru_cache(maxsize=8)(getattr(module, name)))


def _leave_experts_to_their_ranks(module: types.ModuleType) -> None:
    """sglang 0.5.21, expert parallelism on CPU: assumes that this rank hosts all experts of a token, although those of other
    ranks have the number −1. Here a token goes only to the experts that this rank hosts; other ranks add the output of
    theirs."""
    import torch

    forward = module.moe_forward_native

    def forward_own_experts(layer, x, topk_output, moe_runner_config):
        is_own = topk_output.topk_ids >= 0
        if is_own.all():
            return forward(layer, x, topk_output, moe_runner_config)
        tokens, places = is_own.nonzero(as_tuple=True)
        answers = torch.zeros_like(x)
        if len(tokens) > 0:
            chosen = {"topk_weights": topk_output.topk_weights, "topk_ids": topk_output.topk_ids}
            one_each = topk_output._replace(**{name: of[tokens, places, None] for name, of in chosen.items()})
            answers.index_add_(0, tokens, forward(layer, x[tokens], one_each, moe_runner_config))
        return answers

    module.moe_forward_native = forward_own_experts


def _collect_without_nccl(module: types.ModuleType) -> None:
    """sglang 0.5.21, data-parallel attention. If each rank has experts of its own, it scatters a sum, in parts of different
    lengths, by NCCL; only in deterministic inference does it use an all-reduce. Ranks of a group that share the output head
    gather their logits into a tensor with one dimension more: Gloo refuses that, whereas NCCL only looks at the bytes."""
    coordinator = module.GroupCoordinator
    gather = coordinator._all_gather_into_tensor

    def reduce_scatterv(self, input_, output=None, sizes=None):
        return self._deterministic_reduce_scatterv(input_, output, sizes)

    def gather_bytes(self, output, input):
        gather(self, output.view(-1), input.reshape(-1))

    coordinator.reduce_scatterv, coordinator._all_gather_into_tensor = reduce_scatterv, gather_bytes


def _let_the_controller_wait(module: types.ModuleType) -> None:
    """sglang 0.5.21, data-parallel attention: its controller polls for requests without a pause, and so occupies a core."""
    receive = module.sock_recv

    def wait_and_receive(socket, flags=0):
        if flags:
            # At most a second, because its watchdog expects a sign of life between two polls.
            socket.poll(1000)
        return receive(socket, flags=flags)

    module.sock_recv = wait_and_receive


def _sleep_while_paused(module: types.ModuleType) -> None:
    """sglang 0.5.21, `/pause_generation` with `retract`: the scheduler then polls for requests without a pause, and so
    occupies a core, which a push needs."""
    scheduler = module.Scheduler
    record = scheduler._record_scheduler_state_for_paused_engine

    def record_and_sleep(self):
        record(self)
        self.maybe_sleep_on_idle()

    scheduler._record_scheduler_state_for_paused_engine = record_and_sleep


def _leave_a_core_to_the_sender(module: types.ModuleType) -> None:
    """sglang 0.5.21: copies a bucket into the weights with all threads. Meanwhile the trainer makes the next bucket, and the
    threads would wait for the one whose core it has taken."""
    import torch

    def with_one_thread_less(load):
        def load_with_one_thread_less(*args, **options):
            threads = torch.get_num_threads()
            torch.set_num_threads(max(1, threads - 1))
            try:
                return load(*args, **options)
            finally:
                torch.set_num_threads(threads)

        return load_with_one_thread_less

    for name in ("update_weights_from_tensor", "load_weights_from_distributed"):
        setattr(module.WeightUpdater, name, with_one_thread_less(getattr(module.WeightUpdater, name)))


def _copy_weights_less(module: types.ModuleType) -> None:
    _keep_buckets_mapped(module)
    _load_while_receiving(module)
    _leave_a_core_to_the_sender(module)
    _look_through_a_model_once(module)


class _ModuleView:
    """A module with some names replaced, for one importer only."""

    def __init__(self, module: types.ModuleType, **replaced):
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str):
        return getattr(self._module, name)


_PATCHES: dict[str, Callable[[types.ModuleType], None]] = {
    "sglang.srt.configs.model_config": _hide_sparse_attention,
    "sglang.srt.configs.utils": _no_image_processors,
    "sglang.srt.server_args": _serve_text_of_seeing_models,
    "sglang.kernels.ops.attention.fla.layernorm_gated": _norm_of_gated_heads,
    "sglang.kernels.ops.attention.fla.fused_norm_gate": _norm_of_gated_heads,
    "sglang.srt.mem_cache.pool_host.common": _plain_host_memory,
    "sglang.srt.arg_groups.choices": _allow_seeded_sampling,
    "sglang.srt.batch_invariant_ops.batch_invariant_ops": _no_batch_invariant_kernels,
    "sglang.srt.distributed.parallel_state": _collect_without_nccl,
    "sglang.srt.layers.attention.attention_registry": _attend_in_batches,
    "sglang.srt.layers.moe.fused_moe_native": _leave_experts_to_their_ranks,
    "sglang.srt.layers.rotary_embedding.factory": _rotate_without_scaling,
    "sglang.srt.models.deepseek_common.attention_backend_handler": _attend_to_latent_vectors,
    "sglang.srt.managers.data_parallel_controller": _let_the_controller_wait,
    "sglang.srt.managers.scheduler": _sleep_while_paused,
    "sglang.srt.models.deepseek_v2": _choose_keys_on_the_host,
    "sglang.srt.models.qwen2_moe": _gate_shared_experts,
    "sglang.srt.models.minimax_m2": _norms_over_all_heads,
    "sglang.srt.utils.weight_checker": _weight_checker_without_cuda,
    "sglang.srt.model_executor.model_runner_components.weight_updater": _copy_weights_less,
}


class _PatchAfterImport:
    """Import hook that runs a patch directly after the module it belongs to was executed."""

    def __init__(self, patches: dict[str, Callable[[types.ModuleType], None]]):
        self._patches = patches

    def find_spec(self, fullname: str, path=None, target=None):
        patch = self._patches.get(fullname)
        if patch is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        execute = spec.loader.exec_module

        def execute_and_patch(module: types.ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = execute_and_patch
        return spec


# ---------------------------------------------------------------------------------------------------------------------


def _define_seeded_sampling_hash() -> None:
    """sglang 0.5.21, per-request `sampling_seed`: `torch.ops.sgl_kernel.murmur_hash32_cpu` lives in sgl_kernel.

    MurmurHash3 x86_32 (Appleby, public domain) of the three 32-bit words (seed low, seed high, position) and the column
    as the fourth, 16 bytes in all; same bits as the kernel.
    """
    import torch

    mask = 0xFFFFFFFF

    def rotate_left(x, bits):
        return ((x << bits) | (x >> (32 - bits))) & mask

    def multiply(x, factor):
        # Low 32 bits of a 32 x 32 bit product without leaving the range of int64.
        return ((x & 0xFFFF) * factor + ((((x >> 16) * factor) & 0xFFFF) << 16)) & mask

    def mix(state, word):
        word = multiply(rotate_left(multiply(word, 0xCC9E2D51), 15), 0x1B873593)
        return (multiply(rotate_left(state ^ word, 13), 5) + 0xE6546B64) & mask

    def murmur_hash(seed, positions, columns):
        seed = seed.view(torch.int64)
        state = mix(torch.zeros_like(seed), seed & mask)
        state = mix(state, (seed >> 32) & mask)
        state = mix(state, positions.to(torch.int64) & mask)
        state = mix(state[:, None], columns.to(torch.int64)[None, :] & mask) ^ 16
        state = multiply(state ^ (state >> 16), 0x85EBCA6B)
        state = multiply(state ^ (state >> 13), 0xC2B2AE35)
        return (state ^ (state >> 16)).to(torch.uint32)

    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor cols) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash, "CPU")
    _LIBRARIES.append(library)


# Kept here because an operator exists only as long as the library object that defined it.
_LIBRARIES: list = []
