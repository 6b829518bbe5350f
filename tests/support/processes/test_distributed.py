"""The helper that runs test bodies in child processes reports their results and failures correctly."""

import os
import sys
import time

import pytest

from tests.support.models.grpo_batch import make_samples
from tests.support.models.tiny_model import write_tiny_model
from tests.support.processes.distributed import DistributedFailure, run_distributed
from tests.support.processes.layout_steps import layout_args, shard, train_steps


def _sum_of_ranks(offset):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), os.environ["OMP_NUM_THREADS"]


def test_results_come_back_by_rank():
    assert run_distributed(_sum_of_ranks, 2, (10,)) == [(0, 21.0, "1"), (1, 21.0, "1")]


def _imports_of_training(args):
    """The modules that a rank imports while it trains."""
    before = set(sys.modules)
    if args.train_backend == "fsdp":
        _train_with_fsdp(args)
    else:
        train_steps({"one": args}, make_samples)
    return sorted(set(sys.modules) - before)


def _train_with_fsdp(args):
    from slime.training.advantages import compute_advantages_and_returns
    from slime.training.train_step import train_one_step
    from tests.support.processes.megatron_worker import load_backend

    backend = load_backend(args)
    data = shard(args, backend.groups.data_rank, backend.groups.cp)
    data["log_probs"] = data["ref_log_probs"]
    compute_advantages_and_returns(args, data)
    train_one_step(args, backend, data, 0, 0)


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_ranks_find_all_that_they_train_with_imported(tmp_path, backend):
    """Otherwise each rank would import for seconds, and the server that forks ranks does not report failed imports."""
    write_tiny_model(tmp_path)
    (imported,) = run_distributed(_imports_of_training, 1, (layout_args(tmp_path, train_backend=backend),))
    of_training = [
        name for name in imported if name.partition(".")[0] in ("torch", "megatron", "slime", "transformers")
    ]
    assert len(of_training) < 10, of_training


def _raise_on_rank_one():
    if os.environ["RANK"] == "1":
        raise KeyError("the cause")
    time.sleep(600)


def test_a_failing_rank_ends_all_and_shows_its_traceback():
    with pytest.raises(DistributedFailure, match="KeyError: 'the cause'") as error:
        run_distributed(_raise_on_rank_one, 2, grace_seconds=1.0)
    assert "not finished" not in str(error.value), "nobody waits for the other"


def _abort():
    os.abort()


def test_a_rank_that_dies_in_native_code_shows_where_it_was():
    with pytest.raises(DistributedFailure, match=r"exit status -6(?s:.*)Fatal Python error: Aborted(?s:.*) in _abort"):
        run_distributed(_abort, 1)


def _announce_then_hang(directory):
    (directory / os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(600)


def test_a_timeout_names_itself_and_leaves_no_process(tmp_path):
    with pytest.raises(DistributedFailure, match="not finished after 3"):
        run_distributed(_announce_then_hang, 2, (tmp_path,), timeout=3.0)
    for announcement in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(announcement.read_text()), 0)


def _arguments_that_were_there():
    from tests.support.models import args

    return args._of_no_words.cache_info().currsize


def test_ranks_find_the_arguments_of_a_run_without_words():
    """Reading all flags and parsing an empty command line takes a tenth of a second, and nearly every rank needs it."""
    assert run_distributed(_arguments_that_were_there, 1) == [1]
