"""What the logs of a record must show: each seed's two logs agree, and its numbers follow from each other."""

import json
import math
import os
import re
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path

from common import Findings, is_close, load_json, load_track
from events import MAY_DIFFER_BETWEEN_SEEDS, RULE, read_events, resume_step
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
# Lines of a text log with numbers that the .jsonl has, too
COMPARED_LINES = ("val_loader:", "world_size:", "seed:", "config:", "step:", "Code size:",
                  "Serialized model int8+zlib:", "final_")
RATES = ["bfloat16_tflops", "float32_tflops", "copy_gb_per_s"]  # of the machine, in this order
MUST_MATCH_AFTER_RESUMING = ("world_size", "threads", "torch", "gpu", "data_sha256")
MUST_MATCH_BETWEEN_SEEDS = ("world_size", "threads", "torch", "python", "val_tokens", "val_bytes", "parameters",
                            "data_sha256")

def expected_lines(events: list[dict]) -> list[str]:
    """Return the beginnings of the COMPARED_LINES that a text log must have by its events."""
    last = {event["event"]: event for event in events}
    start, export, final = last["config"], last["export"], last["final"]
    config = start["config"]
    settings = json.dumps({**config, "overrides": start["overrides"]})
    lines = [f"val_loader: tokens:{start['val_tokens']}", f"world_size:{start['world_size']}",
             f"seed:{config['SEED']}", f"config:{settings}"]
    for event in events:
        if event["event"] in ("train", "val"):
            kind = event["event"]
            bpb = f" val_bpb:{event['val_bpb']:.4f}" if kind == "val" else ""
            lines.append(f"step:{event['step']}/{config['ITERATIONS']} {kind}_loss:{event[kind + '_loss']:.4f}"
                         f"{bpb} train_time:{event['train_time_ms']:.0f}ms")
    loss, bpb, eval_ms = final["val_loss"], final["val_bpb"], final["eval_time_ms"]
    return [*lines, f"Code size: {export['code_bytes']} bytes",
            f"Serialized model int8+zlib: {export['artifact_bytes']} bytes",
            f"final_int8_zlib_roundtrip val_loss:{loss:.4f} val_bpb:{bpb:.4f} eval_time:{eval_ms:.0f}ms",
            f"final_int8_zlib_roundtrip_exact val_loss:{loss:.8f} val_bpb:{bpb:.8f}"]


def check_text_log(name: str, events: list[dict], lines: list[str], findings: Findings) -> None:
    """The text log must have the same numbers as the events."""
    shown = [re.sub(r"^val_loader:.* tokens", "val_loader: tokens", line) for line in lines
             if line.startswith(COMPARED_LINES)]
    for line, wanted in zip_longest(shown, expected_lines(events), fillvalue="nothing"):
        at = max(0, len(os.path.commonprefix((line, wanted))) - 60)
        if not findings.check(f"{line} ".startswith(f"{wanted} "),
                              f"{name}: the .log has {line[at:at + 100]!r} where the .jsonl gives "
                              f"{wanted[at:at + 100]!r}"):
            return


def check_steps(name: str, events: list[dict], findings: Findings) -> None:
    """Training must be logged as train_gpt.py logs it: the first ten steps and every TRAIN_LOG_EVERY."""
    every = events[0]["config"]["TRAIN_LOG_EVERY"]
    logged = {event["step"] for event in events if event["event"] == "train"}
    first = resume_step(events) + 1
    last = events[-1]["step"]
    if not findings.check(logged or first > last, f"{name}: the log has no training steps"):
        return
    wanted = {step for step in range(first, last + 1) if step <= 10 or (every and step % every == 0)}
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
    # Older scripts wrote checkpoints in a thread, whose events are late.
    wall = [event["elapsed_s"] for event in events if event["event"] != "checkpoint"]
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


def is_earlier_part(text: Path, events: list[dict], script: str) -> bool:
    """Whether an older text log, with the .jsonl beside it, is of the script, the settings and the machine of `events`."""
    path = text.with_suffix(".jsonl")
    older = read_events(path) if path.is_file() else []
    settings = {key: value for key, value in events[0]["config"].items() if key not in MAY_DIFFER_BETWEEN_SEEDS}
    same = older and all(older[0]["config"].get(key) == value for key, value in settings.items())
    same = same and all(older[0].get(key) == events[0].get(key) for key in MUST_MATCH_AFTER_RESUMING)
    return bool(same) and text.read_text(encoding="utf-8").startswith(script + "\n" + RULE)


def check_resumed(folder: Path, name: str, events: list[dict], findings: Findings) -> bool:
    """Return whether the run was resumed. Its older logs, of this script, these settings and this machine, must cover
    all earlier steps, and the training clock must go on from theirs."""
    resumed = next((event for event in events if event["event"] == "resume"), None)
    first = next((event["step"] for event in events if event["event"] == "train"), 1)
    if resumed is None and first == 1:
        return False
    script = (folder / "train_gpt.py").read_text(encoding="utf-8")
    covered, clock = set(), {}
    for path in folder.glob(f"{name}.*.log"):
        if is_earlier_part(path, events, script):
            older = read_events(path.with_suffix(".jsonl"))
            covered |= set(range(resume_step(older), max(event.get("step", 0) for event in older) + 1))
            for event in older:
                if event["event"] == "train":  # a step may have been done twice, at different speeds
                    step, ms = event["step"], event["train_time_ms"]
                    clock[step] = min(ms, clock.get(step, ms))
    end = resumed["step"] if resumed else first
    missing = next((step for step in range(end + 1) if step not in covered), None)
    findings.check(missing is None, f"{name}: the run was resumed at step {end}, but there is no older log of "
                   f"this script, these settings and this machine that has step {missing}")
    if resumed:
        least = max((ms for step, ms in clock.items() if step <= end), default=0.0)
        findings.check(resumed["train_time_ms"] >= least, f"{name}: the run was resumed after "
                       f"{resumed['train_time_ms']:.0f} ms, but earlier steps took {least:.0f} ms")
    return True


def read_seed(folder: Path, path: Path, source: str, findings: Findings) -> dict | None:
    """Return the numbers of one seed from its two logs, train_seedN.log and .jsonl; None if that fails."""
    name = path.stem
    try:
        parts = path.read_text(encoding="utf-8").split("\n" + RULE + "\n", 2)
        if not findings.check(len(parts) == 3,
                              f"{name}.log: two rules of = must divide source, machine and lines"):
            return None
        versions, lines = parts[1], parts[2].splitlines()
        events = read_events(path.with_suffix(".jsonl"))
        starts = [i for i, event in enumerate(events) if event["event"] == "config"]
        findings.check(starts == [0], f"{name}.jsonl must have one config event, its first")
        seed = summarize(events, versions, lines)
        seed["resumed"] = check_resumed(folder, name, events, findings)
        for check in (check_scores, check_steps, check_clock):
            check(name, events, findings)
        check_text_log(name, events, lines, findings)
    except Exception as error:  # forged logs can be anything
        findings.append(f"{name}: a log is missing, unfinished or damaged: {type(error).__name__}: {error}")
        return None
    code = source.encode("utf-8")
    findings.check(parts[0] == source, f"{name}.log: the source in it is not the folder's train_gpt.py")
    findings.check(f"\nRunning PyTorch {seed['torch']}\n" in versions,
                   f"{name}: .log and .jsonl disagree on PyTorch")
    findings.check(name == f"train_seed{seed['seed']}", f"{path.name} has SEED={seed['seed']}")
    findings.check(not seed["settings"].get("VAL_TOKENS"), f"{name}: VAL_TOKENS scores a part of the validation text")
    findings.check((seed["code_bytes"], seed["code_sha256"]) == (len(code), sha256(code).hexdigest()),
                   f"{name}: code_bytes and code_sha256 are not train_gpt.py's")
    return seed


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
    """Return the seeds of a record folder, each as summarize gives it, with "resumed", the division's "table"
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
    losses = {str(seed["losses"] or seed["seed"]) for seed in seeds}  # none, if resumed at the last step
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
