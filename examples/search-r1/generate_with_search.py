"""Questions that are answered after a search: `<search>query</search>` ends a turn, and what was found is the reply.

--custom-generate-function-path examples/search-r1/generate_with_search.py:generate
--custom-rm-path examples/search-r1/generate_with_search.py:reward_func
--custom-config-path examples/search-r1/search.yaml
--max-turns 2
"""

import re
from typing import Any

from slime.rollout.dialogue import dialogue
from slime.rollout.rm_hub.f1 import normalize_text
from slime.utils.async_utils import slots
from slime.utils.http_utils import post
from slime.utils.types import Sample

# A turn ends behind them, so that the model cannot go on with results of its own invention.
STOP = ("</search>", "</answer>")
BEGIN = re.compile("<(search|answer)>")
# Without marks of its own: what is graded is the last complete action of the whole text.
INVALID = "This was neither a search nor an answer."
MARKS = re.compile(r"</?(?:search|answer)>")


def action(said: str) -> tuple[str, str] | None:
    """The last complete action of a turn: ("search", query) or ("answer", text)."""
    last, at = None, 0
    # A begin behind the last end of its kind is left alone, or each one would be a search through all of the rest.
    last_ends = {kind: said.rfind(f"</{kind}>") for kind in ("search", "answer")}
    while (begin := BEGIN.search(said, at)) is not None:
        kind, at = begin[1], begin.end()
        if at <= last_ends[kind]:
            end = said.index(f"</{kind}>", at)
            last, at = (kind, said[at:end].strip()), end
    return last


def as_information(documents: list[dict[str, Any]]) -> str:
    """What the model is shown of the documents, the best one first, without marks, which would be actions of its own."""
    shown = "\n".join(MARKS.sub("", document["document"]["contents"]) for document in documents) or "nothing found"
    return f"<information>{shown}</information>"


async def search(args: Any, query: str) -> list[dict[str, Any]]:
    """At most `search_topk` documents; no more than `search_concurrency` searches are under way at a time.

    Raises:
        HttpError: the retriever refuses the query or does not answer.
    """
    async with slots("search", args.search_concurrency):
        answer = await post(args.search_url, {"queries": [query], "topk": args.search_topk, "return_scores": True})
    return answer["result"][0]


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """An answer with as many searches as the model asks for; together `--max-turns` turns at most."""

    async def reply(said: str) -> dict[str, str] | None:
        asked = action(said)
        if asked is None:
            return {"role": "tool", "content": INVALID}
        kind, text = asked
        return {"role": "tool", "content": as_information(await search(args, text))} if kind == "search" else None

    stop = [*(sampling_params.get("stop") or []), *STOP]
    return await dialogue(args, sample, {**sampling_params, "stop": list(dict.fromkeys(stop))}, reply)


def is_exact_match(answer: str, label: Any) -> bool:
    """Whether the answer is one of the label's, up to case, punctuation, articles and spaces.

    `label`: a text, a list of them, or an object with such a list below `target`.
    """
    golden = label["target"] if isinstance(label, dict) else label
    golden = golden if isinstance(golden, list) else [golden]
    return normalize_text(answer) in {normalize_text(str(text)) for text in golden}


async def reward_func(args: Any, sample: Sample, evaluation: bool = False, **kwargs: Any) -> float:
    """1 for an exact match, `search_format_score` for another answer between its marks, else 0.

    An evaluation counts exact matches alone.
    """
    asked = action(sample.response)
    if asked is None or asked[0] != "answer":
        return 0.0
    if is_exact_match(asked[1], sample.label):
        return 1.0
    return 0.0 if evaluation else float(args.search_format_score)
