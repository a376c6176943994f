"""Compare runs of train_gpt.py, or of published trainers with the same log lines, in a table and a picture.

    python logs/plot.py first                                  a RUN_ID in logs/: print a table, write logs/first.png
    python logs/plot.py first second third --out compared.pdf  also .svg, or any other format of matplotlib
    python logs/plot.py records/*/*/train_seed*.log --table    only print the table

A run is a RUN_ID, a .jsonl log or a text log. Runs that differ only in SEED become one line, their mean, in a
band from the smallest to the largest. A resumed run starts with the steps in its older logs. Thin lines are the training
loss of single steps, the thick ones over them their moving mean, dots validations, and stars the scores of the artifacts.
Losses per token are only compared between runs of one vocabulary and one text.
"""

import argparse
import json
import math
import re
import sys
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import numpy as np
from events import MAY_DIFFER_BETWEEN_SEEDS, QUANTITIES, read_history

# Runs that differ only in these settings are seeds of one line.
SAME_LINE = MAY_DIFFER_BETWEEN_SEEDS | {"TRAIN_LOG_EVERY", "VAL_LOSS_EVERY", "overrides"}
# Dense bfloat16 peaks from the makers' data sheets, in TFLOP/s; float16 for V100 and T4, which lack bfloat16.
PEAK_TFLOPS = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "B200": 2250, "A100": 312,
               "L40S": 362, "L40": 181, "L4": 121, "RTX 4090": 165, "RTX 3090": 71, "A10G": 70, "V100": 125,
               "Tesla T4": 65}
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink",
           "tab:olive", "tab:cyan", "black")
ACROSS = {"step": "steps", "tokens": "tokens (millions)", "seconds": "training clock (s)"}
ONE_TEXT = ("VOCAB_SIZE", "TOKENIZER_SHA256", "DATA_PATH", "VAL_TOKENS")  # runs that share these can compare losses
MAX_LABEL = 60  # characters


@dataclass
class Run:
    """One log. `train` and `val` hold a list for each quantity, with one entry for each entry of "step"."""
    name: str
    start: dict = field(default_factory=dict)  # the "config" event of a .jsonl log
    settings: dict = field(default_factory=dict)
    train: dict[str, list[float]] = field(default_factory=dict)
    val: dict[str, list[float]] = field(default_factory=dict)
    final: dict[str, float] = field(default_factory=dict)
    path: Path = Path()

    def tokens_per_step(self) -> float:
        """Return TRAIN_BATCH_TOKENS, or NaN if the log does not contain it."""
        return float(self.settings.get("TRAIN_BATCH_TOKENS", "nan"))


def add_event(run: Run, event: dict) -> None:
    """Add an event of a .jsonl log to the run. What a step lacks, None and "n/a" become NaN."""
    kind = event["event"]
    if kind == "config":
        run.start = event
        run.settings = event["config"]
    elif kind in QUANTITIES:
        values = {"step": event["step"], "loss": event[f"{kind}_loss"],
                  "seconds": float(event["train_time_ms"]) / 1000}
        values.update({name: event.get(name) for name in QUANTITIES[kind]})
        for name, value in values.items():
            is_known = value is not None and value != "n/a"
            getattr(run, kind).setdefault(name, []).append(float(value) if is_known else float("nan"))
    elif kind in ("export", "final"):
        names = ("artifact_bytes", "code_bytes", "val_loss", "val_bpb")
        run.final.update({name: float(event[name]) for name in names if name in event})


def read_run(text: str) -> Run:
    """Read the log named by `text`, a file or a RUN_ID in logs/. Raises ValueError if there is none, or if it
    has no steps."""
    path = Path(text)
    if not path.is_file():
        path = Path("logs", text + ".jsonl")
    if not path.is_file():
        raise ValueError(f"{text!r} is neither a file nor a RUN_ID in logs/")
    run = Run(f"{path.parent.name} {path.stem}" if "train_seed" in path.stem else path.stem, path=path)
    try:
        for event in read_history(path):
            add_event(run, event)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a log of train_gpt.py: {error!r}") from None
    if not run.train.get("step") and not run.val.get("step"):
        raise ValueError(f"{path} has no step:... line or event yet")
    return run


def flops_per_token(config: dict) -> int:
    """Return the FLOPs of forward and backward for a token: 6 for each weight of a product, plus causal
    attention. `config` has the trainer's settings by name."""
    width = config["MODEL_DIM"]
    kv_width = width // config["NUM_HEADS"] * config["NUM_KV_HEADS"]
    rows = math.ceil(config["VOCAB_SIZE"] / config["VOCAB_PAD"]) * config["VOCAB_PAD"]
    products = 2 * width + 2 * kv_width + 2 * config["MLP_MULT"] * width
    return 6 * width * (config["NUM_LAYERS"] * (products + config["TRAIN_SEQ_LEN"]) + rows)


def mfu_of(start: dict, rate: float) -> float | None:
    """Return the share of the GPUs' peak that `rate`, in tokens/s over all ranks, uses. `start` is a "config"
    event, which has the GPU and the settings. Return None if the peak is unknown, as in float32."""
    gpu = start.get("gpu", "")
    peaks = [peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", gpu)]
    if not peaks or start["config"]["DTYPE"] == "float32":
        return None
    return rate * flops_per_token(start["config"]) / (start["world_size"] * peaks[0] * 1e12)


def groups_of(runs: list[Run]) -> dict[str, list[Run]]:
    """Return the runs by label. Runs that differ only in settings of SAME_LINE share a label, and so do runs of one name
    whose logs have no settings. A label says in which settings its runs differ from the others."""
    by_key: dict[str, list[Run]] = {}
    for run in runs:
        settings = {name: value for name, value in run.settings.items() if name not in SAME_LINE}
        key = json.dumps(settings or run.name, sort_keys=True)
        by_key.setdefault(key, []).append(run)
    firsts = [members[0] for members in by_key.values()]
    different = {name: row for name, row in differences(firsts).items() if name not in SAME_LINE}
    groups = {}
    for number, members in enumerate(by_key.values()):
        label = " ".join(f"{name}={row[number]}" for name, row in different.items() if row[number])
        if not label or len(label) > MAX_LABEL or not all(run.settings for run in firsts):
            label = members[0].name
        if len(members) > 1:
            label += f", {len(members)} runs"
        if label in groups:
            label += f" ({len(groups)})"
        groups[label] = members
    return groups


def differences(runs: list[Run]) -> dict[str, list[str]]:
    """Return the settings that differ between the runs, as text for each run; "" where a run lacks one."""
    names = sorted({name for run in runs for name in run.settings} - {"overrides"})
    rows = {name: [str(run.settings.get(name, "")) for run in runs] for name in names}
    return {name: row for name, row in rows.items() if len(set(row)) > 1}


def cell(value: float | None, form: str) -> str:
    """Return the number as text; "" for None and NaN."""
    return "" if value is None or np.isnan(value) else form.format(value)


def last(values: list[float] | None) -> float | None:
    """Return the last value, or None if there is none."""
    return values[-1] if values else None


def summary_of(run: Run) -> dict[str, str]:
    """Return the column of a run in the table, as texts by row title."""
    steps = max(run.train.get("step", []) + run.val.get("step", []))
    seconds = max(run.train.get("seconds", []) + run.val.get("seconds", []))
    rates = [rate for rate in run.train.get("tok_per_sec", []) if np.isfinite(rate)]
    rate = float(np.median(rates)) if rates else None
    sizes = [run.final.get("artifact_bytes"), run.final.get("code_bytes")]
    total = None if None in sizes else sum(sizes)
    return {"steps": cell(steps, "{:,.0f}"),
            "tokens, M": cell(steps * run.tokens_per_step() / 1e6, "{:,.1f}"),
            "training, s": cell(seconds, "{:,.1f}"),
            "tokens/s, median": cell(rate, "{:,.0f}"),
            "MFU, median": cell(mfu_of(run.start, rate) if rate else None, "{:.1%}"),
            "last train_loss": cell(last(run.train.get("loss")), "{:.4f}"),
            "last val_loss": cell(last(run.val.get("loss")), "{:.4f}"),
            "last val_bpb": cell(last(run.val.get("val_bpb")), "{:.4f}"),
            "val_bpb of the artifact": cell(run.final.get("val_bpb"), "{:.4f}"),
            "artifact, bytes": cell(sizes[0], "{:,.0f}"),
            "artifact and code, bytes": cell(total, "{:,.0f}")}


def table_of(runs: list[Run]) -> list[list[str]]:
    """Return rows of text: a heading, one for each quantity, and one for each setting that differs."""
    summaries = [summary_of(run) for run in runs]
    rows = [["", *(run.name for run in runs)]]
    rows += [[title, *(summary[title] for summary in summaries)] for title in summaries[0]]
    return rows + [[name, *row] for name, row in differences(runs).items()]


def markdown(rows: list[list[str]]) -> str:
    """Return the rows as a Markdown table with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row, widths)]
        lines.append(f"| {' | '.join(cells)} |")
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def curve(run: Run, part: str, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y, both (N,), of a quantity `y` in a run's "train" or "val" `part`, without NaN. `x` is
    "step", "seconds" or "tokens", in millions."""
    series = getattr(run, part)
    across = np.array(series.get("step" if x == "tokens" else x, []), dtype=float)
    if x == "tokens":
        across = across * (run.tokens_per_step() / 1e6)
    values = np.array(series.get(y, []), dtype=float)
    finite = np.isfinite(across) & np.isfinite(values)
    return across[finite], values[finite]


def band(members: list[Run], part: str, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the x (N,) of a group's first run where all its runs have values, up to the last one that they all have,
    and the values (runs, N), interpolated there. N is 0 if a run has no values. See `curve` for the other arguments."""
    curves = [curve(run, part, x, y) for run in members]
    if any(len(across) == 0 for across, _ in curves):
        return np.zeros(0), np.zeros((len(members), 0))
    low = max(across[0] for across, _ in curves)
    high = min(across[-1] for across, _ in curves)
    grid = curves[0][0]
    grid = grid[(grid >= low) & (grid < high)]
    if low <= high:
        grid = np.append(grid, high)
    return grid, np.stack([np.interp(grid, across, values) for across, values in curves])


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the moving mean of values (N,), over a twentieth of them."""
    width = max(1, len(values) // 20)
    sums = np.cumsum(np.concatenate(([0.0], values)))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def draw_panel(axes, groups: dict[str, list[Run]], x: str, y: str) -> None:
    """Draw a quantity, "loss" or "val_bpb", of all groups against `x`. The first values may leave the panel: they would
    flatten the rest."""
    shown = []
    for colour, (label, members) in zip(cycle(COLOURS), groups.items()):
        for part in ("train", "val") if y == "loss" else ("val",):
            across, values = band(members, part, x, y)
            if len(across) == 0:
                continue
            mean = values.mean(axis=0)
            if part == "train":
                axes.plot(across, mean, color=colour, linewidth=0.6, alpha=0.35)
                axes.plot(across, smooth(mean), color=colour, linewidth=1.6, label=label)
            else:
                axes.plot(across, mean, color=colour, linewidth=1.2, marker="o", markersize=4, label=label)
            if len(members) > 1:
                axes.fill_between(across, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.2, linewidth=0)
            shown.append(values[:, (across > 0.04 * across.max()) | (len(across) < 3)].ravel())
        for run in members:
            score, (ends, _) = run.final.get("val_loss" if y == "loss" else y), curve(run, "val", x, y)
            if score is not None and len(ends):
                axes.plot(ends[-1], score, "*", color=colour, markersize=9, markeredgecolor="black", markeredgewidth=0.5)
                shown.append(np.array([score]))
    axes.grid(alpha=0.3)
    axes.set(xlabel=ACROSS[x], ylabel="loss (nats per token)" if y == "loss" else "bits per byte of the validation text")
    if not shown:
        axes.text(0.5, 0.5, "not in the logs", color="grey", ha="center", va="center", transform=axes.transAxes)
        return
    low, high = np.concatenate(shown).min(), np.quantile(np.concatenate(shown), 0.98)
    if high > low:
        axes.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low))


def panels_of(groups: dict[str, list[Run]]) -> list[tuple[str, str]]:
    """Return x and y of each panel: one for a single line; else steps, or tokens if the steps differ in size, and time."""
    if len(groups) == 1:
        return [("step", "loss")]
    runs = [run for members in groups.values() for run in members]
    x = "step" if len({run.tokens_per_step() for run in runs}) == 1 else "tokens"
    is_one_text = len({tuple(str(run.settings.get(name)) for name in ONE_TEXT) for run in runs}) == 1
    return [(across, y) for y in (["loss"] if is_one_text else []) + ["val_bpb"] for across in (x, "seconds")]


def draw(groups: dict[str, list[Run]], out: Path) -> None:
    """Write a picture in the format of the file's ending. Raises ValueError if matplotlib is missing or has no such format."""
    try:
        from matplotlib import figure
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install matplotlib, or use --table") from None
    panels = panels_of(groups)
    rows, columns = (1, 1) if len(panels) == 1 else (len(panels) // 2, 2)
    picture = figure.Figure(figsize=(7.2 * columns, 4.5 * rows + 0.5), dpi=125, layout="constrained")
    for axes, (x, y) in zip(picture.subplots(rows, columns, squeeze=False).flat, panels):
        draw_panel(axes, groups, x, y)
    axes = picture.axes[0]
    handles, labels = axes.get_legend_handles_labels()
    if len(groups) == 1:
        axes.set_title(*groups, fontsize=10)
        axes.legend(handles, ["training", "validation"], loc="upper right")
    else:
        by_label = dict(zip(labels, handles))
        picture.legend(by_label.values(), by_label.keys(), loc="outside upper center",
                       ncols=max(1, 80 * columns // (max(map(len, groups)) + 8)))
    picture.savefig(out)


def default_name(runs: list[Run]) -> Path:
    """Return the path of a picture of these runs, with their names, beside the first log."""
    names = "+".join(dict.fromkeys(run.path.stem for run in runs))
    if len(names) > 100:
        names = f"{runs[0].path.stem}+{len(runs) - 1}_more"
    return runs[0].path.with_name(f"{names}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="RUN_ID in logs/, .jsonl log or text log")
    parser.add_argument("--out", type=Path, help="file for the picture (default: NAMES.png beside the first log)")
    parser.add_argument("--table", action="store_true", help="only print the table")
    options = parser.parse_args()
    try:
        runs = [read_run(text) for text in options.runs]
        print(markdown(table_of(runs)))
        if options.table:
            return
        out = options.out or default_name(runs)
        out = out if out.suffix else out.with_name(f"{out.name}.png")
        draw(groups_of(runs), out)
        print(f"\n{out}")
    except (ValueError, OSError) as error:
        sys.exit(f"plot.py: {error}")


if __name__ == "__main__":
    main()
