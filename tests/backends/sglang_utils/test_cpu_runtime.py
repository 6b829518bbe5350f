"""The CPU adapter. Tests named `still_needed` fail when the installed wheels have outgrown a line of it: remove the line.

That a server really runs with the adapter is shown by `tests/serving/test_engines.py`.
"""

import importlib.util
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.backends.sglang_utils import cpu_runtime
from slime.utils.child_process import environment_for_python
from tests.support.processes.distributed import run_distributed

torch = pytest.importorskip("torch")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the adapter is inert with CUDA")


def source_of(module: str) -> str:
    """Source of a module of the installed sglang, without importing it."""
    root = Path(next(iter(importlib.util.find_spec("sglang").submodule_search_locations)))
    return root.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text()


def run_python(code: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment_for_python(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.strip()


def test_inert_with_cuda(monkeypatch):
    monkeypatch.setattr(cpu_runtime, "gpus_on_this_machine", lambda: 1)
    before = list(sys.meta_path)
    cpu_runtime.install()
    assert sys.meta_path == before


@on_cpu
@pytest.mark.parametrize("package", cpu_runtime._INERT_PACKAGES)
def test_still_needed_inert_packages(package):
    assert importlib.util.find_spec(package) is None


@pytest.mark.parametrize(
    ("module", "assumption"),
    [
        ("sglang.srt.configs.utils", "def register_image_processor("),
        ("sglang.srt.configs.model_config", "    assert is_deepseek_dsa(config)\n    return config.index_topk\n"),
        ("sglang.srt.models.deepseek_v2", "import Indexer\n"),
        (
            "sglang.srt.server_args",
            "    LANGUAGE_MODEL_ONLY_ARCHITECTURES = (\n"
            '        "MuseGlimmerForConditionalGeneration",\n'
            '        "Cosmos3ForConditionalGeneration",\n'
            '        "Cosmos3EdgeForConditionalGeneration",\n'
            "    )\n",
        ),
        ("sglang.srt.mem_cache.pool_host.common", "ALLOC_MEMORY_FUNCS"),
        ("sglang.srt.arg_groups.choices", "DETERMINISTIC_ATTENTION_BACKEND_CHOICES = ["),
        ("sglang.srt.batch_invariant_ops.batch_invariant_ops", "def enable_batch_invariant_mode("),
        ("sglang.srt.layers.attention.attention_registry", '@register_attention_backend("torch_native")\n'),
        ("sglang.srt.distributed.parallel_state", '                "pynccl is required for reduce_scatterv"\n'),
        (
            "sglang.srt.distributed.parallel_state",
            "            all_gather_single(output, input, group=self.device_group)\n",
        ),
        ("sglang.srt.layers.moe.fused_moe_native", "    cnts.scatter_(1, topk_ids.to(torch.int64), 1)\n"),
        ("sglang.srt.layers.rotary_embedding.factory", "    assert rope_scaling is not None\n"),
        (
            "sglang.srt.models.deepseek_common.attention_backend_handler",
            'return cls._handlers.get(backend_name, cls._handlers.get("triton"))',
        ),
        (
            "sglang.srt.managers.data_parallel_controller",
            "recv_req = sock_recv(self.recv_from_tokenizer, flags=zmq.NOBLOCK)",
        ),
        (
            "sglang.srt.managers.scheduler",
            "self._record_scheduler_state_for_paused_engine()\n                continue\n",
        ),
        ("sglang.kernels.ops.attention.fla.layernorm_gated", "_use_cpu = is_cpu() and cpu_has_amx_support()\n"),
        ("sglang.kernels.ops.attention.fla.fused_norm_gate", "_use_cpu = is_cpu() and cpu_has_amx_support()\n"),
        ("sglang.srt.models.qwen2_moe", "                fused_gate_sigmoid_mul_add(\n"),
        ("sglang.srt.models.minimax_m2", "    assert x1.is_cuda and x2.is_cuda\n    B, D1 = x1.shape\n"),
        ("sglang.srt.utils.weight_checker", "torch.cuda.synchronize()"),
        (
            "sglang.srt.model_executor.model_runner_components.weight_updater",
            'flattened_tensor = flattened_tensor_bucket_dict["flattened_tensor"]',
        ),
        (
            "sglang.srt.model_executor.model_runner_components.weight_updater",
            "        for handle in handles:\n            handle.wait()\n        return weights\n",
        ),
    ],
)
def test_still_needed_patches(module, assumption):
    assert module in cpu_runtime._PATCHES
    assert assumption in source_of(module)


def test_still_needed_batched_attention():
    source = source_of("sglang.srt.layers.attention.torch_native_backend")
    assert source.count("for seq_idx in range(seq_lens.shape[0]):") == 2


def test_still_needed_indexer():
    source = source_of("sglang.srt.layers.attention.dsa.dsa_indexer")
    assert 'raise NotImplementedError("DSA indexer only supports CUDA, HIP, and NPU")' in source


def test_every_patch_is_checked():
    assert len(cpu_runtime._PATCHES) == 20


def test_still_needed_names_of_what_no_push_brings():
    """The engine adds `axis_map` to these."""
    computed = source_of("sglang.srt.utils.weight_checker").partition("_NON_PERSISTENT_BUFFER_PATTERNS = (")[2]
    assert "cos_sin_cache" in computed.partition(")")[0] and "axis_map" not in computed.partition(")")[0]


def test_still_needed_delta_net():
    backend = source_of("sglang.srt.layers.attention.linear.gdn_backend")
    assert "from sgl_kernel.mamba import causal_conv1d_fn_cpu, causal_conv1d_update_cpu\n" in backend
    kernel = source_of("sglang.srt.layers.attention.linear.kernels.gdn_triton")
    assert "from sgl_kernel.mamba import chunk_gated_delta_rule_cpu\n" in kernel
    model = source_of("sglang.srt.models.qwen3_5")
    for name, source in {"fused_gdn_gating_cpu": backend, "fused_sigmoid_gating_delta_rule_update_cpu": kernel}.items():
        assert f"torch.ops.sgl_kernel.{name}" in source
    for name in (
        "sigmoid_mul",
        "qk_gemma_rmsnorm",
        "qk_gemma_rmsnorm_with_gate",
        "qkvzba_split_reshape_cat_contiguous",
    ):
        assert f"torch.ops.sgl_kernel.fused_{name}_cpu\n" in model


def test_still_needed_start_method_and_gc_freeze():
    assert 'mp.set_start_method("spawn", force=True)' in source_of("sglang.srt.entrypoints.engine")
    assert "_freeze_gc_after_server_warmup(server_args)" in source_of("sglang.srt.entrypoints.http_server")


def test_still_needed_imports_that_serve_nothing():
    assert "from megatron.core import parallel_state as _mpu" in source_of("sglang.srt.debug_utils.dumper")
    assert 'else:\n    ModelRegistry.register("sglang.srt.models")' in source_of("sglang.srt.models.registry")


@on_cpu
@pytest.mark.slow
def test_an_engine_imports_the_model_that_it_serves_and_others_when_they_are_asked_for(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM", "NoSuchModel"]}')
    printed = run_python(
        "import sys\n"
        "from types import SimpleNamespace\n"
        "from slime.backends.sglang_utils import cpu_runtime, server_process\n"
        "cpu_runtime.install()\n"
        f"server_process._import_for_workers(SimpleNamespace(model_path={str(tmp_path)!r}))\n"
        "from sglang.srt.models.registry import ModelRegistry\n"
        "print(sorted(ModelRegistry.models), [name for name in sys.modules if name.partition('.')[0] == 'megatron'])\n"
        "print('sglang.srt.models.gemma2' in sys.modules)\n"
        "print(ModelRegistry.resolve_model_cls(['Qwen3ForCausalLM'])[1], 'sglang.srt.models.gemma2' in sys.modules)\n"
        "print(ModelRegistry.resolve_model_cls(['Gemma2ForCausalLM'])[1])\n"
        "import megatron.core"
    )
    assert printed.splitlines() == [
        "['Qwen3ForCausalLM'] []",
        "False",
        "Qwen3ForCausalLM False",
        "Gemma2ForCausalLM",
    ]


def source_in(package: str, file: str) -> str:
    (directory,) = importlib.util.find_spec(package).submodule_search_locations
    return Path(directory, file).read_text()


def test_still_needed_without_a_compiler():
    """What of a server's imports asks for torch's compiler."""
    alone = "from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex"
    assert alone in source_in("transformers", "masking_utils.py")
    assert "@torch.compiler.allow_in_graph\n" in source_in("transformers", "modeling_utils.py")
    assert "torch._dynamo.assume_constant_result(" in source_in("transformers", "integrations/moe.py")
    assert "@torch.compile(" in source_of("sglang.srt.layers.moe.moe_runner.deep_gemm")
    assert "if is_scipy_available():" in source_in("transformers", "loss/loss_for_object_detection.py")


@on_cpu
@pytest.mark.slow
def test_a_server_that_compiles_nothing_imports_the_compiler_when_it_is_asked_for():
    printed = run_python(
        "import os, sys\n"
        "os.environ['TORCHDYNAMO_DISABLE'] = '1'\n"
        "from types import SimpleNamespace\n"
        "from slime.backends.sglang_utils import cpu_runtime, server_process\n"
        "cpu_runtime.install()\n"
        "import sglang.launch_server, sglang.srt.entrypoints.engine\n"
        "server_process._import_for_workers(SimpleNamespace(model_path='/nowhere'))\n"
        "def imported():\n"
        "    names = ('torch._dynamo.utils', 'torch._inductor', 'sympy', 'scipy')\n"
        "    return [name for name in names if name in sys.modules]\n"
        "print(imported())\n"
        "import torch\n"
        "double = torch.compile(dynamic=True)(lambda x: 2 * x)\n"
        "print(torch.compile(double)(3), torch.compiler.disable(double)(4), imported())\n"
        "import torch._dynamo.config as config\n"
        "print(torch._dynamo is sys.modules['torch._dynamo'], torch._dynamo.config is config, config.__spec__.loader is "
        "config.__loader__, imported())\n"
        "from transformers import masking_utils\n"
        "from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex\n"
        "print(masking_utils.TransformGetItemToIndex is TransformGetItemToIndex)\n"
        "import triton\n"
        "from torch._inductor.runtime import triton_compat\n"
        "print(triton_compat.triton is triton, type(triton).__name__)"
    )
    everything = "['torch._dynamo.utils', 'torch._inductor', 'sympy']"
    assert printed.splitlines() == [
        "[]",
        "6 8 []",
        f"True True True {everything}",
        "True",
        "False _InertModule",
    ]


OF_THE_COMPILER = (
    "import torch, triton\n"
    "compiled = torch.compile(lambda x: 2 * x, backend='eager')(torch.ones(1))\n"
    "from torch._inductor.runtime.hints import DeviceProperties\n"
    "from torch._inductor.runtime import triton_compat\n"
    "print(compiled.item(), triton_compat.HAS_WARP_SPEC, triton_compat.triton is triton)"
)


@pytest.fixture(scope="module")
def installed() -> list[str]:
    """What a process prints that compiles and has installed the adapter: of inert modules, and then of the compiler."""
    printed = run_python(
        "import os\n"
        "os.environ['TORCHDYNAMO_DISABLE'] = '0'\n"
        "import torch\n"
        "from slime.backends.sglang_utils import cpu_runtime\n"
        "synchronize = torch.cuda.synchronize\n"
        "cpu_runtime.install()\n"
        "import triton, triton.language as tl, torchvision, sgl_kernel\n"
        "@triton.jit\n"
        "def kernel(x: tl.constexpr): return x\n"
        "print(kernel(3), torch.cuda.synchronize is synchronize)\n"
        "try:\n    sgl_kernel.silu_and_mul(1)\n"
        "except NotImplementedError as error:\n    print(error)\n"
        "try:\n    import sgl_kernel.elementwise\n"
        "except ImportError:\n    print('submodule refused')\n"
        "from transformers.utils.import_utils import is_torchvision_available\n"
        "print(is_torchvision_available())\n" + OF_THE_COMPILER
    )
    return printed.splitlines()


@on_cpu
def test_the_compiler_finds_no_triton(installed):
    assert installed[-1] == "2.0 False False"


@on_cpu
def test_the_compiler_finds_no_triton_where_it_is_imported_later():
    """As for a server that compiles nothing."""
    printed = run_python(
        "import os\n"
        "os.environ['TORCHDYNAMO_DISABLE'] = '1'\n"
        "from slime.backends.sglang_utils import cpu_runtime\n"
        "cpu_runtime.install()\n" + OF_THE_COMPILER
    )
    assert printed == "2.0 False False"


def murmur3_32(data: bytes) -> int:
    """MurmurHash3 x86_32 with seed 0 for lengths divisible by 4, from its published description."""
    mask, state = 0xFFFFFFFF, 0
    for start in range(0, len(data), 4):
        word = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 & mask
        word = (word << 15 | word >> 17) & mask
        state ^= word * 0x1B873593 & mask
        state = (state << 13 | state >> 19) & mask
        state = (state * 5 + 0xE6546B64) & mask
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & mask
    state = (state ^ state >> 13) * 0xC2B2AE35 & mask
    return state ^ state >> 16


def hashes(seeds, positions, columns):
    cpu_runtime._define_seeded_sampling_hash()
    hash_of = torch.ops.sgl_kernel.murmur_hash32_cpu
    return hash_of(*map(torch.tensor, (seeds, positions, columns))).to(torch.int64).tolist()


def test_seeded_sampling_hash_equals_murmur3():
    assert murmur3_32(bytes.fromhex("00000000")) == 0x2362F9DE  # published vector
    seeds, positions, columns = [1, 2**33 + 5, 2**63 - 1], [0, 7, 123456], [0, 1, 319]
    (found,) = run_distributed(hashes, 1, (seeds, positions, columns))
    expected = [
        [
            murmur3_32(seed.to_bytes(8, "little") + position.to_bytes(4, "little") + column.to_bytes(4, "little"))
            for column in columns
        ]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert found == expected


@on_cpu
def test_install_serves_inert_modules_and_keeps_torch_unchanged(installed):
    assert installed[:-1] == [
        "3 True",
        "sgl_kernel.silu_and_mul is not available without a GPU",
        "submodule refused",
        "False",
    ]


def test_the_last_two_buckets_of_weights_stay_mapped_and_no_larger_one(monkeypatch):
    class WeightUpdater:
        def _update_weights_from_flattened_bucket(self, flattened_tensor_bucket_dict):
            return True, f"{len(flattened_tensor_bucket_dict['flattened_tensor'])} bytes"

    monkeypatch.setattr(cpu_runtime, "HOST_BUCKET_BYTES", 8)
    cpu_runtime._keep_buckets_mapped(SimpleNamespace(WeightUpdater=WeightUpdater))
    buckets = [torch.zeros(size, dtype=torch.uint8) for size in (7, 8, 9, 6)]
    seen = [weakref.ref(bucket) for bucket in buckets]
    for bucket in buckets:
        answer = WeightUpdater()._update_weights_from_flattened_bucket({"flattened_tensor": bucket})
        assert answer == (True, f"{len(bucket)} bytes")
    del buckets, bucket
    assert [of_one() is not None for of_one in seen] == [False, True, False, True]


def test_a_model_is_looked_through_once():
    asked = []
    module = SimpleNamespace(
        _unsupported_derived_weight_cache_error=lambda model: asked.append(model) or f"no: {model}"
    )
    cpu_runtime._look_through_a_model_once(module)
    answers = [module._unsupported_derived_weight_cache_error(model) for model in ("policy", "draft", "policy")]
    assert answers == ["no: policy", "no: draft", "no: policy"] and asked == ["policy", "draft"]


def test_a_tensor_is_loaded_when_it_has_arrived_and_others_have_not(monkeypatch):
    class WeightUpdater:
        device, _model_update_group = "cpu", {"of the source": "group"}

        def receive_weights_from_distributed(self, **of_bucket):
            return of_bucket

    events = []

    def broadcast(tensor, src, group, async_op):
        assert (src, group, async_op) == (0, "group", True)
        tensor.fill_(len(events))
        events.append("begun")
        return SimpleNamespace(wait=lambda: events.append("arrived"))

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    cpu_runtime._load_while_receiving(SimpleNamespace(WeightUpdater=WeightUpdater))
    bucket = {
        "names": ["a", "b"],
        "dtypes": ["bfloat16", "int8"],
        "shapes": [[2], [1, 3]],
        "group_name": "of the source",
    }
    weights = WeightUpdater().receive_weights_from_distributed(**bucket)
    of_two_models = [[], []]
    for loaded in of_two_models:
        for name, tensor in weights:
            events.append(name)
            loaded.append((name, tensor.dtype, tensor.tolist()))
    assert events[:6] == ["begun", "begun", "arrived", "a", "arrived", "b"]
    assert of_two_models == [[("a", torch.bfloat16, [0.0, 0.0]), ("b", torch.int8, [[1, 1, 1]])]] * 2
    for others in ({"load_format": "flattened_bucket"}, {"load_format": None, "group_name": "nobody's"}):
        assert WeightUpdater().receive_weights_from_distributed(**{**bucket, **others}) == {**bucket, **others}


@pytest.mark.parametrize(("threads", "while_loading"), [(4, 3), (1, 1)])
def test_weights_are_loaded_with_one_thread_less_and_the_next_step_has_them_all(monkeypatch, threads, while_loading):
    class WeightUpdater:
        def update_weights_from_tensor(self, named_tensors, load_format):
            return named_tensors, load_format, counts[-1]

        def load_weights_from_distributed(self, named_tensors):
            raise ValueError(named_tensors)

    counts = [threads]
    monkeypatch.setattr(torch, "get_num_threads", lambda: counts[-1])
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    cpu_runtime._leave_a_core_to_the_sender(SimpleNamespace(WeightUpdater=WeightUpdater))
    assert WeightUpdater().update_weights_from_tensor([1], load_format="flat") == ([1], "flat", while_loading)
    with pytest.raises(ValueError, match="broken"):
        WeightUpdater().load_weights_from_distributed("broken")
    assert counts == [threads, *[while_loading, threads] * 2]


def test_install_after_sglang_is_refused(monkeypatch):
    monkeypatch.setattr(cpu_runtime, "gpus_on_this_machine", lambda: 0)
    monkeypatch.setitem(sys.modules, "sglang", object())
    with pytest.raises(RuntimeError, match="before sglang is imported"):
        cpu_runtime.install()


def test_the_adapter_asks_what_the_engine_asks(monkeypatch):
    monkeypatch.setenv("SLIME_ACCELERATOR", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "sglang", object())
    with pytest.raises(RuntimeError, match="before sglang is imported"):
        cpu_runtime.install()
