"""Read finished runs, pair them by seed, and say how large an effect is, and how sure that is."""

import json
import math
import re
import statistics
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
from events import MAY_DIFFER_BETWEEN_SEEDS, RULE, read_events

# Settings that do not change a result. The digests of the data stand for the paths.
NOT_CONTENT = MAY_DIFFER_BETWEEN_SEEDS | {"DATA_PATH", "TOKENIZER_PATH", "TRAIN_LOG_EVERY", "VAL_LOSS_EVERY", "VAL_BATCH_SIZE"}
ERROR = 0.05  # of each end of an interval, over all looks together
BEST_LOOK = 10  # pairs, near which most of the error is spent
SCALE, POWER = 0.023, 1.15  # of the level of a look, by the error of all looks together
CHANCE_T = 2.5  # t statistic of an effect that the selection alone explains
LEAST_PAIRS, MOST_PAIRS = 3, 64  # of two pairs, an interval has 12,000 times their spread


@dataclass
class Run:
    """A finished run. Scores are bits per byte."""
    log: Path
    content: dict  # all that makes the result, but the seed
    seed: int
    bpb: float  # of the compressed model
    artifact_bytes: int  # with the script
    step_ms: float
    seconds: float  # that it took
    began: float  # in seconds, as the time of a file
    checked: str | None = None  # why its score is wrong, "" if it is right, None if not yet checked


class Effect(NamedTuple):
    """Mean of the pairs' differences, the ends of its interval, the number of pairs, their spread,
    and p of "it does not gain"."""
    mean: float
    low: float
    high: float
    pairs: int
    spread: float
    p: float


# ---- Runs ------------------------------------------------------------------------------


def content_of(start: dict, source: str, cpu: str) -> dict:
    """Return what makes a run's result, but its seed, from its "config" event, script and CPU."""
    data = [start["data_sha256"], start["val_tokens"], start["val_bytes"]]
    digest = sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:12]
    settings = {name: value for name, value in start["config"].items() if name not in NOT_CONTENT}
    is_timed = bool(settings["MAX_WALLCLOCK_SECONDS"])
    return {"script": sha256(source.encode()).hexdigest()[:12], "data": digest,
            "torch": start["torch"].partition("+")[0], "gpu": start["gpu"],
            "cpu": cpu if is_timed and not start["gpu"] else "",  # a digest of its name
            "threads": start["threads"] if is_timed else "any",  # by --jobs, also on one GPU
            "ranks": start["world_size"], **settings}


def read_run(log: Path) -> Run | None:
    """Return the run of a .jsonl log; None if it has not ended, was resumed, or has no script."""
    try:
        events = read_events(log)
        latest = {event["event"]: event for event in events}
        if "resume" in latest or not math.isfinite(latest["final"]["val_bpb"]):  # None is no number.
            return None
        text = log.with_suffix(".txt")  # to which no check adds a line
        source = text.read_text(encoding="utf-8").partition(f"\n{RULE}")[0]
        start, final, export = events[0], latest["final"], latest["export"]
        cpu = re.match(".*_on_([0-9a-f]{6})_", log.stem)  # by `Arm.tag`
        content = content_of(start, source, cpu[1] if cpu else "")
        return Run(log, content, start["config"]["SEED"], final["val_bpb"], export["artifact_bytes"] + export["code_bytes"],
                   latest["val"]["step_avg_ms"] or 1.0,  # 0 with ITERATIONS=0
                   final["elapsed_s"], text.stat().st_mtime - final["elapsed_s"], latest.get("checked", {}).get("reason"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        return None  # It has no end, or is no log of this trainer.


def read_runs(folder: Path) -> list[Run]:
    """Return the finished runs of all logs in a folder."""
    return list(filter(None, map(read_run, sorted(folder.glob("*.jsonl")))))


def pairs_of_seeds(first: list[Run], second: list[Run]) -> list[tuple[Run, Run]]:
    """Return the runs of two groups in pairs of one seed."""
    by_seed = {run.seed: run for run in first}
    return [(by_seed[run.seed], run) for run in second if run.seed in by_seed]


# ---- Statistics ------------------------------------------------------------------------


def differences_of(pairs: list[tuple[Run, Run]]) -> list[float]:
    """Return the second runs' bits per byte minus the first ones'."""
    return [second.bpb - first.bpb for first, second in pairs]


def level_of_look(pairs):
    """Return the one-sided level of a t-test after this many pairs. Without an effect, the tests
    after 2, 3, ..., 64 pairs together are wrong with the probability ERROR, whenever one stops;
    with levels that are (error / ERROR) ** POWER times as high, with the probability `error`. SCALE
    and POWER fit 600,000 simulations of normal differences, for errors of 0.0001 to 0.05."""
    return SCALE * np.minimum((pairs / BEST_LOOK) ** 4, (BEST_LOOK / pairs) ** 2)


def p_of(differences: np.ndarray) -> np.ndarray:
    """Return the p-values of "the mean is not negative" after each number of pairs, of which the
    differences (..., pairs) came one by one: the smallest errors with which the tests of
    `level_of_look` reject. Any of them may be taken, at any time: at most a share `error` of
    sequences without an effect ever has one below `error`. The first one, of one pair, is 1."""
    from scipy import special  # in a tenth of the time that scipy.stats takes to import
    differences = np.asarray(differences, dtype=np.float64)
    counts = np.arange(1, differences.shape[-1] + 1)
    means = differences.cumsum(-1) / counts
    centred = differences - differences[..., :1]  # equal differences have a spread of exactly 0
    squares = np.square(centred).cumsum(-1) - np.square(centred.cumsum(-1)) / counts
    p = np.ones_like(differences)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = means * np.sqrt(counts * (counts - 1) / np.maximum(squares, 0))
    levels = special.stdtr(counts[1:] - 1, t[..., 1:]) / level_of_look(counts[1:])
    p[..., 1:] = np.minimum(1, ERROR * levels ** (1 / POWER))
    return np.nan_to_num(p, nan=1.0)  # no difference at all


def limits_of(differences: list[float]) -> Effect:
    """Return the effect of pairs that came one by one. Its interval holds at all numbers of pairs
    together, each of its ends with a probability of 1 - ERROR."""
    from scipy import special
    pairs, mean = len(differences), statistics.mean(differences)
    if pairs < 2:
        return Effect(mean, -math.inf, math.inf, pairs, 0.0, 1.0)
    spread = statistics.stdev(differences)
    reach = -special.stdtrit(pairs - 1, level_of_look(pairs)) * spread / math.sqrt(pairs)
    return Effect(mean, mean - reach, mean + reach, pairs, spread, float(p_of(differences)[-1]))


def ends_of(facts: dict) -> str:
    """Return the ends of an interval as text, unless it is of so few pairs that it tells nothing."""
    return "{low:+.4f} to {high:+.4f}".format(**facts) if facts["pairs"] >= LEAST_PAIRS else f"needs {LEAST_PAIRS} pairs"


def judge_all(effects: list[Effect], least: float, count: int) -> list[str]:
    """Return whether each change is "better", brings "no gain" of `least` bits per byte or more, or
    is "undecided". With a probability of 1 - ERROR, none of `count` changes is wrongly called
    better: Holm's procedure (1979, jstor.org/stable/4615733), whose p-values may share runs. Each
    "no gain" is wrong with a probability of ERROR."""
    verdicts = ["no gain" if effect.low >= -least else "undecided" for effect in effects]
    order = sorted(range(len(effects)), key=lambda place: effects[place].p)
    for rank, place in enumerate(order):
        if effects[place].p > ERROR / max(1, count - rank):
            break
        verdicts[place] = "better"
    return verdicts


def correct_for_selection(effect: Effect) -> float:
    """Return the effect of a change that was called better, without what the selection adds: it was
    called so as soon as its pairs looked good. The formula fits simulations: with at most 12 pairs,
    gains of 0.5, 1 and 2 spreads of a pair look like 0.86, 1.12 and 2.03, and corrected, like 0.63,
    0.95 and 2.00."""
    if not effect.spread:
        return effect.mean
    t = effect.mean / effect.spread * math.sqrt(effect.pairs)
    return effect.mean * max(0.0, 1 - (CHANCE_T / t) ** 4) ** 0.25


if __name__ == "__main__":
    print(f"usage: other scripts import this file. {__doc__}")
