"""What the logs of a record must show: the numbers of each seed follow from each other, and its clocks agree."""

import math
import re
from hashlib import sha256
from pathlib import Path

from common import Findings, is_close, load_json, load_track
from events import MAY_DIFFER_BETWEEN_SEEDS, RULE, read_events
from source_rules import check_script

# Slack, and why
ROUNDING = 1e-9  # sums of the same floats in another order
RATE_ROUNDING = 1e-6  # relative; the clock of two events is a difference of large floats
CLOCK_SHARE = 0.05  # the wall clock includes logging
CLOCK_MS = 250  # a slow disk under the log
LAST_MS = 1000  # a run may pass the cap by an average step and this much for a hiccup
EVALUATION_SECONDS = 10  # between export and score the artifact is read back and sent to all ranks
PAUSE_SHARE, PAUSE_S = 3, 2  # a validation may stop the clock for thrice the time of the last one, and two seconds
BETTER_BY_EXPORT = 0.01  # nats: rounding weights to int8 may improve the loss by chance, but by less than this
RATES = ["bfloat16_tflops", "float32_tflops", "copy_gb_per_s"]  # of the machine, in this order
MUST_MATCH_BETWEEN_SEEDS = ("world_size", "threads", "torch", "python", "val_tokens", "val_bytes", "parameters",
                            "data_sha256")


def check_steps(name: str, events: list[dict], findings: Findings) -> None:
    """Training must be logged as train_gpt.py logs it: the first ten steps and every TRAIN_LOG_EVERY."""
    every = events[0]["config"]["TRAIN_LOG_EVERY"]
    logged = {event["step"] for event in events if event["event"] == "train"}
    resumed = any(event["event"] == "resume" for event in events)
    findings.check(not resumed, f"{name}: a record is one run from its first step to its end")
    if not findings.check(logged, f"{name}: the log has no training steps"):
        return
    wanted = {step for step in range(1, events[-1]["step"] + 1) if step <= 10 or (every and step % every == 0)}
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
    if trained:
        first, end = trained[0], last["val"]
        pauses = sum(event["event"] == "val" and event["step"] >= first["step"] for event in events)
        wall = end["elapsed_s"] - first["elapsed_s"]
        seconds = (end["train_time_ms"] - first["train_time_ms"]) / 1000
        most = pauses * (PAUSE_SHARE * last["final"]["eval_time_ms"] / 1000 + PAUSE_S)
        findings.check(wall - seconds <= most, f"{name}: the training clock stood still for {wall - seconds:.1f} s, but "
                       f"{pauses} validations explain {most:.1f} s at most")
    wall = [event["elapsed_s"] for event in events]
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


def read_seed(folder: Path, path: Path, source: str, findings: Findings) -> dict | None:
    """Return the numbers of one seed from its two logs, train_seedN.log and .jsonl; None if that fails."""
    name = path.stem
    try:
        parts = path.read_text(encoding="utf-8").split("\n" + RULE + "\n", 2)
        if not findings.check(len(parts) == 3,
                              f"{name}.log: two rules of = must divide the script's digest, the machine and the lines"):
            return None
        versions, lines = parts[1], parts[2].splitlines()
        events = read_events(path.with_suffix(".jsonl"))
        starts = [i for i, event in enumerate(events) if event["event"] == "config"]
        findings.check(starts == [0], f"{name}.jsonl must have one config event, its first")
        seed = summarize(events, versions, lines)
        for check in (check_scores, check_steps, check_clock):
            check(name, events, findings)
    except Exception as error:  # forged logs can be anything
        findings.append(f"{name}: a log is missing, unfinished or damaged: {type(error).__name__}: {error}")
        return None
    code = source.encode("utf-8")
    findings.check(parts[0] == script_line(source), f"{name}.log: its first line must be {script_line(source)!r}")
    findings.check(f"\nRunning PyTorch {seed['torch']}\n" in versions,
                   f"{name}: .log and .jsonl disagree on PyTorch")
    findings.check(name == f"train_seed{seed['seed']}", f"{path.name} has SEED={seed['seed']}")
    findings.check(not seed["settings"].get("VAL_TOKENS"), f"{name}: VAL_TOKENS scores a part of the validation text")
    findings.check((seed["code_bytes"], seed["code_sha256"]) == (len(code), sha256(code).hexdigest()),
                   f"{name}: code_bytes and code_sha256 are not train_gpt.py's")
    return seed


def script_line(source: str) -> str:
    """Return what stands for a script in the text logs of a record, beside which the script itself lies once."""
    return f"train_gpt.py of SHA-256 {sha256(source.encode('utf-8')).hexdigest()}"


def summarize(events: list[dict], versions: str, lines: list[str]) -> dict:
    """Return a seed's numbers that rules and claims are about. Raises LookupError if an event is missing."""
    last = {event["event"]: event for event in events}
    val = last["val"]
    seed = {"data_sha256": None, **last["config"], **last["export"], **last["final"]}
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
    """Return the seeds of a record folder, each as summarize gives it, with the division's "table"
    for its tokenizer, and "val_bpb_original", bits per byte of the original text (None if not known)."""
    script = folder / "train_gpt.py"
    if not findings.check(script.is_file(), "train_gpt.py is missing"):
        return []
    source = script.read_text(encoding="utf-8")
    findings += check_script(source)
    logs = sorted(path for path in folder.glob("train_seed*.log")
                  if re.fullmatch(r"train_seed\d+", path.stem))
    findings.check(logs, "there is no train_seedN.log")
    seeds = [read_seed(folder, path, source, findings) for path in logs]
    seeds = [seed for seed in seeds if seed]
    for seed in seeds:
        rates = folder / f"rates_seed{seed['seed']}.json"
        if rates.is_file():
            seed["rates"] = read_rates(rates, findings)
    scored = load_track(folder).get("divisions", {}).get(division, {}).get("scored", {})
    for seed in seeds:
        seed["table"] = find_table(scored, seed)
        ratio = seed["table"].get("original_per_decoded_byte")
        seed["val_bpb_original"] = seed["val_bpb"] / ratio if ratio else None
    check_differences(seeds, findings)
    return seeds


def read_rates(path: Path, findings: Findings) -> dict[str, float]:
    """Return the rates of the machine that rates.py measured."""
    try:
        rates = load_json(path)
    except (OSError, ValueError) as error:
        findings.append(f"{path.name} cannot be read: {error}")
        return {}
    is_right = isinstance(rates, dict) and list(rates) == RATES and all(isinstance(rate, float) for rate in rates.values())
    findings.check(is_right, f"{path.name} must have the numbers {', '.join(RATES)}")
    return rates if is_right else {}


def check_differences(seeds: list[dict], findings: Findings) -> None:
    """Seeds must be different runs of the same settings in the same place."""
    numbers = [seed["seed"] for seed in seeds]
    losses = {str(seed["losses"]) for seed in seeds}
    artifacts = {seed["artifact_sha256"] for seed in seeds}
    findings.check(len(set(numbers)) == len(seeds), f"seeds are not different: {numbers}")
    findings.check(len(losses) == len(artifacts) == len(seeds),
                   "two seeds have the same training losses or artifact")
    for seed in seeds[1:]:
        names = [name for name, value in seeds[0]["settings"].items()
                 if name not in MAY_DIFFER_BETWEEN_SEEDS and seed["settings"].get(name) != value]
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
