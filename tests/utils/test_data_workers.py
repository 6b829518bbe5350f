"""Rows that other processes prepare: the same samples in the same order, and the same errors, whatever the data set."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tokenizers.processors import TemplateProcessing

from slime.utils import data_workers
from slime.utils.child_process import environment_for_python
from slime.utils.data_workers import DataWorkers, Preparation
from slime.utils.dataset import Dataset, RowKeys, StreamedDataset
from slime.utils.epoch_order import epoch_order
from slime.utils.errors import RunError, UserError
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.prompt_rows import PromptRow
from tests.support.models.tokenizer import build_tokenizer, save_tokenizer
from tests.support.models.vision import make_seeing_checkpoint, save_image
from tests.support.processes.forked_workers import workers_forked
from tests.support.processes.waiting import runs, wait_until

LIMIT = 60
TOOLS = [{"name": "calc", "description": "adds"}]
# The template adds it to a text.
REFUSED = {"prompt": [{"role": "user", "content": 5}]}


def preparation(checkpoint, *, template=True, measures=True, sees_images=False, trusted=False):
    return Preparation(checkpoint, trusted, template, {"x": 1}, measures, sees_images)


@pytest.fixture(scope="module", autouse=True)
def forked():
    """Workers that may import torch start as in a run, and so do those of a manager that is killed."""
    with workers_forked():
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    return make_seeing_checkpoint(tmp_path_factory.mktemp("seeing"))


def ended(workers):
    workers.close()
    return not any(worker._process.is_alive() for worker in workers._workers)


@pytest.fixture(scope="module")
def rendering(checkpoint):
    workers = DataWorkers(2, preparation(checkpoint))
    yield workers
    assert ended(workers)


@pytest.fixture(scope="module")
def measuring(checkpoint):
    workers = DataWorkers(2, preparation(checkpoint, template=False))
    yield workers
    assert ended(workers)


@pytest.fixture
def write_rows(tmp_path):
    def write(rows, name="rows.jsonl"):
        (tmp_path / name).write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return str(tmp_path / name)

    return write


def many_rows(count=300):
    kinds = (
        lambda n: {"prompt": f"What is {n} plus {n}?" + " more" * (n % 11), "label": 2 * n, "metadata": {"n": [n]}},
        lambda n: {"prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "u" * (n % 70)}]},
        lambda n: {"prompt": [{"role": "user", "content": f"call {n}"}], "tools": json.dumps(TOOLS), "metadata": {"n": n}},
    )  # fmt: skip
    return [kinds[n % 3](n) for n in range(count)]


def held(path, tokenizer, workers, *, template=True, bad=False, limit=LIMIT, processor=None, images=None):
    return Dataset(
        path, tokenizer, processor, limit, apply_chat_template=template, apply_chat_template_kwargs={"x": 1},
        allow_bad_rows=bad, workers=workers, multimodal_keys=images and {"image": images},
    )  # fmt: skip


def streamed(path, tokenizer, workers, *, template=True, bad=False, limit=LIMIT, processor=None, images=None):
    return StreamedDataset(
        path, tokenizer, limit, keys=RowKeys(None, None, "tools", "metadata", images=images), seed=42,
        apply_chat_template=template, apply_chat_template_kwargs={"x": 1}, allow_bad_rows=bad, processor=processor,
        workers=workers,
    )  # fmt: skip


def drawn(dataset, orders):
    return [dataset.in_order(order, offset) for order in orders for offset in range(len(order))]


@pytest.fixture(params=[True, False], ids=["rendered", "not rendered"])
def template(request):
    return request.param


class TestSameSamples:
    def test_files_slices_weights_and_a_bad_row(self, write_rows, checkpoint, rendering, measuring, template, caplog):
        caplog.set_level("INFO")
        rows = many_rows()
        rows[150:150] = ["{broken", {"prompt": None}, *[REFUSED if template else "[1]"] * 70]
        paths = [
            write_rows(rows) + "@[7:-3]",
            write_rows(many_rows(5), "few.jsonl"),
            write_rows(rows[:90], "c.jsonl") + "*2",
        ]
        tokenizer, workers = load_tokenizer(checkpoint), rendering if template else measuring
        one, other = (held(paths, tokenizer, by, template=template, bad=True) for by in (None, workers))
        assert other.samples == one.samples and 100 < len(one.samples) < 370
        assert other.parts == one.parts and other.fingerprint() == one.fingerprint()
        assert other.num_bad_rows == one.num_bad_rows == 72
        told = [record.getMessage() for record in caplog.records if "left out" in record.message]
        assert len(told) > 2 and told[: len(told) // 2] == told[len(told) // 2 :]

    def test_special_tokens_count_where_no_template_writes_them(self, write_rows, tmp_path, template):
        tokenizer, begin = build_tokenizer(), "<|endoftext|>"
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, tokenizer.convert_tokens_to_ids(begin))]
        )
        tokenizer.save_pretrained(str(tmp_path))
        path = write_rows([{"prompt": "x" * length} for length in range(1, LIMIT + 1)])
        workers = DataWorkers(1, preparation(str(tmp_path), template=template))
        by_workers = held(path, load_tokenizer(str(tmp_path)), workers, template=template)
        assert ended(workers)
        # The frame of a message and the begin of the answer have 19 tokens.
        assert len(by_workers.samples) == LIMIT - (19 if template else 1)

    def test_streamed_over_epochs_and_from_any_place(self, write_rows, checkpoint, rendering, measuring, template):
        rows = many_rows(200)
        rows[20] = rows[130] = "{broken"
        rows[21] = REFUSED if template else "[1]"
        paths = [write_rows(rows), write_rows(many_rows(9), "few.jsonl") + "*3"]
        tokenizer, workers = load_tokenizer(checkpoint), rendering if template else measuring
        one, other = (streamed(paths, tokenizer, by, template=template, bad=True) for by in (None, workers))
        orders = [epoch_order(one.parts, 3, epoch, shuffled=True) for epoch in range(2)]
        orders += [epoch_order(one.parts, 3, 0, shuffled=False)]
        assert drawn(other, orders) == drawn(one, orders)
        assert (other.num_bad_rows, other.num_long_prompts) == (one.num_bad_rows, one.num_long_prompts)
        assert one.num_long_prompts > 20 and one.num_bad_rows >= 5
        # As after a resume, and where a row is asked for beside the others.
        for offset in (100, 101, 40, 41, 199):
            assert other.in_order(orders[0], offset) == one.in_order(orders[0], offset)
            assert other[3] == one[3]

    def test_another_order_at_the_next_place_and_rows_that_were_shuffled_meanwhile(
        self, write_rows, checkpoint, rendering
    ):
        """What was prepared for one order is no row of another, though the place in it is the next one."""
        tokenizer, path = load_tokenizer(checkpoint), write_rows(many_rows(60))
        one, other = (streamed(path, tokenizer, by, limit=None) for by in (None, rendering))
        orders = [epoch_order(one.parts, 3, epoch, shuffled=True) for epoch in range(2)]
        for order, offset in ((orders[0], 0), (orders[0], 1), (orders[1], 2), (orders[0], 3), (orders[0], 4)):
            assert other.in_order(order, offset) == one.in_order(order, offset)
        for dataset in (one, other):
            dataset.shuffle(1)
        for offset in (5, 6):
            assert other.in_order(orders[0], offset) == one.in_order(orders[0], offset)

    def test_parquet_and_what_json_has_not(self, tmp_path, checkpoint, rendering):
        import pyarrow
        from pyarrow import parquet

        path = str(tmp_path / "rows.parquet")
        rows = [{"prompt": [{"role": "user", "content": f"{n}"}], "label": b"\xff%d" % n} for n in range(150)]
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        tokenizer = load_tokenizer(checkpoint)
        one, other = (held(path, tokenizer, by).samples for by in (None, rendering))
        assert other == one and len(one) == 150 and one[0].label == b"\xff0"

    def test_prompts_with_images(self, tmp_path, write_rows, seeing):
        image = save_image(tmp_path / "red.png")
        rows = [{"prompt": f"<image> and {n} <image>", "images": ["red.png", image]} for n in range(70)]
        rows[40:40] = [
            {"prompt": "text alone"},
            {"prompt": "l" * 99},
            {"prompt": "<image> too long " * 20, "images": [image] * 20},
        ]
        path, tokenizer, processor = write_rows(rows), load_tokenizer(seeing), load_processor(seeing)
        workers = DataWorkers(1, preparation(seeing, template=False, sees_images=True))
        options = {"template": False, "processor": processor, "images": "images"}
        one, other = (held(path, tokenizer, by, **options).samples for by in (None, workers))
        assert other == one and len(one) == 71 and other[3].multimodal_inputs == {"images": [image] * 2}
        assert [getattr(sample, "data_place", None) for sample in other] == [
            getattr(sample, "data_place", None) for sample in one
        ]
        # It begins as an image, which is all that is looked at before it is decoded.
        content = Path(image).read_bytes()
        (tmp_path / "half.png").write_bytes(content[: len(content) // 2])
        rows[55]["images"][0] = "half.png"
        path = write_rows(rows)
        for by in (None, workers):
            with pytest.raises(UserError, match=r"rows.jsonl:56: an image could not be read from .*half.png"):
                held(path, tokenizer, by, **options)
            dataset, order = streamed(path, tokenizer, by, **options), range(len(rows))
            assert [dataset.in_order(order, offset) for offset in range(55)][-1].data_place.endswith(":55")
            with pytest.raises(UserError, match=r"rows.jsonl:56: an image could not be read from .*half.png"):
                dataset.in_order(order, 55)
            assert dataset.in_order(order, 56).data_place.endswith(":57")
        assert ended(workers)


class TestSameErrors:
    @pytest.mark.parametrize(
        "changes, message",
        [
            ({100: REFUSED, 70: "[1]"}, "rows.jsonl:71: expected a JSON object"),
            ({100: "[1]", 70: REFUSED}, "rows.jsonl:71: the chat template refused 'prompt' \\(TypeError"),
            ({0: {"question": "q"}, 1: "[1]"}, "rows.jsonl:1: the row has neither `prompt` nor `input`"),
            ({290: {"prompt": []}}, "rows.jsonl:291: 'prompt' is an empty list of messages"),
        ],
    )
    def test_of_two_bad_rows_the_first_is_told(self, write_rows, checkpoint, rendering, changes, message):
        rows = many_rows()
        for place, row in changes.items():
            rows[place] = row
        path, tokenizer = write_rows(rows), load_tokenizer(checkpoint)
        for workers in (None, rendering):
            with pytest.raises(UserError, match=message):
                held(path, tokenizer, workers)
            if 0 in changes:
                continue
            dataset, first, order = streamed(path, tokenizer, workers), min(changes), range(300)
            assert len([dataset.in_order(order, offset) for offset in range(first)]) == first
            with pytest.raises(UserError, match=message):
                dataset.in_order(order, first)

    @pytest.mark.parametrize("changes, found", [({100: "[1]", 70: REFUSED}, 71), ({100: REFUSED, 70: "[1]"}, 71)])
    def test_a_chat_that_is_only_measured(self, write_rows, checkpoint, measuring, changes, found):
        rows = many_rows()
        for place, row in changes.items():
            rows[place] = row
        path, tokenizer = write_rows(rows), load_tokenizer(checkpoint)
        message = (
            "the chat template refused the prompt \\(TypeError" if rows[70] == REFUSED else "expected a JSON object"
        )
        counts = []
        for workers in (None, measuring):
            with pytest.raises(UserError, match=f"rows.jsonl:{found}: {message}.*--allow-bad-rows"):
                held(path, tokenizer, workers, template=False)
            dataset, order = streamed(path, tokenizer, workers, template=False), range(300)
            assert len([dataset.in_order(order, offset) for offset in range(70)]) == 70
            with pytest.raises(UserError, match=f"rows.jsonl:{found}: {message}.*--allow-bad-rows"):
                dataset.in_order(order, 70)
            kept = held(path, tokenizer, workers, template=False, bad=True)
            read = streamed(path, tokenizer, workers, template=False, bad=True)
            taken = [sample for sample in drawn(read, [range(300)]) if sample is not None]
            assert taken == kept.samples and kept.num_bad_rows == read.num_bad_rows == 2
            counts.append(len(taken))
        assert counts[0] == counts[1] > 100

    def test_nothing_left_and_a_file_that_breaks_off(self, write_rows, tmp_path, checkpoint, rendering):
        tokenizer = load_tokenizer(checkpoint)
        for workers in (None, rendering):
            with pytest.raises(UserError, match="none of the 300 prompts has at most 1 tokens"):
                held(write_rows(many_rows()), tokenizer, workers, limit=1)
            with pytest.raises(UserError, match="holds no \\(readable\\) rows"):
                held(write_rows([REFUSED] * 3), tokenizer, workers, bad=True)

    def test_a_file_that_is_changed_meanwhile(self, write_rows, checkpoint, rendering):
        dataset, order = streamed(write_rows(many_rows(1000)), load_tokenizer(checkpoint), rendering), range(1000)
        dataset.in_order(order, 0)
        write_rows(many_rows(999))
        with pytest.raises(UserError, match="was changed while the run reads it"):
            for offset in range(1, 1000):
                dataset.in_order(order, offset)


def rows_of(path, count=100_000, taken=None):
    keys = RowKeys("prompt", None, None, None)
    for number in range(count):
        if taken is not None:
            taken.append(number)
        yield PromptRow(keys, f"{path}:{number + 1}", {"prompt": f"p{number}"})


def test_rows_are_read_ahead_within_a_bound(rendering):
    taken = []
    prepared = rendering.prepare(rows_of("a", taken=taken))
    for number in range(500):
        assert next(prepared).sample.prompt.startswith(f"<|im_start|>user\np{number}<|im_end|>")
        assert len(taken) <= number + 64 * 2 * 2 + 64


def test_a_worker_that_dies_is_named_and_ends_the_others(checkpoint):
    workers = DataWorkers(2, preparation(checkpoint))
    prepared = workers.prepare(rows_of("a.jsonl"))
    next(prepared)
    victim = workers._workers[1]._process
    os.kill(victim.pid, signal.SIGKILL)
    named = rf"^data worker 2 of 2 \(--num-data-workers; process {victim.pid}\)"
    with pytest.raises(RunError, match=rf"{named}, .* a.jsonl:\d+ to a.jsonl:\d+: ended by SIGKILL"):
        for _ in prepared:
            pass
    assert not any(worker._process.is_alive() for worker in workers._workers)
    # Whoever goes on all the same is told again.
    with pytest.raises(RunError, match=r"^data worker 1 of 2 .* b.jsonl:1 to b.jsonl:64: "):
        next(workers.prepare(rows_of("b.jsonl")))


def test_a_worker_that_does_not_answer_is_named_and_killed(checkpoint, monkeypatch):
    workers = DataWorkers(1, preparation(checkpoint))
    prepared = workers.prepare(rows_of("a.jsonl"))
    next(prepared)
    victim = workers._workers[0]._process
    os.kill(victim.pid, signal.SIGSTOP)
    monkeypatch.setattr(data_workers, "_BATCH_SECONDS", 0.5)
    with pytest.raises(
        RunError, match=rf"^data worker 1 of 1 \(.*process {victim.pid}\), .* a.jsonl:\d+: no answer for 0.5 s"
    ):
        for _ in prepared:
            pass
    assert not victim.is_alive()


def test_who_interrupts_a_run_means_none_of_its_workers(rendering):
    def count():
        return sum(row.sample is not None for row in rendering.prepare(rows_of("a", 300)))

    assert count() == 300
    for worker in rendering._workers:
        os.kill(worker._process.pid, signal.SIGINT)
    assert count() == 300


def test_all_workers_are_told_to_end_before_one_is_waited_for(checkpoint, monkeypatch):
    workers, deadlines = DataWorkers(3, preparation(checkpoint)), []
    await_end = data_workers._Worker._await_end

    def noted(worker, deadline):
        # Later, one that took too long may have been killed, and its pool then says so.
        for each in [] if deadlines else workers._workers:
            with pytest.raises(RuntimeError, match="after shutdown"):
                each._pool.submit(int)
        deadlines.append(deadline)
        await_end(worker, deadline)

    monkeypatch.setattr(data_workers._Worker, "_await_end", noted)
    assert ended(workers)
    # Each is waited for twice, by itself first.
    assert len(deadlines) == 6 and len(set(deadlines[::2])) == 1


def test_a_tokenizer_that_cannot_be_loaded(tmp_path):
    with pytest.raises(
        RunError, match=r"^data worker 1 of 1 .* a.jsonl:1 to a.jsonl:64: UserError: .*no tokenizer could be loaded"
    ):
        next(DataWorkers(1, preparation(str(tmp_path))).prepare(rows_of("a.jsonl")))


CODE = """
import torch
from transformers import PreTrainedTokenizerFast


class OwnTokenizer(PreTrainedTokenizerFast):
    def apply_chat_template(self, conversation, **keywords):
        return f"own {torch.arange(3).tolist()} {conversation[0]['content']}"
"""


def test_a_tokenizer_whose_code_is_its_own(tmp_path, write_rows, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = Path(save_tokenizer(tmp_path / "own"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["own_tokenizer.OwnTokenizer", "own_tokenizer.OwnTokenizer"]}}
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "OwnTokenizer"}))
    (path / "own_tokenizer.py").write_text(CODE)
    workers = DataWorkers(1, preparation(str(path), trusted=True))
    tokenizer = load_tokenizer(str(path), trust_remote_code=True)
    one, other = (held(write_rows([{"prompt": "a"}]), tokenizer, by).samples for by in (None, workers))
    assert other == one and one[0].prompt == "own [0, 1, 2] a" and ended(workers)


# Neither guarded nor cheap, as the program of an actor; with a copy of itself, as a plug-in's pool has.
MANAGER = """
import multiprocessing, os, sys, time
import ray
from slime.utils.data_workers import DataWorkers, Preparation
from slime.utils.prompt_rows import PromptRow, RowKeys
workers = DataWorkers(2, Preparation(sys.argv[1], False, True, {}, True, False))
rows = [PromptRow(RowKeys("prompt", None, None, None), "a:1", {"prompt": "p"})] * 100
assert all(row.sample is not None for row in workers.prepare(rows))
if os.fork():
    open(sys.argv[2], "w").write(" ".join(str(child.pid) for child in multiprocessing.active_children()) + "\\n")
time.sleep(600)
"""


def test_workers_are_light_and_end_with_a_manager_that_is_killed(checkpoint, tmp_path):
    (tmp_path / "manager.py").write_text(MANAGER)
    file = tmp_path / "pids"
    manager = subprocess.Popen(
        [sys.executable, str(tmp_path / "manager.py"), checkpoint, str(file)], env=environment_for_python()
    )
    try:
        wait_until(lambda: manager.poll() is not None or (file.exists() and file.read_text().endswith("\n")), 300)
        assert manager.poll() is None
        workers = [psutil.Process(int(pid)) for pid in file.read_text().split()]
        others = [child for child in psutil.Process(manager.pid).children() if child not in workers]
        assert len(workers) == 2
        for worker in workers:
            libraries = Path(f"/proc/{worker.pid}/maps").read_text()
            assert "tokenizers" in libraries and "libtorch" not in libraries and "_raylet" not in libraries
    finally:
        manager.kill()
        manager.wait(60)
    wait_until(lambda: not any(map(runs, workers)), 60)
    for other in others:
        other.kill()
