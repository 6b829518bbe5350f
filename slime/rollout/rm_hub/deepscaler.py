"""Math reward for reasoning models: only what follows the reasoning is graded."""

from slime.rollout.rm_hub.math_utils import grade_answer_verl


def solution_part(response: str) -> str | None:
    """The text after the last `</think>`, else after the first `###Response`; None without either."""
    if "</think>" in response:
        return response.rpartition("</think>")[2]
    if "###Response" in response:
        return response.partition("###Response")[2]
    return None


def get_deepscaler_rule_based_reward(response: str, label: str) -> int:
    """1 when the solution part ends in the right boxed answer, else 0. May block for symbolic comparison."""
    solution = solution_part(response)
    return int(solution is not None and grade_answer_verl(solution, str(label)))
