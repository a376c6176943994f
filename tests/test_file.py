"""What keeps the one file one readable file."""

import ast
import subprocess
import sys

import compile_for_gpu
import pytest
from conftest import REPOSITORY

SOURCE = (REPOSITORY / "train_gpt.py").read_text(encoding="utf-8")


def test_it_stays_under_its_cap():
    assert len(SOURCE.splitlines()) < 1500
    assert max(map(len, SOURCE.splitlines())) <= 100


def test_it_needs_nothing_beyond_four_packages():
    modules = set()
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module.split(".")[0])
    assert modules - sys.stdlib_module_names <= {"torch", "numpy", "sentencepiece", "tiktoken"}


def test_importing_it_touches_no_gpu_and_prints_nothing():
    code = ("import torch, torch.cuda\n"
            "def fail(*a, **k): raise AssertionError('CUDA was touched')\n"
            "torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = fail\n"
            "import train_gpt")
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


@pytest.mark.slow
@pytest.mark.skipif(bool(compile_for_gpu.missing()), reason=compile_for_gpu.missing())
def test_the_graph_compiles_for_an_h100():
    command = [sys.executable, str(REPOSITORY / "records" / "lab" / "compile_for_gpu.py"), "default-4096"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
