"""Package finished runs as a record folder that others can check.

    python records/submit.py --track track_open --name Wider --author me --blurb "MLP_MULT=3" RUN_ID RUN_ID RUN_ID
    python records/submit.py --again records/track_open/2026-01-31_Wider      after a change of blurb, base or notes

A RUN_ID is the name of a run in logs/; the runs differ only in SEED. The folder records/TRACK/DATE_NAME/ receives README.md,
submission.json, train_gpt.py as it ran, its difference to the base's, train_seedN.log and .jsonl, curve.png, and artifacts
under 2 MB. What you write in README.md below the line "## Notes" is kept.
"""

import argparse
import json
import shlex
import shutil
import sys
import time
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from common import (ABSOLUTE_PATH, FOLDER_NAME, MAY_DIFFER_BETWEEN_SEEDS, ROOT, RULE, UNSAFE, Findings, hardware, load_json,
                    load_track, read_events, setting_text)
from verify import (AUTHORED, NOTES, SMALL_ARTIFACT, make_claims, other_seeds, read_folder, render, script_difference,
                    verify_record)

sys.path.append(str(ROOT / "logs"))

import plot  # noqa: E402


def write_record(folder: Path, authored: dict) -> None:
    """Write submission.json, script.diff, README.md and curve.png of a folder that has its logs. Raises ValueError with
    the reasons for which the logs would be refused."""
    findings = Findings()
    seeds = read_folder(folder, findings)
    claims = make_claims(folder, authored, seeds, findings) if seeds else {}
    if findings:
        raise ValueError("; ".join(findings))
    submission = {**authored, **claims}
    (folder / "submission.json").write_text(json.dumps(submission, indent=1) + "\n", encoding="utf-8")
    difference = script_difference(folder, authored["base"])
    stored = folder / "script.diff"
    stored.unlink(missing_ok=True)
    if difference:
        stored.write_text(difference, encoding="utf-8")
    readme = folder / "README.md"
    notes = readme.read_text(encoding="utf-8").partition(NOTES)[2] if readme.is_file() else ""
    readme.write_text(render(submission, difference) + notes, encoding="utf-8")
    paths = [folder / f"train_seed{seed['seed']}.jsonl" for seed in seeds]
    if authored["base"]:
        paths += sorted((folder.parent.parent / authored["base"]).glob("train_seed*.jsonl"))
    runs = [plot.read_run(str(path)) for path in paths if path.stem.count(".") == 0]
    (folder / "curve.png").write_bytes(plot.draw(plot.groups_of(runs)))


def copy_run(folder: Path, run_id: str) -> None:
    """Copy the logs, the script and a small artifact of a finished run into the folder. Raises ValueError for what is
    missing."""
    text = ROOT / "logs" / f"{run_id}.txt"
    log = ROOT / "logs" / f"{run_id}.jsonl"
    for path in (text, log):
        if not path.is_file():
            raise ValueError(f"{path.relative_to(ROOT)} is missing: is {run_id!r} the RUN_ID of a finished run?")
    last = {event["event"]: event for event in read_events(log)}
    if "final" not in last:
        raise ValueError(f"logs/{run_id}.jsonl has no final score: the run has not finished")
    config = last["config"]["config"]
    name = f"train_seed{config['SEED']}"
    for source, ending in ((text, ".log"), (log, ".jsonl")):
        shutil.copy(source, folder / (name + ending))
        if "resume" in last:
            for older in sorted(source.parent.glob(f"{run_id}.*{source.suffix}")):
                part = older.name.removeprefix(run_id).removesuffix(source.suffix)
                shutil.copy(older, folder / (name + part + ending))
    script = text.read_text(encoding="utf-8").partition("\n" + RULE + "\n")[0]
    (folder / "train_gpt.py").write_text(script, encoding="utf-8")
    artifact = ROOT / config["OUT_DIR"] / "final_model.int8.ptz"
    if artifact.is_file() and artifact.stat().st_size < SMALL_ARTIFACT:
        if sha256(artifact.read_bytes()).hexdigest() != last["export"]["artifact_sha256"]:
            raise ValueError(f"OUT_DIR={config['OUT_DIR']} has the artifact of another run than {run_id}: give each run its "
                             "own OUT_DIR")
        shutil.copy(artifact, folder / f"artifact_seed{config['SEED']}.int8.ptz")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that submit.py and run.py share."""
    parser.add_argument("--track", help="a folder of records/ (example: track_10min_1mb_cpu)")
    parser.add_argument("--name", help="of the record (example: Wider_MLP)")
    parser.add_argument("--division", default="", help="one of the track's, if any")
    parser.add_argument("--base", default="", help="the record that this one changes (example: track_open/2026-01-31_Name)")
    parser.add_argument("--author", default="", help="your name")
    parser.add_argument("--github", default="", help="your name on GitHub")
    parser.add_argument("--blurb", default="", help="what is new, in a sentence or two")
    parser.add_argument("--hardware", default="", help="the name of the machine (default: detected)")


def folder_of(options, now: time.struct_time) -> Path:
    """Return the folder of a record that is submitted now (UTC)."""
    return ROOT / "records" / options.track / f"{time.strftime('%Y-%m-%d', now)}_{options.name}"


def check_plan(options, settings: dict[str, str], seeds: int, ranks: int = 1) -> None:
    """Validate the request before training. Raises ValueError with all reasons for which the record would be refused."""
    folder = folder_of(options, time.gmtime())
    track = load_track(folder)
    problems = Findings()
    problems.check(FOLDER_NAME.fullmatch(folder.name), f"--name {options.name!r} must be letters, digits or _ . -")
    problems.check(not folder.exists(), f"{folder.relative_to(ROOT)} exists; delete it, or choose another --name")
    least = track.get("min_seeds", 1)
    problems.check(seeds >= least, f"the track asks for {least} seeds, not {seeds}")
    divisions = track.get("divisions", {})
    problems.check(not divisions or options.division in divisions,
                   f"--division {options.division!r} must be one of {', '.join(divisions)}")
    for name, value in settings.items():
        problems.check(not ABSOLUTE_PATH.search(" " + value) and not value.startswith(("/", "~")),
                       f"{name}={value}: records have no absolute paths; give one relative to the repository")
    for name, values in track.get("settings", {}).items():
        texts = {setting_text(value) for value in values}
        problems.check(settings.get(name, "") in texts | {""}, f"{name}={settings.get(name)}: the track allows "
                       f"{', '.join(sorted(texts))}")
    most = min(track.get("max_world_size", ranks), track.get("max_threads", ranks))
    problems.check(ranks <= most, f"--ranks {ranks} is more than the track's {most}")
    for name in ("author", "github", "hardware"):
        problems.check(not UNSAFE.search(getattr(options, name)), f"--{name} has a line end, or one of | < >")
    limit = track.get("max_train_seconds")
    cap = float(settings.get("MAX_WALLCLOCK_SECONDS", 600))
    problems.check(limit is None or 0 < cap <= limit, f"MAX_WALLCLOCK_SECONDS must be more than 0 and at most {limit}")
    missing = [package for package in ("scipy", "matplotlib") if not find_spec(package)]
    problems.check(not missing, f"{' and '.join(missing)} must be installed: pip install -r requirements-dev.txt")
    if options.base and not missing:
        other_seeds(folder, options.base, "base", options.division, problems)
    if problems:
        raise ValueError("; ".join(problems))


def submit(options, run_ids: list[str], command: str) -> Path:
    """Make the record folder and return it, or leave nothing behind. Raises ValueError with the reasons for which it would
    be refused."""
    now = time.gmtime()
    folder = folder_of(options, now)
    authored = dict.fromkeys(AUTHORED, "")
    authored |= {key: getattr(options, key) for key in ("name", "author", "track", "division", "blurb", "base")}
    authored |= {"github_id": options.github, "hardware": options.hardware or hardware(), "command": command,
                 "date": time.strftime("%Y-%m-%d", now), "submitted": time.strftime("%Y-%m-%dT%H:%M:%SZ", now)}
    folder.mkdir(parents=True)
    try:
        for run_id in run_ids:
            copy_run(folder, run_id)
        write_record(folder, authored)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def report(folder: Path) -> None:
    """Print what verify.py finds in a new folder; exit with 1 if it is refused."""
    findings, notes = verify_record(folder)
    print("\n".join((str(folder.relative_to(ROOT)), *notes, *(f"REFUSED: {line}" for line in findings))))
    sys.exit(1 if findings else 0)


def write_again(options) -> Path:
    """Rewrite the texts of an existing folder, with what the options change; return the folder."""
    folder = options.again.resolve()
    submission = load_json(folder / "submission.json")
    if options.track or options.name:
        raise ValueError("--track and --name follow from the folder: move it, and edit its submission.json")
    given = {key: getattr(options, key, "") for key in AUTHORED}
    given["github_id"] = options.github
    write_record(folder, {key: given[key] or submission.get(key, "") for key in AUTHORED})
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--command", default="", help="the command that started the runs (default: from the first log)")
    parser.add_argument("--again", type=Path, metavar="FOLDER", help="rewrite its submission.json, texts and curve.png")
    parser.add_argument("runs", nargs="*", metavar="RUN_ID", help="finished runs that differ only in SEED")
    options = parser.parse_args()
    if not options.again and not (options.track and options.name and options.runs):
        parser.error("--track, --name and a RUN_ID are needed, or --again FOLDER")
    try:
        if options.again:
            folder = write_again(options)
        else:
            log = ROOT / "logs" / f"{options.runs[0]}.jsonl"
            if not log.is_file():
                raise ValueError(f"logs/{log.name} is missing: is {options.runs[0]!r} the RUN_ID of a finished run?")
            overrides = {name: text for name, (text, _) in read_events(log)[0]["overrides"].items()}
            check_plan(options, overrides, len(options.runs))
            given = [f"{name}={text}" for name, text in overrides.items() if name not in MAY_DIFFER_BETWEEN_SEEDS]
            command = options.command or "python train_gpt.py " + shlex.join(given)
            folder = submit(options, options.runs, command)
        report(folder)
    except (ValueError, OSError, LookupError) as error:
        sys.exit(f"submit.py: {error}")


if __name__ == "__main__":
    main()
