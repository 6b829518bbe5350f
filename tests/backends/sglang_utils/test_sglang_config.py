"""The file of `--sglang-config`, read by a function of a user's own."""

import pytest

from slime.backends.sglang_utils.sglang_config import ModelConfig, ServerGroupConfig, SglangConfig
from slime.utils.errors import UserError

FILE = """sglang:
  - name: actor
    server_groups:
      - {worker_type: prefill, num_gpus: 2}
      - {worker_type: decode, num_gpus: 4, overrides: {mem-fraction-static: 0.8}}
  - name: judge
    model_path: /judge
    num_gpus_per_engine: 1
    server_groups: [{num_gpus: 1}]
"""


def test_a_file_is_read_as_a_run_reads_it(tmp_path):
    path = tmp_path / "serving.yaml"
    path.write_text(FILE)
    config = SglangConfig.from_yaml(path, hf_checkpoint="/actor", num_gpus_per_engine=2)
    groups = (
        ServerGroupConfig("prefill", 2, 2, {}),
        ServerGroupConfig("decode", 4, 2, {"mem_fraction_static": 0.8}),
    )
    assert config.models == (
        ModelConfig("actor", "/actor", True, groups),
        ModelConfig("judge", "/judge", False, (ServerGroupConfig("regular", 1, 1, {}),)),
    )


ALL_KEYS = """sglang:
  - name: actor                 # unique
    model_path: /models/actor
    update_weights: true
    num_gpus_per_engine: 2
    server_groups:
      - worker_type: prefill    # regular | prefill | decode | placeholder | encoder
        num_gpus: 4
        num_gpus_per_engine: 2
        overrides: {mem_fraction_static: 0.8}
"""


def test_a_part_of_what_a_run_needs_is_read_too(tmp_path):
    path = tmp_path / "serving.yaml"
    path.write_text(ALL_KEYS)
    groups = (ServerGroupConfig("prefill", 4, 2, {"mem_fraction_static": 0.8}),)
    assert SglangConfig.from_yaml(path).models == (ModelConfig("actor", "/models/actor", True, groups),)


def test_what_is_wrong_in_a_file_is_an_error_with_all_places(tmp_path):
    path = tmp_path / "serving.yaml"
    path.write_text(FILE.replace("prefill", "prefil").replace("num_gpus: 1}", "num_gpu: 1}"))
    with pytest.raises(UserError) as error:
        SglangConfig.from_yaml(path, hf_checkpoint="/actor", num_gpus_per_engine=2)
    lines = str(error.value).splitlines()
    assert any(line.startswith(f"{path}:4: worker_type 'prefil'") for line in lines)
    assert any("unknown key num_gpu: did you mean num_gpus?" in line for line in lines)
