"""The page on distillation: its flags are taken, and its function grades and asks the teacher."""

import asyncio
import re
from pathlib import Path

import slime.rollout.on_policy_distillation as distillation
from slime.arguments import build_parser
from slime.utils.types import Sample
from tests.support.models.args import parse, write_config
from tests.support.tables.page import blocks
from tools import serve_megatron_teacher

TOOL = "tools/serve_megatron_teacher.py"
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


def test_the_commands_of_a_teacher_on_megatron_ranks_are_taken(tmp_path):
    """Every flag that the section names is the tool's own or one of a run, and every path is a route."""
    text = PAGE.read_text().partition("## A teacher on Megatron ranks")[2].partition("\n## ")[0]
    commands = [source.replace("\\\n", " ").split() for kind, source in blocks(PAGE) if "serve_megatron" in source]
    assert len(commands) == 2
    model = write_config(tmp_path / "model", num_attention_heads=8, num_key_value_heads=8)
    for command in commands:
        words = [str(model) if word == "TEACHER" else word for word in command]
        given, others = serve_megatron_teacher.make_parser().parse_known_args(words[words.index(TOOL) + 1 :])
        ranks = serve_megatron_teacher.ranks_of_copy(given)
        assert ranks == (2 * int(command[command.index("--nproc-per-node") + 1]) if "torchrun" in command else 4)
        assert serve_megatron_teacher.parse_model(given, others, 1, ranks).bf16
    own = {option for action in serve_megatron_teacher.make_parser()._actions for option in action.option_strings}
    named = set(re.findall(r"`(--[a-z][\w-]+)", text))
    of_a_run = {"--load", "--bf16", "--rm-url", "--distributed-timeout-minutes"}
    assert named - own == of_a_run and of_a_run <= set(build_parser()._option_string_actions)
    source = (PAGE.parents[3] / "tools/teacher/server.py").read_text()
    routes = {f"/{name}" for name in re.findall(r'"(detect|healthz|info|get_loads)"', source)}
    routes |= set(re.findall(r'add_post\("(/\w+)"', source))
    assert set(re.findall(r"(?:GET|POST|,) `?(/\w+)`", text)) | set(re.findall(r"POST (/\w+)", text)) == routes
