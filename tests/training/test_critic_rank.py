"""The critic on a tiny model: values, loss and gradient against loops over transformers, and the same in every layout."""

from types import SimpleNamespace

import numpy as np
import pytest

from slime.arguments.checkpoints import WeightSource
from tests.support.models.grpo_batch import TRAINED_TOKENS, make_samples
from tests.support.models.tiny_model import write_tiny_model
from tests.support.oracles.rounding import (
    assert_equal_metrics,
    assert_equal_rows,
    assert_equal_weights,
    bound_of_weights,
    terms_of_value,
)
from tests.support.processes.distributed import run_distributed
from tests.support.processes.layout_steps import LayoutRun, layout_args

HIDDEN, LAYERS = 32, 2
LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "dp2": {"data_parallel_size": 2},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "cp2_contiguous": {"context_parallel_size": 2, "allgather_cp": True},
}
# So that the value has left the range around the old one after the first step.
CLIP = 1e-3
STEPS = 3
# A critic's metrics are sums of squares and counts.
NOTHING_CANCELS: dict[str, float] = {}
SAVED = "tp2_sp"


def critic_args(hf_dir, **overrides):
    """The embedding of the checkpoint is tied, that of a critic is not."""
    critic = {"role": "critic", "untie_embeddings_and_output_weights": True, "value_clip": CLIP, "save_hf": None}
    checkpoint = {
        "no_save_optim": False, "no_load_optim": False, "no_load_rng": False, "keep_last": None, "world_size": 2,
    }  # fmt: skip
    return layout_args(hf_dir, **{**critic, **checkpoint, **overrides})


def returns_of(sample):
    """Made up, around the values."""
    return np.linspace(-0.6, 0.9, sample.response_length, dtype=np.float32) + 0.1 * sample.index


class CriticRun(LayoutRun):
    """A critic whose head is not zero, or nothing in front of it would learn in the first step."""

    def __init__(self, args):
        super().__init__(args)
        import torch

        from slime.backends.megatron_utils.value_head import is_value_head

        self.heads = [p for chunk in self.model for p in chunk.parameters() if is_value_head(p)]
        self.initial_head = [head.detach().clone().numpy() for head in self.heads]
        with torch.no_grad():
            for head in self.heads:
                head.copy_(torch.linspace(-0.1, 0.2, HIDDEN))
        self.optimizer.reload_model_params()

    def prepare(self):
        import torch

        from slime.training.train_step import forward_values

        self.data.update(forward_values(self.args, self.backend, self.data))
        if self.is_last_stage:
            samples = make_samples(self.args.vocab_size)
            full = [torch.from_numpy(returns_of(samples[position])) for position in self.data["partition"]]
            self.data["returns"] = self.data.cut(full)

    def step(self):
        from slime.training.train_step import train_one_step

        return train_one_step(self.args, self.backend, self.data, 0, 0, role="critic")

    def values(self):
        """By sample, on the last stage."""
        if not self.is_last_stage:
            return {}
        return dict(zip(self.data["sample_indices"], (v.tolist() for v in self.data.whole("values")), strict=True))


def edited_mask(mask):
    """As a user's function may change masks after the rollout."""
    return [0, *mask[1:]]


def exchanged(run, earlier):
    """What this rank fetches from the parts of another layout; and the parts of this layout.

    Fetched are values, each beside its own, and by sample the masks that were edited, with the trained tokens of its execution.
    """
    import ray
    import torch
    import torch.distributed as dist

    from slime.training.column_exchange import fetch_column, send_columns
    from slime.training.rollout_data import RolloutData
    from slime.training.train_rank import take_masks

    ray.put, ray.get = lambda value: value, lambda value, timeout: value
    edited = RolloutData(run.data, run.cp)
    edited["loss_masks"] = [torch.tensor(edited_mask(m.tolist())) for m in run.data["loss_masks"]]
    part = send_columns(edited, ["values", "loss_masks"], run.backend.groups) if run.is_last_stage else None
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    parts = [part for part in parts if part is not None]
    if not earlier:
        return {"pairs": [], "masks": {}}, parts
    taken = RolloutData(run.data, run.cp)
    take_masks(earlier, taken, run.backend.groups.sample_group, 1.0)
    masks = zip((m.tolist() for m in taken["loss_masks"]), taken["rollout_mask_sums"], strict=True)
    fetched = fetch_column(earlier, "values", run.data, 1.0) if run.is_last_stage else []
    own = run.data["values"] if fetched else []
    pairs = [(a.tolist(), b.tolist()) for a, b in zip(fetched, own, strict=True)]
    return {"pairs": pairs, "masks": dict(zip(taken["sample_indices"], masks, strict=True))}, parts


def critic_worker(cases, save):
    """Per case: initial head, values, metrics of the steps, the head after them, and what the exchange of values gave."""
    results, parts = {}, []
    for name, args in cases.items():
        run = CriticRun(args)
        run.prepare()
        fetched, parts = exchanged(run, parts)
        steps, gradients = [], []
        for _ in range(STEPS):
            if name == SAVED and len(steps) == 1:
                save_critic(run, save)
            steps.append(run.step())
            gradients.append(run.mean_gradient())
        heads = [head.detach().numpy().copy() for head in run.heads]
        results[name] = {
            "initial": run.initial_head,
            "values": run.values(),
            "steps": steps,
            "heads": heads,
            "bound_of_weights": bound_of_weights(args, gradients, TRAINED_TOKENS),
            **fetched,
        }
    return results


def constant_sums(args, rollout_id, rollout_data):
    """A user's function that changes no mask."""
    rollout_data["mine"] = list(rollout_data["rewards"])


def without_first_tokens(args, rollout_id, rollout_data):
    for mask in rollout_data["loss_masks"]:
        mask[:1] = 0


def told_worker(directory):
    """By the user's function, what a rank of the actor has after a rollout whose denominators a user set, and what of it is
    told to the critic."""
    import ray

    from tests.support.processes.actor_run import Rank, command_line

    ray.put = lambda value: value
    found = {}
    for name in ("constant_sums", "without_first_tokens"):
        run = Rank(command_line(directory, "--rollout-data-postprocess-path", f"{__file__}:{name}"))

        def fetch(shards, run=run):
            data = run._data()
            data["rollout_mask_sums"] = [8192.0] * len(data["rollout_ids"])
            return data

        run.actor._fetch = fetch
        _, part = run.actor.train_on_values(0, [], ())
        found[name] = {
            "sums": run.data["rollout_mask_sums"], "masks": [mask.tolist() for mask in run.data["loss_masks"]],
            "executions": run.data["rollout_ids"], "told": part and sorted(part.boxes),
        }  # fmt: skip
        run.end()
    return found


def save_critic(run, directory):
    import torch.distributed as dist

    from slime.backends.megatron_utils.checkpoint import begin_checkpoint, publish_checkpoint

    run.args.save = directory
    begin_checkpoint(run.args, 0, run.model, run.optimizer, run.scheduler).finish()
    if dist.get_rank() == 0:
        publish_checkpoint(run.args, 0)
    dist.barrier()


def one_rank_worker(cases, hf_dir, save, actor_directory):
    """The cases; the steps after the checkpoint of the other layout; a critic from an actor's checkpoint."""
    results = critic_worker(cases, None)
    from slime.backends.megatron_utils.checkpoint import load_checkpoint

    run = CriticRun(critic_args(hf_dir))
    run.prepare()
    load_checkpoint(run.args, WeightSource("megatron", save, 0, resume=True), run.model, run.optimizer, run.scheduler)
    results["resumed"] = [run.step() for _ in range(STEPS - 1)]

    actor = LayoutRun(critic_args(hf_dir, role="actor", seed=7), loads=False)
    save_critic(actor, actor_directory)
    run = CriticRun(critic_args(hf_dir))
    head = run.heads[0].detach().clone()
    load_checkpoint(run.args, WeightSource("megatron", actor_directory, 0), run.model)
    taken, given = (dict(r.model[0].module.named_parameters()) for r in (run, actor))
    results["headless"] = {
        name: bool((taken[name] == given[name]).all()) for name in taken if "output_layer" not in name
    }
    results["head_kept"] = bool((run.heads[0] == head).all())

    run = CriticRun(critic_args(hf_dir, freeze_params_name_list=["."]))
    results["trained"] = [name for name, p in run.model[0].module.named_parameters() if p.requires_grad]
    return results


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, tied=True, layers=LAYERS, hidden=HIDDEN)
    return directory


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return str(tmp_path_factory.mktemp("critic"))


@pytest.fixture(scope="module")
def two_ranks(hf_dir, saved):
    cases = {name: critic_args(hf_dir, **layout) for name, layout in LAYOUTS.items()}
    return run_distributed(critic_worker, 2, (cases, saved), timeout=300)


@pytest.fixture(scope="module")
def one_rank(hf_dir, saved, two_ranks, tmp_path_factory):
    cases = {"rollout": critic_args(hf_dir), "token": critic_args(hf_dir, calculate_per_token_loss=True)}
    directory = str(tmp_path_factory.mktemp("actor"))
    return run_distributed(one_rank_worker, 1, (cases, hf_dir, saved, directory), timeout=180)[0]


@pytest.fixture(scope="module")
def plain(hf_dir):
    """Values by sample and the gradient norm, by loops in float64. Values are not divided by the temperature."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float64).model
    head = torch.linspace(-0.1, 0.2, HIDDEN).double().requires_grad_()
    samples = make_samples(131)
    masks = [s.loss_mask or [1] * s.response_length for s in samples]
    trained = {}
    for sample, mask in zip(samples, masks, strict=True):
        trained[sample.rollout_id] = trained.get(sample.rollout_id, 0) + sum(mask)
    values, loss = {}, 0.0
    for sample, mask in zip(samples, masks, strict=True):
        hidden = model(torch.tensor([sample.tokens])).last_hidden_state[0]
        first = len(sample.tokens) - sample.response_length
        values[sample.index] = [hidden[first + t - 1] @ head for t in range(sample.response_length)]
        for value, target, counts in zip(values[sample.index], returns_of(sample), mask, strict=True):
            loss = loss + counts * (value - float(target)) ** 2 / max(trained[sample.rollout_id], 1) / 8
    loss.backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in [*model.parameters(), head]))
    return {i: [v.item() for v in row] for i, row in values.items()}, loss.item(), norm.item()


def test_l17_values_are_not_divided_by_the_temperature():
    import torch

    from slime.backends.megatron_utils.loss import get_values

    args, outputs = SimpleNamespace(rollout_temperature=0.5), torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    values = get_values(outputs, args=args, unconcat_tokens=[torch.arange(4)], total_lengths=[4], response_lengths=[2])
    assert [row.tolist() for row in values["values"]] == [[2.0, 3.0]]


def test_values_stand_where_the_token_is_predicted(one_rank, plain):
    values, _, _ = plain
    assert one_rank["rollout"]["values"].keys() == values.keys()
    for index, expected in values.items():
        assert one_rank["rollout"]["values"][index] == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_loss_and_gradient_equal_plain_loops(one_rank, plain):
    _, loss, norm = plain
    first = one_rank["rollout"]["steps"][0]
    assert first["value_loss"] == first["loss"] == pytest.approx(loss, rel=1e-5)
    assert first["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert first["value_clipfrac"] == 0


def test_a_new_head_is_zero_and_everything_moves_later(one_rank):
    assert [head.shape for head in one_rank["rollout"]["initial"]] == [(1, HIDDEN)]
    assert not one_rank["rollout"]["initial"][0].any()
    fractions = [step["value_clipfrac"] for step in one_rank["rollout"]["steps"]]
    assert fractions[0] == 0 and fractions[2] > 0.5
    losses = [step["value_loss"] for step in one_rank["rollout"]["steps"]]
    # Clipped to nearly the old value: the loss cannot become much smaller than it was.
    assert len(set(losses)) == 3 and min(losses[1:]) > 0.99 * losses[0]
    assert one_rank["token"]["steps"][0]["value_loss"] != losses[0]


def as_column(values):
    return {("values", index): row for index, row in values.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_train_the_critic_of_one_rank(one_rank, two_ranks, layout):
    expected, ranks = one_rank["rollout"], [rank[layout] for rank in two_ranks]
    values = {index: row for rank in ranks for index, row in rank["values"].items()}
    assert_equal_rows(as_column(values), as_column(expected["values"]), terms_of_value=terms_of_value(HIDDEN, LAYERS))
    for rank in ranks:
        for step, of_one in zip(rank["steps"], expected["steps"], strict=True):
            assert_equal_metrics(step, of_one, NOTHING_CANCELS)
    heads = [head for rank in ranks for head in rank["heads"]]
    assert len(heads) == (1 if layout == "pp2" else 2)
    for head in heads:
        assert_equal_weights({"head": head}, {"head": expected["heads"][0]}, expected["bound_of_weights"])


def test_values_reach_ranks_that_deal_and_cut_samples_otherwise(two_ranks):
    # Each layout fetches what the layout before it sent.
    for layout in list(LAYOUTS)[1:]:
        pairs = [pair for rank in two_ranks for pair in rank[layout]["pairs"]]
        assert len(pairs) >= len(two_ranks[0]["tp2"]["values"])
        fetched, own = (as_column(dict(enumerate(rows))) for rows in zip(*pairs, strict=True))
        assert_equal_rows(fetched, own, terms_of_value=terms_of_value(HIDDEN, LAYERS))


def test_both_models_train_on_the_masks_that_a_user_edited(two_ranks):
    samples = make_samples(131)
    masks = {s.index: edited_mask(s.loss_mask or [1] * s.response_length) for s in samples}
    trained = {}
    for sample in samples:
        trained[sample.rollout_id] = trained.get(sample.rollout_id, 0) + sum(masks[sample.index])
    expected = {s.index: (masks[s.index], trained[s.rollout_id]) for s in samples}
    for layout in list(LAYOUTS)[1:]:
        ranks = [rank[layout]["masks"] for rank in two_ranks]
        assert ranks[0] | ranks[1] == expected
        assert ranks[0].items() <= expected.items() and (layout == "dp2" or ranks[0] == ranks[1])


def test_denominators_of_a_user_stay_in_both_models_where_no_mask_was_edited(tmp_path):
    write_tiny_model(tmp_path / "actor", tied=True)
    (tmp_path / "prompts.jsonl").write_text(8 * '{"prompt": "1+1", "label": "2"}\n')
    ranks = run_distributed(told_worker, 2, (tmp_path,), timeout=300)
    # One of the two ranks tells.
    assert sorted(rank["constant_sums"]["told"] or [] for rank in ranks) == [[], ["returns"]]
    assert sorted(rank["without_first_tokens"]["told"] or [] for rank in ranks) == [[], ["loss_masks", "returns"]]
    for rank in ranks:
        assert set(rank["constant_sums"]["sums"]) == {8192.0}
        edited = rank["without_first_tokens"]
        assert not any(mask[0] for mask in edited["masks"])
        trained = dict.fromkeys(edited["executions"], 0)
        for execution, mask in zip(edited["executions"], edited["masks"], strict=True):
            trained[execution] += sum(mask)
        assert edited["sums"] == [trained[execution] for execution in edited["executions"]]


def test_a_checkpoint_of_another_layout_continues(one_rank):
    for step, of_one in zip(one_rank["resumed"], one_rank["rollout"]["steps"][1:], strict=True):
        assert_equal_metrics(step, of_one, NOTHING_CANCELS)


def test_an_actors_checkpoint_gives_all_but_the_head(one_rank):
    assert len(one_rank["headless"]) > 10 and all(one_rank["headless"].values())
    assert one_rank["head_kept"]


def test_a_frozen_network_still_learns_with_its_head(one_rank):
    assert one_rank["trained"] == ["output_layer.weight"]
