"""What counts as a record: rules for its logs, its seeds and its track. They only read files.

They catch mistakes. They do not catch lies: a person reads a record's script before the record is merged.
"""

import json
import math
import re
from contextlib import suppress
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path

from common import load_json, score  # first: it finds the reader of logs

from events import MAY_DIFFER_BETWEEN_SEEDS, RULE, read_events

FOLDER_NAME = re.compile(r"\d{4}-\d{2}-\d{2}_[A-Za-z0-9][A-Za-z0-9_.-]*")
HICCUP_S = 1  # a run may pass its cap by an average step and this much
MUST_MATCH_BETWEEN_SEEDS = ("world_size", "threads", "torch", "python", "val_tokens", "val_bytes", "parameters",
                            "data_sha256", "gpu")
NUMBER = (int, float)
NEEDED_BY_OTHERS = {"track": str, "division": str, "machine": str, "date": str, "name": str, "author": str, "hardware": str,
                    "val_bpb": NUMBER, "seed_results": dict, "bytes_total": int, "against_incumbent": (dict, type(None)),
                    "is_best": bool, "settings": dict, "seeds": list, "script_sha256": str}
MAY_BE_MISSING = {"submitted": str, "val_bpb_original": (*NUMBER, type(None))}


class Findings(list):
    """The reasons for which a folder is refused, as lines of text."""

    def check(self, holds: object, text: str) -> bool:
        """Add `text` unless `holds`; return whether it holds."""
        if not holds:
            self.append(text)
        return bool(holds)


# ---- The seeds of a folder -----------------------------------------------------------------------------


def script_line(source: str) -> str:
    """Return what stands for a script in the text logs of a record, beside which the script itself lies once."""
    return f"train_gpt.py of SHA-256 {sha256(source.encode('utf-8')).hexdigest()}"


def read_seed(path: Path, source: str, findings: Findings) -> dict | None:
    """Return the numbers of one seed from its two logs, train_seedN.log and .jsonl; None if there are none."""
    name = path.stem
    try:
        script, machine, text = path.read_text(encoding="utf-8").split("\n" + RULE + "\n", 2)
        events = read_events(path.with_suffix(".jsonl"))
        seed = summarize(events, machine, text)
    except (OSError, ValueError, LookupError, TypeError) as error:
        findings.append(f"{name}: a log is missing, unfinished or damaged: {type(error).__name__}: {error}")
        return None
    losses = [event[key] for event in events for key in ("train_loss", "val_loss") if key in event]
    if not findings.check(None not in losses, f"{name}: a loss is not finite"):  # the trainer logs null
        return None
    findings.check(script == script_line(source), f"{name}.log: its first line must be {script_line(source)!r}")
    code = source.encode("utf-8")
    findings.check((seed["code_bytes"], seed["code_sha256"]) == (len(code), sha256(code).hexdigest()),
                   f"{name}: code_bytes and code_sha256 are not train_gpt.py's")
    findings.check(name == f"train_seed{seed['seed']}", f"{path.name} has SEED={seed['seed']}")
    resumed = any(event["event"] == "resume" for event in events)
    findings.check(seed["losses"] and not resumed, f"{name}: a record is one run from its first step to its end")
    bits = seed["val_loss"] * seed["val_tokens"] / math.log(2) / seed["val_bytes"]
    findings.check(math.isclose(seed["val_bpb"], bits, rel_tol=1e-9),
                   f"{name}: val_bpb {seed['val_bpb']} is not val_loss * tokens / (ln 2 * bytes) = {bits}")
    return seed


def summarize(events: list[dict], machine: str, text: str) -> dict:
    """Return a seed's numbers that rules and claims are about. `machine` and `text` are the second and third part of its
    text log. Raises LookupError or TypeError if something is missing."""
    last = {event["event"]: event for event in events}
    val = last["val"]
    seed = {"data_sha256": None, **last["config"], **last["export"], **last["final"]}
    settings = seed["config"]
    overrides = {key: settings[key] for key in sorted(seed["overrides"]) if key not in MAY_DIFFER_BETWEEN_SEEDS}
    scored = [last[kind]["eval_time_ms"] for kind in ("windows", "final") if kind in last]  # twice with EVAL_STRIDE
    return {
        **seed, "seed": settings["SEED"], "settings": settings, "overrides": overrides, "machine": machine,
        "losses": [event["train_loss"] for event in events if event["event"] == "train"],
        "val_bpb_before_export": val["val_bpb"], "steps": seed["step"],
        "train_seconds": val["train_time_ms"] / 1000, "eval_seconds": sum(scored) / 1000,
        "wall_seconds": seed["elapsed_s"], "export_seconds": last["export"]["elapsed_s"] - val["elapsed_s"],
        "bytes_total": seed["artifact_bytes"] + seed["code_bytes"],
        "python": re.search(r"Running Python (\S+)", machine)[1],
        "parameters": int(re.search(r"^model_params:(\d+)", text, re.M)[1])}


def load_track(folder: Path) -> dict:
    """Return the rules of a folder's track, on top of those of the track that it is "like". Raises ValueError without one."""
    path = folder.parent / "track.json"
    if not path.is_file():
        raise ValueError(f"{folder} is not in a track: {path} is missing")
    track = load_json(path)
    return load_json(path.parent.parent / track["like"] / "track.json") | track if "like" in track else track


def read_folder(folder: Path, division: str, findings: Findings) -> list[dict]:
    """Return the seeds of a record folder, each as summarize gives it, with the division's "table"
    for its tokenizer, and "val_bpb_original", bits per byte of the original text (None if not known)."""
    script = folder / "train_gpt.py"
    links = [path.name for path in folder.iterdir() if path.is_symlink()]  # make.py --again would write where they lead
    findings.check(not links, f"{', '.join(links)} must be files, not links")
    if links or not findings.check(script.is_file(), "train_gpt.py is missing"):
        return []
    source = script.read_text(encoding="utf-8")
    logs = sorted(folder.glob("train_seed*.log"))
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
    """Seeds must be runs of the same settings in the same place."""
    for seed in seeds[1:]:
        ours, theirs = seeds[0]["settings"], seed["settings"]
        names = [name for name in sorted(ours.keys() | theirs.keys())
                 if name not in MAY_DIFFER_BETWEEN_SEEDS and ours.get(name) != theirs.get(name)]
        names += [name for name in MUST_MATCH_BETWEEN_SEEDS if seed[name] != seeds[0][name]]
        findings.check(not names, f"seed {seed['seed']} differs in {', '.join(names)} from seed {seeds[0]['seed']}")


def find_table(scored: dict[str, dict], seed: dict) -> dict:
    """Return the tokenizer's table that has the seed's counts of validation tokens and bytes; {} if none has."""
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
    findings.check(not divisions or division in divisions, f"division {division!r} must be one of {', '.join(divisions)}")
    rooted = [key for key, value in settings.items() if str(value).startswith(("/", "~", ".."))]
    findings.check(not rooted, f"{', '.join(rooted)} must be relative to the repository")
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
                   "max_export_seconds": seed["export_seconds"], "max_world_size": seed["world_size"],
                   "max_threads": seed["threads"] * seed["world_size"]}
        for rule, amount in amounts.items():
            limit = track.get(rule, math.inf)
            reasons.check(amount <= limit, f"{rule.removeprefix('max_')} is {amount:,.9g}, more than {limit:,}")
        seconds, limit = seed["train_seconds"], track.get("max_train_seconds", math.inf)
        slack = seconds / max(1, seed["steps"]) + HICCUP_S
        reasons.check(seconds <= limit + slack, f"{seconds:.1f} s of training pass the cap by more than the last step")
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
                   f"not those of the division {division!r} for TRAIN_SEQ_LEN={seed['settings']['TRAIN_SEQ_LEN']}")
    for split in ("train", "val"):
        pinned = seed["table"].get(f"{split}_shards_sha256")
        logged = [digest for file, digest in (seed["data_sha256"] or {}).items() if fnmatchcase(file, f"*_{split}_[0-9]*.bin")]
        findings.check(not pinned or logged == pinned, f"the {split} shards are not those of the division")
    pinned = seed["table"].get("tokenizer_sha256")
    findings.check(not pinned or seed["settings"]["TOKENIZER_SHA256"] == pinned,
                   "the tokenizer is not the division's")


# ---- Other records -------------------------------------------------------------------------------------


def read_history(records: Path) -> list[dict]:
    """Return the lines of history.jsonl: records whose folders are in git alone, at the `commit` that a line names."""
    path = records / "history.jsonl"
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    except ValueError as error:
        raise ValueError(f"{path} has a line that is not JSON: {error}") from None


def read_submission(path: Path) -> dict:
    """Return a record's submission.json. Raises ValueError if it is damaged in what others need of it, and OSError."""
    submission = load_json(path)
    wrong = find_wrong(submission, NEEDED_BY_OTHERS)
    if not wrong:
        wrong += find_wrong({"submitted": "", "val_bpb_original": None, **submission}, MAY_BE_MISSING)
        seeds, test = submission["seed_results"].values(), submission["against_incumbent"]
        if not seeds or any(find_wrong(seed, {"val_bpb": NUMBER, "val_loss": NUMBER}) for seed in seeds):
            wrong.append("seed_results")
        if test and find_wrong(test, {"difference": NUMBER, "p": (*NUMBER, type(None))}):
            wrong.append("against_incumbent")
    if wrong:
        raise ValueError(f"{path} is damaged in {', '.join(wrong)}: records/make.py --again FOLDER writes it again")
    return submission


def find_wrong(values: object, kinds: dict) -> list[str]:
    """Return the names in `kinds` whose values are missing or of another kind, or not finite."""
    if not isinstance(values, dict):
        return [*kinds]
    found = {name: values.get(name, ...) for name in kinds}
    infinite = {name for name, value in found.items() if isinstance(value, float) and not math.isfinite(value)}
    return [name for name, kind in kinds.items() if not isinstance(found[name], kind) or name in infinite]


def read_submissions(track: Path) -> list[dict]:
    """Return the submission.json of each record in a track's folder, but not of damaged ones: verify.py refuses these alone."""
    found = []
    for path in track.glob("*/submission.json"):
        with suppress(ValueError, OSError):
            found.append(read_submission(path))
    return found


def place_of(submission: dict) -> str:
    """Return TRACK/DATE_NAME of a record."""
    return f"{submission['track']}/{submission['date']}_{submission['name']}"


def kind_of(submission: dict) -> tuple[str, str, str]:
    """Return track, division and machine, within which records compete."""
    return submission["track"], submission["division"], submission["machine"]


def best_before(folder: Path, submission: dict, machine: str) -> dict | None:
    """Return the best earlier record of the same track, division and kind of machine: its submission.json or its line of
    history.jsonl, taken at its word. The first of equals wins."""
    def order(record: dict) -> tuple:
        return record["date"], record.get("submitted", ""), record["name"]

    others = read_submissions(folder.parent) + read_history(folder.parent.parent)
    ours = kind_of({**submission, "machine": machine})
    rivals = [other for other in others if kind_of(other) == ours and order(other) < order(submission)]
    return min(rivals, key=lambda other: (score(other), order(other)), default=None)


def load_base(folder: Path, base: str, division: str, findings: Findings) -> dict:
    """Return the submission.json of the record that this one changes, and all its settings as "config"; {} for ""."""
    if not base:
        return {}
    place = folder.parent.parent / base
    is_other = place.parent == folder.parent and place != folder and (place / "submission.json").is_file()
    if not findings.check(is_other, f"{base!r} is not another record of {folder.parent.name}"):
        return {}
    submission = read_submission(place / "submission.json")
    findings.check(submission["division"] == division, f"{base} is of the division {submission['division']!r}")
    log = place / f"train_seed{submission['seeds'][0]}.jsonl"
    return {**submission, "config": read_events(log)[0]["config"]}
