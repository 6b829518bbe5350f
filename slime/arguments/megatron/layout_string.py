"""`--pipeline-model-parallel-layout`: which parts of the model each stage holds, in Megatron's notation.

`E` is the embedding, `t` a layer, `m` a layer of multi-token prediction, `L` the loss; `|` ends a stage, `x*3` and `(xy)*3`
repeat, commas are for the eye. With more stages than pipeline ranks, the ranks take turns: virtual stages.
"""

import re


def parts_of_layout(layout: str) -> list[str]:
    """The letters of every stage, first to last, with repetitions written out."""
    text = layout.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(repeated, lambda found: found.group(1) * int(found.group(2)), text)
    return text.split("|")
