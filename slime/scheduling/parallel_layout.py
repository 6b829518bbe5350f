"""How training ranks are numbered: tensor, context, (expert,) data and pipeline parallelism in Megatron-Core's default order.

Attention and dense layers count ranks as tensor · context · data · pipeline, experts as expert-tensor · expert · expert-data ·
pipeline, the first one fastest. Both views describe the same ranks; only the pipeline stage is common to them.
"""

from dataclasses import dataclass

from slime.utils.errors import UserError


@dataclass(frozen=True)
class RankPlace:
    """Coordinates of a rank; `expert` and `expert_data` are those of its experts."""

    tensor: int
    context: int
    data: int
    pipeline: int
    expert: int
    expert_data: int


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of all parallel groups of `world_size` ranks.

    virtual_pipeline: model chunks per pipeline rank (1: not interleaved).

    Raises:
        UserError: the world cannot be divided into these groups; names the flags.
    """

    world_size: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual_pipeline: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        dense, experts = self.tensor * self.pipeline * self.context, self.expert_tensor * self.expert * self.pipeline
        if self.world_size % dense:
            raise UserError(
                f"{self.world_size} training ranks (--actor-num-nodes x --actor-num-gpus-per-node) cannot be divided into "
                f"groups of --tensor-model-parallel-size {self.tensor} x --pipeline-model-parallel-size {self.pipeline} x "
                f"--context-parallel-size {self.context} = {dense}; a multiple of {dense} would do"
            )
        if self.world_size % experts:
            raise UserError(
                f"{self.world_size} training ranks (--actor-num-nodes x --actor-num-gpus-per-node) cannot be divided into "
                f"groups of --expert-tensor-parallel-size {self.expert_tensor} x --expert-model-parallel-size {self.expert} x "
                f"--pipeline-model-parallel-size {self.pipeline} = {experts}; a multiple of {experts} would do"
            )

    @property
    def data(self) -> int:
        """Data-parallel size: groups of ranks that see different micro-batches."""
        return self.world_size // (self.tensor * self.pipeline * self.context)

    @property
    def dense_replicas(self) -> int:
        """Ranks that hold the same shard of dense parameters, and share its optimizer state."""
        return self.data * self.context

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same experts, and share their optimizer state."""
        return self.world_size // (self.expert_tensor * self.expert * self.pipeline)

    def place(self, rank: int) -> RankPlace:
        """Coordinates of a rank."""
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        expert_rest = rank // self.expert_tensor
        expert_rest, expert = divmod(expert_rest, self.expert)
        return RankPlace(tensor, context, data, pipeline, expert, expert_rest % self.expert_replicas)
