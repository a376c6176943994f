"""Let Inductor write the kernels of a training step for an H100 on a machine that has none; count them and their bytes.

    python tools/compile_for_gpu.py                           every case, as in tests/kernels.json
    python tools/compile_for_gpu.py default-4096 NUM_LAYERS=2    one case, with another setting

It needs PyTorch 2.13.0, of which the build for CPUs will do, and `pip install triton==3.7.1` (0.7 GB). It traces forward and
backward of one micro-batch with fake tensors and lowers them for compute capability 9.0, as one graph. Attention is an opaque
kernel in the graph, as PyTorch's attention kernels are to Inductor. Nothing is executed: this shows what the graph reads and
writes, not that its results are right. The milliseconds are calculated from the rates below.
"""

import argparse
import collections
import ctypes
import importlib.util
import json
import math
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import train_gpt  # noqa: E402
from settings import PRESETS  # noqa: E402

TORCH = "2.13.0"  # Inductor's interfaces change with each release
CASES = {  # rows of a micro-batch, one rank's share on 8 GPUs, and settings
    "default-4096": (12, ""),
    "preset-8gpu": (48, f"@{PRESETS}/h100_8gpu_16mb.env"),
    "preset-1gpu": (8, f"@{PRESETS}/h100_1gpu_16mb.env"),
    "124M": (8, "NUM_LAYERS=12 MODEL_DIM=768 NUM_HEADS=12 NUM_KV_HEADS=12 MLP_MULT=4 VOCAB_SIZE=50304 TRAIN_SEQ_LEN=1024"),
}
# What kernels reach on an H100, in FLOP/s, bytes/s and seconds a launch; those of attention are measured. With these, a step of
# one rank of eight takes 37.2 ms at the defaults and 90.5 with preset-8gpu and LANES=0; without transfers, 36.2 and 91.8 were
# measured.
PRODUCT = 600e12
MEMORY = 2.7e12
LAUNCH = 2e-6
ATTENTION = {"flash": (255e12, 213e12), "cudnn": (396e12, 355e12)}  # causal, width 64: forward, backward
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, L2_cache_size=50 << 20, gcnArchName="")


class Planned(Exception):
    """Raised in place of loading the generated code, which would need a GPU."""


def pretend_to_have_an_h100() -> None:
    """Answer what Inductor and Triton ask of the device and its driver before they compile, in this process."""
    os.environ.update(TORCHINDUCTOR_COMPILE_THREADS="1", TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
    # A build for CPUs has no C++ object that keeps track of the current CUDA device. That of the meta device does nothing.
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 21).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14  # c10::DeviceType
    guards[cuda] = guards[meta]
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    def answer(value):
        return lambda *_, **__: value

    answers = {"get_device_properties": H100, "get_compute_capability": 90, "is_available": True, "current_device": 0,
               "device_count": 1, "is_triton_capable": True, "raise_if_triton_unavailable": None,
               "is_bf16_supported": True, "get_raw_stream": 0}
    for name, value in answers.items():
        setattr(CudaInterface, name, staticmethod(answer(value)))
    CudaInterface.Worker.get_device_properties = staticmethod(answer(H100))
    CudaInterface.Worker.current_device = staticmethod(answer(0))
    for name, value in {"get_device_properties": H100, "get_device_capability": (9, 0), "current_device": 0,
                        "device_count": 1, "get_device_name": H100.name}.items():
        setattr(torch.cuda, name, answer(value))
    driver = type("Driver", (), {"get_current_target": answer(GPUTarget("cuda", 90, 32)),
                                 "get_current_device": answer(0), "get_current_stream": answer(0)})
    triton.runtime.driver.set_active(driver())
    triton_helpers.set_driver_to_gpu = lambda: None


def define_attention() -> None:
    """Define attention as an operator that Inductor does not look into. Outputs are laid out as flash's are."""
    def like(t):
        return t.new_empty(t.size(0), t.size(2), t.size(1), t.size(3)).transpose(1, 2)

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    def backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
                 lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        raise NotImplementedError

    attention = torch.library.custom_op("plan::attention", forward, mutates_args=())
    attention_backward = torch.library.custom_op("plan::attention_backward", backward, mutates_args=())
    attention.register_fake(lambda q, k, v: (like(q), q.new_empty(q.shape[:3], dtype=torch.float32)))
    attention_backward.register_fake(lambda grad, q, k, v, out, lse: tuple(map(like, (q, k, v))))
    attention.register_autograd(
        lambda ctx, grad, _: torch.ops.plan.attention_backward(grad, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output))


def bytes_of(layout_of) -> int:
    """The bytes of an Inductor buffer or view."""
    return math.prod(int(n) for n in layout_of.get_size()) * layout_of.get_dtype().itemsize


def traffic(node) -> int:
    """The bytes that a scheduled node reads and writes, each element once."""
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.virtualized import V
    if type(node).__name__ == "ExternKernelSchedulerNode":
        if type(node.node).__name__ == "MultiOutput":  # counted with the kernel that has several
            return 0
        outputs = getattr(node.node, "outputs", None) or [node.node]
        tensors = [t for t in (*node.node.inputs, *outputs) if hasattr(t, "get_size")]
        return sum(bytes_of(t) for t in tensors)
    inside = set() if not hasattr(node, "snodes") else {
        name for part in node.snodes for name in part.get_buffer_names()
        if all(user.node in node.snodes for user in V.graph.scheduler.name_to_buf[name].users)}
    elements = collections.Counter()
    for dep in node.read_writes.reads | node.read_writes.writes:
        if isinstance(dep, MemoryDep) and dep.name not in inside:
            size = int(V.graph.sizevars.optimization_hint(dep.get_numel(), fallback=0))
            elements[dep.name] = max(elements[dep.name], size)  # its other reads are of the same elements
    total = 0
    for name, size in elements.items():
        buffer = V.graph.get_buffer(name) or V.graph.graph_inputs[name]
        total += min(size * buffer.get_dtype().itemsize, bytes_of(buffer))
    return total


def kind_of(node) -> str:
    """attention, product, elementwise, or the name of another kernel."""
    kernel = getattr(getattr(node, "node", None), "python_kernel_name", None) or ""
    if "plan.attention" in kernel:
        return "attention"
    if re.search(r"\b(add|b?addb?)?b?mm\b", kernel):
        return "product"
    return "elementwise" if type(node).__name__ != "ExternKernelSchedulerNode" else ""


def flops_of(node, kind: str) -> float:
    """FLOP of a product or of causal attention; 0 for other kernels."""
    if kind == "product":
        a, b = [[int(n) for n in t.get_size()] for t in node.node.inputs[-2:]]
        return 2.0 * math.prod(a) * b[-1]
    if kind == "attention":
        is_backward = "backward" in node.node.python_kernel_name
        b, h, t, c = (int(n) for n in node.node.inputs[1 if is_backward else 0].get_size())
        return (2.5 if is_backward else 1) * 2 * b * h * t * t * c  # half of 4 T T C
    return 0.0


def lower(gm, inputs, is_backward: bool, plans: dict) -> None:
    """Lower one half of the graph for a fake CUDA device; keep kind, bytes and FLOP of each node in plans[is_backward]."""
    from torch._inductor import compile_fx, graph
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    for node in gm.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    gm.recompile()
    with mode:
        inputs = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")
                  if isinstance(t, torch.Tensor) else t for t in inputs]
    FakeTensorProp(gm, mode=mode).propagate_dont_convert_inputs(*inputs)

    def keep(lowering):
        lowering.codegen()
        kinds = [(node, kind_of(node)) for node in lowering.scheduler.nodes]
        plans[is_backward] = [(kind, traffic(node), flops_of(node, kind)) for node, kind in kinds]
        raise Planned

    graph.GraphLowering.compile_to_module = keep
    try:
        with torch._guards.tracing(torch._guards.TracingContext(mode)):
            compile_fx.compile_fx_inner(gm, inputs, is_backward=is_backward)
    except Exception as error:
        while error and not isinstance(error, Planned):
            error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
        if not error:
            raise


def plan(config: train_gpt.Config, rows: int) -> dict[bool, list[tuple[str, int, float]]]:
    """The nodes of forward and backward of a micro-batch, by whether it is the backward. Raises what the compiler raises."""
    from functorch.compile import aot_module_simplified, min_cut_rematerialization_partition
    from torch._functorch import config as functorch_config
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode
    plans = {}
    train_gpt.causal_attention = lambda q, k, v, *_: torch.ops.plan.attention(q, k, v)[0]
    model = train_gpt.GPT(config)
    functorch_config.force_non_lazy_backward_lowering = True
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for name, t in [(name, t) for name, t in table.items() if t is not None]:
                    fake = torch.empty(t.shape, dtype=t.dtype)
                    table[name] = torch.nn.Parameter(fake) if table is module._parameters else fake
        tokens = torch.empty(rows, config.train_seq_len, dtype=torch.int64)

        def backend(gm, inputs):
            def half(is_backward):
                return lambda g, i: (lower(g, i, is_backward, plans), g)[1]
            return aot_module_simplified(gm, inputs, fw_compiler=half(False), bw_compiler=half(True),
                                         partition_fn=min_cut_rematerialization_partition,
                                         decompositions=select_decomp_table())

        try:
            torch.compile(model, backend=backend, dynamic=False, fullgraph=True)(tokens, tokens)
        except Exception:  # the halves that were kept cannot be run
            if len(plans) < 2:
                raise
    return plans


def count(plans: dict[bool, list[tuple[str, int, float]]]) -> dict[str, float]:
    """Kernels, GB and TFLOP of each kind, and the calculated ms of the micro-batch with each attention."""
    row = {}
    for kind in ("attention", "elementwise", "product"):
        nodes = [node for half in plans.values() for node in half if node[0] == kind]
        row[f"{kind} kernels"] = len(nodes)
        row[f"{kind} GB"] = round(sum(node[1] for node in nodes) / 1e9, 3)
        if kind != "elementwise":
            row[f"{kind} TFLOP"] = round(sum(node[2] for node in nodes) / 1e12, 3)
    for name, rates in ATTENTION.items():
        seconds = 0.0
        for is_backward, nodes in plans.items():
            for kind, size, flops in nodes:
                rate = rates[is_backward] if kind == "attention" else PRODUCT
                seconds += max(flops / rate, size / MEMORY) + LAUNCH if kind else 0.0
        row[f"{name} ms"] = round(1000 * seconds, 2)
    return row


def missing() -> str:
    """Why this machine cannot compile for a GPU; "" if it can."""
    if torch.__version__.split("+")[0] != TORCH or sys.platform != "linux":
        return f"PyTorch {torch.__version__} on {sys.platform} is not {TORCH} on Linux"
    return "" if importlib.util.find_spec("triton") else "there is no triton package: pip install triton==3.7.1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="CASE or NAME=value", help=", ".join(CASES))
    options = parser.parse_args()
    if reason := missing():
        sys.exit(f"compile_for_gpu.py: {reason}")
    extra = [word for word in options.words if "=" in word]
    names = [word for word in options.words if "=" not in word] or list(CASES)
    if unknown := sorted(set(names) - CASES.keys()):
        sys.exit(f"compile_for_gpu.py: {', '.join(unknown)} is not a case; the cases are {', '.join(CASES)}")
    pretend_to_have_an_h100()
    define_attention()
    counts = {}
    for name in names:
        torch.compiler.reset()
        rows, settings = CASES[name]
        try:
            config, _ = train_gpt.load_config([*settings.split(), *extra, "DTYPE=bfloat16", "DEVICE=cuda", "ATTN=flash"], {})
        except (ValueError, OSError) as error:
            sys.exit(f"compile_for_gpu.py: {name}: {error}")
        counts[name] = count(plan(config, rows))
    print(json.dumps(counts, indent=1))


if __name__ == "__main__":
    main()
