"""The learning benchmark without its runs: recipes, curves, tables, pictures, and the delay of off-policy answers."""

import argparse
import dataclasses
import functools
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from slime.arguments import parse_args
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.utils.types import Sample
from tests.support.models.args import command_line
from tools.bench import bench_examples, bench_learning, delayed_rollout, learning_curves, learning_recipes
from tools.bench.delayed_rollout import DelayLine
from tools.bench.learning_curves import Run
from tools.bench.learning_recipes import ESTIMATORS, RECIPES, STUDIES, names_of

ROOT = Path(__file__).parents[3]


def make_run(seed=0, accuracy=(0.4, 0.6, 0.8), seconds=100.0, recipe="grpo", staleness=None):
    curves = {"eval/held_out": {0: accuracy[0], 3: accuracy[1], 6: accuracy[2]}}
    if staleness is not None:
        curves["rollout/staleness"] = staleness
    return Run(recipe, seed, RECIPES[recipe].flags, RECIPES[recipe].rollouts, seconds, curves)


class TestRecipes:
    @pytest.mark.parametrize("name", RECIPES)
    def test_flags_are_known_and_their_files_there(self, name, monkeypatch, tmp_path):
        monkeypatch.chdir(ROOT)
        base = ["--num-steps-per-rollout", "1", "--ref-load", str(tmp_path / "model"), "--use-kl-loss"]
        base += ["--eval-prompt-data", "held_out", str(tmp_path / "prompts.jsonl")]
        # As the quick start has it.
        base += ["--save", str(tmp_path / "checkpoints")]
        words = [*command_line(tmp_path), *base, *RECIPES[name].flags]
        args = parse_args(argv=words, asynchronous="--async" in RECIPES[name].words)
        assert not [word for word in RECIPES[name].flags if word.endswith(".yaml") and not Path(word).is_file()]
        assert getattr(args, "rollout_delay", 0) == (4 if name.startswith("off_policy") else 0)

    def test_all_estimators_and_dr_grpo(self):
        estimators = {word for recipe in RECIPES.values() for word in recipe.flags if word in names_of([ESTIMATORS])}
        assert estimators | {"dr_grpo"} == set(names_of([ESTIMATORS]))
        assert names_of(["ppo", "grpo"]) == ["grpo", "ppo"]

    def test_an_unknown_name_is_refused(self):
        with pytest.raises(ValueError, match="--recipes gpro: there are estimators, off-policy, arrangements, grpo"):
            names_of(["gpro"])


class TestCurves:
    def test_event_files_and_json_give_the_same_run(self, tmp_path):
        with SummaryWriter(str(tmp_path / "tensorboard")) as writer:
            for step, value in [(0, 0.25), (3, 0.5), (6, 0.75)]:
                writer.add_scalar("eval/held_out", value, step)
            writer.add_scalar("rollout/staleness", 4.0, 1)
            writer.add_scalar("perf/step_time", 1.0, 1)
        found = learning_curves.kept_curves(tmp_path)
        assert found == {"eval/held_out": {0: 0.25, 3: 0.5, 6: 0.75}, "rollout/staleness": {1: 4.0}}
        run = Run("grpo", 1, ("--seed", "1"), 6, 12.5, found)
        learning_curves.save_run(run, tmp_path / "results" / "run.json")
        assert learning_curves.load_run(tmp_path / "results" / "run.json") == run
        assert (run.before, run.after, run.gain, run.mean_accuracy, run.staleness) == (0.25, 0.75, 0.5, 0.625, 4)

    def test_a_run_without_evaluations_is_refused(self, tmp_path):
        with SummaryWriter(str(tmp_path)) as writer:
            writer.add_scalar("rollout/raw_reward", 1.0, 0)
        with pytest.raises(ValueError, match="no eval/held_out"):
            learning_curves.kept_curves(tmp_path)

    def test_only_steps_that_all_seeds_share(self):
        one, other = make_run(accuracy=(0.2, 0.4, 0.6)), make_run(accuracy=(0.4, 0.8, 1.0))
        del other.accuracy[3]
        steps, mean, low, high = learning_curves.mean_curve([one, other])
        assert (steps, low, high) == ([0, 6], [0.2, 0.6], [0.4, 1.0])
        assert mean == pytest.approx([0.3, 0.8])


class TestTables:
    def test_an_estimator(self):
        row = learning_curves.estimator_row("GRPO", [make_run(), make_run(1, (0.5, 0.6, 0.8), 180)])
        assert row == ["GRPO", "2", "15", "0.450 ± 0.071", "0.800 ± 0.000", "+0.300", "met"]

    @pytest.mark.parametrize("bad", [{"accuracy": (0.5, 0.9, 0.69)}, {"seconds": 181}])
    def test_one_bad_seed_misses_the_bar(self, bad):
        assert learning_curves.estimator_row("GRPO", [make_run(), make_run(1, **bad)])[-1] == "missed"

    def test_a_correction(self):
        runs = [make_run(accuracy=(0, 0.25, 0.75), staleness={0: 0.0, 9: 4.0}), make_run(accuracy=(0, 0.5, 0.5))]
        assert learning_curves.off_policy_row("TIS", runs[:1]) == ["TIS", "1", "4", "0.500", "0.750", "0.750"]
        assert learning_curves.off_policy_row("TIS", runs)[2:] == ["4, ?", "0.500 ± 0.000", "0.625 ± 0.177", "0.500"]

    def test_a_table_in_its_place(self):
        page = "a\n<!-- x table: begin -->\nold\n<!-- x table: end -->\nb\n"
        table = learning_curves.markdown(("A", "B"), [("c", "1")])
        assert learning_curves.with_table(page, "x", table) == page.replace(
            "old", "| A | B |\n| --- | ---: |\n| c | 1 |"
        )
        with pytest.raises(ValueError, match="y table: begin"):
            learning_curves.with_table(page, "y", table)

    def test_docs_and_pictures(self, tmp_path, monkeypatch):
        page = (ROOT / "docs/en/advanced/learning.md").read_text()
        monkeypatch.setattr(bench_learning, "PAGE", tmp_path / "learning.md")
        monkeypatch.setattr(bench_learning, "KEPT", tmp_path / "learning-runs.json")
        bench_learning.PAGE.write_text(page)
        learning_curves.save_run(make_run(), bench_learning.result_path("grpo", 0, tmp_path))
        bench_learning.write_docs(bench_learning.read_results(tmp_path))
        assert "| GRPO | 1 | 15 | 0.400 | 0.800 | +0.400 | met |" in bench_learning.PAGE.read_text()
        picture = tmp_path / "learning-estimators.svg"
        drawn = picture.read_text()
        assert "<svg" in drawn and ">GRPO<" in drawn and len(drawn) < 60_000
        bench_learning.write_docs(bench_learning.read_results(tmp_path))
        assert picture.read_text() == drawn
        # Nothing is known of the other study, so the page keeps what it says.
        assert not (tmp_path / "learning-off-policy.svg").exists()

    def test_runs_of_other_machines_stay_in_the_page(self, tmp_path, monkeypatch):
        """What the page keeps of a run is what it shows: the accuracy, and how old answers were."""
        monkeypatch.setattr(bench_learning, "PAGE", tmp_path / "learning.md")
        monkeypatch.setattr(bench_learning, "KEPT", tmp_path / "learning-runs.json")
        bench_learning.PAGE.write_text((ROOT / "docs/en/advanced/learning.md").read_text())
        runs = {("grpo", 0): 0.8, ("grpo", 1): 0.9, ("off_policy", 0): 0.3}
        for (name, seed), after in runs.items():
            run = make_run(seed, (0.4, 0.6, after), recipe=name, staleness={5: 4.0})
            run.curves["train/kl_loss"] = {0: 0.1}
            first = tmp_path / f"machine-{name}-{seed}"
            learning_curves.save_run(run, bench_learning.result_path(name, seed, first))
            bench_learning.write_docs(bench_learning.read_results(first))
        kept = bench_learning.read_results(tmp_path / "another machine")
        assert {(name, run.seed): run.after for name, runs in kept.items() for run in runs} == runs
        assert {metric for runs in kept.values() for run in runs for metric in run.curves} == {
            "eval/held_out",
            "rollout/staleness",
        }
        page = bench_learning.PAGE.read_text()
        assert "| GRPO | 2 | 15 | 0.400 ± 0.000 | 0.850 ± 0.071 |" in page and "| no correction | 1 | 4 |" in page
        # A run of this machine counts, not the one that the page has of the same recipe and seed.
        learning_curves.save_run(make_run(1, (0.4, 0.6, 0.7)), bench_learning.result_path("grpo", 1, tmp_path))
        assert [run.after for run in bench_learning.read_results(tmp_path)["grpo"]] == [0.8, 0.7]

    def test_examples_join_those_of_the_page(self, tmp_path, monkeypatch):
        for name, value in {
            "PAGE": "examples.md", "PICTURE": "learning-examples.svg", "KEPT": "learning-examples.json", "RESULTS": "results",
        }.items():  # fmt: skip
            monkeypatch.setattr(bench_examples, name, tmp_path / value)
        bench_examples.PAGE.write_text((ROOT / "docs/en/advanced/examples.md").read_text())
        run = Run("retool", 0, ("--eval-interval", "5"), 5, 60.4, {"eval/held_out": {0: 0.25, 5: 0.5}})
        bench_examples.write_docs({"retool": run})
        other = dataclasses.replace(run, recipe="calculator", seconds=90)
        learning_curves.save_run(other, bench_examples.RESULTS / "calculator.json")
        monkeypatch.setattr("sys.argv", ["bench_examples.py", "--write-docs"])
        assert bench_examples.main() == 0
        rows = "| `calculator` | 0.250 | 0.500 | 90 |\n| `retool` | 0.250 | 0.500 | 60 |\n<!--"
        assert rows in bench_examples.PAGE.read_text()
        picture = bench_examples.PICTURE.read_text()
        assert ">calculator<" in picture and ">retool<" in picture

    @pytest.mark.parametrize("kept", [bench_learning.KEPT, bench_examples.KEPT], ids=lambda path: path.name)
    def test_what_the_pages_keep_is_of_runs_that_there_are(self, kept):
        runs = learning_curves.known_runs(kept.parent / "no results", kept)
        names = {
            bench_learning.result_path(run.recipe, run.seed, ROOT).stem
            for run in runs.values()
            if run.recipe in RECIPES
        }
        assert set(runs) <= names | set(bench_examples.EXAMPLES)

    @pytest.mark.parametrize(
        "changes",
        [{"flags": ("--lr", "1")}, {"words": ("--async",)}, {"rollouts": 16}, {"file": "delay: 5"}, {"title": "G"}],
    )
    def test_results_of_a_recipe_that_was_changed_do_not_count(self, tmp_path, monkeypatch, changes):
        """A title is no part of what is run."""
        monkeypatch.setattr(learning_recipes, "ROOT", tmp_path)
        monkeypatch.setattr(bench_learning, "KEPT", tmp_path / "none of a page")
        config, flags = tmp_path / "delay.yaml", ("--custom-config-path", "delay.yaml")
        config.write_text("delay: 4")
        recipe = dataclasses.replace(RECIPES["grpo"], flags=flags)
        monkeypatch.setitem(RECIPES, "grpo", recipe)
        asked = []
        monkeypatch.setattr(bench_learning, "quickstart", lambda *words: asked.append(words) or 100.0)
        monkeypatch.setattr(learning_curves, "kept_curves", lambda directory: make_run().curves)
        first = bench_learning.result_of("grpo", 0, tmp_path)
        assert bench_learning.read_results(tmp_path) == {"grpo": [first]} and len(asked) == 1
        same = "title" in changes
        config.write_text(changes.get("file", "delay: 4"))
        fields = {name: value for name, value in changes.items() if name != "file"}
        monkeypatch.setitem(RECIPES, "grpo", dataclasses.replace(recipe, **fields))
        assert bench_learning.read_results(tmp_path) == ({"grpo": [first]} if same else {})
        second = bench_learning.result_of("grpo", 0, tmp_path)
        assert bench_learning.read_results(tmp_path) == {"grpo": [second]}
        assert len(asked) == (1 if same else 2)


class TestDelay:
    @pytest.mark.parametrize("delay", [0, 1, 4])
    def test_batches_leave_in_order_and_as_old_as_the_delay(self, delay):
        line, made = DelayLine(delay), []

        def generate(version):
            made.append((version, len(made)))
            return made[-1]

        for version in range(8):
            oldest, newest = line.exchange(functools.partial(generate, version))
            assert newest[0] == version and newest == made[-1]
            assert oldest == made[version], "no batch is left out or given twice"
            assert version - oldest[0] == min(version, delay)

    def test_the_rollout_function_reports_the_versions_of_its_samples(self, monkeypatch):
        version, line = 0, DelayLine(2)

        def generate(args, rollout_id, data_source, evaluation):
            if evaluation:
                return RolloutFnEvalOutput({})
            samples = [[Sample(index=rollout_id, weight_versions=[str(version)]) for _ in range(2)]]
            return RolloutFnTrainOutput(samples, {"made_in": rollout_id})

        monkeypatch.setattr(delayed_rollout.sglang_rollout, "generate_rollout", generate)
        monkeypatch.setattr(delayed_rollout, "_line_of_this_process", lambda delay: line)
        args, seen = argparse.Namespace(rollout_delay=2), []
        for version in range(1, 6):
            assert delayed_rollout.generate_rollout(args, version, None, evaluation=True) == RolloutFnEvalOutput({})
            output = delayed_rollout.generate_rollout(args, version, None)
            seen.append((output.samples[0][0].index, output.metrics))
        assert [metrics["staleness"] for _, metrics in seen] == [0, 1, 2, 2, 2]
        assert [index for index, _ in seen] == [1, 1, 1, 2, 3] == [metrics["made_in"] for _, metrics in seen]


def test_studies_have_their_marks_in_the_page():
    page = (ROOT / "docs/en/advanced/learning.md").read_text()
    for study in STUDIES:
        assert learning_curves.with_table(page, study, "x") and f"(learning-{study}.svg)" in page
