"""Names of the built-in rewards: one list for the check of `--rm-type` and for the graders themselves."""

BOXED = "boxed_"
REWARD_TYPES = (
    "dapo",
    "deepscaler",
    "f1",
    "math",
    "random",
)
# Known names whose graders are not built yet: a plan takes them, a run does not.
PLANNED_REWARD_TYPES = ("gpqa", "ifbench", "remote_rm")


def is_reward_type(name: str) -> bool:
    """Whether `name` is a built-in reward, with or without the prefix that grades the last box alone."""
    return name.strip().removeprefix(BOXED) in REWARD_TYPES


def is_planned_reward_type(name: str) -> bool:
    """Whether `name` will be a built-in reward."""
    return name.strip().removeprefix(BOXED) in PLANNED_REWARD_TYPES


def known_reward_types() -> str:
    """The names as a message tells them."""
    return f"{', '.join(REWARD_TYPES)} (each also with the prefix {BOXED})"
