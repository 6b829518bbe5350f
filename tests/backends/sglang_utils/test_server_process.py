"""What a server process changes in SGLang for data-parallel attention: where a test fails, the change is no longer needed.

What follows from it is shown by `tests/serving/test_groups_of_attention.py`.
"""

import pytest

from tests.backends.sglang_utils.test_cpu_runtime import source_of


@pytest.mark.parametrize(
    ("module", "assumption"),
    [
        (
            "sglang.srt.managers.tokenizer_control_mixin",
            "await self.flush_cache_communicator(FlushCacheReqInput(timeout_s=timeout_s))\n        )[0]\n",
        ),
        ("sglang.srt.managers.scheduler", "        set_random_seed(self.random_seed)\n"),
        ("sglang.srt.managers.scheduler", "            self.idle_sleeper = IdleSleeper(\n"),
        ("sglang.srt.managers.scheduler_components.idle_sleeper", "        self.poller.poll(1000)\n"),
        ("sglang.srt.server_args", '                    wait_port_available(port_base, "port_base")\n'),
        ("sglang.srt.entrypoints.http_server", "    run_scheduler_process_func: Callable = run_scheduler_process,\n"),
    ],
)
def test_sglang_still_does_what_is_changed(module, assumption):
    assert assumption in source_of(module)


def test_torch_native_still_cannot_fill_up_a_batch():
    for module in ("torch_native_backend", "base_attn_backend"):
        assert "get_cpu_graph_seq_len_fill_value" not in source_of(f"sglang.srt.layers.attention.{module}")
