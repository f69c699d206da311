"""A profile drawn as a picture (needs the extra `gymsdk[plot]`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gymsdk.errors import UsageError
from gymsdk.rollouts.profile import Profile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TICKS = 16
"""How many marks an axis takes before they run into each other."""


def draw(profile: Profile, path: Path) -> None:
    """Write *profile* as a PNG; raises `UsageError` where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("drawing needs matplotlib: `pip install 'gymsdk[plot]'`, or leave out --plot") from None
    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    rewards, bands, passes = figure.subplots(1, 3)
    _rewards(rewards, profile)
    _bands(bands, profile)
    _passes(passes, profile)
    played = f"{profile.environment}, {profile.model}: {profile.scored} rollouts of {profile.tasks} tasks"
    figure.suptitle(f"{profile.verdict}\n{played}", fontsize=11)
    figure.savefig(path, dpi=120)


def _rewards(axes: Axes, profile: Profile) -> None:
    axes.bar(
        [bar.low for bar in profile.rewards],
        [bar.count for bar in profile.rewards],
        width=[max(bar.high - bar.low, 0.01) for bar in profile.rewards],
        align="edge",
        edgecolor="white",
    )
    axes.set(title="rewards", xlabel="reward", ylabel="rollouts")


def _bands(axes: Axes, profile: Profile) -> None:
    from matplotlib.ticker import MaxNLocator

    bars = axes.barh(list(profile.bands), list(profile.bands.values()), color="tab:green")
    axes.bar_label(bars, padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title="difficulty for this model", xlabel="tasks")


def _passes(axes: Axes, profile: Profile) -> None:
    ks = sorted(profile.passes)
    values = [profile.passes[k].value for k in ks]
    below = [profile.passes[k].value - profile.passes[k].low for k in ks]
    above = [profile.passes[k].high - profile.passes[k].value for k in ks]
    axes.errorbar(ks, values, yerr=[below, above], marker="o", capsize=3, color="tab:orange")
    axes.set(title="pass@k, with its 95 % interval", xlabel="k")
    if len(ks) <= TICKS:
        axes.set_xticks(ks)
    if profile.rewards and profile.rewards[0].low >= 0 and profile.rewards[-1].high <= 1:
        axes.set_ylim(-0.03, 1.03)
