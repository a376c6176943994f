"""Check record folders: recompute every number from the logs and apply the rules of the track.

The exit status is 1 if a folder is refused; each reason is a line. --rerun runs the folder's
train_gpt.py, which is the submitter's code: read it first.
"""

import argparse
import json
import math
import re
import statistics
import sys
from fnmatch import fnmatchcase
from hashlib import sha256
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from common import (  # noqa: E402
    ROOT, compare_scores, load_json, require_packages, score, with_deviation,
)
from events import MAY_DIFFER_BETWEEN_SEEDS as MAY_DIFFER  # noqa: E402
from events import RULE, interpreter, prepare_output, read_events  # noqa: E402
from probe import check_artifact, check_clock, read_text  # noqa: E402

SMALL_ARTIFACT = 2_000_000  # bytes; larger ones are not kept in git
HICCUP_S = 1  # a run may pass its cap by an average step and this much
LONGEST_TOKEN = 64  # bytes of text for which the tokens after the last whole row may stand
MUST_MATCH = ("world_size", "threads", "torch", "python", "val_tokens", "val_bytes", "parameters",
              "data_sha256", "gpu")  # between the seeds
# What the author writes in submission.json; the logs decide the rest.
AUTHORED = {"name": "", "author": "", "date": "", "submitted": "", "track": "", "division": "",
            "blurb": "", "base": "", "in_turn": False, "hardware": ""}
OF_SEEDS = ("val_loss", "val_bpb", "val_bpb_original", "val_bpb_before_export", "steps",
            "train_seconds", "eval_seconds", "wall_seconds", "artifact_bytes", "artifact_sha256",
            "bytes_total")


class Findings(list):
    """The reasons for which a folder is refused, as lines of text."""

    def check(self, holds: object, text: str) -> bool:
        """Add `text` unless `holds`; return whether it holds."""
        if not holds:
            self.append(text)
        return bool(holds)


# ---- The seeds of a folder ---------------------------------------------------------------------


def read_seed(path: Path, code: bytes, track: dict, findings: Findings) -> dict | None:
    """Return the numbers of train_seedN.log and .jsonl of a script; None if there are none."""
    name = path.stem
    try:
        script, machine, text = path.read_text(encoding="utf-8").split(f"\n{RULE}\n", 2)
        events = read_events(path.with_suffix(".jsonl"))
        seed = summarize(events, machine, text, track.get("windows", False))
        bits = seed["val_loss"] * seed["val_tokens"] / math.log(2) / seed["val_bytes"]
        slow = check_clock(events)
    except (OSError, ValueError, LookupError, TypeError) as error:  # null: not finite
        findings.append(f"{name}: a log is missing, unfinished or damaged: {error!r}")
        return None
    digest = sha256(code).hexdigest()
    logged = script.split()[-1], seed["code_sha256"], seed["code_bytes"]
    findings.check(logged == (digest, digest, len(code)), f"{name}: its script is not train_gpt.py")
    findings.check(name == f"train_seed{seed['seed']}", f"{path.name} has SEED={seed['seed']}")
    findings.check(not any(event["event"] == "resume" for event in events),
                   f"{name}: it was resumed, but a record is one run from its first step to its end")
    findings.check(not slow, f"{name}: {slow}")
    findings.check(f"val_bpb:{seed['val_bpb']:.8f}" in text, f"{path.name} lacks the score of {name}.jsonl")
    findings.check(math.isclose(seed["val_bpb"], bits, rel_tol=1e-9), f"{name}: val_bpb "
                   f"{seed['val_bpb']} is not val_loss * tokens / (ln 2 * bytes) = {bits}")
    return seed


def summarize(events: list[dict], machine: str, text: str, counts_windows: bool) -> dict:
    """Return a seed's numbers from its events and the second and third part of its text log. Its
    score is that of rows or, where the track counts them and EVAL_STRIDE is set, of windows.
    Raises LookupError or TypeError if something is missing."""
    last = {event["event"]: event for event in events}
    val, settings = last["val"], last["config"]["config"]
    stride = min(settings.get("EVAL_STRIDE", 0) * counts_windows, settings["TRAIN_SEQ_LEN"])
    counted = last["windows"] if stride else last["final"]
    seed = {**last["config"], **last["export"], **counted, "stride": stride}
    names = sorted(seed["overrides"].keys() - MAY_DIFFER)
    scored = [last[kind]["eval_time_ms"] for kind in ("windows", "final") if kind in last]
    return {
        **seed, "seed": settings["SEED"], "settings": settings,
        "overrides": {name: settings[name] for name in names},
        "val_bpb_before_export": val["val_bpb"], "steps": seed["step"],
        "train_seconds": val["train_time_ms"] / 1000, "eval_seconds": sum(scored) / 1000,
        "wall_seconds": last["final"]["elapsed_s"],
        "export_seconds": last["export"]["elapsed_s"] - val["elapsed_s"],
        "bytes_total": seed["artifact_bytes"] + seed["code_bytes"],
        "python": re.search(r"Running Python (\S+)", machine)[1],
        "parameters": int(re.search(r"^model_params:(\d+)", text, re.M)[1])}


def read_folder(folder: Path, track: dict, division: str, findings: Findings) -> list[dict]:
    """Apply all rules to a folder's logs. Return its seeds as summarize gives them, each with the
    division's "table" for its tokenizer, and "val_bpb_original": of the original text, or None."""
    code, logs = (folder / "train_gpt.py").read_bytes(), sorted(folder.glob("train_seed*.log"))
    findings.check(logs, "there is no train_seedN.log")
    seeds = [seed for path in logs if (seed := read_seed(path, code, track, findings))]
    scored = track.get("divisions", {}).get(division, {}).get("scored", {})
    tables = {table["tokenizer_sha256"]: table for table in scored.values()}
    for seed in seeds:
        seed["table"] = tables.get(seed["settings"]["TOKENIZER_SHA256"], {})
        ratio = seed["table"].get("original_per_decoded_byte")
        seed["val_bpb_original"] = seed["val_bpb"] / ratio if ratio else None
    for seed in seeds[1:]:
        ours, theirs = seeds[0]["settings"], seed["settings"]
        names = sorted((ours.keys() | theirs.keys()) - MAY_DIFFER)
        names = [name for name in names if ours.get(name) != theirs.get(name)]
        names += [name for name in MUST_MATCH if seed[name] != seeds[0][name]]
        findings.check(not names, f"seed {seed['seed']} differs in {', '.join(names)} from seed "
                       f"{seeds[0]['seed']}")
    if seeds:
        check_rules(track, division, seeds, findings)
    return seeds


# ---- The track ---------------------------------------------------------------------------------


def check_request(track: dict, division: str, count: int, settings: dict, findings: Findings):
    """Apply the rules that hold before a run: division, number of seeds, settings and cap."""
    least = track.get("min_seeds", 1)
    findings.check(count >= least, f"the track asks for {least} seeds; there are {count}")
    divisions = track.get("divisions", {})
    findings.check(not divisions or division in divisions,
                   f"division {division!r} must be one of {', '.join(divisions)}")
    rooted = [key for key, value in settings.items() if str(value).startswith(("/", "~", ".."))]
    findings.check(not rooted, f"{', '.join(rooted)} must be relative to the repository")
    for key, values in track.get("settings", {}).items():
        findings.check(settings.get(key) in values, f"{key}={settings.get(key)!r} is not one of {values}")
    if limit := track.get("max_train_seconds"):
        cap = settings["MAX_WALLCLOCK_SECONDS"]
        findings.check(0 < cap <= limit, f"MAX_WALLCLOCK_SECONDS={cap:g} must be more than 0 and at most {limit:g}")


def check_machine(track: dict, ranks: int, threads: int, gpu: str, findings: Findings):
    """Apply the rules for the number of ranks, that of all their threads, and the GPU."""
    for rule, count in (("world_size", ranks), ("threads", threads)):
        limit = track.get(f"max_{rule}", math.inf)
        findings.check(count <= limit, f"{rule} is {count}, more than {limit}")
    machine = track.get("machine", "")
    findings.check(machine in gpu, f"the GPU is {gpu or 'none'}, not {machine}")


def check_rules(track: dict, division: str, seeds: list[dict], findings: Findings):
    """Apply every rule of track.json. What must match between the seeds is checked of one."""
    first = seeds[0]
    check_request(track, division, len(seeds), first["settings"], findings)
    threads = first["threads"] * first["world_size"]
    check_machine(track, first["world_size"], threads, first["gpu"], findings)
    if track.get("divisions"):
        check_data(first, division, findings)
    for seed in seeds:
        train_s = seed["train_seconds"]
        amounts = {"max_bytes": seed["bytes_total"], "max_eval_seconds": seed["eval_seconds"],
                   "max_export_seconds": seed["export_seconds"],
                   "max_train_seconds": train_s - train_s / seed["steps"] - HICCUP_S}
        for rule, amount in amounts.items():
            limit = track.get(rule, math.inf)
            findings.check(amount <= limit, f"seed {seed['seed']}: {rule.removeprefix('max_')} is "
                           f"{amount:,.9g}, more than {limit:,}")


def check_data(seed: dict, division: str, findings: Findings):
    """The run must have used the division's tokenizer, validation split and pinned shards."""
    table = seed["table"]
    if not findings.check(table, "the tokenizer is not one of the division's"):
        return
    length, found = seed["settings"]["TRAIN_SEQ_LEN"], (seed["val_tokens"], seed["val_bytes"])
    fewest, most = ((count - 1) // length * length for count in table["val_tokens"])
    least = table["val_bytes"][0] - LONGEST_TOKEN * min(length, table["val_tokens"][1] - fewest)
    fits = fewest <= found[0] <= most and least <= found[1] <= table["val_bytes"][1]
    findings.check(fits, f"{found[0]} validation tokens of {found[1]} bytes are not those of the "
                   f"division {division!r} for TRAIN_SEQ_LEN={length}")
    for split in ("train", "val"):
        pinned = table.get(f"{split}_shards_sha256")
        logged = [digest for file, digest in seed["data_sha256"].items()
                  if fnmatchcase(file, f"*_{split}_[0-9]*.bin")]
        findings.check(not pinned or logged == pinned, f"the {split} shards of "
                       f"{seed['settings']['DATA_PATH']} are not those of the division")


# ---- submission.json ---------------------------------------------------------------------------


def make_claims(folder: Path, authored: dict, findings: Findings) -> tuple[dict, list[dict]]:
    """Return what the logs decide of submission.json, {} if findings forbid it, and the seeds."""
    track = load_json(folder.parent / "track.json")
    seeds = read_folder(folder, track, authored["division"], findings)
    base = load_base(folder, authored["base"], authored["division"], findings)
    if findings:
        return {}, seeds
    first, settings = seeds[0], seeds[0]["settings"]
    originals = [seed["val_bpb_original"] for seed in seeds]
    claims = {key: statistics.mean(seed[key] for seed in seeds) for key in ("val_loss", "val_bpb")}
    claims |= {
        "val_bpb_std": statistics.stdev(seed["val_bpb"] for seed in seeds) if len(seeds) > 1 else None,
        "machine": first["gpu"] or f"{settings['DEVICE'].upper()}, {settings['DTYPE']}",
        "val_bpb_original": None if None in originals else statistics.mean(originals),
        "bytes_total": max(seed["bytes_total"] for seed in seeds),
        "bytes_code": first["code_bytes"], "script_sha256": first["code_sha256"],
        "parameters": first["parameters"], "seeds": [seed["seed"] for seed in seeds],
        "seed_results": {str(seed["seed"]): {key: seed[key] for key in OF_SEEDS} for seed in seeds},
        "settings": first["overrides"], "against_base": None,
        "environment": {key: first[key] for key in ("python", "torch", "world_size", "threads")}}
    name = authored["hardware"].partition(",")[0]
    is_same = base and base["hardware"].partition(",")[0] == name
    is_same = is_same and all(base[key] == claims[key] for key in ("machine", "environment"))
    findings.check(is_same or not authored["in_turn"], "in_turn needs a base of the same machine "
                   f"and versions, not {authored['base']!r}")
    if base:  # A p-value needs runs of one machine and sitting.
        theirs = list(base["seed_results"].values())
        difference = statistics.mean(map(score, seeds)) - statistics.mean(map(score, theirs))
        test = compare_scores(track, seeds, theirs) if authored["in_turn"] is True else None
        claims["against_base"] = test or {"difference": difference, "p": None}
    return claims, seeds


def load_base(folder: Path, base: str, division: str, findings: Findings) -> dict:
    """Return the submission.json of the record that this one changes; {} for ""."""
    if not base:
        return {}
    place = folder.parent.parent / base
    is_other = place.parent == folder.parent and place != folder
    submission = load_json(place / "submission.json")
    findings.check(is_other and submission["division"] == division, f"{base} is not another record "
                   f"of {folder.parent.name} and the division {division!r}")
    return submission


# ---- Data and artifacts ------------------------------------------------------------------------


def read_data(settings: dict, track: dict, division: str, findings: Findings):
    """Return the validation tokens on this disk and their bytes, for all settings of a run. They,
    the shards and the tokenizer must be those of the division. Raises ValueError."""
    of_division = track.get("divisions", {}).get(division)
    folder = Path(settings["DATA_PATH"])
    shards = sorted((ROOT / folder).glob("*_[0-9]*.bin"))
    if of_division and not shards:
        known = list(of_division["scored"])
        # The default DATA_PATH ends in the default VOCAB_SIZE.
        wanted = folder.name.replace("sp1024", f"sp{settings['VOCAB_SIZE']}")
        named = [name for name in known if wanted == f"{division}_{name}"]
        tokenizer = (known + named)[-1]
        hint = f"    {interpreter()} {of_division['get']}\nand set {of_division['set']}"
        hint = hint.format(tokenizer=tokenizer, size=re.sub(r"\D", "", tokenizer))
        raise ValueError(f"no DATA_PATH={folder} with *_val_*.bin. Get the data with\n{hint}")
    tokens, size = read_text(settings, ROOT)
    path = ROOT / settings["TOKENIZER_PATH"]
    name = path.read_bytes() if path.is_file() else settings["TOKENIZER_PATH"].encode()
    if of_division:
        tables = {table["tokenizer_sha256"]: table for table in of_division["scored"].values()}
        table = tables.get(sha256(name).hexdigest(), {})
        digests = {path.name: sha256(path.read_bytes()).hexdigest() for path in shards}
        check_data({"settings": settings, "data_sha256": digests, "val_tokens": len(tokens) - 1,
                    "val_bytes": size, "table": table}, division, findings)
    return tokens, size


def rescore(folder: Path, division: str, seeds: list[dict], findings: Findings) -> list[str]:
    """Score the artifacts of these seeds again; return a line about each. Raises ValueError."""
    track, lines = load_json(folder.parent / "track.json"), []
    text = read_data(seeds[0]["settings"], track, division, findings)
    for seed in seeds:
        number, bpb = seed["seed"], seed["val_bpb"]
        artifact = folder / f"artifact_seed{number}.int8.ptz"
        if not findings.check(artifact.is_file(), f"{artifact.name} is not in the folder, as git keeps none of 2 MB or "
                              "more: put it there, from the link in the record's README.md or its release"):
            continue
        scored, reason = check_artifact(folder / "train_gpt.py", artifact, seed["settings"], text,
                                        bpb, seed["threads"], seed["stride"])
        findings.check(not reason, f"seed {number}: {reason}")
        lines.append(f"seed {number}: scored again {scored:.8f}, in the log {bpb:.8f}, {scored - bpb:+.1e}")
    return lines


# ---- A folder ----------------------------------------------------------------------------------


def check_files(folder: Path, seeds: list[dict], findings: Findings):
    """The folder must have its files, which are no links, and no others. Only artifacts from
    SMALL_ARTIFACT on may be missing; those that are there must be the logs'."""
    artifacts = {f"artifact_seed{seed['seed']}.int8.ptz": seed for seed in seeds}
    needed = {"README.md", "submission.json", "train_gpt.py", "curve.png"}
    needed |= {f"train_seed{seed['seed']}.{end}" for seed in seeds for end in ("log", "jsonl")}
    needed |= {name for name, seed in artifacts.items() if seed["artifact_bytes"] < SMALL_ARTIFACT}
    there = {path.name for path in folder.iterdir() if not path.is_symlink()} - {".DS_Store"}
    findings += [f"{name} is missing, or a link" for name in sorted(needed - there)]
    extra = sorted(there - needed - artifacts.keys())
    findings += [f"{name} does not belong in a record" for name in extra]
    for name in sorted(there & artifacts.keys()):
        data = (folder / name).read_bytes()
        wanted = artifacts[name]["artifact_bytes"], artifacts[name]["artifact_sha256"]
        findings.check((len(data), sha256(data).hexdigest()) == wanted, f"{name} is not the artifact of the log")


def verify_record(folder: Path, again: bool = False) -> tuple[Findings, list[str]]:
    """Return the findings and lines to print about a folder. `again` scores its artifacts."""
    findings = Findings()
    submission = {**AUTHORED, **load_json(folder / "submission.json")}
    named = f"{submission['track']}/{submission['date']}_{submission['name']}"
    findings.check(named == f"{folder.parent.name}/{folder.name}", f"submission.json is of {named}")
    computed, seeds = make_claims(folder, submission, findings)
    if not computed:
        return findings, []
    # With 9 digits of each fraction: other releases of SciPy differ in the last.
    claimed, wanted = (json.loads(json.dumps(claims), parse_float=lambda text: f"{float(text):.9g}")
                       for claims in (submission, computed))
    for key in sorted((claimed.keys() | wanted.keys()) - AUTHORED.keys()):
        claim, number = claimed.get(key, "nothing"), wanted.get(key, "nothing")
        findings.check(claim == number, f"submission.json: {key} is {claim!r}, but the logs give {number!r}")
    check_files(folder, seeds, findings)
    notes = [f"{describe_score(computed)}, at most {computed['bytes_total']:,} bytes"]
    if submission["base"]:
        notes.append(f"against {submission['base']}: {describe_test(computed['against_base'])}")
    if again and not findings:
        notes += rescore(folder, submission["division"], seeds, findings)
    return findings, notes


def describe_score(claims: dict) -> str:
    """Return a record's mean score, and its deviation if there are several seeds, in words."""
    scores = [score(result) for result in claims["seed_results"].values()]
    count = "one seed" if len(scores) == 1 else f"{len(scores)} seeds"
    return f"{with_deviation(scores)} bits per byte, {count}"


def describe_test(test: dict) -> str:
    """Return a difference from the base and its test in words."""
    text = f"{test['difference']:+.5f} bits per byte"
    if test["p"] is None:
        return f"{text}, not tested: that needs two seeds of each, trained in turn on one machine."
    return (f"{text}; trained in turn, one-sided Welch t-test for a difference of more than "
            f"{test['margin']:g}: p = {test['p']:.2g}.")


def report(folder: Path, again: bool = False, only_if_refused: bool = False) -> bool:
    """Print what is found about a record; return whether it is accepted."""
    try:
        findings, notes = verify_record(folder, again)
    except Exception as error:  # one folder must not hide the others
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        findings, notes = Findings([f"{kind}{error}"]), []
    if findings or not only_if_refused:
        print(f"{folder.parent.name}/{folder.name}: {'refused' if findings else 'accepted'}")
        for line in (*notes, *(f"REFUSED: {line}" for line in findings)):
            print("   ", line)
    return not findings


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="record folders (default: all)")
    parser.add_argument("--rerun", action="store_true",
                        help="score the artifacts again; runs the folder's train_gpt.py")
    options = parser.parse_args()
    require_packages()
    folders = options.folders or sorted((ROOT / "records").glob("track_*/*/"))
    accepted = [report(folder.resolve(), options.rerun) for folder in folders]
    sys.exit(0 if all(accepted) else 1)


if __name__ == "__main__":
    prepare_output()
    main()
