"""Every objective goes through the branches for CUDA in every layout, and what its step waits for is known by number.

The numbers are the same whatever the layout is, and for any number of samples, micro-batches and layers. Where no library can
be built the tests run on fake CPU tensors, on which nothing is waited for.
"""

import pytest

from slime.arguments import parse_args
from slime.arguments.config_files.role_config import critic_args
from slime.rehearsal.run import rehearse_rank
from slime.rehearsal.stand_in import find_or_build
from tests.support.models.args import command_line
from tests.support.models.tiny_model import write_tiny_model
from tests.support.processes.objective_grid import CRITIC_OBJECTIVES, OBJECTIVES, ROLES, SHARPEST

RANKS = 8
TENSOR = ["--tensor-model-parallel-size", "2"]
CONTEXT = ["--context-parallel-size", "2"]
ALL = [*TENSOR, "--sequence-parallel", *CONTEXT]
ONE_PIECE = "context in one piece, recomputed"
LAYOUTS = {
    "data": [],
    "data, whole optimizer": ["--no-use-distributed-optimizer"],
    "tensor": TENSOR,
    ONE_PIECE: [
        *CONTEXT, "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1",
    ],
    "last stage": ["--pipeline-model-parallel-size", "2", *TENSOR],
    "all": ALL,
}  # fmt: skip

# At the end of a step: its metrics, which ranks bring together on the host (1), the norm of the gradient (1), whether all
# losses are finite (1), and on all ranks (2).
USUAL = 5
# How many tokens are trained on all ranks.
PER_TOKEN = USUAL + 1
# Statistics of the whole step, for a custom function.
OF_STEP = 1
STEP = {
    "grpo per token": PER_TOKEN,
    "gspo with sequence mask, per token": PER_TOKEN,
    "ppo whitened, per token": PER_TOKEN,
    "icepop, per token": PER_TOKEN,
    "sft per token": PER_TOKEN,
    "value per token": PER_TOKEN,
    "masked importance sampling": USUAL + OF_STEP,
    "masked importance sampling of sequences": PER_TOKEN + OF_STEP,
    # Largest and smallest ratio of the step.
    "mismatch metrics": USUAL + 2,
}
# Discounted sums run on the host, over all samples at once.
DISCOUNTED = 1
# Count, sum and bounds, then squares, of all ranks; and what these give back to the device.
WHITENED = 3
PASS = {
    "grpo whitened": WHITENED,
    "ppo": DISCOUNTED,
    "ppo whitened, per token": DISCOUNTED + WHITENED,
    "reinforce_plus_plus": DISCOUNTED,
    "reinforce_plus_plus whitened": DISCOUNTED + WHITENED,
    "reinforce_plus_plus_baseline": WHITENED,
    # The worst tokens are shown.
    "mismatch metrics": 1,
}
# The numbers of all metrics, and their sums over ranks, with the copies of these.
OF_ROLLOUT = 3


@pytest.fixture(scope="module")
def rehearse(tmp_path_factory):
    directory = tmp_path_factory.mktemp("grid")
    stand_in = find_or_build()

    def run(role, objectives, rank, layout, batches, layers, *, allgather_cp=False):
        model = directory / f"{layers} layers"
        if not model.exists():
            write_tiny_model(model, layers=layers)
        words = command_line(directory / "unused")
        words[words.index("--hf-checkpoint") + 1] = str(model)
        words += [
            "--actor-num-gpus-per-node", str(RANKS), "--rollout-max-context-len", "64", "--entropy-coef", "0.01",
            "--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-load", "no such directory", "--rehearse", *layout,
        ]  # fmt: skip
        if role == "critic":
            words += ["--advantage-estimator", "ppo"]
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("SLIME_ACCELERATOR", "cuda")
            args = parse_args(argv=words)
        # Flags give it to families alone that are not built yet.
        args.allgather_cp = allgather_cp
        args.rehearsed_objectives = list(objectives)
        if role == "critic":
            args = critic_args(args)
        result = rehearse_rank(args, rank, batches, stand_in, "tests.support.processes.rehearsed_grid")
        assert result.failure is None, f"{result.failure.phase}\n{result.failure.trace}"
        return result, stand_in.library is not None

    return run


def assert_waits(result, on_cuda, role, objectives):
    """In every objective's pass and step, and for the metrics of the rollout, those of the tables."""
    name_of_pass = "log-probs" if role == "actor" else "values"
    found = {
        # Stages wait for messages, and for nothing else that others do not.
        phase: sum(count for place, count in waits.items() if "megatron/core/pipeline_parallel/" not in place)
        for phase, waits in result.waits.items()
        if ": " in phase
    }
    expected = {}
    for objective in objectives:
        expected[f"{name_of_pass}: {objective}"] = PASS.get(objective, 0) if role == "actor" else 0
        expected[f"step: {objective}"] = STEP.get(objective, USUAL)
        if role == "actor":
            expected[f"metrics: {objective}"] = OF_ROLLOUT
    assert {p: n for p, n in found.items() if n} == {p: n for p, n in expected.items() if n and on_cuda}
    assert result.data_dependent == {}


@pytest.mark.parametrize(
    "role, objectives",
    [
        pytest.param("actor", SHARPEST, id="actor, sharpest"),
        pytest.param("actor", tuple(OBJECTIVES), id="actor", marks=pytest.mark.slow),
        pytest.param("critic", tuple(CRITIC_OBJECTIVES), id="critic", marks=pytest.mark.slow),
    ],
)
def test_every_objective_goes_through_in_a_layout_of_everything(rehearse, role, objectives):
    result, on_cuda = rehearse(role, objectives, 0, ALL, [[(32, 24)] * 2], layers=1)
    assert_waits(result, on_cuda, role, objectives)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_every_objective_goes_through_in_every_layout(rehearse, role, layout):
    """With more samples, micro-batches and layers than the test above."""
    batches = [[(64, 40), (64, 40), (9, 1)], [(64, 40), (64, 8), (9, 4)]]
    one_piece = layout == ONE_PIECE
    objectives, _ = ROLES[role]
    result, on_cuda = rehearse(role, objectives, RANKS - 1, LAYOUTS[layout], batches, layers=2, allgather_cp=one_piece)
    assert_waits(result, on_cuda, role, objectives)
