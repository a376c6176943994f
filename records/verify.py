"""Check record folders: every number is computed again from the logs, and every rule of the track is applied.

    python records/verify.py                            all folders
    python records/verify.py records/track_open/2026-01-31_Name --rerun     scores the artifacts again, too; those that are
                                                        not in the folder lie in --artifacts DIR, under the same names
    python records/verify.py --counts data/datasets/NAME --tokenizer FILE --lengths 512,1024    a table of track.json

It prints a line a finding and ends with 1 where there is one. Without --rerun it believes logs that agree with one another
throughout; --rerun runs the folder's train_gpt.py, which is code of whoever wrote it, on the division's data set.
"""

import argparse
import ast
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RULE = "=" * 100
FOLDER = re.compile(r"\d{4}-\d{2}-\d{2}_[A-Za-z0-9][A-Za-z0-9_.-]*")
STEP = re.compile(r"step:(\d+)/\d+ (train|val)_loss:(\S+) (?:val_bpb:(\S+) )?train_time:(\d+)ms")
LINES = {  # numbers of the text log that the events have, too
    "val_loss and val_bpb": (r"final_int8_zlib_roundtrip_exact val_loss:(\S+) val_bpb:(\S+)", lambda start, export, final: (
        f"{final['val_loss']:.8f}", f"{final['val_bpb']:.8f}")),
    "eval_time_ms": (r"final_int8_zlib_roundtrip .* eval_time:(-?\d+)ms", lambda start, export, final: (
        f"{final['eval_time_ms']:.0f}",)),
    "artifact_bytes": (r"Serialized model int8\+zlib: (\d+) bytes", lambda start, export, final: (
        str(export["artifact_bytes"]),)),
    "code_bytes": (r"Code size: (\d+) bytes", lambda start, export, final: (str(export["code_bytes"]),)),
    "SEED": (r"seed:(-?\d+)$", lambda start, export, final: (str(start["config"]["SEED"]),)),
    "world_size": (r"world_size:(\d+)", lambda start, export, final: (str(start["world_size"]),)),
    "val_tokens": (r"val_loader:shards .* tokens:(\d+)", lambda start, export, final: (str(start["val_tokens"]),))}
ABSOLUTE = re.compile(r"""(?:^|[\s"'=:,(\[])(/[\w.-]+/[\w./-]+|~/[\w./-]+|[A-Za-z]:\\\S+)""")
UNSAFE = re.compile(r"[|\n\r<>]")  # what a field of one line in a Markdown table cannot have
PACKAGES = {"torch", "numpy", "sentencepiece", "tiktoken", "wandb"}  # what a script may import besides Python's library
# What may differ between the seeds of a record: names, and how often something is written. CHECKPOINT_DIR and TRACKERS are of
# older scripts.
SAME_RUN = {"SEED", "RUN_ID", "OUT_DIR", "RESUME", "CHECKPOINT_EVERY", "CHECKPOINT_DIR", "KEEP_CHECKPOINTS", "TRACKERS"}
SAME_PLACE = ("world_size", "threads", "torch", "python", "val_tokens", "val_bytes", "parameters")
CLAIMS = {  # the types of what submission.json says
    "name": str, "author": str, "github_id": str, "date": str, "track": str, "division": str, "blurb": str,
    "base": str, "hardware": str, "command": str, "seeds": list, "seed_results": dict, "settings": dict,
    "val_loss": float, "val_loss_std": float, "val_bpb": float, "val_bpb_std": float, "bytes_total": int,
    "bytes_code": int, "script_sha256": str}
RERUN_TOLERANCE = 1e-5  # bits per byte


class Findings(list):
    """What is wrong with a folder, as lines of text."""

    def check(self, holds: bool, text: str) -> bool:
        if not holds:
            self.append(text)
        return bool(holds)


def close(a: float, b: float, tolerance: float = 1e-9) -> bool:
    return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= tolerance * max(1.0, abs(a), abs(b))


def load_track(folder: Path) -> dict:
    """The rules of the track that a record folder lies in. ValueError: it lies in none."""
    path = folder.parent / "track.json"
    if not path.is_file():
        raise ValueError(f"{folder} lies in no track: {path} is missing")
    return json.loads(path.read_text(encoding="utf-8"))


def read_events(path: Path) -> list[dict]:
    """The events of a .jsonl log. A power failure can have cut its last line, which is then left out."""
    lines = path.read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines[:-1]]
    with suppress(ValueError):
        events += [json.loads(line) for line in lines[-1:]]
    return events


def read_seed(folder: Path, path: Path, source: str, found: Findings) -> dict | None:
    """What one seed's logs, train_seedN.log and .jsonl, say when they are read together; None if unreadable."""
    name = path.stem
    try:
        parts = path.read_text(encoding="utf-8").split("\n" + RULE + "\n", 2)
        if not found.check(len(parts) == 3, f"{name}.log: source, machine and lines are not divided by two rules of ="):
            return None
        found.check(parts[0] == source, f"{name}.log: the source in it is not the folder's train_gpt.py")
        events = read_events(path.with_suffix(".jsonl"))
        return summary_of(folder, name, events, parts[1], parts[2].splitlines(), found)
    except Exception as error:  # forged logs can be anything
        found.append(f"{name}: a log is missing, unfinished or damaged: {type(error).__name__}: {error}")
        return None


def check_clock(name: str, events: list[dict], found: Findings) -> None:
    """Steps, training clock and wall clock go forward together, and the speed is what they give."""
    config, kinds = events[0]["config"], {event["event"]: event for event in events}
    trained = [event for event in events if event["event"] == "train"]
    for before, after in zip(trained, trained[1:]):
        steps, ms = after["step"] - before["step"], after["train_time_ms"] - before["train_time_ms"]
        if not found.check(steps > 0 and ms > 0, f"{name}: step {after['step']}: steps or clock do not go forward"):
            return
        rate = 1000 * steps * config["TRAIN_BATCH_TOKENS"] / ms
        found.check(close(rate, after["tok_per_sec"], 1e-6), f"{name}: step {after['step']}: tok_per_sec is not what steps, "
                    "tokens and clock give")
    for before, after in zip(events, events[1:]):  # nothing happens between two training events but training
        if before["event"] == after["event"] == "train":
            wall, ms = 1000 * (after["elapsed_s"] - before["elapsed_s"]), after["train_time_ms"] - before["train_time_ms"]
            found.check(abs(wall - ms) <= 0.05 * wall + 250, f"{name}: step {after['step']}: {ms:.0f} ms of training, but "
                        f"{wall:.0f} ms of the wall clock")
    wall = [event["elapsed_s"] for event in events if event["event"] != "checkpoint"]  # older scripts write it in a thread
    found.check(wall == sorted(wall), f"{name}: the wall clock goes backwards")
    found.check(not trained or kinds["val"]["train_time_ms"] >= trained[-1]["train_time_ms"] - 1000,
                f"{name}: the last validation is earlier than the last step")
    scoring, room = kinds["final"]["eval_time_ms"] / 1000, kinds["final"]["elapsed_s"] - kinds["export"]["elapsed_s"]
    found.check(0.5 * room - 10 <= scoring <= room + 0.5 and scoring >= 0, f"{name}: {scoring:.1f} s of evaluation, but "
                f"{room:.1f} s of the wall clock between export and score")


def check_resumed(folder: Path, name: str, events: list[dict], found: Findings) -> bool:
    """Whether a run was resumed; the older parts have to be there, from the first step on, by the same script."""
    resumed = [event for event in events if event["event"] == "resume"]
    first = next((event["step"] for event in events if event["event"] == "train"), 1)
    if not resumed and first == 1:
        return False
    covered, wanted = set(), events[0]["config"]
    source = (folder / "train_gpt.py").read_text(encoding="utf-8")
    for path in folder.glob(f"{name}.*.jsonl"):
        part = read_events(path)
        text = path.with_suffix(".log")
        same = part and all(part[0]["config"].get(key) == value for key, value in wanted.items() if key not in SAME_RUN)
        if same and text.is_file() and text.read_text(encoding="utf-8").startswith(source + "\n" + RULE):
            starts = next((event["step"] for event in part if event["event"] == "resume"), 0)
            covered |= set(range(starts, max(event.get("step", 0) for event in part) + 1))
    missing = next((step for step in range(resumed[0]["step"] if resumed else first) if step not in covered), None)
    found.check(missing is None, f"{name}: a resumed run, whose older logs (of this script and these settings) lack what came "
                f"after step {missing}")
    return True


def summary_of(folder: Path, name: str, events: list, versions: str, lines: list[str], found: Findings) -> dict:
    """The numbers of a seed from its events; findings where they contradict one another or the text log."""
    kinds = {event["event"]: event for event in events}  # the last one of each
    start, final, export = kinds["config"], kinds["final"], kinds["export"]
    settings = start["config"]
    # Every score is loss, tokens and bytes.
    scored = [event for event in events if event["event"] in ("val", "final")]
    for event in scored:
        bits = event["val_loss"] * start["val_tokens"] / math.log(2) / start["val_bytes"]
        found.check(close(event["val_bpb"], bits), f"{name}: {event['event']} of step {event['step']}: val_bpb "
                    f"{event['val_bpb']} is not val_loss * tokens / (ln 2 * bytes) = {bits}")
    # The text log has the same numbers.
    logged = [(int(m[1]), m[2], m[3], m[4], m[5]) for m in map(STEP.match, lines) if m]
    wanted = [(e["step"], e["event"], f"{e[e['event'] + '_loss']:.4f}",
               f"{e['val_bpb']:.4f}" if e["event"] == "val" else None, f"{e['train_time_ms']:.0f}")
              for e in events if e["event"] in ("train", "val")]
    different = next((pair for pair in zip(logged, wanted) if pair[0] != pair[1]), None)
    found.check(logged == wanted, f"{name}: .log and .jsonl disagree" + (f": {different}" if different else " on the steps"))
    for what, (pattern, of_events) in LINES.items():
        here, there = [m.groups() for m in (re.match(pattern, line) for line in lines) if m], of_events(start, export, final)
        found.check(here == [there], f"{name}: {what} is {here} in the .log and {there} in the .jsonl")
    same = json.loads(next(line for line in lines if line.startswith("config:{")).removeprefix("config:"))
    found.check(same.pop("overrides") == start["overrides"] and same == settings,
                f"{name}: .log and .jsonl disagree on the settings")
    versions_found = re.search(r"Running Python (\S+)", versions), re.search(r"Running PyTorch (\S+)", versions)
    found.check(all(versions_found) and versions_found[1][1] == start["torch"],
                f"{name}: .log and .jsonl disagree on PyTorch's version")
    found.check(final["step"] == kinds["val"]["step"] == export["step"], f"{name}: the last validation, the export and "
                "the final score are of different steps")
    check_clock(name, events, found)
    trained = [e for e in events if e["event"] == "train"]
    ends = [event["train_time_ms"] / 1000 for event in trained[-2:]]
    paces = trained[-1]["step"] - trained[-2]["step"] if len(ends) == 2 else 1
    last_step = (ends[1] - ends[0]) / paces if len(ends) == 2 else sum(ends)
    return {"seed": settings["SEED"], "settings": settings, "losses": [e["train_loss"] for e in trained],
            "val_loss": final["val_loss"], "val_bpb": final["val_bpb"],
            "val_bpb_before_export": kinds["val"]["val_bpb"], "steps": final["step"],
            "train_seconds": kinds["val"]["train_time_ms"] / 1000,
            "last_step_began": ends[-1] - 2 * last_step if ends else 0.0,  # at the earliest; steps differ
            "eval_seconds": final["eval_time_ms"] / 1000, "wall_seconds": final["elapsed_s"],
            "artifact_bytes": export["artifact_bytes"], "artifact_sha256": export["artifact_sha256"],
            "code_bytes": export["code_bytes"], "code_sha256": export["code_sha256"],
            "bytes_total": export["artifact_bytes"] + export["code_bytes"],
            "resumed": check_resumed(folder, name, events, found), "machine": versions,
            "unique_tokens": kinds["data"]["unique_tokens"] if "data" in kinds else 0,
            "val_tokens": start["val_tokens"], "val_bytes": start["val_bytes"],
            "world_size": start["world_size"], "threads": start["threads"], "torch": start["torch"],
            "given": {key: settings[key] for key in sorted(start["overrides"]) if key not in SAME_RUN},
            "parameters": int(next(line for line in lines if line.startswith("model_params:")).split(":")[1]),
            "python": versions_found[0][1] if versions_found[0] else ""}


@lru_cache  # many records have the same script
def check_script(source: str) -> list[str]:
    """What is wrong with a script that has to be one readable file: its length, its imports, or that it is no Python."""
    lines = len(source.splitlines())
    found = [f"train_gpt.py has {lines} lines, not less than 1,500"] * (lines >= 1500)
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [*found, f"train_gpt.py is no Python: {error}"]
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    foreign = {name.split(".")[0] or "." for name in names} - sys.stdlib_module_names - PACKAGES
    return found + [f"train_gpt.py imports {', '.join(sorted(foreign))}: code that is not counted"] * bool(foreign)


def read_folder(folder: Path, found: Findings) -> list[dict]:
    """The seeds of a record folder, each as summary_of gives it."""
    script = folder / "train_gpt.py"
    if not found.check(script.is_file(), "train_gpt.py is missing"):
        return []
    source = script.read_text(encoding="utf-8")
    found += check_script(source)
    logs = sorted(path for path in folder.glob("train_seed*.log") if re.fullmatch(r"train_seed-?\d+", path.stem))
    found.check(logs, "there is no train_seedN.log")
    seeds, code = [], source.encode("utf-8")
    for path in logs:
        if not (seed := read_seed(folder, path, source, found)):
            continue
        seeds.append(seed)
        found.check(path.stem == f"train_seed{seed['seed']}", f"{path.name} is of SEED={seed['seed']}")
        found.check(seed["code_bytes"] == len(code), f"{path.stem}: code_bytes is {seed['code_bytes']}, but train_gpt.py "
                    f"has {len(code)}")
        found.check(seed["code_sha256"] == sha256(code).hexdigest(), f"{path.stem}: code_sha256 is not train_gpt.py's")
    numbers = [seed["seed"] for seed in seeds]
    found.check(len(set(map(str, numbers))) == len(numbers), f"seeds are not different: {numbers}")
    losses = [str(seed["losses"]) for seed in seeds if seed["losses"]]
    digests = {seed["artifact_sha256"] for seed in seeds}
    found.check(len(set(losses)) == len(losses) and len(digests) == len(seeds), "two seeds have the same training losses, "
                "or the same artifact")
    for seed in seeds[1:]:
        names = [name for name, value in seeds[0]["settings"].items()
                 if name not in SAME_RUN and seed["settings"].get(name) != value]
        names += [name for name in SAME_PLACE if seed[name] != seeds[0][name]]
        found.check(not names, f"seed {seed['seed']} differs in {', '.join(names)} from seed {numbers[0]}")
    return seeds


def check_rules(track: dict, division: str, seeds: list[dict], found: Findings) -> None:
    """The caps of the track, its settings, and the validation split of the division."""
    found.check(len(seeds) >= track.get("min_seeds", 1), f"the track asks for {track.get('min_seeds')} seeds; there "
                f"are {len(seeds)}")
    data = track.get("divisions", {}).get(division)
    found.check(data is not None or not track.get("divisions"),
                f"division {division!r} is none of {', '.join(track.get('divisions', {}))}")
    for seed in seeds:
        name, settings = f"seed {seed['seed']}", seed["settings"]
        limit = track.get("max_bytes", math.inf)
        found.check(seed["bytes_total"] <= limit, f"{name}: {seed['bytes_total']} bytes of code and artifact are more than "
                    f"{limit}")
        # The clock is read after a step, so that the last one may end behind the cap.
        limit = track.get("max_train_seconds", math.inf)
        found.check(seed["last_step_began"] <= limit and settings["MAX_WALLCLOCK_SECONDS"] <= limit,
                    f"{name}: the last step began after {seed['last_step_began']:.1f} s of training, MAX_WALLCLOCK_SECONDS="
                    f"{settings['MAX_WALLCLOCK_SECONDS']:g}: more than {limit:g}")
        limit = track.get("max_eval_seconds", math.inf)
        found.check(seed["eval_seconds"] <= limit, f"{name}: {seed['eval_seconds']:.1f} s of evaluation are more than {limit:g}")
        for key in ("world_size", "threads"):
            limit = track.get(f"max_{key}", math.inf)
            amount = seed[key] * (seed["world_size"] if key == "threads" else 1)
            found.check(amount <= limit, f"{name}: {key} {amount} is more than {limit}")
        found.check(track.get("machine", "") in seed["machine"], f"{name}: no {track.get('machine')} in what nvidia-smi says")
        paths = [key for key, value in settings.items() if str(value).startswith(("/", "~"))]
        found.check(not paths, f"{name}: {', '.join(paths)}: a path from the root of a machine; give it from the repository on")
        for key, allowed in track.get("settings", {}).items():
            found.check(settings.get(key) in allowed, f"{name}: {key}={settings.get(key)!r} is none of {allowed}")
        found.check(not data or scored_table(data, seed) is not None, f"{name}: {seed['val_tokens']} validation tokens of "
                    f"{seed['val_bytes']} bytes are not what the division {division!r} has for "
                    f"TRAIN_SEQ_LEN={settings['TRAIN_SEQ_LEN']}; --counts prints a table for track.json")


def scored_table(division: dict, seed: dict) -> dict | None:
    """The division's table, which is one tokenizer's, whose row for TRAIN_SEQ_LEN counts the seed's validation tokens and
    bytes; None if there is none."""
    for table in division["scored"].values():
        row = table.get(str(seed["settings"]["TRAIN_SEQ_LEN"]))
        if row and all(fits(seed[key], row[key]) for key in ("val_tokens", "val_bytes")):
            return table
    return None


def fits(value: int, wanted) -> bool:
    """Whether a count is the wanted one, or between two where that is a pair."""
    return wanted[0] <= value <= wanted[1] if isinstance(wanted, list) else value == wanted


def significance(track: dict, seeds: list[dict], base: list[dict]) -> dict | None:
    """One-sided t-test (Welch's, for unequal variances) that this record's mean score is lower than its base's by more
    than the track's margin; None where either has fewer than two seeds. Nats per token are compared only where both
    have scored the same tokens and bytes; else the margin is turned into bits per byte, and those are compared."""
    if min(len(seeds), len(base)) < 2:
        return None
    from scipy import stats
    margin, unit = track.get("margin", 0.0), track.get("unit", "bits per byte")
    counts = {(seed["val_tokens"], seed["val_bytes"]) for seed in (*seeds, *base)}
    if unit == "nats per token" and len(counts) > 1:
        unit, margin = "bits per byte", margin * base[0]["val_tokens"] / math.log(2) / base[0]["val_bytes"]
    key = "val_loss" if unit == "nats per token" else "val_bpb"
    ours, theirs = ([seed[key] for seed in group] for group in (seeds, base))
    result = stats.ttest_ind(ours, [value - margin for value in theirs], equal_var=False, alternative="less")
    return {"unit": unit, "margin": margin, "difference": statistics.mean(ours) - statistics.mean(theirs),
            "n": [len(ours), len(theirs)], "p": float(result.pvalue)}


def claims_of(track: dict, division: str, seeds: list[dict], base: list[dict]) -> dict:
    """All of submission.json that the logs decide: means, sample deviations, every seed, largest sizes, the settings that
    were set, what changed against the base, the test against it, and the environment. Bits per byte of the original text
    follow from a constant of the division's table, the original bytes per decoded byte; they are None without it."""
    def deviation(key: str) -> float:
        return statistics.stdev(seed[key] for seed in seeds) if len(seeds) > 1 else 0.0

    def original(val_bpb: float) -> float | None:
        return val_bpb / ratio if ratio else None

    first = seeds[0]
    rules = track.get("divisions", {}).get(division)
    table = scored_table(rules, first) if rules else None
    ratio = (table or {}).get("original_per_decoded_byte")
    val_bpb = statistics.mean(seed["val_bpb"] for seed in seeds)
    kept = ("val_loss", "val_bpb", "val_bpb_before_export", "steps", "train_seconds", "eval_seconds", "wall_seconds",
            "artifact_bytes", "artifact_sha256", "bytes_total", "resumed", "unique_tokens")
    changes = {}
    if base:
        then, now = base[0]["settings"], first["settings"]
        changes = {name: [then.get(name), now.get(name)] for name in sorted(then.keys() | now.keys())
                   if name not in SAME_RUN and then.get(name) != now.get(name)}
        if base[0]["code_sha256"] != first["code_sha256"]:
            changes["train_gpt.py"] = [base[0]["code_sha256"][:12], first["code_sha256"][:12]]
    return {"val_loss": statistics.mean(seed["val_loss"] for seed in seeds), "val_loss_std": deviation("val_loss"),
            "val_bpb": val_bpb, "val_bpb_std": deviation("val_bpb"), "val_bpb_original": original(val_bpb),
            "bytes_total": max(seed["bytes_total"] for seed in seeds), "bytes_code": first["code_bytes"],
            "script_sha256": first["code_sha256"], "parameters": first["parameters"],
            "seeds": [seed["seed"] for seed in seeds],
            "seed_results": {str(seed["seed"]): {**{key: seed[key] for key in kept},
                                                 "val_bpb_original": original(seed["val_bpb"])} for seed in seeds},
            "settings": first["given"], "changes": changes, "significance": significance(track, seeds, base),
            "environment": {key: first[key] for key in ("python", "torch", "world_size", "threads")}}


def compare(claimed, computed, where: str, found: Findings) -> None:
    """A finding for each number of a claim that is not what the logs give."""
    if isinstance(computed, dict):
        for key in computed:
            if found.check(isinstance(claimed, dict) and key in claimed, f"{where}: {key} is missing"):
                compare(claimed[key], computed[key], f"{where}: {key}", found)
        if isinstance(claimed, dict) and (more := claimed.keys() - computed.keys()):
            found.append(f"{where}: {', '.join(sorted(more))} is in no log")
        return
    number = isinstance(computed, float) and isinstance(claimed, (int, float))
    found.check(close(claimed, computed) if number else claimed == computed,
                f"{where} is {claimed!r}, but the logs give {computed!r}")


def check_paths(folder: Path, found: Findings) -> None:
    """No absolute path in what people read and what a run was told."""
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".jsonl", ".md", ".log"):
            text = path.read_text(encoding="utf-8").rsplit("\n" + RULE + "\n", 1)[-1]  # behind source and machine
            hits = sorted({match[1] for line in text.splitlines() if not line.startswith("warning:")
                           for match in ABSOLUTE.finditer(line)})
            found.check(not hits, f"{path.name}: absolute paths {hits[:3]}")


def check_artifacts(folder: Path, seeds: list[dict], found: Findings) -> None:
    """Artifacts that are there are those of the logs; small ones have to be there."""
    for seed in seeds:
        path = folder / f"artifact_seed{seed['seed']}.int8.ptz"
        small = seed["artifact_bytes"] < 2_000_000
        if not found.check(path.is_file() or not small, f"{path.name} is missing: artifacts under 2 MB belong into the folder"):
            continue
        if path.is_file():
            data = path.read_bytes()
            found.check(len(data) == seed["artifact_bytes"] and sha256(data).hexdigest() == seed["artifact_sha256"],
                        f"{path.name} is not the artifact of the log: {len(data)} bytes, sha256 {sha256(data).hexdigest()}")


def check_data(settings: dict, division: dict, found: Findings) -> None:
    """Validation shards and tokenizer are those that the division pins, where it pins some."""
    data_path, tokenizer = ROOT / settings["DATA_PATH"], ROOT / settings["TOKENIZER_PATH"]
    shards = [path for path in sorted(data_path.glob("*_val_*.bin")) if "_val_bytes_" not in path.name]
    digests = [sha256(path.read_bytes()).hexdigest() for path in shards]
    pinned = [table for table in division.get("scored", {}).values() if "val_shards_sha256" in table]
    table = next((table for table in pinned if table["val_shards_sha256"] == digests), {})
    found.check(table or not pinned, f"{settings['DATA_PATH']} has other validation shards than the division: {digests}")
    if tokenizer.is_file() and "tokenizer_sha256" in table:
        found.check(sha256(tokenizer.read_bytes()).hexdigest() == table["tokenizer_sha256"],
                    f"{settings['TOKENIZER_PATH']} is another tokenizer than the division's")


def rerun(folder: Path, seed: dict, division: dict, artifacts: Path, found: Findings) -> str:
    """Scores an artifact in a fresh process, by the folder's train_gpt.py with the log's settings; returns a line."""
    check_data(seed["settings"], division, found)
    artifact = artifacts / f"artifact_seed{seed['seed']}.int8.ptz"
    if not found.check(artifact.is_file(), f"{artifact.name} is not in {artifacts.name}: not scored; --artifacts DIR has it?"):
        return f"seed {seed['seed']}: not scored"
    found.check(sha256(artifact.read_bytes()).hexdigest() == seed["artifact_sha256"],
                f"{artifact.name} is not the log's artifact")
    with tempfile.TemporaryDirectory() as place:
        # One step of training, so that the model is compiled as it was.
        changes = {"ITERATIONS": 1, "INIT_FROM": artifact.resolve(), "OUT_DIR": "out", "RUN_ID": "rerun", "WARMUP_STEPS": 0,
                   "RESUME": "", "CHECKPOINT_EVERY": "0", "CHECKPOINT_DIR": "", "VAL_LOSS_EVERY": 1, "TRACKERS": ""}
        given = {name: changes.get(name, value) for name, value in seed["settings"].items()}
        for name in ("DATA_PATH", "TOKENIZER_PATH"):
            if Path(ROOT, given[name]).exists():
                given[name] = ROOT / given[name]
        arguments = [f"{name}={int(value) if isinstance(value, bool) else value}" for name, value in given.items()]
        clean = {name: value for name, value in os.environ.items() if name not in given}
        result = subprocess.run([sys.executable, (folder / "train_gpt.py").resolve(), *arguments], cwd=place, env=clean,
                                capture_output=True, text=True, check=False)
        log = Path(place, "logs", "rerun.jsonl")
        events = read_events(log) if log.is_file() else []
        scored = next((event for event in events if event["event"] == "val" and event["step"] == 0), None)
    if not found.check(scored is not None, f"seed {seed['seed']}: the rerun failed: {(result.stderr or result.stdout)[-300:]}"):
        return f"seed {seed['seed']}: not scored"
    difference = scored["val_bpb"] - seed["val_bpb"]
    found.check(abs(difference) <= RERUN_TOLERANCE, f"seed {seed['seed']}: the artifact scores {scored['val_bpb']:.8f}, not "
                f"{seed['val_bpb']:.8f}")
    return f"seed {seed['seed']}: scored again {scored['val_bpb']:.8f}, in the log {seed['val_bpb']:.8f}, {difference:+.1e}"


def check_base(folder: Path, said: dict, found: Findings) -> list[dict]:
    """The seeds of the record that this one is compared with: one of the same track and division, itself without findings."""
    place = folder.parent.parent / said["base"]
    if not said["base"]:
        return []
    if not found.check(re.fullmatch(rf"{re.escape(folder.parent.name)}/{FOLDER.pattern}", said["base"])
                       and (place / "submission.json").is_file() and place != folder,
                       f"base {said['base']!r} is no other record of this track, as {folder.parent.name}/2026-01-31_Name is"):
        return []
    theirs = json.loads((place / "submission.json").read_text(encoding="utf-8"))
    found.check(theirs["division"] == said["division"], f"base {said['base']} is of the division {theirs['division']!r}")
    broken = Findings()
    seeds = read_folder(place, broken)
    found.check(not broken and seeds, f"base {said['base']} is refused itself: {'; '.join(broken)[:300]}")
    return seeds


def verify_record(folder: Path, again: bool = False, artifacts: Path | None = None) -> tuple[Findings, list[str]]:
    """Findings and lines to print about one record folder."""
    found, notes, track = Findings(), [], load_track(folder)
    found.check(FOLDER.fullmatch(folder.name), f"{folder.name} is no DATE_Name, as 2026-01-31_Wider is")
    seeds = read_folder(folder, found)
    try:
        said = json.loads((folder / "submission.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        found.append(f"submission.json cannot be read: {error}")
        return found, notes
    for key, kind in CLAIMS.items():
        number = isinstance(said.get(key), int) and not isinstance(said.get(key), bool) and kind is float
        found.check(isinstance(said.get(key), kind) or number, f"submission.json: {key} is no {kind.__name__}")
    if found or not seeds:
        return found, notes
    found.check(said["track"] == folder.parent.name and folder.name == f"{said['date']}_{said['name']}",
                f"submission.json is of {said['track']}/{said['date']}_{said['name']}, not of {folder.parent.name}/{folder.name}")
    for key in ("name", "author", "github_id", "date", "division", "base", "hardware", "command"):
        found.check(not UNSAFE.search(said[key]), f"submission.json: {key} has a line end, or one of | < >")
    computed = claims_of(track, said["division"], seeds, check_base(folder, said, found))
    for key, value in computed.items():
        compare(said.get(key), value, f"submission.json: {key}", found)
    check_rules(track, said["division"], seeds, found)
    check_paths(folder, found)
    check_artifacts(folder, seeds, found)
    for name in ("README.md", "curve.png"):
        found.check((folder / name).is_file(), f"{name} is missing")
    from submit import render
    readme = (folder / "README.md").read_text(encoding="utf-8") if (folder / "README.md").is_file() else ""
    if not found:
        found.check(readme.startswith(render(said)), "README.md: what stands above its notes is not what submission.json "
                    "gives; records/submit.py --again writes it anew")
    notes.append(f"{computed['val_bpb']:.5f} ± {computed['val_bpb_std']:.5f} bits per byte, {len(seeds)} seeds, "
                 f"{computed['bytes_total']:,} bytes at most; training "
                 + ", ".join(f"{seed['train_seconds']:.1f}" for seed in seeds) + " s, evaluation "
                 + ", ".join(f"{seed['eval_seconds']:.1f}" for seed in seeds) + " s, all in "
                 + ", ".join(f"{seed['wall_seconds']:.0f}" for seed in seeds) + " s")
    if test := computed["significance"]:
        limit = track.get("p", 0.01)
        notes.append(f"against {said['base']}: {test['difference']:+.5f} {test['unit']}, margin {test['margin']:g}, one-sided "
                     f"Welch t-test p = {test['p']:.2g}: {'significant' if test['p'] < limit else 'not significant'} at {limit}")
    if again:
        division = track.get("divisions", {}).get(said["division"], {})
        notes += [rerun(folder, seed, division, artifacts or folder, found) for seed in seeds]
    return found, notes


def verify_ladder(folder: Path) -> tuple[Findings, list[str]]:
    """A ladder's README.md is the report of its logs, which have run with what the rungs set."""
    from ladder import check_rungs, report
    found = Findings(check_rungs(folder))
    found.check((folder / "README.md").read_text(encoding="utf-8") == report(folder),
                "README.md is not what the logs give; records/ladder.py --report FOLDER prints that")
    check_paths(folder, found)
    return found, []


def record_folders() -> list[Path]:
    """All folders of all tracks."""
    return sorted(path for track in (ROOT / "records").glob("track_*") for path in track.iterdir() if path.is_dir())


def print_counts(options) -> None:
    """A table of a division, as track.json has it, computed from a data set."""
    sys.path.insert(0, str(ROOT))
    import train_gpt
    manifest = json.loads((options.counts / "manifest.json").read_text(encoding="utf-8"))
    split = manifest["splits"]["val"]
    table = {"original_per_decoded_byte": split["bytes"] / split["decoded_bytes"]}
    for length in map(int, options.lengths.split(",")):
        config = train_gpt.Config(data_path=str(options.counts), tokenizer_path=options.tokenizer, train_seq_len=length,
                                  vocab_size=manifest["tokenizer"]["vocab_size"])
        _, tokens, byte_count = train_gpt.load_validation(config)
        table[str(length)] = {"val_tokens": len(tokens) - 1, "val_bytes": byte_count}
    print(json.dumps(table, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="record folders (default: all)")
    parser.add_argument("--rerun", action="store_true", help="score the artifacts again; runs the folder's train_gpt.py")
    parser.add_argument("--artifacts", type=Path, metavar="DIR", help="where artifacts lie that are too large for the folder")
    parser.add_argument("--counts", type=Path, metavar="DATA_PATH", help="print a table of track.json")
    parser.add_argument("--tokenizer", help="TOKENIZER_PATH for --counts")
    parser.add_argument("--lengths", default="256,512,1024,2048,4096", help="TRAIN_SEQ_LENs for --counts")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    if options.counts:
        print_counts(options)
        return
    wrong = 0
    for folder in options.folders or record_folders():
        try:
            is_ladder = folder.resolve().parent.name == "track_speedup_ladder"
            found, notes = verify_ladder(folder) if is_ladder else verify_record(
                folder.resolve(), options.rerun, options.artifacts)
        except Exception as error:  # one folder must not keep others from being looked at
            found, notes = Findings([f"{type(error).__name__}: {error}"]), []
        print(f"{folder}: {'refused' if found else 'fine'}")
        for line in (*notes, *(f"REFUSED: {finding}" for finding in found)):
            print("   ", line)
        wrong += bool(found)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
