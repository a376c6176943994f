"""Models in transformers: the folder of export_hf.py."""

import argparse
import random
import shutil
from hashlib import sha256
from pathlib import Path

import export_hf
import numpy as np
import prepare
import pytest
import sample
import tokenization
import torch
import train_gpt
from conftest import run_script, tiny_config
from test_model import SWITCHES, trained_like

transformers = pytest.importorskip("transformers", reason="transformers is not installed", minversion="5")
pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
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
    """Writes and loads a model of MODELS: its artifact, as the GPT, and the folder."""
    parent = tmp_path_factory.mktemp("huggingface")

    def write(name):
        path, folder = parent / f"{name}.ptz", parent / name
        if not folder.exists():
            model = trained_like(MODELS[name]())
            path.write_bytes(train_gpt.pack(model.state_dict(), model.config)[0])
            model = sample.load(path)
            export_hf.write_folder(model, sample.find_tokenizer(model, path), folder)
        return sample.load(path), folder

    return write


@pytest.mark.parametrize("name", ["switches", "untied", pytest.param("default", marks=pytest.mark.slow)])
def test_logits_and_text_are_those_of_the_artifact(folders, name):
    """Also beyond the context, with a cache and without, and by all ways to generate that keep the likeliest token."""
    wanted, folder = folders(name)
    model = load(folder)
    context = model.config.max_position_embeddings
    tokens = torch.randint(5, 260, (2, context), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        logits = wanted.logits(wanted.hidden(tokens))[..., :model.config.vocab_size]
        torch.testing.assert_close(model(tokens, use_cache=False).logits, logits, rtol=0, atol=1e-5)
        torch.testing.assert_close(model(tokens).logits, logits, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match=f"{2 * context} tokens are too many"):
        model(tokens.view(1, -1))
    for prompt in (tokens[:1, :context - 20], tokens.view(1, -1)[:, :context + 7]):
        text = list(sample.generate(wanted, prompt[0].tolist(), -1, argparse.Namespace(temperature=0, length=40), None))
        ways = [{}, dict(use_cache=False), dict(past_key_values=transformers.DynamicCache())]
        if prompt.size(1) < context:  # Longer prompts are cut at the chunk.
            ways.append(dict(past_key_values=transformers.DynamicCache(), prefill_chunk_size=5))
        for way in ways:
            ids = model.generate(prompt, max_new_tokens=40, do_sample=False, eos_token_id=None, **way)
            assert ids[0, prompt.size(1):].tolist() == text, way
    beams = [model.generate(prompt, max_new_tokens=12, num_beams=3, do_sample=False, eos_token_id=None, use_cache=use) for use in (0, 1)]
    assert torch.equal(*beams)


def test_uneven_rows_are_read_as_if_each_were_alone(folders):
    folder = folders("switches")[1]
    model, tokenizer = load(folder), load_tokenizer(folder)
    texts = ["the quick brown fox", "a", "jumps over the lazy"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    assert batch["attention_mask"].sum(1).tolist() == [20, 2, 20]
    options = dict(max_new_tokens=20, do_sample=False, eos_token_id=None)  # 40 tokens; the context has 32
    for text, row in zip(texts, model.generate(**batch, **options)[:, 20:]):
        alone = tokenizer(text, return_tensors="pt")
        assert torch.equal(model.generate(**alone, **options)[0, alone["input_ids"].size(1):], row)
    torch.testing.assert_close(model(**batch).logits[1, -2:], model(batch["input_ids"][1:2, -2:]).logits[0])


def test_training_moves_and_saving(folders, tmp_path):
    folder = folders("switches")[1]
    model, half = load(folder), load(folder, dtype=torch.bfloat16)
    tokens = torch.randint(0, 260, (2, 32))
    first, exact = model(tokens, labels=tokens).loss, model(tokens).logits
    torch.testing.assert_close(first, model.gpt(tokens[:, :-1], tokens[:, 1:]))
    for other in (half, load(folder).bfloat16()):
        assert (other(tokens).logits - exact).norm() < 0.1 * exact.norm()
    assert torch.equal(half.gpt.rotary, model.gpt.rotary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first.backward()
    optimizer.step()
    assert model(tokens, labels=tokens).loss < first
    model.save_pretrained(tmp_path / "tuned")
    load_tokenizer(folder).save_pretrained(tmp_path / "tuned")
    assert torch.equal(load(tmp_path / "tuned")(tokens).logits, model(tokens).logits)
    assert load_tokenizer(tmp_path / "tuned")("fox")["input_ids"] == [1, 106, 115, 124]


def test_what_other_tools_pass_is_taken_or_refused(folders):
    """Trainers pass use_cache and position_ids; probes hook layers; adapters such as LoRA stand in for them."""
    model, tokenizer = load(folders("switches")[1]), load_tokenizer(folders("switches")[1])
    tokens = torch.randint(0, 260, (2, 32))
    wanted = model(tokens, labels=tokens)
    places = torch.arange(32).expand(2, 32)
    loss, logits, _ = model(tokens, labels=tokens, return_dict=False, use_cache=True, position_ids=places)
    assert torch.equal(loss, wanted.loss) and torch.equal(logits, wanted.logits)
    for wish in (dict(output_hidden_states=True), dict(position_ids=places.flip(1))):
        with pytest.raises(ValueError, match="hooks of its layers|packed rows are not supported"):
            model(tokens, **wish)
    called, plain = [], model.gpt.blocks[0].mlp.fc
    for layer in (plain, model.gpt.blocks[0].mlp, model.gpt.blocks[0].attn, model.gpt.blocks[0], model.gpt.tok_emb):
        layer.register_forward_hook(lambda layer, *_: called.append(type(layer).__name__))
    torch.testing.assert_close(model(tokens).logits, wanted.logits, rtol=0, atol=1e-4)
    assert called == ["Embedding", "Attention", "Linear", "MLP", called[-1]]
    called.clear()
    model.gpt.blocks[0].mlp.fc = torch.nn.Sequential(plain, torch.nn.Tanh())  # has neither weight nor gram
    assert not torch.equal(model(tokens).logits, wanted.logits) and called
    for add in (lambda: tokenizer.add_tokens(["<new>"]), lambda: tokenizer.add_special_tokens({"additional_special_tokens": ["<x>"]})):
        with pytest.raises(ValueError, match="cannot be added: the vocabulary of this model is fixed"):
            add()


@pytest.mark.parametrize("name", ["sp300", "char", "byte260"])
def test_the_tokenizer_keeps_every_byte(tmp_path, name):
    """As the trainer's own; odd strings, and tokens that are no UTF-8."""
    chance = random.Random(1)
    pool = ["\t", "\r\n", "   ", "<s>", "<unk>", "é", "漢字", "🙂", "\x00", "\ufffd", "the ", "<0x41>", "ﬁ", "\u3000"]
    texts = ["", *("".join(chance.choices(pool, k=chance.randrange(1, 12))) for _ in range(300))]
    spec = {"sp300": str(tmp_path / "tokenizer.model"), "char": str(tmp_path / "tokenizer.model")}.get(name, name)
    if spec != name:
        prepare.learn_vocabulary(name, ["théx漢"] if name == "char" else texts, Path(spec))
    wanted = tokenization.load_tokenizer(spec)
    export_hf.write_folder(train_gpt.GPT(tiny_config(vocab_size=wanted.vocab_size)), wanted, tmp_path / "folder")
    found = load_tokenizer(tmp_path / "folder")
    assert len(found) == found.vocab_size == wanted.vocab_size == len(set(found.get_vocab()))
    for text in texts:
        ids = found.encode(text, add_special_tokens=False)
        assert ids == wanted.encode([text])[0].tolist() and found.decode(ids) == text
        assert found.encode(text) == [1, *ids] and found.decode([1, *ids], skip_special_tokens=True) == text
    for _ in range(300):
        ids = chance.choices(range(4, wanted.vocab_size), k=8)
        assert found.decode(ids) == wanted.decode(np.array(ids)).decode("utf-8", "replace")


@pytest.mark.parametrize("name, right, wrong, message", [
    ("model.safetensors", b"gpt.smear", b"gpt.other", r"missing.*gpt\.smear"),
    ("config.json", b'"SMEAR"', b'"NEW"', "NEW='.* is not a variable"),
    ("tokenizer_config.json", b"byte260", b"gpt2", "gpt2 is not the tokenizer that|cannot be used")])
def test_an_altered_folder_is_an_error(folders, tmp_path, name, right, wrong, message):
    folder = shutil.copytree(folders("switches")[1], tmp_path / "altered")
    content = (folder / name).read_bytes()
    assert right in content
    (folder / name).write_bytes(content.replace(right, wrong))
    with pytest.raises(ValueError, match=message):
        (load_tokenizer if name == "tokenizer_config.json" else load)(folder)


def test_the_command_reads_its_folder_back(folders, tmp_path, monkeypatch, capsys):
    artifact = f"{folders('switches')[1]}.ptz"
    run_script(monkeypatch, export_hf, artifact, tmp_path / "out")
    assert "read back by transformers, its logits differ by" in capsys.readouterr().out
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "pip install torch 'transformers>=5' safetensors\n" in card  # transformers itself does not need PyTorch
    assert "| score | not known" in card and "license:" not in card and "from_pretrained(\"out\"," in card
    with pytest.raises(SystemExit, match="is not empty"):
        run_script(monkeypatch, export_hf, artifact, tmp_path / "out")
    monkeypatch.setattr(export_hf, "compare", lambda *_: {}["a fault of transformers"])
    with pytest.raises(SystemExit, match="cannot read the folder, which was emptied: 'a fault of"):
        run_script(monkeypatch, export_hf, artifact, tmp_path / "new")
    monkeypatch.setattr(export_hf, "version", lambda package: "4.57.1")
    with pytest.raises(SystemExit, match="transformers 4.57.1 is too old"):
        run_script(monkeypatch, export_hf, artifact, tmp_path / "new")
    assert not any((tmp_path / "new").iterdir())
