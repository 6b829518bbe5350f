"""argparse value types shared by the flag groups."""

import argparse
import json
from typing import Any


def json_object(text: str) -> dict[str, Any]:
    """A JSON object such as `{"enable_thinking": false}`."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object such as {{"key": "value"}}')
    return value
