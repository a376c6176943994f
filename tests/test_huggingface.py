"""Models in other tools: the folder of export_hf.py in transformers and lm-evaluation-harness."""

import argparse
import json
import random
import shutil
import subprocess
import sys
from hashlib import sha256

import export_hf
import numpy as np
import pytest
import sample
import tokenization
import torch
import train_gpt
from conftest import REPOSITORY, tiny_config
from test_model import SWITCHES, trained_like

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="5")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
BEST = REPOSITORY / "records" / "track_10min_1mb_cpu" / "2026-11-25_SotuFourLayers" / "artifact_seed1337.int8.ptz"
BYTE260 = dict(vocab_size=260, tokenizer_path="byte260", tokenizer_sha256=sha256(b"byte260").hexdigest())
MODELS = {  # the default shape, each switch that is in artifacts, and an untied, padded table
    "default": lambda: train_gpt.Config(dtype="bfloat16", train_seq_len=64, **BYTE260),
    "switches": lambda: tiny_config(**SWITCHES, **BYTE260, num_layers=3, num_heads=4, num_kv_heads=2),
    "untied": lambda: tiny_config(tie_embeddings=False, vocab_pad=64, **BYTE260)}


def load(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options)


def load_tokenizer(folder):
    return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Writes and loads a model of MODELS, or the best of the CPU track: its artifact, as the GPT, and the folder."""
    parent = tmp_path_factory.mktemp("huggingface")

    def write(name):
        path, folder = parent / f"{name}.ptz", parent / name
        if not folder.exists():
            if name == "best":
                shutil.copy(BEST, path)
            else:
                model = trained_like(MODELS[name]())
                path.write_bytes(train_gpt.pack(model.state_dict(), model.config)[0])
            model = sample.load(path)
            export_hf.write_folder(model, sample.find_tokenizer(model, path), folder)
        return sample.load(path), folder

    return write


@pytest.fixture(params=["switches", "untied", pytest.param("default", marks=pytest.mark.slow),
                        pytest.param("best", marks=pytest.mark.slow)])
def exported(folders, request):
    if request.param == "best" and not (REPOSITORY / "data" / "datasets" / "sotu_unigram2048").is_dir():
        pytest.skip("data/datasets/sotu_unigram2048, with the tokenizer, is not prepared")
    return folders(request.param)


def continued(model, ids, count):
    """What sample.py writes after ids, the likeliest tokens."""
    return list(sample.generate(model, ids, -1, argparse.Namespace(temperature=0, length=count), None))


def test_logits_and_text_are_those_of_the_artifact(exported):
    """Also beyond the context, and if a cache is asked for."""
    wanted, folder = exported
    model = load(folder)
    context = model.config.max_position_embeddings
    tokens = torch.randint(5, 260, (2, context), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = wanted.logits(wanted.hidden(tokens))[..., :model.config.vocab_size]
        torch.testing.assert_close(model(tokens).logits, logits, rtol=0, atol=1e-5)
    for use_cache, prompt in ((True, tokens[:1, :context - 20]), (False, tokens.view(1, -1)[:, :context + 7])):
        text = continued(wanted, prompt[0].tolist(), 40)
        ids = model.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=None, use_cache=use_cache)
        assert ids[0, prompt.size(1):].tolist() == text


def test_uneven_rows_are_read_as_if_each_were_alone(folders):
    model = load(folders("switches")[1])
    tokenizer = load_tokenizer(folders("switches")[1])
    texts = ["the quick brown fox", "a", "jumps over the lazy"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    assert batch["attention_mask"].sum(1).tolist() == [20, 2, 20]
    options = dict(max_new_tokens=20, do_sample=False, eos_token_id=None)  # 40 tokens; the context has 32
    together = model.generate(**batch, **options)[:, 20:]
    for text, row in zip(texts, together):
        alone = tokenizer(text, return_tensors="pt")
        assert torch.equal(model.generate(**alone, **options)[0, alone["input_ids"].size(1):], row)
    assert torch.equal(model.generate(**tokenizer("a", return_tensors="pt", padding="max_length", max_length=9), **options)[0, 9:],
                       together[1])
    padded = tokenizer(texts, return_tensors="pt", padding="max_length", max_length=25)  # on the left of all
    assert model(**padded, labels=padded["input_ids"]).loss.isfinite() and model(**padded).logits.shape == (3, 25, 260)
    logits = model(**batch).logits
    torch.testing.assert_close(logits[1, -2:], model(batch["input_ids"][1:2, -2:]).logits[0])
    beams = [model.generate(**batch, num_beams=3, max_new_tokens=8, do_sample=False, use_cache=cache) for cache in (True, False)]
    assert torch.equal(*beams)


def test_rows_longer_than_the_context_are_refused_where_each_token_is_scored(folders):
    model = load(folders("switches")[1])
    tokens = torch.zeros(1, 33, dtype=torch.int64)
    with pytest.raises(ValueError, match="33 tokens are too many: the model was trained with rows of 32"):
        model(tokens)
    assert model(tokens, logits_to_keep=1).logits.shape == (1, 1, 260)
    with pytest.raises(TypeError, match="past_key_values"):  # nothing is ignored
        model(tokens[:, :32], past_key_values=None)


def test_training_moves_and_saving(folders, tmp_path):
    model = load(folders("switches")[1])
    tokens = torch.randint(0, 260, (2, 32))
    first = model(tokens, labels=tokens).loss
    wanted = model.gpt(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(first, wanted)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first.backward()
    optimizer.step()
    assert model(tokens, labels=tokens).loss < first
    model.save_pretrained(tmp_path / "tuned")
    load_tokenizer(folders("switches")[1]).save_pretrained(tmp_path / "tuned")
    again = load(tmp_path / "tuned")
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert load_tokenizer(tmp_path / "tuned")("fox")["input_ids"] == [1, 106, 115, 124]
    half = load(folders("switches")[1], dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert torch.equal(half.gpt.rotary, sample.load(folders("switches")[1].with_suffix(".ptz")).rotary)
    original = load(folders("switches")[1])
    for other in (half, original.bfloat16()):
        logits = other(tokens).logits
        assert logits.dtype == torch.float32
        assert (logits - load(folders("switches")[1])(tokens).logits).norm() < 0.1 * logits.norm()
    fresh = transformers.AutoModelForCausalLM.from_config(half.config, trust_remote_code=True)
    assert fresh(tokens).logits.isfinite().all()


def test_the_tokenizer_keeps_every_byte(tmp_path):
    """SentencePiece, byte260 and a vocabulary of characters, against the trainer's own; odd strings and whole texts."""
    import sentencepiece
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200 + "Ünïcödé 漢字 🙂\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "tokenizer"), vocab_size=320, model_type="bpe", byte_fallback=True,
        character_coverage=0.99, minloglevel=2, pad_id=0, bos_id=1, eos_id=2, unk_id=3, normalization_rule_name="identity",
        remove_extra_whitespaces=False)
    tokens = tokenization.BYTE_TOKENS + [char.encode() for char in "théx漢"]
    tokenization.write_vocabulary(tmp_path / "vocabulary.json", "char", 1, tokens)
    chance = random.Random(1)
    pool = ["\t", "\n", "\r\n", " ", "   ", "<s>", "<pad>", "<unk>", "é", "漢字", "🙂", "👩‍👩‍👧", "\x00", "\ufffd", "the ", "quick",
            "<0x41>", "ﬁ", "Å", "\u00a0", "\u3000"]
    texts = ["", *("".join(chance.choices(pool, k=chance.randrange(1, 12))) for _ in range(500)),
             *(chance.randbytes(chance.randrange(30)).decode("utf-8", "replace") for _ in range(500)), text.read_text()]
    for spec in (tmp_path / "tokenizer.model", tmp_path / "vocabulary.json", "byte260"):
        wanted = tokenization.load_tokenizer(str(spec))
        folder = tmp_path / f"{wanted.kind}_folder"
        folder.mkdir()
        for path in (REPOSITORY / "logs" / "tokenization_train_gpt.py", REPOSITORY / "data" / "tokenization.py"):
            shutil.copy(path, folder)
        if wanted.file:
            shutil.copy(wanted.file, folder)
        export_hf.write_json(folder / "tokenizer_config.json", {
            "tokenizer_class": "TrainGPTTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_train_gpt.TrainGPTTokenizer", None]},
            "tokenizer": wanted.file.name if wanted.file else wanted.spec})
        found = load_tokenizer(folder)
        assert len(found) == found.vocab_size == wanted.vocab_size == len(set(found.get_vocab()))
        for one in texts:
            ids = found.encode(one, add_special_tokens=False)
            assert ids == wanted.encode([one], 1)[0].tolist() and found.decode(ids) == one
            assert found.encode(one) == [1, *ids] and found.decode([1, *ids], skip_special_tokens=True) == one
        for _ in range(500):  # what a model may write need not be UTF-8
            ids = chance.choices(range(4, wanted.vocab_size), k=8)
            assert found.decode(ids) == wanted.decode(np.array(ids)).decode("utf-8", "replace")


def altered(folder, name, change):
    """Change a .json file or the tensors of a folder."""
    path = folder / name
    if path.suffix == ".json":
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))
    elif path.suffix == ".safetensors":
        tensors = safetensors.load_file(path)
        change(tensors)
        safetensors.save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("name, change, message", [
    ("model.safetensors", lambda t: t.pop("gpt.smear"), r"not those of this model: .*missing.*gpt\.smear"),
    ("model.safetensors", lambda t: t.update(more=t["gpt.smear"].clone()), "not those of this model: .*unexpected.*more"),
    ("model.safetensors", lambda t: t.update({"gpt.smear": t["gpt.smear"][:5]}), "ignore_mismatched_sizes"),
    ("config.json", lambda c: c["variables"].update(SHIFT_KEYS=False), "of different models: their variables differ"),
    ("config.json", lambda c: c["variables"].update(LOGIT_SOFTCAP=10.0), "of different models: their variables differ"),
    ("config.json", lambda c: c["variables"].update(NUM_LAYERS=2), "not those|ignore_mismatched_sizes"),
    ("config.json", lambda c: c["variables"].update(NEW=1), "NEW='1' .* is not a variable of this script"),
    ("tokenizer_config.json", lambda c: c.update(tokenizer="gpt2"), "gpt2 is not the tokenizer that|cannot be used")])
def test_an_altered_folder_is_an_error(folders, tmp_path, name, change, message):
    folder = shutil.copytree(folders("switches")[1], tmp_path / "altered")
    altered(folder, name, change)
    with pytest.raises((ValueError, RuntimeError), match=message):
        (load_tokenizer if name == "tokenizer_config.json" else load)(folder)


def run(*command, **options):
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=False, **options)


def test_the_command_reads_its_folder_back(folders, tmp_path, monkeypatch, capsys):
    folder = folders("switches")[1]
    monkeypatch.setattr(sys, "argv", ["export_hf.py", f"{folder}.ptz", str(tmp_path / "out")])
    export_hf.main()
    assert "read back by transformers, its logits differ by" in capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} == {path.name for path in (tmp_path / "out").iterdir()}
    assert len({entry.stat().st_mode for entry in (tmp_path / "out").iterdir()}) == 1  # whoever reads one can read all
    with pytest.raises(SystemExit, match="is not empty: choose another folder, or delete it if it is an earlier export"):
        export_hf.main()


@pytest.mark.slow
def test_lm_evaluation_harness_gets_our_bits_per_byte(folders, tmp_path):
    """Texts shorter and longer than the context; sample.py --score has ours."""
    pytest.importorskip("lm_eval", reason="lm_eval is not installed")
    _, folder = folders("switches")
    texts = ["the quick", "brown fox\n" * 10, "jumps over the lazy dog, é and 漢字; " * 5]
    (tmp_path / "validation.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    ours = run(REPOSITORY / "logs" / "sample.py", folder.with_suffix(".ptz"), "--score", tmp_path / "validation.jsonl")
    theirs = run("-m", "lm_eval", "run", "--model", "hf", "--model_args",
                 f"pretrained={folder},trust_remote_code=True,add_bos_token=False", "--tasks", REPOSITORY / "logs" / "lm_eval.yaml",
                 "--device", "cpu", "--output_path", tmp_path / "out", cwd=tmp_path)
    assert theirs.returncode == 0, theirs.stderr
    results = json.loads(next((tmp_path / "out").rglob("*.json")).read_text())["results"]["bits_per_byte"]
    assert float(ours.stdout.split()[2]) == pytest.approx(results["bits_per_byte,none"], rel=1e-4)
