"""Check record folders: recompute every number from the logs and apply the rules of the track.

    python records/verify.py                     all folders
    python records/verify.py FOLDER --rerun      also hash the data and score the artifacts again

The exit status is 1 if a folder is refused; each reason is a line. Without --rerun, logs that were forged
completely and consistently are believed. --rerun runs the folder's train_gpt.py, which is the submitter's code:
read it first. It also needs the artifacts that are too large for git: copy them into the folder.
"""

import argparse
import math
import re
import sys
from hashlib import sha256
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from claims import AUTHORED, compare_claims, count_seeds, describe_test, make_claims, render  # noqa: E402
from common import ROOT, deviation, load_json, require_packages, score  # noqa: E402
from rescore import check_data, check_weights, rerun  # noqa: E402
from rules import FOLDER_NAME, HTML, UNSAFE, Findings, check_rules, earlier_records, load_track, place_of  # noqa: E402

SMALL_ARTIFACT = 2_000_000  # bytes; larger ones are not kept in git
SEED_FILE = re.compile(r"train_seed(\d+)\.(?:log|jsonl)|artifact_seed(\d+)\.int8\.ptz")
OTHER_FILES = {"README.md", "submission.json", "train_gpt.py", "curve.png"}
MOST_SHOWN = 20  # a forged clock is wrong at each step


def read_submission(folder: Path, findings: Findings) -> dict:
    """Return submission.json; check the types and place of what its author wrote."""
    try:
        submission = load_json(folder / "submission.json")
        authored = {key: submission.get(key, "") for key in AUTHORED}
    except (OSError, ValueError, AttributeError) as error:
        findings.append(f"submission.json cannot be read: {error}")
        return {}
    for key, value in authored.items():
        if findings.check(isinstance(value, str), f"submission.json: {key} is not text"):
            found = set(value) & (HTML if key == "blurb" else UNSAFE)
            findings.check(not found, f"submission.json: {key} has {' '.join(map(repr, sorted(found)))}")
    place = f"{folder.parent.name}/{folder.name}"
    findings.check(place_of(authored) == place, f"submission.json names {place_of(authored)}, not {place}")
    submitted = authored["submitted"]
    findings.check(submitted == "" or str(submitted).startswith(str(authored["date"])),
                   f"submission.json: submitted {submitted!r} is not on the date {authored['date']}")
    return submission


def check_files(folder: Path, seeds: list[dict], largest: int, findings: Findings) -> list[dict]:
    """The folder must have its files and no others, among them the artifacts of less than `largest` bytes. Return the
    seeds whose artifacts are there and are those of the logs."""
    numbers = {str(seed["seed"]) for seed in seeds}
    for path in sorted(folder.iterdir()):
        if path.name == ".DS_Store" and path.is_file() and path.lstat().st_size < 100_000:  # of macOS
            continue
        match = SEED_FILE.fullmatch(path.name)
        known = numbers & {*match.groups()} if match else path.name in OTHER_FILES
        findings.check(known and path.is_file() and not path.is_symlink(), f"{path.name} does not belong in a record")
    for name in ("README.md", "curve.png"):
        findings.check((folder / name).is_file(), f"{name} is missing")
    found = []
    for seed in seeds:
        path = artifact_of(folder, seed)
        if path.is_file():
            size, digest = path.stat().st_size, sha256(path.read_bytes()).hexdigest()
            if findings.check((size, digest) == (seed["artifact_bytes"], seed["artifact_sha256"]),
                              f"{path.name} is not the artifact of the log: {size} bytes, sha256 {digest}"):
                found.append(seed)
        else:
            findings.check(seed["artifact_bytes"] >= largest, f"{path.name} is missing: artifacts under 2 MB belong in "
                           "the folder, and for --rerun larger ones, too")
    return found


def artifact_of(folder: Path, seed: dict) -> Path:
    """Return the path of a seed's artifact."""
    return folder / f"artifact_seed{seed['seed']}.int8.ptz"


def check_origin(folder: Path, submission: dict, seeds: list[dict], findings: Findings) -> None:
    """No artifact may be that of an earlier record, of any track."""
    for other in earlier_records(folder, submission):
        same = [seed["seed"] for seed in seeds if seed["artifact_sha256"] in other["artifacts"]]
        findings.check(not same, f"the artifacts of seeds {same} are those of {place_of(other)}")


def verify_record(folder: Path, again: bool = False) -> tuple[Findings, list[str]]:
    """Return the findings and lines to print about one record folder. `again` scores its artifacts."""
    findings = Findings()
    track = load_track(folder)
    findings.check(FOLDER_NAME.fullmatch(folder.name), f"{folder.name} must be DATE_Name (example: 2026-01-31_Wider)")
    submission = read_submission(folder, findings)
    if findings:
        return findings, []
    computed, seeds = make_claims(folder, submission, findings)
    if not computed:
        return findings, []
    compare_claims(submission, computed, findings)
    check_rules(track, submission["division"], seeds, findings)
    has_artifacts = folder.name not in track.get("without_artifacts", [])
    largest = (math.inf if again else SMALL_ARTIFACT) if has_artifacts else 0
    scorable = check_files(folder, seeds, largest, findings)
    check_origin(folder, submission, seeds, findings)
    if not findings:
        text = (folder / "README.md").read_text(encoding="utf-8")
        findings.check(text.startswith(render(submission)), "README.md: the part above the notes does not follow "
                       "from submission.json; records/make.py --again rewrites it")
    spread = deviation([score(seed) for seed in seeds])
    notes = [f"{score(computed):.5f} ± {spread:.5f} bits per byte, {count_seeds(seeds)}, at "
             f"most {computed['bytes_total']:,} bytes"]
    tests = {submission["base"]: computed["significance"], computed["incumbent"]: computed["against_incumbent"]}
    notes += [f"against {other}: {describe_test(test)}" for other, test in tests.items() if test]
    if again and not has_artifacts:
        notes.append("not scored again: only the digests of its artifacts are kept")
    elif again:
        check_data(seeds[0], findings)  # the seeds have the same settings
        notes += [rerun(folder, seed, artifact_of(folder, seed), findings) for seed in scorable]
        check_weights([seed for seed in scorable if "largest" in seed], findings)
    return findings, notes


def report(folder: Path, again: bool = False) -> bool:
    """Print what is found about a record; return whether it is accepted."""
    place = ""
    try:
        findings, notes = verify_record(folder, again)
        if not findings:
            place = "; a new best" if load_json(folder / "submission.json")["is_best"] else "; not a new best"
    except Exception as error:  # one folder must not hide the others
        findings, notes = Findings([f"{type(error).__name__}: {error}"]), []
    print(f"{folder.parent.name}/{folder.name}: {'refused' if findings else 'accepted' + place}")
    more = [f"REFUSED: and {len(findings) - MOST_SHOWN} more"] * (len(findings) > MOST_SHOWN)
    for line in (*notes, *(f"REFUSED: {line}" for line in findings[:MOST_SHOWN]), *more):
        print("   ", line)
    return not findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="record folders (default: all)")
    parser.add_argument("--rerun", action="store_true",
                        help="hash the data and score the artifacts again; runs the folder's train_gpt.py")
    options = parser.parse_args()
    require_packages()
    folders = options.folders or sorted(path.parent for path in (ROOT / "records").glob("track_*/*/submission.json"))
    accepted = [report(folder.resolve(), options.rerun) for folder in folders]
    sys.exit(0 if all(accepted) else 1)


if __name__ == "__main__":
    main()
