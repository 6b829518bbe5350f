"""Endpoints that agent programs talk to, one for each protocol, and the parsers of the model's answers."""

from slime.agent.adapters.anthropic import AnthropicAdapter
from slime.agent.adapters.asking import Chat, Refusal
from slime.agent.adapters.base import BaseAdapter
from slime.agent.adapters.openai import OpenAIAdapter
from slime.agent.adapters.parsing import ModelOutput, ToolUse, parse_model_output

__all__ = [
    "AnthropicAdapter",
    "BaseAdapter",
    "Chat",
    "ModelOutput",
    "OpenAIAdapter",
    "Refusal",
    "ToolUse",
    "parse_model_output",
]
