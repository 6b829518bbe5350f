"""Writes the table of models into docs/en/advanced/models.md, with a row per script of scripts/models/, and the types of the
models that train, by that table, into README.md.

    python tools/write_model_table.py                        # rewrite both
    python tools/write_model_table.py --check                # exit status 1 when one of them is not up to date
    python tools/write_model_table.py --rehearse NAME ...    # rehearse these models at their true size, record it, rewrite

The tables of the tests say what is tested of a family, and of its variants (`tests/support/models/tiny_families.py` and
`tests/e2e/test_families.py`). Results of rehearsals are kept beside the page, in model-rehearsals.json.
"""

import argparse
import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from slime.models.config_entries import text_config_of  # noqa: E402
from slime.models.families import FAMILIES, TRAINED_MODEL_TYPES, model_args_from_hf  # noqa: E402
from slime.utils.filesystem import write_text_atomically  # noqa: E402
from slime.utils.hf_files import INDEX_FILE  # noqa: E402
from slime.weights.hf_reader import SafetensorsDirectory  # noqa: E402
from tests.e2e.test_families import SERVED  # noqa: E402
from tests.support.models.tiny_families import TINY_FAMILIES  # noqa: E402
from tools.published_models import PUBLISHED_MODELS  # noqa: E402
from tools.write_memory_table import words_of  # noqa: E402

PAGE = ROOT / "docs" / "en" / "advanced" / "models.md"
RECORDS = PAGE.with_name("model-rehearsals.json")
BEGIN, END = "<!-- model table: begin -->", "<!-- model table: end -->"
README = ROOT / "README.md"
BEGIN_TYPES, END_TYPES = "<!-- model types: begin -->", "<!-- model types: end -->"
NOT_YET = "not yet"
_README_WIDTH = 120
_PROVIDER = "--custom-model-provider-path"
# Entries of a config by which models of one family have other tensors.
_VARIANTS = ("tie_word_embeddings", "use_qk_norm", "attention_bias")
_HEADER = (
    "Script", "`model_type`", "Logits and gradients of transformers", "Its experts chosen", "Checkpoint given back",
    "Trains in", "Pushed to SGLang on CPU, five rollouts", "Rehearsed: layout", "Peak GiB of rank 0, planned",
    "More than 10 % apart", "Tensors of its push", "Seconds",
)  # fmt: skip
_BATCH = (
    "--num-rollout", "1", "--rollout-batch-size", "32", "--n-samples-per-prompt", "8", "--rm-type", "math",
    "--rollout-max-response-len", "4096", "--bf16", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "4608",
    "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1",
)  # fmt: skip
_LAYOUT = (
    "--actor-num-nodes", "--actor-num-gpus-per-node", "--tensor-model-parallel-size", "--pipeline-model-parallel-size",
    "--context-parallel-size", "--expert-model-parallel-size", "--expert-tensor-parallel-size",
    "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers",
)  # fmt: skip
# Architecture without a class in transformers -> the one whose tensors its checkpoints have, beside prediction layers.
_CHECKPOINTS_OF = {"MiMoForCausalLM": "Qwen2ForCausalLM"}
_FIRST = "model.layers.0."
# A file is mapped as a whole, so it must be smaller than the memory of the machine.
_FILE_BYTES = 4 * 2**30
_STAGE_SECONDS = 900
# A model with more layers x hidden size^2 than this is split over 8 tensor-parallel ranks.
_LARGE = 40 * 4096**2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail when the table is not up to date")
    parser.add_argument(
        "--rehearse", nargs="+", default=(), metavar="NAME", help="scripts to rehearse and record first"
    )
    options = parser.parse_args()
    records = recorded()
    for name in options.rehearse:
        records |= dict.fromkeys(same_model(name), rehearse(name))
        write_text_atomically(RECORDS, json.dumps(dict(sorted(records.items())), indent=2) + "\n")
    old = {page: page.read_text() for page in (PAGE, README)}
    table = with_table(old[PAGE], records)
    new = {PAGE: table, README: with_model_types(old[README], table)}
    if options.check:
        return int(old != new)
    for page, text in new.items():
        write_text_atomically(page, text)
    return 0


def recorded() -> dict[str, dict[str, Any]]:
    """The results of rehearsals: name of a script -> layout, rehearsed and planned GiB, the kinds of memory that differ by more
    than 10 %, numbers of tensors that were pushed and that a checkpoint has (None: unknown), seconds."""
    return json.loads(RECORDS.read_text())


def with_table(page: str, records: dict[str, dict[str, Any]]) -> str:
    """The page, with the table between its two marks."""
    rows = [_row(path.stem, records.get(path.stem)) for path in sorted((ROOT / "scripts" / "models").glob("*.sh"))]
    lines = [_HEADER, ["---"] * len(_HEADER), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return _between(page, BEGIN, table, END)


def with_model_types(readme: str, page: str) -> str:
    """The README, with each `model_type` that trains, by the table of `page`, between its two marks."""
    rows = [line.split(" | ") for line in page.split(BEGIN)[1].split(END)[0].splitlines() if line.startswith("| `")]
    trained = {row[_HEADER.index("`model_type`")] for row in rows if row[_HEADER.index("Trains in")] != NOT_YET}
    types = ", ".join(sorted(trained, key=lambda name: name.strip("`")))
    return _between(readme, BEGIN_TYPES, textwrap.fill(types, _README_WIDTH), END_TYPES)


def _between(page: str, begin: str, text: str, end: str) -> str:
    """The page, with this text between its two marks."""
    before, rest = page.split(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"


def _row(name: str, record: dict[str, Any] | None) -> list[str]:
    model_type = PUBLISHED_MODELS[name]["model_type"]
    own = FAMILIES[model_type].model_types
    # Tiny models without experts have layouts that models with experts cannot have, so they are left out.
    tiny = [
        row
        for key, row in TINY_FAMILIES.items()
        if row.model_type in own
        and not key.endswith(" dense")
        and _is_of_its_kind(name, {**row.entries, "tie_word_embeddings": row.entries.get("tied", False)})
    ]
    tested = bool(tiny) and model_type in TRAINED_MODEL_TYPES
    layouts = dict.fromkeys(layout for row in tiny for layout in row.layouts)
    references = {row.reference for row in tiny} - {None}
    is_served = any(
        entries["model_type"] in own
        and _is_of_its_kind(name, {**entries, "tie_word_embeddings": entries.get("tie", True)})
        for entries in SERVED.values()
    )
    return [
        f"`{name}`",
        f"`{model_type}`",
        ", ".join(["yes", *(f"of `{reference}`" for reference in sorted(references))]) if tested else NOT_YET,
        "none" if "--num-experts" not in model_words(name) else "yes" if tested else NOT_YET,
        "yes" if tested else NOT_YET,
        ", ".join(layouts) if tested else NOT_YET,
        "yes" if is_served else NOT_YET,
        record["layout"] if record else NOT_YET,
        f"{record['rehearsed_gib']:.1f}, {record['planned_gib']:.1f}" if record else "",
        _apart(record) if record else "",
        _tensors(record) if record else "",
        str(record["seconds"]) if record else "",
    ]


def _is_of_its_kind(name: str, entries: Mapping[str, Any]) -> bool:
    """Whether a tiny model with these entries has tensors of the same kinds as the script's model of the same family."""
    config = text_config_of(PUBLISHED_MODELS[name])
    other = {entry: value for entry, value in config.items() if entry not in _VARIANTS}
    other |= {entry: entries[entry] for entry in _VARIANTS if entry in entries}
    return model_args_from_hf(other) == model_args_from_hf(config)


def _apart(record: dict[str, Any]) -> str:
    return "" if record["apart"] is None else ", ".join(record["apart"]) or "none"


def _tensors(record: dict[str, Any]) -> str:
    pushed, stored = record["pushed"], record["stored"]
    if pushed is None:
        return ""
    return f"{pushed:,}" if stored is None else f"{pushed:,} of {stored:,}"


def rehearse(name: str) -> dict[str, Any]:
    """Rehearse a step of GRPO at the model's true size with the flags of its script, on the first rank of each pipeline stage.

    Memory is that of rank 0; tensors and seconds are those of all rehearsed ranks.

    Raises:
        RuntimeError: the rehearsal failed; the message has the end of its output.
    """
    layout = layout_of(name)
    stored = tensors_of(PUBLISHED_MODELS[name])
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Path(directory)
        (checkpoint / "config.json").write_text(json.dumps(PUBLISHED_MODELS[name]))
        names: set[str] = set()
        if stored is not None:
            write_stand_in(checkpoint, stored)
            # A checkpoint may hold all experts in one tensor, but each expert is pushed by itself.
            names = SafetensorsDirectory(checkpoint).names()
        prompts = checkpoint / "prompts.jsonl"
        prompts.write_text('{"prompt": "1 + 1?", "label": "2"}\n' * 32)
        words = [
            "--hf-checkpoint", directory, *model_words(name), "--prompt-data", str(prompts), *_BATCH, *layout,
            "--rollout-num-gpus", "8", "--sequence-parallel", "--rehearse",
        ]  # fmt: skip
        # With this variable the plan would be one for the CPU.
        environment = {key: value for key, value in os.environ.items() if key != "SLIME_ACCELERATOR"}
        result = subprocess.run(
            [sys.executable, str(ROOT / "train.py"), *words], cwd=ROOT, capture_output=True, text=True,
            timeout=_STAGE_SECONDS * _sizes(layout)["PP"], env=environment,
        )  # fmt: skip
    _, *stages = re.split(r"^(?=RANK \d+: )", result.stdout.partition("\nALL STAGES\n")[0], flags=re.MULTILINE)
    memory = re.search(r"together +([\d.]+) GiB +([\d.]+) GiB", result.stdout)
    pushed = [int(count.replace(",", "")) for stage in stages for count in re.findall(r"weight push: ([\d,]+) ", stage)]
    if result.returncode or not memory or len(pushed) != _sizes(layout)["PP"]:
        raise RuntimeError(f"{name}: exit status {result.returncode}: {(result.stdout + result.stderr)[-3000:]}")
    apart = re.findall(r"^    (\w+) .*   (?:apart by|not planned)", stages[0], re.MULTILINE)
    if re.search(r"^    logits .*   (?:apart by 100%|not planned)", stages[0], re.MULTILINE):
        # The peaks may be at different moments, so only kinds of memory that always exist can be compared.
        apart = [kind for kind in apart if kind not in ("activations", "logits")]
    return {
        "layout": _spelled(layout),
        "rehearsed_gib": float(memory[1]),
        "planned_gib": float(memory[2]),
        "apart": apart,
        "pushed": sum(pushed),
        "stored": None if stored is None else len(trained_of(name, names)),
        "seconds": sum(int(found) for found in re.findall(r"rehearsed in (\d+) s", result.stdout)),
    }


def same_model(name: str) -> list[str]:
    """The scripts with the same flags as this one, itself included: their rehearsals are the same.

    `--custom-model-provider-path` does not count: the provider of a script builds the same model.
    """

    def words(of: str) -> list[str]:
        found = model_words(of)
        place = found.index(_PROVIDER) if _PROVIDER in found else len(found)
        return found[:place] + found[place + 2 :]

    model_type = PUBLISHED_MODELS[name]["model_type"]
    return [
        other
        for other, config in PUBLISHED_MODELS.items()
        if config["model_type"] == model_type and words(other) == words(name)
    ]


@functools.cache
def model_words(name: str) -> list[str]:
    """The flags of `scripts/models/<name>.sh`."""
    command = f"source {ROOT}/scripts/models/{name}.sh && printf '%s\\0' \"${{MODEL_ARGS[@]}}\""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MODEL_ARGS_")}
    result = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    return result.stdout.split("\0")[:-1]


def layout_of(name: str) -> list[str]:
    """The flags of the layout. A model with experts has the layout of its launch script, or of one for a model with the same
    flags, if there is any."""
    if "--num-experts" in model_words(name):
        sourced = [f"models/{other}.sh" for other in same_model(name)]
        scripts = [
            path.name
            for path in sorted((ROOT / "scripts").glob("run-*.sh"), key=lambda path: len(path.name))
            if any(script in path.read_text() for script in sourced)
        ]
        if scripts:
            words = words_of(scripts[0])
            return [word for flag in _LAYOUT if flag in words for word in (flag, words[words.index(flag) + 1])]
    text = PUBLISHED_MODELS[name].get("text_config", PUBLISHED_MODELS[name])
    large = text["num_hidden_layers"] * text["hidden_size"] ** 2 > _LARGE
    tensor, nodes, expert = (8, 8, 32) if large else (2, 1, 8)
    experts = []
    if "--num-experts" in model_words(name):
        # As in launch scripts, an expert is not split over ranks.
        experts = ["--expert-model-parallel-size", str(expert), "--expert-tensor-parallel-size", "1"]
    sizes = ["--actor-num-nodes", str(nodes), "--actor-num-gpus-per-node", "8"]
    return [*sizes, "--tensor-model-parallel-size", str(tensor), *experts]


def _sizes(layout: list[str]) -> dict[str, int]:
    """The number of ranks of each kind of parallelism."""
    size = dict(zip(layout[::2], map(int, layout[1::2]), strict=True))
    sizes = {key: size.get(flag, 1) for key, flag in zip(("TP", "PP", "CP", "EP"), _LAYOUT[2:6], strict=True)}
    dense = sizes["TP"] * sizes["PP"] * sizes["CP"]
    return {"TP": sizes["TP"], "DP": size[_LAYOUT[0]] * size[_LAYOUT[1]] // dense, **sizes}


def _spelled(layout: list[str]) -> str:
    return ", ".join(f"{key} {size}" for key, size in _sizes(layout).items() if size > 1 or key in ("TP", "DP"))


def tensors_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """Name -> shape of the tensors that transformers would write for a model of this config; None if it has no such class.

    It has none for MiMo, whose checkpoints are those of a Qwen2 with layers for multi-token prediction.
    """
    import torch
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    (architecture,) = config["architectures"]
    kind = getattr(transformers, _CHECKPOINTS_OF.get(architecture, architecture), None)
    if kind is None:
        return None
    with torch.device("meta"):
        model = kind(kind.config_class(**{key: value for key, value in config.items() if key != "model_type"}))
    tensors = {
        name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, model.state_dict()).items()
    }
    if config.get("tie_word_embeddings"):
        del tensors["lm_head.weight"]
    if architecture in _CHECKPOINTS_OF:
        tensors |= _prediction_layers(tensors, config)
    return tensors


def _prediction_layers(tensors: dict[str, tuple[int, ...]], config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Those of MiMo, by the names that SGLang's `MiMoMTP` reads: a decoder layer and what joins a state with an embedding."""
    hidden = config["hidden_size"]
    layer = {name.removeprefix(_FIRST): shape for name, shape in tensors.items() if name.startswith(_FIRST)}
    layer |= {"input_proj.weight": (hidden, 2 * hidden)}
    layer |= {f"{norm}_layernorm.weight": (hidden,) for norm in ("token", "hidden", "final")}
    numbers = range(config["num_nextn_predict_layers"])
    return {f"model.mtp_layers.{number}.{name}": shape for number in numbers for name, shape in layer.items()}


def trained_of(name: str, stored: Iterable[str]) -> list[str]:
    """The tensors of a model's checkpoint that are trained, so without a vision tower."""
    family = FAMILIES[PUBLISHED_MODELS[name]["model_type"]]
    return [tensor for tensor in stored if not family.leaves_alone(tensor)]


def write_stand_in(directory: Path, tensors: dict[str, tuple[int, ...]]) -> None:
    """Write safetensors files with bfloat16 tensors of these shapes. Their data are holes, which take no space on the disk."""
    headers: list[dict[str, Any]] = []
    end = _FILE_BYTES
    weight_map = {}
    for name, shape in tensors.items():
        if end >= _FILE_BYTES:
            headers.append({})
            end = 0
        start, end = end, end + 2 * math.prod(shape)
        headers[-1][name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
        weight_map[name] = f"model-{len(headers):05}.safetensors"
    for number, header in enumerate(headers, 1):
        text = json.dumps(header).encode()
        with (directory / f"model-{number:05}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + max(entry["data_offsets"][1] for entry in header.values()))
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


if __name__ == "__main__":
    sys.exit(main())
