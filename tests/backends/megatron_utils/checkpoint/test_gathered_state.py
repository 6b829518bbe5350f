"""What a save and a load of the distributed optimizer hold on each rank; any layout and Megatron's own way agree on it."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from slime.estimates.activations import Kernels, Recompute
from slime.estimates.layout import ParallelLayout, split_into_stages
from slime.estimates.training_memory import StateBytes, TrainingSetup, training_memory
from slime.models.shape_of_flags import model_shape_from_args
from tests.support.models.tiny_model import write_tiny_mixture, write_tiny_model
from tests.support.processes.distributed import run_distributed
from tests.support.processes.resumed_run import ResumableRun, resumable_args, resumed, stored_tensors

BFLOAT16 = {"bf16": True}
LAYOUT = {"data_parallel_size": 2, "tensor_model_parallel_size": 2}
OTHERS = {
    "data": {"data_parallel_size": 4, "tensor_model_parallel_size": 1},
    "pipeline": {"data_parallel_size": 1, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "weights": {"data_parallel_size": 4, "tensor_model_parallel_size": 1, "use_precision_aware_optimizer": True},
    "host": {"data_parallel_size": 4, "tensor_model_parallel_size": 1, "optimizer_cpu_offload": True},
}
# Float32 copy and both moments.
STATE_BYTES = 12


def bytes_of(state, prefix) -> int:
    """Of the tensors in a rank's state whose names begin with `prefix`, each in memory of its own."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    shards = [
        shard for shard in nested_values(state) if isinstance(shard, ShardedBase) and shard.key.startswith(prefix)
    ]
    storages = {shard.data.untyped_storage().data_ptr(): shard.data.untyped_storage().nbytes() for shard in shards}
    assert all(shard.data.device.type == "cpu" and shard.data.dtype == torch.float32 for shard in shards)
    return sum(storages.values())


def held(run) -> dict[str, int]:
    """Bytes of optimizer state that this rank holds for a save and for a load; its parameters, and its largest one's."""
    from slime.backends.megatron_utils.checkpoint.stored import Stored
    from slime.backends.megatron_utils.checkpoint.writing import sharded_state

    sizes = [parameter.numel() for chunk in run.model for parameter in chunk.parameters()]
    found = {
        way: bytes_of(sharded_state(run.args, run.model, run.optimizer, stored=stored), "optimizer.state.")
        for way, stored in {"save": None, "load": Stored({})}.items()
    }
    return {**found, "parameters": sum(sizes), "largest": max(sizes)}


@contextlib.contextmanager
def megatrons_own_way():
    """The optimizer's state as Megatron describes it, whole on every rank, which older checkpoints were written with."""
    from megatron.core.optimizer import ChainedOptimizer

    from slime.backends.megatron_utils.checkpoint import writing
    from slime.backends.megatron_utils.checkpoint.optimizer_state import trained_parts

    def describe(optimizer, model, **options):
        return ChainedOptimizer(trained_parts(optimizer)).sharded_state_dict(model, **options)

    with mock.patch.object(writing, "optimizer_state", describe):
        yield


def lacking_on_the_last_rank(run) -> str:
    """What a rank says where another one found nothing of what it owns."""
    from slime.backends.megatron_utils.checkpoint.gathered_state import STATES, require_owned

    loaded = {} if torch.distributed.get_rank() == 3 else {number: STATES for number in range(100)}
    with pytest.raises(KeyError) as error:
        require_owned(run.parts(), [loaded], STATES)
    return str(error.value)


def worker(args: SimpleNamespace, others: dict[str, SimpleNamespace]) -> dict:
    run = ResumableRun(args)
    run.prepare()
    for _ in range(2):
        run.step()
    results = {"held": held(run), "saved": run.fingerprints()}
    run.save()
    with megatrons_own_way():
        run.save(1)
    run = resumed(args, args.save)
    results["resumed"] = run.fingerprints()
    results["lacking"] = lacking_on_the_last_rank(run)
    for case in others.values():
        resumed(case, args.save).save()
    return results


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    root = tmp_path_factory.mktemp("gathered")
    write_tiny_model(root / "model", tied=False)
    args = resumable_args(root / "model", root / "saved", **BFLOAT16, **LAYOUT)
    others = {
        name: resumable_args(root / "model", root / name, **BFLOAT16, **layout) for name, layout in OTHERS.items()
    }
    return root, args, run_distributed(worker, 4, (args, others), timeout=300)


def planned_bytes(args) -> int:
    """Of the optimizer, in the host memory of a rank that saves, as the plan has it."""
    shape = model_shape_from_args(args)
    setup = TrainingSetup(
        layout=ParallelLayout(4, tensor=2),
        stages=split_into_stages(shape.num_layers, 1),
        state=StateBytes(weight=2, gradient=4, main_parameter=4, moments=8, saved=STATE_BYTES),
        kernels=Kernels.TORCH_CPU,
        recompute=Recompute(),
        stream_tokens=8,
        micro_batches=1,
        saves=True,
    )
    return training_memory(shape, setup)[0].saving_optimizer


@pytest.mark.slow
def test_data_parallel_ranks_divide_what_a_save_and_a_load_hold(found):
    _, args, ranks = found
    share = planned_bytes(args)
    # Ranks 0 and 1 are tensor-parallel, 0 and 2 data-parallel.
    for replicas in (ranks[0::2], ranks[1::2]):
        held = [rank["held"] for rank in replicas]
        for way in ("save", "load"):
            assert sum(rank[way] for rank in held) == STATE_BYTES * held[0]["parameters"] == 2 * share
            assert max(rank[way] for rank in held) <= share + STATE_BYTES * held[0]["largest"]


@pytest.mark.slow
def test_a_resume_has_every_bit_of_the_optimizer(found):
    for rank in found[-1]:
        assert rank["resumed"] == rank["saved"]


@pytest.mark.slow
def test_what_one_rank_lacks_is_refused_on_all(found):
    messages = {rank["lacking"] for rank in found[-1]}
    assert len(messages) == 1 and "it lacks optimizer state of" in messages.pop()


@pytest.mark.slow
def test_every_layout_saves_what_it_loaded_and_megatrons_own_way_is_the_same(found):
    """`saved` is in the checkpoint of Megatron's way, which all of them were loaded from, as in the one before it."""
    root, *_ = found
    expected = stored_tensors(root / "saved/iter_0000000")
    assert any(name.startswith("optimizer.state.exp_avg_sq.") and value.any() for name, value in expected.items())
    for directory in ("saved/iter_0000001", *(f"{name}/iter_0000000" for name in OTHERS)):
        values = stored_tensors(root / directory)
        assert values.keys() == expected.keys()
        different = [name for name, value in values.items() if not value.equal(expected[name])]
        if directory.startswith("weights/"):
            # The optimizer on the weights has another bfloat16 where its float32 value is halfway between two, and there only.
            different = [name for name in different if not differs_halfway_only(name, values, expected)]
        assert not different, f"{directory}: {different[:3]}"


def widen(narrow: SimpleNamespace, wide: SimpleNamespace) -> list[torch.Tensor]:
    """The weights of this rank, in float32, of a run that resumes from the checkpoint of one in bfloat16."""
    run = ResumableRun(narrow)
    run.prepare()
    run.step()
    run.save()
    return [p.detach().clone() for chunk in resumed(wide, narrow.save).model for p in chunk.parameters()]


def test_ranks_that_go_on_in_float32_all_have_the_float32_values_of_a_checkpoint_in_16_bits(tmp_path):
    """Each has them for its share of the optimizer, and only roundings of the rest."""
    write_tiny_model(tmp_path / "model", tied=False)
    cases = [
        resumable_args(tmp_path / "model", tmp_path / "saved", data_parallel_size=2, **flags)
        for flags in (BFLOAT16, {})
    ]
    one, other = run_distributed(widen, 2, tuple(cases))
    assert [index for index, (own, its) in enumerate(zip(one, other, strict=True)) if not own.equal(its)] == []
    rounded = [index for index, weight in enumerate(one) if weight.bfloat16().float().equal(weight)]
    # Norms of a fresh model are ones, and a step of them is small.
    assert len(rounded) < len(one) / 2


# As runs pad 131 rows: to a multiple of 8 for each tensor-parallel rank.
DATA, TENSOR = {"data_parallel_size": 2}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}
WHOLE_VOCABULARY, CUT_VOCABULARY = {**DATA, "padded_vocab_size": 136}, {**TENSOR, "padded_vocab_size": 144}
PADDINGS = {"fewer": (CUT_VOCABULARY, WHOLE_VOCABULARY), "more": (WHOLE_VOCABULARY, CUT_VOCABULARY)}
SPREAD = {**DATA, "expert_model_parallel_size": 2}
EXPERT_LAYOUTS = {
    "whole": DATA,
    "cut": TENSOR,
    "spread over the tensor group": {**TENSOR, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "cut, the rest whole": {**DATA, "expert_tensor_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 2},
}


def train_save_and_save_again(cases: dict[str, tuple[SimpleNamespace, dict[str, SimpleNamespace]]]) -> None:
    """Per case two steps and a checkpoint, and another of each layout that resumes from it."""
    for args, others in cases.values():
        run = ResumableRun(args)
        run.prepare()
        for _ in range(2):
            run.step()
        run.save()
        for other in others.values():
            resumed(other, args.save).save()


@pytest.mark.slow
def test_a_checkpoint_in_16_bits_goes_on_with_another_padding_of_the_vocabulary(tmp_path):
    """Rows that no token has learn nothing, so they may be anything that is a number; their moments are zero."""
    write_tiny_model(tmp_path / "model", tied=False)

    def args_in(layout, name):
        return resumable_args(tmp_path / "model", tmp_path / name, **BFLOAT16, **layout)

    cases = {
        name: (args_in(before, name), {"again": args_in(after, f"{name} again")})
        for name, (before, after) in PADDINGS.items()
    }
    run_distributed(train_save_and_save_again, 2, (cases,))
    for name, (before, after) in PADDINGS.items():
        saved, again = (
            stored_tensors(tmp_path / name / "iter_0000000"),
            stored_tensors(tmp_path / f"{name} again/iter_0000000"),
        )
        assert saved.keys() == again.keys()
        padded = {key for key in saved if key.endswith(("word_embeddings.weight", "output_layer.weight"))}
        assert len(padded) == 2 * (1 + len(("param", "exp_avg", "exp_avg_sq")))
        for key, value in saved.items():
            if key not in padded:
                assert value.equal(again[key]), key
                continue
            assert (len(value), len(again[key])) == (before["padded_vocab_size"], after["padded_vocab_size"]), key
            assert value[:131].equal(again[key][:131]) and again[key].isfinite().all(), key
            assert "exp_avg" not in key or not again[key][131:].any(), key


@pytest.mark.slow
def test_experts_in_16_bits_are_saved_as_they_were_loaded_in_every_layout(tmp_path):
    write_tiny_mixture(tmp_path / "model", "qwen3_moe")

    def args_in(layout, name):
        return resumable_args(tmp_path / "model", tmp_path / name, **BFLOAT16, **layout)

    others = {name: args_in(layout, name) for name, layout in EXPERT_LAYOUTS.items()}
    run_distributed(train_save_and_save_again, 2, ({"spread": (args_in(SPREAD, "spread"), others)},), timeout=300)
    saved = stored_tensors(tmp_path / "spread/iter_0000000")
    of_experts = [name for name in saved if name.startswith("optimizer.state.exp_avg_sq.") and "experts" in name]
    assert of_experts and all(saved[name].any() for name in of_experts)
    for name in EXPERT_LAYOUTS:
        again = stored_tensors(tmp_path / name / "iter_0000000")
        assert again.keys() == saved.keys()
        different = [key for key, value in saved.items() if not value.equal(again[key])]
        assert not different, f"{name}: {different[:3]}"


def differs_halfway_only(name, values, expected) -> bool:
    main = expected.get(f"optimizer.state.param.{name}")
    return main is not None and bool((main.view(torch.int32)[values[name] != expected[name]] & 0xFFFF == 0x8000).all())
