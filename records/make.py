"""Make a record: train its seeds one after another, and package them for others to check.

    python records/make.py --track track_10min_1mb_cpu --division sotu --name Wider --author me \\
        --blurb "What is new" --base track_10min_1mb_cpu/2026-01-31_Control MLP_MULT=3
    python records/make.py ... --runs RUN_ID,RUN_ID,RUN_ID    of runs in logs/ that differ in SEED

After an interruption, run the same command again: it keeps the runs, NAME_seedN, that have finished
with these settings and this script. To change blurb, base, in_turn or author, edit submission.json
and run --again.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import common  # first: it finds train_gpt  # noqa: E402
import train_gpt  # noqa: E402
import verify  # noqa: E402
from common import ROOT, load_json, table  # noqa: E402
from events import RULE, launcher, prepare_output, read_events  # noqa: E402
from plot import draw, groups_of, read_run  # noqa: E402
from settings import words_of  # noqa: E402

# Settings of older records that the trainer does not have now.
GONE = {"EMA_DECAY", "GPTQ_BATCHES", "MUON_SLOW_AT", "ROPE_DIMS"}
NOTES = "\n## Notes\n"
BEGIN, END = "<!-- leaderboard -->\n", "<!-- end of leaderboard -->\n"


def plan_settings(options, track: dict) -> dict[str, str]:
    """Return the runs' settings: the base's, the track's DEVICE, then those of files and words."""
    settings = {}
    if options.base:
        of_base = load_json(ROOT / "records" / options.base / "submission.json")["settings"]
        settings = {name: str(value) for name, value in of_base.items() if name not in GONE}
    words = train_gpt.read_words(options.settings, {})
    given = {name: text for name, (text, _) in words.items()}
    if "DATA_PATH" in given:  # The manifest of the other data has these.
        for name in ("TOKENIZER_PATH", "TOKENIZER_SHA256", "VOCAB_SIZE"):
            settings.pop(name, None)
    if devices := track.get("settings", {}).get("DEVICE"):
        settings.setdefault("DEVICE", devices[0])  # not a GPU that is here
    return settings | given


def check_plan(options, folder: Path, settings: dict[str, str]):
    """Raise ValueError with the reasons known before training for which a record is refused."""
    track = load_json(folder.parent / "track.json")
    problems = verify.Findings()
    config, given = train_gpt.load_config(words_of(settings), dict(os.environ))
    values = {name.upper(): value for name, value in asdict(config).items()}
    chosen = sorted(given.keys() & {"SEED", "RUN_ID", "RESUME"})
    problems.check(not chosen, f"{', '.join(chosen)} cannot be set: each seed has its own run")
    gpus = ", ".join(common.gpu_names()) or track.get("machine", "")  # In the end, the log tells.
    verify.check_machine(track, options.ranks, options.ranks, gpus, problems)
    count = 0 if config.device == "cpu" else train_gpt.torch.cuda.device_count()
    problems.check(count in (0, options.ranks), f"{count} GPUs, but --ranks is {options.ranks}; to "
                   "use fewer GPUs, set CUDA_VISIBLE_DEVICES; if they are in several machines, train "
                   "the seeds yourself, and give --runs: see records/README.md")
    verify.check_request(track, options.division, len(options.seeds), values, problems)
    verify.load_base(folder, options.base, options.division, problems)
    problems.check(not folder.exists(), f"{folder} is there: choose another --name")
    if not problems:
        verify.read_data(values, track, options.division, problems)
    if problems:
        raise ValueError("; ".join(problems))


def run_seeds(options, track: dict, settings: dict[str, str]) -> list[str]:
    """Train the seeds that have not finished; return all RUN_IDs. May raise ValueError."""
    run_ids = [f"{options.name}_seed{seed}" for seed in options.seeds]
    environment = dict(os.environ)
    if threads := track.get("max_threads"):
        environment["OMP_NUM_THREADS"] = str(max(1, threads // options.ranks))
    with common.only_one(ROOT / "logs" / f"{options.name}.lock") as lock:
        for seed, run_id in zip(options.seeds, run_ids, strict=True):
            own = {**settings, "SEED": str(seed), "RUN_ID": run_id, "OUT_DIR": f"logs/{run_id}"}
            if common.has_finished(ROOT, run_id, own, options.ranks):
                print(f"{run_id} has already finished", flush=True)
            else:
                command = [*launcher(options.ranks), "train_gpt.py", *words_of(own)]
                # A trainer that outlives this command holds its lock.
                with subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[lock.fileno()]) as trainer:
                    signal.signal(signal.SIGTERM, lambda *_: trainer.terminate())  # It may reach this process alone.
                    status = trainer.wait()
                if status:
                    raise ValueError(f"{run_id} ended with status {status}: see above; then run the same command again")
            problems, rules = verify.Findings(), {**track, "min_seeds": 1}
            with TemporaryDirectory() as place:
                copy_run(Path(place), run_id)
                verify.read_folder(Path(place), rules, options.division, problems)
            if problems:
                rest = "; the other seeds are not trained" * (seed != options.seeds[-1])
                raise ValueError("; ".join(problems) + rest)
    return run_ids


def package(options, folder: Path, run_ids: list[str]):
    """Make the record folder of finished runs, or leave nothing behind. Raises as write_record."""
    start = read_events(ROOT / "logs" / f"{run_ids[0]}.jsonl")[0]
    authored = {key: getattr(options, key, value) for key, value in verify.AUTHORED.items()}
    authored |= {"track": folder.parent.name, "date": folder.name[:10],
                 "submitted": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                 "hardware": common.describe_machine(start)}
    folder.mkdir()
    try:
        for run_id in run_ids:
            copy_run(folder, run_id)
        write_record(folder, authored)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if options.runs and not start["gpu"]:  # A log names no CPU.
        print(f"hardware: {authored['hardware']}, which is this computer; if the runs are of another one, "
              f"name that in {folder}/submission.json and run --again {folder}")


def copy_run(folder: Path, run_id: str):
    """Copy the logs, the script and a small artifact of a finished run into the folder."""
    text = ROOT / "logs" / f"{run_id}.txt"
    config = read_events(text.with_suffix(".jsonl"))[0]["config"]
    script, rule, rest = text.read_text(encoding="utf-8").partition(f"\n{RULE}\n")
    log, digest = folder / f"train_seed{config['SEED']}.log", sha256(script.encode()).hexdigest()
    with log.open("x", encoding="utf-8") as file:  # A second run of this seed must not replace it.
        file.write(f"train_gpt.py of SHA-256 {digest}{rule}{rest}")
    shutil.copy(text.with_suffix(".jsonl"), log.with_suffix(".jsonl"))
    (folder / "train_gpt.py").write_text(script, encoding="utf-8")
    artifact = ROOT / config["OUT_DIR"] / train_gpt.MODEL_FILE
    if artifact.is_file() and artifact.stat().st_size < verify.SMALL_ARTIFACT:
        shutil.copy(artifact, folder / f"artifact_seed{config['SEED']}.int8.ptz")


def write_record(folder: Path, authored: dict):
    """Write submission.json, README.md and curve.png of a folder that has its logs. Raises
    ValueError with the reasons for which the logs would be refused."""
    readme, findings = folder / "README.md", verify.Findings()
    old = readme.read_text(encoding="utf-8") if readme.is_file() else NOTES
    if NOTES not in old:
        raise ValueError(f"{readme} has no line {NOTES.strip()!r}, below which your text is kept")
    claims, seeds = verify.make_claims(folder, authored, findings)
    if findings:
        raise ValueError("; ".join(findings))
    submission, records = {**authored, **claims}, folder.parent.parent
    common.write_whole(folder / "submission.json", json.dumps(submission, indent=1) + "\n")
    base = authored["base"] and load_json(records / authored["base"] / "submission.json")
    common.write_whole(readme, render(submission, base) + old.partition(NOTES)[2])  # The author's notes are only there.
    paths = [folder / f"train_seed{seed['seed']}.jsonl" for seed in seeds]
    paths += sorted((records / authored["base"]).glob("train_seed*.jsonl")) if base else []
    draw(groups_of([read_run(path) for path in paths]), folder / "curve.png")


def render(claims: dict, base: dict) -> str:
    """Return README.md up to its notes, from submission.json and that of the base, if any."""
    text = (f"{verify.describe_score(claims)}; {claims['val_loss']:.4f} nats per token. At most "
            f"{claims['bytes_total']:,} bytes, {claims['bytes_code']:,} of them code; "
            f"{claims['parameters']:,} parameters.")
    header = "| seed | val_bpb | before export | steps | training, s | evaluation, s | bytes |"
    rows = [[seed, f"{r['val_bpb']:.5f}", f"{r['val_bpb_before_export']:.5f}", f"{r['steps']:,}",
             f"{r['train_seconds']:.1f}", f"{r['eval_seconds']:.1f}", f"{r['bytes_total']:,}"]
            for seed, r in claims["seed_results"].items()]
    lines = [f"# {claims['name'].replace('_', ' ')}", "", text, "", claims["blurb"], "",
             *table(header, rows), "", "![curves of the seeds](curve.png)", ""]
    ours = claims["settings"]
    if base:
        theirs = base["settings"]
        names = [name for name in sorted(ours | theirs) if ours.get(name) != theirs.get(name)]
        changes = [[name, theirs.get(name, ""), ours.get(name, "")] for name in names]
        is_new = base["script_sha256"] != claims["script_sha256"]
        lines += [f"## Changes from {claims['base']}", "",
                  *table("| | before | this record |", changes), "",
                  f"`train_gpt.py`: {'changed' if is_new else 'unchanged'}. Against the base: "
                  + verify.describe_test(claims["against_base"]), ""]
    about = claims["environment"]
    ranks = about["world_size"]
    script = f"records/{claims['track']}/{claims['date']}_{claims['name']}/train_gpt.py"
    command = ["python", *launcher(ranks)[1:], script, *words_of(ours)]
    lines += ["## Command", "It trains the seed 1337; `verify.py --rerun` says how to get its data.",
              "", f"    {shlex.join(command)}", "",
              f"{claims['hardware']}; ranks: {ranks}, threads of each: {about['threads']}; Python "
              f"{about['python']}, PyTorch {about['torch']}. Division: {claims['division']}."]
    return "\n".join(lines) + "\n" + NOTES


def leaderboard(records: Path) -> str:
    """Return README.md with the tables of accepted records, lowest score first."""
    lines = []
    for path in sorted(records.glob("track_*/track.json")):
        groups = defaultdict(list)
        for record in path.parent.glob("*/submission.json"):
            if not verify.report(record.parent, only_if_refused=True):
                continue
            claims = {**verify.AUTHORED, **load_json(record)}
            name = record.parent.name
            cells = [*verify.describe_score(claims).split(" bits per byte, "),
                     f"{claims['bytes_total']:,}", claims["hardware"].split(" in ")[0],
                     claims["author"], f"[{name}]({path.parent.name}/{name})"]
            groups[claims["division"], claims["machine"]].append((common.score(claims), cells))
        lines += [f"### [{load_json(path)['title']}]({path.parent.name})", ""]
        lines += [] if groups else ["No record yet.", ""]
        for (division, machine), rows in sorted(groups.items()):
            lines += [f"Division `{division}`, {machine}", ""]
            lines += table("| bits per byte | seeds | bytes | machine | by | record |",
                           [cells for _, cells in sorted(rows)])
            lines.append("")
    before, _, rest = (records / "README.md").read_text(encoding="utf-8").partition(BEGIN)
    return "\n".join([before + BEGIN, *lines, END + rest.partition(END)[2]])


def main():
    records = ROOT / "records"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--track", help="a folder of records/ (example: track_10min_1mb_cpu)")
    add("--name", default="", help="of the record (example: Wider_MLP)")
    add("--division", help="one of the track's, or a name for the data (example: sotu)")
    add("--base", default="", metavar="TRACK/DATE_NAME", help="the record that this one changes")
    add("--in-turn", action="store_true",
        help="these --runs and the base's were trained in turn on one machine: test the difference")
    add("--author", default="", help="your name")
    add("--blurb", default="", help="what is new, in a sentence or two")
    add("--seeds", default="1337,1338,1339", metavar="N,N", help="(default: 1337,1338,1339)")
    add("--ranks", type=int, choices=range(1, 9), default=1, metavar="N", help="processes (default: 1)")
    add("--runs", default="", metavar="RUN_ID,...", help="package these finished runs")
    add("--again", type=Path, metavar="FOLDER", help="write its submission.json and texts again")
    add("settings", nargs="*", metavar="NAME=value", help="for train_gpt.py; @FILE with such lines")
    options = parser.parse_intermixed_args()  # settings before and after options
    if not (options.again or (options.track and options.name and options.division)):
        parser.error("--track, --name and --division are needed, or --again FOLDER")
    if not re.fullmatch(r"[A-Za-z0-9_.-]*", options.name):
        parser.error(f"--name {options.name!r} must be letters, digits or _ . -")
    common.require_packages()
    try:
        if options.again:
            folder = options.again.resolve()
            write_record(folder, {**verify.AUTHORED, **load_json(folder / "submission.json")})
        else:
            date = time.strftime("%Y-%m-%d", time.gmtime())
            folder = records / options.track / f"{date}_{options.name}"
            run_ids = options.runs.split(",")
            if not options.runs:
                options.seeds = sorted({int(seed) for seed in options.seeds.split(",")})
                track = load_json(folder.parent / "track.json")
                settings = plan_settings(options, track)
                os.chdir(ROOT)  # to which the paths in the settings are relative
                check_plan(options, folder, settings)
                run_ids = run_seeds(options, track, settings)
            package(options, folder, run_ids)
        accepted = verify.report(folder)
        if accepted:
            common.write_whole(records / "README.md", leaderboard(records))
    except (ValueError, OSError, LookupError) as error:
        sys.exit(f"make.py: {error}")
    except KeyboardInterrupt:
        sys.exit("make.py: stopped; the same command keeps finished seeds and trains this one anew")
    sys.exit(0 if accepted else 1)


if __name__ == "__main__":
    prepare_output(ends_with_reader=False)
    main()
