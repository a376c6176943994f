"""data/download.py with the real client of the hub, against a small hub in this process."""

import hashlib
import json
import os
import shutil
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from conftest import REPOSITORY, write_shard

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
        self.files |= {MODEL: b"a model", "datasets/datasets/fineweb10B_byte260/fineweb_val_000000.bin": shard(20)}
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
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the client waits before it tries again
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
    out = run("--train-shards", 2)
    data = tmp_path / "data"
    folder = data / "datasets" / "fineweb10B_sp1024"
    wanted = [f"{SHARDS}{name}.bin" for name in ("val_000000", "val_000001", "train_000000", "train_000001")]
    assert contents(folder) == hub.content(*wanted)
    assert contents(data / "tokenizers") == hub.content(MODEL)
    model = data / "tokenizers" / "fineweb_1024_bpe.model"  # artifacts keep relative paths only
    assert out.splitlines()[-1] == (f"next: python {os.path.relpath(REPOSITORY / 'train_gpt.py')} "
                                    f"DATA_PATH={os.path.relpath(folder)} TOKENIZER_PATH={os.path.relpath(model)} VOCAB_SIZE=1024")
    shutil.rmtree(tmp_path / "cache")  # what lies in its place is not fetched again even without the cache
    hub.fetched.clear()
    run("--train-shards", 3)
    assert hub.fetched == [MANIFEST, f"{SHARDS}train_000002.bin"] and len(contents(folder)) == 5


def test_gpt2_has_a_repository_of_its_own_whose_training_shards_are_numbered_from_1(hub, run, tmp_path):
    assert run("--train-shards", 1, "--out", tmp_path / "gpt2", variant="gpt2").endswith(
        "TOKENIZER_PATH=gpt2 VOCAB_SIZE=50257\n")
    assert set(contents(tmp_path / "gpt2")) == {"fineweb_val_000000.bin", "fineweb_train_000001.bin"}


def test_a_built_in_tokenizer(hub, run, tmp_path):
    out = run("--train-shards", 0, "--out", tmp_path / "out", variant="byte260")
    assert out.endswith("TOKENIZER_PATH=byte260 VOCAB_SIZE=260\n")


@pytest.mark.parametrize("change, arguments, wanted", [
    (None, ["--train-shards", 9], f"Entry Not Found for url: .*/{SHARDS}train_000003.bin"),
    (lambda hub: hub.files.pop(f"{SHARDS}val_000001.bin"), [], f"Entry Not Found for url: .*/{SHARDS}val_000001.bin"),
    (lambda hub: hub.files.pop(MODEL), [], f"Entry Not Found for url: .*/{MODEL}"),
    (None, ["--repo", "no/body"], "Repository Not Found for url"),
    (None, ["--revision", "v9"], "Revision Not Found for url"),
    (lambda hub: setattr(hub, "error", (403, "GatedRepo")), [], "GatedRepoError: "),
    (lambda hub: setattr(hub, "error", (500, "")), [], "cannot find the requested file.* in the local cache"),
    (lambda hub: hub.files.update({MANIFEST: b"<html>"}), [], "JSONDecodeError: "),
    (None, ["--train-shards", -1], "--train-shards -1 must be 0"),
])
def test_errors_are_explained_in_one_line(hub, run, tmp_path, change, arguments, wanted):
    if change:
        change(hub)
    with pytest.raises(SystemExit, match=f"^download.py: .*{wanted}.*$"):
        run("--train-shards", 2, "--out", tmp_path / "out", *arguments)


def test_unknown_variants_no_network_and_no_client(hub, run, monkeypatch):
    with pytest.raises(SystemExit, match="--variant 'sp9' must be gpt2 or one of sp1024, byte260"):
        run(variant="sp9")
    set_endpoint(monkeypatch, "http://127.0.0.1:1")
    with pytest.raises(SystemExit, match="check your connection"):
        run()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SystemExit, match="pip install huggingface_hub"):
        run()


def test_a_damaged_download_is_named(hub, run, tmp_path):
    path = f"{SHARDS}train_000000.bin"
    hub.damaged[path] = 1
    with pytest.raises(SystemExit, match="cache/.* does not have the published sha256: delete it") as stop:
        run("--train-shards", 1, "--out", tmp_path / "out")
    assert "fineweb_train_000000.bin" not in contents(tmp_path / "out")
    os.unlink(stop.value.code.split()[2])
    run("--train-shards", 1, "--out", tmp_path / "out")
    assert contents(tmp_path / "out")["fineweb_train_000000.bin"] == hub.files[path]


def test_wrong_headers_are_refused(hub, run, tmp_path):
    path = f"{SHARDS}val_000001.bin"
    hub.files[path] = write_shard(tmp_path / "shard.bin", [7] * 50, count=49).read_bytes()
    with pytest.raises(SystemExit, match="its header announces 49 tokens"):
        run("--train-shards", 0, "--out", tmp_path / "out")
    assert "fineweb_val_000001.bin" not in contents(tmp_path / "out")


def test_files_that_lie_in_out_are_never_replaced(hub, run, tmp_path):
    """They may be those of another data set, which train_gpt.py would mix with this one."""
    out = tmp_path / "out"
    run("--train-shards", 1, "--out", out)
    assert os.path.samefile(out / "fineweb_val_000000.bin",
                            next((tmp_path / "cache").rglob("snapshots/*/*/*/*/fineweb_val_000000.bin")))
    for content in (hub.files[f"{SHARDS}val_000001.bin"], b"short"):
        (out / "fineweb_val_000000.bin").unlink()
        (out / "fineweb_val_000000.bin").write_bytes(content)
        with pytest.raises(SystemExit, match="fineweb_val_000000.bin .*published sha256: delete it, or choose another --out"):
            run("--train-shards", 1, "--out", out)
        assert (out / "fineweb_val_000000.bin").read_bytes() == content


def test_offline_takes_what_is_in_the_cache(hub, run, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SystemExit, match="LocalEntryNotFoundError: .*cache"):
        run("--out", tmp_path / "offline")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    run("--train-shards", 2, "--out", tmp_path / "online")
    hub.fetched.clear()
    hub.error = (500, "")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for _ in range(2):
        run("--train-shards", 2, "--out", tmp_path / "offline")
    assert contents(tmp_path / "offline") == contents(tmp_path / "online") and not hub.fetched
    with pytest.raises(SystemExit, match="LocalEntryNotFoundError: .*cache"):
        run("--train-shards", 3, "--out", tmp_path / "offline")
    shard = tmp_path / "offline" / "fineweb_val_000000.bin"  # a link to the cache
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(SystemExit, match="fineweb_val_000000.bin is damaged"):
        run("--train-shards", 0, "--out", tmp_path / "offline")
    with pytest.raises(SystemExit, match="does not have the published sha256"):
        run("--train-shards", 0, "--out", tmp_path / "again")


def test_copies_where_links_are_impossible_and_a_clean_stop(hub, run, tmp_path, monkeypatch, capsys):
    def no_link(*arguments):
        raise OSError("another disk")

    monkeypatch.setattr(download.os, "link", no_link)
    run("--train-shards", 0, "--out", tmp_path / "out")
    assert set(contents(tmp_path / "out")) == {"fineweb_val_000000.bin", "fineweb_val_000001.bin",
                                               "fineweb_1024_bpe.model"}

    def interrupt(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(download, "link", interrupt)
    with pytest.raises(SystemExit, match="^130$"):
        run("--train-shards", 1, "--out", tmp_path / "out")
    assert "stopped; run the same command again" in capsys.readouterr().err
