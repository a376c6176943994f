"""Check record folders: recompute every number from the logs and apply the rules of the track.

    python records/verify.py                                  all folders
    python records/verify.py FOLDER --rerun                   also score the artifacts again (--artifacts DIR has large ones)
    python records/verify.py --counts DATA_PATH --tokenizer FILE    print a table for a division of track.json

The exit status is 1 if a folder is refused; each reason is a line. Without --rerun, logs that were forged completely and
consistently are believed. --rerun runs the folder's train_gpt.py, which is the submitter's code: read it first.
"""

import argparse
import ast
import difflib
import json
import math
import os
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
from functools import lru_cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import ladder
from common import (ABSOLUTE_PATH, FOLDER_NAME, MAY_DIFFER_BETWEEN_SEEDS, ROOT, RULE, UNSAFE, Findings, compare_scores,
                    deviation, find_incumbent, is_close, load_json, load_track, read_events, record_folders, score,
                    setting_text)

# ---- What a script may not do ------------------------------------------------------------------------
# A script is one readable file whose text shows its behaviour. This list catches mistakes and simple tricks; it is not a
# sandbox. A person reads the diff to the base before a record is accepted.
PACKAGES = {"torch", "numpy", "sentencepiece", "tiktoken", "wandb"}  # and the standard library; older scripts had wandb
FORBIDDEN_NAMES = {"exec", "eval", "compile", "__import__", "__builtins__", "__loader__"}
FORBIDDEN_MODULES = {"builtins", "cffi", "code", "ctypes", "imp", "importlib", "marshal", "pickle", "pkgutil", "runpy", "socket",
                     "urllib", "http", "torch.hub", "torch.package", "torch.utils.cpp_extension"}
FORBIDDEN_ATTRIBUTES = {"torch.hub", "torch.package", "torch.utils.cpp_extension", "torch.ops.load_library",
                        "torch.classes.load_library", "torch.jit.load", "os.system", "os.popen", "os.fork"}
FORBIDDEN_PREFIXES = ("os.exec", "os.spawn", "os.posix_spawn")
PROGRAMS = {"nvidia-smi", "scontrol"}  # that a script may start

# ---- Slack, and why --------------------------------------------------------------------------------
ROUNDING = 1e-9  # sums of the same floats in another order
RATE_ROUNDING = 1e-6  # relative; the clock of two events is a difference of large floats
CLOCK_SHARE = 0.05  # the wall clock includes logging and the progress line
CLOCK_MS = 250  # a slow disk under the log
LAST_MS = 1000  # a run may pass the cap by an average step and this much for a hiccup
EVALUATION_SECONDS = 10  # between export and score the artifact is read back and sent to all ranks
BETTER_BY_EXPORT = 0.01  # nats: rounding weights to int8 may improve the loss by chance, but by less than this
RERUN_BPB = 1e-3  # compiled and eager models round differently: 3.2e-4 was measured, and 8e-6 between CPUs
SMALL_ARTIFACT = 2_000_000  # bytes; larger ones are not kept in git

STEP = re.compile(r"step:(\d+)/\d+ (train|val)_loss:(\S+) (?:val_bpb:(\S+) )?train_time:(\d+)ms")
SEED_FILE = re.compile(r"(train_seed-?\d+)(\.\w+)?\.(log|jsonl)|artifact_seed-?\d+\.int8\.ptz")
OTHER_FILES = {"README.md", "submission.json", "train_gpt.py", "script.diff", "curve.png"}
MUST_MATCH_BETWEEN_SEEDS = ("world_size", "threads", "torch", "python", "val_tokens", "val_bytes", "parameters")
NOTES = "\n## Notes\n"
AUTHORED = {  # what the author says in submission.json
    "name": str, "author": str, "github_id": str, "date": str, "submitted": str, "track": str, "division": str,
    "blurb": str, "base": str, "hardware": str, "command": str}


# ---- Logs --------------------------------------------------------------------------------------------


def check_text_log(name: str, events: list[dict], lines: list[str], versions: str, findings: Findings) -> None:
    """The text log must have the same numbers as the events."""
    last = {event["event"]: event for event in events}
    start, export, final = last["config"], last["export"], last["final"]
    shown = [(int(m[1]), m[2], m[3], m[4], m[5]) for m in map(STEP.match, lines) if m]
    wanted = []
    for event in events:
        if event["event"] in ("train", "val"):
            loss = f"{event[event['event'] + '_loss']:.4f}"
            bpb = f"{event['val_bpb']:.4f}" if event["event"] == "val" else None
            wanted.append((event["step"], event["event"], loss, bpb, f"{event['train_time_ms']:.0f}"))
    different = next((f": {pair}" for pair in zip(shown, wanted) if pair[0] != pair[1]), " on the steps")
    findings.check(shown == wanted, f"{name}: .log and .jsonl disagree{different}")
    score_text = (f"{final['val_loss']:.8f}", f"{final['val_bpb']:.8f}")
    for what, pattern, expected in (
            ("val_loss and val_bpb", r"final_int8_zlib_roundtrip_exact val_loss:(\S+) val_bpb:(\S+)", score_text),
            ("eval_time_ms", r"final_int8_zlib_roundtrip .* eval_time:(-?\d+)ms", (f"{final['eval_time_ms']:.0f}",)),
            ("artifact_bytes", r"Serialized model int8\+zlib: (\d+) bytes", (str(export["artifact_bytes"]),)),
            ("code_bytes", r"Code size: (\d+) bytes", (str(export["code_bytes"]),)),
            ("SEED", r"seed:(-?\d+)$", (str(start["config"]["SEED"]),)),
            ("world_size", r"world_size:(\d+)", (str(start["world_size"]),)),
            ("val_tokens", r"val_loader:shards .* tokens:(\d+)", (str(start["val_tokens"]),))):
        logged = [m.groups() for m in (re.match(pattern, line) for line in lines) if m]
        findings.check(logged == [expected], f"{name}: {what} is {logged} in the .log and {expected} in the .jsonl")
    logged = json.loads(next(line for line in lines if line.startswith("config:{")).removeprefix("config:"))
    findings.check(logged.pop("overrides") == start["overrides"] and logged == start["config"],
                   f"{name}: .log and .jsonl disagree on the settings")
    torch_version = re.search(r"Running PyTorch (\S+)", versions)
    findings.check(torch_version and torch_version[1] == start["torch"],
                   f"{name}: .log and .jsonl disagree on PyTorch's version")


def check_steps(name: str, events: list[dict], findings: Findings) -> None:
    """Training must be logged as train_gpt.py logs it: the first ten steps and every TRAIN_LOG_EVERY."""
    every = events[0]["config"]["TRAIN_LOG_EVERY"]
    logged = {event["step"] for event in events if event["event"] == "train"}
    first = next((event["step"] for event in events if event["event"] == "resume"), 0) + 1
    last = events[-1]["step"]
    if not findings.check(logged, f"{name}: the log has no training steps"):
        return
    wanted = {step for step in range(first, last + 1) if step <= 10 or (every and step % every == 0)}
    missing = sorted(wanted - logged)
    findings.check(not missing, f"{name}: training steps {missing[:3]} are not in the log")


def check_clock(name: str, events: list[dict], findings: Findings) -> None:
    """Steps, training clock and wall clock must advance together, and the speed must follow from them."""
    config = events[0]["config"]
    last = {event["event"]: event for event in events}
    trained = [event for event in events if event["event"] == "train"]
    for before, after in zip(trained, trained[1:]):
        steps = after["step"] - before["step"]
        ms = after["train_time_ms"] - before["train_time_ms"]
        where = f"{name}: step {after['step']}"
        if not findings.check(steps > 0 and ms > 0, f"{where}: steps or clock do not advance"):
            return
        rate = 1000 * steps * config["TRAIN_BATCH_TOKENS"] / ms
        findings.check(is_close(rate, after["tok_per_sec"], RATE_ROUNDING),
                       f"{where}: tok_per_sec does not follow from steps, tokens and clock")
    for before, after in zip(events, events[1:]):  # nothing but training happens between two training events
        if before["event"] == after["event"] == "train":
            wall = 1000 * (after["elapsed_s"] - before["elapsed_s"])
            ms = after["train_time_ms"] - before["train_time_ms"]
            findings.check(abs(wall - ms) <= CLOCK_SHARE * wall + CLOCK_MS, f"{name}: step {after['step']}: {ms:.0f} ms "
                           f"of training, but {wall:.0f} ms of the wall clock")
    # Older scripts wrote checkpoints in a thread, whose events are late.
    wall = [event["elapsed_s"] for event in events if event["event"] != "checkpoint"]
    findings.check(wall == sorted(wall), f"{name}: the wall clock goes backwards")
    findings.check(not trained or last["val"]["train_time_ms"] >= trained[-1]["train_time_ms"] - LAST_MS,
                   f"{name}: the last validation is earlier than the last step")
    seconds = last["final"]["eval_time_ms"] / 1000
    room = last["final"]["elapsed_s"] - last["export"]["elapsed_s"]
    findings.check(0.5 * room - EVALUATION_SECONDS <= seconds <= room + 0.5 and seconds >= 0, f"{name}: {seconds:.1f} s "
                   f"of evaluation, but {room:.1f} s of the wall clock between export and score")


def check_scores(name: str, events: list[dict], findings: Findings) -> None:
    """Bits per byte must follow from loss, tokens and bytes; the artifact cannot score better than its own weights."""
    start = events[0]
    last = {event["event"]: event for event in events}
    for event in events:
        if event["event"] in ("val", "final"):
            bits = event["val_loss"] * start["val_tokens"] / math.log(2) / start["val_bytes"]
            findings.check(is_close(event["val_bpb"], bits, ROUNDING), f"{name}: {event['event']} of step {event['step']}: "
                           f"val_bpb {event['val_bpb']} is not val_loss * tokens / (ln 2 * bytes) = {bits}")
    findings.check(last["final"]["step"] == last["val"]["step"] == last["export"]["step"],
                   f"{name}: the last validation, the export and the final score are of different steps")
    gain = last["val"]["val_loss"] - last["final"]["val_loss"]
    findings.check(gain <= BETTER_BY_EXPORT, f"{name}: the artifact scores {gain:.4f} nats better than the weights that it "
                   f"was made from, more than {BETTER_BY_EXPORT}")


def check_resumed(folder: Path, name: str, events: list[dict], findings: Findings) -> bool:
    """Return whether the run was resumed. Its older logs, of this script and these settings, must cover all earlier steps."""
    resumed = next((event for event in events if event["event"] == "resume"), None)
    first = next((event["step"] for event in events if event["event"] == "train"), 1)
    if resumed is None and first == 1:
        return False
    source = (folder / "train_gpt.py").read_text(encoding="utf-8")
    settings = {key: value for key, value in events[0]["config"].items() if key not in MAY_DIFFER_BETWEEN_SEEDS}
    covered = set()
    for path in folder.glob(f"{name}.*.jsonl"):
        older = read_events(path)
        text = path.with_suffix(".log")
        same_settings = older and all(older[0]["config"].get(key) == value for key, value in settings.items())
        if same_settings and text.is_file() and text.read_text(encoding="utf-8").startswith(source + "\n" + RULE):
            begin = next((event["step"] for event in older if event["event"] == "resume"), 0)
            covered |= set(range(begin, max(event.get("step", 0) for event in older) + 1))
    end = resumed["step"] if resumed else first
    missing = next((step for step in range(end + 1) if step not in covered), None)
    findings.check(missing is None, f"{name}: the run was resumed at step {end}, but there is no older log of this script "
                   f"and these settings that has step {missing}")
    return True


def read_seed(folder: Path, path: Path, source: str, findings: Findings) -> dict | None:
    """Return the numbers of one seed from its two logs, train_seedN.log and .jsonl; None if they cannot be read."""
    name = path.stem
    try:
        parts = path.read_text(encoding="utf-8").split("\n" + RULE + "\n", 2)
        if not findings.check(len(parts) == 3, f"{name}.log: source, machine and lines are not divided by two rules of ="):
            return None
        findings.check(parts[0] == source, f"{name}.log: the source in it is not the folder's train_gpt.py")
        versions, lines = parts[1], parts[2].splitlines()
        events = read_events(path.with_suffix(".jsonl"))
        for check in (check_scores, check_steps, check_clock):
            check(name, events, findings)
        check_text_log(name, events, lines, versions, findings)
        return summarize(events, versions, lines, check_resumed(folder, name, events, findings))
    except Exception as error:  # forged logs can be anything
        findings.append(f"{name}: a log is missing, unfinished or damaged: {type(error).__name__}: {error}")
        return None


def summarize(events: list[dict], versions: str, lines: list[str], resumed: bool) -> dict:
    """Return the numbers of a seed that rules and claims are about."""
    last = {event["event"]: event for event in events}
    start, val, export, final = last["config"], last["val"], last["export"], last["final"]
    python = re.search(r"Running Python (\S+)", versions)
    overrides = [key for key in sorted(start["overrides"]) if key not in MAY_DIFFER_BETWEEN_SEEDS]
    return {
        "seed": start["config"]["SEED"], "settings": start["config"], "machine": versions, "resumed": resumed,
        "overrides": {key: start["config"][key] for key in overrides},
        "data_sha256": start.get("data_sha256", {}),
        "losses": [event["train_loss"] for event in events if event["event"] == "train"],
        "val_loss": final["val_loss"], "val_bpb": final["val_bpb"], "val_bpb_original": None,
        "val_bpb_before_export": val["val_bpb"], "steps": final["step"], "train_seconds": val["train_time_ms"] / 1000,
        "eval_seconds": final["eval_time_ms"] / 1000, "wall_seconds": final["elapsed_s"],
        "artifact_bytes": export["artifact_bytes"], "artifact_sha256": export["artifact_sha256"],
        "code_bytes": export["code_bytes"], "code_sha256": export["code_sha256"],
        "bytes_total": export["artifact_bytes"] + export["code_bytes"],
        "unique_tokens": last["data"]["unique_tokens"] if "data" in last else 0,
        "val_tokens": start["val_tokens"], "val_bytes": start["val_bytes"], "world_size": start["world_size"],
        "threads": start["threads"], "torch": start["torch"], "python": python[1] if python else "",
        "parameters": int(next(line for line in lines if line.startswith("model_params:")).split(":")[1])}


def read_folder(folder: Path, findings: Findings) -> list[dict]:
    """Return the seeds of a record folder, each as summarize gives it."""
    script = folder / "train_gpt.py"
    if not findings.check(script.is_file(), "train_gpt.py is missing"):
        return []
    source = script.read_text(encoding="utf-8")
    code = source.encode("utf-8")
    findings += check_script(source)
    logs = sorted(path for path in folder.glob("train_seed*.log") if re.fullmatch(r"train_seed-?\d+", path.stem))
    findings.check(logs, "there is no train_seedN.log")
    seeds = []
    for path in logs:
        seed = read_seed(folder, path, source, findings)
        if seed is None:
            continue
        seeds.append(seed)
        findings.check(path.stem == f"train_seed{seed['seed']}", f"{path.name} has SEED={seed['seed']}")
        findings.check(seed["code_bytes"] == len(code),
                       f"{path.stem}: code_bytes is {seed['code_bytes']}, but train_gpt.py has {len(code)}")
        findings.check(seed["code_sha256"] == sha256(code).hexdigest(), f"{path.stem}: code_sha256 is not train_gpt.py's")
    check_differences(seeds, findings)
    return seeds


def check_differences(seeds: list[dict], findings: Findings) -> None:
    """Seeds must be different runs of the same settings in the same place."""
    numbers = [seed["seed"] for seed in seeds]
    losses = {str(seed["losses"]) for seed in seeds}
    artifacts = {seed["artifact_sha256"] for seed in seeds}
    findings.check(len(set(numbers)) == len(seeds), f"seeds are not different: {numbers}")
    findings.check(len(losses) == len(artifacts) == len(seeds), "two seeds have the same training losses or artifact")
    for seed in seeds[1:]:
        names = [name for name, value in seeds[0]["settings"].items()
                 if name not in MAY_DIFFER_BETWEEN_SEEDS and seed["settings"].get(name) != value]
        names += [name for name in MUST_MATCH_BETWEEN_SEEDS if seed[name] != seeds[0][name]]
        findings.check(not names, f"seed {seed['seed']} differs in {', '.join(names)} from seed {numbers[0]}")


# ---- The script ----------------------------------------------------------------------------------------


def programs_of(node: ast.AST, values: dict[str, list[ast.AST]]) -> set[str]:
    """Return the names of the programs that the first argument of a subprocess call can mean; {""} if unknown."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return set(node.value.split()[:1])
    if isinstance(node, ast.List) and node.elts:
        return programs_of(node.elts[0], values)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "shutil.which" and node.args:
        return programs_of(node.args[0], values)
    if isinstance(node, ast.Name) and node.id in values:
        return set().union(*(programs_of(value, {}) for value in values[node.id]))
    return {""}


@lru_cache  # many records have the same script
def check_script(source: str) -> tuple[str, ...]:
    """Return what is wrong with a script that must be one readable file: its length, imports, and what it could hide."""
    lines = len(source.splitlines())
    findings = Findings()
    findings.check(lines < 1500, f"train_gpt.py has {lines} lines, not less than 1,500")
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return (*findings, f"train_gpt.py is not Python: {error}")
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            module = node.module or "."
            imported |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    foreign = {name.split(".")[0] or "." for name in imported} - sys.stdlib_module_names - PACKAGES
    findings.check(not foreign, f"train_gpt.py imports {', '.join(sorted(foreign))}: code that is not counted")
    hidden = {name for name in imported if {name, name.split(".")[0]} & FORBIDDEN_MODULES}
    values: dict[str, list[ast.AST]] = {}
    allowed = 0
    for node in nodes:
        if isinstance(node, ast.Assign | ast.NamedExpr):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    values.setdefault(target.id, []).append(node.value)
    for node in nodes:
        is_read = isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
        text = ast.unparse(node) if is_read else ""
        if text in FORBIDDEN_NAMES | FORBIDDEN_ATTRIBUTES or text.startswith(FORBIDDEN_PREFIXES):
            hidden.add(text)
        if isinstance(node, ast.keyword) and node.arg == "weights_only" and ast.unparse(node.value) != "True":
            hidden.add(f"weights_only={ast.unparse(node.value)}")
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("subprocess.") and node.args:
            allowed += programs_of(node.args[0], values) <= PROGRAMS
    uses = sum(isinstance(node, ast.Name) and node.id == "subprocess" for node in nodes)
    aliases = [node for node in nodes if isinstance(node, ast.alias) and node.name.startswith("subprocess") and node.asname]
    from_subprocess = any(name.startswith("subprocess.") for name in imported)
    if uses > allowed or aliases or from_subprocess:
        hidden.add(f"subprocess for more than {' and '.join(sorted(PROGRAMS))}")
    findings.check(not hidden, f"train_gpt.py uses {', '.join(sorted(hidden))}, which can hide code")
    return tuple(findings)


def script_difference(folder: Path, base: str) -> str:
    """Return the unified diff from the base's train_gpt.py to the folder's; empty without a base, or if they are equal."""
    if not base:
        return ""
    before = (folder.parent.parent / base / "train_gpt.py").read_text(encoding="utf-8").splitlines(keepends=True)
    after = (folder / "train_gpt.py").read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(difflib.unified_diff(before, after, f"{base}/train_gpt.py", "train_gpt.py"))


# ---- The rules of a track ------------------------------------------------------------------------------


def find_table(division: dict, seed: dict) -> dict | None:
    """Return the division's table, one for each tokenizer, that has the seed's counts of validation tokens and bytes."""
    def fits(value: int, wanted) -> bool:
        return wanted[0] <= value <= wanted[1] if isinstance(wanted, list) else value == wanted

    for table in division["scored"].values():
        row = table.get(str(seed["settings"]["TRAIN_SEQ_LEN"]))
        if row and all(fits(seed[key], row[key]) for key in ("val_tokens", "val_bytes")):
            return table
    return None


def check_rules(track: dict, division_name: str, seeds: list[dict], findings: Findings) -> None:
    """Apply the limits of the track, its settings and the data of the division. Every rule of track.json is here."""
    least = track.get("min_seeds", 1)
    findings.check(len(seeds) >= least, f"the track asks for {least} seeds; there are {len(seeds)}")
    divisions = track.get("divisions", {})
    division = divisions.get(division_name)
    findings.check(division or not divisions, f"division {division_name!r} must be one of {', '.join(divisions)}")
    for seed in seeds:
        name = f"seed {seed['seed']}"
        settings = seed["settings"]
        amounts = {"max_bytes": seed["bytes_total"], "max_eval_seconds": seed["eval_seconds"],
                   "max_world_size": seed["world_size"], "max_threads": seed["threads"] * seed["world_size"]}
        for rule, amount in amounts.items():
            limit = track.get(rule, math.inf)
            findings.check(amount <= limit, f"{name}: {rule.removeprefix('max_')} is {amount:g}, more than {limit:g}")
        if "max_train_seconds" in track:
            check_cap(name, seed, track["max_train_seconds"], findings)
        machine = track.get("machine", "")
        findings.check(machine in seed["machine"], f"{name}: nvidia-smi's output has no {machine}")
        rooted = [key for key, value in settings.items() if str(value).startswith(("/", "~"))]
        findings.check(not rooted, f"{name}: {', '.join(rooted)} must be relative to the repository")
        for key, values in track.get("settings", {}).items():
            findings.check(settings.get(key) in values, f"{name}: {key}={settings.get(key)!r} is not one of {values}")
        if division:
            check_division(name, seed, division, division_name, findings)


def check_cap(name: str, seed: dict, limit: float, findings: Findings) -> None:
    """The training clock must have a cap, and must have stopped at it."""
    cap = seed["settings"]["MAX_WALLCLOCK_SECONDS"]
    findings.check(0 < cap <= limit, f"{name}: MAX_WALLCLOCK_SECONDS={cap:g} must be more than 0 and at most {limit:g}")
    slack = seed["train_seconds"] / max(1, seed["steps"]) + LAST_MS / 1000
    findings.check(seed["train_seconds"] <= limit + slack, f"{name}: {seed['train_seconds']:.1f} s of training are more "
                   f"than {limit:g} s and {slack:.1f} s for the last step")


def check_division(name: str, seed: dict, division: dict, division_name: str, findings: Findings) -> None:
    """The run must have scored the division's validation split, and trained on its training split where it is pinned."""
    table = find_table(division, seed)
    length = seed["settings"]["TRAIN_SEQ_LEN"]
    if not findings.check(table is not None, f"{name}: {seed['val_tokens']} validation tokens of {seed['val_bytes']} bytes "
                          f"are not those of the division {division_name!r} for TRAIN_SEQ_LEN={length}"):
        return
    for split in ("train", "val"):
        pinned = table.get(f"{split}_shards_sha256")
        logged = [digest for file, digest in seed["data_sha256"].items() if f"_{split}_" in file]
        if pinned and (seed["data_sha256"] or "train_shards_sha256" in table):
            findings.check(logged == pinned, f"{name}: the {split} shards that the log names are not those of the division")


def other_seeds(folder: Path, other: str, what: str, division: str, findings: Findings) -> list[dict]:
    """Return the seeds of another record of the same track and division, which must itself be valid."""
    place = folder.parent.parent / other
    is_record = re.fullmatch(rf"{re.escape(folder.parent.name)}/{FOLDER_NAME.pattern}", other) and place != folder
    if not findings.check(is_record and (place / "submission.json").is_file(), f"{what} {other!r} is not another record of "
                          f"this track (example: {folder.parent.name}/2026-01-31_Name)"):
        return []
    theirs = load_json(place / "submission.json")["division"]
    findings.check(theirs == division, f"{what} {other} is of the division {theirs!r}")
    broken = Findings()
    seeds = read_folder(place, broken)
    findings.check(not broken and seeds, f"{what} {other} is refused itself: {'; '.join(broken)[:300]}")
    add_original_scores(load_track(place), division, seeds)
    return seeds


def add_original_scores(track: dict, division: str, seeds: list[dict]) -> None:
    """Set val_bpb_original, bits per byte of the original text, by the constant of the division's tokenizer; None without."""
    rules = track.get("divisions", {}).get(division)
    for seed in seeds:
        table = find_table(rules, seed) if rules else None
        ratio = (table or {}).get("original_per_decoded_byte")
        seed["val_bpb_original"] = seed["val_bpb"] / ratio if ratio else None


# ---- Claims ----------------------------------------------------------------------------------------------


def make_claims(folder: Path, authored: dict, seeds: list[dict], findings: Findings) -> dict:
    """Return everything in submission.json that the logs decide."""
    track = load_track(folder)
    division = authored["division"]
    add_original_scores(track, division, seeds)
    base = other_seeds(folder, authored["base"], "base", division, findings) if authored["base"] else []
    best = find_incumbent(folder, authored)
    incumbent = f"{folder.parent.name}/{best['date']}_{best['name']}" if best else ""
    rivals = base
    if incumbent != authored["base"]:
        rivals = other_seeds(folder, incumbent, "incumbent", division, findings) if incumbent else []
    against = compare_scores(track, seeds, rivals)
    first = seeds[0]
    per_seed = ("val_loss", "val_bpb", "val_bpb_original", "val_bpb_before_export", "steps", "train_seconds",
                "eval_seconds", "wall_seconds", "artifact_bytes", "artifact_sha256", "bytes_total", "resumed",
                "unique_tokens")
    claims = {key: statistics.mean(seed[key] for seed in seeds) for key in ("val_loss", "val_bpb")}
    claims |= {f"{key}_std": deviation([seed[key] for seed in seeds]) for key in ("val_loss", "val_bpb")}
    originals = [seed["val_bpb_original"] for seed in seeds]
    return {
        **claims, "val_bpb_original": None if None in originals else statistics.mean(originals),
        "bytes_total": max(seed["bytes_total"] for seed in seeds), "bytes_code": first["code_bytes"],
        "script_sha256": first["code_sha256"], "parameters": first["parameters"],
        "seeds": [seed["seed"] for seed in seeds],
        "seed_results": {str(seed["seed"]): {key: seed[key] for key in per_seed} for seed in seeds},
        "settings": first["overrides"], "changes": changes(base, first), "significance": compare_scores(track, seeds, base),
        "incumbent": incumbent, "against_incumbent": against,
        "is_best": not incumbent or (against is not None and against["p"] < track.get("p", 0.01)),
        "environment": {key: first[key] for key in ("python", "torch", "world_size", "threads")}}


def changes(base: list[dict], seed: dict) -> dict[str, list]:
    """Return the settings, and the script's digest, that differ from the base: name, old value, new value."""
    if not base:
        return {}
    old = base[0]["settings"]
    new = seed["settings"]
    names = sorted((old.keys() | new.keys()) - MAY_DIFFER_BETWEEN_SEEDS)
    result = {name: [old.get(name), new.get(name)] for name in names if old.get(name) != new.get(name)}
    if base[0]["code_sha256"] != seed["code_sha256"]:
        result["train_gpt.py"] = [base[0]["code_sha256"][:12], seed["code_sha256"][:12]]
    return result


def compare_claims(claimed: object, computed: object, where: str, findings: Findings) -> None:
    """Add a finding for each number of a claim that the logs do not give."""
    if isinstance(computed, dict):
        claimed = claimed if isinstance(claimed, dict) else {}
        for key in computed:
            if findings.check(key in claimed, f"{where}: {key} is missing"):
                compare_claims(claimed[key], computed[key], f"{where}: {key}", findings)
        more = sorted(claimed.keys() - computed.keys())
        findings.check(not more, f"{where}: {', '.join(more)} is not in the logs")
        return
    are_numbers = isinstance(computed, float) and isinstance(claimed, int | float)
    equal = is_close(claimed, computed, ROUNDING) if are_numbers else claimed == computed
    findings.check(equal, f"{where} is {claimed!r}, but the logs give {computed!r}")


def describe_test(test: dict) -> str:
    """Return a difference and its test in words."""
    return (f"{test['difference']:+.5f} {test['unit']}; one-sided Welch t-test of {test['n'][0]} against {test['n'][1]} "
            f"seeds for a difference of more than {test['margin']:g}: p = {test['p']:.2g}.")


def count_seeds(seeds) -> str:
    """Return the number of seeds in words."""
    return f"{len(seeds)} seed{'s' if len(seeds) != 1 else ''}"


def render(claims: dict, difference: str) -> str:
    """Return README.md up to its notes, from submission.json and the script's difference to the base."""
    results = {seed: claims["seed_results"][str(seed)] for seed in claims["seeds"]}
    original = claims["val_bpb_original"]
    lines = [f"# {claims['name'].replace('_', ' ')}: {score(claims):.4f} bits per byte", ""]
    text = (f"Mean of {count_seeds(results)}, sample deviation {claims['val_bpb_std']:.4f} bits per byte; "
            f"{claims['val_loss']:.4f} ± {claims['val_loss_std']:.4f} nats per token. The score is that of the artifact as "
            f"read back from its file. At most {claims['bytes_total']:,} bytes, {claims['bytes_code']:,} of them code; "
            f"{claims['parameters']:,} parameters.")
    if original not in (None, claims["val_bpb"]):
        text += (f" The tokenizer changes the text: {claims['val_bpb']:.4f} bits per byte of the text as tokenized, which "
                 f"is the published convention, and {original:.4f} per byte of the original text.")
    lines += [text, "", claims["blurb"], "",
              "| seed | val_bpb | before export | val_loss | steps | training, s | evaluation, s | total, s | artifact, bytes | "
              "with code |",
              "|---|---|---|---|---|---|---|---|---|---|"]
    lines += [f"| {seed} | {r['val_bpb']:.5f} | {r['val_bpb_before_export']:.5f} | {r['val_loss']:.5f} | {r['steps']:,} | "
              f"{r['train_seconds']:.1f} | {r['eval_seconds']:.1f} | {r['wall_seconds']:.1f} | {r['artifact_bytes']:,} | "
              f"{r['bytes_total']:,} |" for seed, r in results.items()]
    resumed = [str(seed) for seed, r in results.items() if r["resumed"]]
    lines += ["", f"Resumed: {', '.join(resumed)}."] if resumed else []
    lines += ["", "![curves of the seeds](curve.png)", "", "## The best before it", claims["incumbent"] or "None."]
    lines += ["", describe_test(claims["against_incumbent"])] if claims["against_incumbent"] else []
    lines += ["", "This is a new best." if claims["is_best"] else "This is not a new best."]
    lines += ["", f"## Changes from {claims['base'] or 'the defaults'}"]
    is_repeated = claims["base"] == claims["incumbent"]
    lines += [describe_test(claims["significance"]), ""] if claims["significance"] and not is_repeated else [""]
    if claims["base"]:
        lines += ["| | base | this record |", "|---|---|---|"]
        lines += [f"| {name} | {old} | {new} |" for name, (old, new) in claims["changes"].items()]
        changed = sum(line.startswith(("+", "-")) for line in difference.splitlines()) - 2
        lines += ["", f"`train_gpt.py`: {changed} lines differ, see `script.diff`." if difference else
                  "`train_gpt.py`: unchanged."]
    else:
        lines += ["| | this record |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in claims["settings"].items()]
    environment = claims["environment"]
    processes = f"{environment['world_size']} process{'es' if environment['world_size'] > 1 else ''}"
    lines += ["", "## Command", "", f"    {claims['command']}", "", "## Environment",
              f"{claims['hardware']}; {processes}, {environment['threads']} threads each; Python {environment['python']}, "
              f"PyTorch {environment['torch']}. Division: {claims['division'] or 'none'}."]
    return "\n".join(lines) + "\n" + NOTES


# ---- The folder ------------------------------------------------------------------------------------------


def check_files(folder: Path, seeds: list[dict], findings: Findings) -> None:
    """The folder must have its files and no others; artifacts must be those of the logs, and small ones must be there."""
    for path in sorted(folder.iterdir()):
        known = path.name in OTHER_FILES or SEED_FILE.fullmatch(path.name)
        findings.check(known and path.is_file() and not path.is_symlink(), f"{path.name} does not belong in a record")
    for name in ("README.md", "curve.png"):
        findings.check((folder / name).is_file(), f"{name} is missing")
    for seed in seeds:
        path = folder / f"artifact_seed{seed['seed']}.int8.ptz"
        if path.is_file():
            data = path.read_bytes()
            digest = sha256(data).hexdigest()
            findings.check(len(data) == seed["artifact_bytes"] and digest == seed["artifact_sha256"],
                           f"{path.name} is not the artifact of the log: {len(data)} bytes, sha256 {digest}")
        else:
            findings.check(seed["artifact_bytes"] >= SMALL_ARTIFACT, f"{path.name} is missing: artifacts under 2 MB belong "
                           "in the folder")


def check_paths(folder: Path, findings: Findings) -> None:
    """Nothing that people read, and no setting, may have an absolute path."""
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".jsonl", ".md", ".log"):
            text = path.read_text(encoding="utf-8").rsplit("\n" + RULE + "\n", 1)[-1]  # after the source and the machine
            lines = [line for line in text.splitlines() if not line.startswith("warning:")]
            hits = sorted({match[1] for line in lines for match in ABSOLUTE_PATH.finditer(line)})
            findings.check(not hits, f"{path.name}: absolute paths {hits[:3]}")


def check_texts(folder: Path, submission: dict, findings: Findings) -> None:
    """README.md and script.diff must be what submission.json and the scripts give."""
    difference = script_difference(folder, submission["base"])
    stored = folder / "script.diff"
    text = stored.read_text(encoding="utf-8") if stored.is_file() else ""
    findings.check(text == difference, "script.diff is not the difference between the base's train_gpt.py and this one")
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    findings.check(text.startswith(render(submission, difference)), "README.md: the part above the notes does not follow "
                   "from submission.json; records/submit.py --again rewrites it")


# ---- Scoring again ---------------------------------------------------------------------------------------


def check_data(settings: dict, division: dict, findings: Findings) -> None:
    """The shards and the tokenizer on this disk must be those that the division pins."""
    data_path = ROOT / settings["DATA_PATH"]
    tokenizer = ROOT / settings["TOKENIZER_PATH"]
    tables = [table for table in division.get("scored", {}).values() if "val_shards_sha256" in table]
    digests = {}
    for split in ("train", "val"):
        paths = [path for path in sorted(data_path.glob(f"*_{split}_*.bin")) if "_val_bytes_" not in path.name]
        digests[split] = [sha256(path.read_bytes()).hexdigest() for path in paths]
    table = next((table for table in tables if table["val_shards_sha256"] == digests["val"]), {})
    findings.check(table or not tables, f"{settings['DATA_PATH']} has other validation shards than the division")
    pinned = table.get("train_shards_sha256", digests["train"])
    findings.check(pinned == digests["train"], f"{settings['DATA_PATH']} has other training shards than the division")
    if tokenizer.is_file() and "tokenizer_sha256" in table:
        findings.check(sha256(tokenizer.read_bytes()).hexdigest() == table["tokenizer_sha256"],
                       f"{settings['TOKENIZER_PATH']} is not the division's tokenizer")


def rerun(folder: Path, seed: dict, division: dict, artifacts: Path, findings: Findings) -> str:
    """Score an artifact in a new process with the folder's train_gpt.py and the log's settings; return a line about it."""
    number = seed["seed"]
    check_data(seed["settings"], division, findings)
    artifact = artifacts / f"artifact_seed{number}.int8.ptz"
    if not findings.check(artifact.is_file(), f"seed {number}: {artifact.name} is not in {artifacts.name}; --artifacts DIR "
                          "names its folder"):
        return f"seed {number}: not scored"
    findings.check(sha256(artifact.read_bytes()).hexdigest() == seed["artifact_sha256"],
                   f"{artifact.name} is not the log's artifact")
    name = secrets.token_hex(8)  # unknown to the script, so that it cannot behave differently here
    settings = {key: setting_text(value) for key, value in seed["overrides"].items()}
    settings |= {"ITERATIONS": "0", "INIT_FROM": str(artifact.resolve()), "RUN_ID": name, "OUT_DIR": name,
                 "SEED": str(number), "DTYPE": seed["settings"]["DTYPE"], "COMPILE": "0"}
    for key in ("DATA_PATH", "TOKENIZER_PATH"):
        if key in settings and Path(ROOT, settings[key]).exists():
            settings[key] = str(ROOT / settings[key])
    kept = ("PATH", "HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "TIKTOKEN_CACHE_DIR")
    environment = {key: os.environ[key] for key in kept if key in os.environ}
    environment["OMP_NUM_THREADS"] = str(seed["threads"])
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, str((folder / "train_gpt.py").resolve())]
        command += [f"{key}={text}" for key, text in settings.items()]
        result = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
        log = Path(place, "logs", f"{name}.jsonl")
        events = read_events(log) if log.is_file() else []
    scored = next((event for event in events if event["event"] == "val"), None)
    if not findings.check(scored is not None, f"seed {number}: scoring failed: {(result.stderr or result.stdout)[-300:]}"):
        return f"seed {number}: not scored"
    difference = scored["val_bpb"] - seed["val_bpb"]
    findings.check(abs(difference) <= RERUN_BPB,
                   f"seed {number}: the artifact scores {scored['val_bpb']:.8f}, not {seed['val_bpb']:.8f}")
    return f"seed {number}: scored again {scored['val_bpb']:.8f}, in the log {seed['val_bpb']:.8f}, {difference:+.1e}"


# ---- Records and ladders ---------------------------------------------------------------------------------


def read_submission(folder: Path, findings: Findings) -> dict:
    """Return submission.json; check the types and place of what its author wrote."""
    try:
        submission = load_json(folder / "submission.json")
        authored = {key: submission.get(key, "") for key in AUTHORED}
    except (OSError, ValueError, AttributeError) as error:
        findings.append(f"submission.json cannot be read: {error}")
        return {}
    for key, value in authored.items():
        if findings.check(isinstance(value, str), f"submission.json: {key} is not text") and key != "blurb":
            findings.check(not UNSAFE.search(value), f"submission.json: {key} has a line end, or one of | < >")
    place = f"{authored['track']}/{authored['date']}_{authored['name']}"
    findings.check(place == f"{folder.parent.name}/{folder.name}", f"submission.json names {place}, not "
                   f"{folder.parent.name}/{folder.name}")
    submitted = authored["submitted"]
    findings.check(submitted == "" or str(submitted).startswith(str(authored["date"])),
                   f"submission.json: submitted {submitted!r} is not on the date {authored['date']}")
    return submission


def verify_record(folder: Path, again: bool = False, artifacts: Path | None = None) -> tuple[Findings, list[str]]:
    """Return the findings and lines to print about one record folder. `again` scores its artifacts."""
    findings = Findings()
    track = load_track(folder)
    findings.check(FOLDER_NAME.fullmatch(folder.name), f"{folder.name} must be DATE_Name (example: 2026-01-31_Wider)")
    seeds = read_folder(folder, findings)
    submission = read_submission(folder, findings)
    if findings or not seeds:
        return findings, []
    computed = make_claims(folder, submission, seeds, findings)
    for key, value in computed.items():
        compare_claims(submission.get(key), value, f"submission.json: {key}", findings)
    unknown = sorted(submission.keys() - computed.keys() - AUTHORED.keys())
    findings.check(not unknown, f"submission.json: {', '.join(unknown)} is not a claim that can be checked")
    check_rules(track, submission["division"], seeds, findings)
    check_files(folder, seeds, findings)
    check_paths(folder, findings)
    if not findings:
        check_texts(folder, submission, findings)
    notes = [f"{score(computed):.5f} ± {computed['val_bpb_std']:.5f} bits per byte, {count_seeds(seeds)}, at most "
             f"{computed['bytes_total']:,} bytes; a new best: {'yes' if computed['is_best'] else 'no'}"]
    tests = {submission["base"]: computed["significance"], computed["incumbent"]: computed["against_incumbent"]}
    notes += [f"against {other}: {describe_test(test)}" for other, test in tests.items() if test]
    if again:
        division = track.get("divisions", {}).get(submission["division"], {})
        notes += [rerun(folder, seed, division, artifacts or folder, findings) for seed in seeds]
    return findings, notes


def verify_ladder(folder: Path) -> tuple[Findings, list[str]]:
    """Return the findings about a ladder: its logs must have run what the rungs set, and its README.md must follow."""
    findings = Findings(ladder.check_rungs(folder))
    findings.check((folder / "README.md").read_text(encoding="utf-8") == ladder.report(folder),
                   "README.md does not follow from the logs; records/ladder.py --report FOLDER prints it")
    check_paths(folder, findings)
    return findings, []


def print_counts(data_path: Path, tokenizer: str, lengths: list[int]) -> None:
    """Print a table of a division, as track.json has it, from a data set that data/prepare.py made."""
    sys.path.insert(0, str(ROOT))
    import train_gpt
    manifest = load_json(data_path / "manifest.json")
    splits = manifest["splits"]
    table = {"tokenizer_sha256": manifest["tokenizer"]["sha256"],
             "original_per_decoded_byte": splits["val"]["bytes"] / splits["val"]["decoded_bytes"]}
    for split in ("train", "val"):
        table[f"{split}_shards_sha256"] = [shard["sha256"] for shard in splits[split]["shards"]]
    for length in lengths:
        config = train_gpt.Config(data_path=str(data_path), tokenizer_path=tokenizer, train_seq_len=length,
                                  vocab_size=manifest["tokenizer"]["vocab_size"])
        _, tokens, byte_count = train_gpt.load_validation(config)
        table[str(length)] = {"val_tokens": len(tokens) - 1, "val_bytes": byte_count}
    print(json.dumps(table, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="record folders (default: all)")
    parser.add_argument("--rerun", action="store_true", help="score the artifacts again; runs the folder's train_gpt.py")
    parser.add_argument("--artifacts", type=Path, metavar="DIR", help="folder of artifacts that are too large for git")
    parser.add_argument("--counts", type=Path, metavar="DATA_PATH", help="print a table of track.json")
    parser.add_argument("--tokenizer", help="TOKENIZER_PATH for --counts")
    parser.add_argument("--lengths", default="128,256,512,1024,2048,4096", help="TRAIN_SEQ_LENs for --counts")
    options = parser.parse_args()
    if options.counts:
        print_counts(options.counts, options.tokenizer, [int(text) for text in options.lengths.split(",")])
        return
    missing = [package for package in ("scipy", "matplotlib") if not find_spec(package)]
    if missing:
        sys.exit(f"verify.py: {' and '.join(missing)} must be installed: pip install -r requirements-dev.txt")
    refused = 0
    for folder in options.folders or record_folders(ROOT / "records"):
        folder = folder.resolve()
        try:
            if folder.parent.name == "track_speedup_ladder":
                findings, notes = verify_ladder(folder)
            else:
                findings, notes = verify_record(folder, options.rerun, options.artifacts)
        except Exception as error:  # one folder must not hide the others
            findings, notes = Findings([f"{type(error).__name__}: {error}"]), []
        print(f"{folder.parent.name}/{folder.name}: {'refused' if findings else 'accepted'}")
        for line in (*notes, *(f"REFUSED: {finding}" for finding in findings)):
            print("   ", line)
        refused += bool(findings)
    sys.exit(1 if refused else 0)


if __name__ == "__main__":
    main()
