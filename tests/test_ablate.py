"""The instrument for ablations: its statistics, the logs as its memory, what makes a model invalid, and whole commands."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from unittest.mock import Mock

import ablate
import common
import effects
import numpy as np
import probe
import pytest
import train_gpt
from conftest import REPOSITORY, make_shards, tiny_arguments

pytest.importorskip("scipy")
SOURCE = (REPOSITORY / "train_gpt.py").read_text(encoding="utf-8")


# ---- Statistics ------------------------------------------------------------------------


def first_verdicts(differences: np.ndarray, diff: float, error: float = effects.ERROR):
    """Return the number of pairs (...) after which differences (..., pairs) are first called "better",
    and after which "no gain"; 999 for never."""
    is_better = effects.p_of(differences) <= error
    is_no_gain = effects.p_of(-(differences + diff)) <= effects.ERROR
    return [np.where(found.any(-1), found.argmax(-1) + 1, 999) for found in (is_better, is_no_gain)]


@pytest.mark.parametrize("error, count", [(0.05, 10_000), (0.01, 10_000)])
def test_the_error_holds_however_often_pairs_are_added(error, count):
    """At all numbers of pairs up to 64 together, without any effect. The tolerance is three standard
    errors of the simulation, and 8 % for the formula, which was fitted."""
    random = np.random.default_rng(1)
    found = (effects.p_of(random.standard_normal((count, 64))).min(-1) <= error).mean()
    assert abs(found - error) < 3 * (error / count) ** 0.5 + 0.08 * error


@pytest.mark.parametrize("kind", ["exponential", "rarely broken", "both arms break"])
def test_skewed_noise_is_called_better_in_seven_percent_at_most(kind):
    """A change without effect whose runs, of spread DIFF, have a long tail of bad ones, or break in 5 %."""
    random, shape = np.random.default_rng(1), (4000, 64)
    tail = random.exponential(size=shape) - 1
    breaks = (random.standard_normal(shape) + 8 * (random.random(shape) < 0.05) - 0.4) / 2
    noise = {"exponential": tail, "rarely broken": breaks, "both arms break": (breaks - breaks[::-1]) / 2**0.5}[kind]
    better, no_gain = first_verdicts(noise, diff=1.0)
    assert 0.001 < (better < no_gain).mean() <= 0.07


def test_effects_are_found_in_few_runs():
    z = np.random.default_rng(1).standard_normal((4000, 12))
    better, no_gain = first_verdicts(z - 1, diff=1.0)
    assert (better < no_gain).mean() > 0.84
    better, no_gain = first_verdicts(z - 2, diff=1.0)
    assert (better < no_gain).mean() > 0.99 and better.mean() < 6.5
    better, no_gain = first_verdicts(z, diff=2.0)
    assert (no_gain < better).mean() > 0.95 and no_gain[no_gain < 999].mean() < 6.5


@pytest.mark.parametrize("count", [1, 4, 10])
@pytest.mark.slow
def test_a_command_with_several_variations_keeps_its_error(count):
    """Pairs of all variations share the first one's runs, and none has an effect. Of 400 commands,
    5 % plus three standard errors, 8.3 %, may call one or more of them better."""
    random, wrong = np.random.default_rng(1), 0
    for _ in range(400):
        shared, own = random.standard_normal((1, 12)), random.standard_normal((count, 12))
        differences, verdicts = (own - shared).tolist(), ["undecided"] * count
        for pairs in range(2, 13):
            found = [effects.limits_of(row[:pairs]) for row in differences]
            judged = effects.judge_all(found, least=1.0, count=count)
            verdicts = [old if old != "undecided" else new for old, new in zip(verdicts, judged)]
        wrong += "better" in verdicts
    assert 1 <= wrong <= 0.083 * 400


def test_holm_by_hand():
    found = [effects.Effect(-0.1, low, 0.1, 5, 1.0, p) for p, low in ((0.02, -1), (0.012, -1), (0.3, -1), (0.9, -0.001), (0.001, -1))]
    for count, wanted in ((5, "undecided, better, undecided, no gain, better"),  # 0.05 / 5, / 4, then 0.02 > 0.05 / 3
                          (1, "better, better, undecided, no gain, better"),  # 5 % each
                          (50, "undecided, undecided, undecided, no gain, better")):
        assert effects.judge_all(found, least=0.002, count=count) == wanted.split(", ")


def test_limits_by_hand():
    differences = [-0.003, -0.001, -0.002, -0.0025, -0.0015, -0.002]
    effect = effects.limits_of(differences)
    level = 0.023 * 0.6**4  # of six pairs; Student's t has five degrees of freedom
    from scipy import special
    error = np.std(differences, ddof=1) / 6**0.5
    reach = -special.stdtrit(5, level) * error
    assert effect.mean == pytest.approx(-0.002) and effect.high == pytest.approx(-0.002 + reach)
    assert effect.low == pytest.approx(-0.002 - reach)
    p = special.stdtr(5, -0.002 / error)
    assert effect.p == pytest.approx(0.05 * (p / level) ** (1 / 1.15))
    assert (effect.p <= effects.ERROR) == (effect.high < 0)
    assert effects.limits_of([-0.003]).high == float("inf") and effects.p_of([0.0, 0.0, 0.0])[-1] == 1
    assert effects.p_of([-0.1, -0.1, -0.1])[-1] == 0  # no spread at all


def test_the_corrected_effect_is_not_flattered():
    """Of changes that are called better, whose gain is 0.75 or 3 spreads."""
    random = np.random.default_rng(1)
    for gain, naive_excess, excess in ((0.75, 0.2, 0.12), (3.0, 0.0, 0.05)):
        seen, corrected = [], []
        for row in random.standard_normal((1000, 12)) - gain:
            is_better = effects.p_of(row) <= effects.ERROR
            if is_better.any():
                effect = effects.limits_of(row[:is_better.argmax() + 1].tolist())
                seen.append(-effect.mean)
                corrected.append(-effects.correct_for_selection(effect))
        assert np.mean(seen) > gain + naive_excess - 0.02
        assert abs(np.mean(corrected) - gain) < excess


# ---- Logs ----------------------------------------------------------------------------------------------------------------


def write_log(folder, name, seed, bpb, source=SOURCE, gpu="", data="a", threads=2, end=True, **changes):
    """The log of a run, as train_gpt.py writes it."""
    config = {"SEED": seed, "RUN_ID": name, "DATA_PATH": "data/sotu", "ITERATIONS": 100, "MAX_WALLCLOCK_SECONDS": 0.0,
              "DTYPE": "float32", "MLP_SLOPE": 0.0, "SIZE_CAP": 0, **changes}
    events = [{"event": "config", "config": config, "data_sha256": {"a.bin": data}, "val_tokens": 9, "val_bytes": 30,
               "torch": "2.13.0+cpu", "world_size": 1, "threads": threads, "gpu": gpu}]
    events += [{"event": "val", "step": 100, "val_bpb": bpb - 0.01, "step_avg_ms": 10.0, "train_time_ms": 9000, "elapsed_s": 9},
               {"event": "export", "artifact_bytes": 5, "code_bytes": 7}, {"event": "final", "val_bpb": bpb, "elapsed_s": 9.0}]
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (events if end else events[:-1])))
    (folder / f"{name}.txt").write_text(f"{source}\n{effects.RULE}\n", encoding="utf-8")


def test_a_run_is_known_by_its_content(tmp_path, monkeypatch):
    write_log(tmp_path, "first", 1, 1.5)
    first = effects.read_run(tmp_path / "first.jsonl")
    assert first.bpb == 1.5 and first.artifact_bytes == 12 and first.step_ms == 10
    same = {"seed": {"seed": 2}, "name": {}, "path": {"DATA_PATH": "elsewhere"}, "threads": {"threads": 1}}
    other = {"code": {"source": SOURCE.replace("1.19e-7", "1.2e-7")}, "data": {"data": "b"}, "machine": {"gpu": "H100"},
             "setting": {"MLP_SLOPE": 0.5}, "length": {"ITERATIONS": 200}, "timed": {"MAX_WALLCLOCK_SECONDS": 9.0}}
    for name, changes in {**same, **other}.items():
        assert "source" not in changes or changes["source"] != SOURCE
        write_log(tmp_path, name, **{"seed": 1, "bpb": 1.5, **changes})
        content = effects.read_run(tmp_path / f"{name}.jsonl").content
        assert (content == first.content) == (name in same), name
    write_log(tmp_path, "export", 1, 1.5, ITERATIONS=0)
    log = tmp_path / "export.jsonl"
    log.write_text(log.read_text().replace('"step_avg_ms": 10.0', '"step_avg_ms": 0.0'))
    assert effects.read_run(log).step_ms == 1  # which divides
    contents = []
    for threads in (1, 2):  # by --jobs: runs that share a GPU make fewer steps in the time
        write_log(tmp_path, "timed", 1, 1.5, gpu="H100", threads=threads, MAX_WALLCLOCK_SECONDS=9.0)
        contents.append(effects.read_run(tmp_path / "timed.jsonl").content)
    assert contents[0] != contents[1]
    write_log(tmp_path, "unfinished", 1, 1.5, end=False)
    for number in ("null", "NaN", "Infinity"):  # the last two by another script
        write_log(tmp_path, number, 1, 1.5)
        log = tmp_path / f"{number}.jsonl"
        log.write_text(log.read_text().replace('"val_bpb": 1.5', f'"val_bpb": {number}'))
    for name in ("unfinished", "null", "NaN", "Infinity", "missing"):
        assert effects.read_run(tmp_path / f"{name}.jsonl") is None
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "logs", "earlier", 1, 1.5)
    os.utime("logs/earlier.txt", (1, 1))
    train_gpt.Path("logs").mkdir(exist_ok=True)
    train_gpt.RunLog("earlier", "", is_main=True)  # trained anew
    assert [run.bpb for run in effects.read_runs(tmp_path / "logs")] == [1.5]


def judged_arms(folder, differences: list[float], verdict="better", name="idea", **changes) -> list[ablate.Arm]:
    """A base, and an arm that was compared with it."""
    arms = []
    for arm, own, scores in (("base", {}, [0.0] * len(differences)), (name, changes, differences)):
        for seed, score in enumerate(scores):
            write_log(folder, f"{arm}{seed}", seed, 1.5 + 0.1 * seed + score, **own)
        runs = [effects.read_run(folder / f"{arm}{seed}.jsonl") for seed in range(len(scores))]
        plan = {"config": {"DATA_PATH": "data/sotu"}}
        arms.append(ablate.Arm(arm, folder, {}, plan=plan, content=runs[0].content, runs=runs))
    arms[1].given = " ".join(f"{name}={value}" for name, value in changes.items())
    arms[1].verdict, arms[1].effect = verdict, effects.limits_of(differences)
    return arms


def test_the_ledger_has_every_comparison_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ablate, "LOGS", tmp_path)
    assert ablate.list_tried() == [f"no comparison in {tmp_path} yet"]
    base, *first = judged_arms(tmp_path, [-0.01, -0.011], "", MLP_SLOPE=0.5)
    _, *other = judged_arms(tmp_path, [0.01, 0.013], "undecided", "text", MLP_SLOPE=0.5, data="b")  # of another text
    _, *worse = judged_arms(tmp_path, [0.01, 0.012, 0.009], "no gain", "worse", MLP_SLOPE=0.1)
    for arm in (*first, *other, *worse):
        ablate.note_tried(base, arm)
    _, *later = judged_arms(tmp_path, [-0.01, -0.011, -0.0104, -0.0098], "better", MLP_SLOPE=0.5)
    ablate.note_tried(base, later[0])  # the same idea with more seeds
    monkeypatch.setattr(sys, "argv", ["ablate.py", "tried"])
    assert ablate.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert "Of all 3 comparisons, 1 look better one by one (p <= 0.05); by chance alone, about 0.15 would" in lines[0]
    assert len(lines) == 7 and lines[4].startswith("| `MLP_SLOPE=0.5 data=b` | 100 steps | undecided | +0.0115 (needs 3 pairs) | 2 |")
    assert re.search(r"\| no gain \| \+0.0103 \(−.* to \+.*\) \| 3 \|", lines[5])
    assert "+0.0115 bits per byte (90 % interval needs 3 pairs), 2 pairs" in ablate.sentence(ablate.facts_of(base, other[0]), 0.002)
    assert re.match(r"\| `MLP_SLOPE=0.5` \| 100 steps \| better \| −0.0103 \(−.* to −.*\) \| 4 \| 0.0005 \| idea \| base \| sotu \|$", lines[6])
    assert [facts["data"] for facts in ablate.read_tried()].count(base.content["data"]) == 2
    later[0].verdict = "failed"
    ablate.note_tried(base, later[0])
    assert len(ablate.read_tried()) == 3
    later[0].verdict = "invalid"
    ablate.note_tried(base, later[0])
    assert [facts["name"] for facts in ablate.read_tried()] == ["text", "worse"]


def test_the_time_that_runs_will_take_is_known_from_others(tmp_path, monkeypatch):
    write_log(tmp_path, "first", 1, 1.5)  # for 9 s
    runs, said = effects.read_runs(tmp_path), []
    plan = {"config": {"DATA_PATH": "data/sotu", "INIT_FROM": ""}}
    arm, runner = ablate.Arm("mine", tmp_path, {}, plan=plan, content=runs[0].content), ablate.Runner(2, said.append)
    monkeypatch.setattr(runner, "train", lambda trial: None)
    for runner.runs in ([], runs):
        ablate.train_all([arm], range(1, 5), runner)
    assert said == ["4 runs, for seeds up to 4, of unknown length: see logs/ablate_*.txt", "3 runs, for seeds up to 4, about 0.3 min"]  # two after one another


@pytest.mark.parametrize("changed", ["data/x_train_0.bin", "model.ptz"])
def test_runs_are_younger_than_what_they_read(changed, tmp_path):
    """Files may change under one name, and shards under an old manifest."""
    config = {"DATA_PATH": str(tmp_path / "data"), "INIT_FROM": str(tmp_path / "model.ptz")}
    (tmp_path / "data").mkdir()
    for file in ("data/x_train_0.bin", "data/x_val_0.bin", "model.ptz"):
        (tmp_path / file).touch()
        os.utime(tmp_path / file, (1, 1))
    write_log(tmp_path, "run", 1, 1.5)
    run = effects.read_run(tmp_path / "run.jsonl")
    arm = ablate.Arm("mine", tmp_path, {}, plan={"config": config}, content=run.content)
    assert arm.has(run, 1) and not arm.has(run, 2)
    (tmp_path / changed).touch()
    assert not arm.has(run, 1)


@pytest.mark.parametrize("second, checked", [(0.0, ["base0", "base1"]), (0.01, ["base0", "base1", "idea0", "idea1"])])
def test_equal_scores_are_doubted_before_the_slow_check(second, checked, tmp_path, monkeypatch):
    """What has other scores in the second pair is checked, too."""
    arms, said = judged_arms(tmp_path, [0.0, second], "", MLP_SLOPE=0.5), []
    runner = ablate.Runner(1, said.append)
    for arm in arms:
        arm.plan["config"] |= {"SEED": 0, "INIT_FROM": ""}
        runner.runs += arm.runs
        arm.runs = []
    for run in runner.runs:
        ablate.model_of(run).parent.mkdir()
        ablate.model_of(run).touch()
    monkeypatch.setattr(ablate, "LOGS", tmp_path)
    monkeypatch.setattr(probe, "read_text", lambda config: "")
    monkeypatch.setattr(probe, "check_artifact", lambda *arguments: (1.5, ""))
    ablate.train_until_clear(arms, runner, argparse.Namespace(most_seeds=2, diff=0.0, jobs=1))
    doubt = "its scores are those of base: is it switched on?"
    doubts = [] if second else [f"idea: {doubt}"]
    assert said == [f"checking the model of {name}: up to a minute" for name in checked] + doubts
    assert ablate.sentence(ablate.facts_of(*arms), 0.0).endswith(doubt) != bool(second)
    assert arms[1].verdict == ("undecided" if second else "no gain")


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
        assert list(runner.pool.map(runner.start, commands, [sys.stderr] * 4, files)) == [""] * 4
        assert sorted(file.read_text() for file in files) == wanted
        assert sorted([files[0].read_text(), files[1].read_text()]) == [wanted[0], wanted[-1]]  # at the same time
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert ablate.Runner(2, print).environment["OMP_NUM_THREADS"] == "3"
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert "OMP_NUM_THREADS" not in ablate.Runner(1, print).environment
    assert int(ablate.Runner(64, print).environment["OMP_NUM_THREADS"]) >= 1


def test_a_driver_that_hangs_stops_no_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(common, "SMI_S", 0.2)
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 30\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert ablate.Runner(1, print).places.get() == {}
    assert "nvidia-smi has not answered in 0.2 s" in capsys.readouterr().err


def test_runs_that_hang_or_are_killed_are_named(tmp_path):
    runner, log = ablate.Runner(1, print, patience=0.7), tmp_path / "run.jsonl"
    log.touch()
    os.utime(log, (1, 1))
    assert runner.start([sys.executable, "-c", "import time; time.sleep(60)"], sys.stderr, log).startswith("it hung: its log has not grown")
    writes = f"import time\nfor _ in range(8): time.sleep(0.1); open({str(log)!r}, 'a').write('x')"
    assert runner.start([sys.executable, "-c", writes], sys.stderr, log) == ""
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert runner.start([sys.executable, "-c", code], sys.stderr, log) == "ended by SIGKILL"
    leaves, started = "import subprocess; subprocess.Popen(['sleep', '9'])", time.monotonic()  # with its stderr
    assert ablate.Runner(1, print).start([sys.executable, "-c", leaves], sys.stderr, log) == "" and time.monotonic() - started < 5


def test_a_forgotten_breakpoint_ends_a_run(tmp_path):
    """It would wait for the terminal, which is silent, at a prompt that nobody sees."""
    terminal, before = os.pipe(), os.dup(0)
    os.dup2(terminal[0], 0)
    try:
        error = ablate.Runner(1, print, patience=9).start([sys.executable, "-c", "input()"], sys.stderr, tmp_path / "run.jsonl")
    finally:
        os.dup2(before, 0)
    assert error == "status 1, EOFError: EOF when reading a line"


def test_a_run_on_a_machine_that_slept_has_not_hung(tmp_path, monkeypatch):
    """The machine sleeps for an hour when the run has begun its log."""
    runner, log, now = ablate.Runner(1, print, patience=0.7), tmp_path / "run.jsonl", time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3600 * log.exists())
    writes = f"import time\nfor _ in range(8): open({str(log)!r}, 'a').write('x'); time.sleep(0.1)"
    assert runner.start([sys.executable, "-c", writes], sys.stderr, log) == ""


@pytest.mark.parametrize("sizes, is_other", [((100, 100), False), ((100, 101), True), ((None, None), True), ((100, None), True)])
def test_variations_must_differ_and_share_their_text(sizes, is_other, tmp_path):
    """Text of one size may have several tokenizers; without a manifest, nothing is known of it."""
    arms = []
    for name, size in zip("ab", sizes):
        (tmp_path / name).mkdir()
        if size:
            (tmp_path / name / "manifest.json").write_text(json.dumps({"splits": {"val": {"decoded_bytes": size}}}))
        plan = {"config": {"DATA_PATH": str(tmp_path / name), "TOKENIZER_PATH": "byte260"}}
        arms.append(ablate.Arm(name, tmp_path, {}, plan=plan, content={"data": name}))
    with pytest.raises(ValueError, match="a is equal to a"):
        ablate.check_against(arms[0], arms[0])
    with pytest.raises(ValueError, match="b is scored on another text than a") if is_other else nullcontext():
        ablate.check_against(*arms)
    arms[1].plan = arms[0].plan
    ablate.check_against(*arms)  # other rows of the same folder
    arms[1].plan = {"config": {**arms[0].plan["config"], "TOKENIZER_PATH": "gpt2"}}
    with nullcontext() if sizes[0] else pytest.raises(ValueError, match="b is scored on another text"):
        ablate.check_against(*arms)  # which has more bytes to the trainer, unless a manifest says how many


def test_the_order_of_a_pair_alternates(tmp_path):
    arms = [ablate.Arm(name, tmp_path, {}, content={"name": name}) for name in "ab"]
    assert [arm.name for arm, _ in ablate.missing_runs(arms, range(4), [])] == [*"abbaabba"]


def test_pairs_come_in_the_order_of_their_seeds(tmp_path):
    """However the logs are called, and whichever run ended first."""
    for seed in (9, 10):
        write_log(tmp_path, f"run_{seed}", seed, 1.5)
    runner, plan = ablate.Runner(1, print), {"config": {"DATA_PATH": "data/sotu", "INIT_FROM": ""}}
    runner.runs = effects.read_runs(tmp_path)
    arm = ablate.Arm("mine", tmp_path, {}, plan=plan, content=runner.runs[0].content)
    ablate.train_all([arm], (9, 10), runner)
    assert [run.seed for run in runner.runs] == [10, 9] and [run.seed for run in arm.runs] == [9, 10]


def test_no_run_is_trained_twice(tmp_path, monkeypatch):
    """Two commands start together; a third one waits for the run that a killed one has left."""
    monkeypatch.setattr(ablate, "LOGS", tmp_path)
    write_log(tmp_path, "other", 1, 1.5)
    content = effects.read_run(tmp_path / "other.jsonl").content
    plan = {"config": {"INIT_FROM": "", "DATA_PATH": "data/sotu"}, "data_sha256": {"a.bin": "a"}}
    arm, starts = ablate.Arm("mine", tmp_path, {}, plan=plan, content=content), []
    name = f"ablate_mine_{arm.tag()}_1"

    def start(command, lock, log):
        starts.append(command)
        time.sleep(0.5)
        write_log(tmp_path, name, 1, 1.4)
        return ""

    runners = [ablate.Runner(1, print) for _ in range(3)]
    for runner in runners:
        monkeypatch.setattr(runner, "start", start)
    for future in [runner.pool.submit(runner.train, (arm, 1)) for runner in runners[:2]]:
        future.result()
    assert len(starts) == 1 and [len(runner.runs) for runner in runners] == [1, 1, 0] and not arm.verdict
    (tmp_path / f"{name}.jsonl").unlink()
    code, other = "import time; time.sleep(60)", ablate.Runner(1, print)
    with (tmp_path / name / "lock").open("w") as lock:
        assert ablate.can_lock(lock)
        other.pool.submit(other.start, [sys.executable, "-c", code], lock, tmp_path)
        while not other.processes:
            time.sleep(0.01)
    patient = ablate.Arm("mine", tmp_path, {}, plan=plan, content=content)
    ablate.Runner(1, print, patience=0.3).train((patient, 1))  # The run that was left writes no log.
    assert (patient.verdict, patient.reason) == ("failed", f"it hangs; to end it: pkill -9 -f 'RUN_ID={name}'")
    waits = runners[2].pool.submit(runners[2].train, (arm, 1))
    time.sleep(0.5)
    write_log(tmp_path, name, 1, 1.4)
    assert not waits.done()
    other.stop()
    waits.result()
    assert len(starts) == 1 and len(runners[2].runs) == 1 and not arm.verdict


def test_runs_of_other_content_have_other_names(tmp_path, monkeypatch):
    """Two commands may call different settings "base"."""
    monkeypatch.setattr(ablate, "LOGS", tmp_path)
    names, runner = [], ablate.Runner(1, print)
    monkeypatch.setattr(runner, "start", lambda command, lock, log: names.append(log.stem) or "stopped")
    for width in (192, 192, 256):
        runner.train((ablate.Arm("base", tmp_path, {}, content={"MODEL_DIM": width, "cpu": ""}), 1))
    assert names[0] == names[1] != names[2] and names[2].startswith("ablate_base_")


@pytest.mark.parametrize("seconds, gpu", [(0.0, ""), (60.0, ""), (60.0, "H100")])
def test_runs_that_the_clock_ends_are_of_one_cpu(seconds, gpu, tmp_path, monkeypatch):
    """Runs of one content on two CPUs, and one whose name has no digest, as older versions wrote it."""
    changes = {"gpu": gpu, "MAX_WALLCLOCK_SECONDS": seconds, "INIT_FROM": ""}
    write_log(tmp_path, "ablate_base_1", 1, 1.5, **changes)
    runs, arms = [effects.read_run(tmp_path / "ablate_base_1.jsonl")], []
    plan = {**effects.read_events(runs[0].log)[0], "reason": ""}
    answer = subprocess.CompletedProcess([], 0, json.dumps(plan), "")
    monkeypatch.setattr(subprocess, "run", lambda *arguments, **options: answer)  # probe.py
    for cpu in ("2 cores of A", "2 cores of B"):
        monkeypatch.setattr(ablate, "hardware", lambda uses_gpus, cpu=cpu: cpu)
        arms.append(ablate.Arm("base", REPOSITORY / "train_gpt.py", {}))
        ablate.make_plans(arms[-1:], ablate.Runner(1, print))
        name = f"ablate_base_{arms[-1].tag()}_1"
        write_log(tmp_path, name, 1, 1.5, **changes)
        runs.append(effects.read_run(tmp_path / f"{name}.jsonl"))
    counts = seconds > 0 and not gpu
    assert [[arm.has(run, 1) for run in runs] for arm in arms] == [[not counts, True, not counts], [not counts, not counts, True]]
    assert (arms[0].tag() != arms[1].tag()) == counts


def test_a_run_whose_data_were_moved_is_scored_on_those_of_the_plan(tmp_path, monkeypatch):
    write_log(tmp_path, "run", 1, 1.5, DATA_PATH="before")
    run, texts = effects.read_run(tmp_path / "run.jsonl"), []
    ablate.model_of(run).parent.mkdir()
    ablate.model_of(run).touch()
    monkeypatch.setattr(probe, "read_text", lambda config: config["DATA_PATH"])
    monkeypatch.setattr(probe, "check_artifact", lambda script, artifact, config, text, bpb: (texts.append(text), ""))
    arm = ablate.Arm("mine", tmp_path, {}, plan={"config": {"DATA_PATH": "now"}}, runs=[run])
    ablate.check_scores(arm, print)
    assert texts == ["now"] and arm.runs[0].checked == "" and not arm.verdict
    arm.runs[0].checked = None
    monkeypatch.setattr(probe, "check_artifact", Mock(side_effect=ValueError("it gives no logits: status -9, ")))
    ablate.check_scores(arm, print)  # "Invalid" would say that it cheats.
    assert (arm.verdict, arm.reason) == ("failed", "run: it gives no logits: status -9, ") and arm.runs[0].checked is None


FORWARD = "return self.loss(self.hidden(tokens), targets)"


@pytest.fixture
def laboratory(tmp_path):
    """A checkout with tiny settings and data: a function that starts ablate.py, and the folder of the logs."""
    root = tmp_path / "root"
    subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(root)], check=True)
    for name in ("train_gpt.py", *(f"tools/{script}.py" for script in ("ablate", "common", "effects", "events", "probe", "settings"))):  # as they are here
        (root / name).write_text((REPOSITORY / name).read_text(encoding="utf-8"), encoding="utf-8")
    data = make_shards(tmp_path)
    (tmp_path / "base.env").write_text("# a comment\n" + "\n".join(tiny_arguments(data, ITERATIONS=20, VAL_LOSS_EVERY=0)[:-2]))
    score = '"val_loss": total / self.num_targets, "val_bpb": total'
    runs = "Path(config.out_dir).is_dir()"
    for name, old, new in (("leak", FORWARD, FORWARD + " * 0.9"), ("broken", "def train_step(self", "def step(self"),
                           ("late", score, f"{score} / (2 if {runs} else 1)"),  # no probe sees it before training
                           ("bytes", "self.bytes = int(", "self.bytes = 2 * int("),
                           ("honest", "4.7750", "4.775")):
        assert SOURCE.count(old) == 1
        (tmp_path / f"{name}.py").write_text(SOURCE.replace(old, new), encoding="utf-8")
    (tmp_path / "syntax.py").write_text("import os\n\nprint(\n")

    def start(*words, most="2"):
        options = ["--base", "base.env", "--settings", f"DATA_PATH={data}", "SEED=5"]
        options += ["--most-seeds", most, "--jobs", "2", "--diff", "0.1"]
        return subprocess.Popen([sys.executable, str(root / "tools/ablate.py"), *words, *options], cwd=tmp_path, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return start, root / "logs"


@pytest.mark.slow
def test_ablations_are_stopped_repeated_shared_and_judged(laboratory, monkeypatch):
    start, logs = laboratory
    words = ["slow MATRIX_LR=1e-9 SCALAR_LR=1e-9 TIED_EMBED_LR=1e-9", "honest script=honest.py"]
    process = start(*words)
    while not effects.read_runs(logs) and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "stopped; the same command goes on after" in errors, errors
    assert not [*logs.glob("*/checkpoints")]
    kept = {run.log: run.began for run in effects.read_runs(logs)}
    both = [start(*words, most="5"), start(*words, "--json", "--settings", "TRAIN_LOG_EVERY=9", most="5")]
    (output, errors), (facts, more_errors) = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], output + errors + more_errors
    assert kept and kept.items() <= {run.log: run.began for run in effects.read_runs(logs)}.items()
    facts = json.loads(facts)
    assert facts["verdict"] == "better" and not facts["unchecked"]
    assert len(effects.read_runs(logs)) == 2 * facts["pairs"]  # None was trained twice.
    assert re.search(rf"honest +better +-[1-9].*, {facts['pairs']} pairs of seeds; corrected for being selected: -[1-9]", output)
    assert "ideas tried on this text: 1; 1 look better one by one" in output
    assert re.search(r"\d runs took [0-9.]+ min one by one", output)
    process = start(words[1], "late script=late.py", "leak script=leak.py", "bytes script=bytes.py", "broken script=broken.py",
                    "broken_too script=broken.py", "syntax script=syntax.py")
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 3, output + errors
    lines = {line.split()[0]: line for line in output.splitlines()}
    assert "invalid    its log says" in lines["late"] and "invalid    its loss" in lines["leak"]
    assert re.search("invalid    it counts [0-9,]+ bytes of validation text, which has", lines["bytes"])
    assert re.search(r"failed .*: status 1, line \d+, AttributeError: .* 'train_step'", lines["broken"])
    assert "failed" in lines["broken_too"]
    assert "failed     the script cannot be used: status 1, line 3, SyntaxError" in lines["syntax"]
    assert not [path for path in logs.glob("ablate_*.jsonl") if "leak" in path.name or "bytes" in path.name]
    monkeypatch.setattr(ablate, "LOGS", logs)
    assert [facts["verdict"] for facts in ablate.read_tried()] == ["better"]


@pytest.mark.parametrize("verdicts, status", [
    (["better", "better"], 0), (["better", "no gain"], 1), (["undecided", "better"], 1), (["better", "invalid"], 2), (["invalid", "failed"], 3)])
def test_the_status_tells_the_verdicts(verdicts, status, monkeypatch):
    def train_until_clear(arms, runner, options):
        for arm, verdict in zip(arms[1:], verdicts):
            arm.verdict = verdict

    for name in ("make_plans", "check_against", "report"):
        monkeypatch.setattr(ablate, name, lambda *arguments: None)
    monkeypatch.setattr(ablate, "train_until_clear", train_until_clear)
    monkeypatch.chdir(REPOSITORY)  # main changes it
    monkeypatch.setattr(sys, "argv", ["ablate.py", "x", "y A=1", "z A=2", "--settings", "ITERATIONS=9"])
    assert ablate.main() == status


@pytest.mark.parametrize("seconds, passed_s, reason", [
    (60.0, 51, ""), (60.0, 80, "its clock counts 50.0 s of training in 80.0 s"), (0.0, 80, "")])
def test_a_slow_clock_makes_runs_of_equal_time_invalid(seconds, passed_s, reason, tmp_path, monkeypatch):
    write_log(tmp_path, "run", 1, 1.5, MAX_WALLCLOCK_SECONDS=seconds)
    run = effects.read_run(tmp_path / "run.jsonl")
    with run.log.open("a") as log:
        log.write(json.dumps({"event": "train", "step": 200, "train_time_ms": 59_000, "elapsed_s": 9 + passed_s}) + "\n")
    ablate.model_of(run).parent.mkdir()
    ablate.model_of(run).touch()
    monkeypatch.setattr(probe, "read_text", lambda config: "")
    monkeypatch.setattr(probe, "check_artifact", lambda *arguments: (1.5, ""))
    arm = ablate.Arm("mine", tmp_path, {}, plan={"config": {}}, runs=[run])
    ablate.check_scores(arm, print)
    assert (arm.reason, run.checked, arm.verdict) == (reason, reason, "invalid" * bool(reason))


@pytest.mark.parametrize("false", ["base", "idea"])
def test_a_false_score_is_known_from_the_log(false, tmp_path, monkeypatch):
    """Of another command, for another seed; of the first variation, it makes all invalid."""
    arms = judged_arms(tmp_path, [-0.01, -0.011, -0.012], "", MLP_SLOPE=0.5)
    with (tmp_path / f"{false}2.jsonl").open("a") as log:
        log.write(json.dumps({"event": "checked", "reason": "its log says 1.0"}) + "\n")
    for arm in arms:
        arm.plan["config"] |= {"SEED": 0, "INIT_FROM": ""}
        arm.runs = []
    runner = ablate.Runner(1, print)
    runner.runs = effects.read_runs(tmp_path)
    monkeypatch.setattr(ablate, "LOGS", tmp_path)
    ablate.train_until_clear(arms, runner, argparse.Namespace(most_seeds=2, diff=0.002, jobs=1))
    reason = {"base": "base, the first one: its log says 1.0", "idea": "its log says 1.0"}[false]
    assert not runner.processes and (arms[1].verdict, arms[1].reason) == ("invalid", reason)


def test_a_first_variation_that_proves_invalid_later_leaves_no_verdict(tmp_path, monkeypatch):
    """When an artifact of its third run does not score what the log says, one variation is already called better."""
    arms, found = judged_arms(tmp_path, [-0.01, -0.01], "", MLP_SLOPE=0.5), []
    arms += judged_arms(tmp_path, [0.0, 0.01], "", "slow", MLP_SLOPE=0.1)[1:]

    def train_all(arms, seeds, runner):
        found.append([facts["verdict"] for facts in ablate.read_tried()])
        if len(seeds) == 3:
            arms[0].verdict, arms[0].reason = "invalid", "its log says 1.0"

    arms[0].plan["config"]["SEED"] = 0
    monkeypatch.setattr(ablate, "LOGS", tmp_path)
    monkeypatch.setattr(ablate, "train_all", train_all)
    ablate.train_until_clear(arms, ablate.Runner(1, print), argparse.Namespace(most_seeds=3, diff=0.002, jobs=1))
    assert sorted(found[1]) == ["better", "undecided"] and not ablate.read_tried()
    assert [arm.verdict for arm in arms[1:]] == ["invalid", "invalid"]


def test_a_command_ends_if_its_first_variation_is_invalid(monkeypatch):
    start = {"config": {"MAX_WALLCLOCK_SECONDS": 0}, "data_sha256": {}, "val_tokens": 9, "val_bytes": 9, "torch": "2", "gpu": "", "world_size": 1}
    for output, message in ((json.dumps({**start, "reason": "its logits differ"}), "invalid: its logits differ"),
                            ("step:1/9\n", "failed: the script cannot be used: status 0"),  # It trains, and exits, when it is imported.
                            ("", "failed: the script cannot be used: status 0")):
        answer = subprocess.CompletedProcess([], 0, output, "")
        monkeypatch.setattr(subprocess, "run", lambda *arguments, answer=answer, **options: answer)  # probe.py
        with pytest.raises(ValueError, match=f"base is {message}"):
            ablate.make_plans([ablate.Arm("base", REPOSITORY / "train_gpt.py", {})], ablate.Runner(1, print))


def test_a_script_that_never_answers_is_named(tmp_path):
    (tmp_path / "train_gpt.py").write_text("import time\ntime.sleep(60)")
    with pytest.raises(ValueError, match=r"endless is failed: the script cannot be used: it hangs \(--patience 0.025\)"):
        ablate.make_plans([ablate.Arm("endless", tmp_path / "train_gpt.py", {})], ablate.Runner(1, print, patience=1.5))


def test_a_folder_that_cannot_be_written_is_no_verdict(tmp_path, monkeypatch, capsys):
    """By its status, 1, a traceback would say "not better"."""
    def make_plans(arms, runner):
        for arm in arms:
            arm.plan, arm.content = {"config": {"SEED": 1}}, {"cpu": ""}

    monkeypatch.setattr(ablate, "make_plans", make_plans)
    monkeypatch.setattr(ablate, "check_against", lambda first, arm: None)
    monkeypatch.setattr(ablate, "LOGS", tmp_path / "logs")
    (tmp_path / "logs").touch()
    monkeypatch.chdir(tmp_path)  # main changes it
    monkeypatch.setattr(sys, "argv", ["ablate.py", "x", "y A=1", "--json", "--settings", "ITERATIONS=9"])
    with pytest.raises(SystemExit, match="^2$"):
        ablate.run_command(ablate.main)
    assert "ablate.py: [Errno " in capsys.readouterr().err


def test_mistakes_in_the_command_are_named(tmp_path, monkeypatch, capsys):
    data = make_shards(tmp_path)
    settings, base = [*tiny_arguments(data), "SEED=1"], tmp_path / "base.env"
    base.write_text("\ufeffMLP_SLOPE=low\n", encoding="utf-8")
    for words, message in (([], "give at least two variations"), (["x"], "give at least two variations"),
                           (["x", "y", "--base", str(base)], "must be a number, like 0.0\n"), (["x", "x A=1"], "two variations are called x"),
                           (["x", "MLP_SLOPE=0.5"], "'MLP_SLOPE=0.5' must begin with a name"), (["x", ""], "'' must begin with a name"),
                           (["x", "y SEED=2"], "y sets SEED"), (["x", "y script=no.py"], "[Errno 2] No such file or directory: 'no.py'"),
                           (["x", "y INIT_FROM=9"], "y sets INIT_FROM, which must be equal in all"),
                           (["x", "y ITERATIONS=9"], "y sets ITERATIONS, which must be equal in all"),
                           (["x", "y", "--seconds", "3"], "give the length of a run once: as ITERATIONS=600, in --settings, --base or the environment, or as"),
                           (["x", "y A=1", "--settings", "SEED=1"], "give the length of a run once: as ITERATIONS=600"), (["x", "--seconds", "-6"], "of 0 or more"),
                           (["x", "y script='a b"], "No closing quotation"),
                           (["x", "y QQQQ=1"], "is not a variable of this script; --help lists all of them"),
                           (["x", "y MLP_SLOPE=0.0"], "y is equal to x: what it sets changes nothing"),
                           (["x", "y NUM_HEADS=5"], "y: MODEL_DIM=32 is no multiple of 2 * 5 heads\n"), (["x", "--diff", "nan"], "--diff: 'nan' must be"),
                           (["x", "--most-seeds", "1"], "--most-seeds: invalid choice: 1"), (["x", "--diff", "2"], "--diff: '2' must be a number from 0 to 1"),
                           (["--settings", *settings, "x", "x A=1"], "two variations are called x"),  # in any order
                           (["x", "--settings", *settings, "--jobs", "1", "x A=1"], "two variations are called x")):
        monkeypatch.setattr(sys, "argv", ["ablate.py", *words, *([] if "--settings" in words else ["--settings", *settings])])
        with pytest.raises(SystemExit, match="^2$"):
            ablate.run_command(ablate.main)
        errors = capsys.readouterr().err
        assert "ablate.py: " in errors and message in errors
