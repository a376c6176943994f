"""The instrument for ablations: its statistics, the logs as its memory, what makes a model invalid, and whole commands."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import ablate
import effects
import numpy as np
import pytest
import train_gpt
from conftest import REPOSITORY, make_shards, tiny_arguments

pytest.importorskip("scipy")
SOURCE = (REPOSITORY / "train_gpt.py").read_text(encoding="utf-8")


# ---- Statistics ----------------------------------------------------------------------------------------------------------


def verdicts(effect: float, ratio: float, freedom: int, diff: float, count: int, most: int = 8) -> tuple[dict, float]:
    """Shares of the verdicts about `count` simulated ablations, and the mean number of pairs. Earlier pairs have a spread of 1,
    which `freedom` of them tell; these pairs have `ratio`."""
    random = np.random.default_rng(1)
    shares, pairs = dict.fromkeys(("better", "no gain", "undecided"), 0.0), 0
    for _ in range(count):
        differences = random.normal(effect, ratio, most).tolist()
        earlier = (random.chisquare(freedom) / freedom) ** 0.5 if freedom else 0.0
        for n in range(2, most + 1):
            verdict = effects.judge(effects.limits_of(differences[:n], most, earlier, freedom), diff)
            if verdict != "undecided":
                break
        shares[verdict] += 1 / count
        pairs += n / count
    return shares, pairs


@pytest.mark.parametrize("ratio, freedom", [(1, 0), (0.5, 4), (1, 4), (2, 4), (1, 2)])
def test_the_error_is_at_most_five_percent(ratio, freedom):
    """Without an effect, "better", also where no look ends in "no gain"; with an effect of DIFF, "no gain". 4,000 repetitions
    have a standard error of 0.0035."""
    assert 0.002 < verdicts(0.0, ratio, freedom, diff=-9, count=4000)[0]["better"] <= 0.05 + 0.008
    assert verdicts(-1.5, ratio, freedom, diff=1.5, count=4000)[0]["no gain"] <= 0.05 + 0.008


def test_effects_are_found_in_few_runs():
    plain, pairs = verdicts(-1.5, 1, 0, diff=1.5, count=1000)
    moderated, fewer = verdicts(-6.0, 1, 4, diff=1.5, count=1000)
    assert plain["better"] > 0.9 and pairs < 6
    assert moderated["better"] > 0.99 and fewer < 2.3
    assert verdicts(0.0, 1, 4, diff=3.0, count=1000)[0]["no gain"] > 0.97


def test_limits_by_hand():
    """With at most two pairs there is one look, so the bound is that of Student's t: 6.314 at one degree of freedom."""
    effect = effects.limits_of([-0.003, -0.001], most=2)
    assert effect.mean == pytest.approx(-0.002) and effect.spread == pytest.approx(2**0.5 / 1000)
    assert effect.high - effect.mean == pytest.approx(6.314 * 0.001, rel=0.03)
    assert effects.limits_of([-0.003], most=1).high == float("inf")
    moderated = effects.limits_of([-0.003, -0.001], most=2, earlier=0.002, freedom=9)  # of which 3 are taken
    assert moderated.spread == pytest.approx(((3 * 4e-6 + 2e-6) / 4) ** 0.5)
    assert effects.pairs_needed(effect, 2, 0.01) < effects.pairs_needed(effect, 2, 0.002) < 30
    assert effects.pairs_needed(effect, 2, 0.002) == effects.pairs_needed(effect, 8, 0.002)
    # The normal quantile of four in five is 0.84: with 14 pairs, (2.292 + 0.84) * 0.001414 < 0.0012 * 14**0.5; with 13, 2.395.
    assert effects.pairs_needed(effect, 2, 0.0012) == 14


# ---- Logs ----------------------------------------------------------------------------------------------------------------


def write_log(folder, name, seed, bpb, source=SOURCE, gpu="", data="a", end=True, **changes):
    """The log of a run, as train_gpt.py writes it."""
    config = {"SEED": seed, "RUN_ID": name, "DATA_PATH": "data/sotu", "ITERATIONS": 100, "MAX_WALLCLOCK_SECONDS": 0.0,
              "DTYPE": "float32", "MLP_SLOPE": 0.0, "SIZE_CAP": 0, **changes}
    events = [{"event": "config", "config": config, "data_sha256": {"a.bin": data}, "val_tokens": 9, "val_bytes": 30,
               "torch": "2.13.0+cpu", "world_size": 1, "threads": 2, "gpu": gpu}]
    events += [{"event": "train", "step": step, "train_time_ms": 10.0 * step} for step in (1, 10, 50, 100)]
    events += [{"event": "val", "step": 100, "val_bpb": bpb - 0.01, "step_avg_ms": 10.0},
               {"event": "export", "artifact_bytes": 5, "code_bytes": 7}, {"event": "final", "val_bpb": bpb, "elapsed_s": 9.0}]
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, events if end else events[:-1])))
    (folder / f"{name}.txt").write_text(f"{source}\n{effects.RULE}\n", encoding="utf-8")


def test_a_run_is_known_by_its_content(tmp_path, monkeypatch):
    write_log(tmp_path, "first", 1, 1.5)
    first = effects.read_run(tmp_path / "first.jsonl")
    assert first.bpb == 1.5 and first.artifact_bytes == 12 and first.step_ms == 10 and first.curve == {100: 1.49}
    same = {"seed": {"seed": 2}, "name": {}, "comment": {"source": SOURCE.replace("# the artifact", "# the file")},
            "docstring": {"source": SOURCE.replace('"""Every setting of a run', '"""Each setting of a run')},
            "path": {"DATA_PATH": "elsewhere"}}
    other = {"code": {"source": SOURCE.replace("1.19e-7", "1.2e-7")}, "data": {"data": "b"}, "machine": {"gpu": "H100"},
             "setting": {"MLP_SLOPE": 0.5}, "length": {"ITERATIONS": 200}, "timed": {"MAX_WALLCLOCK_SECONDS": 9.0}}
    for name, changes in {**same, **other}.items():
        assert "source" not in changes or changes["source"] != SOURCE
        write_log(tmp_path, name, **{"seed": 1, "bpb": 1.5, **changes})
        content = effects.read_run(tmp_path / f"{name}.jsonl").content
        assert (content == first.content) == (name in same), name
    write_log(tmp_path, "unfinished", 1, 1.5, end=False)
    write_log(tmp_path, "diverged", 1, 1.5)
    log = tmp_path / "diverged.jsonl"
    log.write_text(log.read_text().replace('"val_bpb": 1.5', '"val_bpb": null'))
    for name in ("unfinished", "diverged", "missing"):
        assert effects.read_run(tmp_path / f"{name}.jsonl") is None
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "logs", "earlier", 1, 1.5)
    os.utime("logs/earlier.txt", (1, 1))
    train_gpt.RunLog("earlier", "", is_main=True)  # trained anew
    assert [run.bpb for run in effects.read_runs(["logs"])] == [1.5]


def test_logs_tell_what_was_tried_and_the_spread(tmp_path, monkeypatch, capsys):
    random = np.random.default_rng(0)
    for folder, gpu in ((tmp_path / "logs", ""), (tmp_path / "other", "NVIDIA H100")):
        for slope in (0.0, 0.1, 0.2, 0.3):
            for seed in range(4):
                bpb = 1.5 + 0.1 * seed - 0.01 * slope + random.normal(0, 0.001)
                write_log(folder, f"slope{slope}_{seed}", seed, bpb, gpu=gpu, MLP_SLOPE=slope)
    write_log(tmp_path / "logs", "another", 0, 1.4, data="b", MLP_SLOPE=0.4)  # of another text
    monkeypatch.setattr(ablate, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(sys, "argv", ["ablate.py", "tried", "0.3", "--from", str(tmp_path / "other")])
    assert ablate.main() == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if "MLP_SLOPE 0.0 -> 0.3" in line]
    assert len(rows) == 2 and "| 4 | 100 steps | sotu | CPU, float32 |" in rows[0] and "NVIDIA H100" in rows[1]
    runs = effects.read_runs([tmp_path / "logs", tmp_path / "other"])
    comparisons = effects.compare_all(runs)
    assert len(comparisons) == 6  # three on each machine
    spread, freedom, machines = effects.Ledger(comparisons).spread_of_others(comparisons[0])
    assert 0.0007 < spread < 0.003 and freedom == 5 * 3 // 2  # of a difference of two: 0.0014
    assert machines == {"CPU, float32": 8, "NVIDIA H100": 12}  # all but the one that is asked about
    back = [(second, first) for first, second in comparisons[0]]
    other = [(first, second._replace(content={**second.content, "MLP_SLOPE": 1})) for first, second in comparisons[0]]
    equal = [(first, first) for first, _ in comparisons[0]]
    for pairs in (back, other):  # the other way round; of another script, but bit for bit the same
        assert effects.Ledger(comparisons[:1]).spread_of_others(pairs)[1:] == (0, {})
    assert effects.Ledger([equal]).spread_of_others(comparisons[1])[1:] == (0, {})


def test_the_work_grows_with_the_logs_and_not_with_their_square(tmp_path, monkeypatch):
    work, random, variance = Counter(), np.random.default_rng(0), effects.statistics.variance

    class Content(dict):
        def get(self, name):
            work["lookups"] += 1
            return super().get(name)
        __getitem__ = get
    monkeypatch.setattr(effects.statistics, "variance", lambda values: (work.update(["variances"]), variance(values))[1])
    write_log(tmp_path, "first", 1, 1.5)
    first = effects.read_run(tmp_path / "first.jsonl")
    runs = [first._replace(seed=seed, bpb=random.normal(), content=Content({**first.content, "MLP_SLOPE": slope}))
            for slope in range(200) for seed in (1, 2)]
    comparisons = effects.compare_all(runs)
    assert [pairs[0][0].content["MLP_SLOPE"] for pairs in comparisons] == [0] * 199 and work["lookups"] < 200 * 40
    ledger = effects.Ledger(comparisons)
    assert {ledger.spread_of_others(pairs)[2]["CPU, float32"] for pairs in comparisons} == {2 * 198} and work["variances"] == 199
    monkeypatch.setattr(effects, "read_events", None)  # a log that did not change is not read again
    assert effects.read_run(tmp_path / "first.jsonl") == first


def test_lengths_are_compared(tmp_path):
    for steps in (0, 100, 200):
        for seed in (1, 2):
            write_log(tmp_path, f"base_{steps}_{seed}", seed, 1.5 - steps / 1000, ITERATIONS=steps)
            write_log(tmp_path, f"mine_{steps}_{seed}", seed, 1.5 - 1.5 * steps / 1000, ITERATIONS=steps, MLP_SLOPE=0.5)
    runs = effects.read_runs([tmp_path])

    def arm(name, steps):
        found = [run for run in runs if run.log.stem.startswith(f"{name}_{steps}_")]
        return ablate.Arm(name, tmp_path, {}, runs=found)

    lengths = [(arm("base", steps), arm("mine", steps)) for steps in (100, 200)]
    assert ablate.trend(lengths) == "mine: its gain changes by +0.0500 from the first length to the last, with every seed"
    first = lengths[0][0].runs[0]
    doubled = ablate.at_equal_time(first, runs, -0.05, [2.0, 1.0001])  # half the steps cost what doubling them gains
    assert doubled == pytest.approx([-0.05, -0.05 + 0.1], abs=1e-4)
    assert ablate.at_equal_time(first, runs, -0.05, [0.99, 1.01]) is None


# ---- Commands ------------------------------------------------------------------------------------------------------------


def test_each_job_has_a_gpu_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA H100\necho NVIDIA H100\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    write = "import os, sys, time; open(sys.argv[1], 'w').write(os.environ['CUDA_VISIBLE_DEVICES']); time.sleep(0.3)"
    for visible, wanted in ((None, ["0", "0", "1", "1"]), ("5,7", ["5", "5", "7", "7"])):
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        runner = ablate.Runner(2, print)
        files = [tmp_path / str(number) for number in range(4)]
        commands = [[sys.executable, "-c", write, str(file)] for file in files]
        assert list(runner.pool.map(runner.start, commands, [sys.stderr] * 4)) == [""] * 4
        assert sorted(file.read_text() for file in files) == wanted
        assert sorted([files[0].read_text(), files[1].read_text()]) == [wanted[0], wanted[-1]]  # at the same time
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert ablate.Runner(2, print).environment["OMP_NUM_THREADS"] == "3"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert "OMP_NUM_THREADS" not in ablate.Runner(1, print).environment
    assert int(ablate.Runner(64, print).environment["OMP_NUM_THREADS"]) >= 1


def test_no_run_is_trained_twice(tmp_path, monkeypatch):
    """Two commands start together; a third one waits for the run that a killed one has left."""
    monkeypatch.setattr(ablate, "LOGS", tmp_path)
    write_log(tmp_path, "other", 1, 1.5)
    content = effects.read_run(tmp_path / "other.jsonl").content
    plan = {"config": {"INIT_FROM": "", "DATA_PATH": "data/sotu"}, "data_sha256": {"a.bin": "a"}}
    arm, starts = ablate.Arm("mine", tmp_path, {}, plan=plan, content=content), []

    def start(command, lock):
        starts.append(command)
        time.sleep(0.5)
        write_log(tmp_path, "ablate_mine_1", 1, 1.4)
        return ""

    runners = [ablate.Runner(1, print) for _ in range(3)]
    for runner in runners:
        monkeypatch.setattr(runner, "start", start)
    for future in [runner.pool.submit(runner.train, (arm, 1)) for runner in runners[:2]]:
        future.result()
    assert len(starts) == 1 and [len(runner.runs) for runner in runners] == [1, 1, 0] and not arm.verdict
    (tmp_path / "ablate_mine_1.jsonl").unlink()
    code, other = "import time; time.sleep(60)", ablate.Runner(1, print)
    with (tmp_path / "ablate_mine_1" / "lock").open("w") as lock:
        assert ablate.can_lock(lock)
        other.pool.submit(other.start, [sys.executable, "-c", code], lock)
        while not other.processes:
            time.sleep(0.01)
    waits = runners[2].pool.submit(runners[2].train, (arm, 1))
    time.sleep(0.5)
    write_log(tmp_path, "ablate_mine_1", 1, 1.4)
    assert not waits.done()
    other.stop()
    waits.result()
    assert len(starts) == 1 and len(runners[2].runs) == 1 and not arm.verdict


FORWARD = "return self.loss(self.hidden(tokens), targets)"


@pytest.fixture
def laboratory(tmp_path):
    """A checkout with tiny settings and data: a function that starts ablate.py, and the data's folder."""
    root = tmp_path / "root"
    subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(root)], check=True)
    for name in ("train_gpt.py", *(f"tools/{script}.py" for script in ("ablate", "common", "effects", "events", "plot", "probe"))):  # as they are here
        (root / name).write_text((REPOSITORY / name).read_text(encoding="utf-8"), encoding="utf-8")
    data = make_shards(tmp_path)
    (tmp_path / "base.env").write_text("# a comment\n" + "\n".join(tiny_arguments(data, ITERATIONS=20)[:-2]))
    score = '"val_loss": total / self.num_targets, "val_bpb": total'
    runs = "Path(config.out_dir).is_dir()"
    for name, old, new in (("leak", FORWARD, FORWARD + " * 0.9"), ("broken", "def train_step(self", "def step(self"),
                           ("late", score, f"{score} / (2 if {runs} else 1)"),  # no probe sees it before training
                           ("worse", score, f"{score} * (2 if {runs} else 1)"),
                           ("bytes", "self.bytes = int(", "self.bytes = 2 * int("),
                           ("honest", "4.7750", "4.775")):
        assert SOURCE.count(old) == 1
        (tmp_path / f"{name}.py").write_text(SOURCE.replace(old, new), encoding="utf-8")
    (tmp_path / "syntax.py").write_text("import os\n\nprint(\n")

    def start(*words, most="3"):
        options = ["--base", "base.env", "--settings", f"DATA_PATH={data}", "SEED=5"]
        options += ["--most-seeds", most, "--jobs", "2", "--diff", "0.1"]
        return subprocess.Popen([sys.executable, str(root / "tools/ablate.py"), *words, *options], cwd=tmp_path, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return start, root / "logs", data


RATE = "rate MATRIX_LR=1e-9"


@pytest.mark.slow
def test_ablations_are_stopped_repeated_and_judged(laboratory, tmp_path):
    start, logs, data = laboratory
    words = ["plain", RATE, "same MATRIX_LR=0.02", "leak script=leak.py", "late script=late.py",
             "broken script=broken.py", "broken_too script=broken.py", "syntax script=syntax.py"]
    process = start(*words)
    while len(effects.read_runs([logs])) < 2 and process.poll() is None:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "stopped; the same command goes on" in errors, errors
    assert not [*logs.glob("*/checkpoints")]
    kept = {run.log: run.log.stat().st_mtime for run in effects.read_runs([logs])}
    process = start(*words)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 3, output + errors
    assert all(log.stat().st_mtime == then for log, then in kept.items())  # nothing is trained twice
    lines = {line.split()[0]: line for line in output.splitlines()}
    assert "no gain" in lines["rate"] and "no gain" in lines["same"] and "+0.0000" in lines["same"]
    assert "its loss" in lines["leak"] and "invalid" in lines["leak"]
    assert re.search(r"failed .*: status 1, line \d+, AttributeError: .* 'train_step'", lines["broken"])
    assert "failed" in lines["broken_too"]
    assert "invalid    its log says" in lines["late"] and "failed     the script cannot be used: line 3: SyntaxError" in lines["syntax"]
    assert not [path for path in logs.glob("ablate_*.jsonl") if "leak" in path.name or "same" in path.name]
    again = start("plain", RATE, "--json", "--plot", "effects.png")
    facts = [json.loads(line) for line in again.communicate(timeout=100)[0].splitlines()]
    assert again.returncode == 1 and len(facts) == 1 and facts[0]["pairs"] >= 2 and facts[0]["low"] > -0.1
    assert (tmp_path / "effects.png").stat().st_size > 9000
    shard = next(data.glob("*_train_000000.bin"))
    os.utime(shard)  # without a manifest, newer shards are other shards
    anew = start("plain", RATE, "--json", "--horizons", "20,40", most="2")
    facts = [json.loads(line) for line in anew.communicate(timeout=200)[0].splitlines()]
    assert anew.returncode == 1 and [row["iterations"] for row in facts] == [20, 40]
    used = [effects.read_run(logs / Path(log).name) for row in facts for log in row["logs"]]
    assert len(used) == 4 and all(run.began > shard.stat().st_mtime for run in used)


@pytest.mark.slow
def test_scores_are_checked_and_two_commands_share_their_runs(laboratory):
    start, logs, data = laboratory
    slow = "slow MATRIX_LR=1e-9 SCALAR_LR=1e-9 TIED_EMBED_LR=1e-9"
    both = [start(slow, "honest script=honest.py", "--settings", "VAL_LOSS_EVERY=0", most="2") for _ in range(2)]
    for process in both:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 0, output + errors
        assert re.search(r"honest +better +-[1-9]", output)
    assert len([*logs.glob("*.jsonl")]) == 4  # none was trained twice
    process = start("worse script=worse.py", "plain", most="2")
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 2 and "plain        invalid    worse, the first one: its log says" in output, output + errors
    assert "worse" not in ablate.list_tried("", [logs], 8)[-1]
    process = start("plain", "worse script=worse.py", "bytes script=bytes.py", most="2")
    output, errors = process.communicate(timeout=300)
    assert "0 runs" in output and "worse        invalid    its log says" in output, output + errors  # known from the log
    assert re.search("bytes        invalid    it counts [0-9,]+ bytes of validation text, which has", output)
    assert start("bytes script=bytes.py", "plain").wait(100) == 2


def test_mistakes_in_the_command_are_named(tmp_path, monkeypatch, capsys):
    data = make_shards(tmp_path)
    settings, base = [*tiny_arguments(data), "SEED=1"], tmp_path / "base.env"
    base.write_text("\ufeffMLP_SLOPE=low\n", encoding="utf-8")
    for words, message in ((["x"], "x is compared with nothing"), (["x", "y", "--base", str(base)], f"MLP_SLOPE=0.0 (from --base {base})"), (["x", "x A=1"], "two variations are called x"),
                           (["x", "MLP_SLOPE=0.5"], "MLP_SLOPE=0.5 is a setting; before it"),
                           (["x", "y SEED=2"], "y sets SEED"), (["x", "y script=no.py"], "y: script=no.py is no file"),
                           (["x", "y ITERATIONS=9"], "y sets ITERATIONS, which must be equal in all"),
                           (["x", "y", "--horizons", "1,2", "--seconds", "3"], "give one of them"),
                           (["x", "y NUM_HEADS=5"], "y: MODEL_DIM=32 must be a multiple"),
                           (["x", "y", "--plot", "a.txt"], "Format 'txt' is not supported"),
                           (["tried", "--from", "none"], "--from none is no folder"), (["x", "--diff", "nan"], "--diff: 'nan' must be"),
                           (["x", "--diff", "2"], "--diff: '2' must be a number from 0 to 1"), (["x", "--seconds", "-6"], "of 0 or more"),
                           (["x", "--horizons", "600,-1"], "--horizons: '600,-1' must be numbers of steps")):
        monkeypatch.setattr(sys, "argv", ["ablate.py", *words, "--settings", *settings])
        with pytest.raises(SystemExit, match="^2$"):
            sys.exit(ablate.main())  # which argparse ends itself
        errors = capsys.readouterr().err
        assert "ablate.py: " in errors and message in errors
