"""Groups are handed out, shown and given back in the order of their indices, whatever order they were drawn in.

And a hook is shown all that finished. A group in place of another has a number of its own.
"""

from tests.support.models.data_sources import Flat
from tests.support.models.rollout_args import CountingDataSource, make_args
from tests.support.models.rollout_steps import group_numbers, plugin, prompt_number, run_step


class Backwards(CountingDataSource):
    """The last of the groups that are asked for comes first."""

    def get_samples(self, num_samples):
        return super().get_samples(num_samples)[::-1]


def test_what_is_handed_out_and_what_a_hook_is_shown(server, checkpoint, tmp_path):
    shown = "def fn(args, groups, source):\n    source.shown = [group[0].group_index for group in groups]\n"
    sizes = {"rollout_batch_size": 4, "over_sampling_batch_size": 4}
    # One at a time, so that they finish as they are drawn.
    args = make_args(checkpoint, server.port, rollout_all_samples_process_path=plugin(tmp_path, shown), **sizes)
    args.sglang_server_concurrency = 1
    source = Backwards(2)
    assert group_numbers(run_step(args, source).samples) == source.shown == [0, 1, 2, 3]
    assert [prompt_number(request, args) for request in server.requests[::2]] == [3, 2, 1, 0]


def test_what_goes_back(server, checkpoint):
    args = make_args(checkpoint, server.port, rollout_batch_size=1, over_sampling_batch_size=4)
    server.hold = lambda payload: prompt_number(payload, args) != 3
    source = Backwards(2)
    run_step(args, source)
    assert group_numbers(source.returned) == [0, 1, 2]


def test_a_group_in_place_of_a_dropped_one_has_a_number_of_its_own(server, checkpoint, tmp_path):
    """Plain prompts have no numbers, and get those that follow from what was drawn before."""
    path = plugin(
        tmp_path,
        "def fn(args, group):\n    args.judged.append(group[0].group_index)\n    return len(args.judged) > 1\n",
    )
    args = make_args(checkpoint, server.port, dynamic_sampling_filter_path=path)
    args.judged = []
    kept = group_numbers(run_step(args, Flat(["one", "two"])).samples)
    assert sorted(args.judged) == [0, 1, 2] and kept == sorted(args.judged[1:])


def test_a_hook_is_shown_what_was_dropped_and_what_was_too_many(server, checkpoint, tmp_path):
    file = tmp_path / "mine.py"
    # All are finished when the first is judged: one is kept, one dropped, and two are surplus.
    file.write_text(
        "from slime.rollout.generate_state import GenerateState\n"
        "from tests.support.processes.waiting import wait_until\n"
        "judged = []\n"
        "def keep(args, samples):\n"
        "    judged.append(samples)\n"
        "    return wait_until(lambda: not GenerateState(args).pendings) and len(judged) > 1\n"
        "def show(args, groups, source):\n    source.shown = [group[0].group_index for group in groups]\n"
    )
    args = make_args(
        checkpoint,
        server.port,
        rollout_batch_size=1,
        over_sampling_batch_size=4,
        dynamic_sampling_filter_path=f"{file}:keep",
        rollout_all_samples_process_path=f"{file}:show",
    )
    source = CountingDataSource(2)
    metrics = run_step(args, source).metrics
    assert (source.shown, metrics["rollout/surplus_groups"]) == ([0, 1, 2, 3], 2)
    assert metrics["rollout/dynamic_filter/drop_unspecified"] == 1
