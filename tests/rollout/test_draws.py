"""What a resume draws again, and how a source is observed for that."""

import contextvars
import copy
import json
import pickle
import threading
import weakref
from pathlib import Path

import pytest

from slime.rollout.attempts import as_partial_group
from slime.rollout.base_types import leaves
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.rollout.draws import DataSourceSnapshots, draw_groups, give_back
from slime.utils.errors import UserError
from slime.utils.types import Sample
from tests.support.models.data_sources import make_args


class Prompts:
    """Texts by number: a source without our base, whose state is written for it."""

    def __init__(self, args):
        self.next = 0
        self.returned = []

    def get_samples(self, n):
        groups = [self.returned.pop(0) for _ in range(min(n, len(self.returned)))]
        self.next += n - len(groups)
        return groups + [f"p{number}" for number in range(self.next - n + len(groups), self.next)]

    def add_samples(self, samples):
        self.returned += samples

    def state_dict(self):
        return {"next": self.next, "returned": [group[0].prompt for group in self.returned]}

    def load_state_dict(self, state):
        self.next = state["next"]
        self.returned = list(state["returned"])


class OwnPlace(Prompts):
    """Finds the place for its state itself, and knows only the present one."""

    state_dict = load_state_dict = None

    def __init__(self, args):
        super().__init__(args)
        self.directory = args.save

    def save(self, rollout_id):
        with open(f"{self.directory}/own_{rollout_id}.json", "w") as file:
            json.dump(Prompts.state_dict(self), file)

    def load(self, rollout_id):
        with open(f"{self.directory}/own_{rollout_id}.json") as file:
            Prompts.load_state_dict(self, json.load(file))


class Doubled(RolloutDataSourceWithBuffer):
    """Gives its groups no numbers but those of their places in the draw."""

    def get_samples(self, num_samples, rollout_id=None):
        groups = super().get_samples(num_samples, rollout_id)
        for position, sample in ((position, sample) for position, group in enumerate(groups) for sample in group):
            sample.index, sample.group_index = (None if position else 0), None
        return groups


class Graded(RolloutDataSourceWithBuffer):
    """Saves more than the state, of which it knows nothing."""

    level = 0

    def save(self, rollout_id):
        super().save(rollout_id)
        with open(f"{self.args.save}/level_{rollout_id}.json", "w") as file:
            json.dump(self.level, file)

    def load(self, rollout_id):
        super().load(rollout_id)
        with open(f"{self.args.load}/level_{rollout_id}.json") as file:
            self.level = json.load(file)


SOURCES = [RolloutDataSourceWithBuffer, Prompts, OwnPlace, Doubled, Graded]


@pytest.fixture
def data_args(tmp_path):
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"p{number}"}) + "\n" for number in range(40)))
    options = ["input_key", "label_key", "buffer_filter_path", "rollout_max_prompt_len", "apply_chat_template"]
    options += ["rollout_shuffle", "fresh_data_state", "trust_remote_code", "allow_bad_rows", "streaming_data"]
    options += ["num_data_workers"]
    place = {"save": str(tmp_path), "load": str(tmp_path), "prompt_data": str(rows), "loss_type": "policy_loss"}
    keys = {
        "multimodal_keys": None,
        "metadata_key": "metadata",
        "tool_key": "tools",
        "apply_chat_template_kwargs": {},
        "rollout_seed": 1,
    }
    return make_args(**dict.fromkeys(options), **place, **keys, rollout_global_dataset=True)


class Rollout:
    """One that is under way beside others, until its `end`: what it calls is called in its context."""

    def __init__(self, states, rollout_id):
        self.context, self.block = contextvars.copy_context(), states.of_rollout(rollout_id)
        self(self.block.__enter__)

    def __call__(self, function, *args):
        return self.context.run(function, *args)

    def end(self):
        self(self.block.__exit__, None, None, None)


def prompts(groups):
    return [leaves(group)[0].prompt if not isinstance(group, str) else group for group in groups]


def resumed(args, source_class, rollout_id):
    source = source_class(args)
    states = DataSourceSnapshots(args, source)
    states.load(rollout_id)
    return source, states


@pytest.mark.parametrize("source_class", [RolloutDataSource, *SOURCES])
@pytest.mark.parametrize("direct", [False, True], ids=["through the framework", "by a function of the user's"])
def test_a_resume_draws_again_what_rollouts_behind_the_saved_one_have(data_args, source_class, direct):
    source = source_class(data_args)
    states = DataSourceSnapshots(data_args, source)
    first, second, third = (Rollout(states, number) for number in (5, 6, 7))

    def draw(rollout, number, size):
        return rollout(source.get_samples, size) if direct else rollout(draw_groups, data_args, source, size, number)

    draw(first, 5, 2)
    draw(second, 6, 3)
    second.end()
    draw(third, 7, 2)
    states.remember(5)
    first.end()
    draw(third, 7, 2)
    states.save(5)
    third.end()
    again, later = resumed(data_args, source_class, 5)
    nine = ["p2", "p3", "p4", "p5", "p6", "p7", "p8", "p9", "p10"]
    run = Rollout(later, 6)
    assert prompts(run(again.get_samples, 4)) == nine[:4]
    later.remember(6)
    run.end()
    later.save(6)
    again, _ = resumed(data_args, source_class, 6)
    assert prompts(again.get_samples(5)) == nine[4:], "what is still to be drawn again is saved again"


def test_a_subclass_of_ours_that_saves_more_has_all_of_it_again(data_args):
    source = Graded(data_args)
    states = DataSourceSnapshots(data_args, source)
    draw_groups(data_args, source, 3, 0)
    source.level = 7
    states.remember(0)
    states.save(0)
    again, _ = resumed(data_args, Graded, 0)
    assert again.level == 7 and prompts(again.get_samples(1)) == ["p3"]


@pytest.mark.parametrize("source_class", SOURCES)
def test_what_went_back_is_drawn_again_once(data_args, source_class):
    source = source_class(data_args)
    states = DataSourceSnapshots(data_args, source)
    first, second = Rollout(states, 0), Rollout(states, 1)
    of_first = first(draw_groups, data_args, source, 3, 0)
    of_second = second(draw_groups, data_args, source, 3, 1)
    copies = [[Sample(prompt=of_second[1][0].prompt, index=of_second[1][0].index) for _ in range(2)]]
    second(give_back, data_args, source, copies, 1, [of_second[1]])
    first(give_back, data_args, source, [of_first[2]], 0)
    states.remember(0)
    states.save(0)
    first.end()
    second.end()
    again, _ = resumed(data_args, source_class, 0)
    assert prompts(again.get_samples(5)) == ["p3", "p5", "p4", "p2", "p6"]


def ahead(states, source, args, size, rollout_id):
    with states._draws.ahead():
        return draw_groups(args, source, size, rollout_id)


def test_what_was_made_ahead_is_saved_as_it_was_when_its_rollout_took_it(data_args):
    source = Prompts(data_args)
    states, (first, second) = observed(data_args, source)
    draws, [origin] = states._draws, ahead(states, source, data_args, 1, 0)
    made = copy.deepcopy(origin)
    draws.finished(origin, lambda: made)
    draws.taken([origin], 1)
    for sample in made:
        sample.remove_sample, sample.response = True, "changed by a function of the user's"
    states.remember(0)
    first.end()
    second.end()
    states.save(0)
    again, _ = resumed(data_args, Prompts, 0)
    [group] = again.get_samples(1)
    assert [(s.prompt, s.remove_sample, s.response) for s in group] == [("p0", False, "")] * 2


def in_another_thread(function, *args):
    """Call it there, and give it the time that it takes if nothing holds it up; the thread."""
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join(0.2)
    return thread


def test_a_group_that_is_dropped_while_a_state_is_taken_hides_no_other(data_args):
    source = Prompts(data_args)
    states, (first, second) = observed(data_args, source)
    groups, threads = ahead(states, source, data_args, 3, 0), []

    def made():
        threads.append(in_another_thread(states._draws.taken, [groups[0]], None))
        return groups[0]

    states._draws.finished(groups[0], made)
    states.remember(0)
    first.end()
    second.end()
    states.save(0)
    threads[0].join(10)
    again, _ = resumed(data_args, Prompts, 0)
    assert prompts(again.get_samples(3)) == ["p0", "p1", "p2"]


def test_a_group_that_is_taken_while_others_are_forgotten_stays_noted(data_args, monkeypatch):
    source = Prompts(data_args)
    states, (first, second) = observed(data_args, source)
    draws, [origin] = states._draws, ahead(states, source, data_args, 1, 0)
    is_needed, threads = draws._is_needed, []

    def meanwhile(rollout_id):
        if not threads:
            threads.append(None)
            threads[0] = in_another_thread(draws.taken, [origin], 1)
        return is_needed(rollout_id)

    monkeypatch.setattr(draws, "_is_needed", meanwhile)
    draws.release()
    threads[0].join(10)
    states.remember(0)
    first.end()
    second.end()
    states.save(0)
    again, _ = resumed(data_args, Prompts, 0)
    assert prompts(again.get_samples(1)) == ["p0"]


def test_groups_of_a_resumed_run_have_other_numbers_than_those_that_waited(data_args):
    """In rollouts 1 and 2 five groups were drawn ahead, and those that stand third in them were done."""
    source = Prompts(data_args)
    states, (first, second) = observed(data_args, source)
    done = [ahead(states, source, data_args, 5, rollout_id)[2] for rollout_id in (1, 2)]
    for group in done:
        states._draws.finished(group, lambda group=group: group)
    states.remember(0)
    first.end()
    second.end()
    states.save(0)
    source, states = resumed(data_args, Prompts, 0)
    groups = []
    for rollout_id in (1, 2, 3):
        rollout = Rollout(states, rollout_id)
        groups += rollout(draw_groups, data_args, source, 6, rollout_id)
        rollout.end()
    numbers = [group[0].group_index for group in groups]
    assert {2**20 + 2, 2**21 + 2} < set(numbers) and len(set(numbers)) == len(numbers) == 18
    assert numbers[-1] == 3 * 2**20 + 5, "where nothing waited, the first number is free"


class KeepsGroups(OwnPlace):
    """What goes back to it is in its state as it is, with its numbers."""

    def save(self, rollout_id):
        self.saved[rollout_id] = self.next, copy.deepcopy(self.returned)

    def load(self, rollout_id):
        self.next, self.returned = copy.deepcopy(self.saved[rollout_id])

    saved = {}


def test_groups_that_went_back_to_the_source_keep_numbers_that_a_resumed_run_gives_to_no_other(data_args):
    """Such a source is saved as it is when rollouts behind the saved one have drawn from it, and given back."""
    data_args.n_samples_per_prompt = 2
    source = KeepsGroups(data_args)
    states, (first, second) = observed(data_args, source)
    first(draw_groups, data_args, source, 2, 0)
    *_, unused = second(draw_groups, data_args, source, 4, 1)
    second(give_back, data_args, source, [unused], 1)
    states.remember(0)
    first.end()
    states.save(0)
    second.end()
    for start in range(2):
        source, states = resumed(data_args, KeepsGroups, 0)
        rollout = Rollout(states, 1)
        groups = rollout(draw_groups, data_args, source, 6, 1)
        assert prompts(groups) == ["p2", "p3", "p4", "p5", "p6", "p7"]
        numbers = [group[0].group_index for group in groups]
        assert len(set(numbers)) == 6 and unused[0].group_index in numbers
        rollout.end()
        if start == 0:
            # Saved before anything is drawn: what is known of the numbers goes on with the state.
            source, states = resumed(data_args, KeepsGroups, 0)
            states.remember(0)
            states.save(0)


def test_groups_of_another_size_are_not_drawn_again(data_args, caplog):
    """Whoever is asked for groups of the new size would be blamed for them."""
    data_args.n_samples_per_prompt = 2
    source = RolloutDataSource(data_args)
    states, (first, second) = observed(data_args, source)
    first(draw_groups, data_args, source, 2, 0)
    second(draw_groups, data_args, source, 3, 1)
    states.remember(0)
    first.end()
    second.end()
    states.save(0)
    data_args.n_samples_per_prompt = 4
    with pytest.raises(UserError, match="^--n-samples-per-prompt 4: rollouts behind 0 had drawn 3 groups of 2, which"):
        resumed(data_args, RolloutDataSource, 0)
    data_args.fresh_data_state = True
    source, _ = resumed(data_args, RolloutDataSource, 0)
    assert "had drawn 3 groups of 2, which --n-samples-per-prompt 4 leaves out" in caplog.text
    assert [(len(group), group[0].prompt) for group in source.get_samples(1)] == [(4, "p5")]


def test_a_state_waits_for_what_rollouts_before_it_still_give_back(data_args):
    source = RolloutDataSourceWithBuffer(data_args)
    states = DataSourceSnapshots(data_args, source)
    first, second = Rollout(states, 0), Rollout(states, 1)
    surplus = first(draw_groups, data_args, source, 2, 0)[1]
    second(draw_groups, data_args, source, 2, 1)
    states.remember(1)
    second.end()
    first(give_back, data_args, source, [surplus], 0)
    first.end()
    states.save(1)
    again, _ = resumed(data_args, RolloutDataSourceWithBuffer, 1)
    assert prompts(again.get_samples(2)) == ["p1", "p4"]


def test_what_no_state_needs_is_not_held(data_args):
    source = RolloutDataSourceWithBuffer(data_args)
    states = DataSourceSnapshots(data_args, source)
    states.load(-1)
    for rollout_id in range(3):
        rollout = Rollout(states, rollout_id)
        held = weakref.ref(rollout(draw_groups, data_args, source, 1, rollout_id)[0][0])
        assert held() is None, "of the only rollout that is under way"
        rollout.end()
    first, second = Rollout(states, 3), Rollout(states, 4)
    held = weakref.ref(second(draw_groups, data_args, source, 1, 4)[0][0])
    assert held() is not None
    states.remember(3)
    first.end()
    assert held() is None, "the state after the earlier one is taken"
    second.end()


def test_a_rollout_that_begins_before_the_one_that_it_follows_is_noted(data_args):
    source = RolloutDataSourceWithBuffer(data_args)
    states = DataSourceSnapshots(data_args, source)
    states.load(-1)
    second = Rollout(states, 1)
    second(draw_groups, data_args, source, 1, 1)
    first = Rollout(states, 0)
    first(draw_groups, data_args, source, 1, 0)
    states.remember(0)
    states.save(0)
    again, _ = resumed(data_args, RolloutDataSourceWithBuffer, 0)
    assert prompts(again.get_samples(2)) == ["p0", "p2"]
    first.end()
    second.end()


@pytest.mark.parametrize("source_class", [RolloutDataSource, OwnPlace])
def test_data_that_start_anew_lack_what_was_drawn_ahead_and_say_so(data_args, source_class, monkeypatch, caplog):
    with_three_drawn_ahead(data_args, source_class)
    data_args.fresh_data_state = True
    if source_class is OwnPlace:
        monkeypatch.setattr(OwnPlace, "load", None)
    else:
        rows = Path(data_args.prompt_data)
        rows.write_text(rows.read_text().replace("p", "q").replace("qromqt", "prompt"))
    again, _ = resumed(data_args, source_class, 0)
    assert "3 prompts that rollouts behind 0 had drawn are not drawn again" in caplog.text
    assert "is gone on with" not in caplog.text
    assert prompts(again.get_samples(1)) == ["p0" if source_class is OwnPlace else "q0"]


@pytest.mark.parametrize("source_class", [RolloutDataSource, Prompts, OwnPlace])
@pytest.mark.parametrize("left_in_the_script", [False, True])
def test_a_flag_for_missing_states_changes_nothing_where_they_are(data_args, source_class, left_in_the_script, caplog):
    with_three_drawn_ahead(data_args, source_class)
    data_args.fresh_data_state = left_in_the_script
    again, _ = resumed(data_args, source_class, 0)
    assert prompts(again.get_samples(4)) == ["p0", "p1", "p2", "p3"]
    told = "--fresh-data-state: the data state after rollout 0 is there, and is gone on with"
    assert caplog.messages == [told] * left_in_the_script


def with_three_drawn_ahead(args, source_class):
    """A state after rollout 0, which has drawn nothing yet."""
    source = source_class(args)
    states, (first, second) = observed(args, source)
    second(draw_groups, args, source, 3, 1)
    states.remember(0)
    first.end()
    states.save(0)
    second.end()


def test_an_attempt_that_begins_anew_goes_back_as_what_was_drawn(data_args):
    data_args.n_samples_per_prompt = 1
    data_args.rollout_temperature, data_args.rollout_top_p, data_args.rollout_top_k = 1.0, 1.0, -1
    data_args.rm_type, data_args.custom_rm_path, data_args.rm_url, data_args.reward_key = "math", None, None, None
    data_args.use_rollout_routing_replay = False
    data_args.group_rm = False
    origin = [Sample(index=70, prompt="waited")]
    attempt = Sample(index=70, tokens=[1, 2], response_length=1, status=Sample.Status.ABORTED)
    source = RolloutDataSourceWithBuffer(data_args)
    source.add_samples([as_partial_group(data_args, origin, [attempt], 0)])
    states, (first, second) = observed(data_args, source)
    data_args.rollout_temperature = 0.5
    [group] = second(draw_groups, data_args, source, 1, 1)
    assert group == origin
    second(give_back, data_args, source, [group], 1, [group])
    states.remember(0)
    first.end()
    second.end()
    states.save(0)
    again, _ = resumed(data_args, RolloutDataSourceWithBuffer, 0)
    assert prompts(again.get_samples(2)) == ["waited", "p0"]


def test_a_save_leaves_nothing_of_an_earlier_save_of_that_rollout(data_args):
    for size in (1, 0):
        source = OwnPlace(data_args)
        states = DataSourceSnapshots(data_args, source)
        first, second = Rollout(states, 0), Rollout(states, 1)
        first(draw_groups, data_args, source, 1, 0)
        second(draw_groups, data_args, source, size, 1)
        states.remember(0)
        states.save(0)
        first.end()
        second.end()
    again, _ = resumed(data_args, OwnPlace, 0)
    assert again.get_samples(2) == ["p1", "p2"]


def observed(args, source):
    """`source` while two rollouts are under way."""
    states = DataSourceSnapshots(args, source)
    return states, [Rollout(states, 0), Rollout(states, 1)]


def test_prompts_that_are_drawn_for_no_rollout_are_told_of_once(data_args, caplog):
    source = Prompts(data_args)
    _, rollouts = observed(data_args, source)
    for _ in range(2):
        thread = threading.Thread(target=source.get_samples, args=(1,))
        thread.start()
        thread.join()
    assert [
        record.message for record in caplog.records if "drawn in a thread that works for no rollout" in record.message
    ]
    assert len(caplog.records) == 1
    for rollout in rollouts:
        rollout.end()


def test_a_source_with_one_rollout_at_a_time_is_not_observed(data_args):
    source = Doubled(data_args)
    states = DataSourceSnapshots(data_args, source)
    states.load(-1)
    for rollout_id in range(2):
        rollout = Rollout(states, rollout_id)
        states.remember(rollout_id)
        assert type(source) is Doubled
        rollout.end()
        states.save(rollout_id)


class Frozen(Prompts):
    """Lets nobody set what it has not."""

    def __setattr__(self, name, value):
        if name not in ("next", "returned"):
            raise AttributeError(name)
        super().__setattr__(name, value)


@pytest.mark.parametrize("source_class", [Doubled, Frozen])
def test_a_source_that_is_observed_stays_what_it_is(data_args, source_class):
    source = source_class(data_args)
    _, rollouts = observed(data_args, source)
    assert isinstance(source, source_class) and type(source) is not source_class
    assert type(source).__name__ == source_class.__name__ and "get_samples" not in vars(source)
    copies = [copy.deepcopy(source), *(pickle.loads(pickle.dumps(source, protocol)) for protocol in range(6))]
    for one in copies if source_class is Frozen else copies[:1]:
        assert type(one) is source_class
    assert prompts(source.get_samples(1)) == ["p0"] == prompts(copies[0].get_samples(1))
    for rollout in rollouts:
        rollout.end()


@pytest.mark.parametrize("error", [TypeError("no"), ValueError("no")])
def test_a_source_that_cannot_be_observed_is_told_of(data_args, caplog, error):
    class Sealed:
        def __init_subclass__(cls):
            raise error

        def get_samples(self, num_samples):
            return ["p"] * num_samples

    source = Sealed()
    _, rollouts = observed(data_args, source)
    assert "a Sealed cannot be observed (no)" in caplog.text
    assert len(rollouts[1](draw_groups, data_args, source, 2, 1)) == 2
    for rollout in rollouts:
        rollout.end()


class Waiting(Prompts):
    """Waits in `get_samples` for what a thread adds."""

    def __init__(self, args):
        super().__init__(args)
        self.entered, self.filled = threading.Event(), threading.Event()

    def get_samples(self, n):
        self.entered.set()
        assert self.filled.wait(60)
        return super().get_samples(n)

    def add_samples(self, samples):
        super().add_samples(samples)
        self.filled.set()


def test_threads_that_wait_in_the_source_hold_nobody_up(data_args):
    source = Waiting(data_args)
    _, rollouts = observed(data_args, source)
    drawn = []
    drawing = threading.Thread(target=lambda: drawn.extend(source.get_samples(1)), daemon=True)
    drawing.start()
    assert source.entered.wait(60)

    def end():
        for rollout in rollouts:
            rollout.end()

    ending = threading.Thread(target=end, daemon=True)
    ending.start()
    ending.join(60)
    assert not ending.is_alive() and not drawn
    adding = threading.Thread(target=source.add_samples, args=(["more"],), daemon=True)
    adding.start()
    drawing.join(60)
    assert drawn == ["more"]
