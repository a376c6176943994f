"""Package finished runs as a record folder that others can check.

    python records/submit.py --track track_open --name Wider --author me --blurb "MLP_MULT=3" RUN_ID RUN_ID
    python records/submit.py --again records/track_open/2026-01-31_Wider

A RUN_ID is the name of a run in logs/; the runs differ only in SEED. The folder records/TRACK/DATE_NAME/
receives README.md, submission.json, train_gpt.py as it ran, script.diff if it differs from that of the base (or else of
the best record before it), train_seedN.log and .jsonl, rates_seedN.json if run.py measured them, curve.png, and
artifacts under 2 MB.

To change blurb, base or author, edit them in submission.json and run --again, which writes the other
texts again. What you write in README.md below the line "## Notes" is kept.
"""

import argparse
import json
import shlex
import shutil
import sys
import time
from pathlib import Path

from common import ROOT, Findings, hardware, load_json, load_track, require_packages  # first: it finds the reader of logs

import plot
from claims import AUTHORED, NOTES, make_claims, render, script_difference
from events import MAY_DIFFER_BETWEEN_SEEDS, RULE, read_events
from log_rules import read_folder, script_line
from verify import SMALL_ARTIFACT, report


def write_record(folder: Path, authored: dict) -> None:
    """Write submission.json, script.diff, README.md and curve.png of a folder that has its logs. Raises
    ValueError with the reasons for which the logs would be refused."""
    findings = Findings()
    seeds = read_folder(folder, authored["division"], findings)
    claims = make_claims(folder, authored, seeds, findings) if seeds else {}
    if findings:
        raise ValueError("; ".join(findings))
    submission = {**authored, **claims}
    (folder / "submission.json").write_text(json.dumps(submission, indent=1) + "\n", encoding="utf-8")
    stored = folder / "script.diff"
    stored.unlink(missing_ok=True)
    if difference := script_difference(folder, submission):
        stored.write_text(difference, encoding="utf-8")
    readme = folder / "README.md"
    notes = readme.read_text(encoding="utf-8").partition(NOTES)[2] if readme.is_file() else ""
    readme.write_text(render(submission) + notes, encoding="utf-8")
    paths = [folder / f"train_seed{seed['seed']}.jsonl" for seed in seeds]
    if authored["base"]:
        paths += sorted((folder.parent.parent / authored["base"]).glob("train_seed*.jsonl"))
    runs = [plot.read_run(str(path)) for path in paths]
    plot.draw(plot.groups_of(runs), folder / "curve.png")


def copy_run(folder: Path, run_id: str) -> None:
    """Copy the logs, the script and a small artifact of a finished run into the folder."""
    text = ROOT / "logs" / f"{run_id}.txt"
    events = read_events(text.with_suffix(".jsonl"))
    last = {event["event"]: event for event in events}
    config = last["config"]["config"]
    name = f"train_seed{config['SEED']}"
    if (folder / f"{name}.log").exists():
        raise ValueError(f"{run_id} has the same SEED={config['SEED']} as another run")
    script, rule, rest = text.read_text(encoding="utf-8").partition("\n" + RULE + "\n")
    (folder / f"{name}.log").write_text(script_line(script) + rule + rest, encoding="utf-8")
    shutil.copy(text.with_suffix(".jsonl"), folder / f"{name}.jsonl")
    rates = ROOT / "logs" / f"{run_id}.rates.json"
    if rates.is_file():
        shutil.copy(rates, folder / f"rates_seed{config['SEED']}.json")
    (folder / "train_gpt.py").write_text(script, encoding="utf-8")
    artifact = ROOT / config["OUT_DIR"] / "final_model.int8.ptz"
    if artifact.is_file() and artifact.stat().st_size < SMALL_ARTIFACT:
        shutil.copy(artifact, folder / f"artifact_seed{config['SEED']}.int8.ptz")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that submit.py and run.py share."""
    parser.add_argument("--track", type=lambda text: text.strip("/"), help="a folder of records/ (example: track_10min_1mb_cpu)")
    parser.add_argument("--name", help="of the record (example: Wider_MLP)")
    parser.add_argument("--division", default="", help="one of the track's, if any")
    parser.add_argument("--base", default="",
                        help="the record that this one changes (example: track_open/2026-01-31_Name)")
    parser.add_argument("--author", default="", help="your name")
    parser.add_argument("--blurb", default="", help="what is new, in a sentence or two")
    parser.add_argument("--hardware", default="", help="the name of the machine (default: detected)")


def folder_of(options, now: time.struct_time) -> Path:
    """Return the folder of a record that is submitted now (UTC)."""
    return ROOT / "records" / options.track / f"{time.strftime('%Y-%m-%d', now)}_{options.name}"


def submit(options, run_ids: list[str], command: str = "") -> Path:
    """Make the record folder and return it, or leave nothing behind. `command` is by default that of the first
    run. Raises ValueError with the reasons for which the logs would be refused."""
    now = time.gmtime()
    folder = folder_of(options, now)
    load_track(folder)
    authored = {key: getattr(options, key, "") for key in AUTHORED}
    start = read_events(ROOT / "logs" / f"{run_ids[0]}.jsonl")[0]
    ranks = start["world_size"]
    machine = options.hardware or hardware(ranks if start["config"]["DEVICE"] == "cuda" else 0)
    authored |= {"hardware": machine, "command": command,
                 "date": time.strftime("%Y-%m-%d", now), "submitted": time.strftime("%Y-%m-%dT%H:%M:%SZ", now)}
    folder.mkdir()
    try:
        for run_id in run_ids:
            copy_run(folder, run_id)
        if not command:
            given = [f"{name}={text}" for name, (text, _) in start["overrides"].items()
                     if name not in MAY_DIFFER_BETWEEN_SEEDS]
            program = ["python"] if ranks == 1 else ["torchrun", "--standalone", f"--nproc_per_node={ranks}"]
            authored["command"] = shlex.join([*program, "train_gpt.py", *given])
        write_record(folder, authored)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--again", type=Path, metavar="FOLDER",
                        help="rewrite its submission.json, texts and curve.png")
    parser.add_argument("runs", nargs="*", metavar="RUN_ID", help="finished runs that differ only in SEED")
    options = parser.parse_args()
    if not options.again and not (options.track and options.name and options.runs):
        parser.error("--track, --name and a RUN_ID are needed, or --again FOLDER")
    require_packages()
    try:
        if options.again:
            folder = options.again.resolve()
            submission = load_json(folder / "submission.json")
            write_record(folder, {key: submission.get(key, "") for key in AUTHORED})
        else:
            folder = submit(options, options.runs)
    except (ValueError, OSError, LookupError) as error:
        sys.exit(f"submit.py: {error}")
    sys.exit(0 if report(folder) else 1)


if __name__ == "__main__":
    main()
