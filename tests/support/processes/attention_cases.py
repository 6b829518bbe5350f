"""Compares the attention of a CPU server on random batches with torch_native's and a plain computation, and what its indexer
chooses; prints JSON.

Run it in a process of its own, since the CPU adapter changes how sglang is imported.
"""

import json

import torch

from slime.backends.sglang_utils import cpu_runtime
from tests.support.processes import indexer_cases

PLACES = 8192
WIDTH = 900  # of the table of places
OPTIONS = {"is_cross_attn": False, "sliding_window_size": None}


def main() -> None:
    cpu_runtime.install()
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from slime.backends.sglang_utils import cpu_attention

    torch.set_num_threads(1)
    kinds = {"ours": cpu_attention.BatchedAttention, "native": TorchNativeAttnBackend}
    figures = {"indexer": indexer_cases.compare()}
    figures["sizes"] = [cpu_attention.size_class(n, 32) for n in (1, 32, 33, 256, 512, 513, 1024, 1025, 5000)]
    figures["pieces"] = list(cpu_attention.pieces_of([3, 600, 1], [3, 700, 9]))
    asked, plan_calls = [], cpu_attention.plan_calls
    cpu_attention.plan_calls = lambda pieces, slots, dtype: (
        asked.append(list(slots.shape)) or plan_calls(pieces, slots, dtype)
    )
    cases = {
        "decode": case(lengths=[1, 31, 32, 33, 200, 700, 64, 899], extended=None),
        "extend": case(lengths=[1, 40, 40, 300, 700, 899, 33], extended=[1, 40, 7, 300, 600, 1, 32]),
        "latent": case(lengths=[5, 64, 70], extended=[5, 3, 70], heads=(4, 1), channels=(24, 16)),
        "chosen": case(lengths=[5, 64, 300], extended=[5, 1, 300], heads=(4, 1), channels=(24, 16), chosen=7),
    }
    for name, drawn in cases.items():
        expected = plain(drawn)
        # What SGLang has on the host attends to everything.
        answers = {kind: answer(of, drawn) for kind, of in kinds.items() if kind == "ours" or drawn["chosen"] is None}
        figures[name] = {kind: float((given - expected).abs().max()) for kind, given in answers.items()}
        figures[name]["alone"] = all(
            torch.equal(answer(kinds["ours"], only(drawn, request)), rows_of(answers["ours"], drawn, request))
            for request in range(len(drawn["lengths"]))
        )
        poisoned = {**drawn, "keys": drawn["keys"].clone(), "values": drawn["values"].clone()}
        last = drawn["table"][-1, : drawn["lengths"][-1]].long()
        beyond = drawn["table"][0, drawn["lengths"][0] :].long()
        for cache in (poisoned["keys"], poisoned["values"]):
            cache[last], cache[beyond] = float("nan"), float("nan")
        others = slice(0, sum(drawn["extended"][:-1]))
        figures[name]["poisoned"] = torch.equal(answer(kinds["ours"], poisoned)[others], answers["ours"][others])
        cpu_attention.ELEMENTS_OF_A_CALL, whole = 2000, cpu_attention.ELEMENTS_OF_A_CALL
        figures[name]["in small calls"] = torch.equal(answer(kinds["ours"], drawn), answers["ours"])
        cpu_attention.ELEMENTS_OF_A_CALL = whole
        figures[name]["two steps"] = torch.equal(answer(kinds["ours"], drawn, before=cases["decode"]), answers["ours"])
    window = {**OPTIONS, "sliding_window_size": 8}
    both = [answer(of, cases["decode"], options=window) for of in kinds.values()]
    figures["window"] = torch.equal(*both)
    figures["slots"] = asked
    print(json.dumps(figures))


def case(lengths, extended, heads=(4, 2), channels=(16, 16), chosen=None) -> dict:
    """A batch whose requests have their own places in a cache. If values have fewer channels than keys, they are the first
    channels of the keys. With `chosen` a query attends to so many tokens alone, some of which it does not see."""
    draw = torch.Generator().manual_seed(len(lengths))
    keys = torch.randn(PLACES, heads[1], channels[0], generator=draw)
    latent = channels[0] != channels[1]
    values = keys[..., : channels[1]] if latent else torch.randn(PLACES, heads[1], channels[1], generator=draw)
    table = torch.randperm(PLACES, generator=draw)[: len(lengths) * WIDTH].view(-1, WIDTH).int()
    counts = extended or [1] * len(lengths)
    query = torch.randn(sum(counts), heads[0], channels[0], generator=draw)
    seen = [end for length, count in zip(lengths, counts, strict=True) for end in range(length - count, length)]
    if chosen is not None:
        # Its own token, others, and none.
        others = [torch.randperm(end + 9, generator=draw)[: chosen - 2].tolist() + [-1] * chosen for end in seen]
        chosen = torch.tensor([[end, *rest][:chosen] for end, rest in zip(seen, others, strict=True)]).int()
    names = ("keys", "values", "table", "lengths", "extended", "query", "decodes", "chosen")
    return dict(zip(names, (keys, values, table, lengths, counts, query, extended is None, chosen), strict=True))


def answer(kind, drawn: dict, options: dict = OPTIONS, before: dict | None = None) -> torch.Tensor:
    backend = kind.__new__(kind)
    backend.use_sliding_window_kv_pool = False
    backend._workspace = {}
    for batch in (before, drawn) if before else (drawn,):
        backend.init_forward_metadata(None)
        backend._chosen = batch["chosen"]
        for _ in range(2):  # layers
            given = attend(backend, batch, options)
    return given


def attend(backend, drawn: dict, options: dict) -> torch.Tensor:
    query, values = drawn["query"], drawn["values"]
    output = query.new_full((*query.shape[:2], values.shape[-1]), float("nan"))
    lengths, extended = torch.tensor(drawn["lengths"]), torch.tensor(drawn["extended"])
    tables = [output, drawn["keys"], values, drawn["table"], torch.arange(len(lengths)), lengths]
    options = {**options, "scaling": 0.3, "enable_gqa": True, "causal": not drawn["decodes"]}
    if drawn["decodes"]:
        return backend._run_sdpa_forward_decode(query, *tables, None, **options)
    return backend._run_sdpa_forward_extend(query, *tables, lengths - extended, extended, None, **options)


def plain(drawn: dict) -> torch.Tensor:
    """Softmax attention in float64, one query at a time."""
    rows = []
    queries = iter(drawn["query"].double())
    choices = iter([None] * len(drawn["query"]) if drawn["chosen"] is None else drawn["chosen"].tolist())
    for places, length, extended in zip(drawn["table"].long(), drawn["lengths"], drawn["extended"], strict=True):
        for seen in range(length - extended + 1, length + 1):
            query, chosen = next(queries), next(choices)
            attended = range(seen) if chosen is None else sorted({place for place in chosen if 0 <= place < seen})
            keys, values = (drawn[name][places[list(attended)]].double() for name in ("keys", "values"))
            share = query.shape[0] // keys.shape[1]
            keys, values = keys.repeat_interleave(share, 1), values.repeat_interleave(share, 1)
            weights = torch.softmax(torch.einsum("hc,thc->ht", query, keys) * 0.3, -1)
            rows.append(torch.einsum("ht,thc->hc", weights, values))
    return torch.stack(rows)


def only(drawn: dict, request: int) -> dict:
    one = slice(request, request + 1)
    shares = {name: drawn[name][one] for name in ("table", "lengths", "extended")}
    chosen = None if drawn["chosen"] is None else rows_of(drawn["chosen"], drawn, request)
    return {**drawn, **shares, "query": rows_of(drawn["query"], drawn, request), "chosen": chosen}


def rows_of(rows: torch.Tensor, drawn: dict, request: int) -> torch.Tensor:
    first = sum(drawn["extended"][:request])
    return rows[first : first + drawn["extended"][request]]


if __name__ == "__main__":
    main()
