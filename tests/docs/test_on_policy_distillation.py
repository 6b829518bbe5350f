"""The page on distillation: its flags are taken, and its function grades and asks the teacher."""

import asyncio
import re
from pathlib import Path

import slime.rollout.on_policy_distillation as distillation
from slime.utils.types import Sample
from tests.support.models.args import parse
from tests.support.tables.page import blocks

PAGE = Path(__file__).parents[2] / "docs/en/advanced/on-policy-distillation.md"


def test_a_teacher_behind_http(tmp_path):
    text = PAGE.read_text()
    functions = [
        word for flag in ("rm", "reward-post-process") for word in re.findall(rf"--custom-{flag}-path slime\S+\b", text)
    ]
    assert len(functions) == 2
    words = ["--use-opd", *re.search(r"--opd-type sglang --rm-url http://HOST:30000", text)[0].split()]
    args = parse(tmp_path, *words, *" ".join(functions).split())
    assert args.use_opd and args.rm_url == "http://HOST:30000"


def test_the_function_of_the_page_grades_and_asks(monkeypatch):
    asked = []

    async def ask(args, sample):
        asked.append(sample.index)

    monkeypatch.setattr(distillation, "reward_func", ask)
    [code] = [text for kind, text in blocks(PAGE) if kind == "python"]
    names: dict = {}
    exec(compile(code, str(PAGE), "exec"), names)
    sample = Sample(index=3, response=r"so \boxed{85}", label="85")
    assert asyncio.run(names["reward"](None, sample, evaluation=True)) == 1.0 and asked == []
    assert asyncio.run(names["reward"](None, sample)) == 1.0 and asked == [3]
