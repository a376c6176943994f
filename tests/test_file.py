"""What keeps the one file one readable file."""

import subprocess
import sys

from conftest import REPOSITORY

SOURCE = (REPOSITORY / "train_gpt.py").read_text(encoding="utf-8")


def test_it_stays_under_its_cap():
    assert len(SOURCE.splitlines()) < 1500
    assert max(map(len, SOURCE.splitlines())) <= 100


def test_importing_it_touches_no_gpu_and_prints_nothing():
    code = ("import torch, torch.cuda\n"
            "def fail(*a, **k): raise AssertionError('CUDA was touched')\n"
            "torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = fail\n"
            "import train_gpt")
    result = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
