"""The table of models on its page."""

import json
import re

import pytest

from slime.models.families import TRAINED_MODEL_TYPES
from slime.weights.hf_reader import SafetensorsDirectory
from tools import write_model_table
from tools.published_models import PUBLISHED_MODELS
from tools.write_model_table import (
    BEGIN,
    BEGIN_TYPES,
    END,
    END_TYPES,
    NOT_YET,
    PAGE,
    README,
    RECORDS,
    layout_of,
    recorded,
    same_model,
    tensors_of,
    with_model_types,
    with_table,
    write_stand_in,
)

SMALL = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32, "q_lora_rank": 6,
    "kv_lora_rank": 4, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 5, "first_k_dense_replace": 1,
    "n_routed_experts": 3, "n_shared_experts": 1, "moe_intermediate_size": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def test_the_table_is_up_to_date():
    assert PAGE.read_text() == with_table(PAGE.read_text(), recorded())


def named_types(readme):
    return re.findall(r"`(\w+)`", readme.split(BEGIN_TYPES)[1].split(END_TYPES)[0])


def test_the_readme_names_the_types_of_the_table_that_train():
    readme = README.read_text()
    assert readme == with_model_types(readme, PAGE.read_text())
    of_scripts = {config["model_type"] for config in PUBLISHED_MODELS.values()}
    assert named_types(readme) == sorted(of_scripts & {*TRAINED_MODEL_TYPES})


def test_a_type_without_a_layout_that_trains_is_not_named():
    row = "| `mimo` | yes, of `qwen2` | none | yes | "
    before, after = PAGE.read_text().split(row)
    readme = with_model_types(README.read_text(), f"{before}{row}{NOT_YET} | {after.split(' | ', 1)[1]}")
    assert named_types(readme) == [name for name in named_types(README.read_text()) if name != "mimo"]


def test_a_page_that_is_not_up_to_date_fails_the_check_and_is_written(tmp_path, monkeypatch):
    for name, page in (("PAGE", PAGE), ("README", README)):
        monkeypatch.setattr(write_model_table, name, tmp_path / page.name)
        (tmp_path / page.name).write_text(page.read_text())
    monkeypatch.setattr("sys.argv", ["write_model_table.py", "--check"])
    assert write_model_table.main() == 0
    for page in (PAGE, README):
        copy = tmp_path / page.name
        copy.write_text(page.read_text().replace("`mimo`", "`nimo`"))
        monkeypatch.setattr("sys.argv", ["write_model_table.py", "--check"])
        assert write_model_table.main() == 1 and "`nimo`" in copy.read_text()
        monkeypatch.setattr("sys.argv", ["write_model_table.py"])
        assert write_model_table.main() == 0 and copy.read_text() == page.read_text()


def test_a_row_says_what_is_tested_and_what_was_rehearsed():
    record = {
        "layout": "TP 2, DP 4", "rehearsed_gib": 12.34, "planned_gib": 12.3, "apart": ["push"], "pushed": 1234, "stored": 5678,
        "seconds": 7,
    }  # fmt: skip
    page = with_table(PAGE.read_text(), {"glm4-9B": record})
    table = page.split(BEGIN)[1].split(END)[0]
    rows = {line.split(" | ")[0].strip("| `"): line for line in table.splitlines() if line.startswith("| `")}
    assert len(rows) == 52
    assert "| `glm4` | yes | none | yes | recomputed, tp2," in rows["glm4-9B"] and rows["glm4-9B"].endswith(
        "| TP 2, DP 4 | 12.3, 12.3 | push | 1,234 of 5,678 | 7 |"
    )
    assert rows["qwen3-30B-A3B"].split(" | ")[2:7:2] == ["yes", "yes", "yes"]
    assert rows["qwen3-30B-A3B"].split(" | ")[3] == "yes"
    # Families whose layers another class has.
    assert [rows[name].split(" | ")[2] for name in ("mimo-7B-rl", "kimi-k2")] == [
        "yes, of `qwen2`",
        "yes, of `deepseek_v3`",
    ]
    # With experts tensor parallelism needs sequence parallelism.
    assert "tp2" in rows["deepseek-v3"] and "whole sequence" not in rows["deepseek-v3"]
    # One that nobody rehearsed.
    assert rows["glm5-744B-A40B"].split(" | ")[4:8:3] == ["yes", NOT_YET]
    # All are served by some test.
    assert {row.split(" | ")[6] for row in rows.values()} == {"yes"}
    assert json.loads(RECORDS.read_text()).keys() <= rows.keys()


@pytest.mark.parametrize(
    ("table", "row", "script", "columns"),
    [
        ("TINY_FAMILIES", "glm4_moe without norms", "glm4.5-106B-A12B", [2, 3, 4, 5]),
        ("TINY_FAMILIES", "qwen3_5 tied", "qwen3.5-4B", [2, 4, 5]),
        ("TINY_FAMILIES", "glm4 without bias", "glm4-32B", [2, 4, 5]),
        ("SERVED", "glm4_moe without norms", "glm4.5-106B-A12B", [6]),
        ("SERVED", "qwen3_5 tied", "qwen3.5-0.8B", [6]),
        ("SERVED", "glm4 without bias", "glm4-32B", [6]),
        ("SERVED", "qwen2 untied", "qwen2.5-7B", [6]),
    ],
)
def test_a_variant_of_a_family_is_tested_by_its_own_row(monkeypatch, table, row, script, columns):
    """A row with other biases, norms or another head says nothing of a model's tensors."""
    rows = getattr(write_model_table, table)
    monkeypatch.setattr(write_model_table, table, {name: entry for name, entry in rows.items() if name != row})
    lines = with_table(PAGE.read_text(), {}).split(BEGIN)[1].split(END)[0].splitlines()
    (cells,) = (line.split(" | ") for line in lines if line.startswith(f"| `{script}` "))
    assert [number for number in range(2, 7) if cells[number] == NOT_YET] == columns


def test_scripts_of_one_model_share_its_rehearsal_and_layout():
    """By their flags: DeepSeek V3 with fewer layers is another model."""
    assert set(same_model("deepseek-v3")) == {"deepseek-v3", "deepseek-v3.1", "deepseek-r1"}
    assert same_model("deepseek-v3-5layer") == ["deepseek-v3-5layer"]
    # What builds the model of one of them is a function, which builds that of the flags.
    assert same_model("qwen3.5-35B-A3B-vl") == ["qwen3.5-35B-A3B", "qwen3.5-35B-A3B-vl"]
    # The launch script is that of another of the three.
    assert dict(zip(layout_of("deepseek-v3")[::2], layout_of("deepseek-v3")[1::2], strict=True)) == {
        "--actor-num-nodes": "16", "--actor-num-gpus-per-node": "8", "--tensor-model-parallel-size": "8",
        "--pipeline-model-parallel-size": "4", "--context-parallel-size": "4", "--expert-model-parallel-size": "32",
        "--expert-tensor-parallel-size": "1", "--decoder-last-pipeline-num-layers": "13",
    }  # fmt: skip
    # Dense models of this size are cut in two, whatever their launch scripts do.
    assert layout_of("glm4-9B")[-2:] == ["--tensor-model-parallel-size", "2"]


@pytest.mark.parametrize("file_bytes", [2**32, 1000])
def test_a_checkpoint_without_room_has_the_tensors_that_transformers_writes(tmp_path, monkeypatch, file_bytes):
    """In one file, and in several."""
    monkeypatch.setattr(write_model_table, "_FILE_BYTES", file_bytes)
    tensors = tensors_of(SMALL)
    # One layer is dense; the other has three experts, and one that sees every token. Layers have two norms and seven tensors of
    # attention.
    assert len(tensors) == 3 + 2 * (7 + 2) + 3 + (2 + 3 * 3 + 3)
    assert tensors["model.layers.1.mlp.experts.2.down_proj.weight"] == (16, 8)
    write_stand_in(tmp_path, tensors)
    stored = SafetensorsDirectory(tmp_path)
    assert {name: stored.tensor(name).shape for name in stored.names()} == tensors
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (file_bytes == 1000)
    # Of no class, and of one with a head that is the embedding.
    assert tensors_of({"architectures": ["NobodyForCausalLM"]}) is None
    assert "lm_head.weight" not in tensors_of({**SMALL, "tie_word_embeddings": True})


def test_a_checkpoint_of_mimo_has_prediction_layers_beside_those_of_qwen2():
    config = {
        "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32,
        "num_nextn_predict_layers": 2,
    }  # fmt: skip
    tensors = tensors_of(config)
    # A layer has four tensors of attention and three biases, three of its MLP, and two norms.
    assert len(tensors) == 3 + 3 * 12 + 2 * (12 + 4)
    of_last = {name: shape for name, shape in tensors.items() if name.startswith("model.mtp_layers.1.")}
    assert len(of_last) == 16
    assert of_last["model.mtp_layers.1.input_proj.weight"] == (16, 32)
    assert of_last["model.mtp_layers.1.self_attn.k_proj.bias"] == (8,)
    assert of_last["model.mtp_layers.1.mlp.down_proj.weight"] == (16, 24)
    assert all(of_last[f"model.mtp_layers.1.{norm}_layernorm.weight"] == (16,) for norm in ("token", "hidden", "final"))
    # The published one.
    assert len(tensors_of(PUBLISHED_MODELS["mimo-7B-rl"])) == recorded()["mimo-7B-rl"]["pushed"]
