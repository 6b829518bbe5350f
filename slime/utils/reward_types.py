"""Names of the built-in rewards: one list for the check of `--rm-type` and for the graders themselves."""

from importlib.util import find_spec

BOXED = "boxed_"
# Graded by a service, at --rm-url.
REMOTE = "remote_rm"
REWARD_TYPES = (
    "dapo",
    "deepscaler",
    "f1",
    "gpqa",
    "ifbench",
    "math",
    "random",
    REMOTE,
)
# Compare with the label of a row; others may find what they need in its metadata.
_WITH_LABEL = ("dapo", "deepscaler", "f1", "math")
# Modules that bring checks of instructions along, each row by itself: IFBench, and IFEval with what its checks import.
_CHECKS = (("instructions_registry",), ("lm_eval", "langdetect", "nltk", "immutabledict"))


def is_reward_type(name: str) -> bool:
    """Whether `name` is a built-in reward, with or without the prefix that grades the last box alone."""
    return bare_reward_type(name) in REWARD_TYPES


def bare_reward_type(name: str) -> str:
    """`name` without the prefix that grades the last box alone."""
    return name.strip().removeprefix(BOXED)


def needs_label(name: str) -> bool:
    """Whether `name` is a built-in reward that cannot grade a row without a label."""
    return bare_reward_type(name) in _WITH_LABEL


def known_reward_types() -> str:
    """The names as a message tells them."""
    return f"{', '.join(REWARD_TYPES)} (each also with the prefix {BOXED})"


def lacks_checks(name: str) -> bool:
    """Whether `name` grades with checks of other packages, and none of them are installed here."""
    return bare_reward_type(name) == "ifbench" and not any(all(map(find_spec, modules)) for modules in _CHECKS)
