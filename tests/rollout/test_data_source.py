"""Prompts epoch after epoch, and the buffer before them."""

import dataclasses
import json
import random
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

from slime.rollout import data_source
from slime.rollout.data_source import (
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
    build_dataset,
    create_data_source,
    pop_first,
)
from slime.utils.data_workers import DataWorkers
from slime.utils.errors import UserError
from slime.utils.types import Sample
from tests.support.models.args import parse
from tests.support.models.data_sources import prompts
from tests.support.models.tokenizer import save_tokenizer
from tests.support.models.vision import make_seeing_checkpoint, save_image
from tests.support.processes.forked_workers import workers_forked


@dataclasses.dataclass
class Seen:
    words: list[str]


@pytest.fixture(scope="module", autouse=True)
def forked():
    with workers_forked():
        yield


@pytest.mark.parametrize("shuffle", [True, False])
def test_samples_that_a_subclass_reads_itself_are_those_of_the_epoch_also_after_a_resume(make_args, shuffle):
    args = make_args(rollout_shuffle=shuffle)
    source, drawn = RolloutDataSource(args), RolloutDataSource(args)
    for _ in range(2):
        in_order = [sample.prompt for sample in source.dataset.samples]
        assert in_order == [group[0].prompt for group in drawn.get_samples(len(drawn))]
        source.get_samples(len(source) + 1)  # into the next epoch
        source.sample_offset = 0
    resumed = RolloutDataSource(args)
    resumed.load_state_dict(source.state_dict())
    assert resumed.epoch_id == 2 and [sample.prompt for sample in resumed.dataset.samples] == [
        sample.prompt for sample in source.dataset.samples
    ]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("kind", ["list", "set"])
def test_another_data_set_of_a_subclass_is_drawn_from_also_after_a_resume(make_args, tmp_path, shuffle, kind):
    (tmp_path / "others.jsonl").write_text("".join(f'{{"prompt": "other {i}", "label": "1"}}\n' for i in range(30)))

    class Other(RolloutDataSource):
        def __init__(self, args):
            super().__init__(args)
            others = {**vars(args), "prompt_data": str(tmp_path / "others.jsonl")}
            self.dataset = build_dataset(SimpleNamespace(**others))
            if kind == "list":
                self.dataset = [sample for sample in self.dataset if not sample.prompt.endswith("9")]

    args = make_args(rollout_shuffle=shuffle)
    source = Other(args)
    epochs = [sorted(group[0].prompt for group in source.get_samples(len(source))) for _ in range(2)]
    assert epochs[0] == epochs[1] and len(set(epochs[0])) == (27 if kind == "list" else 30)
    resumed = Other(args)
    state = source.state_dict()
    resumed.load_state_dict({**state, "fingerprint": resumed.state_dict()["fingerprint"]})
    drawn, again = ([group[0].prompt for group in one.get_samples(40)] for one in (source, resumed))
    assert drawn == again


@pytest.mark.parametrize("shuffle", [True, False])
def test_samples_that_a_subclass_replaced_are_refused_where_the_next_epoch_would_have_all(make_args, shuffle):
    source = RolloutDataSource(make_args(rollout_shuffle=shuffle))
    source.dataset.samples = source.dataset.samples[:3]
    if shuffle:
        with pytest.raises(UserError, match="let `self.dataset` be a list"):
            source.get_samples(1)
    else:
        kept = [sample.prompt for sample in source.dataset.samples]
        assert [group[0].prompt for group in source.get_samples(6)] == kept * 2


@pytest.mark.parametrize("streaming", [False, True])
def test_images_of_rows_by_the_flag(make_args, tmp_path, streaming):
    checkpoint = make_seeing_checkpoint(tmp_path / "seeing")
    image = save_image(tmp_path / "red.png")
    rows = [{"prompt": "<image>", "images": "red.png"}, {"prompt": "long" * 40}, {"prompt": "text"}]
    (tmp_path / "seen.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {"multimodal_keys": {"image": "images"}, "streaming_data": streaming, "hf_checkpoint": checkpoint}
    args = make_args(prompt_data=str(tmp_path / "seen.jsonl"), rollout_max_prompt_len=60, **changes)
    groups = RolloutDataSource(args).get_samples(2)
    assert [group[1].multimodal_inputs for group in groups] == [{"images": [image]}, None]
    assert [type(group[0].prompt) for group in groups] == [list, list]


def test_a_live_image_of_a_users_is_stored_as_text(make_args, tmp_path):
    source = RolloutDataSourceWithBuffer(make_args())
    groups = source.get_samples(1)
    groups[0][0].multimodal_inputs = {"images": [Image.open(save_image(tmp_path / "red.png", size=(3, 2)))]}
    groups[0][0].multimodal_train_inputs = {"pixel_values": object()}
    source.add_samples(groups)
    source.save(0)
    again = RolloutDataSourceWithBuffer(make_args())
    again.load(0)
    (image,) = again.buffer[0][0].multimodal_inputs["images"]
    assert image.startswith("data:image/png;base64,")


class TestDrawing:
    def test_groups_are_numbered_independent_copies(self, make_args):
        source = RolloutDataSource(make_args())
        first, second = source.get_samples(2)
        assert [sample.index for sample in first + second] == [0, 1, 2, 3]
        assert [sample.group_index for sample in first + second] == [0, 0, 1, 1]
        assert first[0].prompt == first[1].prompt == "p0" and first[0].label == 0
        first[0].metadata["mine"] = 1
        first[0].tokens.append(1)
        assert first[1].metadata == {} and first[1].tokens == []
        assert source.get_samples(4)[2][0].metadata == {}  # the second epoch's p0

    @pytest.mark.parametrize("shuffle", [False, True])
    def test_d5_a_request_wraps_as_many_epochs_as_it_takes(self, make_args, shuffle):
        source = RolloutDataSource(make_args(rollout_shuffle=shuffle))
        drawn = prompts(source.get_samples(10))
        assert len(drawn) == 10 and len(source) == 4
        for epoch in (drawn[:4], drawn[4:8]):
            assert sorted(epoch) == ["p0", "p1", "p2", "p3"]
        assert (source.epoch_id, source.sample_offset) == (2, 2)
        in_pieces = RolloutDataSource(make_args(rollout_shuffle=shuffle))
        assert drawn == prompts([group for size in (3, 1, 0, 5, 1) for group in in_pieces.get_samples(size)])

    def test_epochs_are_shuffled_differently_and_by_seed(self, make_args):
        def orders(seed):
            source = RolloutDataSource(make_args(16, rollout_shuffle=True, rollout_seed=seed))
            return prompts(source.get_samples(16)), prompts(source.get_samples(16))

        assert orders(1) == orders(1) != orders(2)
        assert orders(1)[0] != orders(1)[1]

    def test_d4_drawing_leaves_the_global_generators_alone(self, make_args):
        python_state, numpy_state = random.getstate(), np.random.get_state()[1].tolist()
        RolloutDataSource(make_args(rollout_shuffle=True)).get_samples(9)
        assert random.getstate() == python_state and np.random.get_state()[1].tolist() == numpy_state

    def test_without_a_global_dataset_samples_are_empty_and_numbered(self, make_args):
        source = RolloutDataSource(make_args(rollout_global_dataset=False, prompt_data=None))
        assert [sample.index for group in source.get_samples(2) for sample in group] == [0, 1, 2, 3]
        assert len(source) == 0 and source.get_samples(1)[0][0].prompt == ""

    def test_a_given_dataset_of_samples_or_prompts(self, make_args):
        chat = [{"role": "user", "content": "x"}]
        source = RolloutDataSource([Sample(prompt="a", label=1), "b", chat], make_args())
        assert prompts(source.get_samples(4)) == ["a", "b", chat, "a"]
        with pytest.raises(UserError, match="holds int"):
            RolloutDataSource([1], make_args()).get_samples(1)
        with pytest.raises(UserError, match="empty data set"):
            RolloutDataSource([], make_args())

    def test_objects_in_a_given_data_set_are_copied_for_every_sample(self, make_args):
        """A row of a file holds none; one of the user's may, and generate functions change what they are given."""
        seen = Seen(["first"])
        source = RolloutDataSource([Sample(prompt="a", metadata={"world": seen})], make_args())
        ((first, second),) = source.get_samples(1)
        first.metadata["world"].words.append("second")
        assert second.metadata["world"].words == seen.words == ["first"]

    @pytest.mark.parametrize("kind", [RolloutDataSource, RolloutDataSourceWithBuffer])
    def test_arguments_may_be_given_by_name(self, make_args, kind):
        assert prompts(kind(args=make_args()).get_samples(2)) == ["p0", "p1"]
        assert prompts(kind(["own"], args=make_args()).get_samples(1)) == ["own"]
        # None is a data set, too: of samples that are only numbered.
        assert prompts(kind(None, make_args()).get_samples(1)) == [""]

    def test_missing_prompt_data_names_the_flag(self, make_args):
        with pytest.raises(UserError, match="--prompt-data is missing"):
            RolloutDataSource(make_args(prompt_data=None))

    def test_the_plain_source_takes_nothing_back(self, make_args):
        source = RolloutDataSource(make_args())
        with pytest.raises(UserError, match="RolloutDataSourceWithBuffer"):
            source.add_samples(source.get_samples(1))


class TestBuildDataset:
    def test_tokenizer_is_used_for_template_and_length(self, make_args, tmp_path):
        checkpoint = save_tokenizer(tmp_path / "model")
        dataset = build_dataset(make_args(hf_checkpoint=checkpoint, apply_chat_template=True))
        assert dataset[0].prompt == "<|im_start|>user\np0<|im_end|>\n<|im_start|>assistant\n"
        with pytest.raises(UserError, match="none of the 4 prompts has at most 1 tokens"):
            build_dataset(make_args(hf_checkpoint=checkpoint, rollout_max_prompt_len=1))
        sft = "slime.rollout.sft_rollout.generate_rollout"
        for cut in ({"loss_type": "sft_loss"}, {"loss_type": "custom_loss", "rollout_function_path": sft}):
            assert len(build_dataset(make_args(rollout_max_prompt_len=1, **cut))) == 4

    def test_missing_checkpoint(self, make_args):
        with pytest.raises(UserError, match="--hf-checkpoint /none"):
            build_dataset(make_args(hf_checkpoint="/none", rollout_max_prompt_len=1))


class TestStreaming:
    @pytest.mark.parametrize("shuffle", [False, True])
    def test_prompts_come_in_the_order_of_the_set_in_memory_also_after_a_resume(self, make_args, shuffle):
        held, read = (make_args(7, rollout_shuffle=shuffle, streaming_data=streaming) for streaming in (False, True))
        expected = prompts(RolloutDataSource(held).get_samples(20))
        source = RolloutDataSource(read)
        assert prompts(source.get_samples(9)) == expected[:9]
        source.save(0)
        resumed = RolloutDataSource(read)
        resumed.load(0)
        assert prompts(resumed.get_samples(11)) == expected[9:]
        kept_in_memory = RolloutDataSource(held)
        kept_in_memory.load(0)
        assert prompts(kept_in_memory.get_samples(11)) == expected[9:]

    @pytest.mark.parametrize("workers", [0, 1])
    def test_rows_of_no_use_are_passed_by_and_none_left_is_an_error(self, make_args, tmp_path, workers):
        save_tokenizer(tmp_path)
        changes = {"rollout_max_prompt_len": 2, "hf_checkpoint": str(tmp_path), "num_data_workers": workers}
        args = make_args(3, streaming_data=True, allow_bad_rows=True, **changes)
        rows = ['{"prompt": "a"}', "{broken", '{"prompt": "too long"}', '{"prompt": "bc"}']
        (tmp_path / "prompts.jsonl").write_text("\n".join(rows))
        source = RolloutDataSource(args)
        assert prompts(source.get_samples(2)) == ["a", "bc"]
        source.save(0)
        resumed = RolloutDataSource(args)
        resumed.load(0)
        assert prompts(resumed.get_samples(3)) == ["a", "bc", "a"]
        (tmp_path / "prompts.jsonl").write_text("\n".join(rows[1:3]))
        with pytest.raises(UserError, match="prompts.jsonl: not one of 2 rows can be used"):
            RolloutDataSource(args).get_samples(1)


@pytest.mark.parametrize("streaming", [False, True])
def test_workers_change_no_group_over_epochs_weights_and_a_resume(make_args, tmp_path, streaming, monkeypatch):
    files = []
    for name, count in (("a", 150), ("b", 40)):
        rows = [{"prompt": f"{name}{n}" + "!" * (n % 9), "label": n, "metadata": {"n": [n]}} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
        files.append(str(tmp_path / f"{name}.jsonl"))
    changes = {"apply_chat_template": True, "apply_chat_template_kwargs": {"x": 1}, "rollout_max_prompt_len": 30}
    changes |= {"hf_checkpoint": save_tokenizer(tmp_path), "rollout_shuffle": True, "allow_bad_rows": True}
    changes |= {"prompt_data": [f"{files[0]}@[5:]", files[1] + "*2"], "streaming_data": streaming}
    made = []
    monkeypatch.setattr(data_source, "DataWorkers", lambda *given: made.append(DataWorkers(*given)) or made[-1])
    expected = RolloutDataSource(make_args(**changes)).get_samples(400)
    assert not made
    args = make_args(num_data_workers=2, **changes)
    source = RolloutDataSource(args)
    assert source.get_samples(250) == expected[:250]
    source.save(0)
    assert source.get_samples(100) == expected[250:350]
    # As after the end of the process.
    resumed = RolloutDataSource(args)
    resumed.load(0)
    assert resumed.get_samples(150) == expected[250:] and len(made) == 2
    # Those of a set that is held are of no use when it is there.
    alive = [worker._process.is_alive() for workers in made for worker in workers._workers]
    assert alive == [streaming] * 4
    for workers in made:
        workers.close()


def test_workers_start_where_there_is_something_to_prepare(make_args, monkeypatch):
    monkeypatch.setattr(data_source, "DataWorkers", None)
    args = make_args(num_data_workers=2, rollout_max_prompt_len=3, loss_type="sft_loss")
    assert prompts(RolloutDataSource(args).get_samples(1)) == ["p0"]


class TestWeights:
    @pytest.fixture
    def mixture(self, make_args, tmp_path):
        def mix(weights, **changes):
            for name, count in (("a", 8), ("b", 4)):
                rows = [json.dumps({"prompt": f"{name}{number}"}) for number in range(count)]
                (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
            files = [str(tmp_path / f"{name}.jsonl") + weight for name, weight in zip("ab", weights, strict=True)]
            return make_args(rollout_shuffle=True, **{"prompt_data": files, **changes})

        return mix

    @pytest.mark.parametrize("streaming", [False, True])
    def test_shares_of_every_epoch_and_the_same_prompts_after_a_resume(self, mixture, streaming):
        args = mixture(["", "*4"], streaming_data=streaming)
        whole = prompts(RolloutDataSource(args).get_samples(36))
        for epoch in range(3):
            first_letters = [prompt[0] for prompt in whole[12 * epoch : 12 * (epoch + 1)]]
            assert (first_letters.count("a"), first_letters.count("b")) == (4, 8)
        source = RolloutDataSource(args)
        source.get_samples(17)
        source.save(0)
        resumed = RolloutDataSource(args)
        resumed.load(0)
        assert prompts(resumed.get_samples(19)) == whole[17:]

    def test_equal_weights_change_nothing(self, mixture):
        plain, weighted = (RolloutDataSource(mixture([weight] * 2)).get_samples(30) for weight in ("", "*2"))
        assert prompts(plain) == prompts(weighted)

    def test_another_weight_is_another_mixture(self, mixture):
        RolloutDataSource(mixture(["", "*4"])).save(0)
        with pytest.raises(UserError, match="'weight': 4.0.*is not what|is not what.*\n.*'weight': 4.0"):
            RolloutDataSource(mixture(["", "*3"])).load(0)
        RolloutDataSource(mixture(["", "*4.0"])).load(0)

    def test_a_weight_that_gives_no_row_of_an_epoch_is_refused(self, mixture):
        with pytest.raises(UserError, match="share of less than one row in an epoch of 12"):
            RolloutDataSource(mixture(["", "*0.001"]))


class TestBuffer:
    def test_buffer_first_then_the_data_set(self, make_args):
        source = RolloutDataSourceWithBuffer(make_args())
        groups = source.get_samples(3)
        source.add_samples([groups[2], groups[0]])
        assert source.get_buffer_length() == 2
        again = source.get_samples(3)
        assert again[0] is groups[2] and again[1] is groups[0] and again[2][0].prompt == "p3"
        assert source.get_buffer_length() == 0

    def test_groups_of_another_size_are_refused_as_a_whole(self, make_args):
        source = RolloutDataSourceWithBuffer(make_args())
        good = source.get_samples(1)[0]
        for bad in ([Sample()], Sample(), (Sample(), Sample())):
            with pytest.raises(UserError, match="lists of 2 samples \\(--n-samples-per-prompt\\)"):
                source.add_samples([good, bad])
        assert source.get_buffer_length() == 0

    def test_a_group_is_in_the_buffer_once(self, make_args):
        source = RolloutDataSourceWithBuffer(make_args())
        first, second = source.get_samples(2)
        with pytest.raises(UserError, match="in the buffer already"):
            source.add_samples([first, first])
        source.add_samples([first])
        with pytest.raises(UserError, match="in the buffer already"):
            source.add_samples([second, first])
        assert source.get_samples(1)[0] is first and source.get_buffer_length() == 0
        source.add_samples([first])
        assert source.get_buffer_length() == 1, "it was handed out meanwhile"

    def test_pop_first(self):
        buffer = [[1], [2], [3]]
        assert pop_first(None, 0, buffer, 2) == [[1], [2]] and buffer == [[3]]

    def test_filter_by_path_gets_the_real_rollout_id(self, make_args, tmp_path):
        plugin = tmp_path / "filters.py"
        plugin.write_text(
            "calls = []\n"
            "def newest(args, rollout_id, buffer, num_samples):\n"
            "    calls.append((args.rollout_seed, rollout_id, num_samples))\n"
            "    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]\n"
        )
        source = RolloutDataSourceWithBuffer(make_args(buffer_filter_path=f"{plugin}:newest"))
        groups = source.get_samples(2)
        source.add_samples(groups)
        assert source.get_samples(1, rollout_id=7)[0] is groups[1]
        assert source._filter.__globals__["calls"] == [(42, 7, 1)]

    @pytest.mark.parametrize(
        "body, message",
        [
            ("return buffer[:1]", "did not remove"),
            ("return None", "NoneType"),
            ("return buffer * 3", "3 groups"),
            ("return [buffer.pop()] * 2", "returned a group twice"),
        ],
    )
    def test_wrong_filters_are_named(self, make_args, tmp_path, body, message):
        plugin = tmp_path / "filters.py"
        plugin.write_text(f"def wrong_{len(body)}(args, rollout_id, buffer, num_samples):\n    {body}\n")
        source = RolloutDataSourceWithBuffer(make_args(buffer_filter_path=str(plugin) + f":wrong_{len(body)}"))
        source.add_samples(source.get_samples(1))
        with pytest.raises(UserError, match=f"--buffer-filter-path .*filters.py.*{message}"):
            source.get_samples(2)

    def test_method_form(self, make_args):
        class Newest(RolloutDataSourceWithBuffer):
            def buffer_filter(self, args, buffer, n):
                return [buffer.pop() for _ in range(min(n, len(buffer)))]

        source = Newest(make_args())
        groups = source.get_samples(2)
        source.add_samples(groups)
        assert source.get_samples(1)[0] is groups[1]


class TestCreate:
    @pytest.mark.parametrize("streaming", [[], ["--streaming-data"]], ids=["in memory", "streamed"])
    def test_files_fields_template_and_order_are_those_of_the_flags_of_a_run(self, tmp_path, streaming):
        """Three of ten rows of a table, one of which is too long for a prompt, and a file that counts twice."""
        chats = [
            {
                "question": [{"role": "user", "content": f"a{number}" + "!" * 200 * (number == 3)}],
                "answer": number,
                "functions": json.dumps([{"name": f"tool{number}"}]),
                "more": {"rm_type": "f1"},
            }
            for number in range(10)
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats), tmp_path / "a.parquet")
        texts = [{"question": f"b{number}", "answer": -number} for number in range(3)]
        (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
        save_tokenizer(tmp_path / "model")
        words = [
            "--prompt-data", f"{tmp_path}/a.parquet@[2:-5]", f"{tmp_path}/b.jsonl*2", "--input-key", "question", "--label-key",
            "answer", "--tool-key", "functions", "--metadata-key", "more", "--apply-chat-template",
            "--rollout-max-prompt-len", "150", "--rollout-shuffle", "--rollout-seed", "3", *streaming,
        ]  # fmt: skip
        args = parse(tmp_path, *words)
        groups = create_data_source(args).get_samples(40)
        tools = {label: [{"name": f"tool{label}"}] for label in (2, 4)}
        rendered = {
            label: f"<|im_start|>system\n# Tools\n{json.dumps(tool)}\n<|im_end|>\n<|im_start|>user\na{label}<|im_end|>\n"
            for label, [tool] in tools.items()
        } | {-number: f"<|im_start|>user\nb{number}<|im_end|>\n" for number in range(3)}
        assert {group[0].label for group in groups} == set(rendered)
        for number, group in enumerate(groups):
            label = group[0].label
            assert [(sample.group_index, sample.index) for sample in group] == [
                (number, 2 * number + i) for i in range(2)
            ]
            assert {sample.prompt for sample in group} == {rendered[label] + "<|im_start|>assistant\n"}
            assert group[0].metadata == ({"rm_type": "f1", "tools": tools[label]} if label > 0 else {})
        drawn = [group[0].label for group in groups]
        assert all(0 < drawn.count(of_a) < drawn.count(of_b) for of_a in (2, 4) for of_b in (0, -1, -2))
        again, otherwise = (
            create_data_source(parse(tmp_path, *words, *more)) for more in ([], ["--rollout-seed", "4"])
        )
        assert drawn == [group[0].label for group in again.get_samples(40)]
        assert drawn != [group[0].label for group in otherwise.get_samples(40)]

    def test_groups_that_a_source_without_a_buffer_leaves_out_are_told(self, make_args, caplog):
        with_buffer = RolloutDataSourceWithBuffer(make_args())
        with_buffer.add_samples(with_buffer.get_samples(2))
        saved = with_buffer.state_dict()
        RolloutDataSourceWithBuffer(make_args()).load_state_dict(saved)
        assert "left out" not in caplog.text
        path = "slime.rollout.data_source.RolloutDataSource"
        RolloutDataSource(make_args(data_source_path=path)).load_state_dict(saved)
        assert f"2 groups that were returned to the data are left out: --data-source-path {path}" in caplog.text

    def test_a_number_of_epochs_is_told_to_be_one_of_rollouts_where_these_have_another_size(self, make_args, caplog):
        saved = RolloutDataSource(make_args(rollout_batch_size=2)).state_dict()
        RolloutDataSource(make_args(rollout_batch_size=2, num_epoch=3)).load_state_dict(saved)
        RolloutDataSource(make_args(rollout_batch_size=4, num_epoch=None)).load_state_dict(saved)
        assert "--num-epoch" not in caplog.text
        RolloutDataSource(make_args(rollout_batch_size=4, num_epoch=3)).load_state_dict(saved)
        assert "--num-epoch 3 is as many rollouts as these passes have by --rollout-batch-size 4" in caplog.text
        assert "those that were done with 2:" in caplog.text

    def test_a_resume_that_reads_rows_otherwise_says_what_stays(self, make_args, caplog):
        saved = RolloutDataSource(make_args()).state_dict()
        RolloutDataSource(make_args()).load_state_dict(saved)
        assert "read with other flags" not in caplog.text
        kwargs = {"enable_thinking": False}
        RolloutDataSource(make_args(apply_chat_template_kwargs=kwargs)).load_state_dict(saved)
        now = "(--apply-chat-template-kwargs {} → {'enable_thinking': False})"
        assert f"read with other flags than before {now}" in caplog.text
        # A state of an earlier version does not say.
        caplog.clear()
        del saved["read_with"]
        RolloutDataSource(make_args(apply_chat_template_kwargs=kwargs)).load_state_dict(saved)
        assert "read with other flags" not in caplog.text

    def test_default(self, make_args):
        assert type(create_data_source(make_args())) is RolloutDataSourceWithBuffer

    def test_constructor_forms_are_recognised_by_signature(self, make_args, tmp_path):
        plugin = tmp_path / "sources.py"
        plugin.write_text(
            "from slime.data import RolloutDataSource\n"
            "class WithDataset(RolloutDataSource):\n"
            "    def __init__(self, dataset, args):\n"
            "        super().__init__(dataset, args)\n"
            "class Own:\n"
            "    def __init__(self, args): self.args = args\n"
            "    def get_samples(self, num_samples): return []\n"
            "    def save(self, rollout_id): ...\n"
            "    def load(self, rollout_id): ...\n"
            "class Wrong:\n"
            "    def __init__(self, args): ...\n"
        )
        source = create_data_source(make_args(data_source_path=f"{plugin}:WithDataset"))
        assert prompts(source.get_samples(1)) == ["p0"] and source.state_dict()["fingerprint"]["files"]
        args = make_args(data_source_path=f"{plugin}:Own")
        assert create_data_source(args).args is args
        with pytest.raises(UserError, match=r"--data-source-path .*:Wrong: Wrong has no get_samples\("):
            create_data_source(make_args(data_source_path=f"{plugin}:Wrong"))
