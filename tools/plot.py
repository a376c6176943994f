"""Draw one run of train_gpt.py, or compare several.

    python tools/plot.py                                        the newest run in logs/: write logs/RUN_ID.png
    python tools/plot.py first second --out compared.pdf        RUN_IDs in logs/; also .svg, or another format of matplotlib
    python tools/plot.py records/*/*/train_seed*.jsonl          also paths of logs

Runs of one script and one text that differ only in SEED share a colour: each has a thin line, and their mean, at the steps that
all of them validated and at the mean of their ends, a thick one. The training loss is drawn below, unless the runs differ in
text or vocabulary. Runs are named by preset and settings, seeds of a record by the record.
"""

import argparse
import json
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from common import with_deviation
from events import (
    MAY_DIFFER_BETWEEN_SEEDS, find_log, given_settings, interpreter, prepare_output, read_history, warn_of_overfitting,
)

# Runs that differ only in these settings are seeds of one group.
SAME_GROUP = MAY_DIFFER_BETWEEN_SEEDS | {"TRAIN_LOG_EVERY", "VAL_LOSS_EVERY"}
UNNAMED = SAME_GROUP | {"TOKENIZER_PATH", "TOKENIZER_SHA256", "VOCAB_SIZE"}  # the last three follow from DATA_PATH
ONE_TEXT = ("VOCAB_SIZE", "TOKENIZER_SHA256", "DATA_PATH")  # runs that share these can compare losses
MAX_LABEL, LINE = 200, 90  # characters
LATE = 0.1  # of a run: no line leads from step 0 to a first validation that is later
BEGINNING = 0.04  # of a run: its values may leave the panel, since they would flatten the rest
FEW_POINTS = 3  # of a line: all of them are shown
LEAST_HEIGHT = 0.05  # of a panel, in its unit: smaller differences are not magnified
AXIS_TITLES = {"step": "step", "tokens": "training tokens (millions)", "seconds": "training time (s)",
               "val_bpb": "validation (bits per byte)", "train_loss": "training loss (nats per token)"}
STYLES = {
    "validation": {"linewidth": 1.4, "marker": "o", "markersize": 4},
    "validation of one seed": {"linewidth": 0.6, "marker": ".", "markersize": 4, "alpha": 0.7},
    "mean of the seeds": {"linewidth": 2, "marker": "o", "markersize": 5},
    "score of the compressed model": {"linestyle": "none", "marker": "*", "markersize": 11, "markerfacecolor": "none"},
    "lowest validation": {"linewidth": 1.4, "linestyle": ":"},
    "training loss": {"linewidth": 1.4, "marker": ".", "markersize": 4},
    "training loss of single steps": {"linewidth": 0.6, "alpha": 0.4},
    "moving mean of the training loss": {"linewidth": 1.4},
}


class Run(NamedTuple):
    """What is drawn of a run."""
    name: str
    record: str  # the record that it is a seed of, or ""
    settings: dict
    score: float | None  # bits per byte of the compressed model
    events: list[dict]  # also those from before it was resumed; the first is "config"


def find_missing(event: dict) -> list[str]:
    """Return the names of the numbers that an event has to have, but has not. Those that are not finite are None."""
    step = {"step": ..., "train_time_ms": ..., "train_loss": None, "val_loss": None, "val_bpb": None}  # None: may be missing
    needed = {"train": step, "val": step, "final": {"val_bpb": ...}}.get(event["event"], {})
    return [key for key, default in needed.items() if not isinstance(event.get(key, default), int | float | None)]


def read_run(path: Path) -> Run:
    """Read a log. Raises ValueError if it is no log of a run, and OSError."""
    events = read_history(path)
    missing = [f"{event['event']}.{key}" for event in events for key in find_missing(event)]
    missing += [name for name in ("SEED", "TRAIN_BATCH_TOKENS") if name not in events[0]["config"]]
    if missing:
        raise ValueError(f"{path} is damaged, or of another program: its events lack {', '.join(dict.fromkeys(missing))}")
    if not any(event["event"] in ("train", "val") for event in events):
        raise ValueError(f"{path} has no steps yet")
    record = path.parent.name.partition("_")[2] if path.stem.startswith("train_seed") else ""  # its folder is DATE_NAME
    name = path.stem if path.parent == Path("logs") else str(path.with_suffix(""))
    score = next((event["val_bpb"] for event in events if event["event"] == "final"), None)
    return Run(name, record, events[0]["config"], score, events)


def presets_of(run: Run) -> tuple[str, ...]:
    """Return the names of the files that settings came from."""
    origins = {origin for _, origin in run.events[0].get("overrides", {}).values()}
    return tuple(sorted(Path(origin[1:]).stem for origin in origins if origin.startswith("@")))


def describe(run: Run, differing: list[str]) -> str:
    """Return the run's record; or its preset and its values of the differing settings, or if there are none, its data set and
    the settings that were given."""
    if run.record:
        return run.record
    words = [f"preset {name}" for name in presets_of(run)]
    for name in differing or dict.fromkeys(["DATA_PATH", *given_settings(run.events[0])]):
        value = run.settings.get(name)
        if name not in UNNAMED and value is not None:
            words.append(Path(value).name if name == "DATA_PATH" else f"{name}={value}")
    return textwrap.shorten(", ".join(words) or run.name, MAX_LABEL, placeholder=" ...")


def plain_label(text: str) -> str:
    """Return text as matplotlib shows it as it is: it hides what begins with _, reads $, and stops at a name that is no UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode().lstrip("_").replace("$", r"\$")


@contextmanager
def own_style():
    """Draw as matplotlib does by default. A matplotlibrc may ask for LaTeX, which is missing or stops at a "_"."""
    import matplotlib
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        yield


def groups_of(runs: list[Run]) -> dict[str, list[Run]]:
    """Return the runs by label. Runs of one script and one text that differ only in settings of SAME_GROUP share a label."""
    by_key: dict[str, list[Run]] = {}
    for run in runs:
        settings = {name: value for name, value in run.settings.items() if name not in SAME_GROUP}
        code = [event.get("code_sha256") for event in run.events if event["event"] == "export"]
        key = json.dumps([settings, code, run.events[0].get("data_sha256")], sort_keys=True)
        while any(other.settings["SEED"] == run.settings["SEED"] for other in by_key.get(key, [])):  # it is no other seed
            key += " again"
        by_key.setdefault(key, []).append(run)
    firsts = [members[0] for members in by_key.values()]
    names = sorted({name for run in firsts for name in run.settings} - UNNAMED)
    differing = [name for name in names if len({str(run.settings.get(name)) for run in firsts}) > 1]
    by_hand = {name for run in firsts for name in given_settings(run.events[0])}
    differing.sort(key=lambda name: name not in by_hand)  # a long label is cut at its end
    if len(set(map(presets_of, firsts))) > 1:  # whose names stand for their settings
        differing = [name for name in differing if name in by_hand]
    labels = [describe(run, differing) for run in firsts]
    groups = {}
    for label, members in zip(labels, by_key.values()):
        if labels.count(label) > 1:
            label += f" ({members[0].name})"
        if len(members) > 1:
            label += f", {len(members)} seeds"
        groups[plain_label(label)] = members
    return groups


def curve(run: Run, x: str, y: str) -> dict[int, tuple[float, float]]:
    """Return (x, y) by step, of a run's "val_bpb" or "train_loss" against "step", "seconds", or "tokens" in millions. Values
    that were not finite are left out."""
    source = "train_time_ms" if x == "seconds" else "step"
    scale = {"step": 1, "seconds": 1e-3, "tokens": run.settings["TRAIN_BATCH_TOKENS"] / 1e6}[x]
    kind = y.partition("_")[0]
    return {event["step"]: (event[source] * scale, event[y]) for event in run.events
            if event["event"] == kind and event.get(y) is not None}


def mean_curve(members: list[Run], x: str) -> dict[int, tuple[float, float]]:
    """Return the means of the seeds' x and bits per byte by step, at the steps that all of them validated. If all have ended,
    the mean of their ends follows."""
    curves = [curve(run, x, "val_bpb") for run in members]
    steps = [[step] * len(curves) for step in sorted(set.intersection(*map(set, curves)))]
    if all(curves) and all(run.score is not None for run in members):
        steps.append([max(points) for points in curves])
    return {max(own): tuple(np.mean([points[step] for points, step in zip(curves, own)], axis=0)) for own in steps}


def connected(points: dict[int, tuple[float, float]]) -> np.ndarray:
    """Return x and y, (2, N), of the points in their order, with a gap after step 0 if the next of several is late."""
    steps, values = [*points], np.array([*points.values()], dtype=float).reshape(-1, 2).T
    if len(steps) > 2 and steps[0] == 0 and steps[1] > LATE * steps[-1]:
        values = np.insert(values, 1, np.nan, axis=1)
    return values


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the moving mean of values (N,), over a twentieth of them."""
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - max(1, len(values) // 20))
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[ends] - sums[starts]) / (ends - starts)


def lines_of(members: list[Run], x: str, y: str):
    """Yield a name in STYLES, and x and y (2, N), of each line and mark of a group in a panel."""
    for run in members:
        points = connected(curve(run, x, y))
        if y == "val_bpb":
            yield "validation" if len(members) == 1 else "validation of one seed", points
            if run.score is not None and points.size:
                yield "score of the compressed model", np.array([[points[0, -1]], [run.score]])
        elif points.size:
            means = smooth(points[1])
            if np.allclose(means, points[1]):  # of one step each, in a short run
                yield "training loss", points
                continue
            if len(members) == 1:
                yield "training loss of single steps", points
            yield "moving mean of the training loss", np.stack([points[0], means])
    if len(members) > 1 and y == "val_bpb":
        yield "mean of the seeds", connected(mean_curve(members, x))


def panels_of(groups: dict[str, list[Run]]) -> tuple[list[str], list[str]]:
    """Return y of each row of panels and x of each column: steps for one group; else steps, or tokens if the steps differ in
    size, and time."""
    runs = [run for members in groups.values() for run in members]
    same_size = len({run.settings["TRAIN_BATCH_TOKENS"] for run in runs}) == 1
    one_text = len({tuple(run.settings.get(name) for name in ONE_TEXT) for run in runs}) == 1
    wanted = ["val_bpb", "train_loss"] if one_text else ["val_bpb"]
    rows = [y for y in wanted if any(curve(run, "step", y) for run in runs)] or ["train_loss"]
    return rows, ["step"] if len(groups) == 1 else ["step" if same_size else "tokens", "seconds"]


def outcome(members: list[Run]) -> str:
    """Return the bits per byte of a group's compressed models, or ""."""
    scores = [run.score for run in members if run.score is not None]
    return f": {with_deviation(scores)} bits per byte" if scores else ""


def draw_panel(axes, groups: dict[str, list[Run]], colours: list, x: str, y: str) -> None:
    """Draw a quantity of all groups, and choose the limits of its axis."""
    shown = []
    for colour, members in zip(colours, groups.values()):
        for style, (across, values) in lines_of(members, x, y):
            axes.plot(across, values, color=colour, label=style, **STYLES[style])
            late = across > BEGINNING * np.nanmax(across, initial=0)
            is_short = late.sum() < FEW_POINTS or members[0].settings.get("INIT_FROM")
            shown.append(values if is_short else values[late])
        for run in members if len(groups) == 1 and y == "val_bpb" else []:
            if warn_of_overfitting(run.events):
                across, _ = min(curve(run, x, y).values(), key=lambda point: point[1])
                axes.axvline(across, color=colour, label="lowest validation", **STYLES["lowest validation"])
    low, high = (limit(np.concatenate(shown)) for limit in (np.nanmin, np.nanmax))
    margin = max(0.06 * (high - low), (LEAST_HEIGHT - high + low) / 2)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.set(xlabel=AXIS_TITLES[x], ylabel=AXIS_TITLES[y], ylim=(low - margin, high + margin))
    axes.label_outer()
    axes.grid(alpha=0.3)


def name_hidden_dots(axes) -> None:
    """Write above a panel which values the dots have that its axis leaves out. A line alone is seen to leave the panel."""
    low, high = axes.get_ylim()
    values = [y for line in axes.lines if line.get_marker() != "None" for y in line.get_ydata() if y < low or y > high]
    if values:
        texts = dict.fromkeys([f"{min(values):.2f}", f"{max(values):.2f}"])
        axes.set_title(f"not shown: {' to '.join(texts)} at the beginning", loc="left", fontsize="small")


@own_style()
def draw(groups: dict[str, list[Run]], out: Path) -> None:
    """Write a picture in the format of the file's ending. Raises ImportError without matplotlib, ValueError for a format
    that it does not have, and OSError."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    rows, columns = panels_of(groups)
    heights = [3.4 if y == "val_bpb" else 2.2 for y in rows]
    labels = [textwrap.fill(label + outcome(members), LINE) for label, members in groups.items()]
    lines = len("\n".join(labels).splitlines())
    picture = Figure(figsize=(8, sum(heights) + 0.9 + 0.2 * lines), dpi=100, layout="constrained")
    panels = picture.subplots(len(rows), len(columns), sharex="col", sharey="row", height_ratios=heights, squeeze=False)
    palette = colormaps["tab10"] if len(groups) <= 10 else colormaps["turbo"].resampled(len(groups))
    colours = [palette(number) for number in range(len(groups))]
    for (row, column), axes in np.ndenumerate(panels):
        draw_panel(axes, groups, colours, columns[column], rows[row])
    for axes in panels[:, 0]:  # when all panels of a row have chosen their common limits
        name_hidden_dots(axes)
    if len(groups) == 1:
        picture.suptitle(labels[0], fontsize=11)
    else:
        handles = [Line2D([], [], color=colour, linewidth=4) for colour in colours]
        picture.legend(handles, labels, loc="outside upper left", fontsize="small")
    used = {line.get_label() for axes in panels.flat for line in axes.lines}
    styles = {style: how for style, how in STYLES.items() if style in used}
    handles = [Line2D([], [], color=colours[0] if len(groups) == 1 else "0.35", **how) for how in styles.values()]
    picture.legend(handles, list(styles), loc="outside lower center", ncols=3, fontsize="small")
    picture.savefig(out)
    if out.suffix == ".png":
        from PIL import Image  # a part of what matplotlib needs
        Image.open(out).convert("RGB").quantize(128).save(out, optimize=True)  # a third of the bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="RUN_ID in logs/, or a log (default: the newest in logs/)")
    parser.add_argument("--out", type=Path, help="file for the picture (default: logs/RUN_ID.png, or compared.png)")
    options = parser.parse_args()
    try:
        paths = [find_log(name) for name in options.runs or [""]]
        groups = groups_of([read_run(path) for path in paths])
        folder = paths[0].parent
        if (folder / "submission.json").exists() and not options.out:  # a record has no room for it
            folder = Path("logs")
            folder.mkdir(exist_ok=True)
        out = options.out or folder / (f"{paths[0].stem}.png" if len(paths) == 1 else "compared.png")
        out = out if out.suffix else out.with_suffix(".png")  # as matplotlib names it
        draw(groups, out)
        print(out)
    except ImportError as error:
        sys.exit(f"plot.py: {error}; run: {interpreter()} -m pip install matplotlib")
    except (ValueError, OSError) as error:
        sys.exit(f"plot.py: {error}")


if __name__ == "__main__":
    prepare_output()
    main()
