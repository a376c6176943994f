"""Data sets of data/prepare.py that are made in several runs: after kill -9, a full disk, another command, or in parts."""

import itertools
import json
import os
import re
import resource
import signal
import sys
from pathlib import Path
from unittest.mock import MagicMock

import prepare
import pytest
import report
import shards
import tokenization
from conftest import run_script
from test_bytes import make, write_jsonl
from test_prepare import documents
from tqdm import tqdm

TEXTS = [f"the document {i} of the many documents {i * 7919 % 100}" for i in range(75)] * 2


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch, tmp_path):
    """Saves after each batch; fills many shards."""
    for module, name, value in [(prepare, "SAVE_S", 0), (prepare, "BATCH_DOCUMENTS", 7), (prepare, "SMALL_BYTES", 0),
                                (prepare, "count_cores", lambda: 2), (shards, "SHARD_TOKENS", 100), (tqdm, "monitor_interval", 0)]:
        monkeypatch.setattr(module, name, value)
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", TEXTS)


def stop_at(patch, owner, name, call, stop):
    """Has `stop` happen in the given call of a function: of ShardWriter.write, after a part of its work."""
    calls, original = itertools.count(1), getattr(owner, name)

    def counted(*arguments):
        if next(calls) == call:
            if name == "write":
                original(arguments[0], arguments[1][:5], 1)
            stop()
        return original(*arguments)
    patch.setattr(owner, name, counted)


def fail(error):
    raise error


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


WRITER, FULL = shards.ShardWriter, OSError(28, "No space left on device")
STOPS = [(WRITER, "write", 5, kill), (WRITER, "write", 3, lambda: fail(FULL)), (prepare, "load_tokenizer", 1, kill),
         (WRITER, "write", 4, lambda: signal.raise_signal(signal.SIGTERM)), (WRITER, "sync", 6, kill), (WRITER, "close", 6, kill),
         (tokenization, "encode_batch", 3, kill), (prepare, "lock", 1, kill), (os, "replace", 3, kill),
         (shards, "check_with_trainer", 1, lambda: fail(ValueError("refused")))]


@pytest.mark.parametrize("tokenizer, arguments", [("sp300", []), ("byte260", ["--val-docs", 9, "--part", "1/1"])])
def test_after_any_stop_the_same_command_goes_on_to_the_same_data_set(monkeypatch, capfd, tokenizer, arguments):
    make(monkeypatch, Path("quiet/set"), "a.jsonl", *arguments, tokenizer=tokenizer)
    for stop in STOPS:
        pid = os.fork()
        if not pid:  # a process, because some stops kill it
            try:
                stop_at(monkeypatch, *stop)
                make(monkeypatch, Path("out/set"), "a.jsonl", *arguments, tokenizer=tokenizer)
            finally:
                os._exit(1)
        os.waitpid(pid, 0)
        assert os.listdir("out") == ["set.unfinished"]
    monkeypatch.setattr(prepare, "learn_vocabulary", lambda *_: fail(AssertionError("it is not learnt again")))
    make(monkeypatch, Path("out/set"), "a.jsonl", *arguments, tokenizer=tokenizer)
    made, quiet = ({path.name: path.read_bytes() for path in Path(out, "set").iterdir()} for out in ("out", "quiet"))
    assert made == quiet and len(made) > 20 and os.listdir("out") == ["set"]
    counts = [int(count) for count in re.findall(r"part-1-of-1 resumes after document (\d+); the text", capfd.readouterr().err)]
    assert counts == sorted(counts) and 0 < counts[0] < counts[-1] < len(TEXTS)


def begin(monkeypatch, call, *arguments, **options):
    """Make a data set until the disk is full, in the given call that writes."""
    with monkeypatch.context() as patch:
        stop_at(patch, WRITER, "write", call, lambda: fail(FULL))
        with pytest.raises(SystemExit, match="No space left on device; the same command goes on from .*set.unfinished$"):
            make(patch, Path("set"), *arguments, **options)


@pytest.mark.parametrize("change, wanted", [
    (["--val-docs", 8], "was begun with --val-docs 9, but now it is 8; go on .*, delete .*set.unfinished to begin again"),
    (["--tokenizer", "byte260"], "with --tokenizer 'my.model', but now it is 'byte260'"), (["--part", "1/2"], "with --part 'of 1'"),
    ("my.model", "with vocabulary '"), ("b.jsonl", "with text '2 files of [0-9,]* bytes"),
    ("a.jsonl", "the text is not that with which .*part-1-of-1 was begun; delete"),
    ("set.unfinished/part-1-of-1/set_train_000000.bin", "is missing or has become shorter; delete")])
def test_another_command_or_text_is_refused_and_deletes_nothing(tmp_path, monkeypatch, change, wanted):
    prepare.learn_vocabulary("sp300", TEXTS, Path("my.model"))
    command = ["a.jsonl", write_jsonl(tmp_path / "b.jsonl", ["b"]), "--val-docs", 9]
    begin(monkeypatch, 5, *command, tokenizer="my.model")
    before = set(tmp_path.rglob("*"))
    if change == "my.model":
        prepare.learn_vocabulary("sp301", TEXTS, Path(change))
    elif isinstance(change, str):
        data = Path(change).read_bytes()
        Path(change).write_bytes({"b.jsonl": data * 2, "a.jsonl": data.replace(b"many", b"MANY", 9)}.get(change, data[:9]))
    more = change if isinstance(change, list) else []
    with pytest.raises(SystemExit, match=wanted):
        run_script(monkeypatch, prepare, *command, "--tokenizer", "my.model", "--out", "set", *more)
    assert before <= set(tmp_path.rglob("*"))


@pytest.mark.parametrize("tokenizer, arguments", [
    ("byte260", []), ("unigram285", ["--val-docs", 9, "--max-docs", 120]), ("byte260", ["--val-file", "val.jsonl"])])
def test_parts_are_together_what_one_run_makes(tmp_path, monkeypatch, capsys, tokenizer, arguments):
    write_jsonl(tmp_path / "val.jsonl", TEXTS[:9])
    whole = make(monkeypatch, Path("whole/set"), "a.jsonl", *arguments, tokenizer=tokenizer)
    begin(monkeypatch, 3, "a.jsonl", *arguments, "--part", "4/4", tokenizer=tokenizer)
    for part in "2431":
        assert not Path("set").exists()
        run_script(monkeypatch, prepare, "a.jsonl", *arguments, "--part", f"{part}/4", "--tokenizer", tokenizer, "--out", "set")
    assert capsys.readouterr().out.count("the last part that is done joins them all") == 3
    joined = json.loads(Path("set/manifest.json").read_text())
    for split in ("train", "val"):
        names = [entry["file"] for entry in joined["splits"][split].pop("shards")]
        assert names == [f"set_{split}_{number:06d}.bin" for number in range(len(names))] and whole["splits"][split].pop("shards")
        assert tokenizer != "byte260" or sorted(documents("set", split)) == sorted(documents("whole/set", split))
    assert joined == whole and sorted(os.listdir()) == ["a.jsonl", "set", "val.jsonl", "whole"]


@pytest.mark.parametrize("documents_of, many, arguments, most", [
    (1, 1000, [], 100), (40, 1000, [], 4000), (150, 1, ["--val-fraction", 0.3], 15_000), (150, 1, ["--max-docs", 140], 350)])
def test_the_parts_of_a_long_document_stay_in_one_split(tmp_path, monkeypatch, documents_of, many, arguments, most):
    """In one run, and in parts of which one was stopped. A single document is cut in two, one half for each split."""
    texts = ["".join(f"document {i:03d}; line {line}\n" for line in range(5)) for i in range(documents_of)]
    for module, name, value in [(prepare, "DOCUMENT_CHARS", 30), (prepare, "MANY_DOCUMENTS", many), (prepare, "VAL_BYTES", 350)]:
        monkeypatch.setattr(module, name, value)
    command = [write_jsonl(tmp_path / "b.jsonl", texts), *arguments]
    val = make(monkeypatch, Path("whole/set"), *command)["splits"]["val"]
    begin(monkeypatch, 2, *command, "--part", "2/2")
    for part in "21":
        run_script(monkeypatch, prepare, *command, "--part", f"{part}/2", "--tokenizer", "byte260", "--out", "set")
    parts = {split: documents("set", split) for split in ("train", "val")}
    assert all(sorted(found) == sorted(documents("whole/set", split)) for split, found in parts.items())
    lines = {split: {line for part in found for line in part.splitlines()} for split, found in parts.items()}
    first, second = ({line[:12] for line in found} for found in lines.values())
    assert lines["train"] | lines["val"] <= {line for text in texts for line in text.splitlines()} and 0 < val["bytes"] <= most
    assert not first & second or documents_of == 1 and max(lines["train"]) < min(lines["val"])


def test_the_first_vocabulary_that_a_part_has_learnt_is_that_of_all(monkeypatch):
    """Another machine may have another version of SentencePiece."""
    def learn_after_another_part(name, sample, path):
        learn("sp301", sample, Path("set.unfinished/set/tokenizer.model"))
        learn(name, sample, path)

    learn = prepare.learn_vocabulary
    monkeypatch.setattr(prepare, "learn_vocabulary", learn_after_another_part)
    assert make(monkeypatch, Path("set"), "a.jsonl", tokenizer="sp300")["tokenizer"]["vocab_size"] == 301


@pytest.mark.parametrize("first, second", [
    (["a.jsonl"], ["b/a.jsonl"]), (["train.jsonl", "val.jsonl"], ["train.jsonl", "val.jsonl", "--val-fraction", 0.05])])
def test_parts_of_different_texts_or_splits_are_not_joined(tmp_path, monkeypatch, first, second):
    """Although their files have the same sizes, and the fraction is the default."""
    Path("b").mkdir()
    Path("b/a.jsonl").write_bytes(Path("a.jsonl").read_bytes().replace(b"many", b"MANY", 9))
    write_jsonl(tmp_path / "train.jsonl", TEXTS)
    write_jsonl(tmp_path / "val.jsonl", [f"validation {i}" for i in range(9)])
    run_script(monkeypatch, prepare, *first, "--part", "1/2", "--tokenizer", "byte260", "--out", "set")
    with pytest.raises(SystemExit, match="the parts were not made from the same text; delete .*set.unfinished to begin again"):
        run_script(monkeypatch, prepare, *second, "--part", "2/2", "--tokenizer", "byte260", "--out", "set")


def test_nothing_is_left_where_an_open_file_keeps_its_folder(monkeypatch):
    opened, lock, rmtree = [], prepare.lock, shards.shutil.rmtree
    monkeypatch.setattr(prepare, "lock", lambda *arguments, **options: opened.append(lock(*arguments, **options)) or opened[-1])
    monkeypatch.setattr(shards.shutil, "rmtree",
                        lambda path, **options: rmtree(path, **options) if all(file.closed for file in opened) else None)
    make(monkeypatch, Path("set"), "a.jsonl")
    assert opened and sorted(os.listdir()) == ["a.jsonl", "set"]


def test_all_files_of_a_data_set_are_on_the_disk_before_it_has_its_place(monkeypatch):
    synced, fsync = {}, os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: fsync(number) or synced.setdefault(os.fstat(number), Path("set").exists()))
    make(monkeypatch, Path("set"), "a.jsonl", tokenizer="sp300")
    written = {(about.st_ino, about.st_size) for about, is_placed in synced.items() if not is_placed}
    assert {(path.stat().st_ino, path.stat().st_size) for path in Path("set").iterdir()} <= written


def test_more_shards_than_files_can_be_open(monkeypatch, capsys):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 30, limits[1]))
    try:
        make(monkeypatch, Path("set"), "a.jsonl", "--val-fraction", 0.5)
        run_script(monkeypatch, report, "set")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(os.listdir("set")) > 60 and "no problems" in capsys.readouterr().out


def test_the_validation_split_is_small_by_default_and_a_stream_is_read_once(tmp_path, monkeypatch):
    texts, rows, hub = [f"text {i}" for i in range(4000)], [], MagicMock()  # 34 kB
    for module, name, value in [(prepare, "VAL_BYTES", 700), (prepare, "SAVE_S", 9), (prepare, "BATCH_DOCUMENTS", 99),
                                (shards, "SHARD_TOKENS", 10**6)]:
        monkeypatch.setattr(module, name, value)
    assert 150 < make(monkeypatch, Path("files"), write_jsonl(tmp_path / "b.jsonl", texts))["splits"]["val"]["bytes"] < 700
    hub.load_dataset.return_value.__iter__.side_effect = lambda: (rows.append(text) or {"text": text} for text in texts)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    for sample_bytes in (1 << 20, 9000):  # the vocabulary is learnt from all, or from the beginning
        monkeypatch.setattr(prepare, "SAMPLE_BYTES", sample_bytes)
        rows.clear()
        manifest = make(monkeypatch, Path(str(sample_bytes)), "hf://me/texts", tokenizer="sp275")
        splits = manifest["splits"]
        assert 650 < splits["val"]["bytes"] <= 700 and rows == texts
        assert splits["train"]["documents"] + splits["val"]["documents"] == len(texts)
        assert manifest["sources"] == ["hf://me/texts"]  # not as a file, whose folder is left out


def test_the_death_of_one_process_is_said(monkeypatch):
    encode = tokenization.encode_batch

    def die_once(*batch):
        if Path("a.jsonl").exists():
            os.rename("a.jsonl", "dead")
            kill()
        return encode(*batch)
    monkeypatch.setattr(tokenization, "encode_batch", die_once)
    with pytest.raises(SystemExit, match="^prepare.py: a process that encodes was killed, perhaps because memory ran out"):
        make(monkeypatch, Path("set"), "a.jsonl", tokenizer="sp300")
