"""The peak memory of one training rank, by part, from plain numbers: no model is built and nothing is allocated.

Some parts are always there: weights, gradient buffer, optimizer state. Others come and go within a step, never all at once;
the peak is the largest of the moments below, and `RankMemory` shows the parts as they are in it.

- "loss": the last micro-batch has gone forward, its logits and their gradient are there, every layer's activations too.
- "backward": a layer is differentiated; with full recomputation its activations are there once more.
- "gradient reduction": the library that reduces keeps a copy (Gloo only).
- "optimizer step": the update's own buffers.
- "weight push": tensors are gathered into transfer buckets.
"""

from dataclasses import dataclass, fields, replace

from slime.estimates.activations import ActivationModel, Kernels, Recompute, backward_working_set, kept_of_chunks
from slime.estimates.layout import ParallelLayout, PipelineStage, RankPlace, chunks_in_flight
from slime.estimates.parameters import ParameterCounts, RankParameters, count_parameters, rank_parameters
from slime.estimates.shape import ModelShape

# Bytes of the float32 rows in which log-probs are computed at a time: the trainer takes them, the plan counts them. On a CPU
# each thread works on a chunk of its own, fastest when that stays in its cache. On an accelerator a chunk is a few kernel
# launches.
ONE_THREAD_CHUNK_BYTES = 1 * 2**20
ACCELERATOR_CHUNK_BYTES = 128 * 2**20


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter: weight and gradient on every rank, the rest divided over replicas with `distributed`.

    main_parameter: the optimizer's own copy (0 when it updates the weights themselves).
    host_main_parameter: that copy where it is in host memory.
    step: what the update allocates for a while, beside state that is on the device.
    vocabulary_moments: on top of `moments`, of the parameters of embedding, output head and norms.
    offloaded: share of the optimizer's state that lives in host memory.
    saved: what a checkpoint holds of the optimizer.
    """

    weight: int
    gradient: int
    main_parameter: int
    moments: int
    step: int = 0
    vocabulary_moments: int = 0
    distributed: bool = True
    offloaded: float = 0.0
    host_main_parameter: int = 0
    saved: int = 0

    @property
    def optimizer(self) -> int:
        return self.main_parameter + self.moments


@dataclass(frozen=True)
class TrainingSetup:
    """What the memory of a rank follows from, beside the model.

    stream_tokens: tokens of one micro-batch on one rank, padding included.
    rollout_tokens: tokens of a whole rollout step that one rank keeps as training data.
    microbatch_group: micro-batches that go through one chunk of an interleaved stage before the next; None: one per stage.
    kept_whole: passes through a chunk, of those in flight, of which nothing is recomputed.
    delta_rule_kernels, residual_bytes: as `ActivationModel` has them.
    predictions: layers of multi-token prediction that are trained; each has logits of its own. Others are never run, and have
        neither gradients nor optimizer state.
    log_probs_chunk: bytes of the float32 rows that log-probs of 16-bit logits are computed in at a time.
    push_bucket: bytes of one transfer bucket of the weight push; 0: nothing is pushed.
    push_snapshot: the ranks that send keep the weights that engines have, to push what changed.
    gloo: collectives run on CPU, by Gloo.
    host_copies: sets of weights kept in host memory (reference and what its swap puts aside).
    sleeps: weights and optimizer state move to host memory while engines work.
    saves: checkpoints are written.
    loads_float32: weights of 16 bits come out of a checkpoint in float32, by way of the host.
    trains: steps are taken; else the rank only pushes its weights, and `state` has no optimizer.
    saves_in_background: the rank trains, or sleeps, while its checkpoint is written.
    shares_saves: replicas write a share each of what they hold alike; else the first of them writes all of it.
    overhead: bytes of the process's context and libraries.
    """

    layout: ParallelLayout
    stages: tuple[PipelineStage, ...]
    state: StateBytes
    kernels: Kernels
    recompute: Recompute
    stream_tokens: int
    micro_batches: int
    delta_rule_kernels: bool = False
    residual_bytes: int = 0
    rollout_tokens: int = 0
    microbatch_group: int | None = None
    kept_whole: int = 0
    predictions: int = 0
    log_probs_chunk: int = ACCELERATOR_CHUNK_BYTES
    push_bucket: int = 0
    push_snapshot: bool = False
    gloo: bool = False
    host_copies: int = 0
    sleeps: bool = False
    trains: bool = True
    saves: bool = False
    loads_float32: bool = False
    saves_in_background: bool = False
    shares_saves: bool = True
    overhead: int = 0


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank at its peak, by part. `moment`: which one that is.

    In host memory, and not in the sum: host_offloaded (optimizer state and its gradients), host_asleep (weights and optimizer
    state while the trainer sleeps), host_copies (other sets of weights), host_snapshot (the weights of the whole stage as
    engines have them, on its first rank, which sends them, and on no other). On top of these, while a checkpoint is written:
    saving_optimizer (gathered from the ranks that share it) and saving_weights (copied). That is of the rank that has most to
    write, the first of its stage; `stage_savings` has the sum for every rank of the stage, in their order. And in the place of
    all but host_offloaded, while the weights are loaded: loading (their float32 values).
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int
    data: int
    overhead: int
    moment: str
    stage: int
    host_offloaded: int = 0
    host_asleep: int = 0
    host_copies: int = 0
    host_snapshot: int = 0
    saving_optimizer: int = 0
    saving_weights: int = 0
    stage_savings: tuple[int, ...] = (0,)
    saves_in_background: bool = False
    loading: int = 0

    @property
    def host(self) -> int:
        """Of the first rank of the stage."""
        return sum(getattr(self, name) for name in HOST_PARTS)

    def host_of_ranks(self, ranks: int, stages: int) -> int:
        """Of so many ranks beside each other, among them the first ones of so many stages."""
        return ranks * (self.host - self.host_snapshot) + stages * self.host_snapshot

    @property
    def saving(self) -> int:
        return self.saving_optimizer + self.saving_weights

    def saving_beyond(self, *, one_memory: bool) -> int:
        """What a save takes of the host more than there is at other times: when the rank sleeps, or, where host and device
        have `one_memory`, at its peak. Activations are gone when it saves, unless it trains on meanwhile. A mean over the ranks
        of the stage."""
        room = self.total - self.persistent if one_memory else self.host_asleep
        if self.saves_in_background:
            room = 0
        return -(-sum(max(0, saving - room) for saving in self.stage_savings) // len(self.stage_savings))

    def loading_beyond(self, *, one_memory: bool) -> int:
        """The same of the float32 values of weights that are loaded, which go before the first pass."""
        room = self.host - self.host_offloaded + (self.total - self.persistent if one_memory else 0)
        return max(0, self.loading - room)

    def saving_of_node(self, ranks: int) -> int:
        """Of so many ranks beside each other, the first of the stage among them, which have most to write."""
        first = self.stage_savings[:ranks]
        return sum(first) * ranks // len(first)

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in MEMORY_PARTS)

    @property
    def persistent(self) -> int:
        """What is there between two steps too."""
        return self.weights + self.gradients + self.optimizer + self.data + self.overhead


HOST_PARTS = ("host_offloaded", "host_asleep", "host_copies", "host_snapshot")
SAVING_PARTS = ("saving_optimizer", "saving_weights")
_OTHERS = ("moment", "stage", "stage_savings", "saves_in_background", "loading", *HOST_PARTS, *SAVING_PARTS)
MEMORY_PARTS = tuple(field.name for field in fields(RankMemory) if field.name not in _OTHERS)

# Tokens, positions, masks, advantages, returns and up to four kinds of log-probs of a sample that waits for its micro-batch.
ROLLOUT_BYTES_PER_TOKEN = 40


def training_memory(shape: ModelShape, setup: TrainingSetup) -> tuple[RankMemory, ...]:
    """The peak of a rank of every pipeline stage, in their order."""
    counts = count_parameters(shape, padded_vocabulary=True)
    return tuple(_stage_memory(shape, counts, setup, stage) for stage in setup.stages)


def worst_rank(memories: tuple[RankMemory, ...]) -> RankMemory:
    """The stage with the highest peak; the first of equals."""
    return max(memories, key=lambda memory: memory.total)


def push_buffers(shape: ModelShape, setup: TrainingSetup, stage: PipelineStage) -> int:
    """Bytes of a weight push on the rank of `stage` that sends: two transfer buckets (one in flight, one being filled), or one
    that takes the whole model, the tensors that go into one, and the largest gather beside them, whose result may be larger
    than a bucket and is then sent as it is.

    Where nothing is gathered the tensors are the model's own, but for those of attention that is not latent: queries, keys and
    values lie in another order there.
    """
    counts, weight = count_parameters(shape, padded_vocabulary=True), setup.state.weight
    model = counts.total_with_mtp * weight
    bucket, buckets = min(setup.push_bucket, model), min(2 * setup.push_bucket, model)
    if bucket == 0:
        return 0
    if setup.layout.tensor == setup.layout.expert == 1:
        ordered = 0 if shape.mla is not None else sum(layer.attention for layer in counts.layers)
        return round(buckets + bucket * ordered / counts.total)
    # The embedding is gathered first, when there are no buckets yet; the output head last.
    beside = max(_mlp_gather(shape, counts, setup), counts.output_head if stage.is_last else 0)
    return max(buckets + bucket + beside * weight, counts.embedding * weight if stage.is_first else 0)


def received_buffers(shape: ModelShape, setup: TrainingSetup) -> int:
    """Bytes that an engine takes on each of its GPUs while it receives a weight push: the tensors of a bucket and the flat
    copy that they come in, or a larger tensor, which comes as it is."""
    counts = count_parameters(shape, padded_vocabulary=True)
    bucket = min(setup.push_bucket, counts.total_with_mtp * setup.state.weight)
    return max(2 * bucket, counts.embedding * setup.state.weight) if bucket else 0


def _mlp_gather(shape: ModelShape, counts: ParameterCounts, setup: TrainingSetup) -> int:
    """Parameters that are held at once to make the input projection of the largest MLP whole: the parts of all ranks, and the
    gates and ups that are brought together from them. Of one without gates it is the output projection. Of experts one gather
    brings as many as there are expert-parallel ranks, or as fit into a bucket, and one at least; they are whole unless
    tensor-parallel ranks share them."""
    experts, layout = shape.moe.num_experts if shape.moe is not None else 1, setup.layout
    mlp = max(max(layer.dense_mlp, layer.shared_experts) for layer in counts.layers)
    expert = max(layer.routed_experts for layer in counts.layers) // experts
    mlp, expert = (2 * size // 3 if shape.gated_mlp else size // 2 for size in (mlp, expert))
    at_once = max(1, min(layout.expert, setup.push_bucket // max(1, expert * setup.state.weight)))
    return max(2 * mlp, at_once * expert * (2 if layout.expert_tensor > 1 else 1))


def _stage_memory(shape: ModelShape, counts: ParameterCounts, setup: TrainingSetup, stage: PipelineStage) -> RankMemory:
    held = rank_parameters(shape, counts, setup.layout, stage)
    trained = rank_parameters(shape, counts.trained(predictions=setup.predictions > 0), setup.layout, stage)
    base = _persistent(held, trained, setup, stage, _sent(shape, counts, setup, stage) if setup.push_snapshot else 0)
    push = replace(base, moment="weight push", buffers=push_buffers(shape, setup, stage))
    if not setup.trains:
        return push
    # Experts and all else have an optimizer each, which step one after the other. What lives in host memory is updated there.
    update = round(max(_optimizer_shards(trained, setup)) * setup.state.step * (1 - setup.state.offloaded))
    borrowed = _borrowed_embedding(shape, counts, setup, stage)
    moments = [
        *_computing(shape, setup, stage, replace(base, buffers=borrowed)),
        replace(base, moment="optimizer step", buffers=update + borrowed),
        push,
    ]
    if setup.gloo:
        # A rank that shares no state with others has nothing to scatter.
        shares = zip((trained.dense, trained.routed_experts), _optimizer_shards(trained, setup), strict=True)
        copied = sum(own for own, share in shares if share < own) * setup.state.gradient
        moments.append(replace(base, moment="gradient reduction", buffers=round(copied) + borrowed))
    return max(moments, key=lambda memory: memory.total)


def _borrowed_embedding(shape: ModelShape, counts: ParameterCounts, setup: TrainingSetup, stage: PipelineStage) -> int:
    """Bytes of the first stage's embedding, of which the stage of multi-token prediction gets a copy for a step that trains its
    layers. Where weights are tied the last one has one."""
    has_one = stage.is_first or stage.is_last and shape.tied_embeddings
    if not setup.predictions or not stage.predicts or has_one:
        return 0
    return counts.embedding // setup.layout.tensor * setup.state.weight


def _sent(shape: ModelShape, counts: ParameterCounts, setup: TrainingSetup, stage: PipelineStage) -> int:
    """Bytes of a push from `stage`: its parameters, whole. Tied embeddings are sent by the first stage only."""
    whole = rank_parameters(shape, counts, replace(setup.layout, tensor=1, expert=1, expert_tensor=1), stage)
    vocabulary = whole.embedding + whole.output_head
    # With tied embeddings the last stage holds a copy of the first one's.
    if not stage.is_first:
        vocabulary = counts.output_head if stage.is_last else 0
    return (whole.total - whole.embedding - whole.output_head + vocabulary) * setup.state.weight


def _persistent(
    held: RankParameters, trained: RankParameters, setup: TrainingSetup, stage: PipelineStage, snapshot: int
) -> RankMemory:
    state = setup.state
    shard, optimizer = _optimizer_shard(trained, setup), _optimizer_bytes(trained, setup)
    on_device = optimizer * (1 - state.offloaded)
    weights = held.total * state.weight
    savings = _savings(held, trained, setup, stage) if setup.saves else [(0, 0)]
    return RankMemory(
        weights=weights,
        gradients=trained.total * state.gradient,
        optimizer=round(on_device),
        activations=0,
        logits=0,
        buffers=0,
        data=setup.rollout_tokens * ROLLOUT_BYTES_PER_TOKEN,
        overhead=setup.overhead,
        moment="",
        stage=stage.index,
        # The offloaded share also keeps its gradients there, and whole main parameters.
        host_offloaded=round(
            (optimizer + shard * (state.host_main_parameter - state.main_parameter + state.gradient)) * state.offloaded
        ),
        host_asleep=round(weights + on_device) if setup.sleeps else 0,
        host_copies=setup.host_copies * weights,
        host_snapshot=snapshot,
        saving_optimizer=savings[0][0],
        saving_weights=savings[0][1],
        stage_savings=tuple(map(sum, savings)),
        saves_in_background=setup.saves_in_background,
        loading=held.total * 4 if setup.loads_float32 else 0,
    )


def _savings(
    held: RankParameters, trained: RankParameters, setup: TrainingSetup, stage: PipelineStage
) -> list[tuple[int, int]]:
    """What every rank of a stage has in host memory of optimizer and weights while it saves."""
    layout, state = setup.layout, setup.state
    of_stage = layout.world_size // layout.pipeline
    savings = []
    for place in map(layout.place, range(stage.index * of_stage, (stage.index + 1) * of_stage)):
        # A distributed optimizer is divided in any case.
        optimizer = _optimizer_shard(trained, setup) if state.distributed else _written(trained, setup, place)
        savings.append((round(optimizer * state.saved), round(_written(held, setup, place) * state.weight)))
    return savings


def _written(parameters: RankParameters, setup: TrainingSetup, place: RankPlace) -> float:
    """What of its parameters the rank at `place` writes, where replicas hold them alike."""
    if setup.shares_saves:
        return sum(_shares_of_replica(parameters, setup))
    is_first, has_first_experts = place.context == place.data == 0, place.expert_data == 0
    return parameters.dense * is_first + parameters.routed_experts * has_first_experts


def _optimizer_shard(trained: RankParameters, setup: TrainingSetup) -> float:
    """Parameters whose optimizer state this rank keeps."""
    return sum(_optimizer_shards(trained, setup))


def _optimizer_shards(trained: RankParameters, setup: TrainingSetup) -> tuple[float, float]:
    """The same of all but the experts, and of the experts."""
    if not setup.state.distributed:
        return trained.dense, trained.routed_experts
    dense, routed_experts = _shares_of_replica(trained, setup)
    return dense * setup.layout.optimizers, routed_experts * setup.layout.optimizers


def _shares_of_replica(parameters: RankParameters, setup: TrainingSetup) -> tuple[float, float]:
    """Parameters of an even share, where ranks that hold the same ones divide them: all but the experts, and the experts."""
    layout = setup.layout
    return parameters.dense / layout.dense_replicas, parameters.routed_experts / layout.expert_replicas


def _optimizer_bytes(trained: RankParameters, setup: TrainingSetup) -> float:
    """The optimizer's state, wherever it lives."""
    replicas = setup.layout.dense_replicas / setup.layout.optimizers if setup.state.distributed else 1
    vocabulary = (trained.embedding + trained.output_head + trained.norms) / replicas
    return _optimizer_shard(trained, setup) * setup.state.optimizer + vocabulary * setup.state.vocabulary_moments


def _computing(
    shape: ModelShape, setup: TrainingSetup, stage: PipelineStage, base: RankMemory
) -> tuple[RankMemory, RankMemory]:
    """The moments "loss" (on other stages than the last: the end of the forward pass) and "backward".

    Args:
        base: with what is in its buffers in both.
    """
    model = ActivationModel(
        shape,
        setup.layout,
        setup.kernels,
        setup.state.weight,
        setup.recompute,
        delta_rule_kernels=setup.delta_rule_kernels,
        residual_bytes=setup.residual_bytes,
    )
    tokens = setup.stream_tokens
    chunks = [*stage.chunks, *([(-1,)] * setup.predictions if stage.predicts else [])]
    in_flight = chunks_in_flight(setup.layout, stage.index, setup.micro_batches, setup.microbatch_group)
    whole = min(setup.kept_whole / setup.layout.virtual_pipeline, in_flight)
    kept = kept_of_chunks(model, chunks) * (in_flight - whole)
    if whole:
        kept += sum(model.kept(chunk) for chunk in chunks) * whole
    head, width = 0.0, shape.hidden_size / (setup.layout.tensor if setup.layout.sequence_parallel else 1)
    if stage.is_last:
        # The final norm, whose output is what the head multiplies, and its input. A value head multiplies in float32.
        head = (4 * width if shape.value_head else model.norm(width)) + model.hidden
    elif stage.predicts and shape.mtp_num_layers:
        # That norm, and what is sent on to the head, or comes back from it.
        kept += (model.norm(width) + model.hidden) * in_flight + (1 + setup.predictions) * model.hidden
    if stage.passes_on:
        # Each prediction layer's hidden states lie behind the model's.
        kept += setup.predictions * model.hidden * in_flight
    # Sequence parallelism gathers into one buffer that stays.
    gathered = model.bytes * shape.hidden_size if setup.layout.sequence_parallel and setup.layout.tensor > 1 else 0
    base = replace(base, buffers=base.buffers + round(tokens * gathered))
    logits = _logits(shape, setup) if stage.is_last and not shape.value_head else 0
    loss = replace(base, moment="loss", activations=round(tokens * (kept + head)), logits=logits)
    working = backward_working_set(model, chunks)
    return loss, replace(base, moment="backward", activations=round(tokens * (kept + working)))


def _logits(shape: ModelShape, setup: TrainingSetup) -> int:
    """Logits, those of prediction layers too, and the gradient of one of them in the logits' dtype; for a chunk of rows that
    dtype once more, and float32.

    Or, for few tokens, the exponentials of the chunk, which entropy needs; or the gradients of logits and of the head's weight.
    """
    columns = shape.padded_vocab_size // setup.layout.tensor
    one = setup.stream_tokens * columns * setup.state.weight
    chunk = gathered = 0
    if setup.state.weight < 4:
        chunk = min(setup.log_probs_chunk, setup.stream_tokens * columns * 4)
        gathered = chunk * setup.state.weight // 4
    head_gradient = columns * shape.hidden_size * setup.state.weight
    return (1 + setup.predictions) * one + max(one + chunk + gathered, 2 * chunk + gathered, head_gradient)
