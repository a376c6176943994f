"""Draw the losses of one run of train_gpt.py, or compare several.

    python tools/plot.py first                                  a RUN_ID in logs/: write logs/first.png
    python tools/plot.py first second third --out compared.pdf  also .svg, or any other format of matplotlib
    python tools/plot.py records/*/*/train_seed*.jsonl          also paths of .jsonl logs

Runs of one script and one text that differ only in SEED become one line, their mean, in a band from the smallest to the
largest. Thin lines are the training loss of single steps, the thick ones over them their moving mean, dots validations, and
stars the scores of the artifacts. A dotted line marks the lowest validation of a run that learnt its text by heart. Losses
per token are only compared between runs of one vocabulary and one text.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from events import MAY_DIFFER_BETWEEN_SEEDS, find_log, read_history, warn_of_overfitting

# Runs that differ only in these settings are seeds of one line.
SAME_LINE = MAY_DIFFER_BETWEEN_SEEDS | {"TRAIN_LOG_EVERY", "VAL_LOSS_EVERY"}
AXIS_TITLES = {"step": "steps", "tokens": "tokens (millions)", "seconds": "training clock (s)",
               "loss": "loss (nats per token)", "val_bpb": "bits per byte of the validation text"}
ONE_TEXT = ("VOCAB_SIZE", "TOKENIZER_SHA256", "DATA_PATH", "VAL_TOKENS")  # runs that share these can compare losses
MAX_LABEL = 60  # characters


class Run(NamedTuple):
    """The events of one log and of the logs from before it was resumed. The first is the "config" event."""
    name: str
    events: list[dict]

    @property
    def settings(self) -> dict:
        return self.events[0]["config"]


def read_run(name: str) -> Run:
    """Read a .jsonl log, named by its path or a RUN_ID in logs/. Raises ValueError if it is no log of a run, and OSError."""
    path = find_log(name)
    try:
        events = read_history(path)
        if not [event["train_time_ms"] for event in events if event["event"] in ("train", "val")]:
            raise ValueError("it has no steps yet")
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is not a .jsonl log of a run of train_gpt.py: {error!r}") from None
    return Run(f"{path.parent.name} {path.stem}" if "train_seed" in path.stem else path.stem, events)


def groups_of(runs: list[Run]) -> dict[str, list[Run]]:
    """Return the runs by label. Runs of one script and one text with different seeds, which differ only in settings of
    SAME_LINE, share a label. It says in which settings they differ from the others, or else which run is their first."""
    by_key: dict[str, list[Run]] = {}
    for run in runs:
        settings = {name: value for name, value in run.settings.items() if name not in SAME_LINE}
        code = [event.get("code_sha256") for event in run.events if event["event"] == "export"]
        key = json.dumps([settings, code, run.events[0].get("data_sha256")], sort_keys=True)
        while any(other.settings["SEED"] == run.settings["SEED"] for other in by_key.get(key, [])):  # it is no other seed
            key += " again"
        by_key.setdefault(key, []).append(run)
    firsts = [members[0].settings for members in by_key.values()]
    names = sorted({name for settings in firsts for name in settings} - SAME_LINE)
    differing = [name for name in names if len({str(settings.get(name)) for settings in firsts}) > 1]
    groups, labels = {}, set()
    for members in by_key.values():
        settings = members[0].settings
        label = " ".join(f"{name}={settings[name]}" for name in differing if name in settings)
        if not label or len(label) > MAX_LABEL or label in labels:
            label = members[0].name
        labels.add(label)
        label = ("run " * label.startswith("_") + label).replace("$", r"\$")  # matplotlib hides one, and reads the other
        if len(members) > 1:
            label += f", {len(members)} runs"
        groups[f"{label} ({len(groups)})" if label in groups else label] = members
    return groups


def curve(run: Run, kind: str, x: str, y: str) -> np.ndarray:
    """Return x and y, (2, N), of a run's "train" or "val" events: "loss" or "val_bpb" against "step", "seconds" or
    "tokens", in millions. Values that were not finite are left out."""
    source = "train_time_ms" if x == "seconds" else "step"
    scale = {"step": 1, "seconds": 1e-3, "tokens": run.settings["TRAIN_BATCH_TOKENS"] / 1e6}[x]
    name = f"{kind}_loss" if y == "loss" else y
    points = [(event[source] * scale, event[name]) for event in run.events
              if event["event"] == kind and event.get(name) is not None]
    return np.array(points, dtype=float).reshape(-1, 2).T


def band(members: list[Run], kind: str, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the x (N,) of a group's first run where all its runs have values, up to the last one that they all have,
    and the values (runs, N), interpolated there. N is 0 if a run has no values. See `curve` for the other arguments."""
    curves = [curve(run, kind, x, y) for run in members]
    if any(across.size == 0 for across, _ in curves):
        return np.zeros(0), np.zeros((len(members), 0))
    low = max(across[0] for across, _ in curves)
    high = min(across[-1] for across, _ in curves)
    grid = curves[0][0]
    grid = np.append(grid[(grid >= low) & (grid < high)], high)
    return grid, np.stack([np.interp(grid, across, values) for across, values in curves])


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the moving mean of values (N,), over a twentieth of them."""
    width = max(1, len(values) // 20)
    return np.array([values[max(0, end - width):end].mean() for end in range(1, len(values) + 1)])


def draw_panel(axes, groups: dict[str, list[Run]], x: str, y: str) -> None:
    """Draw a quantity, "loss" or "val_bpb", of all groups against `x`. The first values may leave the panel: they would
    flatten the rest."""
    from matplotlib import colormaps
    shown = []
    for number, (label, members) in enumerate(groups.items()):
        colour = f"C{number}" if len(groups) <= 10 else colormaps["turbo"](number / (len(groups) - 1))  # a cycle has ten
        for kind in ("train", "val") if y == "loss" else ("val",):
            across, values = band(members, kind, x, y)
            if len(across) == 0:
                continue
            mean = values.mean(axis=0)
            if kind == "train":
                axes.plot(across, mean, color=colour, linewidth=0.6, alpha=0.35)
                axes.plot(across, smooth(mean), color=colour, linewidth=1.6, label=label)
            else:
                axes.plot(across, mean, color=colour, linewidth=1.2, marker="o", markersize=4, label=label)
            if len(members) > 1:
                axes.fill_between(across, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.2, linewidth=0)
            shown.append(values[:, (across > 0.04 * across.max()) | (len(across) < 3)].ravel())
        for run in members:
            ends, _ = curve(run, "val", x, y)
            scores = [event["val_loss" if y == "loss" else y] for event in run.events if event["event"] == "final"]
            if len(ends) and scores and scores[0] is not None:
                axes.plot(ends[-1], scores[0], "*", color=colour, markersize=9, markeredgecolor="black", markeredgewidth=0.5)
                shown.append(np.array(scores))
    axes.grid(alpha=0.3)
    axes.set(xlabel=AXIS_TITLES[x], ylabel=AXIS_TITLES[y])
    if shown:
        values = np.concatenate(shown)
        low, high = values.min(), np.quantile(values, 0.98)
        if high > low:
            axes.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low))


def panels_of(groups: dict[str, list[Run]]) -> list[tuple[str, str]]:
    """Return x and y of each panel: one for a single line; else steps, or tokens if the steps differ in size, and time."""
    if len(groups) == 1:
        return [("step", "loss")]
    settings = [run.settings for members in groups.values() for run in members]
    x = "step" if len({each["TRAIN_BATCH_TOKENS"] for each in settings}) == 1 else "tokens"
    is_one_text = len({tuple(each.get(name) for name in ONE_TEXT) for each in settings}) == 1
    return [(across, y) for y in (["loss"] if is_one_text else []) + ["val_bpb"] for across in (x, "seconds")]


def draw(groups: dict[str, list[Run]], out: Path) -> None:
    """Write a picture in the format of the file's ending. Raises ImportError without matplotlib, ValueError for a format
    that it does not have, and OSError."""
    from matplotlib.figure import Figure
    panels = panels_of(groups)
    rows, columns = (1, 1) if len(panels) == 1 else (len(panels) // 2, 2)
    picture = Figure(figsize=(7.2 * columns, 4.5 * rows + 0.5), dpi=125, layout="constrained")
    for axes, (x, y) in zip(picture.subplots(rows, columns, squeeze=False).flat, panels):
        draw_panel(axes, groups, x, y)
    axes = picture.axes[0]
    handles, labels = axes.get_legend_handles_labels()
    if len(groups) == 1:
        label, = groups
        memory = max(event.get("mem_mib") or 0 for run in groups[label] for event in run.events)
        axes.set_title(label + f"; peak memory {memory:,} MiB" * (memory > 0), fontsize=10)
        titles = ["validation" if h.get_marker() == "o" else "training" for h in handles]
        if warn_of_overfitting(groups[label][0].events):
            steps, values = curve(groups[label][0], "val", *panels[0])
            handles.append(axes.axvline(steps[values.argmin()], color="black", linestyle=":"))
            titles.append("lowest validation")
        axes.legend(handles, titles, loc="upper right")
    else:
        by_label = dict(zip(labels, handles))
        picture.legend(by_label.values(), by_label.keys(), loc="outside upper center",
                       ncols=max(1, 80 * columns // (max(map(len, groups)) + 8)))
    picture.savefig(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="RUN_ID in logs/, or a .jsonl log")
    parser.add_argument("--out", type=Path, help="file for the picture (default: that of the first log, as .png)")
    options = parser.parse_args()
    try:
        groups = groups_of([read_run(name) for name in options.runs])
        out = options.out or find_log(options.runs[0]).with_suffix(".png")
        draw(groups, out)
        print(out)
    except ImportError as error:
        sys.exit(f"plot.py: {error}; run: pip install matplotlib")
    except (ValueError, OSError) as error:
        sys.exit(f"plot.py: {error}")


if __name__ == "__main__":
    main()
