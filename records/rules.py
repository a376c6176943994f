"""What counts as a record: rules for its script, its logs, its seeds and its track. They only read files.

A script is one readable file whose text shows its behaviour. The lists below catch mistakes and simple tricks; they are not a
sandbox. A person reads the changes to the script before a record is merged.
"""

import ast
import itertools
import json
import math
import re
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from common import load_json, score  # first: it finds the reader of logs

from events import MAY_DIFFER_BETWEEN_SEEDS, RULE, read_events

FOLDER_NAME = re.compile(r"\d{4}-\d{2}-\d{2}_[A-Za-z0-9][A-Za-z0-9_.-]*")

PACKAGES = {"torch", "numpy", "sentencepiece", "tiktoken"}
# Of the standard library, what trainers use.
MODULES = set("""__future__ abc argparse base64 bisect bz2 collections contextlib copy ctypes dataclasses datetime difflib enum
    errno fcntl fractions functools gc glob hashlib heapq inspect io itertools json lzma math operator os pathlib platform queue
    random re secrets shutil signal statistics string struct subprocess sys sysconfig tempfile textwrap threading time traceback
    typing uuid warnings weakref zipfile zlib""".split())  # noqa: SIM905
FORBIDDEN_NAMES = {"exec", "eval", "compile", "__import__", "__builtins__", "__loader__"}
FORBIDDEN = re.compile(
    r"(^|[._])os\.(system|popen|fork|exec|spawn|posix_spawn)|(^|[._])sys\.modules|(^|\.)torch\.(hub|package|jit\.load)"
    r"|(^|\.)(importlib|pickle|builtins|load_library|cpp_extension|aoti_load_package|model_zoo|CodeType|FunctionType|__self__"
    r"|__loader__|__dict__|__globals__)($|\.)")
ONLY_VALUES = {"weights_only": "True", "allow_pickle": "False"}  # else a file can hold code
MOST_LINES = 2500  # a person reads it; its bytes count anyway
LONGEST_LINE = 120  # a longer one can hide data
KEEP_THEIR_NAMES = {"ctypes", "os", "subprocess", "sys", "torch"}  # "import os as x" and "x = os" would hide the names above
# Every mention of these two modules but their import and the calls that a script may make.
OTHER_USES = {
    "subprocess for more than nvidia-smi and scontrol": re.compile(
        r"\bsubprocess\b(?!\.\w+\(\[?'(timeout \d+ )?(nvidia-smi|scontrol)( [\w -]*)?( 2> /dev/null)?'((, '[\w =,./-]*')*\])?"
        r"(, (capture_output|text|check|timeout)=\w+)*\))"),
    "ctypes for more than mallopt": re.compile(r"\bctypes\b(?!\.CDLL\(None\)\.mallopt\(-?\d+, -?\d+\))"),
}

# Slack, and why
ROUNDING = 1e-9  # sums of the same floats in another order
RATE_ROUNDING = 1e-6  # relative; the clock of two events is a difference of large floats
CLOCK_SHARE = 0.05  # the wall clock includes logging
CLOCK_MS = 250  # a slow disk under the log
LONGEST_STEP_S = 10  # else a log of two steps would allow twice the time
LAST_MS = 1000  # a run may pass the cap by an average step and this much for a hiccup
EVALUATION_SECONDS = 10  # between export and score the artifact is read back and sent to all ranks
PAUSES_S = 60  # validations may stop the clock by more than their number times the final score's, to compile and to write
EXPORT_S = 120  # from the last validation to the export; a 16 MB model on an H100 is rounded for 25 s
LONGEST_SETTING, LONGEST_SETTINGS = 200, 8000  # characters of one and of all, whose bytes are not counted
UNSAFE, HTML = set("|\n\r<>"), set("<>")  # they break a table, or hide what follows
BETTER_BY_EXPORT = 0.01  # nats: rounding weights to int8 may improve the loss by chance, but by less than this
MUST_MATCH_BETWEEN_SEEDS = ("world_size", "threads", "torch", "python", "val_tokens", "val_bytes", "parameters",
                            "data_sha256", "gpu")


class Findings(list):
    """The reasons for which a folder is refused, as lines of text."""

    def check(self, holds: object, text: str) -> bool:
        """Add `text` unless `holds`; return whether it holds."""
        if not holds:
            self.append(text)
        return bool(holds)


def is_close(a: float, b: float, tolerance: float) -> bool:
    """Whether two finite numbers are equal up to `tolerance`, relative above 1 and absolute below."""
    return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= tolerance * max(1.0, abs(a), abs(b))


# ---- The script ----------------------------------------------------------------------------------------


@lru_cache  # many records have the same script
def check_script(source: str) -> tuple[str, ...]:
    """Return what is wrong with a script that must be one readable file: length, imports, what it can hide."""
    lines = len(source.splitlines())
    findings = Findings()
    findings.check(lines <= MOST_LINES, f"train_gpt.py has {lines:,} lines, more than {MOST_LINES:,}")
    shown = source.replace("\n", "")
    findings.check(shown.isascii() and shown.isprintable() and not re.search(r"\A(.*\n)?[ \t]*#.*coding[:=]", source),
                   "train_gpt.py has other characters than printable ASCII, or names a coding")
    longest = max(map(len, source.splitlines()), default=0)
    findings.check(longest <= LONGEST_LINE, f"train_gpt.py has a line of {longest} characters, more than {LONGEST_LINE}")
    try:
        tree = ast.parse(source)
        text = re.sub(r"(?m)^ *import [\w, ]+$", "", ast.unparse(tree))  # without comments
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return (*findings, f"train_gpt.py is not Python: {error}")
    imported, hidden = set(), {use for use, pattern in OTHER_USES.items() if pattern.search(text)}
    with_members = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
            hidden |= {f"{alias.name} as {alias.asname}" for alias in node.names
                       if alias.asname and alias.name in KEEP_THEIR_NAMES}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            imported |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
            hidden |= {f"{module}.{alias.name}" for alias in node.names if alias.name in {"*", *KEEP_THEIR_NAMES}}
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = ast.unparse(node)
            if name in FORBIDDEN_NAMES or FORBIDDEN.search(name):
                hidden.add(name)
            last = name.rpartition(".")[2].lstrip("_")
            if last in KEEP_THEIR_NAMES - {"torch"} and id(node) not in with_members:  # getattr(torch, ...) is common
                hidden.add(f"{name} as a value")
        elif isinstance(node, ast.keyword) and (value := ast.unparse(node.value)) != ONLY_VALUES.get(node.arg, value):
            hidden.add(f"{node.arg}={value}")
    foreign = {name.split(".")[0] or "." for name in imported} - MODULES - PACKAGES
    findings.check(not foreign, f"train_gpt.py imports {', '.join(sorted(foreign))}, which is not counted or can load code")
    hidden |= {name for name in imported if FORBIDDEN.search(name)}
    findings.check(not hidden, f"train_gpt.py uses {', '.join(sorted(hidden))}, which can hide code")
    return tuple(findings)


# ---- The log of a seed ---------------------------------------------------------------------------------


def check_steps(name: str, events: list[dict], findings: Findings) -> None:
    """Training must be logged as train_gpt.py logs it, without a pause: the first ten steps and every TRAIN_LOG_EVERY."""
    every = events[0]["config"]["TRAIN_LOG_EVERY"]
    logged = {event["step"] for event in events if event["event"] == "train"}
    resumed = any(event["event"] == "resume" for event in events)
    findings.check(not resumed, f"{name}: a record is one run from its first step to its end")
    steps = events[-1]["step"]
    due = itertools.chain(range(1, min(steps, 10) + 1), range(10 // every * every + every, steps + 1, every) if every else ())
    missing = list(itertools.islice((step for step in due if step not in logged), 3))  # a forged number of steps is endless
    findings.check(logged and not missing, f"{name}: training steps {missing} are not in the log")


def evaluation_seconds(last: dict[str, dict]) -> float:
    """Return how long a run scored its artifact, with EVAL_STRIDE or EVAL_SEQ_LEN twice; `last` has its last events."""
    return sum(last[kind]["eval_time_ms"] for kind in ("windows", "final") if kind in last) / 1000


def check_clock(name: str, events: list[dict], findings: Findings) -> None:
    """Steps, training clock and wall clock must advance together, and the speed must follow from them."""
    config = events[0]["config"]
    last = {event["event"]: event for event in events}
    wall_s = [event["elapsed_s"] for event in events]
    findings.check(wall_s == sorted(wall_s), f"{name}: the wall clock goes backwards")
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
            wall_ms = 1000 * (after["elapsed_s"] - before["elapsed_s"])
            ms = after["train_time_ms"] - before["train_time_ms"]
            findings.check(abs(wall_ms - ms) <= CLOCK_SHARE * wall_ms + CLOCK_MS, f"{name}: step {after['step']}: "
                           f"{ms:.0f} ms of training, but {wall_ms:.0f} ms of the wall clock")
    if trained:
        first, end = trained[0], last["val"]
        findings.check(end["train_time_ms"] >= trained[-1]["train_time_ms"] - LAST_MS,
                       f"{name}: the last validation is earlier than the last step")
        pauses = sum(event["event"] == "val" and event["step"] >= first["step"] for event in events)
        stood_s = end["elapsed_s"] - first["elapsed_s"] - (end["train_time_ms"] - first["train_time_ms"]) / 1000
        most_s = pauses * last["final"]["eval_time_ms"] / 1000 + PAUSES_S
        findings.check(stood_s <= most_s, f"{name}: the training clock stood still for {stood_s:.1f} s, but "
                       f"{pauses} validations explain {most_s:.1f} s at most")
    seconds = evaluation_seconds(last)
    room = last["final"]["elapsed_s"] - last["export"]["elapsed_s"]
    findings.check(0.5 * room - EVALUATION_SECONDS <= seconds <= room + 0.5 and seconds >= 0,
                   f"{name}: {seconds:.1f} s of evaluation, but {room:.1f} s of the wall clock between export and score")


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


def script_line(source: str) -> str:
    """Return what stands for a script in the text logs of a record, beside which the script itself lies once."""
    return f"train_gpt.py of SHA-256 {sha256(source.encode('utf-8')).hexdigest()}"


def read_seed(path: Path, source: str, findings: Findings) -> dict | None:
    """Return the numbers of one seed from its two logs, train_seedN.log and .jsonl; None if that fails."""
    name = path.stem
    try:
        script, machine, text = path.read_text(encoding="utf-8").split("\n" + RULE + "\n", 2)
        events = read_events(path.with_suffix(".jsonl"))
        starts = [i for i, event in enumerate(events) if event["event"] == "config"]
        findings.check(starts == [0], f"{name}.jsonl must have one config event, its first")
        seed = summarize(events, machine, text)
        for check in (check_scores, check_steps, check_clock):
            check(name, events, findings)
    except Exception as error:  # forged logs can be anything
        findings.append(f"{name}: a log is missing, unfinished or damaged: {type(error).__name__}: {error}")
        return None
    code = source.encode("utf-8")
    findings.check(script == script_line(source), f"{name}.log: its first line must be {script_line(source)!r}")
    findings.check(f"\nRunning PyTorch {seed['torch']}\n" in machine, f"{name}: .log and .jsonl disagree on PyTorch")
    findings.check(name == f"train_seed{seed['seed']}", f"{path.name} has SEED={seed['seed']}")
    findings.check(not UNSAFE & set(f"{seed.get('gpu')}{seed['torch']}{seed['python']}"), f"{name}: GPU or version with | < or >")
    findings.check(not seed["settings"].get("VAL_TOKENS"), f"{name}: VAL_TOKENS scores a part of the validation text")
    findings.check((seed["code_bytes"], seed["code_sha256"]) == (len(code), sha256(code).hexdigest()),
                   f"{name}: code_bytes and code_sha256 are not train_gpt.py's")
    return seed


def summarize(events: list[dict], machine: str, text: str) -> dict:
    """Return a seed's numbers that rules and claims are about. `machine` and `text` are the second and third part of its
    text log. Raises LookupError or TypeError if something is missing."""
    last = {event["event"]: event for event in events}
    val = last["val"]
    seed = {"data_sha256": None, **last["config"], **last["export"], **last["final"]}
    settings = seed["config"]
    overrides = {key: settings[key] for key in sorted(seed["overrides"]) if key not in MAY_DIFFER_BETWEEN_SEEDS}
    return {
        **seed, "seed": settings["SEED"], "settings": settings, "overrides": overrides, "machine": machine,
        "losses": [event["train_loss"] for event in events if event["event"] == "train"],
        "val_bpb_before_export": val["val_bpb"], "steps": seed["step"],
        "train_seconds": val["train_time_ms"] / 1000, "eval_seconds": evaluation_seconds(last),
        "wall_seconds": seed["elapsed_s"], "export_seconds": last["export"]["elapsed_s"] - val["elapsed_s"],
        "bytes_total": seed["artifact_bytes"] + seed["code_bytes"],
        "python": re.search(r"Running Python (\S+)", machine)[1],
        "parameters": int(re.search(r"^model_params:(\d+)", text, re.M)[1])}


# ---- The seeds of a folder -----------------------------------------------------------------------------


def load_track(folder: Path) -> dict:
    """Return the rules of the track that a record folder is in, on top of those of the track that it is "like". Raises
    ValueError if it is in none."""
    path = folder.parent / "track.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not in a track: {path} is missing")
    track = load_json(path)
    return load_json(path.parent.parent / track["like"] / "track.json") | track if "like" in track else track


def read_folder(folder: Path, division: str, findings: Findings) -> list[dict]:
    """Return the seeds of a record folder, each as summarize gives it, with the division's "table"
    for its tokenizer, and "val_bpb_original", bits per byte of the original text (None if not known)."""
    script = folder / "train_gpt.py"
    if not findings.check(script.is_file(), "train_gpt.py is missing"):
        return []
    source = script.read_text(encoding="utf-8")
    findings += check_script(source)
    logs = sorted(path for path in folder.glob("train_seed*.log") if re.fullmatch(r"train_seed\d+", path.stem))
    findings.check(logs, "there is no train_seedN.log")
    seeds = [seed for path in logs if (seed := read_seed(path, source, findings))]
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
    losses = {str(seed["losses"]) for seed in seeds}
    artifacts = {seed["artifact_sha256"] for seed in seeds}
    findings.check(len(set(numbers)) == len(seeds), f"seeds are not different: {numbers}")
    findings.check(len(losses) == len(artifacts) == len(seeds),
                   "two seeds have the same training losses or artifact")
    for seed in seeds[1:]:
        ours, theirs = seeds[0]["settings"], seed["settings"]
        names = [name for name in sorted(ours.keys() | theirs.keys())
                 if name not in MAY_DIFFER_BETWEEN_SEEDS and ours.get(name) != theirs.get(name)]
        names += [name for name in MUST_MATCH_BETWEEN_SEEDS if seed[name] != seeds[0][name]]
        findings.check(not names, f"seed {seed['seed']} differs in {', '.join(names)} from seed {numbers[0]}")


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


# ---- The track -----------------------------------------------------------------------------------------


def check_request(track: dict, division: str, count: int, settings: dict, findings: Findings) -> None:
    """Apply the rules that can be checked before a run: division, number of seeds, settings and cap."""
    least = track.get("min_seeds", 1)
    findings.check(count >= least, f"the track asks for {least} seeds; there are {count}")
    divisions = track.get("divisions", {})
    findings.check(not divisions or division in divisions,
                   f"division {division!r} must be one of {', '.join(divisions)}")
    rooted = [key for key, value in settings.items() if str(value).startswith(("/", "~", ".."))]
    findings.check(not rooted, f"{', '.join(rooted)} must be relative to the repository")
    odd = [key for key, value in settings.items() if len(str(value)) > LONGEST_SETTING or UNSAFE & set(f"{key}{value}")]
    findings.check(not odd, f"{', '.join(odd)} must have at most {LONGEST_SETTING} characters, and no | < or >")
    findings.check(len(str(settings)) <= LONGEST_SETTINGS, f"the settings have more than {LONGEST_SETTINGS} characters")
    for key, values in track.get("settings", {}).items():
        findings.check(settings.get(key) in values, f"{key}={settings.get(key)!r} is not one of {values}")
    if limit := track.get("max_train_seconds"):
        cap = settings["MAX_WALLCLOCK_SECONDS"]
        findings.check(0 < cap <= limit, f"MAX_WALLCLOCK_SECONDS={cap:g} must be more than 0 and at most {limit:g}")


def check_rules(track: dict, division: str, seeds: list[dict], findings: Findings) -> None:
    """Apply every rule of track.json: the limits of the track, its settings and the data of the division."""
    request = Findings()
    for seed in seeds:
        reasons = Findings()
        check_request(track, division, len(seeds), seed["settings"], request)
        amounts = {"max_bytes": seed["bytes_total"], "max_eval_seconds": seed["eval_seconds"],
                   "max_world_size": seed["world_size"], "max_threads": seed["threads"] * seed["world_size"]}
        for rule, amount in amounts.items():
            limit = track.get(rule, math.inf)
            reasons.check(amount <= limit, f"{rule.removeprefix('max_')} is {amount:g}, more than {limit:g}")
        seconds = seed["train_seconds"]
        slack = min(seconds / max(1, seed["steps"]), LONGEST_STEP_S) + LAST_MS / 1000
        reasons.check(seconds <= track.get("max_train_seconds", math.inf) + slack,
                      f"{seconds:.1f} s of training pass the cap by more than the last step, {slack:.1f} s")
        reasons.check("max_train_seconds" not in track or seed["export_seconds"] <= EXPORT_S, "from the last validation to the "
                      f"export, {seed['export_seconds']:.1f} s are more than {EXPORT_S}")
        machine = track.get("machine", "")
        reasons.check(machine in seed["machine"] and machine in (seed.get("gpu") or ""),
                      f"nvidia-smi's output or the name of the GPU has no {machine}")
        if track.get("divisions"):
            check_division(seed, division, reasons)
        findings += [f"seed {seed['seed']}: {reason}" for reason in reasons]
    findings += dict.fromkeys(request)  # each reason once


def check_division(seed: dict, division: str, findings: Findings) -> None:
    """The run must have scored the division's validation split, and trained on its training split if pinned."""
    findings.check(seed["table"], f"{seed['val_tokens']} validation tokens of {seed['val_bytes']} bytes are "
                   f"not those of the division {division!r} for "
                   f"TRAIN_SEQ_LEN={seed['settings']['TRAIN_SEQ_LEN']}")
    for split in ("train", "val"):
        pinned = seed["table"].get(f"{split}_shards_sha256")
        logged = [digest for file, digest in (seed["data_sha256"] or {}).items() if fnmatchcase(file, f"*_{split}_[0-9]*.bin")]
        if pinned:
            findings.check(logged == pinned, f"the {split} shards that the log names are not those of the division")
    if pinned := seed["table"].get("tokenizer_sha256"):
        findings.check(seed["settings"]["TOKENIZER_SHA256"] == pinned, "the tokenizer that the log names is not the division's")


# ---- Other records -------------------------------------------------------------------------------------


def read_history(records: Path) -> list[dict]:
    """Return the lines of history.jsonl: records whose folders are in git alone, at the `commit` that a line names."""
    path = records / "history.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def place_of(submission: dict) -> str:
    """Return TRACK/DATE_NAME of a record."""
    return f"{submission['track']}/{submission['date']}_{submission['name']}"


def earlier_records(folder: Path, submission: dict) -> list[dict]:
    """Return the submissions and the lines of history, of all tracks, that came before this one, the best first, each with
    its "kind", of which it can be the best, and the digests of its "artifacts"."""
    def order(record: dict) -> tuple[str, str, str]:
        return record["date"], record.get("submitted", ""), record["name"]

    others = read_history(folder.parent.parent)
    for path in folder.parent.parent.glob("track_*/*/submission.json"):
        with suppress(OSError, ValueError):  # in a folder that is refused
            others.append(load_json(path))
    earlier = []
    for other in others:
        with suppress(LookupError, TypeError, AttributeError):
            known = {**other, "kind": (other["track"], other["division"], other["machine"]),
                     "artifacts": {result["artifact_sha256"] for result in other["seed_results"].values()}}
            if order(other) < order(submission):
                earlier.append((score(other), order(other), known))
    return [known for _, _, known in sorted(earlier, key=lambda entry: entry[:2])]


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
