"""Strict instruction following (IFEval, arXiv 2311.07911; IFBench, arXiv 2507.02833): a response must follow all instructions.

A row's metadata has `instruction_id_list`, the ids of its instructions, and `kwargs`, one dict for each. The checks are those
of the benchmarks' own libraries, which must be installed; a run fetches nothing.
"""

import json
from typing import Any

from slime.rollout.rm_hub import worker_pool
from slime.utils.errors import UserError
from slime.utils.processing_utils import without_end_mark

# Checks take time in proportion to the text, and no prompt asks for more than this.
_MAX_CHARACTERS = 200_000


def compute_ifbench_reward(response: str, label: Any, metadata: dict[str, Any] | None = None) -> float:
    """1.0 if the response (the text after its last `</think>`, without the token that ends the model's turn) follows all
    instructions of the metadata, else 0.0. Blocks.

    Checks that look for the prompt find it in `metadata["prompt"]`. There is no label. Instructions whose check takes more than
    5 s of processor time count as not followed.

    Raises:
        UserError: the metadata have no instructions, unsuitable keywords, or an id that no installed library knows.
    """
    metadata = metadata or {}
    names, keywords = metadata.get("instruction_id_list"), metadata.get("kwargs")
    keywords = json.loads(keywords) if isinstance(keywords, str) else keywords
    if not names or not isinstance(keywords, list | tuple) or len(keywords) != len(names):
        raise UserError(
            "ifbench: the metadata needs instruction_id_list, and kwargs with one object for each of its entries; it has "
            f"{sorted(metadata)}; see --metadata-key"
        )
    text = without_end_mark((response or "").rpartition("</think>")[2])
    if not text.strip() or len(text) > _MAX_CHARACTERS:
        return 0.0
    # Columns of Parquet files have all keywords in each row, most of them null.
    given = [{key: value for key, value in (entry or {}).items() if value is not None} for entry in keywords]
    instructions = list(zip(map(str, names), given, strict=True))
    verdict = worker_pool.followed_instructions(text, str(metadata.get("prompt", "")), instructions)
    if isinstance(verdict, str):
        raise UserError(f"ifbench: {verdict}")
    return float(verdict is not None and all(verdict))
