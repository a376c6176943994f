"""Using what was trained: artifacts that describe themselves, text and scores from them, and several launchers."""

import io
import json
import os
import shutil
import subprocess
import sys
import time
import zlib

import events as event_log
import export_hf
import pytest
import sample
import torch
import train_gpt
from conftest import REPOSITORY, events, make_shards, run_here, run_trainer, tiny_arguments, tiny_config
from test_model import SWITCHES, trained_like

NAMES = {name.upper(): int(value) if isinstance(value, bool) else value for name, value in SWITCHES.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with final_model.int8.ptz and final_model.pt, its data, and the run's last event."""
    folder = tmp_path_factory.mktemp("trained")
    data = make_shards(folder)
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_here(monkeypatch, folder, *tiny_arguments(
            data, RUN_ID="run", **NAMES, EXPORT_BITS=5, EXPORT_CODER="huffman", INT8_KEEP_FLOAT_MAX_NUMEL=100))
    return folder, data, events(folder, "run")[-1]


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs a script's main() with arguments and typed lines; returns what it printed. SystemExit has its error."""
    def run(script, *arguments, typed=""):
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        script.main()
        return capsys.readouterr().out

    return run


def test_an_artifact_needs_no_shape_variables(trained, tmp_path, monkeypatch, capsys):
    """Nor training data; and it is scored as it is, not rounded again."""
    folder, data, final = trained
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "tiny_val_000000.bin").write_bytes((data / "tiny_val_000000.bin").read_bytes())
    words = [f"DATA_PATH={tmp_path / 'only'}", "TOKENIZER_PATH=byte260", "DTYPE=float32", "COMPILE=0", "DEVICE=cpu"]
    run_here(monkeypatch, tmp_path, *words, "ITERATIONS=0", f"INIT_FROM={folder / 'final_model.int8.ptz'}", "RUN_ID=score")
    assert events(tmp_path, "score")[-1]["val_loss"] == pytest.approx(final["val_loss"], abs=1e-6)
    assert not (tmp_path / "final_model.int8.ptz").exists()
    assert "Serialized" not in capsys.readouterr().out
    run_here(monkeypatch, tmp_path, *words, "ITERATIONS=0", f"INIT_FROM={folder / 'final_model.int8.ptz'}", "RUN_ID=longer",
             "TRAIN_SEQ_LEN=64")  # what is set by hand wins
    assert events(tmp_path, "longer")[0]["config"]["TRAIN_SEQ_LEN"] == 64


def test_an_artifact_knows_its_tokenizer(trained, tmp_path, monkeypatch):
    folder, data, _ = trained
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"kind": "table", "bos": -1, "tokens": [""] * 4 + [chr(i) for i in range(256)]}))
    with pytest.raises(SystemExit, match=r"other.json is missing or not the model's, of TOKENIZER_SHA256=[0-9a-f]{64}; use its data"):
        run_here(monkeypatch, tmp_path, f"DATA_PATH={data}", f"TOKENIZER_PATH={other}", "ITERATIONS=0", "COMPILE=0",
                 f"INIT_FROM={folder / 'final_model.int8.ptz'}")


def test_what_an_artifact_says_is_small_and_checked(trained, tmp_path):
    folder, *_ = trained
    about = train_gpt.read_description(folder / "final_model.int8.ptz")
    assert about["MODEL_DIM"] == "32" and about["SHIFT_KEYS"] == "True" and about["TOKENIZER_PATH"] == "byte260"
    assert len(json.dumps(about)) < 600 and not {"DATA_PATH", "OUT_DIR", "SEED"} & about.keys()
    assert train_gpt.read_description(folder / "final_model.pt") == {}
    assert train_gpt.read_description(tmp_path / "none") == {}
    with pytest.raises(ValueError, match="NUM_LAYERS='many'"):
        train_gpt.load_config(["NUM_LAYERS=many", f"INIT_FROM={folder / 'final_model.int8.ptz'}"], {})


def repacked(artifact: bytes, changes: dict) -> bytes:
    """An artifact that says something else of itself, and nothing else than that."""
    raw = zlib.decompress(artifact)
    about = {**json.JSONDecoder().raw_decode(raw.decode("latin-1"), raw.index(b'{"TOKENIZER_PATH'))[0], **changes}
    state = train_gpt.read_archive(raw)
    return zlib.compress(train_gpt.saved({**state, "about": json.dumps(about)}))


@pytest.mark.parametrize("changes, message", [
    ({"NEW_SWITCH": 1}, "settings that this script does not know: NEW_SWITCH"),
    ({"OUT_DIR": "/home/me", "RESUME": "auto"}, "does not know: (OUT_DIR, RESUME|RESUME, OUT_DIR)"),
    ({"NUM_LAYERS": -3}, "NUM_LAYERS=-3"), ({"MODEL_DIM": 64}, "other.ptz cannot be loaded into this model")])
def test_an_artifact_sets_only_what_its_model_is(trained, tmp_path, changes, message):
    folder, *_ = trained
    other = tmp_path / "other.ptz"
    other.write_bytes(repacked((folder / "final_model.int8.ptz").read_bytes(), changes))
    with pytest.raises(ValueError, match=message):
        sample.load(other)


def test_a_run_is_summarized(trained, tmp_path, monkeypatch, call):
    folder, *_ = trained
    monkeypatch.chdir(folder)
    log = folder / "logs" / "run.jsonl"
    for name in (log, "run", ""):
        assert " bits per byte of the validation text, with " in call(event_log, *([name] if name else []))
    with pytest.raises(SystemExit, match="^events.py: nope is no log of a run; there are: run$"):
        call(event_log, "nope")
    lines = log.read_text().splitlines()
    (tmp_path / "cut.jsonl").write_text("\n".join(lines[:3]) + "\n")
    assert "the run has not ended; it left no checkpoint" in call(event_log, tmp_path / "cut.jsonl")
    often = [{**event, "train_loss": 0.1, "epoch": 5} if event["event"] == "train" else event for event in map(json.loads, lines)]
    (tmp_path / "often.jsonl").write_text("\n".join(map(json.dumps, often)) + "\n")
    assert "warning: it read its text 5 times and knows it far better" in call(event_log, tmp_path / "often.jsonl")


def test_a_model_is_found_by_its_run(trained, tmp_path, monkeypatch):
    """In the OUT_DIR that the log names, unless that has the model of another run; without a name, the newest in logs/."""
    folder, *_ = trained
    monkeypatch.chdir(folder)
    assert sample.find_model("run").read_bytes() == (folder / "final_model.int8.ptz").read_bytes()
    with pytest.raises(ValueError, match="'' is neither a file nor a RUN_ID with a model in logs/; there are: none"):
        sample.find_model("")
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("new", "old")):
        model = tmp_path / "logs" / name / "final_model.int8.ptz"
        model.parent.mkdir(parents=True)
        model.write_bytes(b"another model")
        os.utime(model, (10**9 - age, 10**9 - age))
    assert sample.find_model("").parent.name == "new"
    log = (folder / "logs" / "run.jsonl").read_text()
    (tmp_path / "logs" / "new.jsonl").write_text(log.replace('"OUT_DIR": "."', '"OUT_DIR": "logs/new"'))
    with pytest.raises(ValueError, match="is the model of a later run with the same OUT_DIR, not of new"):
        sample.find_model("new")
    with pytest.raises(ValueError, match="'none' is neither a file nor a RUN_ID with a model in logs/; there are: old, new"):
        sample.find_model("none")


def test_a_file_made_to_be_slow_or_large_is_read_at_once(tmp_path):
    started = time.monotonic()
    for number, text in enumerate((b'{"TOKENIZER_PATH": ' * 50_000, b'{"TOKENIZER_PATH": ' + b"[" * 900_000, b"x" * 10 ** 8)):
        path = tmp_path / f"{number}.ptz"
        path.write_bytes(zlib.compress(text))
        assert train_gpt.read_description(path) == {}
    assert time.monotonic() - started < 30  # a search for the end of each beginning takes minutes


def test_load_gives_a_notebook_the_model(trained):
    folder, *_ = trained
    model = sample.load(folder / "final_model.int8.ptz")
    floats = sample.load(folder / "final_model.pt", tiny_settings())
    tokens = torch.randint(0, 260, (2, 32))
    difference = model.logits(model.hidden(tokens)) - floats.logits(floats.hidden(tokens))
    assert 0 < difference.abs().max() < 1  # rounded to 5 bits
    with pytest.raises(ValueError, match="and its DTYPE, such as DTYPE=bfloat16"):  # the frequencies of a bfloat16 model would be others
        sample.load(folder / "final_model.pt", [word for word in tiny_settings() if not word.startswith("DTYPE=")])


@pytest.mark.parametrize("changes", [
    dict(dtype="bfloat16"), dict(vocab_pad=64), dict(tie_embeddings=False, vocab_pad=64, **SWITCHES)])
def test_a_loaded_model_computes_what_was_trained(tmp_path, changes):
    """With the frequencies as bfloat16 rounds them, where that was the type; padded and untied tables, too."""
    config = tiny_config(train_seq_len=512, **changes)
    model = trained_like(config)
    data, *_ = train_gpt.pack(model.state_dict(), config)
    (tmp_path / "a.ptz").write_bytes(data)
    loaded = sample.load(tmp_path / "a.ptz")
    assert torch.equal(loaded.rotary, model.rotary) and loaded.compute_dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in loaded.parameters())
    tokens = torch.randint(0, 260, (1, 512))
    wanted = model.logits(model.hidden(tokens)).float()
    assert (loaded.logits(loaded.hidden(tokens)) - wanted).norm() < 0.03 * wanted.norm()


def test_load_keeps_a_table_in_float32(tmp_path):
    model = trained_like(tiny_config(dtype="bfloat16", embed_float32=True))
    (tmp_path / "a.ptz").write_bytes(train_gpt.pack(model.state_dict(), model.config)[0])
    train_gpt.load_weights(model, tmp_path / "a.ptz")
    table = model.tok_emb.weight
    assert not torch.equal(table, table.bfloat16().float())
    assert torch.equal(sample.load(tmp_path / "a.ptz").tok_emb.weight, table)


def tiny_settings() -> list[str]:
    """What a user would give for a file that does not say it."""
    return [f"{name}={getattr(tiny_config(**SWITCHES), name.lower())}" for name in train_gpt.KEPT]


def draw(logits, count=2000, **changes):
    options = sample.argparse.Namespace(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, **changes})
    generator = torch.Generator().manual_seed(1)
    return [sample.choose(torch.tensor(logits), options, generator) for _ in range(count)]


def test_tokens_are_drawn_as_the_options_say():
    logits = [0.0, 2.0, 1.0, -1.0]
    shares = torch.tensor(logits).softmax(0)
    drawn = draw(logits)
    for token in range(4):
        assert drawn.count(token) / 2000 == pytest.approx(shares[token].item(), abs=0.03)
    assert set(draw(logits, temperature=0)) == {1}
    assert set(draw(logits, top_k=2)) == {1, 2}
    assert set(draw(logits, top_p=0.7)) == {1, 2}  # 0.61 and 0.22
    assert set(draw(logits, top_p=0.6)) == {1}
    assert draw(logits, temperature=0.01, count=50) == [1] * 50


class Counter(torch.nn.Module):
    """Stands in for a model: it expects the number after each, up to the BOS after 50."""

    def __init__(self, window):
        super().__init__()
        self.config = tiny_config(train_seq_len=window)
        self.read = []

    def hidden(self, tokens):
        self.read.append(tokens.tolist()[0])
        return tokens[..., None]

    def logits(self, x):
        following = x[..., 0] + 1
        return torch.nn.functional.one_hot(torch.where(following > 50, 1, following), 260).float()


def test_a_text_goes_on_when_the_context_is_full_and_ends_with_the_document():
    options = sample.argparse.Namespace(temperature=0, length=100)
    model = Counter(window=8)
    assert list(sample.generate(model, [10, 11, 12], 1, options, None)) == list(range(13, 51))
    assert model.read == [list(range(max(10, last - 7), last + 1)) for last in range(12, 51)]
    options.length = 5
    assert list(sample.generate(model, list(range(2, 30)), 1, options, None)) == [30, 31, 32, 33, 34]


def test_text_comes_from_the_artifact_or_from_weights_with_settings(trained, call):
    folder, *_ = trained
    model = folder / "final_model.int8.ptz"
    options = ["--prompt", "the quick", "--length", "12", "--samples", "2", "--seed", "3"]
    first = call(sample, model, *options)
    assert first.count("the quick") == 2 and call(sample, model, *options) == first
    asked = call(sample, model, "--interactive", "--length", "3", typed="the\nfox\n")
    assert asked.startswith("the") and "\nfox" in asked
    assert call(sample, folder / "final_model.pt", "--length", "3", "--prompt", "a", *tiny_settings()).startswith("a")


def test_texts_are_scored_as_one_token_at_a_time_would_be(trained, tmp_path, call):
    folder, *_ = trained
    artifact = folder / "final_model.int8.ptz"
    model = sample.load(artifact)
    texts = ["the quick brown fox jumps over the lazy dog, " * 2, "é 漢字", "x" * 40]
    wanted = []
    for text in texts:
        tokens = torch.tensor([1, *(byte + 4 for byte in text.encode())])
        nats = 0.0
        for i in range(1, len(tokens)):  # one token at a time, with what its row has before it
            end = min((i - 1) // 32 * 32 + 32, len(tokens) - 1)
            row = tokens[max(0, end - 32):i]
            nats -= model.logits(model.hidden(row[None]))[0, -1].log_softmax(0)[tokens[i]].item()
        wanted.append(nats / 0.6931472)
    sizes = [len(text.encode()) for text in texts]
    path = tmp_path / "texts.jsonl"
    for chosen in (slice(0, 3), slice(1, 2)):
        path.write_text("\ufeff" + "".join(json.dumps({"text": text}) + "\n \n" for text in texts[chosen]), encoding="utf-8")
        printed = call(sample, artifact, "--score", path).split()
        assert int(printed[0]) == len(texts[chosen])
        assert float(printed[2]) == pytest.approx(sum(wanted[chosen]) / sum(sizes[chosen]), rel=1e-5)
    for content, message in ((b'{"text": "a"}\n{"txt": 3}\n', "each line must be"), (b"", "there is no text"),
                             (b'{"text": 3}', "each line must be"), (rb'{"text": "\ud800"}', "surrogates not allowed"),
                             (b"gr\xfc\xdfe", "texts.jsonl: each line must be .*, in UTF-8")):
        path.write_bytes(content)
        with pytest.raises(SystemExit, match=message):
            call(sample, artifact, "--score", path)


@pytest.mark.parametrize("script, arguments, message", [
    (sample, ["missing.ptz"], "'missing.ptz' is neither a file nor a RUN_ID with a model in logs/"),
    (sample, ["ARTIFACT", "--tokenizer", "none.model"], "tokenizer none.model not found"),
    (sample, ["ARTIFACT", "--tokenizer", "OTHER"], "other.json is not the one"),
    (sample, ["ARTIFACT", "NUM_LAYERS=3"], "cannot be loaded into this model"),
    (sample, ["ARTIFACT", "--temperature", "-1"], "2"),
    (sample, ["WEIGHTS"], "sample.py: .*final_model.pt does not say what its model is; add the settings"),
    (export_hf, ["WEIGHTS", "hf"], "export_hf.py: .*final_model.pt does not say what its model is; add the settings")])
def test_what_cannot_be_used_is_named(trained, tmp_path, call, script, arguments, message):
    folder, *_ = trained
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"kind": "table", "bos": -1, "tokens": ["a"] * 260}))
    files = {"ARTIFACT": folder / "final_model.int8.ptz", "WEIGHTS": folder / "final_model.pt", "OTHER": other}
    with pytest.raises(SystemExit, match=message):
        call(script, *(files.get(argument, argument) for argument in arguments))


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}
SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "SLURM_STEP_NODELIST": "node[07-08,11]", "SLURM_JOB_NODELIST": "node[06-11]", "SLURM_NTASKS": "8",
        "SLURM_JOB_ID": "12034"}
BATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "rack[1-2]n[3-4],x1"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "1"}


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """Sets only a launcher's variables, with a host file of the test's."""
    nodes = tmp_path / "nodes"
    nodes.write_text("x3001c0s1\nx3001c0s1\nx3002c0s1\n")

    def launch(variables, **more):
        for name in train_gpt.LAUNCHERS.split():
            monkeypatch.delenv(name, raising=False)
        for name in ("MASTER_ADDR", "MASTER_PORT", "PBS_NODEFILE", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST",
                     "SLURM_JOB_ID", "SLURM_NTASKS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {**variables, **more}.items():
            monkeypatch.setenv(name, value)
        numbers = train_gpt.find_ranks()
        return numbers, os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")

    launch.nodes = str(nodes)
    return launch


def test_ranks_and_the_first_machine_are_found_under_every_launcher(launched):
    assert launched({}) == ([0, 1, 0, 1], None, None)
    assert launched(TORCHRUN) == ([3, 4, 1, 2], "host", "1")
    assert launched({**SRUN, **TORCHRUN}) == ([3, 4, 1, 2], "host", "1")  # torchrun, started by srun
    assert launched(MPICH) == ([1, 2, 1, 2], "127.0.0.1", "29500")
    assert launched(SRUN) == ([5, 8, 1, 4], "node07", "29534")
    assert launched(PALS, PBS_NODEFILE=launched.nodes) == ([5, 8, 1, 4], "x3001c0s1", "29500")
    assert launched({**OPEN_MPI, **BATCH}) == ([5, 8, 1, 4], "rack1n3", "29500")  # mpirun in a batch job
    assert launched(OPEN_MPI, MASTER_ADDR="a", MASTER_PORT="2") == ([5, 8, 1, 4], "a", "2")
    assert launched(BATCH)[0] == [0, 1, 0, 1]  # one process in a job


def test_what_does_not_tell_the_ranks_or_the_first_machine_is_an_error(launched):
    with pytest.raises(ValueError, match="WORLD_SIZE is set, but not all of torchrun's variables"):
        launched({"WORLD_SIZE": "2", "RANK": "0"})
    with pytest.raises(ValueError, match="MASTER_ADDR must be set to the address of rank 0's machine"):
        launched(OPEN_MPI)


@pytest.mark.slow
@pytest.mark.parametrize("program, options", [
    ("", []), ("mpirun.openmpi", ["--allow-run-as-root", "--oversubscribe"]), ("mpirun.mpich", [])])
def test_two_processes_of_an_mpi_train_together(trained, tmp_path, program, options):
    """Without a program: the variables that MPICH's mpirun would set."""
    if program and not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    _, data, _ = trained
    command = [sys.executable, str(REPOSITORY / "train_gpt.py"), *tiny_arguments(data, RUN_ID="mpi")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": "29617"}
    if program:
        launches = [([program, *options, "-n", "2", *command], environment)]
    else:
        launches = [(command, {**environment, **MPICH, "PMI_RANK": rank, "MPI_LOCALRANKID": rank}) for rank in "01"]
    processes = [subprocess.Popen(words, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                 for words, variables in launches]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(launches), outputs
    one = run_trainer(tmp_path, *tiny_arguments(data, RUN_ID="one", OUT_DIR="one"))
    assert one.returncode == 0, one.stderr
    found, wanted = ([e["train_loss"] for e in events(tmp_path, name) if e["event"] == "train"] for name in ("mpi", "one"))
    assert found == pytest.approx(wanted, abs=1e-5) and "world_size:2" in outputs[0]
