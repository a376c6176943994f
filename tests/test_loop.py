"""The loop over ideas: its decisions on simulated streams, stops at any moment, and a whole loop."""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import loop as loops
import numpy as np
import pytest
from conftest import REPOSITORY, make_shards, tiny_arguments

pytest.importorskip("scipy")


# ---- Decisions -------------------------------------------------------------------------


def test_levels_by_hand():
    """LORD++ for a share of 0.1, half of which is there at the start: gamma_1 is 0.0772 * ln 2."""
    gamma = [0.07720838 * np.log(max(n, 2)) / (n * np.exp(np.log(n) ** 0.5)) for n in range(1, 6)]
    assert loops.next_level([]) == pytest.approx(gamma[0] * 0.05)
    assert loops.next_level([False, False]) == pytest.approx(gamma[2] * 0.05)
    assert loops.next_level([False, True]) == pytest.approx(gamma[2] * 0.05 + gamma[0] * 0.05)
    assert loops.next_level([True, False, True]) == pytest.approx(gamma[3] * 0.05 + gamma[2] * 0.05 + gamma[0] * 0.1)
    spent = [loops.next_level([False] * count) for count in range(200)]
    assert sum(spent) <= loops.FALSE / 2 and min(spent) > 0


def simulate_stream(random) -> tuple[list[float], int]:
    """Return the true effects of what a loop keeps of 100 ideas, 90 of them without effect, and its runs.
    The spreads of a pair are those measured for five changes of a small model."""
    kept, was_kept, runs, base = [], [], 0, None
    for effect in random.permutation([0.0] * 90 + [-0.002] * 5 + [-0.004] * 3 + [0.004] * 2):
        spread = random.choice([0.0003, 0.0016, 0.0024, 0.0035, 0.0065])
        if base is None:  # after each idea that is kept, on other seeds
            base = random.standard_normal(loops.SCREENED)
            runs += loops.SCREENED
        noise = (random.standard_normal(loops.SCREENED) + base) / 2**0.5
        screened = (effect + spread * noise).tolist()
        used = next((n for n in range(1, loops.SCREENED + 1) if loops.is_hopeless(screened[:n], 0.002)), 0)
        runs += used or loops.SCREENED
        if used:
            continue
        differences = (effect + spread * random.standard_normal(loops.CONFIRMED)).tolist()
        level, verdict, pairs = loops.next_level(was_kept), "", loops.LOOK_FROM - 1
        while not verdict:
            pairs += 1
            verdict = loops.confirm(differences[:pairs], level, 0.002)
        runs += 2 * pairs
        was_kept.append(verdict == "kept")
        if verdict == "kept":
            kept.append(effect)
            base = None
    return kept, runs


@pytest.mark.slow
def test_at_most_a_tenth_of_what_is_kept_is_false():
    random = np.random.default_rng(1)
    streams = [simulate_stream(random) for _ in range(100)]
    shares = [sum(effect >= 0 for effect in kept) / max(1, len(kept)) for kept, _ in streams]
    assert np.mean(shares) < 0.05
    found = [sum(effect == -0.004 for effect in kept) / 3 for kept, _ in streams]
    assert np.mean(found) > 0.6 and np.mean([runs for _, runs in streams]) < 500


def test_the_interval_of_the_claim_has_seeds_and_blocks():
    random, covered, width = np.random.default_rng(1), [], []
    for _ in range(1500):
        seeds, blocks = random.normal(0, 1, (loops.CLAIMED, 1)), random.normal(0, 2, (1, loops.BLOCKS))
        claim = loops.claim_of(-1 + seeds + blocks + random.normal(0, 1, (loops.CLAIMED, loops.BLOCKS)))
        covered.append(claim["low"] <= -1 <= claim["high"])
        width.append(claim["high"] - claim["low"])
    assert 0.88 < np.mean(covered) < 0.97
    assert np.mean(width) < 4 * (1 / loops.CLAIMED + 4 / loops.BLOCKS + 1 / 96) ** 0.5 * 1.3


# ---- Stops -----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of ideas whose runs are simulated: an idea's effect is its value of MLP_SLOPE."""
    def compare(best, arms, seeds, runner):
        runner.work += 1
        if runner.work == runner.stops_at:
            raise KeyboardInterrupt
        runner.used.update(seeds)
        rows = []
        for arm in arms:
            noise = [np.random.default_rng([seed, sum(map(ord, arm.name))]).normal() for seed in seeds]
            rows.append([float(arm.settings["MLP_SLOPE"]) + 0.0005 * value for value in noise])
            arm.verdict = "failed" if "MAX_STEPS" in arm.settings else ""
            arm.runs = [SimpleNamespace(artifact_bytes=110)]
        best.runs = [SimpleNamespace(artifact_bytes=100)]
        return rows
    monkeypatch.setattr(loops, "compare", compare)
    for name in ("make_plans", "check_against"):
        monkeypatch.setattr(loops, name, lambda *arguments: None)
    monkeypatch.setattr(loops, "draw", lambda loop: None)
    monkeypatch.setattr(loops, "measure_claim", lambda loop, runner: None)
    ideas = {"a": "MLP_SLOPE=0.01", "b": "MLP_SLOPE=-0.01", "c": "MLP_SLOPE=0", "d": "MLP_SLOPE=-0.02", "e": "SEED=3",
             "f": "MLP_SLOPE=-0.01\nMAX_STEPS=1"}
    for place, (name, text) in enumerate(ideas.items()):
        (tmp_path / f"{name}.env").write_text(text)
        os.utime(tmp_path / f"{name}.env", (place, place))
    return tmp_path


class Runner:
    """What run_loop needs of a runner, with the number of the comparison at which a stop comes."""
    def __init__(self, stops_at=0, jobs=1):
        self.environment, self.jobs, self.work, self.stops_at, self.say = {}, jobs, 0, stops_at, lambda text: None
        self.used = set()  # seeds


def run(folder, runner):
    loops.run_loop(loops.Loop(folder, {"ITERATIONS": "9"}, 1, 0.002), runner, finish=True)
    return json.loads((folder / "loop.json").read_text())


def test_a_loop_ends_as_if_it_had_never_been_stopped(folder, monkeypatch):
    runner = Runner()
    whole = run(folder, runner)
    verdicts = {idea["name"]: idea["verdict"] for idea in whole["ideas"]}
    assert verdicts == {"a": "dropped", "b": "kept", "c": "dropped", "d": "kept", "e": "invalid", "f": "failed"}
    assert whole["kept"] == [1, 3] and "SEED must be equal" in whole["ideas"][4]["why"]
    table = (folder / "loop.md").read_text()
    assert "| b | -0.0" in table and re.search("confirmation: p = .*; [+]10.0 % bytes", table)
    write = loops.write_whole
    moments = [("compare", number) for number in range(1, runner.work + 1)]
    moments += [("write", number) for number in range(1, 14)]
    for kind, number in moments:
        for file in (folder / "loop.json", folder / "loop.md"):
            file.unlink()
        writes = []

        def stopping(path, text, number=number, writes=writes):
            writes.append(path)
            if len(writes) == number:  # in the middle: the temporary file is there, the old one still whole
                path.with_name(f".{path.name}.tmp").write_text(text[:20])
                raise KeyboardInterrupt
            write(path, text)
        monkeypatch.setattr(loops, "write_whole", stopping if kind == "write" else write)
        with pytest.raises(KeyboardInterrupt):
            run(folder, Runner(number if kind == "compare" else 0))
        monkeypatch.setattr(loops, "write_whole", write)
        assert run(folder, Runner()) == whole, (kind, number)
    for settings, diff, message in (({"ITERATIONS": "10"}, 0.002, "ITERATIONS is 10, but .*loop.json was made with 9: undo"),
                                    ({}, 0.002, "ITERATIONS is not set, but .* with 9"),
                                    ({"ITERATIONS": "9"}, 0.1, "--diff is 0.1, but .* with 0.002")):
        with pytest.raises(ValueError, match=message):
            loops.Loop(folder, settings, 1, diff)


def test_no_seed_is_used_twice(folder, monkeypatch):
    taken, runner, take = [], Runner(jobs=2), loops.Loop.take_seeds
    monkeypatch.setattr(loops.Loop, "take_seeds", lambda loop, count: taken.append(take(loop, count)) or taken[-1])
    state = run(folder, runner)  # ideas in pairs: c was screened with b, which was then kept
    assert [idea["verdict"] for idea in state["ideas"]] == ["dropped", "kept", "dropped", "kept", "invalid", "failed"]
    seeds = [seed for part in taken for seed in part]
    assert len(taken) > 3 and len(seeds) == len(set(seeds)) and max(seeds) < state["seed"] and runner.used <= set(seeds)
    assert "A changed file is a new idea." in loops.__doc__
    (folder / "b.env").write_text("MLP_SLOPE=-0.05")
    os.utime(folder / "b.env", (99, 99))
    again = run(folder, Runner())
    assert [idea["name"] for idea in again["ideas"]] == [*"abcdef", "b"] and again["ideas"][-1]["verdict"] == "kept"


def test_what_failed_is_tried_again_at_the_next_start(folder, monkeypatch):
    """Here, c is killed before its first run, and f in it. Of an idea that was edited, only the new content is tried."""
    def make_plans(arms, runner):
        if arms[0].name.endswith("_c"):
            arms[0].verdict = "failed"
            raise ValueError("2_c is failed: the script cannot be used: ended by SIGKILL")

    def with_memory(best, arms, *more):
        rows = compare(best, arms, *more)
        for arm in arms:
            arm.verdict = ""
        return rows

    monkeypatch.setattr(loops, "make_plans", make_plans)
    compare, first = loops.compare, run(folder, Runner())
    assert [idea["verdict"] for idea in first["ideas"]] == ["dropped", "kept", "failed", "kept", "invalid", "failed"]
    assert "ended by SIGKILL; the next start tries it again |" in (folder / "loop.md").read_text()
    monkeypatch.setattr(loops, "make_plans", lambda *arguments: None)
    monkeypatch.setattr(loops, "compare", with_memory)
    (folder / "f.env").write_text("MLP_SLOPE=0.01")
    os.utime(folder / "f.env", (9, 9))
    again = run(folder, Runner())["ideas"]
    assert [idea["name"] for idea in again] == [*"abcdef", "f"]
    assert [idea["verdict"] for idea in again] == ["dropped", "kept", "dropped", "kept", "invalid", "failed", "dropped"]


def test_odd_names_and_lost_copies_are_no_trap(folder):
    name = "idée $x " + "é" * 90  # 192 bytes, of which a log's name has few
    (folder / f"{name}.env").write_text("MLP_SLOPE=0.01")
    os.utime(folder / f"{name}.env", (9, 9))
    assert run(folder, Runner())["ideas"][-1]["verdict"] == "dropped"
    (folder / "a.env").rename(folder / "a.py")  # what should have been a script
    loop = loops.Loop(folder, {"ITERATIONS": "9"}, 1, 0.002)
    loop.find_ideas()
    assert [idea["name"] for idea in loop.state["ideas"]] == [*"abcdef", name, "a"]
    assert re.fullmatch(r"6_id_e__x__*", loop.arm_of([6]).name) and len(loop.arm_of([6]).name) < 100
    loop.state["ideas"][0]["name"] = "\udcff"  # a byte that is not UTF-8
    loop.save()
    shutil.rmtree((folder / loop.state["ideas"][1]["copy"]).parent)
    with pytest.raises(ValueError, match="there is no .*settings.env"):
        loop.arm_of([1])
    (folder / "loop.json").write_text("{]")
    with pytest.raises(ValueError, match="loop.json is not JSON"):
        loops.Loop(folder, {"ITERATIONS": "9"}, 1, 0.002)


def test_each_verdict_is_printed_when_it_is_made(folder):
    runner, made = Runner(jobs=6), []
    runner.say = lambda text: made.append((text.split()[0], runner.work))
    run(folder, runner)
    assert made[0] == ("e", 0) and dict(made)["a"] == 1 and sorted(name for name, _ in made) == [*"abcdef"]


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_while_a_command_stops_changes_nothing(second):
    code = (f"import sys, time; sys.path.insert(0, {str(REPOSITORY / 'tools')!r}); from ablate import Runner; from common import run_command\n"
            "def main():\n    runner = Runner(1, print)\n    runner.pool.submit(time.sleep, 3)\n    try:\n        print(flush=True)\n"
            "        time.sleep(60)\n    finally:\n        runner.stop()\n"
            "run_command(main)")
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert "stopped; the same command goes on after" in process.stderr.readline()
    time.sleep(0.2)
    process.send_signal(second)
    assert process.communicate(timeout=30) == ("", "") and process.returncode == 130


def test_a_script_and_settings_of_one_name_are_one_idea(folder):
    (folder / "d.py").write_text("# a script")
    loop = loops.Loop(folder, {"ITERATIONS": "9"}, 1, 0.002)
    assert loop.find_ideas()  # d.py may still be written
    os.utime(folder / "d.py", (99, 99))
    loop.find_ideas()
    names = [idea["name"] for idea in loop.state["ideas"]]
    arm = loop.arm_of([names.index("d")])
    assert names == [*"abcefd"] and arm.script.read_text() == "# a script"
    assert arm.settings == {"ITERATIONS": "9", "MLP_SLOPE": "-0.02"}


def test_an_idea_that_changes_nothing_is_doubted(folder, monkeypatch):
    monkeypatch.setattr(loops, "compare", lambda best, arms, seeds, runner: [[0.0] * len(seeds)] * len(arms))
    assert {idea["why"] for idea in run(folder, Runner())["ideas"]} >= {loops.UNCHANGED}


def test_half_written_ideas_and_mistyped_folders_wait(folder, monkeypatch, capsys):
    loop = loops.Loop(folder, {}, 1, 0.002)
    (folder / "notes.py").mkdir()
    (folder / "gone.env").symlink_to("nowhere")  # as a file that an editor is replacing
    (folder / "new.env").write_text("MLP_SLOPE=")
    (folder / "empty.env").touch()
    os.utime(folder / "empty.env", (time.time() - 30, time.time() - 30))
    assert loop.find_ideas() and not {"new", "empty"} & {idea["name"] for idea in loop.state["ideas"]}
    os.utime(folder / "empty.env", (99, 99))  # --finish would wait for it for ever,
    os.utime(folder / "new.env", (2e9, 2e9))  # and until 2033
    assert not loop.find_ideas() and {"new", "empty"} <= {idea["name"] for idea in loop.state["ideas"]}
    monkeypatch.setattr(sys, "argv", ["loop.py", str(folder / "ideass"), "--settings", "ITERATIONS=9"])
    with pytest.raises(SystemExit, match="^2$"):
        loops.main()
    assert "ideass is no folder" in capsys.readouterr().err and not (folder / "ideass").exists()


def test_the_claim_has_its_own_half_of_the_text(tmp_path):
    data = make_shards(tmp_path)
    whole = np.fromfile(next(data.glob("*_val_*.bin")), dtype="<u2", offset=1024)
    train = [{"file": file.name} for file in data.glob("*_train_*.bin")]
    splits = {"train": {"shards": train}, "val": {"shards": [], "tokens": len(whole), "decoded_bytes": 5}}
    (data / "manifest.json").write_text(json.dumps({"splits": splits}))
    for _ in range(2):  # again, after a stop
        loops.divide_text(data, tmp_path / "loop")
    config = {"TRAIN_SEQ_LEN": 32, "TOKENIZER_PATH": "byte260"}
    halves = [loops.read_text({**config, "DATA_PATH": tmp_path / "loop" / name})[0] for name in ("seen", "unseen")]
    shards = [np.fromfile(next((tmp_path / "loop" / name).glob("*_val_*.bin")), dtype="<u2", offset=1024) for name in ("seen", "unseen")]
    assert np.array_equal(np.concatenate(shards), whole) and abs(len(shards[0]) - len(shards[1])) <= 1
    for half, shard in zip(halves, shards):
        assert np.array_equal(half, shard[:len(half)]) and len(half) > len(shard) - 32
    train = next((tmp_path / "loop" / "seen").glob("*_train_*.bin"))
    assert train.read_bytes() == next(data.glob("*_train_*.bin")).read_bytes()


def test_a_loop_goes_on_in_a_project_that_was_renamed(tmp_path, monkeypatch):
    def open_in(project):
        monkeypatch.setattr(loops, "ROOT", project)
        settings = ["ITERATIONS=9", "DATA_PATH=tiny"]
        options = argparse.Namespace(folder=project / "ideas", base=None, seconds=0, diff=0.002, settings=settings)
        return loops.open_loop(options, {})

    monkeypatch.setattr(loops, "make_plans", lambda arms, runner: arms[0].plan.update(config=arms[0].settings))
    monkeypatch.chdir(tmp_path)  # open_loop changes it
    (tmp_path / "old" / "ideas").mkdir(parents=True)
    (tmp_path / "old" / "train_gpt.py").touch()
    for shard in make_shards(tmp_path / "old").iterdir():
        os.utime(shard, (99, 99))
    first = open_in(tmp_path / "old")
    before = next((tmp_path / "old" / "ideas" / "loop" / "seen").glob("*_val_*.bin")).read_bytes()
    loop = open_in((tmp_path / "old").rename(tmp_path / "new"))
    seen = tmp_path / "new" / "ideas" / "loop" / "seen"
    assert loop.state == {**first.state, "settings": {**first.state["settings"], "DATA_PATH": str(seen)}}
    [half], trained = [*seen.glob("*_val_*.bin")], [*seen.glob("*_train_*.bin")]
    assert half.read_bytes() == before and half.stat().st_mtime == 99  # so runs in logs/ are of this text
    assert len(trained) == 2 and all(link.exists() for link in trained)
    for name in ("SEED", "MATRIX_LR"):
        monkeypatch.setenv(name, "5")
        with pytest.raises(ValueError, match=f"{name} is 5, but .*loop.json was made without it"):
            open_in(tmp_path / "new")
        monkeypatch.delenv(name)
    shard = trained[0].resolve()
    os.utime(shard, (2e9, 2e9))
    with pytest.raises(ValueError, match=f"{shard} has changed since the loop began"):
        open_in(tmp_path / "new")
    os.utime(seen, (2e9, 2e9))
    assert open_in(tmp_path / "new").state == loop.state
    shard.unlink()
    with pytest.raises(ValueError, match=f"{shard} has changed"):
        open_in(tmp_path / "new")


# ---- A whole loop ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_loop_finishes_and_measures_its_claim(tmp_path):
    pytest.importorskip("matplotlib")
    root, ideas = tmp_path / "root", tmp_path / "ideas"
    subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(root)], check=True)
    for file in (REPOSITORY / "tools").glob("*.py"):  # as they are here
        (root / "tools" / file.name).write_bytes(file.read_bytes())
    source, pairs = (root / "tools/loop.py").read_text(), "SCREENED, CONFIRMED, CLAIMED = 4, 16, 6"
    assert pairs in source
    (root / "tools/loop.py").write_text(source.replace(pairs, "SCREENED, CONFIRMED, CLAIMED = 1, 16, 2"))
    (root / "train_gpt.py").write_bytes((REPOSITORY / "train_gpt.py").read_bytes())
    data = make_shards(tmp_path)
    ideas.mkdir()
    (ideas / "rate.env").write_text("TIED_EMBED_LR=0.05")
    (ideas / "typo.env").write_text("TIED_EMBED=0.05")
    (ideas / "same.py").write_bytes((root / "train_gpt.py").read_bytes())
    settings = tiny_arguments(data, ITERATIONS=20, VAL_LOSS_EVERY=0, TIED_EMBED_LR=0.0001)
    command = [sys.executable, str(root / "tools/loop.py"), str(ideas), "--jobs", "2", "--diff", "0.01", "--finish",
               "--settings", *settings, "SEED=5"]

    def start():
        return subprocess.Popen(command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)
    process = start()
    while len([*(root / "logs").glob("*/final_model.int8.ptz")]) < 3 and process.poll() is None:
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    ended = [log.with_suffix(".txt") for log in (root / "logs").glob("*.jsonl") if '"final"' in log.read_text()]
    logs = {log: log.stat().st_mtime for log in ended}
    process = start()
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, output + errors
    assert all(log.stat().st_mtime == then for log, then in logs.items())  # nothing is trained twice
    state = json.loads((ideas / "loop.json").read_text())
    verdicts = {idea["name"]: (idea["verdict"], idea["why"]) for idea in state["ideas"]}
    assert verdicts["rate"][0] == "kept" and verdicts["typo"][0] == "invalid" and "TIED_EMBED" in verdicts["typo"][1]
    assert verdicts["same"][0] == "invalid" and "equal to start" in verdicts["same"][1]
    assert state["claims"][0]["high"] < 0 and "that no other run has scored" in output
    assert (ideas / "loop.png").stat().st_size > 9000


def test_an_idea_is_screened_before_it_is_confirmed():
    idea = {"name": "a", "verdict": "", "why": "", "effect": -0.01, "low": -0.02, "high": 0.01}
    assert [loops.row_of({**idea, "pairs": pairs})[4] for pairs in (1, 3, 4)] == ["screening", "screening", "confirming"]


def test_a_file_that_cannot_be_written_whole_stays_as_it_was(tmp_path):
    """As on a full disk: a record's submission.json and README.md were emptied."""
    file = tmp_path / "submission.json"
    file.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        loops.write_whole(file, "new \ud800")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
