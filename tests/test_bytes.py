"""The byte count: what every kind of tokenizer is charged equals the bytes of the documents."""

import hashlib
import json
import random
import string
from types import SimpleNamespace

import numpy as np
import prepare
import pytest
import sample
import tokenization
import torch
import train_gpt
from conftest import REPOSITORY, one_process, run_script, tiny_config, write_shard

TRAPS = [
    "plain words, then a full stop.", " one leading space", "  two", "trailing  ", "double  and   triple spaces",
    "\ttab\tand\ttab", "\n\nnew\nlines\n", "carriage\r\nreturns\r\n", "\ufffd\ufffd", "nul\x00inside", "   .", "\n!",
    "👩‍👩‍👧‍👦 🏳️‍🌈 joined", "e\u0301 a\u0308 combining", "½ ﬁ ① Ａ ™ full width", "x" * 300, "1234567890 3.14 -1e9",
    "<s> </s> <unk> <pad> <0x41> <|endoftext|>", "\u00a0no-break\u2009thin\u3000wide spaces\u200bzero",
    "日本語 한국어 русский العربية עברית हिन्दी ไทย ქართული བོད་ཡིག ትግርኛ 𝔘𝔫𝔦 𓀀𓂀", "the last document\n\n ",
]
MARKED = "a literal \u2581 and \u2581\u2581two"  # which SentencePiece takes for spaces
WORDS = "it was the best of times, it was the worst of times; we had nothing before us 1789 \n".split(" ")


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def byte_stream(*texts):
    """Documents as tokens of byte260, each behind its BOS."""
    return [token for text in texts for token in (1, *(4 + byte for byte in text.encode()))]


def make(monkeypatch, out, *arguments, tokenizer="byte260"):
    """Run prepare.py; return the manifest."""
    run_script(monkeypatch, prepare, *arguments, "--tokenizer", tokenizer, "--out", out)
    return json.loads((out / "manifest.json").read_text())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Training text, validation text full of traps, and SentencePiece models of several designs."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(1)
    texts = [" ".join(random.choice(WORDS, 60)) for _ in range(300)]
    write_jsonl(folder / "train.jsonl", texts)
    write_jsonl(folder / "val.jsonl", [*TRAPS, MARKED])
    for name, more in {
        "normalising": dict(normalization_rule_name="nmt_nfkc", add_dummy_prefix=False),
        "defaults": dict(byte_fallback=False, vocab_size=80, unk_id=0, bos_id=1, eos_id=2, pad_id=-1),
        "kept": dict(normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False),
    }.items():
        settings = dict(vocab_size=320, byte_fallback=True, pad_id=0, bos_id=1, eos_id=2, unk_id=3)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_prefix=str(folder / name), minloglevel=2,
            model_type="bpe", **{**settings, **more})
    return folder


def check(out):
    """What the trainer makes of the validation split, with the tokenizer that the manifest names."""
    named = json.loads((out / "manifest.json").read_text())["tokenizer"]
    spec = out / named["name"] if named["sha256"] else named["name"]
    config = tiny_config(data_path=str(out), tokenizer_path=str(spec), train_seq_len=1, vocab_size=named["vocab_size"])
    return train_gpt.Validation(config, one_process())


@pytest.mark.parametrize("tokenizer", ["sp320", "unigram300", "char", "byte260", "gpt2"])
def test_kinds_that_keep_text_charge_every_byte(corpus, tmp_path, monkeypatch, tokenizer):
    if tokenizer == "gpt2":
        tiktoken = pytest.importorskip("tiktoken")
        try:
            tiktoken.get_encoding("gpt2")
        except Exception as error:
            pytest.skip(f"tiktoken has no gpt2 files here and cannot download them: {error!r:.80}")
    out, texts = tmp_path / "set", [*TRAPS, MARKED] if tokenizer in ("byte260", "gpt2") else TRAPS
    val = write_jsonl(tmp_path / "val.jsonl", texts)
    manifest = make(monkeypatch, out, corpus / "train.jsonl", "--val-file", val, tokenizer=tokenizer)
    validation, split = check(out), manifest["splits"]["val"]
    assert validation.data_sha256 == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.glob("*.bin")}
    assert validation.bytes == split["bytes"] == split["decoded_bytes"] == sum(len(text.encode()) for text in texts)
    assert split["original_per_decoded_byte"] == 1.0 and not manifest["tokenizer"]["changes_text"]
    assert split["documents"] == len(texts) and split["tokens"] == len(validation.tokens)
    assert (validation.tokens == (50256 if tokenizer == "gpt2" else 1)).sum() == len(texts)  # BOS


@pytest.mark.parametrize("model", ["normalising", "defaults", "kept"])
def test_models_that_change_text_are_charged_what_is_left(corpus, tmp_path, monkeypatch, capsys, model):
    """The one that is made as prepare.py makes them only takes U+2581 for a space."""
    import sentencepiece
    texts, out, path = [*TRAPS, MARKED], tmp_path / "set", str(corpus / f"{model}.model")
    manifest = make(monkeypatch, out, corpus / "train.jsonl", "--val-file", corpus / "val.jsonl", tokenizer=path)
    processor = sentencepiece.SentencePieceProcessor(model_file=path)
    ids = [processor.encode(text) for text in texts]
    unknown = sum(i == processor.unk_id() for document in ids for i in document)
    decoded = [processor.decode(document) for document in ids]
    size, charged = sum(len(text.encode()) for text in texts), check(out).bytes
    assert charged == sum(len(text.encode()) for text in decoded) - unknown * len(" \u2047 ".encode()) < size
    assert (unknown > 0) == (model == "defaults")
    assert model != "kept" or charged == size - 2 * MARKED.count("\u2581")
    split, changed = manifest["splits"]["val"], sum(map(str.__ne__, texts, decoded))
    assert manifest["tokenizer"]["changes_text"] and split["changed_documents"] == changed > 0
    assert (split["bytes"], split["decoded_bytes"]) == (size, charged)
    assert f"Divide val_bpb by {size / charged:.6f}" in capsys.readouterr().out


def test_other_tokenizers_may_not_change_text(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenization.ByteTokenizer, "decode", lambda self, ids: b"something else")
    with pytest.raises(SystemExit, match="byte260 does not decode to the text"):
        make(monkeypatch, tmp_path / "set", corpus / "val.jsonl", "--val-docs", 3)
    assert not (tmp_path / "set").exists()


def test_text_without_spaces_learns_a_space_all_the_same(tmp_path, monkeypatch):
    """Else a space of the validation text would be three bytes of a sign that is not there."""
    random = np.random.default_rng(2)
    texts = ["".join(random.choice(list("天地玄黃宇宙洪荒日月盈昃"), 80)) for _ in range(200)]
    out, val = tmp_path / "set", write_jsonl(tmp_path / "val.jsonl", ["天 地  玄 a b c"])
    make(monkeypatch, out, write_jsonl(tmp_path / "train.jsonl", texts), "--val-file", val, tokenizer="sp300")
    assert check(out).bytes == len("天 地  玄 a b c".encode())


def test_a_wrong_byte_count_is_an_error(corpus, tmp_path, monkeypatch):
    out = tmp_path / "set"
    manifest = make(monkeypatch, out, corpus / "train.jsonl", "--val-file", corpus / "val.jsonl", tokenizer="char")
    for count in ("decoded_bytes", "tokens"):
        wrong = json.loads(json.dumps(manifest))
        wrong["splits"]["val"][count] += 1
        (out / "manifest.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=r"manifest.json says \[.*and TOKENIZER_PATH=.*: scores would be wrong"):
            check(out)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, '{"splits": {"val": {"shards": [{}]}}}'])
def test_a_damaged_manifest_is_an_error(tmp_path, text):
    write_shard(tmp_path / "x_val_000000.bin", [1] * 40)
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match="manifest.json is damaged: "):
        train_gpt.Validation(tiny_config(data_path=str(tmp_path)), one_process())


# ---- Capital letters as operators ---------------------------------------------------------------


FORMS = {"The quick": "\ue001the quick", "of The": "of\ue001 the", "NASA and I": "\ue002nasa and\ue001 i", "iPhone": "i\ue003phone",
         "a NASAs": "a \ue003n\ue003a\ue003s\ue003as", "3D_Print": "3\ue001d_\ue001print", "(Yes)": "(\ue001yes)",
         "ÉCOLE": "É\ue002cole", "no capitals": "no capitals", "": ""}


@pytest.fixture(scope="module")
def folded(tmp_path_factory):
    """A data set of this repository's text with --tokenizer caseops512."""
    out = tmp_path_factory.mktemp("folded") / "std"
    with pytest.MonkeyPatch.context() as patch:
        run_script(patch, prepare, REPOSITORY / "train_gpt.py", REPOSITORY / "tests", "--tokenizer", "caseops512",
                   "--val-docs", 2, "--out", out)
    return out


@pytest.mark.parametrize("text, wanted", FORMS.items())
def test_operators_stand_before_a_word_and_its_space(text, wanted):
    assert tokenization.fold_case(text) == wanted and tokenization.unfold_case(wanted) == text


def test_every_text_comes_back():
    """Web pages have private characters, too."""
    characters = string.ascii_letters * 2 + "   \n\t0.É_'ßİ\u2581" + 3 * "\ue001\ue002\ue003\ue004"
    chosen = random.Random(0)
    for _ in range(3000):
        text = "".join(chosen.choices(characters, k=chosen.randrange(30)))
        assert tokenization.unfold_case(tokenization.fold_case(text)) == text
    assert tokenization.unfold_case("x\ue001 \ue002\ue003") == "x "  # a model may write them anywhere


def test_all_bytes_of_the_original_text_are_counted(folded):
    """By the manifest, whose proof the trainer has made, and by the trainer's table."""
    val = json.loads((folded / "manifest.json").read_text())["splits"]["val"]
    assert val["bytes"] == val["decoded_bytes"] > 1000 and val["changed_documents"] == 0
    tokenizer = tokenization.load_tokenizer(str(folded / "tokenizer.model"))
    text = (REPOSITORY / "README.md").read_text() + "\ue001 our \ue002\ue003\ue004The"
    ids = tokenizer.encode([text])[0]
    assert tokenizer.decode(ids).decode() == text and len(tokenizer.operators) == 3
    assert np.isin(ids, list(tokenizer.operators)).sum() > 100
    config = train_gpt.Config(tokenizer_path=str(folded / "tokenizer.model"), vocab_size=512)
    table = train_gpt.load_byte_table(config)[1]
    assert table[ids, 0].sum() == len(text.encode())
    assert not any(set(tokenizer.model.id_to_piece(i)) & set(string.ascii_uppercase) for i in range(4 + 3 + 256, 512))


@pytest.mark.parametrize("characters", ["\ue001", "\ue001\ue002\ue003"])
def test_in_another_tokenizer_the_operators_are_characters(tmp_path, monkeypatch, characters):
    """Of somebody's own text: they are not dropped, and no capital is folded."""
    text = f"A Text with Capitals and {characters} icons of a Font, {' '.join(characters)}\n"
    (tmp_path / "own.txt").write_text(text * 400)
    run_script(monkeypatch, prepare, tmp_path / "own.txt", "--tokenizer", "char", "--out", tmp_path / "own")  # has the trainer's check
    tokenizer = tokenization.load_tokenizer(str(tmp_path / "own" / "tokenizer.model"))
    ids = tokenizer.encode([text])[0]
    assert not tokenizer.operators and tokenizer.decode(ids).decode() == text and "C" in tokenizer.model.id_to_piece(ids.tolist())


def test_samples_have_capitals(folded, monkeypatch, capsys):
    tokenizer = tokenization.load_tokenizer(str(folded / "tokenizer.model"))
    written = tokenizer.encode([" of The NASA, once More"])[0].tolist()
    monkeypatch.setattr(sample, "generate", lambda *_: iter(written))
    sample.write_sample(train_gpt.GPT(tiny_config(vocab_size=512)), tokenizer, "The end", SimpleNamespace(), torch.Generator())
    assert capsys.readouterr().out == "The end of The NASA, once More\n\n"
