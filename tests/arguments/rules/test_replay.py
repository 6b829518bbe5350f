import pytest

from tests.support.args import parse
from tests.support.rules import assert_violation, violations

EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 "


@pytest.mark.parametrize("flag", ["--use-routing-replay", "--use-rollout-routing-replay"])
def test_a_model_without_experts_has_nothing_to_replay(tmp_path, flag):
    message = "the model has no experts (--num-experts), so there is no routing to replay; drop the flag"
    assert_violation(tmp_path, flag, f"{flag}: {message}")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--loss-type sft_loss", "nobody has chosen experts for these samples before"),
        ("--moe-router-fusion", "the kernel of --moe-router-fusion chooses experts by itself"),
        (
            "--moe-router-load-balancing-type sinkhorn",
            "--moe-router-load-balancing-type sinkhorn assigns experts over all",
        ),
        (
            "--moe-router-load-balancing-type aux_loss sinkhorn --moe-aux-loss-coeff 0.1 0.1",
            "--moe-router-load-balancing-type sinkhorn assigns experts over all",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused(tmp_path, words, part):
    lines = violations(tmp_path, f"{EXPERTS} --use-routing-replay {words}")
    assert any(line.startswith("--use-routing-replay") and part in line for line in lines), "\n".join(lines)


def test_the_flag_itself_is_no_reason_to_refuse(tmp_path):
    lines = violations(tmp_path, f"{EXPERTS} --use-routing-replay")
    assert not any("replay" in line for line in lines), "\n".join(lines)


def test_the_experts_of_the_engines_are_not_asked_for_yet(tmp_path):
    args = parse(tmp_path, "--use-rollout-routing-replay", "--dry-run", "--debug-rollout-only")
    assert args.use_routing_replay
    assert any(note.startswith("--use-rollout-routing-replay: asking the engines") for note in args.plan_notes)
