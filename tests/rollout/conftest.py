"""A checkpoint for the client's checks, a server that speaks the engines' generation protocol, and flags of a data source."""

import json
from types import SimpleNamespace

import pytest

from slime.utils.misc import SingletonMeta
from tests.support.models.rollout_args import make_checkpoint
from tests.support.processes.fake_generate_server import FakeGenerateServer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def fresh_singletons():
    SingletonMeta.clear_instances()
    yield
    SingletonMeta.clear_instances()


@pytest.fixture
def server(fresh_singletons):
    with FakeGenerateServer() as running:
        yield running


@pytest.fixture
def make_args(tmp_path):
    def make(num_prompts: int = 4, **changes) -> SimpleNamespace:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"p{n}", "label": n}) + "\n" for n in range(num_prompts)))
        values = dict(
            prompt_data=str(path),
            input_key=None,
            label_key=None,
            metadata_key="metadata",
            multimodal_keys=None,
            tool_key="tools",
            apply_chat_template=False,
            apply_chat_template_kwargs={},
            rollout_max_prompt_len=None,
            rollout_shuffle=False,
            rollout_seed=42,
            rollout_global_dataset=True,
            n_samples_per_prompt=2,
            hf_checkpoint=None,
            trust_remote_code=False,
            allow_bad_rows=False,
            streaming_data=False,
            num_data_workers=0,
            fresh_data_state=False,
            buffer_filter_path=None,
            data_source_path="slime.rollout.data_source.RolloutDataSourceWithBuffer",
            save=str(tmp_path / "checkpoint"),
            load=str(tmp_path / "checkpoint"),
            start_rollout_id=None,
            num_rollout=2,
            num_epoch=None,
            rollout_function_path="slime.rollout.sglang_rollout.generate_rollout",
            rollout_batch_size=2,
            over_sampling_batch_size=2,
            dynamic_sampling_filter_path=None,
            loss_type="policy_loss",
        )
        return SimpleNamespace(**{**values, **changes})

    return make
