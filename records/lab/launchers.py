"""Train under every installed launcher, and print the table that records/lab/scaling.md quotes.

    python records/lab/launchers.py [--only NAME]...

Tried are one process, torchrun, mpirun of Open MPI and of MPICH, Slurm's srun (a Slurm is started for the test), and
torchrun on two hosts, which are network namespaces. Two more runs kill and restart one host, and slow the link. The jobs
logs/slurm.sh and logs/pbs.sh are told to stop after a checkpoint, and must go on by themselves; PBS's qsub is a
stand-in. The losses are compared with the reference run's (GOLDEN_PATH) or, without its data, with one process. The
status is 1 if a launch fails or differs. Slurm and the two hosts need root and Debian's packages:

    apt-get install openmpi-bin mpich slurmctld slurmd slurm-client munge iproute2
"""

import argparse
import fcntl
import hashlib
import heapq
import json
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
from tiny import GOLDEN, MODEL, REPOSITORY, events, make_shards, tiny_arguments  # noqa: E402

TRAINER = [sys.executable, str(REPOSITORY / "train_gpt.py")]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
HOSTS = {"train-a": "10.77.0.1", "train-b": "10.77.0.2"}  # namespaces and their addresses
LINK = {"train-a": "train-link-a", "train-b": "train-link-b"}
SLOW_S, SLOW_BYTES_PER_S = 0.01, 100e6 / 8  # delay and rate of the slow link, each way
TUNSETIFF, TUN_WITHOUT_HEADER = 0x400454CA, 0x1001  # of linux/if_tun.h
SLURM = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort=26817
SlurmdPort=26818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP
"""


class Missing(Exception):
    """What a launch needs and this machine does not have."""


def settings() -> tuple[list[str], dict[str, str], list[float] | None]:
    """The trainer's arguments, its environment, and the reference's losses if its data are here."""
    if not (GOLDEN / "A" / "expected.json").exists() or not MODEL.exists():
        return [], {}, None
    environment = dict(line.split("=", 1) for line in (GOLDEN / "A" / "env").read_text().split())
    arguments = [f"DATA_PATH={GOLDEN / 'ds'}", f"TOKENIZER_PATH={MODEL}", f"INIT_FROM={GOLDEN / 'A' / 'init.pt'}",
                 "TRAIN_LOG_EVERY=1", "DEVICE=cpu", "VAL_LOSS_EVERY=0", "COMPILE=0"]
    return arguments, environment, json.loads((GOLDEN / "A" / "expected.json").read_text())["train_loss"]


def need(*programs: str, root: bool = False) -> None:
    """Raises Missing unless the programs are installed and, with `root`, this is root."""
    missing = [name for name in programs if not shutil.which(name)]
    if missing:
        raise Missing(f"not installed: {', '.join(missing)}")
    if root and os.geteuid():
        raise Missing("needs root")


def run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Runs a command in a folder. Raises RuntimeError with its output if it fails."""
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False)
    if result.returncode:
        raise RuntimeError((result.stderr or result.stdout)[-2000:])


def with_python(folder: Path, words: list[str], environment: dict[str, str]) -> None:
    run([*TRAINER, *words], folder, environment)


def with_torchrun(folder: Path, words: list[str], environment: dict[str, str], ranks: int) -> None:
    run([*TORCHRUN, "--standalone", f"--nproc_per_node={ranks}", TRAINER[1], *words], folder, environment)


def with_open_mpi(folder: Path, words: list[str], environment: dict[str, str], ranks: int) -> None:
    need("mpirun.openmpi")
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    run(["mpirun.openmpi", *options, *TRAINER, *words], folder, environment)


def with_mpich(folder: Path, words: list[str], environment: dict[str, str], ranks: int) -> None:
    need("mpirun.mpich")
    run(["mpirun.mpich", "-n", str(ranks), *TRAINER, *words], folder, environment)


def with_srun(folder: Path, words: list[str], environment: dict[str, str]) -> None:
    need("srun", "sinfo", "slurmctld", "slurmd", "munged", root=True)
    with slurm(folder / "slurm") as configuration:
        run(["srun", "--mpi=none", "-n", "2", *TRAINER, *words], folder, {**environment, **configuration})


def as_a_slurm_job(folder: Path, words: list[str], environment: dict[str, str]) -> None:
    """logs/slurm.sh on two ranks. They are told to stop after the first checkpoint; the job then requeues itself."""
    need("sbatch", "scancel", "slurmctld", "slurmd", "munged", root=True)
    (folder / "train_gpt.py").symlink_to(TRAINER[1])
    with slurm(folder / "slurm") as configuration:
        environment = {**environment, **configuration, "PYTHON": sys.executable}

        def ask(*command: str) -> str:
            return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout

        job = ask("sbatch", "--parsable", "--ntasks-per-node=2", "--cpus-per-task=1", "--gpus-per-node=0",
                  str(REPOSITORY / "logs" / "slurm.sh"), *words, "OUT_DIR=.", "CHECKPOINT_EVERY=5").strip()
        wait_until("a checkpoint", lambda: list(folder.glob("checkpoints/*.pt")))
        ask("scancel", "--signal=TERM", job)
        wait_until("the job to be requeued", lambda: "PENDING" in ask("squeue", "-h", "-j", job, "-o", "%T"))
        time.sleep(10)  # until the first start has been cleared away; Slurm itself would wait two minutes
        ask("scontrol", "update", f"JobId={job}", "StartTime=now")
        wait_until("its end", lambda: "COMPLETED" in ask("scontrol", "show", "job", job))
        print(*re.findall(r"stopped: .*|resumed: .*", (folder / f"slurm-{job}.out").read_text()), sep="\n", flush=True)


def as_a_pbs_job(folder: Path, words: list[str], environment: dict[str, str]) -> None:
    """logs/pbs.sh on two ranks of MPICH. It is told to stop after some seconds, and submits itself again."""
    need("mpiexec.mpich", "timeout")
    (folder / "train_gpt.py").symlink_to(TRAINER[1])
    (folder / "logs").mkdir()
    (folder / "logs" / "pbs.sh").symlink_to(REPOSITORY / "logs" / "pbs.sh")
    qsub = """echo "qsub $*" >> qsub.txt
IFS=, read -ra words <<< "$2"
export "${words[@]}" STOP_AFTER=900s
exec bash "$3"
"""
    programs = {"mpiexec": 'exec mpiexec.mpich -n 2 "$@"', "qsub": qsub}
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    settings = " ".join([*words, "OUT_DIR=.", "CHECKPOINT_EVERY=5"])
    run(["bash", "logs/pbs.sh"], folder, {
        **environment, "PBS_O_WORKDIR": str(folder), "PBS_JOBID": "1.test", "PYTHON": sys.executable, "SETTINGS": settings,
        "STOP_AFTER": "20s", "PATH": f"{folder}:{environment['PATH']}"})
    print((folder / "qsub.txt").read_text()[:60], flush=True)


def wait_until(what: str, is_so) -> None:
    """Waits until a condition holds. Raises RuntimeError if that takes more than five minutes."""
    end = time.monotonic() + 300
    while not is_so():
        if time.monotonic() > end:
            raise RuntimeError(f"waited in vain for {what}")
        time.sleep(0.2)


@contextmanager
def slurm(folder: Path):
    """A Slurm of one node, for as long as it is needed. Yields the variables by which srun finds it."""
    (folder / "state").mkdir(parents=True)
    key = folder / "key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    (folder / "slurm.conf").write_text(SLURM.format(folder=folder, host=socket.gethostname().split(".")[0]))
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    daemons = [
        ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
         f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed"],
        ["slurmctld", "-D", "-i"], ["slurmd", "-D"]]
    with ExitStack() as stack:
        for command in daemons:
            process = stack.enter_context(subprocess.Popen(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            stack.callback(process.terminate)
            time.sleep(1)
        for _ in range(30):
            listed = subprocess.run(["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True,
                                    check=False)
            if "idle" in listed.stdout:
                break
            time.sleep(1)
        yield {"SLURM_CONF": environment["SLURM_CONF"]}


def open_tun(name: str) -> int:
    """Creates a network device whose packets are read from and written to the file descriptor."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), TUN_WITHOUT_HEADER))
    return file


def carry(ends: list[int], stopped: threading.Event) -> None:
    """Carries packets between two devices, late and at a limited rate. (The kernel's netem is a module that many
    machines lack.)"""
    free_s = [0.0, 0.0]  # when the packets before have left, by direction
    waiting = []  # arrival, number, end, packet
    count = 0
    while not stopped.is_set():
        pause_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.1
        for end in select.select(ends, [], [], pause_s)[0]:
            way = ends.index(end)
            packet = os.read(end, 65536)
            free_s[way] = max(free_s[way], time.monotonic()) + len(packet) / SLOW_BYTES_PER_S
            heapq.heappush(waiting, (free_s[way] + SLOW_S, count, ends[1 - way], packet))
            count += 1
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, end, packet = heapq.heappop(waiting)
            with suppress(OSError):  # a device that is down loses packets
                os.write(end, packet)


@contextmanager
def two_hosts(slow: bool = False):
    """Two network namespaces with a link between them, which can be a slow one."""
    need("ip", root=True)

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    first, second = LINK.values()
    ends = []
    stopped = threading.Event()
    carrier = threading.Thread(target=carry, args=(ends, stopped))
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        if slow:
            ends += [open_tun(name) for name in LINK.values()]
            carrier.start()
        else:
            ip("link", "add", first, "type", "veth", "peer", "name", second)
        for host, address in HOSTS.items():
            ip("link", "set", LINK[host], "netns", host)
            ip("-n", host, "addr", "add", f"{address}/24", "dev", LINK[host])
            ip("-n", host, "link", "set", LINK[host], "up")
            ip("-n", host, "link", "set", "lo", "up")
        yield
    finally:
        stopped.set()
        if slow:
            carrier.join()
        for host in HOSTS:
            kill_all(host)
            subprocess.run(["ip", "netns", "del", host], check=False)
        for end in ends:
            os.close(end)


def kill_all(host: str) -> None:
    """Kills every process on one of the hosts; torchrun's own do not belong to its process group."""
    listed = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True, check=False).stdout
    for number in listed.split():
        with suppress(ProcessLookupError):
            os.kill(int(number), signal.SIGKILL)


def start(host: str, command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.Popen:
    """Starts a command on one of the two hosts."""
    return subprocess.Popen(["ip", "netns", "exec", host, *command], cwd=folder, text=True, stdout=subprocess.PIPE,
                            env={**environment, "GLOO_SOCKET_IFNAME": LINK[host]}, stderr=subprocess.STDOUT)


def start_torchrun(host: str, folder: Path, words: list[str], environment: dict[str, str]) -> subprocess.Popen:
    """Starts torchrun on one of the two hosts."""
    command = [*TORCHRUN, "--nnodes=2", "--nproc_per_node=1", "--max-restarts=2", "--rdzv-backend=c10d",
               f"--rdzv-endpoint={HOSTS['train-a']}:29400", f"--local-addr={HOSTS[host]}",
               f"--rdzv-conf=is_host={host == 'train-a'}", TRAINER[1], *words]
    # A new torchrun looks for the address of its rank 0 where only a first rendezvous writes it (PyTorch 2.13).
    return start(host, command, folder, {**environment, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


def with_pals_variables(folder: Path, words: list[str], environment: dict[str, str]) -> None:
    """Without torchrun, on two hosts: the variables are those of PALS, the address comes from a PBS host file."""
    nodes = folder / "nodes"
    nodes.write_text("\n".join(HOSTS.values()))
    with two_hosts():
        wait_for({host: start(host, [*TRAINER, *words], folder, {
            **environment, "PMI_RANK": str(rank), "PMI_SIZE": "2", "PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "1",
            "PBS_NODEFILE": str(nodes)}) for rank, host in enumerate(HOSTS)})


def on_two_hosts(folder: Path, words: list[str], environment: dict[str, str], slow: bool = False) -> None:
    with two_hosts(slow):
        wait_for({host: start_torchrun(host, folder, words, environment) for host in HOSTS})


def on_two_hosts_with_a_kill(folder: Path, words: list[str], environment: dict[str, str]) -> None:
    """The second host is killed, with all its processes, after the first checkpoint, and started again."""
    words = [*words, "CHECKPOINT_EVERY=5", "RESUME=auto"]
    with two_hosts():
        hosts = {host: start_torchrun(host, folder, words, environment) for host in HOSTS}
        while not list(folder.glob("checkpoints/*.pt")) and not any(process.poll() for process in hosts.values()):
            time.sleep(0.05)
        kill_all("train-b")
        hosts["train-b"].wait()
        newest = max((path.name for path in folder.glob("checkpoints/*.pt")), default="nothing")
        print(f"train-b was killed after {newest} was written, and started again", flush=True)
        hosts["train-b"] = start_torchrun("train-b", folder, words, environment)
        wait_for(hosts)


def wait_for(hosts: dict[str, subprocess.Popen]) -> None:
    """Waits until both hosts have finished. Raises RuntimeError if one failed."""
    with ThreadPoolExecutor() as pool:  # both at once: one whose output is not read would stop
        outputs = list(pool.map(lambda process: process.communicate(timeout=900)[0], hosts.values()))
    for (host, process), output in zip(hosts.items(), outputs):
        if process.returncode:
            raise RuntimeError(f"{host}: {output[-2000:]}")
        for line in output.splitlines():
            if line.startswith(("resumed:", "warning: checkpoint")):
                print(f"{host}: {line}", flush=True)


LAUNCHES = {
    "`python`": with_python,
    "`torchrun`, 2 ranks": partial(with_torchrun, ranks=2),
    "`torchrun`, 4 ranks": partial(with_torchrun, ranks=4),
    "`mpirun` of Open MPI, 2 ranks": partial(with_open_mpi, ranks=2),
    "`mpirun` of Open MPI, 4 ranks": partial(with_open_mpi, ranks=4),
    "`mpirun` of MPICH, 2 ranks": partial(with_mpich, ranks=2),
    "`mpirun` of MPICH, 4 ranks": partial(with_mpich, ranks=4),
    "Slurm's `srun`, 2 ranks": with_srun,
    "the job `logs/slurm.sh`, stopped and requeued": as_a_slurm_job,
    "the job `logs/pbs.sh`, stopped and submitted again": as_a_pbs_job,
    "the variables of PALS and PBS, on two hosts": with_pals_variables,
    "`torchrun` on two hosts": on_two_hosts,
    "the same, one host killed and started again": on_two_hosts_with_a_kill,
    "the same, with 10 ms delay and 100 Mbit/s": partial(on_two_hosts, slow=True),
}


def losses(folder: Path) -> list[float]:
    """The training losses of a run in the order of its steps; one that was resumed has several logs."""
    found = {}
    for path in sorted((folder / "logs").glob("run*.jsonl"), key=lambda path: path.stat().st_mtime):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found |= {event["step"]: event["train_loss"] for event in lines if event["event"] == "train"}
    return [found[step] for step in sorted(found)]


def step_ms(folder: Path) -> float:
    """The mean milliseconds of a step after the second, from the run's last log."""
    steps = [event for event in events(folder, "run") if event["event"] == "train"]
    return (steps[-1]["train_time_ms"] - steps[1]["train_time_ms"]) / (steps[-1]["step"] - steps[1]["step"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="try only launches whose name contains this")
    options = parser.parse_args()
    arguments, variables, expected = settings()
    environment = {**os.environ, **variables}
    rows = []
    artifacts = {}
    failed = False
    with tempfile.TemporaryDirectory() as place:
        if not arguments:
            arguments = tiny_arguments(make_shards(Path(place)), ITERATIONS=12, VAL_LOSS_EVERY=0)
        for number, (name, launch) in enumerate(LAUNCHES.items()):
            if options.only and number and not any(part in name for part in options.only):
                continue
            folder = Path(place, str(number))
            folder.mkdir()
            started = time.monotonic()
            try:
                launch(folder, [*arguments, "RUN_ID=run"], environment)
            except Missing as reason:
                rows.append([name, "", "", "", f"not tried: {reason}"])
                continue
            except (RuntimeError, subprocess.SubprocessError) as error:
                failed = True
                rows.append([name, "", "", "", "FAILED"])
                print(f"{name}: {error}", file=sys.stderr)
                continue
            found = losses(folder)
            expected = expected or found
            differences = [abs(a - b) for a, b in zip(found, expected, strict=True)]
            agrees = max(differences[:5]) <= 3e-4 and max(differences) <= 2e-3
            failed |= not agrees
            artifacts[launch] = hashlib.sha256((folder / "final_model.int8.ptz").read_bytes()).hexdigest()
            rows.append([name, f"{max(differences[:5]):.1e}", f"{max(differences):.1e}", f"{step_ms(folder):.0f}",
                         "agrees" if agrees else "DIFFERS"])
            print(f"{name}: {time.monotonic() - started:.0f} s, artifact {artifacts[launch][:16]}", flush=True)
    if on_two_hosts_with_a_kill in artifacts and on_two_hosts in artifacts:
        is_same = artifacts[on_two_hosts] == artifacts[on_two_hosts_with_a_kill]
        failed |= not is_same
        rows.append(["artifact of the killed run", "", "", "", "identical" if is_same else "DIFFERENT"])
    print("\n| launch | largest difference of the first 5 losses | of all losses | ms per step | |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    sys.exit(failed)


if __name__ == "__main__":
    main()
