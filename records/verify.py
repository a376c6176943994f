"""Check record folders: recompute every number from the logs and apply the rules of the track.

    python records/verify.py                     all folders
    python records/verify.py FOLDER --rerun      also hash the data and score the artifacts again

The exit status is 1 if a folder is refused; each reason is a line. Without --rerun, logs that were forged
completely and consistently are believed. --rerun runs the folder's train_gpt.py, which is the submitter's code:
read it first. --artifacts DIR names the folder of artifacts that are too large for git.
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
from itertools import zip_longest
from pathlib import Path

import ladder
from common import (ABSOLUTE_PATH, FOLDER_NAME, MAY_DIFFER_BETWEEN_SEEDS, ROOT, RULE, Findings, compare_scores,
                    deviation, find_incumbent, is_close, load_json, load_track, read_events, record_folders,
                    require_packages, score, table)

# ---- What a script may not do ------------------------------------------------------------------------
# A script is one readable file whose text shows its behaviour. These lists catch mistakes and simple tricks;
# they are not a sandbox. A person reads script.diff before a record is accepted.
PACKAGES = {"torch", "numpy", "sentencepiece", "tiktoken", "wandb"}  # older scripts had wandb
FORBIDDEN_NAMES = {"exec", "eval", "compile", "__import__", "__builtins__", "__loader__"}
FORBIDDEN_MODULES = {"builtins", "cffi", "code", "imp", "importlib", "marshal", "pickle", "pkgutil",
                     "runpy", "socket", "urllib", "http"}
FORBIDDEN_BEGINNINGS = ("torch.hub", "torch.package", "torch.utils.cpp_extension", "torch.ops.load_library",
                        "torch.classes.load_library", "torch.jit.load", "os.system", "os.popen", "os.fork",
                        "os.exec", "os.spawn", "os.posix_spawn")
KEEP_THEIR_NAMES = {"ctypes", "os", "subprocess", "torch"}  # "import os as x" would hide the names above
# The only calls of these two modules that a script may make: their purpose, and the text of a whole call. It has no
# other parentheses, so that a call around it does not count again.
ALLOWED_CALLS = {
    "subprocess": ("nvidia-smi and scontrol",
                   re.compile(r"subprocess\.\w+\(\[?'(nvidia-smi|scontrol)( [\w -]*)?'([,\]][^()]*)?\)")),
    "ctypes": ("mallopt", re.compile(r"ctypes\.CDLL\(None\)\.mallopt\(-?\d+, -?\d+\)")),
}
# The script of the first records asks for nvidia-smi in a way that ALLOWED_CALLS does not match. It was read.
ACCEPTED_SCRIPTS = {"3f82a1a173129f609441fc05108900126f716498e502d342618e0b862688dc4b"}

# ---- Slack, and why --------------------------------------------------------------------------------
ROUNDING = 1e-9  # sums of the same floats in another order
RATE_ROUNDING = 1e-6  # relative; the clock of two events is a difference of large floats
CLOCK_SHARE = 0.05  # the wall clock includes logging
CLOCK_MS = 250  # a slow disk under the log
LAST_MS = 1000  # a run may pass the cap by an average step and this much for a hiccup
EVALUATION_SECONDS = 10  # between export and score the artifact is read back and sent to all ranks
BETTER_BY_EXPORT = 0.01  # nats: rounding weights to int8 may improve the loss by chance, but by less than this
RERUN_BPB = 1e-3  # compiled and eager models round differently: 3.5e-4 was measured, and 8e-6 between CPUs
SMALL_ARTIFACT = 2_000_000  # bytes; larger ones are not kept in git

SEED_FILE = re.compile(r"(train_seed-?\d+)(\.\w+)?\.(log|jsonl)|artifact_seed-?\d+\.int8\.ptz")
OTHER_FILES = {"README.md", "submission.json", "train_gpt.py", "script.diff", "curve.png"}
UNSAFE = re.compile(r"[|\n\r<>]")  # breaks a Markdown table
# Lines of a text log with numbers that the .jsonl has, too
COMPARED_LINES = ("val_loader:", "world_size:", "seed:", "config:", "step:", "Code size:",
                  "Serialized model int8+zlib:", "final_")
MUST_MATCH_AFTER_RESUMING = ("world_size", "threads", "torch", "gpu", "data_sha256")
MUST_MATCH_BETWEEN_SEEDS = ("world_size", "threads", "torch", "python", "val_tokens", "val_bytes", "parameters",
                            "data_sha256")
NOTES = "\n## Notes\n"
# What the author writes in submission.json; the logs decide the rest.
AUTHORED = ("name", "author", "github_id", "date", "submitted", "track", "division", "blurb", "base",
            "hardware", "command")


# ---- Logs --------------------------------------------------------------------------------------------


def expected_lines(events: list[dict]) -> list[str]:
    """Return the beginnings of the COMPARED_LINES that a text log must have by its events."""
    last = {event["event"]: event for event in events}
    start, export, final = last["config"], last["export"], last["final"]
    config = start["config"]
    settings = json.dumps({**config, "overrides": start["overrides"]})
    lines = [f"val_loader: tokens:{start['val_tokens']}", f"world_size:{start['world_size']}",
             f"seed:{config['SEED']}", f"config:{settings}"]
    for event in events:
        if event["event"] in ("train", "val"):
            kind = event["event"]
            bpb = f" val_bpb:{event['val_bpb']:.4f}" if kind == "val" else ""
            lines.append(f"step:{event['step']}/{config['ITERATIONS']} {kind}_loss:{event[kind + '_loss']:.4f}"
                         f"{bpb} train_time:{event['train_time_ms']:.0f}ms")
    loss, bpb, eval_ms = final["val_loss"], final["val_bpb"], final["eval_time_ms"]
    return [*lines, f"Code size: {export['code_bytes']} bytes",
            f"Serialized model int8+zlib: {export['artifact_bytes']} bytes",
            f"final_int8_zlib_roundtrip val_loss:{loss:.4f} val_bpb:{bpb:.4f} eval_time:{eval_ms:.0f}ms",
            f"final_int8_zlib_roundtrip_exact val_loss:{loss:.8f} val_bpb:{bpb:.8f}"]


def check_text_log(name: str, events: list[dict], lines: list[str], findings: Findings) -> None:
    """The text log must have the same numbers as the events."""
    shown = [re.sub(r"^val_loader:.* tokens", "val_loader: tokens", line) for line in lines
             if line.startswith(COMPARED_LINES)]
    for line, wanted in zip_longest(shown, expected_lines(events), fillvalue="nothing"):
        at = max(0, len(os.path.commonprefix((line, wanted))) - 60)
        if not findings.check(f"{line} ".startswith(f"{wanted} "),
                              f"{name}: the .log has {line[at:at + 100]!r} where the .jsonl gives "
                              f"{wanted[at:at + 100]!r}"):
            return


def check_steps(name: str, events: list[dict], findings: Findings) -> None:
    """Training must be logged as train_gpt.py logs it: the first ten steps and every TRAIN_LOG_EVERY."""
    every = events[0]["config"]["TRAIN_LOG_EVERY"]
    logged = {event["step"] for event in events if event["event"] == "train"}
    first = next((event["step"] for event in events if event["event"] == "resume"), 0) + 1
    last = events[-1]["step"]
    if not findings.check(logged or first > last, f"{name}: the log has no training steps"):
        return
    wanted = {step for step in range(first, last + 1) if step <= 10 or (every and step % every == 0)}
    missing = sorted(wanted - logged)
    findings.check(not missing, f"{name}: training steps {missing[:3]} are not in the log")


def evaluation_seconds(last: dict[str, dict]) -> float:
    """Return how long a run scored its artifact, with EVAL_STRIDE or EVAL_SEQ_LEN twice; `last` has its last events."""
    return sum(last[kind]["eval_time_ms"] for kind in ("windows", "final") if kind in last) / 1000


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
            findings.check(abs(wall - ms) <= CLOCK_SHARE * wall + CLOCK_MS, f"{name}: step {after['step']}: "
                           f"{ms:.0f} ms of training, but {wall:.0f} ms of the wall clock")
    # Older scripts wrote checkpoints in a thread, whose events are late.
    wall = [event["elapsed_s"] for event in events if event["event"] != "checkpoint"]
    findings.check(wall == sorted(wall), f"{name}: the wall clock goes backwards")
    findings.check(not trained or last["val"]["train_time_ms"] >= trained[-1]["train_time_ms"] - LAST_MS,
                   f"{name}: the last validation is earlier than the last step")
    seconds = evaluation_seconds(last)
    room = last["final"]["elapsed_s"] - last["export"]["elapsed_s"]
    findings.check(0.5 * room - EVALUATION_SECONDS <= seconds <= room + 0.5 and seconds >= 0,
                   f"{name}: {seconds:.1f} s of evaluation, but {room:.1f} s of the wall clock between export "
                   "and score")


def check_scores(name: str, events: list[dict], findings: Findings) -> None:
    """Bits per byte must follow from loss, tokens and bytes; the artifact cannot beat its own weights."""
    start = events[0]
    last = {event["event"]: event for event in events}
    for event in events:
        if event["event"] in ("val", "windows", "final"):
            bits = event["val_loss"] * start["val_tokens"] / math.log(2) / start["val_bytes"]
            findings.check(is_close(event["val_bpb"], bits, ROUNDING), f"{name}: {event['event']} of step "
                           f"{event['step']}: val_bpb {event['val_bpb']} is not val_loss * tokens / "
                           f"(ln 2 * bytes) = {bits}")
    findings.check(last["final"]["step"] == last["val"]["step"] == last["export"]["step"],
                   f"{name}: the last validation, the export and the final score are of different steps")
    gain = last["val"]["val_loss"] - last["final"]["val_loss"]
    findings.check(gain <= BETTER_BY_EXPORT, f"{name}: the artifact scores {gain:.4f} nats better than the "
                   f"weights that it was made from, more than {BETTER_BY_EXPORT}")


def check_resumed(folder: Path, name: str, events: list[dict], findings: Findings) -> bool:
    """Return whether the run was resumed. Its older logs, of this script, these settings and this machine, must cover
    all earlier steps, and the training clock must go on from theirs."""
    resumed = next((event for event in events if event["event"] == "resume"), None)
    first = next((event["step"] for event in events if event["event"] == "train"), 1)
    if resumed is None and first == 1:
        return False
    beginning = (folder / "train_gpt.py").read_text(encoding="utf-8") + "\n" + RULE
    settings = {key: value for key, value in events[0]["config"].items() if key not in MAY_DIFFER_BETWEEN_SEEDS}
    covered, clock = set(), {}
    for path in folder.glob(f"{name}.*.jsonl"):
        older = read_events(path)
        text = path.with_suffix(".log")
        same = older and all(older[0]["config"].get(key) == value for key, value in settings.items())
        same = same and all(older[0].get(key) == events[0].get(key) for key in MUST_MATCH_AFTER_RESUMING)
        if same and text.is_file() and text.read_text(encoding="utf-8").startswith(beginning):
            begin = next((event["step"] for event in older if event["event"] == "resume"), 0)
            covered |= set(range(begin, max(event.get("step", 0) for event in older) + 1))
            for event in older:
                if event["event"] == "train":  # a step may have been done twice, at different speeds
                    step, ms = event["step"], event["train_time_ms"]
                    clock[step] = min(ms, clock.get(step, ms))
    end = resumed["step"] if resumed else first
    missing = next((step for step in range(end + 1) if step not in covered), None)
    findings.check(missing is None, f"{name}: the run was resumed at step {end}, but there is no older log of "
                   f"this script, these settings and this machine that has step {missing}")
    if resumed:
        least = max((ms for step, ms in clock.items() if step <= end), default=0.0)
        findings.check(resumed["train_time_ms"] >= least, f"{name}: the run was resumed after "
                       f"{resumed['train_time_ms']:.0f} ms, but earlier steps took {least:.0f} ms")
    return True


def read_seed(folder: Path, path: Path, source: str, findings: Findings) -> dict | None:
    """Return the numbers of one seed from its two logs, train_seedN.log and .jsonl; None if that fails."""
    name = path.stem
    try:
        parts = path.read_text(encoding="utf-8").split("\n" + RULE + "\n", 2)
        if not findings.check(len(parts) == 3,
                              f"{name}.log: two rules of = must divide source, machine and lines"):
            return None
        versions, lines = parts[1], parts[2].splitlines()
        events = read_events(path.with_suffix(".jsonl"))
        starts = [i for i, event in enumerate(events) if event["event"] == "config"]
        findings.check(starts == [0], f"{name}.jsonl must have one config event, its first")
        seed = summarize(events, versions, lines)
        seed["resumed"] = check_resumed(folder, name, events, findings)
        for check in (check_scores, check_steps, check_clock):
            check(name, events, findings)
        check_text_log(name, events, lines, findings)
    except Exception as error:  # forged logs can be anything
        findings.append(f"{name}: a log is missing, unfinished or damaged: {type(error).__name__}: {error}")
        return None
    code = source.encode("utf-8")
    findings.check(parts[0] == source, f"{name}.log: the source in it is not the folder's train_gpt.py")
    findings.check(f"\nRunning PyTorch {seed['torch']}\n" in versions,
                   f"{name}: .log and .jsonl disagree on PyTorch")
    findings.check(name == f"train_seed{seed['seed']}", f"{path.name} has SEED={seed['seed']}")
    findings.check(not seed["settings"].get("VAL_TOKENS"), f"{name}: VAL_TOKENS scores a part of the validation text")
    findings.check((seed["code_bytes"], seed["code_sha256"]) == (len(code), sha256(code).hexdigest()),
                   f"{name}: code_bytes and code_sha256 are not train_gpt.py's")
    return seed


def summarize(events: list[dict], versions: str, lines: list[str]) -> dict:
    """Return a seed's numbers that rules and claims are about. Raises LookupError if an event is missing."""
    last = {event["event"]: event for event in events}
    val = last["val"]
    seed = {"data_sha256": {}, **last["config"], **last["export"], **last["final"]}
    settings = seed["config"]
    python = re.search(r"Running Python (\S+)", versions)
    overrides = {key: settings[key] for key in sorted(seed["overrides"]) if key not in MAY_DIFFER_BETWEEN_SEEDS}
    return {
        **seed, "seed": settings["SEED"], "settings": settings, "overrides": overrides, "machine": versions,
        "losses": [event["train_loss"] for event in events if event["event"] == "train"],
        "val_bpb_before_export": val["val_bpb"], "steps": seed["step"],
        "train_seconds": val["train_time_ms"] / 1000, "eval_seconds": evaluation_seconds(last),
        "wall_seconds": seed["elapsed_s"], "bytes_total": seed["artifact_bytes"] + seed["code_bytes"],
        "python": python[1] if python else "",
        "parameters": int(next(line for line in lines if line.startswith("model_params:")).split(":")[1])}


def read_folder(folder: Path, division: str, findings: Findings) -> list[dict]:
    """Return the seeds of a record folder, each as summarize gives it, with "resumed", the division's "table"
    for its tokenizer, and "val_bpb_original", bits per byte of the original text (None if not known)."""
    script = folder / "train_gpt.py"
    if not findings.check(script.is_file(), "train_gpt.py is missing"):
        return []
    source = script.read_text(encoding="utf-8")
    findings += check_script(source)
    logs = sorted(path for path in folder.glob("train_seed*.log")
                  if re.fullmatch(r"train_seed-?\d+", path.stem))
    findings.check(logs, "there is no train_seedN.log")
    seeds = [read_seed(folder, path, source, findings) for path in logs]
    seeds = [seed for seed in seeds if seed]
    scored = load_track(folder).get("divisions", {}).get(division, {}).get("scored", {})
    for seed in seeds:
        seed["table"] = find_table(scored, seed)
        ratio = seed["table"].get("original_per_decoded_byte")
        seed["val_bpb_original"] = seed["val_bpb"] / ratio if ratio else None
    check_differences(seeds, findings)
    return seeds


def check_differences(seeds: list[dict], findings: Findings) -> None:
    """Seeds must be different runs of the same settings in the same place."""
    numbers = [seed["seed"] for seed in seeds]
    losses = {str(seed["losses"] or seed["seed"]) for seed in seeds}  # none, if resumed at the last step
    artifacts = {seed["artifact_sha256"] for seed in seeds}
    findings.check(len(set(numbers)) == len(seeds), f"seeds are not different: {numbers}")
    findings.check(len(losses) == len(artifacts) == len(seeds),
                   "two seeds have the same training losses or artifact")
    for seed in seeds[1:]:
        names = [name for name, value in seeds[0]["settings"].items()
                 if name not in MAY_DIFFER_BETWEEN_SEEDS and seed["settings"].get(name) != value]
        names += [name for name in MUST_MATCH_BETWEEN_SEEDS if seed[name] != seeds[0][name]]
        findings.check(not names, f"seed {seed['seed']} differs in {', '.join(names)} from seed {numbers[0]}")


# ---- The script ----------------------------------------------------------------------------------------


@lru_cache  # many records have the same script
def check_script(source: str) -> tuple[str, ...]:
    """Return what is wrong with a script that must be one readable file: length, imports, what it can hide."""
    if sha256(source.encode("utf-8")).hexdigest() in ACCEPTED_SCRIPTS:
        return ()
    lines = len(source.splitlines())
    findings = Findings()
    findings.check(lines < 1500, f"train_gpt.py has {lines} lines, not less than 1,500")
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return (*findings, f"train_gpt.py is not Python: {error}")
    imported, hidden = set(), set()
    spare = dict.fromkeys(ALLOWED_CALLS, 0)  # allowed calls less uses
    for node in nodes:
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
            hidden |= {f"{alias.name} as {alias.asname}" for alias in node.names
                       if alias.asname and alias.name in KEEP_THEIR_NAMES}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            imported |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            text = ast.unparse(node)
            module = text.rpartition(".")[2]  # torch.ctypes is ctypes, too
            if module in spare:
                spare[module] -= 1
            if text in FORBIDDEN_NAMES or text.startswith(FORBIDDEN_BEGINNINGS):
                hidden.add(text)
        elif isinstance(node, ast.keyword) and node.arg == "weights_only" and ast.unparse(node.value) != "True":
            hidden.add(f"weights_only={ast.unparse(node.value)}")
        elif isinstance(node, ast.Call):
            for module, (_, allowed) in ALLOWED_CALLS.items():
                spare[module] += bool(allowed.fullmatch(ast.unparse(node)))
    foreign = {name.split(".")[0] or "." for name in imported} - sys.stdlib_module_names - PACKAGES
    findings.check(not foreign, f"train_gpt.py imports {', '.join(sorted(foreign))}: code that is not counted")
    hidden |= {name for name in imported
               if name.split(".")[0] in FORBIDDEN_MODULES or name.startswith(FORBIDDEN_BEGINNINGS)}
    hidden |= {f"{module} for more than {purpose}" for module, (purpose, _) in ALLOWED_CALLS.items()
               if spare[module] < 0 or any(name.startswith(f"{module}.") for name in imported)}
    findings.check(not hidden, f"train_gpt.py uses {', '.join(sorted(hidden))}, which can hide code")
    return tuple(findings)


def script_difference(folder: Path, base: str) -> str:
    """Return the unified diff from the base's train_gpt.py to the folder's; "" if there is none."""
    if not base:
        return ""
    scripts = (folder.parent.parent / base / "train_gpt.py", folder / "train_gpt.py")
    before, after = (path.read_text(encoding="utf-8").splitlines(keepends=True) for path in scripts)
    return "".join(difflib.unified_diff(before, after, f"{base}/train_gpt.py", "train_gpt.py"))


# ---- The rules of a track ------------------------------------------------------------------------------


def find_table(scored: dict[str, dict], seed: dict) -> dict:
    """Return the division's table, one for each tokenizer, that has the seed's counts of validation tokens and
    bytes; {} if none has."""
    def fits(value: int, wanted) -> bool:
        return wanted[0] <= value <= wanted[1] if isinstance(wanted, list) else value == wanted

    for of_tokenizer in scored.values():
        row = of_tokenizer.get(str(seed["settings"]["TRAIN_SEQ_LEN"]))
        if row and all(fits(seed[key], row[key]) for key in ("val_tokens", "val_bytes")):
            return of_tokenizer
    return {}


def check_request(track: dict, division: str, count: int, settings: dict, findings: Findings) -> None:
    """Apply the rules that can be checked before a run: division, number of seeds, settings and cap."""
    least = track.get("min_seeds", 1)
    findings.check(count >= least, f"the track asks for {least} seeds; there are {count}")
    divisions = track.get("divisions", {})
    findings.check(not divisions or division in divisions,
                   f"division {division!r} must be one of {', '.join(divisions)}")
    rooted = [key for key, value in settings.items() if str(value).startswith(("/", "~"))]
    findings.check(not rooted, f"{', '.join(rooted)} must be relative to the repository")
    for key, values in track.get("settings", {}).items():
        findings.check(settings.get(key) in values, f"{key}={settings.get(key)!r} is not one of {values}")
    if limit := track.get("max_train_seconds"):
        cap = settings["MAX_WALLCLOCK_SECONDS"]
        findings.check(0 < cap <= limit,
                       f"MAX_WALLCLOCK_SECONDS={cap:g} must be more than 0 and at most {limit:g}")


def check_rules(track: dict, division: str, seeds: list[dict], findings: Findings) -> None:
    """Apply every rule of track.json: the limits of the track, its settings and the data of the division."""
    request = Findings()
    for seed in seeds:
        name = f"seed {seed['seed']}"
        reasons = Findings()
        check_request(track, division, len(seeds), seed["settings"], request)
        amounts = {"max_bytes": seed["bytes_total"], "max_eval_seconds": seed["eval_seconds"],
                   "max_world_size": seed["world_size"], "max_threads": seed["threads"] * seed["world_size"]}
        for rule, amount in amounts.items():
            limit = track.get(rule, math.inf)
            reasons.check(amount <= limit, f"{rule.removeprefix('max_')} is {amount:g}, more than {limit:g}")
        seconds = seed["train_seconds"]
        slack = seconds / max(1, seed["steps"]) + LAST_MS / 1000
        reasons.check(seconds <= track.get("max_train_seconds", math.inf) + slack,
                      f"{seconds:.1f} s of training pass the cap by more than the last step, {slack:.1f} s")
        machine = track.get("machine", "")
        reasons.check(machine in seed["machine"], f"nvidia-smi's output has no {machine}")
        if track.get("divisions"):
            check_division(seed, division, reasons)
        findings += [f"{name}: {reason}" for reason in reasons]
    findings += dict.fromkeys(request)  # each reason once


def check_division(seed: dict, division: str, findings: Findings) -> None:
    """The run must have scored the division's validation split, and trained on its training split if pinned."""
    findings.check(seed["table"], f"{seed['val_tokens']} validation tokens of {seed['val_bytes']} bytes are "
                   f"not those of the division {division!r} for "
                   f"TRAIN_SEQ_LEN={seed['settings']['TRAIN_SEQ_LEN']}")
    for split in ("train", "val"):
        pinned = seed["table"].get(f"{split}_shards_sha256")
        logged = [digest for file, digest in seed["data_sha256"].items() if f"_{split}_" in file]
        if pinned and (seed["data_sha256"] or "train_shards_sha256" in seed["table"]):
            findings.check(logged == pinned,
                           f"the {split} shards that the log names are not those of the division")


def other_seeds(folder: Path, other: str, division: str, findings: Findings) -> list[dict]:
    """Return the seeds of another record of the same track and division, which must be valid; [] for ""."""
    if not other:
        return []
    place = folder.parent.parent / other
    track = folder.parent.name
    is_other = re.fullmatch(rf"{re.escape(track)}/{FOLDER_NAME.pattern}", other) and place != folder
    if not findings.check(is_other and (place / "submission.json").is_file(),
                          f"{other!r} is not another record of this track (example: {track}/2026-01-31_Name)"):
        return []
    theirs = load_json(place / "submission.json")["division"]
    findings.check(theirs == division, f"{other} is of the division {theirs!r}")
    broken = Findings()
    seeds = read_folder(place, division, broken)
    check_rules(load_track(place), division, seeds, broken)
    findings.check(not broken and seeds, f"{other} is refused itself: {'; '.join(broken)[:300]}")
    return seeds


# ---- Claims ----------------------------------------------------------------------------------------------


def make_claims(folder: Path, authored: dict, seeds: list[dict], findings: Findings) -> dict:
    """Return everything in submission.json that the logs decide."""
    track = load_track(folder)
    division = authored["division"]
    best = find_incumbent(folder, authored)
    incumbent = f"{folder.parent.name}/{best['date']}_{best['name']}" if best else ""
    base = other_seeds(folder, authored["base"], division, findings)
    rivals = base if incumbent == authored["base"] else other_seeds(folder, incumbent, division, findings)
    against = compare_scores(track, seeds, rivals)
    first = seeds[0]
    per_seed = ("val_loss", "val_bpb", "val_bpb_original", "val_bpb_before_export", "steps", "train_seconds",
                "eval_seconds", "wall_seconds", "artifact_bytes", "artifact_sha256", "bytes_total", "resumed")
    claims = {key: statistics.mean(seed[key] for seed in seeds) for key in ("val_loss", "val_bpb")}
    claims |= {f"{key}_std": deviation([seed[key] for seed in seeds]) for key in ("val_loss", "val_bpb")}
    originals = [seed["val_bpb_original"] for seed in seeds]
    return {
        **claims, "val_bpb_original": None if None in originals else statistics.mean(originals),
        "bytes_total": max(seed["bytes_total"] for seed in seeds), "bytes_code": first["code_bytes"],
        "script_sha256": first["code_sha256"], "parameters": first["parameters"],
        "seeds": [seed["seed"] for seed in seeds],
        "seed_results": {str(seed["seed"]): {key: seed[key] for key in per_seed} for seed in seeds},
        "settings": first["overrides"], "changes": changes(base, first),
        "significance": compare_scores(track, seeds, base),
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


def leaves(value: object, place: str) -> dict[str, object]:
    """Return the texts and numbers of nested claims by their places."""
    if not isinstance(value, dict) or not value:
        return {place: value}
    return {where: leaf for key, item in value.items()
            for where, leaf in leaves(item, f"{place}: {key}").items()}


def compare_claims(submission: dict, computed: dict, findings: Findings) -> None:
    """Everything in submission.json that its author did not write must be what the logs give."""
    claims = {key: value for key, value in submission.items() if key not in AUTHORED}
    claimed = leaves(claims, "submission.json")
    wanted = leaves(computed, "submission.json")
    for place in sorted(claimed.keys() | wanted.keys()):
        claim, number = claimed.get(place, "nothing"), wanted.get(place, "nothing")
        are_numbers = isinstance(number, float) and isinstance(claim, int | float)
        equal = is_close(claim, number, ROUNDING) if are_numbers else claim == number
        findings.check(equal, f"{place} is {claim!r}, but the logs give {number!r}")


def describe_test(test: dict) -> str:
    """Return a difference and its test in words."""
    ours, theirs = test["n"]
    return (f"{test['difference']:+.5f} bits per byte; one-sided Welch t-test of {ours} against {theirs} seeds "
            f"for a difference of more than {test['margin']:g}: p = {test['p']:.2g}.")


def count_seeds(seeds) -> str:
    """Return the number of seeds in words."""
    return f"{len(seeds)} seed{'s' if len(seeds) != 1 else ''}"


def render(claims: dict) -> str:
    """Return README.md up to its notes, from submission.json."""
    results = {seed: claims["seed_results"][str(seed)] for seed in claims["seeds"]}
    original = claims["val_bpb_original"]
    lines = [f"# {claims['name'].replace('_', ' ')}: {score(claims):.4f} bits per byte", ""]
    text = (f"Mean of {count_seeds(results)}, sample deviation {claims['val_bpb_std']:.4f} bits per byte; "
            f"{claims['val_loss']:.4f} ± {claims['val_loss_std']:.4f} nats per token. The score is that of "
            f"the artifact as read back from its file. At most {claims['bytes_total']:,} bytes, "
            f"{claims['bytes_code']:,} of them code; {claims['parameters']:,} parameters.")
    if original not in (None, claims["val_bpb"]):
        text += (f" The tokenizer changes the text: {claims['val_bpb']:.4f} bits per byte of the text as "
                 f"tokenized, which is the published convention, and {original:.4f} per byte of the original "
                 "text.")
    rows = [[seed, f"{r['val_bpb']:.5f}", f"{r['val_bpb_before_export']:.5f}", f"{r['val_loss']:.5f}",
             f"{r['steps']:,}", f"{r['train_seconds']:.1f}", f"{r['eval_seconds']:.1f}",
             f"{r['wall_seconds']:.1f}", f"{r['artifact_bytes']:,}", f"{r['bytes_total']:,}"]
            for seed, r in results.items()]
    lines += [text, "", claims["blurb"], "",
              *table("| seed | val_bpb | before export | val_loss | steps | training, s | evaluation, s | "
                     "total, s | artifact, bytes | with code |", rows)]
    resumed = [str(seed) for seed, r in results.items() if r["resumed"]]
    lines += ["", f"Resumed: {', '.join(resumed)}."] if resumed else []
    lines += ["", "![curves of the seeds](curve.png)", ""]
    lines += ["## The best before it", claims["incumbent"] or "None."]
    lines += ["", describe_test(claims["against_incumbent"])] if claims["against_incumbent"] else []
    lines += ["", "This is a new best." if claims["is_best"] else "This is not a new best."]
    lines += ["", f"## Changes from {claims['base'] or 'the defaults'}"]
    is_repeated = claims["base"] == claims["incumbent"]
    lines += [describe_test(claims["significance"]), ""] if claims["significance"] and not is_repeated else [""]
    if claims["base"]:
        rows = [[name, *values] for name, values in claims["changes"].items()]
        lines += table("| | base | this record |", rows)
        is_changed = "train_gpt.py" in claims["changes"]
        lines += ["", f"`train_gpt.py`: {'changed, see `script.diff`' if is_changed else 'unchanged'}."]
    else:
        lines += table("| | this record |", claims["settings"].items())
    environment = claims["environment"]
    processes = f"{environment['world_size']} process{'es' if environment['world_size'] > 1 else ''}"
    lines += ["", "## Command", "", f"    {claims['command']}", "", "## Environment",
              f"{claims['hardware']}; {processes}, {environment['threads']} threads each; "
              f"Python {environment['python']}, PyTorch {environment['torch']}. "
              f"Division: {claims['division'] or 'none'}."]
    return "\n".join(lines) + "\n" + NOTES


# ---- The folder ------------------------------------------------------------------------------------------


def check_files(folder: Path, seeds: list[dict], findings: Findings) -> None:
    """The folder must have its files and no others; artifacts, needed if small, must be those of the logs."""
    for path in sorted(folder.iterdir()):
        known = path.name in OTHER_FILES or SEED_FILE.fullmatch(path.name)
        findings.check(known and path.is_file() and not path.is_symlink(),
                       f"{path.name} does not belong in a record")
    for name in ("README.md", "curve.png"):
        findings.check((folder / name).is_file(), f"{name} is missing")
    for seed in seeds:
        path = folder / f"artifact_seed{seed['seed']}.int8.ptz"
        if path.is_file() or seed["artifact_bytes"] < SMALL_ARTIFACT:
            check_artifact(path, seed, findings)


def check_artifact(path: Path, seed: dict, findings: Findings) -> bool:
    """Return whether the file is there and is the artifact of the log."""
    if not findings.check(path.is_file(), f"{path.name} is missing: artifacts under 2 MB belong in the folder, "
                          "and --artifacts DIR names the folder of larger ones"):
        return False
    digest = sha256(path.read_bytes()).hexdigest()
    found = (path.stat().st_size, digest)
    return findings.check(found == (seed["artifact_bytes"], seed["artifact_sha256"]),
                          f"{path.name} is not the artifact of the log: {found[0]} bytes, sha256 {digest}")


def check_paths(folder: Path, findings: Findings) -> None:
    """Nothing that people read, and no setting, may have an absolute path."""
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".jsonl", ".md", ".log"):
            text = path.read_text(encoding="utf-8")
            below = text.rsplit("\n" + RULE + "\n", 1)[-1]  # the source and the machine are above the rules
            lines = [line for line in below.splitlines() if not line.startswith("warning:")]
            hits = sorted({match[1] for line in lines for match in ABSOLUTE_PATH.finditer(line)})
            findings.check(not hits, f"{path.name}: absolute paths {hits[:3]}")


def check_texts(folder: Path, submission: dict, findings: Findings) -> None:
    """README.md and script.diff must be what submission.json and the scripts give."""
    stored = folder / "script.diff"
    text = stored.read_text(encoding="utf-8") if stored.is_file() else ""
    findings.check(text == script_difference(folder, submission["base"]), "script.diff is not the difference "
                   "between the base's train_gpt.py and this one; records/submit.py --again rewrites it")
    text = (folder / "README.md").read_text(encoding="utf-8")
    findings.check(text.startswith(render(submission)), "README.md: the part above the notes does not follow "
                   "from submission.json; records/submit.py --again rewrites it")


# ---- Scoring again ---------------------------------------------------------------------------------------


def check_data(seed: dict, findings: Findings) -> None:
    """The shards and the tokenizer on this disk must be those that the division pins. The digests in a log come
    from manifest.json, which can say anything, so the files themselves are hashed."""
    settings = seed["settings"]
    data_path = ROOT / settings["DATA_PATH"]
    for split in ("train", "val"):
        if pinned := seed["table"].get(f"{split}_shards_sha256"):
            paths = sorted(data_path.glob(f"*_{split}_[0-9]*.bin"))
            found = [sha256(path.read_bytes()).hexdigest() for path in paths]
            findings.check(found == pinned, f"DATA_PATH={settings['DATA_PATH']}: the {split} shards on this "
                           "disk are not the division's")
    tokenizer = ROOT / settings["TOKENIZER_PATH"]
    if pinned := seed["table"].get("tokenizer_sha256"):
        found = sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.is_file() else ""
        findings.check(found == pinned, f"TOKENIZER_PATH={settings['TOKENIZER_PATH']} on this disk is not the "
                       "division's tokenizer")


def scored_data(start: dict) -> tuple:
    """Return a "config" event's or a seed's validation tokens and bytes, and the digests of the shards."""
    digests = {file: digest for file, digest in start.get("data_sha256", {}).items() if "_val_" in file}
    return start["val_tokens"], start["val_bytes"], digests


def rerun(folder: Path, seed: dict, artifacts: Path, findings: Findings) -> str:
    """Score an artifact in a new process with the folder's train_gpt.py and the log's settings; return a line
    about it."""
    number = seed["seed"]
    artifact = artifacts / f"artifact_seed{number}.int8.ptz"
    if not check_artifact(artifact, seed, findings):
        return f"seed {number}: not scored"
    name = secrets.token_hex(8)  # unknown to the script, so that it cannot behave differently here
    settings = {key: str(value) for key, value in seed["overrides"].items()
                if key not in ("EVAL_STRIDE", "EVAL_SEQ_LEN")}  # of a second score, which is not compared
    settings |= {"ITERATIONS": "0", "INIT_FROM": str(artifact.resolve()), "RUN_ID": name, "OUT_DIR": name,
                 "SEED": str(number), "DTYPE": seed["settings"]["DTYPE"], "COMPILE": "0"}
    for key in ("DATA_PATH", "TOKENIZER_PATH"):
        path = ROOT / seed["settings"][key]
        if path.exists():
            settings[key] = str(path)
    kept = ("PATH", "HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "TIKTOKEN_CACHE_DIR")
    environment = {key: os.environ[key] for key in kept if key in os.environ}
    environment["OMP_NUM_THREADS"] = str(seed["threads"])
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, str((folder / "train_gpt.py").resolve())]
        command += [f"{key}={text}" for key, text in settings.items()]
        result = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True,
                                check=False)
        log = Path(place, "logs", f"{name}.jsonl")
        events = read_events(log) if log.is_file() else []
    scored = next((event for event in events if event["event"] == "val"), None)
    output = result.stderr or result.stdout
    if not findings.check(scored is not None, f"seed {number}: scoring failed: {output[-300:]}"):
        return f"seed {number}: not scored"
    findings.check(scored_data(events[0]) == scored_data(seed),
                   f"seed {number}: DATA_PATH or TOKENIZER_PATH on this disk are not those of the log")
    difference = scored["val_bpb"] - seed["val_bpb"]
    findings.check(abs(difference) <= RERUN_BPB,
                   f"seed {number}: the artifact scores {scored['val_bpb']:.8f}, not {seed['val_bpb']:.8f}")
    return (f"seed {number}: scored again {scored['val_bpb']:.8f}, in the log {seed['val_bpb']:.8f}, "
            f"{difference:+.1e}")


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


def verify_record(folder: Path, again: bool = False,
                  artifacts: Path | None = None) -> tuple[Findings, list[str]]:
    """Return the findings and lines to print about one record folder. `again` scores its artifacts."""
    findings = Findings()
    track = load_track(folder)
    findings.check(FOLDER_NAME.fullmatch(folder.name),
                   f"{folder.name} must be DATE_Name (example: 2026-01-31_Wider)")
    submission = read_submission(folder, findings)
    seeds = read_folder(folder, submission.get("division", ""), findings) if not findings else []
    if findings:
        return findings, []
    computed = make_claims(folder, submission, seeds, findings)
    compare_claims(submission, computed, findings)
    check_rules(track, submission["division"], seeds, findings)
    check_files(folder, seeds, findings)
    check_paths(folder, findings)
    if not findings:
        check_texts(folder, submission, findings)
    notes = [f"{score(computed):.5f} ± {computed['val_bpb_std']:.5f} bits per byte, {count_seeds(seeds)}, at "
             f"most {computed['bytes_total']:,} bytes; a new best: {'yes' if computed['is_best'] else 'no'}"]
    tests = {submission["base"]: computed["significance"], computed["incumbent"]: computed["against_incumbent"]}
    notes += [f"against {other}: {describe_test(test)}" for other, test in tests.items() if test]
    if again:
        check_data(seeds[0], findings)  # the seeds have the same settings
        notes += [rerun(folder, seed, artifacts or folder, findings) for seed in seeds]
    return findings, notes


def verify_ladder(folder: Path) -> tuple[Findings, list[str]]:
    """Return the findings about a ladder: its logs must be of its rungs, and its README.md must follow."""
    findings = Findings(ladder.check_rungs(folder))
    findings.check((folder / "README.md").read_text(encoding="utf-8") == ladder.report(folder),
                   "README.md does not follow from the logs; records/ladder.py --report FOLDER prints it")
    check_paths(folder, findings)
    return findings, []


def report(folder: Path, again: bool = False, artifacts: Path | None = None) -> bool:
    """Print what is found about a record or a ladder; return whether it is accepted."""
    try:
        if folder.parent.name == "track_speedup_ladder":
            findings, notes = verify_ladder(folder)
        else:
            findings, notes = verify_record(folder, again, artifacts)
    except Exception as error:  # one folder must not hide the others
        findings, notes = Findings([f"{type(error).__name__}: {error}"]), []
    print(f"{folder.parent.name}/{folder.name}: {'refused' if findings else 'accepted'}")
    for line in (*notes, *(f"REFUSED: {finding}" for finding in findings)):
        print("   ", line)
    return not findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="record folders (default: all)")
    parser.add_argument("--rerun", action="store_true",
                        help="hash the data and score the artifacts again; runs the folder's train_gpt.py")
    parser.add_argument("--artifacts", type=Path, metavar="DIR",
                        help="folder of artifacts that are too large for git")
    options = parser.parse_args()
    require_packages()
    folders = options.folders or record_folders(ROOT / "records")
    accepted = [report(folder.resolve(), options.rerun, options.artifacts) for folder in folders]
    sys.exit(0 if all(accepted) else 1)


if __name__ == "__main__":
    main()
