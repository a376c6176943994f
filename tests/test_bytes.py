"""The byte count: what every kind of tokenizer is charged equals the bytes of the documents."""

import hashlib
import json

import numpy as np
import prepare
import pytest
import tokenization
import train_gpt
from conftest import one_process, tiny_config, write_shard

TRAPS = [
    "plain words, then a full stop.", " one leading space", "  two leading spaces", "trailing space ", "trailing  ",
    "double  and   triple    spaces", "\ttab\tand\ttab", "\n\nnew\nlines\n", "carriage\r\nreturns\r\n", "\ufffd\ufffd",
    "👩‍👩‍👧‍👦 🏳️‍🌈 joined", "e\u0301 a\u0308 combining", "nul\x00inside", "", " ", "   ", "\n", "½ ﬁ ① Ａ ™ full width",
    "<s> </s> <unk> <pad> <0x41> <|endoftext|>", "\u00a0no-break\u2009thin\u3000wide spaces\u200bzero",
    "日本語 中文 한국어 русский العربية עברית हिन्दी ไทย ελληνικά ქართული", "x" * 300, "1234567890 3.14 -1e9",
    "བོད་ཡིག ትግርኛ தமிழ் 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀𓂀", "the last document\n\n ",
]
MARKED = "a literal \u2581 and \u2581\u2581two"  # which SentencePiece takes for spaces
WORDS = "it was the best of times, it was the worst of times; we had nothing before us 1789 \n".split(" ")


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Training text, validation text full of traps, and SentencePiece models of several designs."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(1)
    texts = [" ".join(random.choice(WORDS, 60)) for _ in range(300)]
    write_jsonl(folder / "train.jsonl", texts)
    write_jsonl(folder / "val.jsonl", TRAPS)
    write_jsonl(folder / "marked.jsonl", [*TRAPS, MARKED])
    for name, more in {
        "normalising": dict(normalization_rule_name="nmt_nfkc", add_dummy_prefix=False),
        "dummy_prefix": dict(normalization_rule_name="nmt_nfkc", add_dummy_prefix=True),
        "no_fallback": dict(normalization_rule_name="identity", add_dummy_prefix=False, byte_fallback=False,
                            remove_extra_whitespaces=False, vocab_size=80),
        "defaults": dict(byte_fallback=False, vocab_size=80, unk_id=0, bos_id=1, eos_id=2, pad_id=-1),
        "kept": dict(normalization_rule_name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False),
    }.items():
        settings = dict(vocab_size=320, byte_fallback=True, pad_id=0, bos_id=1, eos_id=2, unk_id=3)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_prefix=str(folder / name), minloglevel=2,
            model_type="bpe", **{**settings, **more})
    return folder


def run_prepare(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["prepare.py", *map(str, arguments)])
    prepare.main()


def load(out, tokenizer):
    manifest = json.loads((out / "manifest.json").read_text())
    config = tiny_config(data_path=str(out), tokenizer_path=tokenizer, train_seq_len=1,
                         vocab_size=manifest["tokenizer"]["vocab_size"])
    return manifest, train_gpt.Validation(config, one_process())


@pytest.mark.parametrize("tokenizer, file", [
    ("sp320", "tokenizer.model"), ("unigram300", "tokenizer.model"), ("char", "tokenizer.json"), ("byte260", None),
    ("gpt2", None)])
def test_kinds_that_keep_text_charge_every_byte(corpus, tmp_path, monkeypatch, tokenizer, file):
    if tokenizer == "gpt2":
        tiktoken = pytest.importorskip("tiktoken")
        try:
            tiktoken.get_encoding("gpt2")
        except Exception as error:
            pytest.skip(f"tiktoken has no gpt2 files here and cannot download them: {error!r:.80}")
    out, val = tmp_path / "set", TRAPS if file == "tokenizer.model" else [*TRAPS, MARKED]
    run_prepare(monkeypatch, corpus / "train.jsonl", "--val-file", corpus / ("val.jsonl" if val is TRAPS else "marked.jsonl"),
                "--tokenizer", tokenizer, "--out", out)
    manifest, validation = load(out, str(out / file) if file else tokenizer)
    assert validation.data_sha256 == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.glob("*.bin")}
    split = manifest["splits"]["val"]
    assert validation.bytes == split["bytes"] == split["decoded_bytes"] == sum(len(text.encode()) for text in val)
    assert split["original_per_decoded_byte"] == 1.0 and not manifest["tokenizer"]["changes_text"]
    assert split["documents"] == len(val) and split["tokens"] == len(validation.tokens)
    bos = tokenization.load_tokenizer(str(out / file) if file else tokenizer).bos
    assert (validation.tokens == bos).sum() == len(val)


@pytest.mark.parametrize("model", ["normalising", "dummy_prefix", "no_fallback", "defaults", "kept"])
def test_models_that_change_text_are_charged_what_is_left(corpus, tmp_path, monkeypatch, capsys, model):
    """The one that is made as prepare.py makes them only takes U+2581 for a space."""
    texts, out, path = [*TRAPS, MARKED], tmp_path / "set", corpus / f"{model}.model"
    run_prepare(monkeypatch, corpus / "train.jsonl", "--val-file", corpus / "marked.jsonl", "--tokenizer", path, "--out", out)
    manifest, validation = load(out, str(out / "tokenizer.model"))
    import sentencepiece
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ids = [processor.encode(text) for text in texts]
    unknown = sum(i == processor.unk_id() for document in ids for i in document)
    decoded = [processor.decode(document) for document in ids]
    size, charged = sum(len(text.encode()) for text in texts), validation.bytes
    assert charged == sum(len(text.encode()) for text in decoded) - unknown * len(" \u2047 ".encode()) < size
    assert (unknown > 0) == (model in ("no_fallback", "defaults"))
    assert model != "kept" or charged == size - 2 * MARKED.count("\u2581")
    split, changed = manifest["splits"]["val"], sum(map(str.__ne__, texts, decoded))
    assert manifest["tokenizer"]["changes_text"] and split["changed_documents"] == changed > 0
    assert (split["bytes"], split["decoded_bytes"]) == (size, charged)
    assert split["original_per_decoded_byte"] == size / charged > 1
    assert {path.suffix for path in out.iterdir()} == {".bin", ".json", ".model"} and len(list(out.iterdir())) == 4
    assert (f"The tokenizer changes {changed} of the {len(texts)} validation documents. The split's {size:,} "
            f"bytes become {charged:,}. Divide val_bpb by {size / charged:.6f}") in capsys.readouterr().out


def test_text_of_which_nothing_is_left_has_no_score(corpus, tmp_path, monkeypatch):
    val = write_jsonl(tmp_path / "val.jsonl", [" ", "\n\n"])
    with pytest.raises(SystemExit, match="the validation tokens decode to no text"):
        run_prepare(monkeypatch, corpus / "train.jsonl", "--val-file", val, "--tokenizer", corpus / "normalising.model",
                    "--out", tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_other_tokenizers_may_not_change_text(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenization.ByteTokenizer, "decode", lambda self, ids: b"something else")
    with pytest.raises(SystemExit, match="byte260 does not decode to the text that it encoded"):
        run_prepare(monkeypatch, corpus / "val.jsonl", "--val-docs", 3, "--tokenizer", "byte260", "--out", tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_text_without_spaces_learns_a_space_all_the_same(tmp_path, monkeypatch):
    """Else a space of the validation text would be three bytes of a sign that is not there."""
    random = np.random.default_rng(2)
    train = write_jsonl(tmp_path / "train.jsonl", ["".join(random.choice(list("天地玄黃宇宙洪荒日月盈昃"), 80)) for _ in range(200)])
    val, out = write_jsonl(tmp_path / "val.jsonl", ["天 地  玄 a b c"]), tmp_path / "set"
    run_prepare(monkeypatch, train, "--val-file", val, "--tokenizer", "sp300", "--out", out)
    manifest, validation = load(out, str(out / "tokenizer.model"))
    assert validation.bytes == manifest["splits"]["val"]["bytes"] == len("天 地  玄 a b c".encode())


def test_a_wrong_byte_count_is_an_error(corpus, tmp_path, monkeypatch):
    out = tmp_path / "set"
    run_prepare(monkeypatch, corpus / "train.jsonl", "--val-file", corpus / "val.jsonl", "--tokenizer", "sp320",
                "--out", out)
    path = out / "manifest.json"
    manifest, validation = load(out, str(out / "tokenizer.model"))
    for change in ("decoded_bytes", "tokens"):
        wrong = json.loads(json.dumps(manifest))
        wrong["splits"]["val"][change] += 1
        path.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match="the score would be wrong"):
            train_gpt.Validation(validation.config, one_process())
    path.write_text(json.dumps(manifest))
    train_gpt.Validation(validation.config, one_process())
    other = train_gpt.replace(validation.config, tokenizer_path=str(corpus / "normalising.model"))
    with pytest.raises(ValueError, match="the score would be wrong"):
        train_gpt.Validation(other, one_process())


@pytest.mark.parametrize("text", ["{", "[]", '{"splits": []}', '{"splits": {"val": {"shards": [{}]}}}'])
def test_a_damaged_manifest_is_an_error(tmp_path, text):
    write_shard(tmp_path / "x_val_000000.bin", [1] * 40)
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match="manifest.json is damaged: "):
        train_gpt.Validation(tiny_config(data_path=str(tmp_path)), one_process())


def test_a_damaged_model_is_an_error_that_names_it(corpus, tmp_path):
    """SentencePiece itself takes a piece that is no UTF-8, and fails when it is asked for it."""
    content, refused = (corpus / "kept.model").read_bytes(), 0
    path = tmp_path / "bad.model"
    for at in range(100, 2000, 10):
        path.write_bytes(content[:at] + b"\xff" + content[at + 1:])
        try:
            train_gpt.load_byte_table(tiny_config(tokenizer_path=str(path), vocab_size=320))
        except ValueError as error:
            assert str(path) in str(error) and ("cannot be read" in str(error) or "VOCAB_SIZE" in str(error))
            refused += "codec can't decode" in str(error)
    assert refused


@pytest.mark.parametrize("name, content, vocab_size, wanted", [
    ("x.model", b"no model", 260, "TOKENIZER_PATH=.*x.model' cannot be read: "),
    ("x.json", b"{}", 260, "x.json' cannot be read: "), ("x.json", b"[1]", 260, "x.json' cannot be read: "),
    ("missing.model", None, 260, "missing.model' cannot be read: "),
    ("gpt3", None, 260, "TOKENIZER_PATH='gpt3' cannot be read: use a .model file, byte260 or gpt2"),
    ("normalising.model", None, 321, "VOCAB_SIZE=321.*has 320 tokens; set both")])
def test_tokenizers_that_cannot_be_read_or_do_not_fit_are_named(corpus, tmp_path, name, content, vocab_size, wanted):
    path = {"gpt3": name, "normalising.model": corpus / name}.get(name, tmp_path / name)
    if content:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=wanted):
        train_gpt.load_byte_table(tiny_config(tokenizer_path=str(path), vocab_size=vocab_size))
