"""What the script of a record may not do: be long, import more than the allowed packages, or hide code.

A script is one readable file whose text shows its behaviour. These lists catch mistakes and simple tricks; they are not a
sandbox. A person reads script.diff before a record is merged.
"""

import ast
import re
import sys
from functools import lru_cache

from common import Findings

PACKAGES = {"torch", "numpy", "sentencepiece", "tiktoken"}
FORBIDDEN_NAMES = {"exec", "eval", "compile", "__import__", "__builtins__", "__loader__"}
FORBIDDEN_MODULES = {"builtins", "cffi", "code", "imp", "importlib", "marshal", "pickle", "pkgutil",
                     "runpy", "socket", "urllib", "http"}
FORBIDDEN_BEGINNINGS = ("torch.hub", "torch.package", "torch.utils.cpp_extension", "torch.ops.load_library",
                        "torch.classes.load_library", "torch.jit.load", "os.system", "os.popen", "os.fork",
                        "os.exec", "os.spawn", "os.posix_spawn")
MOST_LINES = 2500  # a person reads it; its bytes count anyway
LONGEST_LINE = 120  # a longer one can hide data
KEEP_THEIR_NAMES = {"ctypes", "os", "subprocess", "torch"}  # "import os as x" would hide the names above
# The only calls of these two modules that a script may make: their purpose, and the text of a whole call. It has no
# other parentheses, so that a call around it does not count again.
ALLOWED_CALLS = {
    "subprocess": ("nvidia-smi and scontrol",
                   re.compile(r"subprocess\.\w+\(\[?'(timeout \d+ )?(nvidia-smi|scontrol)( [\w -]*)?'([,\]][^()]*)?\)")),
    "ctypes": ("mallopt", re.compile(r"ctypes\.CDLL\(None\)\.mallopt\(-?\d+, -?\d+\)")),
}


@lru_cache  # many records have the same script
def check_script(source: str) -> tuple[str, ...]:
    """Return what is wrong with a script that must be one readable file: length, imports, what it can hide."""
    lines = len(source.splitlines())
    findings = Findings()
    findings.check(lines <= MOST_LINES, f"train_gpt.py has {lines:,} lines, more than {MOST_LINES:,}")
    longest = max(map(len, source.splitlines()), default=0)
    findings.check(longest <= LONGEST_LINE, f"train_gpt.py has a line of {longest} characters, more than {LONGEST_LINE}")
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return (*findings, f"train_gpt.py is not Python: {error}")
    imported, hidden = set(), set()
    spare = dict.fromkeys(ALLOWED_CALLS, 0)  # allowed calls less uses
    for node in nodes:
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
            hidden |= {f"{alias.name} as {alias.asname}" for alias in node.names
                       if alias.asname and alias.name in KEEP_THEIR_NAMES}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            imported |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            text = ast.unparse(node)
            module = text.rpartition(".")[2]  # torch.ctypes is ctypes, too
            if module in spare:
                spare[module] -= 1
            if text in FORBIDDEN_NAMES or text.startswith(FORBIDDEN_BEGINNINGS):
                hidden.add(text)
        elif isinstance(node, ast.keyword) and node.arg == "weights_only" and ast.unparse(node.value) != "True":
            hidden.add(f"weights_only={ast.unparse(node.value)}")
        elif isinstance(node, ast.Call):
            for module, (_, allowed) in ALLOWED_CALLS.items():
                spare[module] += bool(allowed.fullmatch(ast.unparse(node)))
    foreign = {name.split(".")[0] or "." for name in imported} - sys.stdlib_module_names - PACKAGES
    findings.check(not foreign, f"train_gpt.py imports {', '.join(sorted(foreign))}: code that is not counted")
    hidden |= {name for name in imported
               if name.split(".")[0] in FORBIDDEN_MODULES or name.startswith(FORBIDDEN_BEGINNINGS)}
    hidden |= {f"{module} for more than {purpose}" for module, (purpose, _) in ALLOWED_CALLS.items()
               if spare[module] < 0 or any(name.startswith(f"{module}.") for name in imported)}
    findings.check(not hidden, f"train_gpt.py uses {', '.join(sorted(hidden))}, which can hide code")
    return tuple(findings)
