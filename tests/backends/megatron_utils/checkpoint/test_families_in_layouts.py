"""Families with attention or experts of their own: what one layout has saved, optimizer included, is what all others resume
from and save again. Those with Megatron's stock layers are in `test_gathered_state.py` and `test_reading.py`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.models.grpo_batch import TRAINED_TOKENS
from tests.support.models.tiny_families import LAYOUTS, TINY_FAMILIES, ranks_of
from tests.support.oracles.rounding import assert_equal_weights, bound_of_weights
from tests.support.processes.distributed import run_distributed
from tests.support.processes.resumed_run import ResumableRun, changed, resumable_args, resumed, stored_tensors

# Linear attention beside gated attention, latent attention, with keys that an indexer chooses too, outputs that are normed, and
# norms over all heads.
OWN_LAYERS = (
    "qwen3_next", "qwen3_next with one group", "qwen3_5_moe", "deepseek_v3", "deepseek_v3 dense", "glm_moe_dsa", "glm4",
    "glm4_moe", "minimax_m2", "minimax_m2 with one group",
)  # fmt: skip
# Two ranks each. Tensor-parallel ranks cut a checkpoint the most, so one of their layouts has saved it.
SAVES = ("tp2", "tp2 whole sequence")
OTHERS = {
    **{name: sizes for name, sizes in LAYOUTS.items() if ranks_of(sizes) == 2 and "recompute_modules" not in sizes},
    "dp2": {"data_parallel_size": 2},
}


def other_layouts(name: str) -> dict[str, dict]:
    """The layouts of two ranks that the family has."""
    row = {"dp2", *TINY_FAMILIES[name].layouts}
    return {layout: sizes for layout, sizes in OTHERS.items() if layout in row}


def save_and_resume(saving: SimpleNamespace, resuming: dict[str, SimpleNamespace]) -> tuple[tuple, dict[str, tuple]]:
    """The weights at a checkpoint after two steps, and those that a third step ends at: of the run that has saved it, and by
    name of those that resume from it and save it again. With each the mean absolute entry of the third gradient."""

    def go_on(run: ResumableRun) -> tuple:
        loaded = run.weights()
        run.prepare()
        run.step()
        return loaded, run.weights(), run.largest_gradient()

    run = ResumableRun(saving)
    run.prepare()
    for _ in range(2):
        run.step()
    run.save()
    saved, found = go_on(run), {}
    for name, args in resuming.items():
        run = resumed(args, saving.save)
        run.save()
        found[name] = go_on(run)
    return saved, found


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_LAYERS)
def test_a_checkpoint_of_the_family_goes_on_in_every_layout(tmp_path, name):
    family = TINY_FAMILIES[name]
    family.save(tmp_path / "model")

    def args_in(layout, directory):
        return resumable_args(tmp_path / "model", tmp_path / directory, lr=1e-3, clip_grad=0.0, **layout)

    source = next(layout for layout in SAVES if layout in family.layouts)
    resuming = {layout: args_in(sizes, layout) for layout, sizes in other_layouts(name).items()}
    assert source in resuming and len(resuming) > 1
    saving = args_in(LAYOUTS[source], "saved")
    fresh = {"fresh": changed(args_in(LAYOUTS[source], "fresh"), no_load_optim=True)}
    ranks = run_distributed(save_and_resume, 2, (saving, resuming | fresh), timeout=300)
    (at_checkpoint, after, gradient), found = ranks[0]
    within = bound_of_weights(saving, [gradient], TRAINED_TOKENS)
    without_moments = found.pop("fresh")[1]
    for layout, (loaded, weights, _) in found.items():
        assert loaded.keys() == at_checkpoint.keys(), layout
        assert all((loaded[key] == weight).all() for key, weight in at_checkpoint.items()), layout
        try:
            assert_equal_weights(weights, after, within)
        except AssertionError as error:
            raise AssertionError(f"{layout}: {error}") from error
    # Not for want of moments.
    assert max(abs(without_moments[key] - weight).max() for key, weight in after.items()) > 1e-4 > 10 * within
    stored = stored_tensors(tmp_path / "saved" / "iter_0000000")
    assert any(key.startswith("optimizer.state.exp_avg_sq.") and value.any() for key, value in stored.items())
    for layout in found:
        again = stored_tensors(tmp_path / layout / "iter_0000000")
        assert again.keys() == stored.keys(), layout
        assert [key for key, value in stored.items() if not value.equal(again[key])] == [], layout
