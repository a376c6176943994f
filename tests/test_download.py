"""data/download.py with the real client of the hub, against a small hub on this machine."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from conftest import REPOSITORY, write_shard

pytest.importorskip("huggingface_hub")
import download  # noqa: E402

REPO, GPT2 = "willdepueoai/parameter-golf", "kjj0/fineweb10B-gpt2"
SHARDS = "datasets/datasets/fineweb10B_sp1024/fineweb_"
VAL, TRAIN = f"{SHARDS}val_00000{{}}.bin".format, f"{SHARDS}train_00000{{}}.bin".format
MODEL, MANIFEST = "datasets/tokenizers/fineweb_1024_bpe.model", "datasets/manifest.json"


class Handler(BaseHTTPRequestHandler):
    """The hub's answers. Large files are redirected to another origin, as the hub does."""

    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub, url = self.server.hub, urlsplit(self.path)
        parts = url.path.strip("/").split("/")
        if parts[0] == "cdn":
            return self.send_file("/".join(parts[1:3]), "/".join(parts[3:]))
        if len(parts) < 5:  # what the client asks for itself
            return self.send(404, {})
        owner, name, kind, revision, *path = parts[1 + (parts[0] == "api"):]
        repo, path = f"{owner}/{name}", "/".join(path)
        files = hub.repositories.get(repo)
        if hub.answers.get(path):
            return self.send(*hub.answers[path].pop(0))
        if files is None:
            return self.send(404, {"X-Error-Code": "RepoNotFound"})
        commit = hashlib.sha1("".join(hub.digest(files, path) for path in sorted(files)).encode()).hexdigest()
        if revision not in ("main", commit):
            return self.send(404, {"X-Error-Code": "RevisionNotFound"})
        if kind == "tree":
            return self.send_tree(files, path, int(parse_qs(url.query).get("cursor", ["0"])[0]))
        if path not in files or path in hub.missing:
            return self.send(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        digest = hub.digest(files, path)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest}"'}
        if not hub.is_large(path):
            return self.send_file(repo, path, headers)
        hub.tokens.append(("hub", self.headers["Authorization"]))
        location = f"http://127.0.0.1:{hub.servers[1].server_port}/cdn/{repo}/{path}"
        self.send(302, {**headers, "X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(files[path])),
                        "Location": location})

    def send_tree(self, files, folder, cursor):
        """Five entries a page."""
        hub, entries = self.server.hub, []
        for path in sorted(files):
            if path.startswith(f"{folder}/" if folder else ""):
                entry = {"type": "file", "path": path, "size": len(files[path]) + hub.lie.get(path, 0), "oid": "0" * 40}
                if hub.is_large(path):
                    entry["lfs"] = {"oid": hub.digest(files, path), "size": entry["size"], "pointerSize": 130}
                else:
                    entry["oid"] = hub.digest(files, path)
                entries.append(entry)
        if not entries:
            return self.send(404, {"X-Error-Code": "EntryNotFound"})
        entries.insert(0, {"type": "directory", "path": "some/folder", "size": 0, "oid": "1" * 40})
        following = f"http://{self.headers['Host']}{urlsplit(self.path).path}?recursive=true&cursor={cursor + 5}"
        headers = {"Link": f'<{following}>; rel="next"'} if len(entries) > cursor + 5 else {}
        self.send(200, headers, json.dumps(entries[cursor:cursor + 5]).encode())

    def send(self, status, headers, content=b""):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def send_file(self, repo, path, headers=None):
        """The file from where the Range begins, in blocks, up to its end or to a stop."""
        hub = self.server.hub
        content = hub.repositories[repo][path]
        start = int(self.headers.get("Range", "bytes=0-")[6:-1]) if hub.ranges else 0
        end = next((at for at in hub.stops.get(path, ()) if at > start), len(content))
        if hub.is_large(path):
            hub.tokens.append(("cdn", self.headers["Authorization"]))
        if self.command == "GET" and hub.corrupt.get(path, 0) > 0:
            hub.corrupt[path] -= 1
            content = content[:-1] + bytes([content[-1] ^ 1])
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        for name, value in {**(headers or {}), "Content-Length": str(len(content) - start)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        hub.requests.append((path, start, end - start))
        for at in range(start, end, 1 << 16):
            self.wfile.write(content[at:min(at + (1 << 16), end)])
            time.sleep(hub.pause)
        if end < len(content):
            hub.stops[path].remove(end)
            self.close_connection = True
            hub.stopped(path, end)


class Hub:
    """Two origins, what is published there, and the faults that a test asks for."""

    def __init__(self, folder):
        self.folder = folder
        self.repositories, self.requests, self.tokens, self.answers = {}, [], [], {}
        self.missing, self.corrupt, self.lie, self.stops = set(), {}, {}, {}
        self.pause, self.ranges, self.stopped = 0, True, lambda path, at: None
        self.servers = [ThreadingHTTPServer(("127.0.0.1", 0), Handler) for _ in range(2)]
        for server in self.servers:
            server.hub, server.daemon_threads = self, True
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def is_large(self, path):
        return path.endswith((".bin", ".model"))

    def digest(self, files, path):
        if self.is_large(path):
            return hashlib.sha256(files[path]).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(files[path]) + files[path]).hexdigest()

    def shard(self, tokens, seed, **wrong):
        path = self.folder / "shard.bin"
        values = np.random.default_rng(seed).integers(0, 1024, tokens)
        return write_shard(path, values, **wrong).read_bytes()

    def publish(self, tokens=3000):
        """Two validation and three training shards of sp1024, with a manifest of nested stats."""
        files = {VAL(i): self.shard(tokens, i) for i in range(2)}
        files |= {TRAIN(i): self.shard(tokens, 10 + i) for i in range(3)}
        files |= {MODEL: b"a model", "datasets/docs_selected.jsonl": b'{"text": "a"}\n',
                  "datasets/docs_selected.source_manifest.json": b"{}", "README.md": b"outside",
                  f"{SHARDS}val_bytes_000000.bin": self.shard(tokens, 99)}
        self.repositories[REPO] = files
        self.manifest = {
            "tokenizers": [{"name": "bpe", "kind": "sentencepiece_bpe", "vocab_size": 1024,
                            "model_path": "tokenizers/fineweb_1024_bpe.model"},
                           {"name": "bytes", "kind": "byte", "vocab_size": 260, "path": "tokenizers/b.json"}],
            "datasets": [{"name": "fineweb10B_sp1024", "tokenizer_name": "bpe", "path": "datasets/fineweb10B_sp1024",
                          "vocab_size": 1024, "stats": {"files": {"val": 2, "train": 3},
                                                        "tokens": {"val": 2 * tokens, "train": 3 * tokens}}},
                         {"name": "fineweb10B_byte260", "tokenizer_name": "bytes",
                          "path": "datasets/fineweb10B_byte260", "vocab_size": 260,
                          "stats": {"files_val": 1, "tokens_val": tokens}}]}
        files["datasets/datasets/fineweb10B_byte260/fineweb_val_000000.bin"] = self.shard(tokens, 20)
        self.write_manifest()
        return files

    def write_manifest(self):
        self.repositories[REPO][MANIFEST] = json.dumps(self.manifest).encode()

    def start(self, *arguments, script=REPOSITORY / "data" / "download.py", **environment):
        """The script as a process whose hub is this one."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
        clean |= {"HF_HOME": str(self.folder / "hf"), "HF_ENDPOINT": f"http://127.0.0.1:{self.servers[0].server_port}"}
        return subprocess.Popen([sys.executable, str(script), *map(str, arguments)], env={**clean, **environment},
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *arguments, **options):
        """Runs the script to its end; returns the process, with its output in .out and .err."""
        process = self.start(*arguments, **options)
        process.out, process.err = process.communicate(timeout=60)
        return process

    def fetch(self, out, *arguments, **options):
        """A run for sp1024 that has to succeed."""
        process = self.run("--variant", "sp1024", "--out", out, *arguments, **options)
        assert process.returncode == 0, process.err
        return process

    def fail(self, *arguments, **options):
        """A run that has to fail with one line; returns it."""
        process = self.run(*arguments, **options)
        lines = [line for line in process.err.splitlines() if line and not line.startswith("fetching")]
        assert process.returncode == 1 and process.out == "" and len(lines) == 1, process.err
        assert lines[0].startswith("download.py: ")
        return lines[0]


@pytest.fixture
def hub(tmp_path):
    hub = Hub(tmp_path)
    yield hub
    for server in hub.servers:
        server.shutdown()
        server.server_close()


def contents(folder):
    """All files below a folder, hidden ones too."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(*paths):
    return {path.rsplit("/", 1)[1] for path in paths}


def test_default_places_and_a_second_run_fetches_only_what_is_new(hub, tmp_path):
    files = hub.publish()
    script = tmp_path / "project" / "data" / "download.py"
    script.parent.mkdir(parents=True)
    for name in ("download.py", "prepare.py"):
        shutil.copy(REPOSITORY / "data" / name, script.parent)
    arguments = ["--variant", "sp1024", "--documents", "--train-shards"]
    first = hub.run(*arguments, "2", script=script, HF_TOKEN="hf_secret")
    assert first.returncode == 0, first.err
    data, out = script.parent, script.parent / "datasets" / "fineweb10B_sp1024"
    wanted = [VAL(0), VAL(1), TRAIN(0), TRAIN(1)]
    assert contents(out) == {path.rsplit("/", 1)[1]: files[path] for path in wanted}
    assert contents(data / "tokenizers") == {"fineweb_1024_bpe.model": b"a model"}
    assert set(contents(data / "documents")) == set(download.DOCUMENTS)
    size = sum(len(content) for folder in (out, data / "tokenizers", data / "documents")
               for content in contents(folder).values())
    assert f"7 files of {size:,} bytes in all, of which 0 were there already" in first.out
    assert "6,000 val and 6,000 train tokens" in first.out
    assert first.out.splitlines()[-1] == (
        f"next: python train_gpt.py DATA_PATH={out} TOKENIZER_PATH={data}/tokenizers/fineweb_1024_bpe.model "
        f"VOCAB_SIZE=1024")
    # The token is for the hub, not for where it redirects to.
    assert set(hub.tokens) == {("hub", "Bearer hf_secret"), ("cdn", None)}

    hub.requests.clear()
    second = hub.run(*arguments, "3", script=script)
    assert [path for path, _, _ in hub.requests] == [TRAIN(2)] and "of which 7 were there already" in second.out
    third = hub.run("--variant", "sp1024", "--train-shards", "0", script=script)
    assert "6,000 val and 0 train tokens" in third.out and "3 more .bin files" in third.out


def test_shards_of_another_set_in_out_are_refused(hub, tmp_path):
    """train_gpt.py would read them too; more shards of the same set are welcome."""
    files = {f"fineweb_{name}.bin": hub.shard(500 + i, i)
             for i, name in enumerate(("val_000000", "train_000001", "train_000002", "train_000003"))}
    hub.repositories[GPT2] = files
    arguments, out = ("--variant", "gpt2", "--out", tmp_path / "out", "--train-shards"), tmp_path / "out"
    assert hub.run(*arguments, "3").returncode == 0 and hub.run(*arguments, "1").returncode == 0
    (out / "fineweb_train_000003.bin").unlink()
    (out / "fineweb_train_000003.bin").write_bytes(files["fineweb_train_000002.bin"])
    process = hub.run(*arguments, "1")
    assert process.returncode and "fineweb_train_000003.bin is no shard of --variant gpt2" in process.err
    (out / "fineweb_train_000003.bin").rename(out / "mine_train_000000.bin")
    process = hub.run(*arguments, "1")
    assert process.returncode and "mine_train_000000.bin is no shard of --variant gpt2" in process.err


def test_repository_without_manifest(hub, tmp_path):
    files = {f"fineweb_{name}.bin": hub.shard(500 + i, i)
             for i, name in enumerate(("val_000000", "train_000001", "train_000002", "train_000003"))}
    hub.repositories[GPT2] = files
    process = hub.run("--variant", "gpt2", "--train-shards", "2", "--out", tmp_path / "out")
    assert set(contents(tmp_path / "out")) == set(files) - {"fineweb_train_000003.bin"}, process.err
    assert process.out.endswith("TOKENIZER_PATH=gpt2 VOCAB_SIZE=50257\n")
    hub.publish()
    del hub.repositories[REPO][MANIFEST]
    process = hub.fetch(tmp_path / "sp", "--train-shards", "1")
    assert set(contents(tmp_path / "sp")) == names(VAL(0), VAL(1), TRAIN(0), MODEL)
    assert f"TOKENIZER_PATH={tmp_path}/sp/fineweb_1024_bpe.model VOCAB_SIZE=1024" in process.out


def test_built_in_tokenizer_and_flat_stats(hub, tmp_path):
    hub.publish()
    process = hub.run("--variant", "byte260", "--train-shards", "0", "--out", tmp_path / "out")
    assert process.out.endswith("TOKENIZER_PATH=byte260 VOCAB_SIZE=260\n"), process.err
    hub.manifest["datasets"][1]["stats"]["tokens_val"] += 1
    hub.write_manifest()
    line = hub.fail("--variant", "byte260", "--train-shards", "0", "--out", tmp_path / "out")
    assert "have 3000 tokens, but its manifest.json says 3001" in line


def test_manifest_errors(hub, tmp_path):
    hub.publish()
    def error(content):
        (tmp_path / "manifest.json").write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(ValueError, match="^manifest.json of somewhere ") as raised:
            download.read_manifest(tmp_path / "manifest.json", "somewhere", "sp1024")
        return str(raised.value)

    def changed(key, **changes):
        manifest = json.loads(json.dumps(hub.manifest))
        manifest[key][0].update(changes)
        return manifest

    assert "is no JSON" in error("<html>")
    for wrong in ([], {"datasets": 3}, {"datasets": hub.manifest["datasets"]}, changed("tokenizers", name="other")):
        assert "lacks a key or has a wrong value" in error(wrong)
    for stats in ({"files": {"val": "two"}}, {"files": 2}, {"tokens_val": 1.5}):
        assert "lacks a key or has a wrong value" in error(changed("datasets", stats=stats))
    for path in ("../up", "/etc/passwd", "a/../../b", "C:\\b", "a//b", ""):
        assert f"has {path!r}, which is no path within its folder" in error(changed("datasets", path=path))
    for path in ("../up.model", "/up.model"):
        assert f"has {path!r}, which is no path within its folder" in error(changed("tokenizers", model_path=path))


def answer(path, status, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda hub: hub.answers.update({path: [(status, headers)] * 9})


@pytest.mark.parametrize("change, arguments, wanted", [
    (None, ["--variant", "sp9"], "--variant 'sp9' is not in " + REPO + " at 'main'; it has byte260, sp1024"),
    (None, ["--train-shards", "9"], f"has 3 train shards, not 9: it lacks {TRAIN(3)}"),
    (lambda hub: hub.repositories[REPO].pop(VAL(1)), [], f"has 1 val shards, not 2: it lacks {VAL(1)}"),
    (lambda hub: hub.repositories[REPO].pop(MODEL), [], f"lacks {MODEL}"),
    (None, ["--repo", "no/body"], "no such repository, or not for you: check --repo"),
    (None, ["--revision", "v9"], "at 'v9' could not be fetched: no such revision: check --revision"),
    (None, ["--folder", "elsewhere"], "the list of elsewhere of"),
    (answer("datasets", 403, X_Error_Code="GatedRepo"), [], "accept its terms on its page and set HF_TOKEN"),
    (answer("datasets", 403), [], "a private one needs HF_TOKEN"),
    (answer("datasets", 200), [], "is not what a hub sends"),
    (lambda hub: hub.missing.add(TRAIN(1)), [], f"{TRAIN(1)} of {REPO} at 'main' could not be fetched: it is not"),
])
def test_one_line_for_each_error(hub, tmp_path, change, arguments, wanted):
    hub.publish()
    if change:
        change(hub)
    given = ["--variant", "sp1024", "--train-shards", "2", "--out", tmp_path / "out"]
    assert wanted in hub.fail(*given, *arguments)
    # What was right before the error is there, and nothing else.
    assert set(contents(tmp_path / "out")) <= names(VAL(0), VAL(1), TRAIN(0))


def test_unreachable_hub_and_missing_client(hub, tmp_path):
    arguments = ["--variant", "sp1024", "--out", tmp_path / "out"]
    assert "could not be fetched: " in hub.fail(*arguments, HF_ENDPOINT="nothing://127.0.0.1")
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError('not here')\n")
    line = hub.fail(*arguments, PYTHONPATH=str(tmp_path))
    assert line.endswith("is needed: pip install huggingface_hub (not here)")


def test_refuses_a_folder_of_prepare_and_a_negative_number(tmp_path, monkeypatch):
    arguments = ["download.py", "--variant", "sp1024", "--out", str(tmp_path), "--train-shards"]
    monkeypatch.setattr(sys, "argv", [*arguments, "-1"])
    with pytest.raises(SystemExit, match="^download.py: --train-shards -1 has to be 0 "):
        download.main()
    (tmp_path / "manifest.json").write_text(json.dumps({"made_by": download.MAKERS[0]}))
    monkeypatch.setattr(sys, "argv", [*arguments, "1"])
    with pytest.raises(SystemExit, match="holds a data set of prepare.py"):
        download.main()


@pytest.mark.parametrize("times", [1, 99])
def test_corrupt_bytes_are_fetched_again_once(hub, tmp_path, times):
    files, out = hub.publish(), tmp_path / "out"
    hub.corrupt[TRAIN(0)] = times
    if times == 1:
        hub.fetch(out, "--train-shards", "1")
        assert contents(out)[TRAIN(0).rsplit("/", 1)[1]] == files[TRAIN(0)]
    else:
        line = hub.fail("--variant", "sp1024", "--out", out, "--train-shards", "1")
        assert f"{TRAIN(0)} of {REPO} at 'main' is damaged: it has sha256 " in line
        assert f", not {hub.digest(files, TRAIN(0))}" in line
        assert set(contents(out)) == names(VAL(0), VAL(1))
        kept = contents(tmp_path / "hf" / "hub")
        assert not any(hub.digest(files, TRAIN(0)) in name for name in kept if not name.startswith(".locks/"))
    assert [path for path, _, _ in hub.requests].count(TRAIN(0)) == 2


def test_wrong_headers(hub, tmp_path):
    path = tmp_path / "x.bin"
    def problem(tokens=50, **wrong):
        write_shard(path, [7] * tokens, **wrong)
        return download.find_problem(path, download.Remote("x.bin", path.stat().st_size, None))

    assert problem() == ""
    wanted = "a shard of that size would have [20240520, 1, 50]"
    for wrong in ({"magic": 1}, {"version": 2}, {"count": 49}):
        assert problem(**wrong).endswith(wanted)
    assert "1024 bytes and the header [20240520, 1, 0]" in problem(tokens=0)
    path.write_bytes(b"short")
    assert "5 bytes and the header [" in download.find_problem(path, download.Remote("x.bin", 5, None))
    hub.publish()[VAL(1)] = hub.shard(3000, 1, count=2999)
    line = hub.fail("--variant", "sp1024", "--train-shards", "0", "--out", tmp_path / "out")
    assert f"{VAL(1)} of {REPO} at 'main' is damaged: it has {1024 + 6000} bytes and the header " in line
    assert set(contents(tmp_path / "out")) == names(VAL(0))


def test_wrong_size(hub, tmp_path):
    hub.publish()
    hub.lie[VAL(0)], hub.manifest["datasets"][0]["stats"] = -2, {}
    hub.write_manifest()
    size = 1024 + 2 * 3000
    line = hub.fail("--variant", "sp1024", "--train-shards", "0", "--out", tmp_path / "out")
    assert f"it has {size} bytes, not {size - 2}" in line
    assert contents(tmp_path / "out") == {}


def test_offline_takes_what_is_in_the_cache(hub, tmp_path):
    files = hub.publish()
    arguments = ["--variant", "sp1024", "--out", tmp_path / "offline", "--train-shards"]
    line = hub.fail(*arguments, "1", HF_HUB_OFFLINE="1")
    assert f"in the cache (HF_HUB_OFFLINE is set) has 0 val shards, not 1: it lacks {VAL(0)}" in line
    hub.fetch(tmp_path / "online", "--train-shards", "2")
    hub.requests.clear()
    hub.fetch(tmp_path / "offline", "--train-shards", "2", HF_HUB_OFFLINE="1")
    assert contents(tmp_path / "offline") == contents(tmp_path / "online") and not hub.requests
    assert os.path.samefile(*(tmp_path / folder / "fineweb_val_000000.bin" for folder in ("offline", "online")))
    line = hub.fail(*arguments, "3", HF_HUB_OFFLINE="1")
    assert f"has 2 train shards, not 3: it lacks {TRAIN(2)}" in line
    # Damage in the cache, and so in its other names, is found and mended.
    blob = tmp_path / "hf" / "hub" / "datasets--willdepueoai--parameter-golf" / "blobs" / hub.digest(files, VAL(0))
    blob.write_bytes(files[VAL(0)][::-1])
    assert f"{VAL(0)} of {REPO}" in hub.fail(*arguments, "1", HF_HUB_OFFLINE="1")
    hub.fetch(tmp_path / "online", "--train-shards", "2")
    assert contents(tmp_path / "online")["fineweb_val_000000.bin"] == files[VAL(0)]


def test_ten_interruptions_continue_where_they_were(hub, tmp_path):
    files, out, blobs = hub.publish(tokens=400_000), tmp_path / "out", tmp_path / "hf" / "hub"
    slack, hub.pause = 1 << 17, 0.002  # a killed process may not have written all that it received
    choose = random.Random(20240520)
    paths = [VAL(0), VAL(1), TRAIN(0)]
    points = sorted((choose.choice(paths), choose.randrange(slack, len(files[VAL(0)]))) for _ in range(10))
    hub.stops = {path: [at for name, at in points if name == path] for path in paths}
    kills = {point for point in points[::2]}

    def stopped(path, at):
        """Kills the process at every other point; elsewhere only the connection ends."""
        if (path, at) not in kills:
            return
        limit = time.monotonic() + 10  # it has to have had the time to write what it received
        while sum(p.stat().st_size for p in blobs.rglob("*.incomplete")) < at - slack // 2 and time.monotonic() < limit:
            time.sleep(0.01)
        hub.process.send_signal(signal.SIGKILL)

    hub.stopped, killed = stopped, 0
    for _ in range(len(points) + 1):
        hub.process = hub.start("--variant", "sp1024", "--train-shards", "1", "--out", out)
        _, error = hub.process.communicate(timeout=60)
        if hub.process.returncode == 0:
            break
        assert hub.process.returncode == -signal.SIGKILL, error
        assert set(contents(out)) <= names(*paths, MODEL)
        killed += 1
    assert killed == len(kills) == 5 and not any(hub.stops.values())
    assert contents(out) == {path.rsplit("/", 1)[1]: files[path] for path in (*paths, MODEL)}
    # The request after an interruption begins where that was, not at 0.
    for path in paths:
        starts = [start for name, start, _ in hub.requests if name == path]
        assert len(starts) == 1 + sum(name == path for name, _ in points)
        for start, (_, at) in zip(starts[1:], [point for point in points if point[0] == path]):
            assert at - slack <= start <= at and start > 0
    sent, needed = (sum(sizes) for sizes in ([size for name, _, size in hub.requests if name in paths],
                                             [len(files[path]) for path in paths]))
    again = sum(at for _, at in points)  # what starting again would have cost
    assert needed <= sent < needed + again / 4


def test_interrupt_key_and_a_server_without_ranges(hub, tmp_path):
    files, out = hub.publish(tokens=200_000), tmp_path / "out"
    hub.stops, hub.ranges = {VAL(0): [300_000], VAL(1): [200_000]}, False
    hub.answers[VAL(0)] = [(503, {})]  # once; the client asks again
    hub.stopped = lambda path, at: path == VAL(1) and process.send_signal(signal.SIGINT)
    process = hub.start("--variant", "sp1024", "--train-shards", "0", "--out", out)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1 and error.endswith("download.py: stopped; the same command continues\n"), error
    assert "Traceback" not in error
    assert contents(out) == {"fineweb_val_000000.bin": files[VAL(0)]}
    assert [path for path, _, _ in hub.requests].count(VAL(0)) == 2
    hub.fetch(out, "--train-shards", "0")
    assert contents(out)["fineweb_val_000001.bin"] == files[VAL(1)]


def test_two_downloads_into_one_folder(hub, tmp_path):
    files, out = hub.publish(tokens=200_000), tmp_path / "out"
    hub.pause = 0.01
    both = [hub.start("--variant", "sp1024", "--train-shards", "2", "--out", out) for _ in range(2)]
    for process in both:
        _, error = process.communicate(timeout=60)
        assert process.returncode == 0, error
    wanted = [VAL(0), VAL(1), TRAIN(0), TRAIN(1), MODEL]
    assert contents(out) == {path.rsplit("/", 1)[1]: files[path] for path in wanted}
    assert all([path for path, _, _ in hub.requests].count(path) == 1 for path in wanted)


def test_copies_where_links_are_impossible(tmp_path, monkeypatch):
    def no_link(*arguments):
        raise OSError("another disk")
    monkeypatch.setattr(download.os, "link", no_link)
    (tmp_path / "blob").write_bytes(b"new")
    for _ in range(2):  # also over a file that is there
        download.put(tmp_path / "blob", tmp_path / "out" / "name")
        assert contents(tmp_path / "out") == {"name": b"new"}
    assert not os.path.samefile(tmp_path / "blob", tmp_path / "out" / "name")
