"""A retriever for `generate_with_search.py`: BM25 over a file of documents, on loopback.

    python examples/search-r1/retriever.py --corpus corpus.jsonl --port 8000

The file has an object with `id` and `contents` in each line. POST /retrieve takes `{"queries": […], "topk": 3}` and answers
`{"result": [[{"document": {"id": …, "contents": …}, "score": …}, …], …]}`, the best document of each query first.
"""

import argparse
import asyncio
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from aiohttp import web

from slime.utils.child_process import exit_when_parent_dies

WORD = re.compile(r"\w+")
# The constants that Robertson and Zaragoza (2009) give for BM25.
K1, B = 1.2, 0.75


class BM25:
    """An index over documents, in memory.

    The score of a document is the sum, over the words of the query, of idf · f (k1 + 1) / (f + k1 (1 − b + b · l / m)) with
    idf = ln(1 + (N − n + 0.5) / (n + 0.5)). f: how often the word is in the document; n of N documents have it; l, m: words of
    the document, and of one in the mean.
    """

    def __init__(self, documents: Iterable[dict[str, Any]]) -> None:
        self.documents = list(documents)
        self._lengths: list[int] = []
        # Word → (document, how often), so that a query reads only the documents that have one of its words.
        self._places: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for number, document in enumerate(self.documents):
            counts = Counter(WORD.findall(document["contents"].lower()))
            self._lengths.append(sum(counts.values()))
            for word, count in counts.items():
                self._places[word].append((number, count))
        self._mean = sum(self._lengths) / max(len(self._lengths), 1)

    def search(self, query: str, topk: int) -> list[dict[str, Any]]:
        """At most `topk` documents that have a word of the query, the best one first; equal ones as they stand in the file."""
        scores: Counter[int] = Counter()
        for word in set(WORD.findall(query.lower())):
            places = self._places.get(word, [])
            idf = math.log(1 + (len(self.documents) - len(places) + 0.5) / (len(places) + 0.5))
            for number, count in places:
                norm = K1 * (1 - B + B * self._lengths[number] / self._mean)
                scores[number] += idf * count * (K1 + 1) / (count + norm)
        best = sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:topk]
        return [{"document": self.documents[number], "score": score} for number, score in best]


def read_corpus(path: Path) -> list[dict[str, Any]]:
    """The documents of a file.

    Raises:
        ValueError: a line is no object with `contents`; names the line.
    """
    documents = []
    # As bytes: a text has more characters that end a line, and JSON has them within its own texts.
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                document = json.loads(line)
                if not isinstance(document["contents"], str):
                    raise TypeError
            except (ValueError, TypeError, KeyError):
                raise ValueError(f'{path}:{number}: expected an object with "contents", a text') from None
            documents.append(document)
    return documents


def make_app(index: BM25) -> web.Application:
    """The service."""

    async def retrieve(request: web.Request) -> web.Response:
        try:
            body = await request.json()
            queries, topk = body["queries"], int(body.get("topk") or 3)
            if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries) or topk < 1:
                raise ValueError
        except (ValueError, TypeError, KeyError, AttributeError):
            return web.json_response({"error": 'expected {"queries": [text, …], "topk": 3}'}, status=400)
        # In a thread, so that a long query does not hold up the answers to others.
        found = await asyncio.to_thread(lambda: [index.search(query, topk) for query in queries])
        return web.json_response({"result": found})

    app = web.Application()
    app.router.add_post("/retrieve", retrieve)
    return app


def main() -> None:
    exit_when_parent_dies()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    try:
        index = BM25(read_corpus(given.corpus))
    except (OSError, ValueError) as error:
        parser.error(f"--corpus: {error}")
    web.run_app(make_app(index), host="127.0.0.1", port=given.port, access_log=None)


if __name__ == "__main__":
    main()
