"""A memory probe leaves no trace: a rank and all that it trains afterwards are, bit for bit, what they are without it."""

import argparse
import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from slime.arguments import parse_args
from slime.plan.longest_batch import ProbedMemory
from slime.utils.device import Accelerator
from slime.utils.errors import UserError
from tests.support.models.tiny_families import TINY_FAMILIES
from tests.support.models.tiny_model import write_tiny_model
from tests.support.processes.actor_run import Rank, command_line, same
from tests.support.processes.distributed import DistributedFailure, run_distributed
from tests.support.processes.layout_steps import layout_args

ONE = ["--tensor-model-parallel-size", "1"]
# Above the budget: the longest sample is alone.
BUDGET = [
    "--use-dynamic-batch-size", "--max-tokens-per-gpu", "24", "--rollout-max-prompt-len", "16",
    "--rollout-max-response-len", "32",
]  # fmt: skip
EXPERTS = [
    *ONE, "--expert-model-parallel-size", "2", "--moe-router-bias-update-rate", "0.1",
    "--moe-router-load-balancing-type", "seq_aux_loss", "--moe-aux-loss-coeff", "0.01",
    "--moe-per-layer-logging",
]  # fmt: skip
LAYOUTS = {
    # Made-up advantages are 0: what has a gradient is another term.
    "tensor": ["--sequence-parallel", "--entropy-coef", "0.01"],
    "pipeline": [*ONE, "--pipeline-model-parallel-size", "2", "--use-kl-loss", "--recompute-loss-function"],
    "data": [*ONE, "--overlap-grad-reduce", "--rollout-top-p", "0.9", "--use-tis"],
    "context": [*ONE, "--context-parallel-size", "2", "--advantage-estimator", "gspo", "--num-steps-per-rollout", "2"],
    "recomputed": ["--gradient-checkpointing", "--bf16"],
    # A step without overflow counts towards a larger loss scale.
    "float16": [*ONE, "--fp16", "--initial-loss-scale", "256"],
    "moments in 16 bits": [*ONE, "--bf16", "--use-precision-aware-optimizer", "--exp-avg-dtype", "bf16"],
    "fsdp": [*ONE, "--train-backend", "fsdp"],
    "fsdp, offloaded": [*ONE, "--train-backend", "fsdp", "--fsdp-cpu-offload", "--gradient-checkpointing"],
}

# Functions of the user's that a probe calls would not be found.
NOT_CALLED = (
    "custom_megatron_before_log_prob_hook_path", "custom_megatron_before_train_step_hook_path",
    "custom_pg_loss_reducer_function_path",
)  # fmt: skip

# No run may have it, since log-probs must not depend on chance; here it draws from all generators in every step.
DROPOUT = {name: {"hidden_dropout": 0.2} for name in ("tensor", "recomputed")}


class ProbedRank(Rank):
    """A rank whose samples are cut as its context-parallel group has them, and whose model counts its passes, as one of a
    user's own may."""

    def __init__(self, words: list[str], **overrides) -> None:
        import torch

        def count(module, *_) -> None:
            module.passes.add_(1)

        super().__init__(words, **overrides)
        # A reference takes the place of what the model had when it was loaded.
        counts = self.args.train_backend == "megatron" and not self.args.use_kl_loss
        for chunk in self.actor.backend.model if counts else ():
            chunk.module.register_buffer("passes", torch.zeros(1), persistent=False)
            chunk.module.register_forward_hook(count)

    def _data(self):
        from slime.training.rollout_data import RolloutData

        self.data = RolloutData.of_rank(super()._data(), self.actor.groups.cp)
        return self.data

    def probe(self):
        from slime.plan.longest_batch import longest_micro_batches

        vars(self.args).update(dict.fromkeys(NOT_CALLED, "nowhere:to_be_found"))
        probed = self.actor.probe_memory(longest_micro_batches(self.args), 0)
        vars(self.args).update(dict.fromkeys(NOT_CALLED))
        return probed

    def optimizer_bytes(self) -> int:
        """Of what it remembers, but for counters of steps."""
        return sum(tensor.nbytes for tensor in self.actor.backend.residents().optimizer if tensor.ndim)

    def state(self) -> dict:
        """Whatever a probe may have touched, copied."""
        import torch

        backend, groups = self.actor.backend, self.actor.backend.optimizer.param_groups
        residents = backend.residents()
        found = {
            "weights and buffers": [tensor.clone() for tensor in residents.weights],
            "optimizer": [tensor.clone() for tensor in residents.optimizer],
            "gradients": [tensor.clone() for tensor in residents.gradients],
            "generator": torch.get_rng_state(),
            "schedule": torch.tensor([backend.scheduler.num_steps, *[group["lr"] for group in groups]]),
        }
        if self.args.train_backend == "megatron":
            from megatron.core import tensor_parallel

            from slime.backends.megatron_utils.optimizer import parts_of

            found |= {
                name: state.clone() for name, state in tensor_parallel.get_cuda_rng_tracker().get_states().items()
            }
            found["steps"] = torch.tensor(backend.housekeeping._steps)
            scalers = [part.grad_scaler for part in parts_of(backend.optimizer) if getattr(part, "grad_scaler", None)]
            found["loss scales"] = [
                torch.as_tensor(value).clone() for scaler in scalers for value in scaler.state_dict().values()
            ]
        return found

    def end(self) -> None:
        if self.args.train_backend == "megatron":
            super().end()
        else:
            import torch.distributed as dist

            dist.barrier()


def trained(words: list[str], probes: tuple[int, ...], **overrides) -> tuple[dict, list[str]]:
    """What two rollouts leave, and what was wrong with a probe before each of the rollouts `probes`."""
    import torch

    run, wrong, metrics = ProbedRank(words, **overrides), [], {}
    for rollout in range(2):
        to_come, size = run.actor.optimizer_bytes_to_come(), run.optimizer_bytes()
        if rollout in probes:
            before = run.state()
            probed = run.probe()
            after = run.state()
            if probed.peaks is not None or probed.free <= 0 or probed.to_come != to_come:
                wrong.append(f"{probed}, {to_come} to come")
            if run.actor.backend.args is not run.args:
                wrong.append("the backend's arguments")
            if rollout:
                # Those of the last step, which the next one begins with zeros of.
                del before["gradients"], after["gradients"]
            assert before.keys() == after.keys()
            wrong += [name for name, is_same in same(before, after).items() if not is_same]
        run.train(rollout)
        came = 0 if run.args.fsdp_cpu_offload else run.optimizer_bytes() - size
        if to_come != came or (to_come > 0) is not (rollout == 0 and not run.args.fsdp_cpu_offload):
            wrong.append(f"of the {to_come} bytes to come {came} came")
        metrics |= {
            f"{rollout} {name}": torch.tensor(value, dtype=torch.float64)
            for name, value in run.told().items()
            if not name.startswith("perf/")
        }
    result = {**metrics, **run.weights(), **run.state()}
    run.end()
    return result, wrong


def worker(directory: Path, layouts: dict[str, list[str]]) -> dict[str, list[str]]:
    """By layout, what is wrong with a probe, or another than without one."""
    found = {}
    for name, words in layouts.items():
        words = command_line(directory, *BUDGET, *words, "--ref-load", str(directory / "actor"))
        plain, _ = trained(words, (), **DROPOUT.get(name, {}))
        probed, wrong = trained(words, (0, 1), **DROPOUT.get(name, {}))
        assert plain.keys() == probed.keys() and len(plain) > 30
        found[name] = wrong + [key for key, is_same in same(plain, probed).items() if not is_same]
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("probe")
    write_tiny_model(directory / "actor", tied=True)
    (directory / "prompts.jsonl").write_text(json.dumps({"prompt": "unused"}) + "\n")
    return directory


@pytest.mark.parametrize(
    "layout", ["tensor", *[pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS if n != "tensor"]]
)
def test_a_probe_leaves_no_trace(directory, layout):
    for found in run_distributed(worker, 2, (directory, {layout: LAYOUTS[layout]}), timeout=300):
        assert found == {layout: []}


def test_experts_forget_what_they_counted(tmp_path):
    family = TINY_FAMILIES["glm4_moe"]
    family.save(tmp_path / "actor")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "unused"}) + "\n")
    for found in run_distributed(worker, 2, (tmp_path, {"experts": EXPERTS}), timeout=300):
        assert found == {"experts": []}


def critic_worker(directory: Path, layouts: dict[str, dict]) -> dict[str, list[str]]:
    """By layout, what a probe changed of a critic; with it the phases that it went through."""
    import torch

    from slime.training import memory_probe
    from tests.support.processes.megatron_worker import load_backend

    found = {}
    for name, layout in layouts.items():
        critic = {
            "role": "critic",
            "untie_embeddings_and_output_weights": True,
            "value_clip": 0.2,
            "hidden_dropout": 0.2,
        }
        args = layout_args(directory / "actor", **critic, **layout)
        backend = load_backend(args)

        def state(backend=backend) -> dict:
            residents = backend.residents()
            kept = {
                part: [tensor.clone() for tensor in getattr(residents, part)]
                for part in ("weights", "optimizer", "gradients")
            }
            return {**kept, "generator": torch.get_rng_state()}

        before, parts = state(), ("forward_values", "step_loss", "forward_log_probs")
        with contextlib.ExitStack() as stack:
            patches = (mock.patch.object(memory_probe, part, wraps=getattr(memory_probe, part)) for part in parts)
            spies = dict(zip(parts, map(stack.enter_context, patches), strict=True))
            memory_probe.probe_memory(args, backend, 0, [[(12, 8), (6, 5)]] * 2, 0)
        phases = [part for part, spy in spies.items() if spy.called]
        found[name] = [key for key, is_same in same(before, state()).items() if not is_same] + phases
    return found


def test_a_critic_is_probed_with_values_and_a_step_of_its_own(directory):
    layouts = {
        "tensor": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        "pipeline": {"pipeline_model_parallel_size": 2},
        "context": {"context_parallel_size": 2},
        "gathered context": {"context_parallel_size": 2, "allgather_cp": True},
    }
    for found in run_distributed(critic_worker, 2, (directory, layouts), timeout=240):
        assert found == dict.fromkeys(layouts, ["forward_values", "step_loss"])


def failing_worker(directory: Path, ranks: list[int], said: str) -> str:
    """What a rank says when `ranks` run out of memory in the loss."""
    import torch

    from slime.training import memory_probe

    run = ProbedRank(command_line(directory, *BUDGET, *ONE))
    step_loss = memory_probe.step_loss

    def without_memory(*given):
        loss = step_loss(*given)

        def fail(*of_batch):
            loss(*of_batch)
            if run.actor.rank in ranks:
                raise torch.OutOfMemoryError(said)
            # Where the loss was, the others begin to sum gradients, and wait.
            return loss(*of_batch)

        return fail

    memory_probe.step_loss = without_memory
    try:
        run.probe()
    except UserError as error:
        if len(ranks) == 2:
            return str(error)
        raise
    return "no error"


SAID = "CUDA out of memory. Tried to allocate 9.00 GiB."


def test_every_rank_says_what_it_had_when_memory_ran_out(directory):
    for rank, message in enumerate(run_distributed(failing_worker, 2, (directory, [0, 1], SAID))):
        assert message.startswith(
            f"--memory-probe: memory ran out on actor rank {rank} in a step, with 2 micro-batches of 48 tokens (a sample, the "
            "longest 48), the longest that the flags allow: "
        )
        assert "GiB of tensors before it" in message and "GiB at the peak; of the device's" in message
        assert "Lower --rollout-max-response-len; or give a larger --context-parallel-size" in message
        assert message.endswith(f"or go on without knowing by --no-memory-probe ({SAID})")


def test_a_rank_that_runs_out_alone_says_so_while_the_other_waits(directory):
    """Nobody is asked first: the process of rank 0 is ended from outside, long before its collective gives up."""
    with pytest.raises(DistributedFailure, match="memory ran out on actor rank 1 in a step"):
        run_distributed(failing_worker, 2, (directory, [1], SAID), timeout=240)


class CountingAccelerator(Accelerator):
    """A device that counts peaks, the most that was there since they were reset: so many bytes in each phase."""

    shares_host_memory = False

    def __init__(self, peaks):
        self._peaks, self._peak = iter(peaks), 0

    def memory_allocated(self):
        return 100

    def reset_peak_memory(self):
        self._peak = next(self._peaks)

    def peak_memory_allocated(self):
        return self._peak

    def memory_of_device(self):
        return 30, 1000


@pytest.fixture
def probe_of_steps(monkeypatch, directory):
    """Runs a probe on a `CountingAccelerator` with a backend whose step is a function of the test's; gives what was found and
    what was done."""
    from slime.training import memory_probe
    from slime.training.context_parallel import NO_CONTEXT_PARALLEL

    def probe(step, role="actor", peaks=(700, 900), **changes):
        words = command_line(directory, *BUDGET, *ONE, "--use-kl-loss", "--ref-load", str(directory / "actor"))
        args = argparse.Namespace(**{**vars(parse_args(argv=words)), "role": role, **changes})
        done = []

        def noted_step(batches, loss, *, accepts, **_):
            done.append("step")
            return step(batches, accepts)

        backend = SimpleNamespace(
            groups=SimpleNamespace(cp=NO_CONTEXT_PARALLEL, is_last_stage=True, token_group=None, tensor_group=None),
            optimizer_bytes_to_come=lambda: 500, leaving_no_trace=contextlib.nullcontext, step=noted_step,
            forward=lambda batches, collect, prefix: done.append("forward") or [],
        )  # fmt: skip
        for name in ("step_denominator", "LossGuard"):
            monkeypatch.setattr(memory_probe, name, lambda *given: None)
        monkeypatch.setattr(memory_probe, "clear_memory", lambda: done.append("clear"))
        monkeypatch.setattr(memory_probe, "step_loss", lambda args, *given: done.append(args))
        accelerator = CountingAccelerator(peaks)
        monkeypatch.setattr(memory_probe, "get_accelerator", lambda: accelerator)
        return memory_probe.probe_memory(args, backend, 0, [[(8, 7), (5, 4)]] * 2, 40), done

    return probe


@pytest.mark.parametrize("role, phases", [("actor", ["log-probs", "a step"]), ("critic", ["values", "a step"])])
def test_what_the_optimizer_will_take_is_held_meanwhile(monkeypatch, probe_of_steps, role, phases):
    import torch

    held, empty = [], torch.empty

    def noted_empty(*given, **named):
        held.extend([given[0]] * (named.get("dtype") is torch.uint8))
        return empty(*given, **named)

    def step(batches, accepts):
        columns = {"values", "returns"} if role == "critic" else {"advantages", "ref_log_probs"}
        assert columns <= batches.data.keys() and len(batches) == 2 and accepts(1.0, False) is False
        assert torch.cat(batches.samples.local_masks).tolist() == [1] * 22

    monkeypatch.setattr(torch, "empty", noted_empty)
    found, done = probe_of_steps(step, role)
    # Whoever comes next on this device, or in another process, finds what is free.
    assert held == [540] and [what for what in done if isinstance(what, str)] == ["clear", "forward", "step", "clear"]
    assert found == ProbedMemory(100, 540, dict(zip(phases, [700, 900], strict=True)), 30, 1000)


def test_the_objective_of_a_probe_is_the_shipped_one_and_has_what_flags_ask_for(probe_of_steps):
    """A loss of the user's own has the pass before it that it has in a rollout."""
    own = {"loss_type": "custom_loss", "custom_loss_function_path": "a:b", "custom_advantage_function_path": "a:b"}
    seen = []
    plain = {"use_kl_loss": False, "rollout_top_k": 20}
    _, done = probe_of_steps(lambda batches, accepts: seen.append(batches.data), **own, **plain)
    (args,) = [what for what in done if not isinstance(what, str)]
    assert "forward" in done and (args.loss_type, args.custom_loss_function_path) == ("policy_loss", None)
    assert args.custom_advantage_function_path is None and {"rollout_top_p_token_ids", "advantages"} <= seen[0].keys()
    assert "ref_log_probs" not in seen[0]


@pytest.mark.parametrize(
    ("error", "expected"),
    [(ValueError("out of memory"), ValueError), (RuntimeError("CUDA error: out of memory"), UserError)],
)
def test_an_error_of_a_step_stays_what_it_is_unless_memory_ran_out(probe_of_steps, error, expected):
    def step(batches, accepts):
        raise error

    with pytest.raises(expected, match="out of memory") as caught:
        probe_of_steps(step)
    assert (caught.value is error) is (expected is ValueError)


def test_other_errors_stay_what_they_are():
    import torch

    from slime.training.memory_probe import _is_out_of_memory

    assert _is_out_of_memory(torch.OutOfMemoryError("x")) and _is_out_of_memory(MemoryError())
    assert _is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"))
    assert not _is_out_of_memory(RuntimeError("shapes differ")) and not _is_out_of_memory(ValueError("out of memory"))
