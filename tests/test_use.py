"""Using what was trained: artifacts that describe themselves, text from them, and several launchers."""

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path

import events
import export_hf
import kv_cache
import pytest
import sample
import torch
import torch.nn.functional as F
import train_gpt
from conftest import REPOSITORY, make_shards, run_here, run_script, tiny_arguments, tiny_config
from prepare import learn_vocabulary
from test_model import SWITCHES, trained_like

NAMES = {name.upper(): int(value) if isinstance(value, bool) else value for name, value in SWITCHES.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data):
    """A folder with final_model.int8.ptz, final_model.pt and another tokenizer, other.model."""
    folder = tmp_path_factory.mktemp("trained")
    learn_vocabulary("char", ["the fox"], folder / "other.model")
    with pytest.MonkeyPatch.context() as monkeypatch:
        run_here(monkeypatch, folder, *tiny_arguments(
            data, RUN_ID="run", **NAMES, EXPORT_BITS=5, INT8_KEEP_FLOAT_MAX_NUMEL=100))
    return folder


def tiny_settings() -> list[str]:
    """What a user would give for a file that does not say it."""
    return [f"{name}={getattr(tiny_config(**SWITCHES), name.lower())}" for name in train_gpt.STORED]


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs a script's main() with arguments and typed lines; returns what it printed. SystemExit has its error."""
    def run(script, *arguments, typed=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        run_script(monkeypatch, script, *arguments)
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("changes, message", [
    ({"NEW_SWITCH": 1}, "does not know: NEW_SWITCH"), ({"NUM_LOOPS": 2, "LOOP_END": 1}, "does not know: NUM_LOOPS"),
    ({"OUT_DIR": "/home/me"}, "does not know: OUT_DIR"),
    ({"NUM_LAYERS": -3}, "NUM_LAYERS=-3"), ({"MODEL_DIM": 64}, "other.ptz cannot be loaded into this model")])
def test_an_artifact_sets_only_what_its_model_is(trained, tmp_path, changes, message):
    """Its weights are as they were; it says something else of itself."""
    artifact = train_gpt.read_saved(trained / "final_model.int8.ptz")
    artifact["about"] = json.dumps({**json.loads(artifact["about"]), **changes})
    other = tmp_path / "other.ptz"
    other.write_bytes(zlib.compress(train_gpt.saved(artifact)))
    with pytest.raises(ValueError, match=message):
        sample.load(other)


def test_an_artifact_of_an_older_script_is_read_if_what_is_gone_was_off(trained, tmp_path):
    artifact = train_gpt.read_saved(trained / "final_model.int8.ptz")
    artifact["about"] = json.dumps({**json.loads(artifact["about"]), "NUM_LOOPS": 0, "LOOP_START": 1, "LOOP_END": 1})
    (tmp_path / "older.ptz").write_bytes(zlib.compress(train_gpt.saved(artifact)))
    models = [sample.load(path) for path in (tmp_path / "older.ptz", trained / "final_model.int8.ptz")]
    assert all(map(train_gpt.torch.equal, *(model.parameters() for model in models)))


def test_a_model_is_found_by_its_run(trained, tmp_path, monkeypatch):
    """In the OUT_DIR that the log names, unless that has the model of another run; without a name, that of the last run that
    ended, or the newest in logs/."""
    monkeypatch.chdir(trained)
    for name in ("run", "logs/run.jsonl", "logs/run"):
        assert sample.find_model(name).samefile(trained / "final_model.int8.ptz")
    for copy in ("logs/input.txt.jsonl", "input.txt"):  # the text that a run is named after
        shutil.copy("logs/run.jsonl", copy)
    assert sample.find_model("input.txt").samefile(trained / "final_model.int8.ptz")
    monkeypatch.chdir(tmp_path)
    for time_s, name in enumerate(("old", "new")):
        model = tmp_path / "logs" / name / "final_model.int8.ptz"
        model.parent.mkdir(parents=True)
        model.write_bytes(b"another model")
        os.utime(model, (time_s, time_s))
    assert sample.find_model("").parent.name == "new"
    assert sample.find_model("old").parent.name == "old"  # a copied folder has no log
    log = (trained / "logs" / "run.jsonl").read_text()
    (tmp_path / "logs" / "new.jsonl").write_text(log.replace('"OUT_DIR": "."', '"OUT_DIR": "logs/new"'))
    with pytest.raises(ValueError, match="is the model of another run, not of new"):
        sample.find_model("new")
    monkeypatch.setattr(sample, "MAX_LISTED", 1)
    (tmp_path / "logs" / "last.jsonl").write_text(log.replace('"OUT_DIR": "."', '"OUT_DIR": "elsewhere"'))
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(trained / "final_model.int8.ptz", tmp_path / "elsewhere")
    os.utime(tmp_path / "elsewhere" / "final_model.int8.ptz", (0, 0))
    (tmp_path / "logs" / "killed.jsonl").write_text(log.splitlines()[0] + "\n")
    assert sample.find_model("").parent.name == "elsewhere"
    start = log.splitlines()[0].replace('"OUT_DIR": "."', '"OUT_DIR": "stopped"')
    (tmp_path / "logs" / "sooner.jsonl").write_text(start + "\n")  # another run with the same OUT_DIR
    saved = json.dumps({"event": "checkpoint", "step": 25, "file": "killed_00000025.pt"})
    (tmp_path / "logs" / "killed.jsonl").write_text(f"{start}\n{saved}\n")
    checkpoint = tmp_path / "stopped" / "checkpoints" / "killed_00000025.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    for name, message in (("killed", "killed has no final model; give its checkpoint: .*checkpoints/killed_00000025.pt"),
                          ("sooner", "neither a file nor a RUN_ID with a model in logs/; the newest are: new$")):
        with pytest.raises(ValueError, match=message):
            sample.find_model(name)
    (tmp_path / "logs" / "begun.jsonl").touch()
    with pytest.raises(ValueError, match="begun.jsonl is empty: the run has not begun"):
        sample.find_model("begun")
    (tmp_path / "logs" / "wd0.05.jsonl").write_text(log)
    model = train_gpt.GPT(tiny_config(tokenizer_path="/gone/tokenizer.model"))  # its name alone is in an artifact
    assert sample.find_tokenizer(model, tmp_path / "logs" / "wd0.05" / "final_model.pt").vocab_size == 260


def test_a_model_that_was_sent_finds_its_tokenizer_beside_it_or_in_the_repository(trained, tmp_path, monkeypatch):
    """Not another one that is where its own was."""
    own, named = trained / "other.model", Path("data/datasets/mine/tokenizer.model")
    config = tiny_config(tokenizer_path=str(named), vocab_size=sample.load_tokenizer(str(own)).vocab_size,
                         tokenizer_sha256=sha256(own.read_bytes()).hexdigest())
    model, sent, root = train_gpt.GPT(config), tmp_path / "sent", tmp_path / "root"
    for folder in (sent, root / named.parent, tmp_path / named.parent):
        folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sample, "ROOT", root)
    learn_vocabulary("char", ["another text"], named)
    for place in (sent / "tokenizer.model", root / named):
        with pytest.raises(ValueError, match="put that one, under its name, beside .*/sent/final_model"):
            sample.find_tokenizer(model, sent / "final_model.int8.ptz")
        shutil.copy(own, place)
        assert sample.find_tokenizer(model, sent / "final_model.int8.ptz").file == place
        place.unlink()
    shutil.copy(trained / "final_model.int8.ptz", sent)
    assert sample.find_model("sent/") == Path("sent/final_model.int8.ptz")


def test_a_checkpoint_has_the_settings_of_its_model(trained, data, tmp_path, monkeypatch):
    """As an artifact has: what they compute is the same, and what is set otherwise is an error that names it."""
    words = tiny_arguments(data, RUN_ID="kept", **NAMES, ROPE_BASE=100, CHECKPOINT_EVERY=4)
    run_here(monkeypatch, tmp_path, *words)
    checkpoint, scores = tmp_path / "checkpoints" / "kept_00000004.pt", []
    for name in ("final_model.pt", checkpoint):
        own = [word for word in words if name == "final_model.pt" or word.split("=")[0] not in train_gpt.STORED]
        run_here(monkeypatch, tmp_path, *own, "RUN_ID=score", "ITERATIONS=0", f"INIT_FROM={name}", "OUT_DIR=out")
        scores.append(json.loads((tmp_path / "logs" / "score.jsonl").read_text().splitlines()[-1])["val_loss"])
    assert scores[0] == scores[1]
    assert sample.load(checkpoint).config.rope_base == 100
    for path in (checkpoint, trained / "final_model.int8.ptz"):
        for word in ("SHIFT_KEYS=0", "LOGIT_SOFTCAP=5", "NUM_LAYERS=3"):
            name, value = word.split("=")
            with pytest.raises(ValueError, match=rf"{name}={value} \(argument\), but the model in INIT_FROM=.* has {name}="):
                train_gpt.load_config([word, f"INIT_FROM={path}"], {})
        config, _ = train_gpt.load_config([f"INIT_FROM={path}", "TRAIN_SEQ_LEN=64", "DTYPE=bfloat16"], {"MODEL_DIM": "32"})
        assert (config.train_seq_len, config.shift_keys) == (64, True)
    state = torch.load(checkpoint)
    for value, outcome in ((0, nullcontext()), (32, pytest.raises(ValueError, match="pt has a setting .* not know: ROPE_DIMS"))):
        torch.save({**state, "config": {**state["config"], "rope_dims": value}}, checkpoint)  # of another day's script
        with outcome:
            train_gpt.load_config([f"INIT_FROM={checkpoint}"], {})


@pytest.mark.parametrize("changes", [
    dict(dtype="bfloat16", weight_decay=0.1),
    dict(tie_embeddings=False, vocab_pad=64, logit_softcap=5.0, rope_base=100.0, **SWITCHES)])
def test_a_loaded_model_computes_what_was_trained(tmp_path, changes):
    """With the frequencies as bfloat16 rounds them and the table as the file has it; padded and untied tables, too."""
    model = trained_like(tiny_config(train_seq_len=512, **changes))
    (tmp_path / "a.ptz").write_bytes(train_gpt.pack(model.state_dict(), model.config)[0])
    train_gpt.load_weights(model, tmp_path / "a.ptz")
    loaded = sample.load(tmp_path / "a.ptz")
    assert torch.equal(loaded.rotary, model.rotary) and torch.equal(loaded.tok_emb.weight, model.tok_emb.weight)
    assert {p.dtype for p in loaded.parameters()} == {loaded.compute_dtype} == {torch.float32}
    tokens = torch.randint(0, 260, (1, 512))
    wanted = model.logits(model.hidden(tokens)).float()
    tolerance = 0.03 if changes.get("dtype") == "bfloat16" else 0
    assert (loaded.logits(loaded.hidden(tokens)) - wanted).norm() <= tolerance * wanted.norm()


def test_a_model_is_used_in_the_process_that_trained(trained):
    """A run leaves one of PyTorch's kernels for attention switched on, with tiles none."""
    for name in train_gpt.SDP_OF_ATTN.values():
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(False)
    model = sample.load(trained / "final_model.int8.ptz")
    assert model.hidden(torch.zeros(1, 4, dtype=torch.int64)).isfinite().all()


@pytest.mark.parametrize("changes, wanted", [
    ({}, [0.083, 0.610, 0.224, 0.083]), ({"temperature": 0}, [0, 1, 0, 0]), ({"temperature": 1e-40}, [0, 1, 0, 0]),
    ({"top_k": 2}, [0, 0.731, 0.269, 0]), ({"top_p": 0.7}, [0, 0.731, 0.269, 0]), ({"top_p": 0.6}, [0, 1, 0, 0])])
def test_tokens_are_drawn_as_the_options_say(changes, wanted):
    options = argparse.Namespace(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, **changes})
    generator = torch.Generator().manual_seed(1)
    drawn = [sample.choose(torch.tensor([0.0, 2.0, 1.0, 0.0]), options, generator) for _ in range(2000)]
    assert [drawn.count(token) / 2000 for token in range(4)] == pytest.approx(wanted, abs=0.03)
    assert {token for token in range(4) if not wanted[token]}.isdisjoint(drawn)


@pytest.mark.parametrize("changes", [
    dict(num_layers=1), dict(num_layers=5, num_heads=4, tie_embeddings=False, vocab_pad=64, logit_softcap=5.0), dict(attn="tiled"),
    *({name: value} for name, value in SWITCHES.items()), SWITCHES, dict(SWITCHES, lanes=0, num_heads=4, num_kv_heads=2),
    dict(dtype="bfloat16"), dict(SWITCHES, dtype="bfloat16")], ids=lambda changes: "-".join(changes))
@pytest.mark.parametrize("is_padded", [False, True])
@torch.inference_mode()
def test_a_cache_changes_no_logit(changes, is_padded):
    """However many tokens come at once, and behind the padding of a shorter row, where logits are 0."""
    model = trained_like(tiny_config(**changes))
    tokens = torch.randint(0, 260, (2, 32))
    mask = torch.arange(32).expand(2, 32) >= torch.tensor([[7], [0]]) if is_padded else None
    cache, parts = kv_cache.Cache(32), []
    for part in tokens.split([5, 1, 1, 4, 1, 20], 1):
        seen = cache.get_seq_length() + part.size(1)
        parts.append(model.logits(kv_cache.hidden(model, part, cache, mask[:, :seen] if is_padded else None)))
    found = torch.cat(parts, 1)
    wanted = model.logits(model.hidden(tokens))
    if is_padded:
        wanted[0] = F.pad(model.logits(model.hidden(tokens[:1, 7:])), (0, 0, 7, 0))
    tolerance = dict(rtol=0, atol=0.1 if changes.get("dtype") == "bfloat16" else 1e-4)
    torch.testing.assert_close(found, wanted, **tolerance)
    assert torch.equal(model.logits(model.hidden(tokens))[1], wanted[1])  # The model is as it was.


def test_a_text_goes_on_when_the_context_is_full_and_ends_with_the_document():
    model = trained_like(tiny_config(**SWITCHES))
    options = argparse.Namespace(temperature=1, top_k=0, top_p=1, length=60)
    generators = [torch.Generator().manual_seed(1) for _ in range(3)]
    ids = [10, 11, 12]
    for token in sample.generate(model, ids, -1, options, generators[0]):
        start = 16 * (len(ids) > 32) + 16 * (len(ids) > 48)  # the window moves by half a context of 32
        logits = model.logits(model.hidden(torch.tensor([ids[start:]])))[0, -1]
        assert token == sample.choose(logits, options, generators[1])
        ids.append(token)
    assert len(ids) == 63
    assert list(sample.generate(model, ids[:3], ids[8], options, generators[2])) == ids[3:ids.index(ids[8], 3)]


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_sample_without_a_prompt_is_not_empty(trained, capsys, temperature):
    """Although the model would end each document at once."""
    model = sample.load(trained / "final_model.int8.ptz")
    tokenizer = sample.find_tokenizer(model, trained / "final_model.int8.ptz")
    compute = model.logits

    def likes_the_end(x):
        logits = compute(x)
        logits[..., tokenizer.bos] = 100
        return logits

    model.logits = likes_the_end
    options = argparse.Namespace(temperature=temperature, top_k=0, top_p=1, length=300)
    for prompt, least, most in (("", 80, 90), ("fox", 3, 3)):
        sample.write_sample(model, tokenizer, prompt, options, torch.Generator().manual_seed(1))
        assert least <= len("".join(capsys.readouterr().out.split())) <= most


def test_text_is_shown_as_it_comes_and_characters_when_they_are_whole(monkeypatch, capsys):
    shown = []

    def tokens(*_):
        for byte in "aé🙂".encode() + b"\xff" + b"b\xe2":
            shown.append(capsys.readouterr().out)
            yield 4 + byte

    monkeypatch.setattr(sample, "generate", tokens)
    sample.write_sample(None, sample.load_tokenizer("byte260"), "the ", None, None)
    assert [*shown, capsys.readouterr().out] == ["the ", "a", "", "é", "", "", "", "🙂", "", "\ufffdb", "\ufffd\n\n"]


def test_text_comes_from_the_artifact_or_from_weights_with_settings(trained, call):
    model = trained / "final_model.int8.ptz"
    options = ["--prompt", "the quick", "--length", "12", "--samples", "2", "--seed", "3"]
    first = call(sample, model, *options)
    assert first.count("the quick") == 2 and call(sample, model, *options) == first
    assert "\nfox" in call(sample, model, "--interactive", "--length", "3", typed="the\nfox\n")
    assert call(sample, trained / "final_model.pt", "--length", "3", "--prompt", "a", *tiny_settings()).startswith("a")


@pytest.mark.parametrize("script, arguments, message", [
    (sample, ["final_model.int8.ptz", "--tokenizer", "other.model"], "other.model is not there, or not the one"),
    *((sample, words, "^2$") for words in (["--top-p", "95"], ["--samples", "-1"], ["--temperature", "nan"], ["--prompt", "\udce9"],
                                           ["run", "Dear friend"])),
    (sample, ["final_model.pt", *(word for word in tiny_settings() if not word.startswith("DTYPE="))], "add .* its DTYPE"),
    (export_hf, ["final_model.pt", "hf"], "export_hf.py: .*final_model.pt does not say what its model is")])
def test_what_cannot_be_used_is_named(trained, monkeypatch, call, script, arguments, message):
    monkeypatch.chdir(trained)
    with pytest.raises(SystemExit, match=message):
        call(script, *arguments)


@pytest.mark.parametrize("epoch, trained, losses, says", [
    (9.0, 2.0, [3.5, 3.0, 2.6, 2.9, 3.1], "read 9 times. Validation loss was lowest at step 30 (2.60 nats) and has risen to 3.10, "
     "while training loss is 2.00: the model is memorizing the text. First try ITERATIONS=30, then DROPOUT=0.1, or more text"),
    (9.0, 2.5, [3.5, 3.0, 2.6, 2.605, 2.601], "stopped falling at about step 30 of 50. First try ITERATIONS=30, then DROPOUT=0.1"),
    (9.0, 2.5, [3.5, 3.0, 2.6, 2.598, 2.595], "stopped falling at about step 30 of 50. First try ITERATIONS=30, then DROPOUT=0.1"),
    (9.0, 1.0, [3.5, 3.0, 2.8, 2.5, 2.4], "Training loss is 1.00 nats and validation loss 2.40: the model has memorized much of the text. First try DROPOUT=0.1, then more text"),
    (9.0, 2.0, [3.5, 3.0, 2.8, 2.5, 2.4], ""), (9.0, 2.0, [2.4], ""), (9.0, 2.0, [], ""),
    (9.0, 3.6, [4.498, 4.378, 4.323, 4.312, 4.307], ""),  # falls to the end, with falling rates by less each time
    (3.0, 2.0, [3.5, 3.0, 2.6, 2.9, 3.1], "")])  # more than once, but too few readings to be the reason
def test_a_text_that_is_learnt_by_heart_is_a_warning(epoch, trained, losses, says):
    found = [dict(event="val", step=10 * (i + 1), val_loss=loss) for i, loss in enumerate(losses)]
    train = dict(event="train", step=10, epoch=epoch / max(1, len(losses)), train_loss=trained)  # the last step that was logged
    warning = events.warn_of_overfitting([dict(event="config"), *found, train])
    assert says in warning and bool(warning) == bool(says)


def test_a_summary_of_a_records_log_names_what_is_there_and_no_text_is_learnt_by_heart(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    logs = [*Path("records").glob("track_*/*/*.jsonl")]
    for log in logs:
        summary = events.summarize(log)
        assert all(map(os.path.exists, re.findall(r"(?:records|tools)/[^\s;]+", summary))) and f"plot.py {log} " in summary
        assert (f"sample.py {log.parent}/artifact_seed" in summary) == bool([*log.parent.glob("*.ptz")])
    assert events.find_log(str(logs[0].with_suffix(".log"))) == logs[0]
    assert len(logs) >= 9 and [log for log in logs if events.warn_of_overfitting(events.read_events(log))] == []


OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}
SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "SLURM_STEP_NODELIST": "node[07-08,11]", "SLURM_JOB_NODELIST": "node[06-11]", "SLURM_NTASKS": "8",
        "SLURM_JOB_ID": "12034"}
BATCH = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "rack[1-2]n[3-4],x1"}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "1"}
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


@pytest.fixture
def launched(tmp_path):
    """What ranks.sh makes of a launcher's variables: the ranks and the first machine, and stderr. It has a scontrol that knows
    the first machines only."""
    (tmp_path / "scontrol").write_text("#!/bin/bash\n[ $1$2 = showhostnames ] && sed 's/\\[\\([a-z0-9]*\\)[^]]*]/\\1/g; s/,/\\n/g' <<< $3\n")
    (tmp_path / "scontrol").chmod(0o755)

    def launch(variables):
        result = subprocess.run([REPOSITORY / "tools" / "ranks.sh", "printenv", *VARIABLES], capture_output=True, text=True, check=False,
                                env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **variables})
        return result.stdout.split(), result.stderr
    return launch


def test_ranks_and_the_first_machine_are_found_under_every_launcher(tmp_path, launched):
    nodes = tmp_path / "nodes"
    nodes.write_text("x3001c0s1\nx3001c0s1\nx3002c0s1\n")
    for variables, wanted in (
            (MPICH, "1 2 1 2 127.0.0.1"), (SRUN, "5 8 1 4 node07"), ({**PALS, "PBS_NODEFILE": str(nodes)}, "5 8 1 4 x3001c0s1"),
            ({**OPEN_MPI, **BATCH}, "5 8 1 4 rack1n3"),  # mpirun in a batch job
            ({**OPEN_MPI, "MASTER_ADDR": "a"}, "5 8 1 4 a"),
            ({**SRUN, "CUDA_VISIBLE_DEVICES": "3"}, "5 8 0 4 node07"), ({**SRUN, "CUDA_VISIBLE_DEVICES": "2,3"}, "5 8 1 4 node07")):
        found, errors = launched(variables)
        assert found[:5] == wanted.split() and 29500 <= int(found[5]) < 30500, errors
    assert launched({**MPICH, "MASTER_PORT": "2"})[0][5] == "2"
    assert launched({**MPICH, "PBS_JOBID": "1.x"})[0][5] != launched({**MPICH, "PBS_JOBID": "2.x"})[0][5]
    for variables, wanted in ((SRUN, ["12"]), ({**SRUN, "OMP_NUM_THREADS": "3"}, ["3"]), (MPICH, [])):  # the cores that srun gives a process
        assert launched({**variables, "SLURM_CPUS_PER_TASK": "12"})[0][6:] == wanted and not launched(SRUN)[0][6:]
    assert "knows only" in launched({})[1] and "must be set to the address of rank 0" in launched(OPEN_MPI)[1]


@pytest.mark.parametrize("script", ["slurm.sh", "pbs.sh"])
def test_a_job_goes_on_only_if_it_saved_a_checkpoint(script, tmp_path):
    for name, line in (("srun", "exit 143"), ("mpiexec", "exit 143"), ("scontrol", "echo again"), ("qsub", "echo again")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "PBS_JOBID": "7", "PBS_O_WORKDIR": str(tmp_path)}
    (tmp_path / "logs").mkdir()
    for event, other, said in (("train", "checkpoint", ""), ("checkpoint", "train", "again\n")):
        for word, name, other_name in (("ITERATIONS=9", "7", "mine"), ("RUN_ID=mine", "mine", "7")):
            (tmp_path / "logs" / f"{name}.jsonl").write_text(json.dumps({"event": event}) + "\n")
            (tmp_path / "logs" / f"{other_name}.jsonl").write_text(json.dumps({"event": other}) + "\n")
            words = [word] if script == "slurm.sh" else []
            result = subprocess.run(["bash", REPOSITORY / "tools" / script, *words], cwd=tmp_path, env={**environment, "SETTINGS": word},
                                    text=True, check=False, capture_output=True)
            assert result.stdout == said and ("saved no checkpoint" in result.stderr) == (not said)


@pytest.mark.parametrize("variables, wanted", [
    ({}, [0, 1, 0, 1]), (TORCHRUN, [3, 4, 1, 2]), ({**SRUN, **TORCHRUN}, [3, 4, 1, 2]),  # torchrun, started by srun
    (BATCH, [0, 1, 0, 1]), ({"WORLD_SIZE": ""}, [0, 1, 0, 1]),  # one process in a job
    ({"WORLD_SIZE": "2", "RANK": "0"}, "WORLD_SIZE is not 1, but"), (OPEN_MPI, "use torchrun or tools/ranks.sh"),
    (PALS, "PMI_SIZE is not 1, but"), (SRUN, "SLURM_STEP_NUM_TASKS is not 1, but")])
def test_ranks_are_those_of_torchruns_variables_or_one(monkeypatch, variables, wanted):
    monkeypatch.setattr(os, "environ", dict(variables))
    with pytest.raises(ValueError, match=wanted) if isinstance(wanted, str) else nullcontext():
        assert train_gpt.find_ranks() == wanted


@pytest.mark.slow
@pytest.mark.parametrize("program, options", [
    ("mpirun.openmpi", ["--allow-run-as-root", "--oversubscribe"]), ("mpirun.mpich", [])])
def test_two_processes_of_an_mpi_train_together(tmp_path, program, options):
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    command = [program, *options, "-n", "2", str(REPOSITORY / "tools" / "ranks.sh"), sys.executable, str(REPOSITORY / "train_gpt.py")]
    result = subprocess.run([*command, *tiny_arguments(make_shards(tmp_path), RUN_ID="mpi")], cwd=tmp_path, timeout=240,
                            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "world_size:2" in result.stdout, result.stderr
