"""What a resumed optimizer takes from the checkpoint and what from the command line: told by the numbers of its next update."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from slime.arguments.checkpoints import WeightSource
from tests.support.processes.checkpoint_trainer import Trainer, make_args
from tests.support.processes.distributed import run_distributed
from tests.support.processes.resumed_run import ResumableRun, changed, resumable_args, resumed

STEPS = 2
KINDS = {"distributed": {}, "plain": {"use_distributed_optimizer": False}}
SAVED = {"lr_decay_style": "constant", "lr_decay_iters": None, "decoupled_lr": None}
SAVED_SETTINGS = {"lr": 1e-2, "decoupled_lr": 1e-2, "beta1": 0.9, "beta2": 0.98, "eps": 1e-8, "decay": 0.1}
# Flags of the resumed run, and the settings of its next update that differ from the checkpoint's.
FLAGS = {
    "none": ({}, {}),
    "lr": ({"lr": 1e-3}, {"lr": 1e-3, "decoupled_lr": 1e-3}),
    "min-lr, behind the end": (
        {"lr_decay_style": "linear", "lr_decay_iters": 1, "min_lr": 4e-3}, {"lr": 4e-3, "decoupled_lr": 4e-3},
    ),
    "warmup": ({"lr_warmup_iters": 3}, {"lr": 2e-2 / 3, "decoupled_lr": 2e-2 / 3}),
    "warmup that starts higher": (
        {"lr_warmup_iters": 3, "lr_warmup_init": 4e-3}, {"lr": 8e-3, "decoupled_lr": 8e-3},
    ),
    "decoupled-lr": ({"decoupled_lr": 3e-3}, {"decoupled_lr": 3e-3}),
    "betas": ({"adam_beta1": 0.5, "adam_beta2": 0.7}, {"beta1": 0.5, "beta2": 0.7}),
    "eps": ({"adam_eps": 1e-2}, {"eps": 1e-2}),
    "weight-decay": ({"weight_decay": 0.7}, {"decay": 0.7}),
    "growing weight decay, half way": (
        {"start_weight_decay": 0.2, "end_weight_decay": 0.6, "weight_decay_incr_style": "linear"}, {"decay": 0.4},
    ),
}  # fmt: skip
# By the optimizer that saved: flags of a run in whose optimizer its state has no place, and how the message tells that.
SGD_HERE = {"optimizer": "sgd", "sgd_momentum": 0.9, "use_distributed_optimizer": False}
OTHER_KINDS = {
    "distributed": {
        "plain": (
            {"use_distributed_optimizer": False},
            "--use-distributed-optimizer in the checkpoint, and --no-use-distributed-optimizer by the flags",
        ),
        "sgd": (SGD_HERE, "--optimizer adam in the checkpoint, and sgd by the flags"),
    },
    "plain": {
        "distributed": (
            {"use_distributed_optimizer": True, "bf16": True},
            "--no-use-distributed-optimizer in the checkpoint, and --use-distributed-optimizer by the flags",
        ),
        "narrow": (
            {"bf16": True}, "weights in float32 in the checkpoint, and weights of 16 bits (--bf16 or --fp16) by the flags",
        ),
        "sgd": (SGD_HERE, "optimizer: --optimizer adam in the checkpoint, and sgd by the flags;"),
    },
    "sgd": {
        "wide": (
            {"bf16": False}, "weights of 16 bits (--bf16 or --fp16) in the checkpoint, and weights in float32 by the flags",
        ),
        "adam": ({"optimizer": "adam"}, "optimizer: --optimizer sgd in the checkpoint, and adam by the flags;"),
        "momentum": ({"sgd_momentum": 0.9}, "optimizer: --sgd-momentum 0 in the checkpoint, and 0.9 by the flags;"),
    },
}  # fmt: skip
ALL_AT_ONCE = {
    "lr": 1e-3, "min_lr": 0.0, "lr_decay_style": "linear", "lr_decay_iters": 3, "adam_beta1": 0.5, "adam_beta2": 0.7,
    "adam_eps": 1e-2, "weight_decay": 0.7, "use_checkpoint_opt_param_scheduler": True,
}  # fmt: skip


def next_update(args, directory, settings) -> tuple[float, int]:
    """Largest difference between the update that a resumed optimizer takes and the formula's; and its step count."""
    trainer = Trainer(args)
    parts = trainer.optimizer.chained_optimizers
    factors = [group["wd_mult"] for part in parts for group in part.optimizer.param_groups]
    trainer.load(WeightSource("megatron", directory, resume=True))
    groups = [(part.optimizer, group) for part in parts for group in part.optimizer.param_groups]
    before = [[moments_of(optimizer, p) for p in group["params"]] for optimizer, group in groups]
    trainer.step()
    largest, steps = 0.0, {group["step"] for _, group in groups}
    assert sorted({*factors}) == [0.0, 1.0] and factors == [group["wd_mult"] for _, group in groups]
    for (_, group), factor, states in zip(groups, factors, before, strict=True):
        for parameter, (old, first, second) in zip(group["params"], states, strict=True):
            lr = settings["lr"] if group["default_config"] else settings["decoupled_lr"]
            expected = adam(old, parameter.grad, first, second, max(steps), {**settings, "lr": lr}, factor)
            largest = max(largest, float((parameter.detach() - expected).abs().max()))
    (step,) = steps
    return largest, step


def moments_of(optimizer, parameter) -> tuple:
    state = optimizer.state.get(parameter, {})
    zeros = torch.zeros_like(parameter)
    tensors = parameter.detach(), state.get("exp_avg", zeros), state.get("exp_avg_sq", zeros)
    return tuple(tensor.clone().double() for tensor in tensors)


def adam(old, gradient, first, second, step, settings, factor) -> torch.Tensor:
    """AdamW in float64 (Loshchilov & Hutter 2019, algorithm 2)."""
    gradient, lr = gradient.double(), settings["lr"]
    first = settings["beta1"] * first + (1 - settings["beta1"]) * gradient
    second = settings["beta2"] * second + (1 - settings["beta2"]) * gradient**2
    scale = (second / (1 - settings["beta2"] ** step)).sqrt() + settings["eps"]
    decayed = old * (1 - lr * settings["decay"] * factor)
    return decayed - lr * first / (1 - settings["beta1"] ** step) / scale


def trained_and_saved(args) -> Trainer:
    trainer = Trainer(args)
    for _ in range(STEPS):
        trainer.step()
    trainer.save(0)
    return trainer


def settings_worker(cases) -> dict:
    """Per kind of optimizer, and per flags: `next_update`."""
    results = {}
    for kind, args in cases.items():
        trainer = trained_and_saved(args)
        for name, (flags, settings) in FLAGS.items():
            results[kind, name] = next_update(changed(args, **flags), args.save, {**SAVED_SETTINGS, **settings})
        for name, (flags, _) in OTHER_KINDS[kind].items():
            results[kind, name] = refusal(changed(args, **flags))
        if kind == "distributed":
            results["narrow"] = narrow_and_stateless(args, copies_of(trainer))
        fresh = {**ALL_AT_ONCE, "no_load_optim": True}
        results[kind, "checkpoint's"] = next_update(changed(args, **ALL_AT_ONCE), args.save, SAVED_SETTINGS)
        results[kind, "checkpoint's, fresh optimizer"] = next_update(changed(args, **fresh), args.save, SAVED_SETTINGS)

        common = Path(args.save) / "iter_0000000/common.pt"
        rewrite(common, forget_settings)
        results[kind, "older checkpoint's"] = next_update(changed(args, **ALL_AT_ONCE), args.save, SAVED_SETTINGS)
        results[kind, "older"] = next_update(args, args.save, SAVED_SETTINGS)
        rewrite(common, forget_steps)
        results[kind, "no step count"] = refusal(args)
        results[kind, "no step count, fresh"] = next_update(
            changed(args, no_load_optim=True), args.save, SAVED_SETTINGS
        )
    return results


def copies_of(trainer) -> list[torch.Tensor]:
    """The float32 weights that the optimizer updates."""
    groups = [group for part in trainer.optimizer.chained_optimizers for group in part.optimizer.param_groups]
    return [parameter.detach().clone() for group in groups for parameter in group["params"]]


def narrow_and_stateless(args, saved) -> tuple[bool, bool, int]:
    """A float32 checkpoint in a bfloat16 run that needs no moments: whether its copies are the saved ones, and more than its
    weights are; tensors beside them."""
    trainer = Trainer(changed(args, bf16=True, use_stateless_adam=True, no_save_optim=True))
    trainer.load(WeightSource("megatron", args.save, resume=True))
    copies = copies_of(trainer)
    kept = sum(len(state) for part in trainer.optimizer.chained_optimizers for state in part.optimizer.state.values())
    same = all(copy.equal(old) for copy, old in zip(copies, saved, strict=True))
    return same, any(not copy.equal(copy.bfloat16().float()) for copy in copies), kept


def rewrite(path, change) -> None:
    common = torch.load(path, weights_only=True)
    change(common)
    torch.save(common, path)


def forget_settings(common) -> None:
    del common["parameter_groups"], common["loss_scales"]
    state = common["optimizer"]
    for group in state.get("optimizer", state)["param_groups"]:
        group["is_decoupled_lr"] = False
    for name in ("init_lr", "wsd_decay_steps", "lr_wsd_decay_style"):
        del common["scheduler"][name]


def forget_steps(common) -> None:
    state = common["optimizer"]
    for group in state.get("optimizer", state)["param_groups"]:
        del group["step"]


def refusal(args) -> str:
    from slime.utils.errors import UserError

    with pytest.raises(UserError) as error:
        Trainer(args).load(WeightSource("megatron", args.save, resume=True))
    return str(error.value)


def schedule_worker(args, resumes) -> dict[str, list[str]]:
    """What is said at the resume, per case."""
    trained_and_saved(args)
    lines = {}
    for name, flags in resumes.items():
        records: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = records.append
        logging.getLogger("slime").addHandler(handler)
        Trainer(changed(args, **flags)).load(WeightSource("megatron", args.save, resume=True))
        logging.getLogger("slime").removeHandler(handler)
        lines[name] = [record.getMessage() for record in records]
    return lines


LENGTHS = {
    "longer": {"num_rollout": 8},
    "longer, critic": {"num_rollout": 8, "role": "critic", "no_load_optim": True},
    "longer, other rate": {"num_rollout": 8, "lr": 2e-2},
    "other rate": {"lr": 2e-2},
    "same": {},
    "length given": {"num_rollout": 8, "lr_decay_iters": 6},
    "length of the checkpoint given": {"num_rollout": 8, "lr_decay_iters": 4},
    "checkpoint's": {"num_rollout": 8, "use_checkpoint_opt_param_scheduler": True},
    "growing decay": {
        "num_rollout": 8,
        "lr_decay_iters": 6,
        "start_weight_decay": 0.2,
        "end_weight_decay": 0.6,
        "weight_decay_incr_style": "linear",
    },
    "other decay": {"num_rollout": 8, "lr_decay_iters": 6, "weight_decay": 0.5},
    "past its end": {"num_rollout": 2},
}


SGD = {"optimizer": "sgd", "sgd_momentum": 0.0, "use_distributed_optimizer": False, "bf16": True}
MOMENTUM = SGD | {"sgd_momentum": 0.9}
RESUMED_SGD = {"again": {}, "by the checkpoint": {"sgd_momentum": 0.9, "use_checkpoint_opt_param_scheduler": True}}


def one_rank_worker(cases, schedule, resumes, sgd, momentum):
    of_sgd = schedule_worker(sgd, RESUMED_SGD) | schedule_worker(momentum, {"without": {"sgd_momentum": 0.0}})
    of_adam = settings_worker(cases)
    others = OTHER_KINDS["sgd"].items()
    refused = {("sgd", name): refusal(changed(sgd, **flags)) for name, (flags, _) in others}
    return of_adam | refused, schedule_worker(schedule, resumes), of_sgd


@pytest.fixture(scope="module")
def one_rank(hf_dir, tmp_path_factory):
    root = tmp_path_factory.mktemp("one")
    cases = {kind: make_args(hf_dir, root / kind, **SAVED, **flags) for kind, flags in KINDS.items()}
    schedule = make_args(hf_dir, root / "schedule", lr_decay_iters=None)
    sgd, momentum = (
        make_args(hf_dir, root / name, **flags) for name, flags in {"sgd": SGD, "momentum": MOMENTUM}.items()
    )
    return run_distributed(one_rank_worker, 1, (cases, schedule, LENGTHS, sgd, momentum), timeout=300)[0]


def assert_by_the_formula(update, expected_step) -> None:
    difference, step = update
    assert difference < 1e-6
    assert step == expected_step


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("kind", KINDS)
def test_flags_of_the_command_line_win_over_the_checkpoint(one_rank, kind, name):
    assert_by_the_formula(one_rank[0][kind, name], STEPS + 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["checkpoint's", "older checkpoint's"])
def test_settings_of_the_checkpoint_hold_when_they_are_asked_for(one_rank, kind, name):
    assert_by_the_formula(one_rank[0][kind, name], STEPS + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_without_the_settings_goes_on(one_rank, kind):
    assert_by_the_formula(one_rank[0][kind, "older"], STEPS + 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["checkpoint's, fresh optimizer", "no step count, fresh"])
def test_a_fresh_optimizer_starts_at_its_first_step(one_rank, kind, name):
    assert_by_the_formula(one_rank[0][kind, name], 1)


def test_a_stateless_run_in_16_bits_takes_the_float32_weights_and_no_moments(one_rank):
    assert one_rank[0]["narrow"] == (True, True, 0)


@pytest.mark.parametrize("case", [*RESUMED_SGD, "without"])
def test_an_optimizer_without_moments_does_not_start_fresh(one_rank, case):
    """It is the same after a resume, so nothing is said of it; and it has none if the checkpoint says so, or the flags."""
    [of_the_weights] = one_rank[2][case]
    assert "are stored in float32 and rounded to the 16 bits" in of_the_weights


@pytest.mark.parametrize("kind", KINDS)
def test_moments_without_their_step_count_are_refused(one_rank, kind):
    message = one_rank[0][kind, "no step count"]
    assert "iter_0000000 lacks Adam's step count" in message and "give --no-load-optim" in message


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, cases in OTHER_KINDS.items() for name in cases])
def test_state_of_another_kind_of_optimizer_is_refused_by_the_flags_that_differ(one_rank, kind, name):
    message, (_, difference) = one_rank[0][kind, name], OTHER_KINDS[kind][name]
    assert "iter_0000000 has no place in this run's optimizer: " in message and "or --no-load-optim" in message
    assert difference in message, message


def test_a_schedule_that_follows_the_length_of_the_run_is_told_with_both_curves(one_rank):
    lines = one_rank[1]
    told = (
        "the learning-rate schedule is as long as the run, 8 optimizer steps with --num-rollout 8, and was 4 in the "
        "checkpoint. After 2 steps the next has lr 0.00775 (by the checkpoint's schedule 0.0055); the schedule ends at 0.001 "
        "after 8 steps (the checkpoint's at 0.001 after 4). To keep its length, give "
    )
    assert lines.pop("longer") == [f"actor: {told}--lr-decay-iters 4"]
    assert lines.pop("longer, critic") == [f"critic: {told}`lr_decay_iters: 4` in the critic's overrides"]
    (line,) = lines.pop("longer, other rate")
    assert "the next has lr 0.01525 (by the checkpoint's schedule 0.0055)" in line
    assert lines.pop("growing decay") == [
        "actor: the weight decay changes over the length of the run, 8 optimizer steps with --num-rollout 8, and did so over 4 "
        "in the checkpoint. After 2 steps the next has 0.3 (by the checkpoint's schedule 0.1). To keep its schedules, that of "
        "the learning rate too, give --use-checkpoint-opt-param-scheduler"
    ]
    (line,) = lines.pop("past its end")
    assert "the next has lr 0.001 (by the checkpoint's schedule 0.0055)" in line
    # Nothing is said where the curve stays, or somebody chose its length.
    assert lines == dict.fromkeys(lines, [])


# What a run may have when it saves before any update.
UNTOUCHED = {
    "actor": {"bf16": True},
    "only the second stage learns": {"only_train_params_name_list": [r"layers\.1\.", "final"]},
    "plain optimizer": {"use_distributed_optimizer": False, "bf16": True},
    "stateless": {"use_stateless_adam": True, "no_save_optim": True},
    "stateless, bf16": {"use_stateless_adam": True, "no_save_optim": True, "bf16": True},
}


def save_at_once_worker(cases) -> dict:
    """A step and a checkpoint; a run that takes the weights alone and saves at once; a run that resumes from that."""
    results = {}
    for name, args in cases.items():
        run = ResumableRun(args)
        run.prepare()
        run.step()
        run.save()
        weights = run.fingerprints()["weights"]
        again = changed(args, no_load_optim=True, save=f"{args.save}_again")
        run = resumed(again, args.save)
        before = run.fingerprints()
        run.save(1)
        run = resumed(changed(args, save="unused"), again.save)
        results[name] = (weights, before, run.fingerprints())
    return results


def test_a_run_that_took_the_weights_alone_can_save_before_its_first_update(hf_dir, tmp_path):
    pipeline = {"pipeline_model_parallel_size": 2}
    cases = {
        name: resumable_args(hf_dir, tmp_path / str(i), **pipeline, **flags)
        for i, (name, flags) in enumerate(UNTOUCHED.items())
    }
    for rank in run_distributed(save_at_once_worker, 2, (cases,), timeout=240):
        for name, (weights, saved, found) in rank.items():
            assert saved == found, name
            assert saved["weights"] == weights and not any(saved["steps"]), name


def resume_with_more_to_train(frozen, everything) -> str | None:
    """The error of a run that trains what the one before it had frozen."""
    from slime.utils.errors import UserError

    run = ResumableRun(frozen)
    run.prepare()
    run.step()
    run.save()
    try:
        resumed(everything, frozen.save)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize("frozen", ["q_layernorm", "final_layernorm"], ids=["in between", "the last one"])
@pytest.mark.parametrize("layout", [{}, {"tensor_model_parallel_size": 2}], ids=["one rank", "tensor"])
def test_no_weight_is_left_without_a_float32_copy_of_its_own(hf_dir, tmp_path, layout, frozen):
    """Where a checkpoint may lack something: the copies behind it would move up, and the last weight keep that of the weights
    that the model was made with, which the next step would bring back."""
    whole = {"bf16": True, "use_distributed_optimizer": False, "dist_ckpt_strictness": "log_all", **layout}
    saved = resumable_args(hf_dir, tmp_path / "save", freeze_params_name_list=[frozen], **whole)
    everything = changed(saved, freeze_params_name_list=None)
    for said in run_distributed(resume_with_more_to_train, 2 if layout else 1, (saved, everything)):
        assert said is not None and "it lacks optimizer state of" in said and "--no-load-optim" in said
