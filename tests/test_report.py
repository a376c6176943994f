"""What data/report.py says of sets whose documents are known."""

import json
import re
import sys

import pytest
import report
import shards
from conftest import write_shard
from test_bytes import corpus, run_prepare, write_jsonl  # noqa: F401


def ids(*texts):
    """Documents as byte260 tokens, each behind its BOS."""
    return [token for text in texts for token in [1, *(4 + byte for byte in text.encode())]]


def byte_set(folder, train, val):
    """A new folder of byte260 shards, given the tokens of each; it has no manifest."""
    folder.mkdir()
    for part, parts in (("train", train), ("val", val)):
        for number, tokens in enumerate(parts):
            write_shard(folder / f"x_{part}_{number:06d}.bin", tokens)
    return folder


@pytest.fixture
def show(monkeypatch, capsys):
    """Runs the script; returns what it prints, and its problems or its error, None if that is exit status 0."""
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["report.py", *map(str, arguments)])
        end = None
        try:
            report.main()
        except SystemExit as stop:
            end = stop.code
        return capsys.readouterr().out, end
    return run


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """A data set of prepare.py with a tokenizer of its own and three training shards."""
    run_prepare(monkeypatch, write_jsonl(tmp_path / "a.jsonl", [f"text {i}" for i in range(60)]), "--tokenizer", "char",
                "--val-docs", 20, "--shard-tokens", 120, "--out", tmp_path / "set")
    return tmp_path / "set"


@pytest.mark.parametrize("block, cuts", [(1 << 20, []), (1, [1]), (3, [4, 5, 20]), (5, [7, 26, 33])])
def test_counts_and_samples_of_documents_that_straddle_blocks_and_shards(tmp_path, monkeypatch, show, block, cuts):
    monkeypatch.setattr(shards, "BLOCK_TOKENS", block)
    stream = ids("one", "", "thr\x1bee\nand a bit", "größe " * 100, "five")
    edges = [0, *cuts, len(stream)]
    folder = byte_set(tmp_path / "set", [stream[start:end] for start, end in zip(edges, edges[1:])], [ids("val")])
    assert show(folder, "--tokenizer", "byte260", "--samples", 4) == ((
        f"train: {len(edges) - 1} shards, 5 documents, {len(stream)} tokens, {len(stream) - 5} bytes of decoded text, "
        f"{(len(stream) - 5) / len(stream):.3f} bytes per token\n"
        "train, document 1: 'one'\ntrain, document 2: ''\ntrain, document 3: 'thr\\x1bee\\nand a bit'\n"
        f"train, document 4: '{('größe ' * 100)[:300]}'\n"
        "val: 1 shards, 1 documents, 4 tokens, 3 bytes of decoded text, 0.750 bytes per token\nval, document 1: 'val'\n"
        "no problems\n"), None)


def test_the_validation_documents_as_text(tmp_path, show):
    folder = byte_set(tmp_path / "set", [], [ids("one", "größe\n")[:-3], ids("x")[1:], ids('"')])
    page, end = show(folder, "--tokenizer", "byte260", "--texts", tmp_path / "texts.jsonl")
    assert end is None and "wrote the validation documents to " in page
    texts = [json.loads(line)["text"] for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert texts == ["one", "grö\ufffdx", '"']
    (tmp_path / "texts.jsonl").write_text("mine")
    assert "File exists" in show(folder, "--tokenizer", "byte260", "--texts", tmp_path / "texts.jsonl")[1]
    assert (tmp_path / "texts.jsonl").read_text() == "mine"


def test_documents_in_both_splits_are_a_problem(tmp_path, show):
    train = ids("twice", "once", "thrice", "twice", "thrice", "only")
    folder = byte_set(tmp_path / "a", [train[:9], train[9:]], [ids("new", "thrice", "newer", "on", "once")])
    assert show(folder, "--tokenizer", "byte260")[1] == (
        "report.py: problems found\n"
        "2 of the 5 validation documents are also in the training split, which makes scores too good")


@pytest.mark.parametrize("part, tokens, wanted", [
    ("val", [1, 500], "x_val_000001.bin holds token 500"), ("train", [1, 260], "x_train_000001.bin holds token 260"),
    ("train", [], "x_train_000001.bin is damaged")])
def test_the_trainer_has_the_last_word(tmp_path, show, part, tokens, wanted):
    folder = byte_set(tmp_path / "a", [ids("fine")], [ids("good")])
    write_shard(folder / f"x_{part}_000001.bin", tokens)
    end = show(folder, "--tokenizer", "byte260")[1]
    assert re.search(f"problems found\ntrain_gpt.py cannot use this data set: .*{wanted}", end)


def test_files_are_compared_with_the_manifest(prepared, show):
    assert show(prepared)[1] is None
    for name in ("set_train_000001.bin", "set_val_000000.bin", "tokenizer.json"):
        before = (prepared / name).read_bytes()
        (prepared / name).write_bytes(before[:-1] + b"\0" if name.endswith(".bin") else before + b" ")
        assert f"problems found\n{name} does not have the sha256 in manifest.json" in show(prepared)[1]
        (prepared / name).write_bytes(before)
    (prepared / "set_train_000001.bin").rename(prepared / "set_train_000007.bin")
    assert re.search("set_train_000001.bin is listed in manifest.json, but missing\n.* does not list set_train_000007.bin",
                     show(prepared)[1])


@pytest.mark.parametrize("content", [
    b"{no", b"\xff", b"[" * 100_000, b"[1]", b"null", b'{"splits": {"train": {"shards": 5}}}'])
def test_a_damaged_manifest_is_named(tmp_path, show, content):
    folder = byte_set(tmp_path / "a", [ids("one")], [ids("two")])
    (folder / "manifest.json").write_bytes(content)
    assert "manifest.json is damaged: " in show(folder, "--tokenizer", "byte260")[1]


def test_tokenizers_and_folders_that_are_not_there_are_named(tmp_path, prepared, show):
    folder = byte_set(tmp_path / "a", [], [ids("two")])
    assert "a has no manifest.json that names a tokenizer: choose one with --tokenizer" in show(folder)[1]
    assert "none.model' cannot be used" in show(folder, "--tokenizer", "none.model")[1]
    assert "missing' has no *_val_*.bin" in show(tmp_path / "missing", "--tokenizer", "byte260")[1]
    (prepared / "tokenizer.json").unlink()
    assert re.search("tokenizer '.*tokenizer.json' cannot be used", show(prepared)[1])


@pytest.mark.parametrize("model", [None, "dummy_prefix", "no_fallback"])
def test_bytes_are_those_that_prepare_counted(corpus, tmp_path, monkeypatch, show, model):  # noqa: F811
    monkeypatch.setattr(shards, "BLOCK_TOKENS", 7)
    run_prepare(monkeypatch, corpus / "train.jsonl", "--val-file", corpus / "val.jsonl", "--out", tmp_path / "set",
                "--tokenizer", corpus / f"{model}.model" if model else "char")
    splits = json.loads((tmp_path / "set" / "manifest.json").read_text())["splits"]
    page, end = show(tmp_path / "set")
    counted = [int(count.replace(",", "")) for count in re.findall("([0-9,]+) bytes of decoded text", page)]
    assert end is None and counted[1] == splits["val"]["decoded_bytes"]
    assert model or counted[0] == splits["train"]["bytes"]  # the other models change text
