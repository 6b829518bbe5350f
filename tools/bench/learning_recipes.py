"""The recipes of `bench_learning.py`: flags on top of `scripts/quickstart.sh` for each estimator, correction and mode.

Later flags win, so a recipe only names what it does differently from the quick start.
"""

import hashlib
import json
from dataclasses import dataclass

from tools.tied import ROOT

STUDIES = ESTIMATORS, OFF_POLICY, ARRANGEMENTS = "estimators", "off-policy", "arrangements"
_BENCH = "tools/bench"


@dataclass(frozen=True)
class Recipe:
    """A run of the toy task.

    title: its name in tables and pictures.
    study: the table that it belongs to.
    flags: flags of train.py.
    rollouts: its budget, as the number of batches that are generated and trained.
    words: arguments of the quick start itself.
    """

    title: str
    study: str
    flags: tuple[str, ...]
    rollouts: int
    words: tuple[str, ...] = ()

    @property
    def content(self) -> str:
        """A hash of twelve digits over all that results depend on: flags, words, budget, and contents of files in the flags."""
        paths = {word: ROOT / word.partition(":")[0] for word in self.flags}
        files = {word: path.read_text() for word, path in paths.items() if path.is_file()}
        told = json.dumps([self.flags, self.words, self.rollouts, files])
        return hashlib.sha256(told.encode()).hexdigest()[:12]


# With two optimizer steps per rollout ratios leave 1, so clipping and the level of the ratio matter.
_SHORT = "--num-steps-per-rollout 2 --eval-interval 3"


def _estimator(title: str, flags: str) -> Recipe:
    return Recipe(title, ESTIMATORS, tuple(f"{_SHORT} {flags}".split()), rollouts=15)


def _arrangement(title: str, flags: str, *words: str) -> Recipe:
    """GRPO as in the study of estimators, with another placement, loop or weight transport."""
    return Recipe(title, ARRANGEMENTS, tuple(f"{_SHORT} {flags}".split()), rollouts=15, words=words)


def _off_policy(title: str, flags: str, config: str = "delayed_rollout") -> Recipe:
    """A recipe that trains on answers of the policy four weight versions ago.

    It takes one optimizer step per rollout and has no KL: without a correction the ratio is 1 and nothing limits the policy.
    """
    shared = (
        f"--rollout-function-path {_BENCH}/delayed_rollout.py:generate_rollout "
        f"--custom-config-path {_BENCH}/{config}.yaml --kl-loss-coef 0 --lr 3e-4 --lr-decay-style constant --eval-interval 3"
    )
    return Recipe(title, OFF_POLICY, tuple(f"{shared} {flags}".split()), rollouts=24)


_ICEPOP = "slime.backends.megatron_utils.loss.icepop_function"
_MIS = "examples/train_infer_mismatch_helper/mis.py:compute_mis_weights_with_cp"
_WHITENED = "--normalize-advantages"
_PUSHES = "outputs/bench-learning/pushes"
_DELTAS = (
    f"--update-weight-transport disk --update-weight-mode delta --update-weight-disk-dir {_PUSHES} "
    "--update-weight-local-checkpoint-dir outputs/bench-learning/local"
)
_NEVER_STOPS = (
    "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async "
    "--eval-function-path slime.rollout.sglang_rollout.generate_rollout --max-weight-staleness 2 --use-tis"
)

RECIPES = {
    "grpo": _estimator("GRPO", "--advantage-estimator grpo"),
    "gspo": _estimator("GSPO", "--advantage-estimator gspo --eps-clip 0.03 --eps-clip-high 0.04"),
    "cispo": _estimator("CISPO", "--advantage-estimator cispo"),
    "ppo": _estimator(
        "PPO",
        f"--advantage-estimator ppo {_WHITENED} --kl-loss-coef 0 --kl-coef 0.01 --lambd 0.95 --num-critic-only-steps 2 "
        f"--megatron-config-path {_BENCH}/learning_critic.yaml",
    ),
    "reinforce_plus_plus": _estimator(
        "REINFORCE++", f"--advantage-estimator reinforce_plus_plus {_WHITENED} --kl-loss-coef 0 --kl-coef 0.01"
    ),
    "reinforce_plus_plus_baseline": _estimator(
        "REINFORCE++ baseline", f"--advantage-estimator reinforce_plus_plus_baseline {_WHITENED}"
    ),
    "dr_grpo": _estimator(
        "Dr. GRPO",
        "--advantage-estimator grpo --disable-grpo-std-normalization --kl-loss-coef 0 "
        "--custom-pg-loss-reducer-function-path examples/dr_grpo/constant_length.py:constant_length_reducer",
    ),
    "on_policy": _off_policy("on-policy", "", config="no_delay"),
    "off_policy": _off_policy("no correction", ""),
    "off_policy_tis": _off_policy("truncated importance sampling", "--use-tis"),
    "off_policy_icepop": _off_policy(
        "icepop", f"--use-tis --custom-tis-function-path {_ICEPOP} --tis-clip-low 0.5 --tis-clip 5"
    ),
    "off_policy_rollout_logprobs": _off_policy("clipped ratio to the engine", "--use-rollout-logprobs"),
    "off_policy_mis": _off_policy(
        "MIS, truncated per sequence", f"--use-tis --custom-tis-function-path {_MIS}", config="delayed_mis"
    ),
    "apart": _arrangement("`train.py`, devices apart, process group", ""),
    "one_pool": _arrangement("`--colocate`, one engine, shared handles", "--colocate --rollout-num-gpus 1"),
    "mixed": _arrangement("`--colocate`, one engine inside and one beside", "--colocate"),
    "release_train": _arrangement(
        "`--release-train`, full weights through disk",
        "--colocate --rollout-num-gpus 1 --release-train --save-interval 1 --keep-last 1 --update-weight-transport disk "
        f"--update-weight-disk-dir {_PUSHES}",
    ),
    "delta_xor": _arrangement("deltas through disk, xor", f"{_DELTAS} --update-weight-delta-encoding xor"),
    "delta_overwrite": _arrangement(
        "deltas through disk, overwrite", f"{_DELTAS} --update-weight-delta-encoding overwrite"
    ),
    "partial": _arrangement(
        "`--partial-rollout`, 48 prompts started for 32",
        "--partial-rollout --over-sampling-batch-size 48 --keep-surplus-groups --mask-offpolicy-in-partial-rollout",
    ),
    "in_turn": _arrangement("`train_async.py`, rollouts in turn", "", "--async"),
    "in_flight": _arrangement(
        "`train_async.py`, `--update-weights-in-flight`", "--update-weights-in-flight --use-tis", "--async"
    ),
    "never_stops": _arrangement("`train_async.py`, generation that never stops", _NEVER_STOPS, "--async"),
}


def names_of(words: list[str]) -> list[str]:
    """The names of the recipes for `words`, in the order of the table; the name of a study stands for all its recipes.

    Raises:
        ValueError: a word is neither a recipe nor a study.
    """
    known = {*RECIPES, *STUDIES}
    unknown = [word for word in words if word not in known]
    if unknown:
        raise ValueError(f"--recipes {' '.join(unknown)}: there are {', '.join([*STUDIES, *RECIPES])}")
    return [name for name, recipe in RECIPES.items() if name in words or recipe.study in words]
