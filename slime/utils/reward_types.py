"""Names of the built-in rewards: one list for the check of `--rm-type` and for the graders themselves."""

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


def is_reward_type(name: str) -> bool:
    """Whether `name` is a built-in reward, with or without the prefix that grades the last box alone."""
    return bare_reward_type(name) in REWARD_TYPES


def bare_reward_type(name: str) -> str:
    """`name` without the prefix that grades the last box alone."""
    return name.strip().removeprefix(BOXED)


def known_reward_types() -> str:
    """The names as a message tells them."""
    return f"{', '.join(REWARD_TYPES)} (each also with the prefix {BOXED})"
