"""In which dtype a model is exported, on every machine."""

import pytest

from slime.arguments import sizes
from slime.utils.errors import UserError
from tests.support.models.args import write_config
from tools.convert_to_hf import arguments_of_model, main


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize(
    ("entries", "typed", "expected"),
    [
        ({"dtype": "bfloat16"}, [], "bfloat16"),
        ({"torch_dtype": "float16"}, ["--seed", "7"], "float16"),
        ({"text_config": {"dtype": "bfloat16"}}, [], "bfloat16"),
        ({"dtype": "bfloat16"}, ["--fp16"], "float16"),
        ({"dtype": "float32"}, [], "float32"),
        ({"dtype": "float32"}, ["--bf16"], "bfloat16"),
        ({}, [], "float32"),
    ],
)
def test_an_export_has_the_dtype_of_the_config_unless_one_is_typed(
    tmp_path, monkeypatch, gpus, entries, typed, expected
):
    monkeypatch.setattr(sizes, "gpus_on_this_machine", lambda: gpus)
    args = arguments_of_model(write_config(tmp_path / "model", **entries), typed)
    assert (args.params_dtype_name, args.bf16, args.fp16) == (expected, expected == "bfloat16", expected == "float16")
    assert args.accumulate_allreduce_grads_in_fp32 is args.bf16 and args.on_gpus is bool(gpus)


@pytest.mark.parametrize("flag", ["--hf-checkpoint", "--load"])
def test_what_is_read_is_not_written_over(tmp_path, flag):
    model, load = write_config(tmp_path / "a/model"), tmp_path / "b/checkpoints"
    load.mkdir(parents=True)
    (load / "latest_checkpointed_iteration.txt").write_text("3")
    words = ["--hf-checkpoint", str(model), "--load", str(load), "--force", "--output-dir"]
    with pytest.raises(UserError, match=f"--output-dir .* would overwrite {flag} "):
        main([*words, str(tmp_path / ("a" if flag == "--hf-checkpoint" else "b"))])
