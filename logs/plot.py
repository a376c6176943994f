"""Compare runs of train_gpt.py, or of published trainers with the same log lines, in a table and a picture.

    python logs/plot.py logs/first.jsonl                               print a table, write logs/first.png
    python logs/plot.py first second third --out compared.png          RUN_IDs in logs/
    python logs/plot.py records/*/*/train_seed*.log --table            only print the table

A run is a RUN_ID, a .jsonl log or a text log. Runs that differ only in SEED become one line, their mean, in a
band from the smallest to the largest. A resumed run starts with the steps in its older logs.
"""

import argparse
import io
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
ACROSS = (("step", "steps"), ("tokens", "tokens (millions)"), ("seconds", "training clock (s)"))


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
    """Return the runs by label. Runs that differ only in settings of SAME_LINE share a label, and so do runs
    of one name whose logs have no settings."""
    by_key: dict[str, list[Run]] = {}
    for run in runs:
        settings = {name: value for name, value in run.settings.items() if name not in SAME_LINE}
        key = json.dumps(settings or run.name, sort_keys=True)
        by_key.setdefault(key, []).append(run)
    groups = {}
    for members in by_key.values():
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


def draw_panel(axes, groups: dict[str, list[Run]], x: str, curves: list[tuple[str, str]]) -> None:
    """Draw the curves, pairs of part and y, of all groups against `x`. The first losses and bits per byte may
    leave the panel: they would flatten the rest."""
    late = []
    for colour, (label, members) in zip(cycle(COLOURS), groups.items()):
        for part, y in curves:
            across, values = band(members, part, x, y)
            if len(across) == 0:
                continue
            style = {"linewidth": 0.9, "alpha": 0.7}
            if part == "val":
                style = {"linewidth": 1.8, "marker": "o", "markersize": 4}
            axes.plot(across, values.mean(axis=0), color=colour, label=label, **style)
            if len(members) > 1:
                axes.fill_between(across, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.2,
                                  linewidth=0)
            is_late = (across > 0.04 * across.max()) | (len(across) < 3)
            late.append(values[:, is_late].ravel())
    axes.grid(alpha=0.3)
    if not late:
        axes.text(0.5, 0.5, "not in the logs", color="grey", ha="center", va="center",
                  transform=axes.transAxes)
    elif curves[0][1] in ("loss", "val_bpb"):
        shown = np.concatenate(late)
        low = shown.min()
        high = np.quantile(shown, 0.98)
        if high > low:
            axes.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low))


def draw(groups: dict[str, list[Run]]) -> bytes:
    """Return a PNG of 1,800 x 1,350 pixels. Raises ValueError if matplotlib is not installed."""
    try:
        from matplotlib import figure
        from PIL import Image  # matplotlib needs it, too
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install matplotlib, or use --table") from None
    picture = figure.Figure(figsize=(14.4, 10.8), dpi=125, layout="constrained")
    picture.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    panels = picture.subplots(3, 3)
    for axes, (x, xlabel) in zip(panels[0], ACROSS):
        draw_panel(axes, groups, x, [("train", "loss"), ("val", "loss")])
        axes.set(xlabel=xlabel, ylabel="loss (nats per token)")
    for axes, (x, xlabel) in zip(panels[1], ACROSS):
        draw_panel(axes, groups, x, [("val", "val_bpb")])
        axes.set(xlabel=xlabel, ylabel="val_bpb (bits per byte)")
    third = (("lr", "learning rate"), ("grad_norm", "gradient norm"), ("tok_per_sec", "tokens per second"))
    for axes, (y, ylabel) in zip(panels[2], third):
        draw_panel(axes, groups, "step", [("train", y)])
        axes.set(xlabel="steps", ylabel=ylabel)
    panels[0][0].set_title("Loss (thin: training; dots: validation)", fontsize=10)
    panels[1][0].set_title("Bits per byte of the validation text", fontsize=10)
    handles, labels = panels[0][0].get_legend_handles_labels()
    by_label = dict(zip(labels, handles))  # of a group's two lines, the later one, of the validations
    columns = 170 // (max(map(len, groups)) + 8)  # the picture is about 180 characters wide
    picture.legend(by_label.values(), by_label.keys(), loc="outside upper center",
                   ncols=min(max(columns, 1), 4))
    drawn, small = io.BytesIO(), io.BytesIO()
    picture.savefig(drawn, format="png")
    Image.open(drawn).convert("RGB").quantize(128).save(small, format="png", optimize=True)  # a third of the bytes
    return small.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="RUN_ID in logs/, .jsonl log or text log")
    parser.add_argument("--out", type=Path, help="file for the picture (default: .png beside the first log)")
    parser.add_argument("--table", action="store_true", help="only print the table")
    options = parser.parse_args()
    try:
        runs = [read_run(text) for text in options.runs]
        print(markdown(table_of(runs)))
        if options.table:
            return
        out = options.out or runs[0].path.with_suffix(".png")
        out.write_bytes(draw(groups_of(runs)))
        print(f"\n{out}")
    except (ValueError, OSError) as error:
        sys.exit(f"plot.py: {error}")


if __name__ == "__main__":
    main()
