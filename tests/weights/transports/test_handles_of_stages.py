"""Weights of several pipeline stages by handles where each engine rank needs memory of the training rank on its device: every
rank shares the buckets of all stages, and nobody waits for a rank that has none of them."""

import os
import weakref
from types import SimpleNamespace

import pytest
import torch

from slime.scheduling.device_turns import Holds
from slime.utils.device import Accelerator
from slime.utils.errors import RunError
from tests.support.models.tiny_families import TINY_FAMILIES
from tests.support.models.tiny_model import tiny_args, write_predicting, write_tiny_mixture
from tests.support.processes.distributed import DistributedFailure, run_distributed
from tests.support.processes.opened_buckets import open_bucket

RANKS, STAGES = 4, 2
# Ranks on two nodes share no memory of the host, so each gives its own.
FLAGS = {
    "colocate": True, "update_weight_transport": "nccl", "has_trainer": True, "has_engines": True, "rollout_external": False,
    "rollout_external_engine_infos": None, "world_size": RANKS, "actor_num_nodes": 2, "num_gpus_per_node": 2,
    "rollout_num_gpus": RANKS, "rollout_num_gpus_per_engine": 2, "update_weight_mode": "full", "sglang_config": None,
    "num_rollout": 0, "update_weight_buffer_size": 1000, "distributed_timeout_minutes": 1,
}  # fmt: skip


class FakeGpu(Accelerator):
    """Says of the host what holds of a GPU."""

    shares_host_memory = False


class Engine:
    """Takes orders at once, but for those with the tensor `refuses`. `received`: by order and rank, whose memory it is, and
    the tensors."""

    def __init__(self):
        self.received, self.refuses = [], None
        self.update_weights_from_tensor = SimpleNamespace(remote=self._order)

    def _order(self, handles, load_format, timeout, version):
        order = [open_bucket(handle) for handle in handles]
        if any(self.refuses in tensors for _, tensors in order):
            return RunError("the shape is another")
        self.received.append(order)
        return None


class Pushes:
    """This rank's part in pushes to two engines of two devices each, in the order in which a driver has them."""

    def __init__(self, args, backend, tensors=None):
        from slime.observability import waiting
        from slime.training.actor_rank import ActorRank
        from slime.weights.buckets import split_into_buckets
        from slime.weights.transports import Receiver

        waiting.wait_for_each = lambda answers, name, timeout, **options: answers
        self.actor = ActorRank.__new__(ActorRank)
        self.actor.args, self.actor.backend, self.actor.weight_version = args, backend, 0
        self.actor.memory = SimpleNamespace(holds=Holds.ALL)
        self.actor.states = SimpleNamespace(require_active=lambda name: None)
        # No engine drafts.
        self.actor._stored_drafts = dict
        if tensors is not None:
            self.actor._buckets = lambda max_bytes, stored: lambda: split_into_buckets(tensors(), max_bytes)
        self.opening = self.actor.open_weight_push()
        self.engines = [Engine(), Engine()]
        self.receivers = [Receiver(id, engine, 2, 2 * id) for id, engine in enumerate(self.engines)]

    def push(self, version, num_engines=2):
        """What came of each source on this rank, an error by its message; and what the engines got from it."""
        import torch.distributed as dist

        for engine in self.engines:
            engine.received = []
        for source in range(STAGES):
            self.actor.connect_engines(source, self.receivers[:num_engines])
        outcomes = []
        for source in range(STAGES):
            try:
                outcomes.append(self.actor.send_weights(source, version))
            except RunError as error:
                outcomes.append(str(error))
            # The driver waits for all ranks.
            dist.barrier()
        self.actor.weights_settled()
        return outcomes, [engine.received for engine in self.engines]


def start_ranks():
    import torch.distributed as dist

    from slime.utils.process_groups import init_gloo_group

    dist.init_process_group("gloo")
    init_gloo_group()


def place_of(rank):
    """A backend that is nothing but a place: two stages of two copies."""
    import torch.distributed as dist

    place_groups = [dist.new_group([place, place + 2]) for place in range(2)]
    stage, place = divmod(rank, 2)
    groups = SimpleNamespace(
        stage=stage, num_stages=STAGES, replica=place, gives_weights=place == 0, place_group=place_groups[place]
    )
    return SimpleNamespace(groups=groups, expected_names=lambda: None)


def tensors_of(stage, version):
    """Of several dtypes and sizes; the last one is larger than a bucket."""
    generator = torch.Generator().manual_seed(2 * version + stage)
    made = {f"{stage}.{n}": torch.randn(30 + n, 2, generator=generator) for n in range(6)}
    made |= {f"{stage}.half": made[f"{stage}.5"].bfloat16(), f"{stage}.bytes": torch.arange(99, dtype=torch.uint8)}
    return made | {f"{stage}.large": torch.randn(20, 20, generator=generator)}


def weights(version):
    return {name: tensor for stage in range(STAGES) for name, tensor in tensors_of(stage, version).items()}


def stages_worker(is_gpu):
    """Pushes on this rank: all right, with other weights, one that an engine refuses, the same to the other engine, one with a
    name that engines do not know, one for which a rank has no memory, and one for which it has; by name."""
    import torch.distributed as dist

    from slime.utils.device import register_accelerator
    from slime.weights import buckets

    if is_gpu:
        os.environ["SLIME_ACCELERATOR"] = "fake-gpu"
        register_accelerator("fake-gpu", FakeGpu)
    start_ranks()
    rank, version = dist.get_rank(), 1
    backend = place_of(rank)
    flags = {"actor_num_nodes": 1, "num_gpus_per_node": RANKS} if is_gpu else {}
    args = SimpleNamespace(**FLAGS | flags)
    pushes = Pushes(args, backend, lambda: iter(tensors_of(backend.groups.stage, version).items()))
    found = {"first": pushes.push(1)}
    version = 2
    found["second"] = pushes.push(2)
    pushes.engines[1].refuses = "1.2"
    found["refused"] = pushes.push(3)
    found["of the other"] = pushes.push(3, num_engines=1)
    pushes.engines[1].refuses = None
    source, known = pushes.actor.weight_source, pushes.opening.expected_names
    source._expected_names = {name for stage in range(STAGES) for name in tensors_of(stage, 1)} - {"1.3"}
    found["unknown name"] = pushes.push(4)
    source._expected_names = known
    take = buckets.BucketFlattener._next_buffer
    if rank == 3:

        def take_none(self, size, device):
            raise RunError("no memory on rank 3")

        buckets.BucketFlattener._next_buffer = take_none
    found["without memory"] = pushes.push(4)
    buckets.BucketFlattener._next_buffer = take
    found["with memory"] = pushes.push(4)
    pushes.actor.weight_source.close()
    dist.destroy_process_group()
    return os.getpid(), found


def received(ranks, push, engine):
    """By rank of the engine, the tensors that it got, each once, with that of the training rank whose memory it was."""
    pids = [pid for pid, _ in ranks]
    of_ranks = [{}, {}]
    for _, found in ranks:
        for order in found[push][1][engine]:
            for place, (pid, tensors) in enumerate(order):
                assert pids[2 * engine + place] == pid and not of_ranks[place].keys() & tensors.keys()
                of_ranks[place] |= tensors
    return of_ranks


def same(got, expected):
    return got.keys() == expected.keys() and all(
        got[name].dtype == expected[name].dtype and torch.equal(got[name], expected[name]) for name in expected
    )


@pytest.mark.parametrize("is_gpu", [False, True], ids=["several nodes", "memory of a device"])
def test_every_engine_rank_gets_the_tensors_of_all_stages_from_the_rank_on_its_device(is_gpu):
    ranks = run_distributed(stages_worker, RANKS, (is_gpu,))
    outcomes = {push: [found[push][0] for _, found in ranks] for push in ranks[0][1]}
    for push, version, engines in (("first", 1, 2), ("second", 2, 2), ("of the other", 2, 1), ("with memory", 2, 2)):
        for engine in range(engines):
            for got in received(ranks, push, engine):
                assert same(got, weights(version)), (push, engine)
        for rank, of_sources in enumerate(outcomes[push]):
            for source, sent in enumerate(of_sources):
                assert (sent is not None) is (rank == 2 * source), push
                assert sent is None or (sent.failed == {} and sorted(sent.names) == sorted(tensors_of(source, version)))
    refused = outcomes["refused"]
    assert refused[0][0].failed == {} and refused[2][1].failed == {1: "the shape is another"} and refused[2][1].certain
    assert outcomes["unknown name"][0][0].refusal is None and "1.3" in outcomes["unknown name"][2][1].refusal
    without = outcomes["without memory"]
    assert without[0][0] == without[2][1] == "no memory on rank 3"
    assert all(without[rank][source] is None for rank in range(RANKS) for source in range(STAGES) if rank != 2 * source)
    assert not any(of_engine for _, found in ranks for of_engine in found["without memory"][1])


def breaking_worker():
    import torch.distributed as dist

    start_ranks()
    backend = place_of(dist.get_rank())

    def tensors():
        for name, tensor in tensors_of(backend.groups.stage, 1).items():
            if (dist.get_rank(), name) == (0, "0.4"):
                raise RuntimeError("0.4 cannot be quantised")
            yield name, tensor

    pushes = Pushes(SimpleNamespace(**FLAGS), backend, tensors)
    for source in range(STAGES):
        pushes.actor.connect_engines(source, pushes.receivers)
    for source in range(STAGES):
        pushes.actor.send_weights(source, 1)


def test_what_keeps_a_rank_from_making_a_bucket_is_told_at_once():
    """Others wait for it, as for any rank in a gather: the driver ends them."""
    with pytest.raises(DistributedFailure, match="0.4 cannot be quantised"):
        run_distributed(breaking_worker, RANKS, timeout=100, grace_seconds=1.0)


def test_room_for_a_large_tensor_is_given_back_before_that_for_the_next_is_made(monkeypatch):
    import torch.distributed as dist

    from slime.weights.buckets import BucketFlattener, Memory
    from slime.weights.transports.shared_handles import SharedHandlesTransport, _Step

    rooms = []

    class OneRoom(Memory):
        def allocate(self, size, device):
            assert all(room() is None for room in rooms)
            made = super().allocate(size, device)
            rooms.append(weakref.ref(made))
            return made

    follower = SharedHandlesTransport(SimpleNamespace(**FLAGS), 1, STAGES)
    follower.relay_over("the ranks in its place")
    follower._flattener = BucketFlattener(2, max_bytes=1000, memory=OneRoom())
    # Of the source: what a bucket holds, that all have room, and at last that there is no further one.
    large = _Step((["large"], ["float32"], [[20, 20]]), sends=True)
    told = iter([[large], [None], [large], [None], [_Step()]])
    of_rank = ({}, None)
    monkeypatch.setattr(follower, "_exchange", lambda value: [value] if value == of_rank else next(told))
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr(dist, "broadcast", lambda tensor, **options: None)
    follower.follow(0)
    assert len(rooms) == 2


LAYOUTS = {
    "tensor parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "two copies": {"tensor_model_parallel_size": 1},
    # The stages of a pipeline are ranks that follow each other.
    "two copies, other places": {"tensor_model_parallel_size": 1, "use_tp_pp_dp_mapping": True},
    "experts divided": {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 2},
}


def megatron_worker(root, layouts, model_flags):
    """By layout, two pushes of a Megatron model, whose weights change between them; and what this rank's stage has."""
    import torch.distributed as dist

    from tests.support.processes import megatron_worker as megatron

    all_found = {}
    for layout in layouts:
        flags = {**LAYOUTS[layout], **model_flags, "pipeline_model_parallel_size": STAGES}
        args = tiny_args(root, **{**FLAGS, **flags, "update_weight_buffer_size": 20_000})
        backend = megatron.load_backend(args)
        pushes, found = Pushes(args, backend), {}
        for version in (1, 2):
            for chunk in backend.model:
                for parameter in chunk.parameters():
                    parameter.data.add_(version - 1)
            of_stage = {name: tensor.clone() for name, tensor in backend.stage_tensors()()}
            found[version] = (*pushes.push(version), of_stage)
        pushes.actor.weight_source.close()
        all_found[layout] = pushes.opening, found
    rank = dist.get_rank()
    return os.getpid(), rank, all_found


def write_predictions(directory):
    """A layer for multi-token prediction, which the last stage has; and latent attention, whose projections go together."""
    family = TINY_FAMILIES["deepseek_v3"]
    write_predicting(directory, family.write, model_type=family.model_type, vocab_size=128, **family.entries)


@pytest.mark.slow
@pytest.mark.parametrize(
    "write, layouts, flags",
    [
        (lambda directory: write_tiny_mixture(directory, "qwen3_moe", vocab_size=128), tuple(LAYOUTS), {}),
        (write_predictions, ("experts divided",), {"mtp_num_layers": 1}),
    ],
    ids=["experts", "predictions"],
)
def test_stages_of_a_model_reach_all_ranks_of_all_engines(tmp_path, write, layouts, flags):
    from safetensors.torch import load_file

    write(tmp_path)
    found = run_distributed(megatron_worker, RANKS, (tmp_path, layouts, flags), timeout=300)
    for layout in layouts:
        ranks = [(pid, of_layouts[layout][1]) for pid, _, of_layouts in found]
        openings = [of_layouts[layout][0] for _, _, of_layouts in found]
        assert all(opening.num_sources == STAGES for opening in openings)
        stored = load_file(tmp_path / "model.safetensors")
        stored = {name: tensor for name, tensor in stored.items() if name in openings[0].expected_names}
        for version in (1, 2):
            of_stages = [of_rank[version][2] for _, of_rank in ranks]
            expected = {name: tensor for of_stage in of_stages for name, tensor in of_stage.items()}
            assert expected.keys() == stored.keys() and all(len(of_stage) < len(stored) for of_stage in of_stages), (
                layout
            )
            assert (version == 1) is same(expected, stored)
            for engine in range(2):
                for got in received(ranks, version, engine):
                    assert same(got, expected), (layout, version, engine)
