"""Draw and compare runs of train_gpt.py, or of the published trainers whose log lines it keeps.

    python logs/plot.py logs/first.jsonl                                prints a table, writes logs/first.png
    python logs/plot.py first second third --out compared.png          RUN_IDs in logs/
    python logs/plot.py records/*/*/train_seed*.log --html page.html   a page that needs no other file

A run is a RUN_ID, a .jsonl file, or a text log. Runs that differ in SEED alone are one line, their mean, in a
band from the smallest to the largest. A run that was resumed begins with what its older log has.
"""

import argparse
import base64
import html
import io
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

# What does not change the training, so that runs that differ in it are one line. Only older logs have CHECKPOINT_DIR.
NAMES = {"RUN_ID", "SEED", "OUT_DIR", "DATA_PATH", "TOKENIZER_PATH", "INIT_FROM", "RESUME", "TRAIN_LOG_EVERY",
         "VAL_LOSS_EVERY", "CHECKPOINT_EVERY", "CHECKPOINT_DIR", "KEEP_CHECKPOINTS", "overrides"}
# Dense bfloat16 peaks from the makers' data sheets, in TFLOP/s; V100 and T4 have float16 only.
PEAK_TFLOPS = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "B200": 2250, "A100": 312, "L40S": 362,
               "L40": 181, "L4": 121, "RTX 4090": 165, "RTX 3090": 71, "A10G": 70, "V100": 125, "Tesla T4": 65}
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink", "tab:olive",
           "tab:cyan", "black")
STEP = re.compile(r"step:(\d+)/\d+ (train|val)_loss:(\S+)(.*)")
PAIR = re.compile(r"(\w+)[:=](\S+)")


@dataclass
class Run:
    """One log. `train` and `val` hold a list a quantity, all of the length of their "step"."""
    name: str
    start: dict = field(default_factory=dict)  # the "config" event of a .jsonl log
    settings: dict = field(default_factory=dict)
    train: dict[str, list[float]] = field(default_factory=dict)
    val: dict[str, list[float]] = field(default_factory=dict)
    final: dict[str, float] = field(default_factory=dict)

    def tokens_a_step(self) -> float:
        """NaN where the log does not say."""
        return float(self.settings.get("TRAIN_BATCH_TOKENS", "nan"))


def add(series: dict[str, list[float]], **values: float | str | None) -> None:
    """Appends one entry to every list; NaN for None and "n/a"."""
    for name, value in values.items():
        series.setdefault(name, []).append(float("nan") if value in (None, "n/a") else float(value))


def read_events(lines: list[str], run: Run) -> int:
    """Reads the events of a .jsonl log; returns the step after which it was resumed, or 0."""
    resumed = 0
    for line in lines:
        event = json.loads(line)
        kind = event["event"]
        if kind == "config":
            run.start = event
            run.settings = event["config"]
        elif kind == "resume":
            resumed = event["step"]
        elif kind == "train":
            add(run.train, step=event["step"], loss=event["train_loss"], seconds=event["train_time_ms"] / 1000,
                lr=event["lr"], grad_norm=event["grad_norm"], tok_per_sec=event["tok_per_sec"])
        elif kind == "val":
            add(run.val, step=event["step"], loss=event["val_loss"], bpb=event["val_bpb"],
                seconds=event["train_time_ms"] / 1000)
        elif kind == "export":
            run.final.update(artifact_bytes=event["artifact_bytes"], code_bytes=event["code_bytes"])
        elif kind == "final":
            run.final.update(val_loss=event["val_loss"], val_bpb=event["val_bpb"])
    return resumed


def read_text(lines: list[str], run: Run) -> None:
    """Reads the lines of a text log that published trainers write too."""
    for line in lines:
        if match := STEP.match(line):
            step, kind, loss, rest = match.groups()
            pairs = dict(PAIR.findall(rest))
            if "train_time" not in pairs:
                continue
            seconds = float(pairs["train_time"].removesuffix("ms")) / 1000
            if kind == "val":
                add(run.val, step=int(step), loss=float(loss), bpb=pairs.get("val_bpb"), seconds=seconds)
            else:
                add(run.train, step=int(step), loss=float(loss), seconds=seconds,
                    **{name: pairs.get(name) for name in ("lr", "grad_norm", "tok_per_sec")})
        elif line.startswith("config:{"):
            run.settings = json.loads(line.removeprefix("config:"))
        elif line.startswith(("train_batch_tokens:", "seed:", "tie_embeddings:", "attention_mode:", "model_params:")):
            run.settings = {**{name.upper(): value for name, value in PAIR.findall(line)}, **run.settings}
        elif line.startswith("final_int8_zlib_roundtrip_exact "):
            run.final.update({name: float(value) for name, value in PAIR.findall(line)[:2]})
        elif match := re.match(r"Serialized model int8\+zlib: (\d+) bytes", line):
            run.final["artifact_bytes"] = int(match[1])
        elif match := re.match(r"Code size: (\d+) bytes", line):
            run.final["code_bytes"] = int(match[1])


def read_log(path: Path, run: Run) -> None:
    """Reads a log of either kind, and what the older logs of a resumed run have from before."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    if path.suffix != ".jsonl":
        begin = max((i for i, line in enumerate(lines) if line == "=" * 100), default=-1)  # behind the source
        read_text(lines[begin + 1:], run)
        return
    resumed = read_events(lines, run)
    older = sorted(path.parent.glob(f"{path.stem}.*{path.suffix}"), key=lambda file: file.stat().st_mtime)
    while resumed and older:
        before = Run(run.name)
        earlier = read_events(older.pop().read_text(encoding="utf-8").splitlines(), before)
        if before.train.get("step"):  # what was done again afterwards does not count
            for now, then in ((run.train, before.train), (run.val, before.val)):
                again = set(now.get("step", []))
                kept = [i for i, step in enumerate(then.get("step", [])) if step <= resumed and step not in again]
                for name, values in then.items():
                    now[name] = [values[i] for i in kept] + now.get(name, [])
            resumed = earlier


def read_run(text: str) -> Run:
    """The run that `text`, a file or a RUN_ID, means. ValueError: there is none, or it has no steps."""
    path = Path(text)
    if not path.is_file():
        path = Path("logs", text + ".jsonl")
    if not path.is_file():
        raise ValueError(f"{text!r} is neither a file nor a RUN_ID in logs/")
    run = Run(path.stem if path.stem.count("train_seed") == 0 else f"{path.parent.name} {path.stem}")
    try:
        read_log(path, run)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no log of train_gpt.py: {error!r}") from None
    if not run.train.get("step") and not run.val.get("step"):
        raise ValueError(f"{path} has no line of a step")
    return run


def mfu_of(start: dict, rate: float) -> float | None:
    """The share of the GPUs' peak that `rate`, tokens/s of all ranks, uses: a run's "config" event has the GPU and the FLOPs
    of a token. None where the peak is unknown, and for DTYPE=float32, whose peak is another."""
    gpu = start.get("gpu", "")
    peak = next((peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", gpu)), None)
    if peak is None or start["config"]["DTYPE"] == "float32":
        return None
    return rate * start["flops_per_token"] / (start["world_size"] * peak * 1e12)


def groups_of(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs by label; those that differ in SEED alone, or have no settings and one name, are together."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        same = {name: value for name, value in run.settings.items() if name not in NAMES}
        key = json.dumps([same or run.name, Path(str(run.settings.get("DATA_PATH", ""))).name], sort_keys=True)
        found.setdefault(key, []).append(run)
    labels = {}
    for members in found.values():
        label = members[0].name if len(members) == 1 else f"{members[0].name} and {len(members) - 1} more seeds"
        labels[label if label not in labels else f"{label} ({len(labels)})"] = members
    return labels


def differences(runs: list[Run]) -> dict[str, list[str]]:
    """The settings that are not the same in all runs that know them, as text for each run."""
    names = sorted({name for run in runs for name in run.settings} - {"overrides"})
    rows = {name: [str(run.settings.get(name, "")) for run in runs] for name in names}
    return {name: row for name, row in rows.items() if len(set(row)) > 1}


def table_of(runs: list[Run]) -> list[list[str]]:
    """Rows of text: a heading, then a row a quantity or a setting that differs, a column a run."""
    def cell(value, form: str) -> str:
        return "" if value is None or value != value else form.format(value)

    def last(series: dict, name: str):
        return series[name][-1] if series.get(name) else None

    def rate(run: Run) -> float | None:
        known = np.isfinite(run.train.get("tok_per_sec", [np.nan])).any()
        return np.nanmedian(run.train["tok_per_sec"]) if known else None

    rows = [["", *(run.name for run in runs)]]
    for title, form, pick in (
            ("steps", "{:,.0f}", lambda r: max(last(r.train, "step") or 0, last(r.val, "step") or 0)),
            ("tokens, M", "{:,.1f}", lambda r: max(last(r.train, "step") or 0, last(r.val, "step") or 0)
             * r.tokens_a_step() / 1e6),
            ("training, s", "{:,.1f}", lambda r: last(r.val, "seconds") or last(r.train, "seconds")),
            ("tokens/s, median", "{:,.0f}", rate),
            ("MFU, median", "{:.1%}", lambda r: mfu_of(r.start, rate(r)) if rate(r) else None),
            ("last train_loss", "{:.4f}", lambda r: last(r.train, "loss")),
            ("last val_loss", "{:.4f}", lambda r: last(r.val, "loss")),
            ("last val_bpb", "{:.4f}", lambda r: last(r.val, "bpb")),
            ("val_bpb of the artifact", "{:.4f}", lambda r: r.final.get("val_bpb")),
            ("artifact, bytes", "{:,.0f}", lambda r: r.final.get("artifact_bytes")),
            ("artifact and code, bytes", "{:,.0f}", lambda r: r.final["artifact_bytes"] + r.final["code_bytes"]
             if {"artifact_bytes", "code_bytes"} <= r.final.keys() else None)):
        rows.append([title, *(cell(pick(run), form) for run in runs)])
    return rows + [[name, *row] for name, row in differences(runs).items()]


def markdown(rows: list[list[str]]) -> str:
    """The rows as a Markdown table whose columns are aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(text.ljust(width) for text, width in zip(row, widths)) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def band(members: list[Run], part: str, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
    """Where all runs of a group have values, x (N,) and their y (runs, N), interpolated at the first run's x, which is
    "step", "seconds" or "tokens", in millions."""
    curves = []
    for run in members:
        series = getattr(run, part)
        across = np.array(series.get("step" if x == "tokens" else x, []), dtype=float)
        if x == "tokens":
            across = across * (run.tokens_a_step() / 1e6)
        values = np.array(series.get(y, []), dtype=float)
        good = np.isfinite(across) & np.isfinite(values)
        curves.append((across[good], values[good]))
    if any(len(across) == 0 for across, _ in curves):
        return np.zeros(0), np.zeros((len(members), 0))
    low, high = max(across[0] for across, _ in curves), min(across[-1] for across, _ in curves)
    grid = curves[0][0]
    grid = grid[(grid >= low) & (grid <= high)]
    return grid, np.stack([np.interp(grid, across, values) for across, values in curves])


def draw(groups: dict[str, list[Run]]) -> bytes:
    """A PNG of 1,800 x 1,350 pixels. ValueError without matplotlib."""
    try:
        from matplotlib import figure
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install matplotlib; --table does without") from None
    picture = figure.Figure(figsize=(18, 13.5), dpi=100, layout="constrained")
    picture.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    panels = picture.subplots(3, 3)
    across = (("step", "steps"), ("tokens", "tokens (millions)"), ("seconds", "training clock (s)"))
    plots = [(panels[0][i], x, label, (("train", "loss"), ("val", "loss")), "loss (nats per token)")
             for i, (x, label) in enumerate(across)]
    plots += [(panels[1][i], x, label, (("val", "bpb"),), "val_bpb (bits per byte)")
              for i, (x, label) in enumerate(across)]
    plots += [(panels[2][i], "step", "steps", (("train", name),), label) for i, (name, label) in enumerate(
        (("lr", "learning rate"), ("grad_norm", "gradient norm"), ("tok_per_sec", "tokens per second")))]
    for axes, x, xlabel, curves, ylabel in plots:
        drawn = []
        for colour, (label, members) in zip(COLOURS * len(groups), groups.items()):
            for part, y in curves:
                at, values = band(members, part, x, y)
                if len(at) == 0:
                    continue
                validation = part == "val"
                axes.plot(at, values.mean(axis=0), color=colour, linewidth=1.8 if validation else 0.9,
                          marker="o" if validation else "", markersize=4, alpha=1 if validation else 0.7,
                          label=label if axes is panels[0][0] and part == curves[-1][0] else None)
                if len(members) > 1:
                    axes.fill_between(at, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.2, linewidth=0)
                drawn.append((at, values))
        axes.set(xlabel=xlabel, ylabel=ylabel)
        axes.grid(alpha=0.3)
        if not drawn:
            axes.text(0.5, 0.5, "not in the logs", ha="center", va="center", transform=axes.transAxes, color="grey")
        elif ylabel.startswith(("loss", "val_bpb")):  # the first steps would flatten the rest
            late = np.concatenate([values[:, (at > 0.04 * at.max()) | (len(at) < 3)].ravel() for at, values in drawn])
            low, high = late.min(), np.quantile(late, 0.98)
            if high > low:
                axes.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low))
    panels[0][0].set_title("loss: thin in training, with dots in validation", fontsize=11)
    panels[1][0].set_title("bits per byte of the whole validation split", fontsize=11)
    picture.legend(loc="outside upper center", ncols=min(4, len(groups)), fontsize=12)
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png")
    return buffer.getvalue()


def page(rows: list[list[str]], png: bytes) -> str:
    """The table and the picture as HTML without links."""
    cells = ["".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in row)
             for row, tag in zip(rows, ["th"] + ["td"] * len(rows))]
    return ("<!doctype html><meta charset='utf-8'><title>Runs</title><style>body{font:15px sans-serif;margin:2em}"
            "table{border-collapse:collapse}th,td{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}"
            "td:first-child{text-align:left}img{max-width:100%}</style>"
            f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
            f"<img alt='curves of the runs' src='data:image/png;base64,{base64.b64encode(png).decode()}'>\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a RUN_ID in logs/, a .jsonl file or a text log")
    parser.add_argument("--out", type=Path, help="the picture (default: beside the first log, .png)")
    parser.add_argument("--html", type=Path, help="one page with the table and the picture")
    parser.add_argument("--table", action="store_true", help="print the table only")
    options = parser.parse_args()
    try:
        runs = [read_run(text) for text in options.runs]
        rows = table_of(runs)
        print(markdown(rows))
        if options.table:
            return
        png = draw(groups_of(runs))
        first = Path(options.runs[0])
        out = options.out or (first if first.is_file() else Path("logs", first.name + ".jsonl")).with_suffix(".png")
        out.write_bytes(png)
        print(f"\n{out}")
        if options.html:
            options.html.write_text(page(rows, png), encoding="utf-8")
            print(options.html)
    except (ValueError, OSError) as error:
        sys.exit(f"plot.py: {error}")


if __name__ == "__main__":
    main()
