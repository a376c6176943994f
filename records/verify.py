"""Check record folders: recompute every number from the logs and apply the rules of the track.

    python records/verify.py                     all folders
    python records/verify.py FOLDER --rerun      also hash the data and score the artifacts again

The exit status is 1 if a folder is refused; each reason is a line. Without --rerun, logs that were forged
completely and consistently are believed. --rerun runs the folder's train_gpt.py, which is the submitter's code:
read it first. --artifacts DIR names the folder of artifacts that are too large for git.
"""

import argparse
import os
import re
import secrets
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

import ladder
from claims import (AUTHORED, check_rules, compare_claims, count_seeds, describe_test, make_claims, render,
                    script_difference)
from common import (ABSOLUTE_PATH, FOLDER_NAME, ROOT, Findings, load_json, load_track, record_folders,
                    require_packages, score)
from events import RULE, read_events
from log_rules import read_folder

RERUN_BPB = 1e-3  # compiled and eager models round differently: 3.5e-4 was measured, and 8e-6 between CPUs
SMALL_ARTIFACT = 2_000_000  # bytes; larger ones are not kept in git
SEED_FILE = re.compile(r"(train_seed-?\d+)(\.\w+)?\.(log|jsonl)|artifact_seed-?\d+\.int8\.ptz")
OTHER_FILES = {"README.md", "submission.json", "train_gpt.py", "script.diff", "curve.png"}
UNSAFE = re.compile(r"[|\n\r<>]")  # breaks a Markdown table


# ---- The folder ------------------------------------------------------------------------------------------


def check_files(folder: Path, seeds: list[dict], has_artifacts: bool, findings: Findings) -> None:
    """The folder must have its files and no others; artifacts, needed if small and not superseded, must be the logs'."""
    for path in sorted(folder.iterdir()):
        known = path.name in OTHER_FILES or SEED_FILE.fullmatch(path.name)
        findings.check(known and path.is_file() and not path.is_symlink(),
                       f"{path.name} does not belong in a record")
    for name in ("README.md", "curve.png"):
        findings.check((folder / name).is_file(), f"{name} is missing")
    for seed in seeds:
        path = folder / f"artifact_seed{seed['seed']}.int8.ptz"
        if path.is_file() or (has_artifacts and seed["artifact_bytes"] < SMALL_ARTIFACT):
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
    has_artifacts = folder.name not in track.get("superseded", [])
    check_files(folder, seeds, has_artifacts, findings)
    check_paths(folder, findings)
    if not findings:
        check_texts(folder, submission, findings)
    notes = [f"{score(computed):.5f} ± {computed['val_bpb_std']:.5f} bits per byte, {count_seeds(seeds)}, at "
             f"most {computed['bytes_total']:,} bytes; a new best: {'yes' if computed['is_best'] else 'no'}"]
    tests = {submission["base"]: computed["significance"], computed["incumbent"]: computed["against_incumbent"]}
    notes += [f"against {other}: {describe_test(test)}" for other, test in tests.items() if test]
    if again and not (has_artifacts or artifacts):
        notes.append("not scored again: only the digests of superseded artifacts are kept")
    elif again:
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
