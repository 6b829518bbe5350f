"""An agent with a calculator, of the library strands-agents."""

import ast
import operator
from typing import Any

from examples.strands_sglang.strands_model import library
from slime.utils.types import Sample

RULES = "Answer the question. Use the calculator for every calculation, and give the answer in \\boxed{}."
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.USub: operator.neg}
MOST_DIGITS, LONGEST = 12, 200


def value_of(expression: str) -> str:
    """The value of whole numbers joined by +, - and *, with brackets; "error" of all else, and of what is too large."""

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.BinOp):
            found = OPERATORS[type(node.op)](value(node.left), value(node.right))
        elif isinstance(node, ast.UnaryOp):
            found = OPERATORS[type(node.op)](value(node.operand))
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            found = node.value
        else:
            raise ValueError
        if abs(found) >= 10**MOST_DIGITS:
            raise ValueError
        return found

    if len(expression) > LONGEST:
        return "error"
    try:
        return str(value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, KeyError, RecursionError, MemoryError):
        return "error"


def build_agent(args: Any, sample: Sample, model: Any) -> Any:
    """An agent of its own for a sample. It forgets nothing, and prints nothing."""
    strands, managers = library("strands"), library("strands.agent.conversation_manager")

    @strands.tool
    def calculator(expression: str) -> str:
        """Compute whole numbers joined by +, - and *.

        Args:
            expression: what to compute, 3*(4+5) for example.
        """
        return value_of(expression)

    return strands.Agent(
        model=model,
        tools=[calculator],
        system_prompt=RULES,
        callback_handler=None,
        conversation_manager=managers.NullConversationManager(),
    )
