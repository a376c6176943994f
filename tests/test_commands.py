"""The commands that people type: those in the READMEs, run.sh, and a record from its runs to the leaderboard."""

import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from functools import lru_cache
from pathlib import Path
from unittest.mock import patch

import pytest
import start
import train_gpt
from conftest import REPOSITORY, make_shards, tiny_arguments
from prepare import learn_vocabulary
from tokenization import load_tokenizer

READMES = ("README.md", "data/README.md", "tools/README.md", "records/README.md", "records/speed.md",
           "records/ablations.md", "records/presets/README.md",
           *(str(path.relative_to(REPOSITORY)) for path in sorted((REPOSITORY / "records").glob("track_*/README.md"))))
COMMAND = re.compile(r"(?:(?:\.venv/bin/)?(?:python|torchrun)\d* (?:-\S+ )*|\./)"
                     r"((?:data|tools|tools/huggingface|records)/\w+\.py|train_gpt\.py|run\.sh)(.*)")
VARIABLES = {f.name.upper() for f in train_gpt.fields(train_gpt.Config)} | {"MLP_SILU"}  # README says how to add it


def commands_of(text: str) -> list[tuple[str, str]]:
    """Script and arguments of each command in a README, in code blocks or between back quotes, continued lines joined."""
    text = re.sub(r"\\\n\s*", "", text)
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    lines += [" ".join(quoted.split()) for quoted in re.findall(r"`([^`]+)`", text)]
    matches = [COMMAND.search(line.partition("  #")[0]) for line in lines]
    return [(match[1], match[2]) for match in matches if match]


@lru_cache
def help_of(script: str) -> str:
    shown, module = io.TextIOWrapper(io.BytesIO()), importlib.import_module(Path(script).stem)
    with patch.object(sys, "argv", [script, "--help"]), redirect_stdout(shown), pytest.raises(SystemExit, match="^0$"):
        module.main()
    shown.seek(0)
    return shown.read()


@pytest.mark.parametrize("readme", READMES)
def test_the_commands_in_the_readmes_name_scripts_options_and_variables_that_exist(readme):
    found = commands_of((REPOSITORY / readme).read_text(encoding="utf-8"))
    for script, arguments in found:
        assert (REPOSITORY / script).is_file(), script
        for option in re.findall(r"(?<= )--[\w-]+", arguments):
            assert script in ("train_gpt.py", "run.sh") or option in help_of(script), (script, option)
        for variable in re.findall(r"(?<= )([A-Z][A-Z0-9_]+)=", arguments):
            assert variable in VARIABLES, (script, variable)
    assert found or readme.startswith("records/track_")


def test_the_setting_of_memory_in_readme_is_that_of_the_tools():
    code = "import os, common; print(os.environ['GLIBC_TUNABLES'])"
    clean = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    said = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY / "tools", env=clean, check=True, capture_output=True, text=True)
    assert f"GLIBC_TUNABLES={said.stdout.strip()}`" in (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_links_lead_to_files_and_headings():
    left_out = {*(REPOSITORY / ".dockerignore").read_text(encoding="utf-8").split()}  # of the container, which runs this test
    texts = [*REPOSITORY.glob("*.md"), *REPOSITORY.glob("[.dlt]*/*.md"), *(REPOSITORY / "records").rglob("*.md")]
    for path in texts:
        for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
            place, _, heading = link.partition("#")
            if place.startswith(("https://", "../../actions/")):  # the second is a page of the forge
                continue
            target = (path.parent / place).resolve() if place else path
            assert target.exists(), (path, link)
            assert left_out.isdisjoint(target.relative_to(REPOSITORY).parts[:1]), (path, link)
            if heading:
                titles = re.findall(r"^#+ (.+)", target.read_text(encoding="utf-8"), re.M)
                assert heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, (path, link)
    assert len(texts) > 15


# ---- run.sh ------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path):
    """A copy of the scripts, with a virtual environment that hands over to this interpreter."""
    for pattern in ("train_gpt.py", "run.sh", "requirements*.txt", "data/*.py", "tools/*.py", "records/*.py",
                    "records/presets/*.env"):
        for path in REPOSITORY.glob(pattern):
            target = tmp_path / path.relative_to(REPOSITORY)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    stand_in(tmp_path, "python", f'exec {sys.executable} "$@"')
    sums = subprocess.run("cat requirements*.txt | cksum | cut -d' ' -f1", shell=True, cwd=tmp_path, capture_output=True, text=True)
    for name in ("requirements.txt", "requirements-dev.txt"):
        (tmp_path / ".venv" / f"installed-{sums.stdout.strip()}-{name}").touch()
    return tmp_path


def stand_in(checkout: Path, name: str, script: str) -> None:
    path = checkout / ".venv" / "bin" / name
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)


def run(checkout: Path, *words: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if name not in {*VARIABLES, "GLIBC_TUNABLES"}}
    return subprocess.run(words, cwd=checkout, env=clean, capture_output=True, text=True, timeout=240, check=False)


def shell(checkout: Path, *arguments: str) -> subprocess.CompletedProcess:
    return run(checkout, "bash", *arguments)


def test_run_sh_replaces_an_environment_that_is_dead_and_removes_one_that_is_half_made(checkout):
    """Debian's venv leaves a python without pip, and fails, if its package python3-venv is missing."""
    stand_in(checkout, "python", "exit 1")
    stand_in(checkout, "../../own-python", """[ "$1 $2" = "-m venv" ] || exit 0
mkdir -p .venv/bin
printf '#!/usr/bin/env bash\\n[[ "$*" != *pip* ]] || echo "$*"\\n' > .venv/bin/python
chmod +x .venv/bin/python
exit $FAILS""")
    assert shell(checkout, "-c", "FAILS=1 PYTHON=./own-python ./run.sh test").returncode == 1
    assert not (checkout / ".venv").exists()
    result = shell(checkout, "-c", "FAILS=0 PYTHON=./own-python ./run.sh test")
    assert "-m pip install -q --disable-pip-version-check -r requirements-dev.txt" in result.stdout, result.stderr
    assert len(list((checkout / ".venv").glob("installed-*-requirements-dev.txt"))) == 1


@pytest.mark.skipif(not shutil.which("flock"), reason="without flock, as on a Mac, two may install at once")
def test_of_two_run_sh_in_a_new_checkout_one_installs_and_the_other_waits(checkout):
    shutil.rmtree(checkout / ".venv")
    (checkout / "own-python").write_text("""#!/usr/bin/env bash
[ "$1 $2" = "-m venv" ] || exit 0
mkdir -p .venv/bin
cp "$0" .venv/bin/python
sleep 1
""")
    (checkout / "own-python").chmod(0o755)
    result = shell(checkout, "-c", "export PYTHON=./own-python; ./run.sh test & ./run.sh test; wait")
    assert result.stdout.count("installing requirements-dev.txt into .venv") == 1, result
    assert result.stdout.count("waiting for another ./run.sh, which installs") == 1


def test_run_sh_trains_and_says_what_it_left(checkout):
    """And sends the numbers to a tracker, here a module that writes them down."""
    data = make_shards(checkout)
    (checkout / "logs").mkdir()
    (checkout / "logs" / "newer.txt").write_text("no log of a run")
    (checkout / "tools" / "wandb.py").write_text("""from types import SimpleNamespace
def init(**given):
    file = open("sent.txt", "w")
    return SimpleNamespace(log=lambda row, step: print(row, file=file), finish=file.close)
""")
    tokenizer = checkout / "tokenizer.model"  # its absolute path is not in the artifact
    learn_vocabulary("char", ["ab"], tokenizer)
    settings = dict(ITERATIONS=3, TOKENIZER_PATH=tokenizer, VOCAB_SIZE=load_tokenizer(str(tokenizer)).vocab_size, OUT_DIR="größe")
    result = shell(checkout, "run.sh", "--track", "wandb", *tiny_arguments(data, **settings))
    assert result.returncode == 0 and "not found" not in result.stderr, result.stderr
    assert "\nthe saved model: " in result.stdout and "\n3 steps in " in result.stdout
    run_id = re.search(r"log       logs/(\d{8}-\d{6}-\d+)\.jsonl; ", result.stdout)[1]
    assert f"next      {sys.executable} tools/sample.py {run_id} --interactive" in result.stdout
    assert "A sample of what it writes" in result.stdout and "model     größe/final_model.int8.ptz" in result.stdout
    assert "final/val_bpb" in (checkout / "sent.txt").read_text()


def test_run_sh_refuses_other_words_before_it_installs_anything(checkout):
    old = 'case "$*" in --version) echo Python 3.10.12 ;; *) exit 1 ;; esac'
    stand_in(checkout, "../../old-python", old)
    shutil.rmtree(checkout / ".venv")
    assert "PYTHON names the interpreter" in shell(checkout, "run.sh", "--help").stdout
    result = shell(checkout, "run.sh", "tset")
    assert result.returncode and result.stderr == "run.sh: tset is not NAME=value, --preset NAME, --help or test\n"
    assert "unrecognized arguments: --epochs" in shell(checkout, "run.sh", "--epochs").stderr
    result = shell(checkout, "run.sh", "--preset", "x")
    assert result.stderr.startswith("run.sh: there is no records/presets/x.env; presets in records/presets: cpu_1mb cpu_1mb_avx2 gpu_")
    assert result.stderr.endswith(" quick\n")  # not what only adds to a preset
    result = shell(checkout, "-c", "PYTHON=./old-python sh run.sh DEVICE=cpu")
    assert result.stderr.startswith("run.sh: Python 3.11 to 3.14 is needed, and ./old-python is Python 3.10.12; install one")
    assert not (checkout / ".venv").exists()


def test_run_sh_says_what_is_wrong_with_a_path_or_an_environment(checkout):
    other = checkout / "other"
    (other / "mine").mkdir(parents=True)
    (other / "link").symlink_to(checkout / "run.sh")
    result = shell(checkout, "-c", "cd other; ../run.sh DATA_PATH=mine")
    assert result.returncode == 1 and f"run.sh: DATA_PATH=mine does not exist in {checkout}; you may mean" in result.stderr
    (checkout / "elsewhere").mkdir()
    result = shell(checkout, "-c", "cd other; CDPATH=$PWD/../elsewhere bash link --preset x")
    assert "there is no records/presets/x.env" in result.stderr
    result = shell(checkout, "-c", "unset HOME; PYTHONHOME=/opt/other ./run.sh DATA_PATH=nowhere DEVICE=cpu")  # as a service has it
    assert "run.sh: DATA_PATH=nowhere does not exist in " in result.stderr
    for stamp in (checkout / ".venv").glob("installed-*"):
        stamp.unlink()
    stand_in(checkout, "python", 'case "$*" in --version) echo Python 3.10.12 ;; *version_info*) exit 1 ;; esac')
    assert "needed, and .venv/bin/python is Python 3.10.12; install one" in shell(checkout, "run.sh").stderr
    stand_in(checkout, "python", '[[ "$*" != *pip* ]]')  # as uv makes it
    result = shell(checkout, "run.sh")
    assert result.stderr == "run.sh: this .venv has no pip: run .venv/bin/python -m ensurepip, or delete .venv\n"


def test_run_sh_sets_what_must_be_set_before_pytorch_is_loaded(checkout):
    stand_in(checkout, "python", """[[ "$*" != "tools/start.py SEED=1" ]] || env""")
    clean = "unset TORCH_ELASTIC_SHUTDOWN_TIMEOUT PET_SIGNALS_TO_HANDLE;"
    shown = shell(checkout, "-c", f"{clean} PYTHONPATH=x ./run.sh SEED=1").stdout.splitlines()
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600" in shown
    handled = next(line for line in shown if line.startswith("PET_SIGNALS_TO_HANDLE=")).partition("=")[2]
    assert {*handled.split(",")} == {number.name for number in start.SIGNALS}  # torchrun hands on what it is handed
    assert not any(line.startswith("PYTHONPATH=") for line in shown)
    given = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=7"
    assert given in shell(checkout, "-c", f"{given} ./run.sh SEED=1").stdout.splitlines()


@pytest.mark.parametrize(("load", "wanted"), [(0.2, "None"), (1.5, "1000")])
def test_threads_soon_sleep_only_beside_a_busy_program(load, wanted):
    code = f"import os; os.environ.pop('GOMP_SPINCOUNT', 0); os.getloadavg = lambda: ({load}, 0, 0); import common"
    command = [sys.executable, "-c", f"{code}; print(os.environ.get('GOMP_SPINCOUNT'))"]
    assert subprocess.check_output(command, cwd=REPOSITORY / "tools", text=True).strip() == wanted


# ---- Records ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_record_from_its_runs_to_the_leaderboard(checkout):
    pytest.importorskip("scipy")
    pytest.importorskip("matplotlib")
    make_shards(checkout)
    track = checkout / "records" / "track_tiny"
    track.mkdir()
    (track / "track.json").write_text(json.dumps({"title": "Tiny", "min_seeds": 2, "max_train_seconds": 60}))
    (checkout / "records" / "README.md").write_text("<!-- leaderboard -->\n<!-- end of leaderboard -->\n")
    settings = tiny_arguments("tiny", MAX_WALLCLOCK_SECONDS="60", ITERATIONS="12")
    given = ["--track", "track_tiny", "--division", "tiny", "--author", "me", "--seeds", "1,2"]

    def script(name: str, *arguments: str) -> str:
        result = run(checkout, sys.executable, f"records/{name}", *arguments)
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
        return result.stdout

    first = script("make.py", *given, "--name", "First", "--blurb", "The first.", *settings)
    assert ": accepted" in first
    base = next(track.glob("*_First"))
    second = script("make.py", *given, "--name", "Second", "--blurb", "Slower.", "--base", f"track_tiny/{base.name}",
                    "MATRIX_LR=0.0001")
    assert ": accepted" in second and f"against track_tiny/{base.name}" in second
    checked = script("verify.py", "--rerun")
    assert checked.count(": accepted") == 2 and checked.count("scored again") == 4
    rows = [line for line in (checkout / "records" / "README.md").read_text().splitlines() if "](track_tiny/" in line]
    assert len(rows) == 2 and "_Second](" in rows[1] and "TFLOP/s |" in rows[0]


@pytest.mark.parametrize("text", ["speeches", "plays"])
def test_beside_other_trainers_ours_has_the_cpu_even_if_there_is_a_gpu(monkeypatch, text):
    monkeypatch.syspath_prepend(REPOSITORY / "records" / "peers")
    monkeypatch.chdir(REPOSITORY)
    run = {"text": text, "dtype": "float32", "id": "ours", "folder": "x", "seed": 1, "data": "x", "seconds": 60}
    words = importlib.import_module("compare").command_for_ours(run)
    assert train_gpt.load_config(words[1:], {})[0].device == "cpu"


def test_the_speed_of_other_trainers_is_that_of_the_steps_on_their_clock(monkeypatch):
    monkeypatch.syspath_prepend(REPOSITORY / "records" / "peers")
    final = {"step": 13, "tokens": 1300, "time_s": 10, "bpb": 2, "parameters": 1, "weight_bytes": 4}
    start = {"dtype": "float32", "machine": "x", "torch": "2", "minutes": 1, "packed_bpb": {}}
    runs = {"ours": [[start, {**final, "artifact_bpb": 2, "artifact_bytes": 1}]], "other": [[start, final]]}
    rows = importlib.import_module("compare").tabulate(runs)
    assert [row.split(" | ")[7] for row in rows if " float32 " in row] == ["130", "100"]


@pytest.mark.slow
def test_a_short_ladder(checkout, monkeypatch):
    """Three rungs of the real ladder, the last with two ranks, with a vocabulary that needs no download; and one that cannot be
    had is skipped, with what it sets."""
    import ladder
    rungs = [rung for rung in ladder.RUNGS if rung[0] in ("overfit one batch", "gradient accumulation, 4 times", "two ranks (DDP)")]
    monkeypatch.setattr(ladder, "RUNGS", [*rungs[:2], ("no kernel", "ATTN=cudnn"), rungs[2]])
    monkeypatch.setattr(ladder, "ROOT", checkout)
    make_shards(checkout / "data")
    extra = ["DATA_PATH=data/tiny", "TOKENIZER_PATH=byte260", "VOCAB_SIZE=260", "ITERATIONS=14", "MODEL_DIM=32",
             "NUM_LAYERS=2", "TRAIN_SEQ_LEN=32", "TRAIN_BATCH_TOKENS=256", "VAL_BATCH_SIZE=256", "DEVICE=cpu", "TRAIN_LOG_EVERY=5"]
    (checkout / "logs" / "ladder_rung01").mkdir(parents=True)
    (checkout / "logs" / "ladder_rung01" / train_gpt.MODEL_FILE).touch()  # of an earlier climb
    text = ladder.climb("small", extra)
    log = (checkout / "logs" / "ladder_rung02.jsonl").read_text()
    assert '"TRAIN_BATCH_TOKENS": 1024,' in log and '"TRAIN_LOG_EVERY": 1,' in log  # each step is timed
    assert all(re.search(rf"\| {re.escape(rung[0])} \| .* \| \d+\.\d \(", text) for rung in rungs)
    assert "| no kernel | `ATTN=cudnn` | skipped |" in text and "- no kernel: `ATTN=cudnn" in text
