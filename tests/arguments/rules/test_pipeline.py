"""Rules of pipeline layouts and of the interleaved schedule; those of plain splits are in `test_megatron`."""

import pytest

from tests.support.args import parse
from tests.support.rules import assert_violation

TWO = "--num-layers 4 --actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2"
VIRTUAL = f"{TWO} --num-virtual-stages-per-pipeline-rank 2"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{VIRTUAL} --no-overlap-p2p-communication",
         "--no-overlap-p2p-communication with virtual pipeline stages: messages for different stages of a rank could be "
         "swapped; drop it"),
        (f"{VIRTUAL} --microbatch-group-size-per-virtual-pipeline-stage 1",
         "--microbatch-group-size-per-virtual-pipeline-stage 1 is below --pipeline-model-parallel-size 2; give at least 2, "
         "or drop it"),
        (f"{TWO} --pipeline-model-parallel-layout Ett|tt|L",
         "--pipeline-model-parallel-layout Ett|tt|L has 3 stages, no multiple of --pipeline-model-parallel-size 2"),
        (f"{TWO} --pipeline-model-parallel-layout Ett|tL",
         "--pipeline-model-parallel-layout Ett|tL has 3 layers, but --num-layers is 4"),
        (f"{TWO} --pipeline-model-parallel-layout tt|ttL",
         "--pipeline-model-parallel-layout tt|ttL must begin with E, the embedding, and end with L, the loss"),
        (f"{TWO} --pipeline-model-parallel-layout Ett|ttX",
         "--pipeline-model-parallel-layout Ett|ttX: 'X' means nothing; E stands for the embedding, t for a layer, L for the "
         "loss, | ends a stage, and (t|)*4 repeats"),
        (f"{VIRTUAL} --pipeline-model-parallel-layout Et|t|t|tL",
         "--num-virtual-stages-per-pipeline-rank and --pipeline-model-parallel-layout both split the layers; drop one of "
         "them"),
        (f"{TWO} --use-ring-exchange-p2p",
         "--use-ring-exchange-p2p: pipeline messages by an own build of PyTorch is not built yet; drop the flag (--dry-run "
         "plans with it)"),
    ],
)  # fmt: skip
def test_rule(tmp_path, words, message):
    assert_violation(tmp_path, words, message)


@pytest.mark.parametrize(
    ("words", "virtual"),
    [
        ("--pipeline-model-parallel-size 2", None),
        ("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 1", None),
    ],
)
def test_pipelines_are_accepted(tmp_path, words, virtual):
    args = parse(tmp_path, "--actor-num-gpus-per-node", "2", *words.split())
    assert args.pipeline_model_parallel_size == 2
    assert args.virtual_pipeline_model_parallel_size == virtual
