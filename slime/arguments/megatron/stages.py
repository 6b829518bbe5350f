"""The pipeline stages that the flags describe: one answer for the rules, which refuse what cannot be, and for the plan."""

import argparse

from slime.estimates.layout import PipelineStage, split_into_stages


def pipeline_stages(args: argparse.Namespace) -> tuple[PipelineStage, ...]:
    """The stages of a model whose shape is known; `--pipeline-model-parallel-layout` is not read.

    Raises:
        UserError: the layers cannot be split so.
    """
    return split_into_stages(
        args.num_layers,
        args.pipeline_model_parallel_size,
        first=args.decoder_first_pipeline_num_layers,
        last=args.decoder_last_pipeline_num_layers,
        virtual_pipeline=args.virtual_pipeline_model_parallel_size or 1,
        embedding_counts=args.account_for_embedding_in_pipeline_split,
        loss_counts=args.account_for_loss_in_pipeline_split,
    )


def counted_as_layers(args: argparse.Namespace) -> int:
    """How many of embedding and loss take the place of a layer."""
    return bool(args.account_for_embedding_in_pipeline_split) + bool(args.account_for_loss_in_pipeline_split)
