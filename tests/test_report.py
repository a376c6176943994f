"""What data/report.py says of sets whose documents are known."""

import hashlib
import json
import re
import sys

import pytest
import report
import shards
import tokenization
from conftest import write_shard
from test_bytes import TRAPS, WORDS, run_prepare, write_jsonl


def ids(*texts):
    """Documents as byte260 tokens, each behind its BOS."""
    return [token for text in texts for token in [1, *(4 + byte for byte in text.encode())]]


def byte_set(folder, train, val):
    """A new folder of byte260 shards, given the tokens of each; its manifest names the tokenizer and no shards."""
    folder.mkdir()
    for part, parts in (("train", train), ("val", val)):
        for number, tokens in enumerate(parts):
            write_shard(folder / f"x_{part}_{number:06d}.bin", tokens)
    (folder / "manifest.json").write_text('{"tokenizer": {"name": "byte260", "sha256": null}, "splits": {}}')
    return folder


@pytest.fixture
def show(monkeypatch, capsys):
    """Runs the script; returns its page and what it ends with, None if that is exit status 0."""
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["report.py", *map(str, arguments)])
        end = None
        try:
            report.main()
        except SystemExit as stop:
            end = stop.code
        return capsys.readouterr().out, end
    return run


def row(page, label):
    """The values in a row of the table."""
    return re.split("  +", re.search(rf"^ *{re.escape(label)}  +(.+)$", page, re.MULTILINE)[1])


def problems(page):
    return [line.strip() for line in page.split("\nproblems: ")[1].splitlines()[1:]]


def test_counts_of_documents_that_straddle_chunks_and_shards(tmp_path, monkeypatch, show):
    texts = ["one", "", "three and a bit", "größe", "five"]
    stream = ids(*texts)
    expected = {"documents": ["5", "1"], "tokens": [str(len(stream)), "4"], "bytes of decoded text": ["29", "3"],
                "bytes per token": [f"{29 / 34:.3f}", "0.750"], "tokens per document: min": ["1", "4"],
                "median": ["5", "4"], "mean": ["6.8", "4"], "max": ["16", "4"],
                "tokens before the first document": ["0", "0"], "tokens of the vocabulary in use": ["18", "4"],
                "bytes of original text": ["unknown", "unknown"], "per decoded byte": ["unknown", "unknown"]}
    for number, (chunk, cuts) in enumerate([(1 << 20, []), (1, [1]), (3, [4, 5, 20]), (5, [7, 26, 33])]):
        monkeypatch.setattr(shards, "BLOCK_TOKENS", chunk)
        edges = [0, *cuts, len(stream)]
        parts = [stream[start:end] for start, end in zip(edges, edges[1:])]
        page, end = show(byte_set(tmp_path / str(number), parts, [ids("val")]), "--samples", 5)
        assert end is None and problems(page) == [] and "train_gpt.py's check: passed" in page
        assert {label: row(page, label) for label in expected} == expected
        assert row(page, "shards") == [str(len(parts)), "1"]
        samples = re.findall(r"^train, document (\d) \((\d+) tokens\): ('.*')$", page, re.M)
        assert samples == [(str(i), str(1 + len(text.encode())), repr(text)) for i, text in enumerate(texts, 1)]


def test_the_validation_documents_as_text(tmp_path, show):
    data = byte_set(tmp_path / "set", [ids("train")], [ids("one", "größe\n")[:-3], ids("x")[1:], ids("\"")])
    page, end = show(data, "--texts", tmp_path)  # a folder
    assert "val, document 1 " in page and end.startswith("report.py: ")
    smaller = tmp_path / "smaller.json"
    smaller.write_text(json.dumps({"kind": "table", "bos": 1, "tokens": [""] * 4 + [chr(byte) for byte in range(99)]}))
    page, end = show(data, "--tokenizer", smaller, "--texts", tmp_path / "texts.jsonl")
    assert "train_gpt.py cannot use this data set" in page and end.startswith("report.py: 1 problems"), end
    (tmp_path / "texts.jsonl").write_text("mine")
    assert "texts.jsonl exists: it is where the documents are written" in show(data, "--texts", tmp_path / "texts.jsonl")[1]
    assert (tmp_path / "texts.jsonl").read_text() == "mine"
    (tmp_path / "texts.jsonl").unlink()
    page, end = show(data, "--texts", tmp_path / "texts.jsonl")
    assert end is None and f"wrote {tmp_path / 'texts.jsonl'}: 3 validation documents" in page
    texts = [json.loads(line)["text"] for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert texts == ["one", "grö\ufffdx", '"']


def test_tokens_before_the_first_bos_and_no_bos_at_all(tmp_path, show):
    page, end = show(byte_set(tmp_path / "a", [ids("abcde")[1:], ids("f")], [ids("one piece")[1:]]))
    assert end is None and row(page, "tokens before the first document") == ["5", "0"]
    assert row(page, "documents") == ["1", "1 (no BOS)"] and row(page, "max") == ["2", "9"]
    assert "val, document 1 (9 tokens): 'one piece'" in page


def test_repeated_and_shared_documents(tmp_path, show):
    train = ids("twice", "once", "thrice", "twice", "thrice", "thrice", "only")
    folder = byte_set(tmp_path / "a", [train[:9], train[9:]], [ids("new", "newer")])
    page, end = show(folder)
    assert end is None and row(page, "documents that occur again") == ["2", "0"]
    assert row(page, "their further copies") == ["3", "0"]
    write_shard(folder / "x_val_000000.bin", ids("new", "thrice", "newer", "on", "once"))
    page, end = show(folder)
    assert end == "report.py: 1 problems; they are listed at the end of the report"
    assert problems(page) == ["2 of the 5 val documents are also in train, which makes scores too good; the first is "
                              "document 2 (7 tokens): 'thrice'"]


def test_samples_are_spread_and_their_text_is_quoted(tmp_path, show):
    long = "line\n\tof \x1b[31m " + 60 * "größer "
    folder = byte_set(tmp_path / "a", [ids(*"abcdefghij", long, "k")], [ids("v")])
    for samples, numbers in ((0, []), (2, ["4", "10"]), (6, ["2", "4", "6", "8", "10", "12"])):
        assert re.findall(r"^train, document (\d+)", show(folder, "--samples", samples)[0], re.M) == numbers
    page, _ = show(folder, "--samples", 12)
    assert repr(long[:300]) in page and repr(long[:301])[:-1] not in page and "\x1b" not in page


def test_damage_is_named_and_the_rest_is_read(tmp_path, show):
    folder = byte_set(tmp_path / "a", [ids("whole"), ids("cut"), ids("other"), [], ids("fine")], [[1, 9]])
    for number, change in ((1, lambda data: data[:-1]), (2, lambda data: b"x" + data[1:])):
        path = folder / f"x_train_{number:06d}.bin"
        path.write_bytes(change(path.read_bytes()))
    (folder / "x_train_000005.bin").write_bytes(b"")
    page, end = show(folder)
    assert end and row(page, "documents") == ["2", "1"] and "check: not run" in page
    for line, wanted in zip(problems(page), (
            "x_train_000001.bin is damaged: its header announces 4 tokens, but it has 1031 bytes",
            "x_train_000002.bin is not a token shard: it starts with the integers", "x_train_000003.bin is damaged: its header "
            "announces 0 tokens", r"x_train_000005.bin is not .* integers \[\]"), strict=True):
        assert re.search(wanted, line)
    for path in folder.glob("*.bin"):
        path.write_bytes(b"nothing")
    assert len(problems(show(folder)[0])) == 7


def test_the_trainer_has_the_last_word(tmp_path, show):
    """Ids beyond the vocabulary are among what it refuses."""
    page, end = show(byte_set(tmp_path / "a", [ids("fine")], [[1, 9], [1, 500]]))
    assert end and "train_gpt.py's check: failed" in page and row(page, "bytes of decoded text") == ["4", "1"]
    assert re.search("^train_gpt.py cannot use this data set: .*x_val_000001.bin holds token 500", problems(page)[0])


def test_the_manifest_is_compared(tmp_path, show):
    folder = byte_set(tmp_path / "a", [ids("one"), ids("two", "three")], [ids("four")])
    (folder / "tokenizer.json").write_text(json.dumps(
        {"kind": "char", "bos": 1, "tokens": [text.decode("latin-1") for text in tokenization.BYTE_TOKENS]}))
    listed = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}

    def differences(**changes):
        files = {**listed, **changes}
        splits = {part: {"bytes": 30, "tokens": 5, "decoded_bytes": 4, "shards": [
            {"file": name, "sha256": digest} for name, digest in files.items() if part in name]} for part in ("train", "val")}
        (folder / "manifest.json").write_text(json.dumps({"splits": splits, "tokenizer": {
            "name": "tokenizer.json", "sha256": files["tokenizer.json"]}}))
        page, end = show(folder)
        assert (end is None) == (problems(page) == []) and "manifest.json: compared" in page
        assert row(page, "bytes of original text") == ["30", "30"]
        return problems(page)

    assert differences() == []
    for name in ("x_train_000001.bin", "x_val_000000.bin", "tokenizer.json"):
        assert differences(**{name: "0" * 64}) == [f"{name} does not have the sha256 in manifest.json"]
    assert differences(**{"x_train_000002.bin": "0"}) == ["x_train_000002.bin is listed in manifest.json, but missing"]
    del listed["x_train_000001.bin"]
    assert differences() == ["x_train_000001.bin is not listed in manifest.json"]


def test_an_unreadable_manifest_is_a_problem(tmp_path, show):
    folder = byte_set(tmp_path / "a", [ids("one")], [ids("two")])
    for content in (b"{no", b"\xff", b"[" * 100_000, b"[1]", b"null", b'{"splits": {"train": {"shards": 5}}}'):
        (folder / "manifest.json").write_bytes(content)
        page, end = show(folder, "--tokenizer", "byte260")
        assert end and len(problems(page)) == 1 and "manifest.json cannot be read" in page
        assert row(page, "documents") == ["1", "1"]


def test_mistakes_are_explained(tmp_path, show):
    folder = byte_set(tmp_path / "a", [ids("one")], [ids("two")])
    assert re.search("DATASET .*missing.* has no", show(tmp_path / "missing")[1])
    for name in ("tokenizer.model", "tokenizer.json", ""):
        (folder / "manifest.json").write_text(json.dumps({"tokenizer": {"name": name, "sha256": "0"}, "splits": {}}))
        assert re.search("a has no tokenizer.model or .json.* --tokenizer", show(folder)[1])
    for name, content in (("json", "{}"), ("json", '{"kind": "x", "bos": 1, "tokens": [5]}'), ("model", "x")):
        (folder / f"tokenizer.{name}").write_text(content)
        assert re.search(f"tokenizer '.*tokenizer.{name}' cannot be used: ", show(folder)[1])
    assert "none.model' cannot be used" in show(folder, "--tokenizer", "none.model")[1]
    (folder / "manifest.json").unlink()
    write_shard(folder / "y_train_000000.bin", ids("three"))
    assert "mixes shards of x, y" in show(folder, "--tokenizer", "byte260")[0]
    (tmp_path / "val_only").mkdir()
    write_shard(tmp_path / "val_only" / "x_val_000000.bin", ids("one"))
    assert show(tmp_path / "val_only", "--tokenizer", "byte260")[1] is None


@pytest.mark.parametrize("name", ["sp300", "char", "dummy_prefix", "no_fallback"])
def test_bytes_are_those_that_prepare_counted(tmp_path, monkeypatch, show, name):
    texts, spec = [" ".join([*WORDS[i % 9:-1], str(i)]) for i in range(80)], name
    if "_" in name:
        import sentencepiece
        spec = tmp_path / "own.model"
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_prefix=str(spec.with_suffix("")), minloglevel=2, pad_id=0, bos_id=1,
            eos_id=2, unk_id=3, model_type="bpe", vocab_size=300 if name == "dummy_prefix" else 60,
            byte_fallback=name == "dummy_prefix")
    monkeypatch.setattr(shards, "BLOCK_TOKENS", 7)
    run_prepare(monkeypatch, write_jsonl(tmp_path / "train.jsonl", texts), "--val-file",
                write_jsonl(tmp_path / "val.jsonl", TRAPS), "--tokenizer", spec, "--out", tmp_path / "set")
    manifest = json.loads((tmp_path / "set" / "manifest.json").read_text())
    splits = manifest["splits"]
    page, end = show(tmp_path / "set")
    assert end is None and "manifest.json: compared" in page
    # The training text has nothing that these models change.
    counted = splits["train"]["bytes"], splits["val"]["decoded_bytes"]
    assert row(page, "bytes of decoded text") == [f"{count:,}" for count in counted]
    assert row(page, "bytes of original text") == [f"{splits[part]['bytes']:,}" for part in ("train", "val")]
    assert row(page, "per decoded byte") == ["1.000000", f"{splits['val']['original_per_decoded_byte']:.6f}"]
    if name != "char":
        assert (row(page, "unknown tokens")[1] != "0") == (name == "no_fallback")
    assert f"'{texts[13][:20]}" in page
    splits["val"]["decoded_bytes"] += 1
    (tmp_path / "set" / "manifest.json").write_text(json.dumps(manifest))
    assert "the score would be wrong" in problems(show(tmp_path / "set")[0])[0]


def test_tiktoken_vocabularies(tmp_path, monkeypatch, show):
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {**{bytes([byte]): byte for byte in range(256)}, b"th": 256, "é".encode(): 258}
    tiny = tiktoken.Encoding("tiny", pat_str=".+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 260})
    monkeypatch.setattr(tiktoken, "get_encoding", {"tiny": tiny}.__getitem__)
    monkeypatch.setattr(tiktoken, "list_encoding_names", lambda: ["tiny"])
    folder = byte_set(tmp_path / "a", [[260, 256, 101, 258, 260, 256]], [[260, 195, 257]])
    page, end = show(folder, "--tokenizer", "tiny")
    assert end is None and row(page, "documents") == ["2", "1"] and row(page, "bytes of decoded text") == ["7", "1"]
    assert "'theé'" in page and "unknown tokens" not in page
