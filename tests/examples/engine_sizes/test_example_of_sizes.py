"""The file of the example: it stands on its page, and is taken."""

from pathlib import Path

from tests.support.models.args import parse

ROOT = Path(__file__).parents[3]
FILE = ROOT / "examples/engine_sizes/serving.yaml"


def test_the_page_shows_the_file():
    assert f"```yaml\n{FILE.read_text()}```" in (ROOT / "docs/en/advanced/sglang-config.md").read_text()


def test_a_run_takes_it(tmp_path):
    assert parse(tmp_path, "--sglang-config", str(FILE), "--rollout-num-gpus", "5").rollout_num_engines == 3
