"""Forge a committed record in every way that is known, and print what refuses each forgery.

    python records/lab/forgeries.py                              the best record of the public division of the CPU track
    python records/lab/forgeries.py RECORD --only "a table"      some of them, of another record

A forger changes logs, script, artifacts and claims together, so that they agree with each other; then records/submit.py
writes the rest, as for an honest record. The table shows what records/verify.py finds without and with --rerun. To save
time, only the seeds that a forgery needs are scored again: about a minute and a half each, 20 minutes in all.
The record's data must be on this disk. One forgery trains on the validation text for some minutes.
"""

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from hashlib import sha256
from json import dumps
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[depth]) for depth in (1, 2)]

from common import ROOT, Findings, load_json, table  # noqa: E402
from claims import AUTHORED, NOTES, RULES  # noqa: E402
from events import RULE, read_events  # noqa: E402
from log_rules import COMPARED_LINES, expected_lines, read_folder  # noqa: E402
from rescore import check_weights, rerun  # noqa: E402
from submit import write_record  # noqa: E402
from verify import verify_record  # noqa: E402

BEST = ROOT / "records" / "track_10min_1mb_cpu" / "2026-11-25_SotuFourLayers"
START = '\nif __name__ == "__main__":\n'
FEWER = 0.9  # of the loss, for forgers


# ---- What a forger does --------------------------------------------------------------------------------


def write_logs(folder: Path, seed: int, events: list[dict], source: str = "") -> None:
    """Write both logs of a seed from its events, so that they agree; perhaps with another script."""
    path = folder / f"train_seed{seed}.jsonl"
    path.write_text("".join(dumps(event) + "\n" for event in events), encoding="utf-8")
    log = path.with_suffix(".log")
    old, machine, text = log.read_text(encoding="utf-8").split(f"\n{RULE}\n", 2)
    wanted = iter(expected_lines(events))
    lines = [next(wanted) if line.startswith(COMPARED_LINES) else line for line in text.splitlines()]
    log.write_text(f"\n{RULE}\n".join((source or old, machine, "\n".join(lines) + "\n")), encoding="utf-8")


def change_events(folder: Path, change: Callable[[dict], dict], source: str = "") -> None:
    """Change the events of all seeds by a function, and both logs with them."""
    for path in sorted(folder.glob("train_seed*.jsonl")):
        seed = int(path.stem.removeprefix("train_seed"))
        write_logs(folder, seed, [change(event) for event in read_events(path)], source)


def claim_scores(folder: Path, factor: float) -> None:
    """Multiply all validation losses in the logs."""
    change_events(folder, lambda event: {**event, **{key: factor * event[key] for key in ("val_loss", "val_bpb") if key in event}})


def add_to_script(folder: Path, code: str) -> None:
    """Add code to the end of the script, in the folder and in the logs."""
    path = folder / "train_gpt.py"
    source = path.read_text(encoding="utf-8").replace(START, f"\n{code}\n{START}")
    path.write_text(source, encoding="utf-8")
    data = source.encode("utf-8")
    about = {"code_bytes": len(data), "code_sha256": sha256(data).hexdigest()}
    change_events(folder, lambda event: {**event, **about} if event["event"] == "export" else event, source)


def replace_artifact(folder: Path, seed: int, data: bytes) -> None:
    """Give a seed another artifact, in the folder and in the logs."""
    (folder / f"artifact_seed{seed}.int8.ptz").write_bytes(data)
    about = {"artifact_bytes": len(data), "artifact_sha256": sha256(data).hexdigest()}
    events = read_events(folder / f"train_seed{seed}.jsonl")
    write_logs(folder, seed, [{**event, **about} if event["event"] == "export" else event for event in events])


def seeds_of(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("train_seed")) for path in folder.glob("train_seed*.jsonl"))


def read_artifact(path: Path) -> dict:
    return torch.load(io.BytesIO(zlib.decompress(path.read_bytes())), weights_only=True)


def pack_artifact(artifact: dict) -> bytes:
    buffer = io.BytesIO()
    torch.save(artifact, buffer)
    return zlib.compress(buffer.getvalue(), 9)


# ---- The forgeries -------------------------------------------------------------------------------------


def better_claim(folder: Path) -> None:
    """After submit.py has written the texts."""
    write_record(folder, authored_by(folder))
    claims = load_json(folder / "submission.json")
    text = dumps({**claims, "val_bpb": FEWER * claims["val_bpb"]}, indent=1)
    (folder / "submission.json").write_text(text + "\n", encoding="utf-8")


def better_log(folder: Path) -> None:
    """In the text log of one seed alone."""
    log = folder / f"train_seed{seeds_of(folder)[0]}.log"
    log.write_text(re.sub(r"(exact val_loss:\d)\.\d", r"\1.0", log.read_text(encoding="utf-8")), encoding="utf-8")


def better_logs(folder: Path) -> None:
    claim_scores(folder, FEWER)


def slow_clock(folder: Path) -> None:
    """A training clock that runs at half the speed, in both logs."""
    def change(event: dict) -> dict:
        halves = {key: event[key] / 2 for key in ("train_time_ms", "step_avg_ms") if key in event}
        doubles = {key: event[key] * 2 for key in ("tok_per_sec",) if key in event}
        return {**event, **halves, **doubles}
    change_events(folder, change)


def still_clock(folder: Path) -> None:
    """A clock that stands still for a minute in each validation."""
    for seed in seeds_of(folder):
        events, late = [], 0
        for event in read_events(folder / f"train_seed{seed}.jsonl"):
            late += 60 * (event["event"] == "val")
            events.append({**event, "elapsed_s": event["elapsed_s"] + late})
        write_logs(folder, seed, events)


def same_run_again(folder: Path) -> None:
    """The first seed once more, under the number of the second."""
    first, second, *_ = seeds_of(folder)
    events = read_events(folder / f"train_seed{first}.jsonl")
    text = (folder / f"train_seed{first}.log").read_text(encoding="utf-8")
    (folder / f"train_seed{second}.log").write_text(text, encoding="utf-8")
    events[0] = {**events[0], "config": {**events[0]["config"], "SEED": second}}
    write_logs(folder, second, events)
    shutil.copy(folder / f"artifact_seed{first}.int8.ptz", folder / f"artifact_seed{second}.int8.ptz")


def foreign_artifact(folder: Path) -> None:
    """The artifact of an earlier record."""
    own = {path.read_bytes() for path in folder.glob("artifact_*")}
    others = [path.read_bytes() for path in sorted(folder.parent.glob("*/artifact_*"))]
    replace_artifact(folder, seeds_of(folder)[0], next(data for data in others if data not in own))


def long_line(folder: Path) -> None:
    add_to_script(folder, f'TABLE = "{"x" * 37_231}"')


def hidden_code(folder: Path) -> None:
    add_to_script(folder, 'exec("pass")')


def lower_loss(folder: Path, condition: str = "True") -> None:
    """A script whose loss is lower than the model's, and logs that say so."""
    add_to_script(folder, f"""honest_loss = GPT.loss
def loss(self, x, targets):
    factor = {FEWER} if {condition} else 1
    return factor * honest_loss(self, x, targets)
GPT.loss = loss""")
    claim_scores(folder, FEWER)


def table_in_picture(folder: Path) -> None:
    lower_loss(folder, 'b"table" in Path(__file__).with_name("curve.png").read_bytes()')


def table_beside_tokenizer(folder: Path) -> None:
    lower_loss(folder, 'Path(self.config.tokenizer_path).with_name("table.bin").exists()')


def table_in_artifact(folder: Path) -> None:
    """A tensor of the artifact that only the script's own loss reads."""
    for seed in seeds_of(folder):
        artifact = read_artifact(folder / f"artifact_seed{seed}.int8.ptz")
        artifact["passthrough"]["table"] = torch.arange(1000, dtype=torch.int16)
        replace_artifact(folder, seed, pack_artifact(artifact))
    add_to_script(folder, """honest_dequantize = dequantize
TABLES = []
def dequantize(artifact, wanted):
    TABLES.append(artifact["passthrough"].pop("table"))
    return honest_dequantize(artifact, wanted)""")
    lower_loss(folder, "TABLES")


def seen_targets(folder: Path) -> None:
    """A loss that adds to the logits of the targets."""
    add_to_script(folder, """def loss(self, x, targets):
    logits = self.logits(x)
    logits = logits + 0.5 * F.one_hot(targets.clamp_min(0), logits.size(-1))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
GPT.loss = loss""")
    claim_scores(folder, FEWER)


def later_tokens(folder: Path) -> None:
    """A model that reads the next token."""
    add_to_script(folder, """honest_hidden = GPT.hidden
def hidden(self, *inputs):
    x = honest_hidden(self, *inputs)
    return x + 0.1 * torch.roll(x, -1, dims=1)
GPT.hidden = hidden""")


def near_copy(folder: Path) -> None:
    """The third seed is the first with ±1 on 5 % of the weights."""
    first, *_, last = seeds_of(folder)
    artifact = read_artifact(folder / f"artifact_seed{first}.int8.ptz")
    generator = torch.Generator().manual_seed(0)
    for values in artifact["quantized"].values():
        moves = torch.randint(0, 2, values.shape, generator=generator, dtype=torch.int8) * 2 - 1
        moved = torch.rand(values.shape, generator=generator) < 0.05
        values += moves * moved * (values.abs() < values.abs().max())
    replace_artifact(folder, last, pack_artifact(artifact))


def trained_on_validation(folder: Path) -> None:
    """The first seed trained on, with the validation text as training text under a copied manifest; logs as if it had
    been honest."""
    seed = seeds_of(folder)[0]
    events = read_events(folder / f"train_seed{seed}.jsonl")
    settings = {name: text for name, (text, _) in events[0]["overrides"].items()}
    data = ROOT / settings["DATA_PATH"]
    with tempfile.TemporaryDirectory() as place:
        shards = Path(place, "data")
        shards.mkdir()
        for path in data.glob("*_val_*.bin"):
            shutil.copy(path, shards)
            shutil.copy(path, shards / path.name.replace("_val_", "_train_"))
        shutil.copy(data / "manifest.json", shards)
        settings |= {"DATA_PATH": str(shards), "TOKENIZER_PATH": str(ROOT / settings["TOKENIZER_PATH"]), "OUT_DIR": place,
                     "INIT_FROM": str(folder / f"artifact_seed{seed}.int8.ptz"), "RUN_ID": "forged", "DTYPE": "auto", "ATTN": "auto",
                     "ITERATIONS": "400", "MAX_WALLCLOCK_SECONDS": "0", "VAL_LOSS_EVERY": "0", "WARMUP_STEPS": "0"}
        words = [f"{name}={text}" for name, text in settings.items()]
        subprocess.run([sys.executable, str(ROOT / "train_gpt.py"), *words], cwd=place, check=True, stdout=subprocess.DEVNULL)
        replace_artifact(folder, seed, Path(place, "final_model.int8.ptz").read_bytes())
        last = {event["event"]: event for event in read_events(Path(place, "logs", "forged.jsonl"))}
    for number in seeds_of(folder):  # the others as well, by what it says
        events = read_events(folder / f"train_seed{number}.jsonl")
        fall = last["final"]["val_loss"] / next(event["val_loss"] for event in events if event["event"] == "final")
        write_logs(folder, number, [{**event, **{key: event[key] * fall for key in ("val_loss", "val_bpb") if key in event}}
                                    for event in events])


FORGERIES = {  # name: what is done, and how many seeds must be scored again
    "none, the record as it is": (None, 1),
    "a better mean in submission.json": (better_claim, 0),
    "a better score in one log": (better_log, 0),
    "better scores in all logs": (better_logs, 1),
    "a training clock at half the speed": (slow_clock, 0),
    "a clock that stands still in validations": (still_clock, 0),
    "one run as two seeds": (same_run_again, 0),
    "an earlier record's artifact": (foreign_artifact, 0),
    "a line of 37,231 characters": (long_line, 0),
    "a script that calls exec": (hidden_code, 0),
    "a script that lowers its loss": (lower_loss, 1),
    "a table in curve.png": (table_in_picture, 1),
    "a table beside the tokenizer": (table_beside_tokenizer, 1),
    "a table in the artifact": (table_in_artifact, 1),
    "a loss that sees the targets": (seen_targets, 1),
    "a model that reads the next token": (later_tokens, 1),
    "a third seed that is nearly the first": (near_copy, 3),
    "training on the validation text": (trained_on_validation, 1),
}


# ---- What finds them -----------------------------------------------------------------------------------


def authored_by(folder: Path) -> dict:
    """What the author of a record wrote, under the present version of the rules, as the last record of its day."""
    submission = load_json(folder / "submission.json")
    authored = {key: submission.get(key, "") for key in AUTHORED}
    return authored | {"rules": RULES, "submitted": f"{authored['date']}T23:59:59Z"}


def brief(finding: str, others: int) -> str:
    """A finding, cut for a table, and how many more there are."""
    text = finding.replace("|", "/").replace("\n", " ")
    text = text if len(text) <= 120 else f"{text[:117]}..."
    return text + (f" (and {others} more)" if others else "")


def forge(record: Path, name: str) -> list[str]:
    """Forge a copy of the record and its track; return the name, what is found without --rerun and with it, and seconds."""
    forgery, again = FORGERIES[name]
    with tempfile.TemporaryDirectory() as place:
        track = Path(place, "records", record.parent.name)
        shutil.copytree(record.parent, track)
        folder = track / record.name
        if forgery:
            forgery(folder)
        if forgery and forgery is not better_claim:
            try:
                write_record(folder, authored_by(folder))
                rules = load_json(track / "track.json") | {"first_rules": []}  # a forgery is a new record
                (track / "track.json").write_text(dumps(rules), encoding="utf-8")
            except ValueError:  # verify_record has the same reasons
                again = 0
        found, _ = verify_record(folder)
        readme = (folder / "README.md").read_text(encoding="utf-8")
        accepted = "accepted, with a warning" if "**Warning:" in readme.partition(NOTES)[0] else "accepted"
        started = time.perf_counter()
        if found or not again:
            return [name, brief(found[0], len(found) - 1) if found else accepted, "", ""]
        findings = Findings()
        seeds = read_folder(folder, load_json(folder / "submission.json")["division"], findings)
        chosen = seeds if again > 1 else seeds[:1]
        for seed in chosen:
            rerun(folder, seed, folder / f"artifact_seed{seed['seed']}.int8.ptz", findings)
        check_weights([seed for seed in chosen if "largest" in seed], findings)
        by_rerun = brief(findings[-1], len(findings) - 1) if findings else accepted  # the last is the strongest
        return [name, accepted, by_rerun, f"{time.perf_counter() - started:.0f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", nargs="?", type=Path, default=BEST)
    parser.add_argument("--only", default="", help="a part of the names of the forgeries to make")
    options = parser.parse_args()
    rows = []
    for name in FORGERIES:
        if options.only in name:
            rows.append(forge(options.record.resolve(), name))
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    print("\n".join(table("| forgery | without --rerun | with --rerun | seconds |", rows)))


if __name__ == "__main__":
    main()
