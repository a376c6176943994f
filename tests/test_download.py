"""data/download.py with the real client of the hub, against a small hub in this process."""

import hashlib
import json
import os
import shutil
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from conftest import write_shard

pytest.importorskip("huggingface_hub")
import download  # noqa: E402
from huggingface_hub import constants  # noqa: E402

REPO = "willdepueoai/parameter-golf"
SHARDS = "datasets/datasets/fineweb10B_sp1024/fineweb_"
MODEL = "datasets/tokenizers/fineweb_1024_bpe.model"
MANIFEST = "datasets/manifest.json"
COMMIT = "c" * 40


class Handler(BaseHTTPRequestHandler):
    """Answers HEAD and GET of /datasets/OWNER/NAME/resolve/REVISION/PATH."""

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub = self.server.hub
        _, owner, name, _, revision, *path = self.path.strip("/").split("/")
        path = "/".join(path)
        error = hub.error
        if f"{owner}/{name}" not in hub.repositories:
            error = 404, "RepoNotFound"
        elif revision not in ("main", COMMIT):
            error = 404, "RevisionNotFound"
        elif path not in hub.repositories[f"{owner}/{name}"]:
            error = 404, "EntryNotFound"
        if error:
            return self.send(error[0], b"", {"X-Error-Code": error[1], "X-Repo-Commit": COMMIT})
        content = hub.repositories[f"{owner}/{name}"][path]
        is_large = path.endswith((".bin", ".model"))
        digest = hashlib.sha256(content).hexdigest() if is_large else hashlib.sha1(content).hexdigest()
        if self.command == "GET":
            hub.fetched.append(path)
            if hub.damaged.get(path, 0) > 0:
                hub.damaged[path] -= 1
                content = content[:-1] + bytes([content[-1] ^ 1])
        self.send(200, content, {"X-Repo-Commit": COMMIT, "ETag": f'"{digest}"'})

    def send(self, status, content, headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


class Hub:
    """What is published, what was fetched, and the faults that a test asks for."""

    def __init__(self, folder):
        def shard(seed):
            tokens = np.random.default_rng(seed).integers(0, 1024, 3000)
            return write_shard(folder / "shard.bin", tokens).read_bytes()

        self.files = {f"{SHARDS}val_{i:06d}.bin": shard(i) for i in range(2)}
        self.files |= {f"{SHARDS}train_{i:06d}.bin": shard(10 + i) for i in range(3)}
        self.files |= {MODEL: b"a model", "datasets/docs_selected.jsonl": b'{"text": "a"}\n',
                       "datasets/docs_selected.source_manifest.json": b"{}",
                       "datasets/datasets/fineweb10B_byte260/fineweb_val_000000.bin": shard(20)}
        self.manifest = {
            "tokenizers": [{"name": "bpe", "model_path": "tokenizers/fineweb_1024_bpe.model"}, {"name": "bytes"}],
            "datasets": [{"name": "fineweb10B_sp1024", "tokenizer_name": "bpe", "path": "datasets/fineweb10B_sp1024",
                          "vocab_size": 1024, "stats": {"files_val": 2, "files_train": 3}},
                         {"name": "fineweb10B_byte260", "tokenizer_name": "bytes",
                          "path": "datasets/fineweb10B_byte260", "vocab_size": 260, "stats": {"files_val": 1}}]}
        self.files[MANIFEST] = json.dumps(self.manifest).encode()
        gpt2 = {f"fineweb_{name}.bin": shard(30) for name in ("val_000000", "train_000001", "train_000002")}
        self.repositories = {REPO: self.files, "kjj0/fineweb10B-gpt2": gpt2}
        self.fetched, self.damaged, self.error = [], {}, None

    def content(self, *names):
        """The published files by their names alone."""
        return {path.rsplit("/", 1)[1]: self.files[path] for path in names}


def set_endpoint(monkeypatch, endpoint):
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    hub = Hub(tmp_path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.hub = hub
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    set_endpoint(monkeypatch, f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(download, "DATA", tmp_path / "data")
    yield hub
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the script; returns what it prints, or raises SystemExit with its message."""
    def run(*arguments, variant="sp1024"):
        monkeypatch.setattr(sys, "argv", ["download.py", "--variant", variant, *map(str, arguments)])
        download.main()
        return capsys.readouterr().out
    return run


def contents(folder):
    """All files below a folder, hidden ones too."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_default_places_and_a_second_run_fetches_only_what_is_new(hub, run, tmp_path):
    out = run("--train-shards", 2, "--documents")
    data = tmp_path / "data"
    folder = data / "datasets" / "fineweb10B_sp1024"
    wanted = [f"{SHARDS}{name}.bin" for name in ("val_000000", "val_000001", "train_000000", "train_000001")]
    assert contents(folder) == hub.content(*wanted)
    assert contents(data / "tokenizers") == hub.content(MODEL)
    assert set(contents(data / "documents")) == set(download.DOCUMENTS)
    assert out.splitlines()[-1] == (f"next: python train_gpt.py DATA_PATH={folder} "
                                    f"TOKENIZER_PATH={data}/tokenizers/fineweb_1024_bpe.model VOCAB_SIZE=1024")
    shutil.rmtree(tmp_path / "cache")  # what lies in its place is not fetched again even without the cache
    hub.fetched.clear()
    run("--train-shards", 3, "--documents")
    assert hub.fetched == [MANIFEST, f"{SHARDS}train_000002.bin"] and len(contents(folder)) == 5


def test_repositories_without_a_manifest(hub, run, tmp_path):
    assert run("--train-shards", 1, "--out", tmp_path / "gpt2", variant="gpt2").endswith(
        "TOKENIZER_PATH=gpt2 VOCAB_SIZE=50257\n")
    assert set(contents(tmp_path / "gpt2")) == {"fineweb_val_000000.bin", "fineweb_train_000001.bin"}
    del hub.files[MANIFEST]
    out = run("--train-shards", 1, "--out", tmp_path / "sp")
    wanted = [f"{SHARDS}val_000000.bin", f"{SHARDS}val_000001.bin", f"{SHARDS}train_000000.bin", MODEL]
    assert contents(tmp_path / "sp") == hub.content(*wanted)
    assert f"TOKENIZER_PATH={tmp_path}/sp/fineweb_1024_bpe.model VOCAB_SIZE=1024" in out
    with pytest.raises(SystemExit, match="--variant 'other' must be spN, byte260 or gpt2"):
        run(variant="other")


def test_a_built_in_tokenizer(hub, run, tmp_path):
    out = run("--train-shards", 0, "--out", tmp_path / "out", variant="byte260")
    assert out.endswith("TOKENIZER_PATH=byte260 VOCAB_SIZE=260\n")


@pytest.mark.parametrize("change, arguments, wanted", [
    (None, ["--train-shards", 9], f"{REPO} has no {SHARDS}train_000003.bin: check --train-shards"),
    (lambda hub: hub.files.pop(f"{SHARDS}val_000001.bin"), [], f"has no {SHARDS}val_000001.bin"),
    (lambda hub: hub.files.pop(MODEL), [], f"has no {MODEL}"),
    (None, ["--repo", "no/body"], "no such repository: check --repo"),
    (None, ["--revision", "v9"], "no such revision: check --revision"),
    (lambda hub: setattr(hub, "error", (403, "GatedRepo")), [], "accept its terms on its page and set HF_TOKEN"),
    (lambda hub: setattr(hub, "error", (500, "")), [], "the hub cannot be reached or refuses: check the network"),
    (lambda hub: hub.files.update({MANIFEST: b"<html>"}), [], "manifest.json cannot be used: JSONDecodeError"),
    (lambda hub: hub.files.update({MANIFEST: b'{"datasets": 3}'}), [], "manifest.json cannot be used: TypeError"),
    (None, ["--train-shards", -1], "--train-shards -1 must be 0"),
])
def test_errors_are_explained_before_anything_is_written(hub, run, tmp_path, change, arguments, wanted):
    if change:
        change(hub)
    with pytest.raises(SystemExit) as stop:
        run("--train-shards", 2, "--out", tmp_path / "out", *arguments)
    assert stop.value.code.startswith("download.py: ") and wanted in stop.value.code and "\n" not in stop.value.code
    assert not (tmp_path / "out").exists()


def test_unknown_variants_no_network_and_no_client(hub, run, monkeypatch):
    with pytest.raises(SystemExit, match="--variant 'sp9' must be one of sp1024, byte260"):
        run(variant="sp9")
    set_endpoint(monkeypatch, "http://127.0.0.1:1")
    with pytest.raises(SystemExit, match="the hub cannot be reached or refuses"):
        run()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SystemExit, match="pip install huggingface_hub"):
        run()


def test_a_damaged_download_is_repeated_once(hub, run, tmp_path):
    path = f"{SHARDS}train_000000.bin"
    hub.damaged[path] = 1
    run("--train-shards", 1, "--out", tmp_path / "good")
    assert contents(tmp_path / "good")["fineweb_train_000000.bin"] == hub.files[path]
    assert hub.fetched.count(path) == 2
    shutil.rmtree(tmp_path / "cache")
    hub.damaged[path] = 99
    with pytest.raises(SystemExit, match="published sha256"):
        run("--train-shards", 1, "--out", tmp_path / "bad")
    assert hub.fetched.count(path) == 4 and "fineweb_train_000000.bin" not in contents(tmp_path / "bad")


def test_wrong_headers_are_refused(hub, run, tmp_path):
    path = f"{SHARDS}val_000001.bin"
    hub.files[path] = write_shard(tmp_path / "shard.bin", [7] * 50, count=49).read_bytes()
    with pytest.raises(SystemExit, match="its header announces 49 tokens"):
        run("--train-shards", 0, "--out", tmp_path / "out")
    assert set(contents(tmp_path / "out")) == {"fineweb_val_000000.bin"}


def test_files_that_lie_in_out_are_never_replaced(hub, run, tmp_path):
    """They may be those of another data set, which train_gpt.py would mix with this one."""
    out = tmp_path / "out"
    run("--train-shards", 1, "--out", out)
    assert os.path.samefile(out / "fineweb_val_000000.bin",
                            next((tmp_path / "cache").rglob("snapshots/*/*/*/*/fineweb_val_000000.bin")))
    for content, wanted in ((hub.files[f"{SHARDS}val_000001.bin"], "published sha256"), (b"short", "has 5 bytes, not the published")):
        (out / "fineweb_val_000000.bin").unlink()
        (out / "fineweb_val_000000.bin").write_bytes(content)
        with pytest.raises(SystemExit, match=f"fineweb_val_000000.bin .*{wanted}.* delete it or choose another --out"):
            run("--train-shards", 1, "--out", out)
        assert (out / "fineweb_val_000000.bin").read_bytes() == content
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(SystemExit, match="holds a data set of prepare.py"):
        run("--out", tmp_path)


def test_offline_takes_what_is_in_the_cache(hub, run, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit, match=f"the cache \\(HF_HUB_OFFLINE is set\\) has no {SHARDS}val_000000.bin"):
        run("--out", tmp_path / "offline")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    run("--train-shards", 2, "--out", tmp_path / "online")
    hub.fetched.clear()
    hub.error = (500, "")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    run("--train-shards", 2, "--out", tmp_path / "offline")
    assert contents(tmp_path / "offline") == contents(tmp_path / "online") and not hub.fetched
    with pytest.raises(SystemExit, match=f"has no {SHARDS}train_000002.bin"):
        run("--train-shards", 3, "--out", tmp_path / "offline")
    cached = next((tmp_path / "cache").rglob("snapshots/*/*/*/*/fineweb_val_000000.bin")).resolve()
    cached.write_bytes(b"damaged")
    with pytest.raises(SystemExit, match="fineweb_val_000000.bin is not a token shard"):
        run("--train-shards", 0, "--out", tmp_path / "again")


def test_copies_where_links_are_impossible_and_a_clean_stop(hub, run, tmp_path, monkeypatch):
    def no_link(*arguments):
        raise OSError("another disk")

    monkeypatch.setattr(download.os, "link", no_link)
    run("--train-shards", 0, "--out", tmp_path / "out")
    assert set(contents(tmp_path / "out")) == {"fineweb_val_000000.bin", "fineweb_val_000001.bin",
                                               "fineweb_1024_bpe.model"}

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "place", interrupt)
    with pytest.raises(SystemExit, match="stopped; run the same command again"):
        run("--train-shards", 1, "--out", tmp_path / "out")
