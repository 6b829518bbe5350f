import json

import pytest

from slime.utils.errors import UserError
from slime.utils.processing_utils import load_tokenizer, render_chat
from tests.support.models.tokenizer import build_tokenizer, save_tokenizer


def test_a_tokenizer_directory_gives_the_same_ids_also_beside_a_model_config(tmp_path):
    directory = save_tokenizer(tmp_path)
    # With a model_type some versions of transformers would choose that family's own tokenizer class.
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    text = render_chat(build_tokenizer(), [{"role": "user", "content": "hello a\n\nthis, 12é"}])
    loaded = load_tokenizer(directory)
    assert loaded(text)["input_ids"] == build_tokenizer()(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert render_chat(loaded, [{"role": "user", "content": "x"}], add_generation_prompt=False) == (
        "<|im_start|>user\nx<|im_end|>\n"
    )


def test_missing_and_empty_directories_name_the_flag(tmp_path):
    with pytest.raises(UserError, match="--hf-checkpoint /no/such/dir: there is no such directory"):
        load_tokenizer("/no/such/dir")
    with pytest.raises(UserError, match="--ref-load .*: no tokenizer could be loaded"):
        load_tokenizer(str(tmp_path), flag="--ref-load")
