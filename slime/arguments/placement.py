"""Derived modes and sizes: who takes part in the run, on how many GPUs, and what makes room for what."""

import argparse

# GPUs of a usual node: how a run without training ranks counts its nodes.
_USUAL_NODE = 8


def derive_placement(args: argparse.Namespace) -> None:
    """Fill modes, sizes and offloads, in place."""
    _modes(args)
    _external_engines(args)
    if args.colocate and "num_gpus_per_node" not in args.typed_flags:
        args.num_gpus_per_node = args.actor_num_gpus_per_node
    if getattr(args, "offload", False):
        _offload_both(args)
    args.use_critic = args.advantage_estimator == "ppo"
    if args.use_critic:
        # Actor and critic take turns on the same GPUs.
        args.offload_train = True
    if args.debug_rollout_only:
        _without_trainer(args)
    if args.colocate:
        _colocated(args)
    args.offload_train, args.offload_rollout = bool(args.offload_train), bool(args.offload_rollout)
    # Offloading moves these buffers itself; a second copy on the host would only take memory.
    args.disable_param_buffer_cpu_backup = args.disable_grad_buffer_cpu_backup = args.offload_train
    if args.use_critic:
        args.critic_num_nodes, args.critic_num_gpus_per_node = args.actor_num_nodes, args.actor_num_gpus_per_node
    if args.release_train and args.save_interval is None:
        args.save_interval = 1


def _modes(args: argparse.Namespace) -> None:
    if args.load_debug_rollout_data is not None:
        args.debug_train_only = True
    if args.debug_train_only:
        args.rollout_num_gpus = 0
    args.has_trainer = not args.debug_rollout_only
    args.has_engines = not args.debug_train_only


def _external_engines(args: argparse.Namespace) -> None:
    # What these engines are is asked when the run starts: the command line must not wait for the network.
    args.rollout_external = bool(args.rollout_external_engine_addrs) and args.has_engines
    args.rollout_external_engine_infos = None


def _offload_both(args: argparse.Namespace) -> None:
    # `--offload --no-offload-train` asks for one of them.
    for name in ("offload_train", "offload_rollout"):
        if getattr(args, name) is None:
            setattr(args, name, True)


def _without_trainer(args: argparse.Namespace) -> None:
    """The training sizes of a run that only generates are those of its engines."""
    if args.rollout_external:
        return
    if args.colocate and args.rollout_num_gpus is None:
        args.rollout_num_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
    gpus = args.rollout_num_gpus or 0
    args.actor_num_gpus_per_node = min(_USUAL_NODE, gpus)
    args.actor_num_nodes = gpus // args.actor_num_gpus_per_node if gpus else 0
    args.colocate = args.offload_train = args.offload_rollout = False


def _colocated(args: argparse.Namespace) -> None:
    if args.offload_train is None:
        # A trainer that ends during generation has nothing to move.
        args.offload_train = not args.release_train
    if args.offload_rollout is None:
        args.offload_rollout = True
    if args.rollout_num_gpus is None:
        args.rollout_num_gpus = args.actor_num_nodes * args.actor_num_gpus_per_node
