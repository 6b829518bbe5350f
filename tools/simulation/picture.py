"""The first steps of every arrangement as a picture: what the trainer does, and how full the engines are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.simulation.arrangements import Replay

_COLOURS = {
    "log_probs": "tab:purple",
    "train": "tab:red",
    "push": "tab:green",
    "switch": "tab:brown",
    "other": "tab:gray",
}
# Where the bars of the trainer stand, and for how many of the slowest steps.
_TRAINER = (1.15, 0.5)
_STEPS = 3


def draw(replays: Sequence[Replay], path: Path, title: str) -> None:
    """Write the picture to `path`, whose ending says the format (PNG, SVG, PDF).

    All timelines have one scale and begin with the first rollout. The area is the number of running requests, as a share of
    its maximum; a line below it marks when each rollout call began.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    shown = min(_STEPS * max(replay.step_seconds for replay in replays), *(replay.ends[-1] for replay in replays))
    figure, rows = pyplot.subplots(
        len(replays), 1, sharex=True, squeeze=False, figsize=(10, 1.3 * len(replays) + 1.2), layout="constrained"
    )
    for axes, replay in zip(rows[:, 0], replays, strict=True):
        most = max(running for _, running in replay.curve)
        times = [time for time, _ in replay.curve if time <= shown]
        shares = [running / most for _, running in replay.curve[: len(times)]]
        axes.fill_between(times, shares, step="post", color="tab:blue", alpha=0.6, linewidth=0)
        for span in replay.spans:
            if span.start > shown:
                continue
            if span.phase == "rollout":
                axes.plot([span.start, span.start], [-0.08, 1.0], color="tab:blue", linewidth=0.8)
                continue
            axes.broken_barh([(span.start, span.end - span.start)], _TRAINER, color=_COLOURS[span.phase], linewidth=0)
        axes.set(ylim=(-0.1, 1.8), yticks=(0.5, 1.4), yticklabels=("engines", "trainer"), xlim=(0, shown))
        axes.set_title(f"{replay.arrangement.name}: {replay.step_seconds:.3g} s a step", loc="left", fontsize=9)
        axes.tick_params(labelsize=8)
    rows[-1, 0].set_xlabel("seconds")
    figure.suptitle(title, fontsize=10)
    used = {span.phase for replay in replays for span in replay.spans}
    legend = [Patch(color="tab:blue", alpha=0.6, label="running requests")]
    legend += [Patch(color=colour, label=phase) for phase, colour in _COLOURS.items() if phase in used]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
