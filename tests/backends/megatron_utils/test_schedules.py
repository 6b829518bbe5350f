"""What Megatron's schedules are given: counts of micro-batches that they can do, and functions that they call."""

from types import SimpleNamespace

from slime.backends.megatron_utils.schedules import fill_last_group, received_micro_batches, set_schedule_functions
from slime.training.rollout_data import RolloutData
from slime.training.train_step import MicroBatches
from tests.support.models.args import default_args


def test_the_last_micro_batch_completes_the_groups_of_the_interleaved_schedule():
    chunk = SimpleNamespace(config=SimpleNamespace(microbatch_group_size_per_vp_stage=3))

    def filled(model, indices):
        return fill_last_group(model, MicroBatches(RolloutData(), indices, 1)).indices

    assert filled([chunk, chunk], [[0, 3], [1], [2], [4, 5]]) == [[0, 3], [1], [2], [4, 5], [4, 5], [4, 5]]
    assert filled([chunk, chunk], [[0], [1], [2]]) == [[0], [1], [2]]
    assert filled([chunk], [[0], [1]]) == [[0], [1]]


def test_whose_tensor_comes_next_from_a_neighbour():
    """Three micro-batches through two chunks, in groups of two."""
    order = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]
    assert received_micro_batches(order, 2, goes_round=False) == order
    assert received_micro_batches(order, 2, goes_round=True) == [(0, 0), (1, 0), (2, 0)]
    assert received_micro_batches([(0, 0), (1, 0)], 1, goes_round=False) == [(0, 0), (1, 0)]
    assert received_micro_batches([(0, 0), (1, 0)], 1, goes_round=True) == []


def schedule_functions(chunks, **flags):
    """Which functions Megatron's schedules find for reductions behind the backward pass, `no_sync_func` and `grad_sync_func`,
    and for gathers behind the forward pass, `param_sync_func`."""
    names = ("no_sync_func", "grad_sync_func", "param_sync_func")
    config = SimpleNamespace(**dict.fromkeys(names))
    overlap = SimpleNamespace(
        overlap_grad_reduce=flags.pop("overlap_grad_reduce", True), overlap_param_gather=flags.pop("gathers", False)
    )
    model = [
        SimpleNamespace(
            config=config, ddp_config=overlap, no_sync=f"no_sync {i}", start_grad_sync=f"start {i}",
            start_param_sync=f"gather {i}",
        )
        for i in range(chunks)
    ]  # fmt: skip
    set_schedule_functions(default_args(**flags), model, SimpleNamespace(scale_loss="scale"))
    assert config.grad_scale_func == "scale"
    return tuple(vars(config)[name] for name in names)


def test_stages_start_their_reductions_together_unless_told_otherwise():
    """Megatron takes one function, or a list for several chunks."""
    assert schedule_functions(1) == ("no_sync 0", "start 0", None)
    assert schedule_functions(2) == (["no_sync 0", "no_sync 1"], ["start 0", "start 1"], None)
    assert schedule_functions(1, align_grad_reduce=False) == ("no_sync 0", None, None)
    assert schedule_functions(2, align_grad_reduce=False) == (["no_sync 0", "no_sync 1"], None, None)
    assert schedule_functions(2, overlap_grad_reduce=False) == (None, None, None)
    # A second reduction would follow.
    assert schedule_functions(1, num_distributed_optimizer_instances=2) == ("no_sync 0", None, None)


def test_chunks_start_their_gathers_together_unless_told_otherwise():
    assert schedule_functions(2, gathers=True)[2] == ["gather 0", "gather 1"]
    assert schedule_functions(2, gathers=True, align_param_gather=False)[2] is None
    # The schedule of one chunk starts none.
    assert schedule_functions(1, gathers=True)[2] is None
