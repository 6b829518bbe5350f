import json
import logging
import random
import subprocess
import sys

import numpy as np
import pytest

from slime.utils.data_files import fingerprint, read_file
from slime.utils.dataset import Dataset, RowKeys, StreamedDataset, filter_long_prompt
from slime.utils.epoch_order import epoch_permutation
from slime.utils.errors import UserError
from slime.utils.types import Sample
from tests.support.models.tokenizer import build_tokenizer


@pytest.fixture
def write_rows(tmp_path):
    def write(rows: list, name: str = "data.jsonl") -> str:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return str(tmp_path / name)

    return write


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def numbered(count: int) -> list[dict]:
    return [{"prompt": str(number)} for number in range(count)]


class TestReadFile:
    @pytest.mark.parametrize("slice_text", ["[-3:]", "[:-1]", "[2:5]", "[:]", "[7:]", "[-100:2]", "[5:100]", "[-4:-2]"])
    def test_d2_slices_have_python_semantics(self, write_rows, slice_text):
        path = write_rows(numbered(9))
        start, stop = (int(bound) if bound else None for bound in slice_text[1:-1].split(":"))
        got = [row["prompt"] for row in read_file(f"{path}@{slice_text}")]
        assert got == [str(number) for number in range(9)][start:stop]

    @pytest.mark.parametrize("weight", ["0", "-1", "x", "", "1e3", "inf", "nan", "1.5.2"])
    def test_weights_that_are_none(self, write_rows, weight):
        path = write_rows(numbered(3))
        for text in (f"{path}*{weight}", f"{path}@[1:]*{weight}"):
            with pytest.raises(UserError, match="is no number above 0"):
                list(read_file(text))

    def test_a_weight_changes_no_row_and_an_evaluation_has_none(self, write_rows):
        path = write_rows(numbered(3))
        assert [row["prompt"] for row in read_file(f"{path}@[1:]*.5")] == ["1", "2"] != list(read_file(f"{path}*2"))
        with pytest.raises(UserError, match="--eval-prompt-data .*a weight says nothing"):
            list(read_file(f"{path}*2", "--eval-prompt-data"))

    def test_blank_lines_are_no_rows_and_a_byte_order_mark_is_skipped(self, tmp_path):
        path = tmp_path / "data.jsonl"
        path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n  \n{"prompt": "\xc3\xa9\xe2\x80\xa8"}')
        assert [row["prompt"] for row in read_file(str(path))] == ["a", "é\u2028"]
        assert [row["prompt"] for row in read_file(f"{path}@[-1:]")] == ["é\u2028"]

    @pytest.mark.parametrize(
        "broken, cause",
        [
            ("{broken", r"no valid JSON \(Expecting property name enclosed in double quotes, at character 2\);"),
            ('{"prompt": "a", label: 2}', r"no valid JSON \(Expecting .*, at character 17\);"),
            (
                '[{"prompt": "a"},',
                r"no valid JSON \(Expecting value, at character 18\); each line has to hold one whole object;",
            ),
            ("{", r"no valid JSON \(.*\); each line has to hold one whole object;"),
            ("[1]", "expected a JSON object, found list"),
            ('{"a": "\\ud8', "no valid JSON"),
            ('{"prompt": "a", "prompt": "b"}', r"no valid JSON \('prompt' stands twice in it, and only the last one"),
        ],
    )
    def test_d1_broken_json_line_names_file_and_line(self, write_rows, broken, cause):
        path = write_rows([{"prompt": "a"}, "", broken, {"prompt": "b"}])
        with pytest.raises(UserError, match=f"data.jsonl:3: {cause}.*--allow-bad-rows"):
            list(read_file(path))
        # Not part of the slice, so not in the way.
        assert [row["prompt"] for row in read_file(f"{path}@[-1:]")] == ["b"]

    def test_invalid_utf8_names_the_line(self, tmp_path):
        (tmp_path / "data.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
        with pytest.raises(UserError, match="data.jsonl:2: .*utf-8"):
            list(read_file(str(tmp_path / "data.jsonl")))

    @pytest.mark.parametrize(
        "path, cause",
        [
            ("missing.jsonl", "there is no file missing.jsonl"),
            ("data.csv", "unknown kind of data file"),
            ("owner/data", "owner/data: there is no such file; .*`hf download --repo-type dataset`"),
            (".", "is a directory; name the .jsonl or .parquet files in it"),
            ("data.jsonl@[1]", "malformed slice"),
            ("data.jsonl@[1:2:3]", "malformed slice"),
            ("data.jsonl@[a:b]", "malformed slice"),
        ],
    )
    def test_bad_paths_name_the_flag(self, path, cause):
        with pytest.raises(UserError, match=f"^--eval-prompt-data .*{cause}"):
            list(read_file(path, flag="--eval-prompt-data"))

    def test_parquet(self, tmp_path):
        import pyarrow
        from pyarrow import parquet

        path = str(tmp_path / "data.parquet")
        rows = [{"prompt": [{"role": "user", "content": str(n)}], "metadata": {"n": n}} for n in range(5)]
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        assert list(read_file(path)) == rows
        assert list(read_file(f"{path}@[-2:]")) == rows[-2:]
        (tmp_path / "broken.parquet").write_bytes(b"nothing")
        with pytest.raises(UserError, match="broken.parquet: no readable parquet file"):
            list(read_file(str(tmp_path / "broken.parquet")))


def tool(name: str, parameter: str) -> dict:
    properties = {parameter: {"type": "string"}}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


@pytest.mark.parametrize("is_streamed", [False, True])
def test_messages_and_tools_of_parquet_have_no_fields_of_other_rows(write_rows, tmp_path, tokenizer, is_streamed):
    """A table gives every object all fields: a chat template would show the parameters of each tool to every row."""
    import pyarrow
    from pyarrow import parquet

    call = {"function": {"name": "calculate", "arguments": {"expression": "1+1"}}}
    parts = [{"type": "text", "text": "look"}, {"type": "image", "image": "a.png"}]
    rows = [
        {"prompt": [{"role": "user", "content": "a"}], "tools": [tool("weather", "city")], "metadata": {"n": 1}},
        {"prompt": [{"role": "user", "content": "b"}, {"role": "assistant", "content": None, "tool_calls": [call]}],
         "tools": [tool("calculate", "expression"), tool("weather", "city")], "metadata": {"m": 2}},
    ]  # fmt: skip
    of_metadata = [{"prompt": row["prompt"], "metadata": {"tools": row["tools"]}} for row in rows]
    in_parts = [{"prompt": [{"role": "user", "content": [part]}]} for part in parts]

    def samples(path: str) -> list[Sample]:
        data = streamed(path, tokenizer) if is_streamed else Dataset(path, tokenizer)
        return [data[position] for position in range(len(data))]

    for name, written in (("tools", rows), ("own", of_metadata), ("parts", in_parts)):
        path = str(tmp_path / f"{name}.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(written), path)
        found, expected = samples(path), samples(write_rows(written))
        assert [sample.prompt for sample in found] == [sample.prompt for sample in expected]
        tools = [{**row.get("metadata", {}), **row}.get("tools") for row in written]
        assert [sample.metadata.get("tools") for sample in found] == tools
    # Of a user's own objects no field goes: a function may look for it.
    assert [sample.metadata.get("n", "none") for sample in samples(str(tmp_path / "tools.parquet"))] == [1, None]


def test_fingerprint_is_of_the_content(write_rows):
    first = fingerprint(write_rows(numbered(2), "a.jsonl") + "@[0:1]")
    second = fingerprint(write_rows(numbered(2), "b.jsonl"))
    other = fingerprint(write_rows(numbered(3), "c.jsonl"))
    assert (first["slice"], second["slice"]) == ("[0:1]", "") and first["size"] == second["size"] == 32
    assert first["sha256"] == second["sha256"] != other["sha256"]


class TestDataset:
    @pytest.mark.parametrize(
        "row, keys, prompt, label",
        [
            ({"prompt": "p", "input": "i", "label": 1}, {}, "p", 1),
            ({"input": "i"}, {}, "i", None),
            ({"prompt": "p", "q": "q", "a": [1]}, {"prompt_key": "q", "label_key": "a"}, "q", [1]),
        ],
    )
    def test_keys(self, write_rows, row, keys, prompt, label):
        (sample,) = Dataset(write_rows([row]), None, None, None, **keys)
        assert (sample.prompt, sample.label) == (prompt, label)

    @pytest.mark.parametrize(
        "rows, keys, cause",
        [
            (
                [{"question": "x", "n": 1}],
                {},
                "jsonl:1: the row has neither .* only question, n; name one with --input-key",
            ),
            (
                [{"prompt": "x"}],
                {"prompt_key": "q"},
                "jsonl:1: there is no field 'q' \\(--input-key\\); the row has prompt",
            ),
            ([{"prompt": "x"}], {"label_key": "a"}, "jsonl:1: there is no field 'a' \\(--label-key\\)"),
            ([{"prompt": "x"}, {"input": "x"}], {}, "jsonl:2: there is no field 'prompt'"),
            ([{"prompt": "x", "a": 1}, {"prompt": "x"}], {"label_key": "a"}, "jsonl:2: there is no field 'a'"),
            ([{"prompt": 5}], {}, "jsonl:1: 'prompt' is int, expected a string or a list"),
            ([{"prompt": []}], {}, "jsonl:1: 'prompt' is an empty list"),
            ([{"prompt": [{"content": "x"}]}], {}, "jsonl:1: message 0 of 'prompt' is no object with a `role`"),
            ([{"prompt": "x", "metadata": "{}"}], {}, "jsonl:1: 'metadata' is str, expected an object"),
            ([{"prompt": "x", "tools": "{"}], {}, "jsonl:1: 'tools' is no valid JSON"),
            ([{"prompt": "x", "tools": {"a": 1}}], {}, "jsonl:1: 'tools' is dict, expected a list"),
        ],
    )
    def test_bad_rows_name_file_line_and_cause(self, write_rows, rows, keys, cause):
        with pytest.raises(UserError, match=cause):
            Dataset(write_rows(rows), None, None, None, **keys)

    def test_d1_bad_rows_can_be_skipped_and_are_counted(self, write_rows, caplog):
        path = write_rows([{"prompt": "a"}, "{broken", {"prompt": 5}, {"prompt": "b", "metadata": 1}, {"prompt": "c"}])
        dataset = Dataset(path, None, None, None, allow_bad_rows=True)
        assert [sample.prompt for sample in dataset] == ["a", "c"] and dataset.num_bad_rows == 3
        assert "skipped 3 bad rows" in caplog.text

    @pytest.mark.parametrize("rows", [[], ["", " "]])
    def test_empty_files_are_an_error(self, write_rows, rows):
        with pytest.raises(UserError, match="--prompt-data .*empty.jsonl: holds no"):
            Dataset([write_rows(numbered(1)), write_rows(rows, "empty.jsonl")], None, None, None)
        with pytest.raises(UserError, match="holds no"):
            Dataset(write_rows(numbered(3)) + "@[3:]", None, None, None)

    def test_files_in_the_given_order_each_with_its_slice(self, write_rows):
        first = write_rows(numbered(4), "z.jsonl")
        second = write_rows([{"input": "x"}], "a.jsonl")
        dataset = Dataset([f"{first}@[2:]", second, f"{first}@[:1]"], None, None, None)
        assert [sample.prompt for sample in dataset] == ["2", "3", "x", "0"]
        assert [file["slice"] for file in dataset.fingerprint()] == ["[2:]", "", "[:1]"]

    def test_prompts_in_the_chat_template(self, write_rows, tokenizer):
        chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
        tools = [{"name": "calc"}]
        path = write_rows(
            [{"prompt": "hi"}, {"prompt": chat}, {"prompt": "hi", "tools": json.dumps(tools), "metadata": {"a": 1}}]
        )
        dataset = Dataset(path, tokenizer, None, None, apply_chat_template=True)
        assert dataset[0].prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert dataset[1].prompt == (
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
        )
        assert dataset[2].prompt.startswith('<|im_start|>system\n# Tools\n{"name": "calc"}\n<|im_end|>\n')
        assert dataset[2].metadata == {"a": 1, "tools": tools}

    def test_without_the_template_prompts_stay_as_they_are(self, write_rows):
        chat = [{"role": "user", "content": "U"}]
        dataset = Dataset(
            write_rows([{"prompt": chat}, {"prompt": "s"}]), None, None, None, apply_chat_template_kwargs={"x": 1}
        )
        assert [sample.prompt for sample in dataset] == [chat, "s"]
        assert dataset[0].apply_chat_template_kwargs == {"x": 1}

    def test_template_arguments_and_template_errors(self, write_rows):
        path = write_rows([{"prompt": "a"}, {"prompt": [{"role": "tool", "content": "t"}]}])
        template = "{{ mode }}{% if messages[0].role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        tokenizer = build_tokenizer(template)
        dataset = Dataset(
            path + "@[:1]", tokenizer, None, None, apply_chat_template=True, apply_chat_template_kwargs={"mode": "m"}
        )
        assert dataset[0].prompt == "m"
        with pytest.raises(UserError, match="data.jsonl:2: the chat template refused 'prompt' .*no tools"):
            Dataset(path, tokenizer, None, None, apply_chat_template=True)

    def test_a_tokenizer_without_template_is_an_error(self, write_rows):
        with pytest.raises(
            UserError, match="--apply-chat-template is given, but the tokenizer .* has no chat template"
        ):
            Dataset(write_rows(numbered(1)), build_tokenizer(None), None, None, apply_chat_template=True)

    def test_long_prompts_are_left_out_and_none_left_is_an_error(self, write_rows, tokenizer):
        path = write_rows([{"prompt": "x" * length} for length in (5, 1, 7, 3)])
        dataset = Dataset(path, tokenizer, None, 5)
        assert [len(sample.prompt) for sample in dataset] == [5, 1, 3]
        with pytest.raises(UserError, match="none of the 4 prompts has at most 0 tokens"):
            Dataset(path, tokenizer, None, 0)

    def test_shuffle_depends_on_seed_and_epoch_only(self, write_rows):
        path = write_rows(numbered(20))

        def order(seed: int, *epochs: int) -> list[str]:
            dataset = Dataset(path, None, None, None, seed=seed)
            for epoch in epochs:
                dataset.shuffle(epoch)
            return [sample.prompt for sample in dataset]

        assert order(1, 3) == order(1, 0, 3) != order(1, 2)
        assert order(1, 3) != order(2, 3)
        assert sorted(order(1, 3), key=int) == [str(number) for number in range(20)]


def test_d4_shuffling_leaves_the_global_generators_alone():
    python_state, numpy_state = random.getstate(), np.random.get_state()[1].tolist()
    epoch_permutation(100, 1, 0)
    assert random.getstate() == python_state and np.random.get_state()[1].tolist() == numpy_state


def streamed(path, tokenizer=None, max_length=None, *, seed=42, template=False, bad=False, **keys):
    names = RowKeys(keys.get("prompt_key"), keys.get("label_key"), "tools", "metadata")
    return StreamedDataset(
        path, tokenizer, max_length, keys=names, seed=seed, apply_chat_template=template,
        apply_chat_template_kwargs={"x": 1}, allow_bad_rows=bad,
    )  # fmt: skip


class TestStreamedDataset:
    @pytest.mark.parametrize("template", [False, True])
    def test_samples_order_and_fingerprint_are_those_of_the_set_in_memory(self, write_rows, tokenizer, template):
        first = write_rows([*numbered(5), "", {"prompt": [{"role": "user", "content": "U"}], "label": 3}], "z.jsonl")
        second = write_rows(
            [{"input": "x", "metadata": {"a": 1}}, {"input": "y", "tools": '[{"name": "calc"}]'}], "a.jsonl"
        )
        paths = [f"{first}@[2:]", second, f"{first}@[:1]*3"]
        held = Dataset(
            paths, tokenizer, None, None, apply_chat_template=template, apply_chat_template_kwargs={"x": 1}, seed=7
        )
        read = streamed(paths, tokenizer, template=template, seed=7)
        assert len(read) == len(held) == 7 and read.fingerprint() == held.fingerprint()
        for epoch in (None, 0, 3):
            for dataset in (held, read) if epoch is not None else ():
                dataset.shuffle(epoch)
            assert [read[i] for i in range(7)] == [held[i] for i in range(7)]

    def test_a_row_is_another_sample_each_time(self, write_rows):
        dataset = streamed(write_rows([{"prompt": "p", "metadata": {"a": []}}]))
        dataset[0].metadata["a"].append(1)
        assert dataset[0].metadata == {"a": []}

    def test_d1_a_bad_row_is_named_when_it_is_met_or_skipped_and_counted(self, write_rows, tokenizer):
        path = write_rows([{"prompt": "a"}, "{broken", {"prompt": 5}, {"prompt": "c"}])
        dataset = streamed(path)
        assert dataset[3].prompt == "c"
        for position, cause in ((1, "data.jsonl:2: no valid JSON"), (2, "data.jsonl:3: 'prompt' is int")):
            with pytest.raises(UserError, match=f"{cause}.*--allow-bad-rows"):
                dataset[position]
        skipping = streamed(path, bad=True)
        assert [skipping[i] and skipping[i].prompt for i in range(4)] == ["a", None, None, "c"]
        assert skipping.num_bad_rows == 2
        with open(path, "a") as file:
            file.write("\n")
        with pytest.raises(UserError, match="was changed while the run reads it"):
            skipping[0]

    def test_the_first_row_is_looked_at_at_once(self, write_rows):
        with pytest.raises(UserError, match="^[^ ]*jsonl:1: there is no field 'q' \\(--input-key\\)"):
            streamed(write_rows(numbered(2)), prompt_key="q", bad=True)
        with pytest.raises(UserError, match="jsonl:1: no valid JSON"):
            streamed(write_rows(["{broken", {"prompt": "a"}]))
        assert streamed(write_rows(["{broken", {"prompt": "a"}]), bad=True)[1].prompt == "a"
        with pytest.raises(UserError, match="holds no"):
            streamed([write_rows(numbered(1)), write_rows([], "empty.jsonl")])

    def test_prompts_longer_than_the_limit_are_none_and_counted(self, write_rows, tokenizer):
        dataset = streamed(write_rows([{"prompt": "x" * length} for length in (5, 1, 7, 3)]), tokenizer, 5)
        assert [sample and len(sample.prompt) for sample in map(dataset.__getitem__, range(4))] == [5, 1, None, 3]
        assert dataset.num_long_prompts == 1


@pytest.mark.slow
def test_a_million_rows_are_indexed_within_20_seconds_and_a_gibibyte(tmp_path):
    """The bounds are those of the product; it takes a tenth of either."""
    path = tmp_path / "rows.jsonl"
    with path.open("w") as lines:
        for number in range(1_000_000):
            lines.write(
                json.dumps({"prompt": f"What is {number} plus {number}? {'x' * 150}", "label": str(2 * number)})
            )
            lines.write("\n")
    code = (
        "import resource, sys, time\n"
        "from slime.utils.dataset import RowKeys, StreamedDataset\n"
        "started = time.monotonic()\n"
        "dataset = StreamedDataset(sys.argv[1], None, None, keys=RowKeys(None, None, None, None), seed=1,\n"
        "    apply_chat_template=False, apply_chat_template_kwargs=None, allow_bad_rows=False)\n"
        "dataset.shuffle(0)\n"
        "samples = [dataset[i] for i in range(0, len(dataset), 1000)]\n"
        "print(time.monotonic() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, len(dataset))\n"
        "assert all(str(2 * int(s.prompt.split()[2])) == s.label for s in samples)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True, timeout=300
    )
    seconds, gibibytes, rows = map(float, done.stdout.split())
    assert rows == 1_000_000 and seconds < 20 and gibibytes < 1, done.stdout


class TestFilterLongPrompt:
    def test_d3_order_is_kept_over_texts_and_chats(self, tokenizer, caplog):
        caplog.set_level(logging.INFO)
        chat = [{"role": "user", "content": "abc"}]
        chat_tokens = len(tokenizer("<|im_start|>user\nabc<|im_end|>\n<|im_start|>assistant\n")["input_ids"])
        prompts = ["x" * 40, chat, "y", "z" * chat_tokens, "w" * (chat_tokens + 1)]
        kept = filter_long_prompt([Sample(prompt=prompt) for prompt in prompts], tokenizer, None, chat_tokens)
        assert [sample.prompt for sample in kept] == [chat, "y", "z" * chat_tokens]
        assert f"left out 2 of 5 prompts: more than {chat_tokens} tokens" in caplog.text
        assert [sample.prompt for sample in filter_long_prompt(kept, tokenizer, None, chat_tokens - 1)] == ["y"]

    def test_chats_without_a_template_are_kept(self):
        samples = [Sample(prompt=[{"role": "user", "content": "abc"}]), Sample(prompt="abc")]
        assert filter_long_prompt(samples, build_tokenizer(None), None, 1) == samples[:1]

    def test_a_chat_that_the_template_refuses_is_a_bad_row(self, write_rows):
        """Where prompts are only measured it stays a list, which a function of the user's may render in its own way."""
        tokenizer = build_tokenizer(
            "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}x"
        )
        good, bad = ({"prompt": [{"role": role, "content": "c"}]} for role in ("user", "assistant"))
        path = write_rows([good, bad, good, "{broken"])
        cause = "data.jsonl:2: the chat template refused the prompt \\(TemplateError: user first\\).*--allow-bad-rows"
        with pytest.raises(UserError, match=cause):
            Dataset(path, tokenizer, None, 5)
        read = streamed(path, tokenizer, 5)
        assert read[2].prompt == good["prompt"]
        with pytest.raises(UserError, match=cause):
            read[1]
        held, read = Dataset(path, tokenizer, None, 5, allow_bad_rows=True), streamed(path, tokenizer, 5, bad=True)
        assert [sample.prompt for sample in held] == [good["prompt"]] * 2
        assert [read[i] and read[i].prompt for i in range(4)] == [good["prompt"], None, good["prompt"], None]
        assert held.num_bad_rows == 2 and read.num_bad_rows == 2
        with pytest.raises(UserError, match="holds no \\(readable\\) rows"):
            Dataset(f"{path}@[1:2]", tokenizer, None, 5, allow_bad_rows=True)
        with pytest.raises(UserError, match="prompt 1: the chat template refused the prompt"):
            filter_long_prompt([Sample(prompt=row["prompt"]) for row in (good, bad)], tokenizer, None, 5)

    def test_no_limit(self):
        samples = [Sample(prompt="abc")]
        assert filter_long_prompt(samples, None, None, None) is samples
