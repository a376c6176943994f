"""What keeps the one file one readable file."""

import ast
import subprocess
import sys

import compile_for_gpu
import pytest
from conftest import REPOSITORY

SOURCE = (REPOSITORY / "train_gpt.py").read_text(encoding="utf-8")
TREE = ast.parse(SOURCE)


def test_it_stays_under_its_cap():
    assert len(SOURCE.splitlines()) < 1500
    assert max(map(len, SOURCE.splitlines())) <= 100


def test_it_needs_nothing_beyond_four_packages():
    modules = set()
    for node in ast.walk(TREE):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module.split(".")[0])
    assert modules - sys.stdlib_module_names <= {"torch", "numpy", "sentencepiece", "tiktoken"}


def test_functions_are_short_and_documented():
    for node in ast.walk(TREE):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, node.name
    classes = [node for node in TREE.body if isinstance(node, ast.ClassDef)]
    methods = [node for owner in classes for node in owner.body if isinstance(node, ast.FunctionDef)]
    for node in [*TREE.body, *methods]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("__") and node.name != "forward":
            assert ast.get_docstring(node), node.name


def test_a_section_begins_with_its_idea_and_names_nothing_that_comes_later():
    lines = SOURCE.splitlines()
    assert all(lines[i + 1].startswith("# ") for i, line in enumerate(lines) if line.startswith("# ---- "))
    defined = {node.name: node.lineno for node in TREE.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(TREE):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in defined:
            assert defined[node.id] <= node.lineno, (node.id, node.lineno)


def test_importing_it_touches_no_gpu_and_prints_nothing():
    code = ("import torch, torch.cuda\n"
            "def fail(*a, **k): raise AssertionError('CUDA was touched')\n"
            "torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = fail\n"
            "import train_gpt")
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


@pytest.mark.slow
@pytest.mark.skipif(bool(compile_for_gpu.missing()), reason=compile_for_gpu.missing())
def test_the_graph_compiles_for_an_h100_and_moves_no_more_bytes():
    command = [sys.executable, str(REPOSITORY / "records" / "lab" / "compile_for_gpu.py"), "default-4096"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr


