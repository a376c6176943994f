"""What data/report.py says of sets whose documents are known."""

import hashlib
import io
import json
import re
import struct
import sys

import prepare
import pytest
import report
from conftest import write_shard
from test_bytes import TRAPS, WORDS, run_prepare, write_jsonl


def ids(*texts):
    """Documents as byte260 tokens, each behind its BOS."""
    return [token for text in texts for token in [1, *(4 + byte for byte in text.encode())]]


def byte_set(folder, train, val):
    """A new folder of byte260 shards, given the tokens of each; its manifest names the tokenizer and nothing else."""
    folder.mkdir()
    for part, shards in (("train", train), ("val", val)):
        for number, tokens in enumerate(shards):
            write_shard(folder / f"x_{part}_{number:06d}.bin", tokens)
    (folder / "manifest.json").write_text('{"tokenizer": {"name": "byte260"}}')
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
    return page.split("\nproblems: ")[1].splitlines()[1:]


def test_counts_of_documents_that_straddle_chunks_and_shards(tmp_path, monkeypatch, show):
    texts = ["one", "", "three and a bit", "größe", "five"]
    stream = ids(*texts)
    expected = {"documents": ["5", "1"], "tokens": [str(len(stream)), "4"], "bytes of decoded text": ["29", "3"],
                "bytes per token": [f"{29 / 34:.3f}", "0.750"], "tokens per document: min": ["1", "4"],
                "median": ["5", "4"], "mean": ["6.8", "4"], "90 %": ["12.8", "4"], "99 %": ["15.7", "4"],
                "max": ["16", "4"], "tokens before the first document": ["0", "0"],
                "bytes of original text": ["unknown", "unknown"], "per decoded byte": ["unknown", "unknown"]}
    for number, (chunk, cuts) in enumerate([(1 << 20, []), (1, [1]), (3, [4, 5, 20]), (5, [7, 26, 33])]):
        monkeypatch.setattr(report, "CHUNK", chunk)
        edges = [0, *cuts, len(stream)]
        shards = [stream[start:end] for start, end in zip(edges, edges[1:])]
        page, end = show(byte_set(tmp_path / str(number), shards, [ids("val")]), "--samples", 5)
        assert end is None and problems(page) == []
        assert {label: row(page, label) for label in expected} == expected
        assert row(page, "shards") == [str(len(shards)), "1"]
        samples = re.findall(r"^ +\d+ +\d+ +\d+  ('.*')$", page.split("train, samples")[1].split("\nval")[0], re.M)
        assert samples == [repr(text) for text in texts]


def test_tokens_before_the_first_bos_and_no_bos_at_all(tmp_path, show):
    page, end = show(byte_set(tmp_path / "a", [ids("abcde")[1:], ids("f")], [ids("one piece")[1:]]))
    assert end is None and row(page, "tokens before the first document") == ["5", "0"]
    assert row(page, "documents") == ["1", "1 (no BOS)"] and row(page, "max") == ["2", "9"]
    assert re.search(r"val, samples.*\n +1 +9 +9  'one piece'$", page, re.M)


def test_repeated_and_shared_documents(tmp_path, show):
    train = ids("twice", "once", "thrice", "twice", "thrice", "thrice", "only")
    folder = byte_set(tmp_path / "a", [train[:9], train[9:]], [ids("new", "newer")])
    page, end = show(folder)
    assert end is None and row(page, "documents that occur again") == ["2", "0"]
    assert row(page, "further copies") == ["3", "0"] and row(page, "their tokens") == ["20", "0"]
    write_shard(folder / "x_val_000000.bin", ids("new", "thrice", "newer", "on", "once"))
    page, end = show(folder)
    assert end == "report.py: problems: 1, see the end of the page"
    assert problems(page) == ["  2 of the 5 val documents are also in train, with 12 tokens: scores are too good; the "
                              "first of them is 'thrice'"]


def test_tokens_that_are_used_most_and_never(tmp_path, show):
    most = "".join(chr(i) for i in range(128) if i not in b"A\n")
    page, _ = show(byte_set(tmp_path / "a", [ids(most + "~~~")], [ids("##")]))
    assert "in no document, 130 of the 256 tokens that stand for text: '\\n', 'A', 0x80, 0x81" in page
    assert f"most frequent in train: '~' {4 / 130:.2%}, #1 {1 / 130:.2%}, '\\x00'" in page
    assert "most frequent in val: '#' 66.67%, #1 33.33%\n" in page


def test_longest_documents_and_samples(tmp_path, show):
    long = "line\n\tof \x1b[31m " + 60 * "größer "
    page, _ = show(byte_set(tmp_path / "a", [ids(*"abcdefghij", long, "k" * 9)], [ids("v")]), "--samples", 2)
    longest = page.split("train, longest")[1].split("\n\n")[0].splitlines()[1:]
    assert longest[0].split(None, 3) == ["11", f"{len(ids(long))}", f"{len(long.encode())}", repr(long[:60])]
    assert [line.split()[0] for line in longest] == ["11", "12", "1", "2", "3"]
    page, _ = show(tmp_path / "a", "--samples", 6)
    samples = page.split("train, samples")[1].split("\n\n")[0].splitlines()[1:]
    assert [line.split()[0] for line in samples if line[11] != " "] == ["2", "4", "6", "8", "10", "12"]
    page, _ = show(tmp_path / "a", "--samples", 12)
    shown = re.sub(r"\n {42}", "", page.split("train, samples")[1])
    assert repr(long[:300]) in shown and repr(long[:301])[:-1] not in shown and "\x1b" not in page
    assert "samples" not in show(tmp_path / "a", "--samples", 0)[0]


def test_damage_is_named_and_the_rest_is_read(tmp_path, show):
    folder = byte_set(tmp_path / "a", [ids("whole"), ids("cut"), ids("other"), [], ids("fine")],
                      [[1, 260, 9, 300], [1, 500]])
    for number, change in ((1, lambda data: data[:-1]), (2, lambda data: b"x" + data[1:]), (4, lambda data: data)):
        path = folder / f"x_train_{number:06d}.bin"
        path.write_bytes(change(path.read_bytes()))
    (folder / "x_train_000005.bin").write_bytes(b"")
    page, end = show(folder)
    assert end == "report.py: problems: 6, see the end of the page" and row(page, "documents") == ["2", "2"]
    for line, wanted in zip(problems(page), (
            "x_train_000001.bin is damaged and left out: it has 1031 bytes and a header that promises 4 tokens",
            "x_train_000002.bin is damaged .* starts with the integers", "x_train_000003.bin .* promises 0 tokens",
            r"x_train_000005.bin .* integers \[\]", "x_val_000000.bin has 2 tokens beyond the vocabulary of 260",
            "x_val_000001.bin has 1 tokens beyond"), strict=True):
        assert re.search(wanted, line)
    for path in folder.glob("*.bin"):
        path.write_bytes(b"nothing")
    assert len(problems(show(folder)[0])) == 8


def test_the_manifest_is_compared(tmp_path, show):
    folder = byte_set(tmp_path / "a", [ids("one"), ids("two", "three")], [ids("four")])
    good = {"made_by": prepare.MADE_BY, "tokenizer": {"name": "byte260", "vocab_size": 260, "sha256": None}, "splits": {
        "train": {"documents": 3, "tokens": 14, "bytes": 11, "shards": [
            {"file": path.name, "tokens": path.stat().st_size // 2 - 512, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
            for path in sorted(folder.glob("*_train_*"))]},
        "val": {"documents": 1, "tokens": 5, "bytes": 4, "decoded_bytes": 4}}}

    def say(**changes):
        manifest = json.loads(json.dumps(good))
        for path, value in changes.items():
            *keys, last = path.split("__")
            place = manifest
            for key in keys:
                place = place[int(key) if key.isdigit() else key]
            place[int(last) if last.isdigit() else last] = value
        (folder / "manifest.json").write_text(json.dumps(manifest))
        page, end = show(folder)
        assert (end is None) == (problems(page) == [])
        return "\n".join(problems(page))

    for maker in prepare.MAKERS:
        assert say(made_by=maker) == ""
        assert "val has 5 tokens, but manifest.json says 9" in say(made_by=maker, splits__val__tokens=9)
    assert "the tokenizer's vocab_size is 260, but manifest.json says 261" in say(tokenizer__vocab_size=261)
    assert "the tokenizer's sha256 is None, but manifest.json says 'ab'" in say(tokenizer__sha256="ab")
    assert "x_train_000000.bin has 4 tokens, but manifest.json says 5" in say(splits__train__shards__0__tokens=5)
    for part, key, found in (("train", "documents", 3), ("train", "tokens", 14), ("train", "bytes", 11),
                             ("val", "documents", 1), ("val", "tokens", 5), ("val", "decoded_bytes", 4)):
        for said in (9, None, "9"):
            wanted = f"  {part} has {found} {key}, but manifest.json says {said!r}"
            assert say(**{f"splits__{part}__{key}": said}) == wanted
    assert say(splits__train__shards__1__sha256="0") == "  x_train_000001.bin does not have the sha256 of manifest.json"
    assert "gone.bin is listed in manifest.json, but is not there" in say(splits__train__shards__0__file="gone.bin")
    assert say(splits__train=5).count("says None") == 3
    assert say(made_by="another", splits__val__tokens=9) == ""
    assert "000001" in say(made_by="another", splits__train__shards__1__sha256="0")


@pytest.mark.parametrize("content", [b"{no", b"\xff", b"[" * 100_000])
def test_an_unreadable_manifest_is_a_problem_and_others_are_none(tmp_path, show, content):
    folder = byte_set(tmp_path / "a", [ids("one")], [ids("two")])
    (folder / "manifest.json").write_bytes(content)
    page, end = show(folder, "--tokenizer", "byte260")
    assert end and len(problems(page)) == 1 and "manifest.json cannot be read" in page
    for other in ("[1]", "null", '{"splits": {"train": {"shards": 5}, "val": {"shards": [[]]}}}'):
        (folder / "manifest.json").write_text(other)
        assert row(show(folder, "--tokenizer", "byte260")[0], "documents") == ["1", "1"]


def test_mistakes_are_explained(tmp_path, show):
    folder = byte_set(tmp_path / "a", [ids("one")], [ids("two")])
    assert re.search("DATASET .*missing.* has no", show(tmp_path / "missing")[1])
    for name in (None, "tokenizer.model", 5):
        (folder / "manifest.json").write_text(json.dumps({"tokenizer": {"name": name}}))
        assert re.search("a has no tokenizer.model .* --tokenizer", show(folder)[1])
    for name, content in (("json", "{}"), ("json", '{"kind": "x", "bos": 1, "tokens": [5]}'), ("model", "x")):
        (folder / f"tokenizer.{name}").write_text(content)
        assert re.search(f"tokenizer.{name}' cannot be used: .* --tokenizer", show(folder)[1])
    assert "none.model' cannot be used" in show(folder, "--tokenizer", "none.model")[1]
    write_shard(folder / "y_train_000000.bin", ids("three"))
    assert "several data sets: x, y" in show(folder, "--tokenizer", "byte260")[0]
    assert "nowhere" in show(folder, "--tokenizer", "byte260", "--text", tmp_path / "nowhere" / "page.txt")[1]


def test_nothing_but_the_page_is_on_stdout(tmp_path, monkeypatch, show):
    folder = byte_set(tmp_path / "a", [ids("größe")], [ids("b")])
    page, _ = show(folder)
    monkeypatch.setattr(report, "BAR_BYTES", 0)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert show(folder) == (page, None)
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert show(folder) == ("", None)
    assert stdout.buffer.getvalue().decode() == page.replace("ö", "\\xf6").replace("ß", "\\xdf")


def test_the_page_as_a_file_and_the_picture(tmp_path, monkeypatch, show):
    folder = byte_set(tmp_path / "a", [ids("one", "twelve", "a")], [ids("b")])
    page, _ = show(folder, "--text", tmp_path / "page.txt")
    assert (tmp_path / "page.txt").read_text(encoding="utf-8") == page
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        again, end = show(folder, "--picture", tmp_path / "a.png")
        assert again == page and "pip install matplotlib" in end and not (tmp_path / "a.png").exists()
    pytest.importorskip("matplotlib")
    assert show(folder, "--picture", tmp_path / "a.png")[1] is None
    header = (tmp_path / "a.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n" and struct.unpack(">II", header[16:]) == (1600, 700)


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
    monkeypatch.setattr(report, "CHUNK", 7)
    run_prepare(monkeypatch, write_jsonl(tmp_path / "train.jsonl", texts), "--val-file",
                write_jsonl(tmp_path / "val.jsonl", TRAPS), "--tokenizer", spec, "--out", tmp_path / "set")
    manifest = json.loads((tmp_path / "set" / "manifest.json").read_text())
    splits = manifest["splits"]
    page, end = show(tmp_path / "set")
    assert end is None and "manifest.json: compared" in page
    # The training text has nothing that these models change.
    counted = splits["train"]["bytes"], splits["val"]["decoded_bytes"]
    assert row(page, "bytes of decoded text") == [f"{count:,}" for count in counted]
    differs = " (differs)" * (name not in ("sp300", "char"))
    assert row(page, "bytes of original text") == [f"{counted[0]:,}", f"{splits['val']['bytes']:,}{differs}"]
    assert row(page, "per decoded byte") == ["1.000000", f"{splits['val']['original_per_decoded_byte']:.6f}"]
    shares = [(label, row(page, label)) for label in ("byte-fallback tokens", "unknown tokens") if label in page]
    assert [label.split()[0] for label, _ in shares] == {
        "char": ["byte-fallback"], "no_fallback": ["unknown"]}.get(name, ["byte-fallback", "unknown"])
    assert ("0.000%" in shares[-1][1][1]) == (name in ("sp300", "dummy_prefix"))
    first = page.split("train, samples")[1].splitlines()[1]
    assert f"'{texts[13][:20]}" in first
    splits["val"]["decoded_bytes"] += 1
    (tmp_path / "set" / "manifest.json").write_text(json.dumps(manifest))
    assert "decoded_bytes, but manifest.json says" in problems(show(tmp_path / "set")[0])[0]


def test_tiktoken_vocabularies(tmp_path, monkeypatch, show):
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {**{bytes([byte]): byte for byte in range(256)}, b"th": 256, "é".encode(): 258}
    tiny = tiktoken.Encoding("tiny", pat_str=".+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 260})
    monkeypatch.setattr(tiktoken, "get_encoding", {"tiny": tiny}.__getitem__)
    folder = byte_set(tmp_path / "a", [[260, 256, 101, 258, 260, 256]], [[260, 195, 257]])
    page, end = show(folder, "--tokenizer", "tiny")
    assert end is None and row(page, "documents") == ["2", "1"] and row(page, "bytes of decoded text") == ["7", "1"]
    assert "most frequent in val: 0xC3 33.33%, #257 33.33%, #260 33.33%" in page and "'theé'" in page
    assert "unknown tokens" not in page and "fallback" not in page
