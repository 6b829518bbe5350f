"""Rules of routing replay: there must be routing, a pass that records it, and routers that ask."""

import argparse
from collections.abc import Iterator

from slime.arguments.rules import Rule


def routing_replay(args: argparse.Namespace) -> Iterator[str]:
    if not args.use_routing_replay or not args.has_trainer or args.num_layers is None:
        return
    flag = "--use-rollout-routing-replay" if args.use_rollout_routing_replay else "--use-routing-replay"
    if not args.num_experts:
        yield f"{flag}: the model has no experts (--num-experts), so there is no routing to replay; drop the flag"
        return
    if args.loss_type == "sft_loss":
        yield f"{flag} with --loss-type sft_loss: nobody has chosen experts for these samples before; drop the flag"
    if args.moe_router_fusion:
        yield f"{flag}: the kernel of --moe-router-fusion chooses experts by itself; drop one of them"
    types = args.moe_router_load_balancing_type
    if "sinkhorn" in ([types] if isinstance(types, str) else types or ()):
        yield (
            f"{flag}: --moe-router-load-balancing-type sinkhorn assigns experts over all tokens at once, which cannot be "
            "replayed; give none or aux_loss"
        )


REPLAY_RULES: tuple[Rule, ...] = (routing_replay,)
