"""What data/report.py says of sets whose documents are known."""

import json
from unittest.mock import Mock

import pytest
import report
import shards
from conftest import run_script, write_shard
from test_bytes import byte_stream, make, write_jsonl


@pytest.fixture
def show(monkeypatch, capsys):
    """Runs the script on a folder; returns what it prints, and its problems or its error, None if that is exit status 0."""
    def run(folder, *arguments):
        end = None
        try:
            run_script(monkeypatch, report, folder, *arguments)
        except SystemExit as stop:
            end = stop.code
        return capsys.readouterr().out, end
    return run


@pytest.fixture
def show_shards(tmp_path, show):
    """Runs it on new shards of byte260, given the tokens of each, without a manifest."""
    def run(train, val, *arguments):
        for part, parts in (("train", train), ("val", val)):
            for number, tokens in enumerate(parts):
                write_shard(tmp_path / f"x_{part}_{number:06d}.bin", tokens)
        return show(tmp_path, "--tokenizer", "byte260", *arguments)
    return run


def test_counts_and_samples_of_documents_that_straddle_blocks_and_shards(monkeypatch, show_shards):
    monkeypatch.setattr(shards, "BLOCK_TOKENS", 3)
    stream = byte_stream("one", "thr\x1bee\nand a bit", "größe " * 100, "", "five")
    parts = [stream[:4], stream[4:5], stream[5:20], stream[20:]]
    lines = show_shards(parts, [byte_stream("val")])[0].splitlines()
    assert lines[0] == f"train: 4 shards, 5 documents, {len(stream)} tokens"
    assert [line.partition(": ")[2] for line in lines[1:4]] == ["'one'", "'thr\\x1bee\\nand a bit'", repr(("größe " * 100)[:300])]
    assert lines[4:] == ["val: 1 shards, 1 documents, 4 tokens", "val, document 1: 'val'", "no problems"]


def test_the_validation_documents_as_text(tmp_path, show_shards):
    val = [byte_stream("one", "größe\n")[:-3], byte_stream("x")[1:]]
    assert show_shards([], val, "--texts", tmp_path / "texts.jsonl")[1] is None
    texts = [json.loads(line)["text"] for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert texts == ["one", "grö\ufffdx"]
    assert "File exists" in show_shards([], val, "--texts", tmp_path / "texts.jsonl")[1]


def test_a_part_of_the_documents_does_not_stay_where_all_are_wanted(tmp_path, monkeypatch, show_shards):
    monkeypatch.setattr(report, "decode", Mock(side_effect=["one", "one", OSError("No space left on device")]))
    val = [byte_stream("one", "two")]
    assert "No space left" in show_shards([], val, "--texts", tmp_path / "texts.jsonl")[1]
    assert not (tmp_path / "texts.jsonl").exists()


def test_problems_of_the_shards(show_shards):
    train = byte_stream("twice", "once", "thrice", "twice", "thrice", "only")
    val = byte_stream("new", "thrice", "newer", "on", "once")
    assert "2 of the 5 validation documents are also in the training split" in show_shards([train[:9], train[9:]], [val])[1]
    assert show_shards([[1, 1, *byte_stream(" \n"), 1, 2, 5]], [[1, 1, *byte_stream(" \n"), 1, 2, 6]])[1] is None  # nothing but empty ones
    end = show_shards([train, [1, 260]], [val])[1]
    assert "cannot use this data set: " in end and "x_train_000001.bin holds token 260" in end


def test_a_wrong_folder_and_ctrl_c_end_without_a_traceback(tmp_path, monkeypatch, show):
    assert show(tmp_path / "typo")[1].endswith("typo/manifest.json that names a tokenizer: name another DATASET, or a --tokenizer")
    monkeypatch.setattr(report, "load_tokenizer", Mock(side_effect=KeyboardInterrupt))
    assert show(tmp_path, "--tokenizer", "byte260")[1] == "report.py: stopped"


def test_files_are_compared_with_the_manifest(tmp_path, monkeypatch, show):
    folder = tmp_path / "my_val_set"  # which has no more validation shards than another one
    source = write_jsonl(tmp_path / "a.jsonl", [f"text {i}" for i in range(60)])
    monkeypatch.setattr(shards, "SHARD_TOKENS", 120)
    make(monkeypatch, folder, source, "--val-docs", 20, tokenizer="char")
    assert show(folder)[1] is None
    for name in ("my_val_set_train_000001.bin", "my_val_set_val_000000.bin", "tokenizer.model"):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        assert f"problems found\n{name} does not have the sha256 in manifest.json" in show(folder)[1]
        (folder / name).write_bytes(before)
    (folder / "my_val_set_train_000001.bin").rename(folder / "my_val_set_train_000007.bin")
    assert "my_val_set_train_000001.bin is listed in manifest.json, but missing\n" in show(folder)[1]
    for damaged in (b"\xff", b"[" * 100_000, b"null", b'{"splits": {"train": {"shards": 5}}}'):
        (folder / "manifest.json").write_bytes(damaged)
        assert "manifest.json is damaged: " in show(folder)[1]
