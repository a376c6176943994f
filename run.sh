#!/usr/bin/env bash
# Quick start: ./run.sh installs into .venv, fetches text, trains on this machine, exports and scores.
# NAME=value arguments reach train_gpt.py; like variables of the environment, they win over what this script sets.
# ./run.sh --preset NAME takes the settings of records/presets/NAME.env. ./run.sh test runs the tests, with -m slow
# the slow ones, with -m gpu those that need a GPU.
# PYTHON names the interpreter that makes .venv.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"  # sh run.sh
set -euo pipefail
cd "$(dirname "$0")"
if [[ ${1:-} = --help || ${1:-} = -h ]]; then
  sed -n '2,6s/^# //p' run.sh
  exit
fi

python=${PYTHON:-python3}
unset PYTHONPATH PYTHONSAFEPATH  # modules of others with the names of ours
export TORCHINDUCTOR_VEC_ISA_OK=${TORCHINDUCTOR_VEC_ISA_OK:-1}  # skip PyTorch's trial builds: 10 s at the first start
# What is compiled is kept here, since /tmp is empty after a reboot; one folder for each kind of CPU that shares this one.
cpu=$( (grep -m 1 '^flags' /proc/cpuinfo 2> /dev/null || uname -m) | cksum | cut -d' ' -f1)
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$PWD/.venv/compiled/$cpu}

fail() {
  echo "run.sh: $*" >&2
  exit 1
}

has_pytorch() {  # 2.6 or newer, and able to use the GPUs if there are some
  "$python" -c '
import re, shutil, torch
version = [int(part) for part in re.findall(r"\d+", torch.__version__)[:2]]
sees_gpus = torch.cuda.is_available() or not shutil.which("nvidia-smi")
raise SystemExit(version < [2, 6] or not sees_gpus)' 2> /dev/null
}

install() {  # a requirements file, once for each content of it
  local stamp packages
  stamp=.venv/installed-$(cat requirements*.txt | cksum | cut -d' ' -f1)-$1
  [ -e "$stamp" ] && .venv/bin/python -c '' 2> /dev/null && return
  if .venv/bin/python -c '' 2> /dev/null; then
    .venv/bin/python -m pip --version > /dev/null 2>&1 || fail ".venv has no pip: delete .venv and try again"
  elif ! "$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2> /dev/null; then
    fail "Python 3.11 or newer is needed, and $python is $("$python" --version 2> /dev/null || echo not there);" \
      "name one: PYTHON=python3.12 ./run.sh"
  else
    rm -rf .venv  # of an interpreter that is gone, or half made
    trap 'rm -rf .venv' EXIT  # unless all is well
  fi
  if [ -x .venv/bin/python ]; then
    :
  elif has_pytorch; then
    echo "using the PyTorch of $python"
    "$python" -m venv --system-site-packages .venv
    # That shows the packages of its base alone, and they are elsewhere if it is in a virtual environment itself.
    "$python" -c 'import sysconfig; print(*{sysconfig.get_path(name) for name in ("purelib", "platlib")}, sep="\n")' \
      > "$(echo .venv/lib/python*/site-packages)/has-pytorch.pth"
    touch .venv/has-pytorch
  else
    "$python" -m venv .venv
  fi
  echo "installing $1 into .venv"
  pip=(.venv/bin/python -m pip install -q --disable-pip-version-check)
  if [ -e .venv/has-pytorch ]; then  # pinned versions would replace it
    packages=$(grep -hv '^-r\|^torch=' "$1" requirements.txt | sed 's/[=# ].*//; s/^sentencepiece$/&>=0.2.2/' | sort -u)
  else
    packages="-r $1"
    if [ "$(uname -sm)" = "Linux x86_64" ] && ! command -v nvidia-smi > /dev/null && ! .venv/bin/python -c 'import torch' 2> /dev/null
    then  # the usual build has gigabytes of CUDA
      "${pip[@]}" --no-deps --retries 0 --timeout 20 --index-url https://download.pytorch.org/whl/cpu "$(grep -o '^torch=[=.0-9]*' requirements.txt)" \
        2> /dev/null || echo "the CPU build of PyTorch cannot be fetched: installing the usual one"
    fi
  fi
  "${pip[@]}" $packages || fail "pip could not install $1; its messages above say why"
  .venv/bin/python -c 'import torch' || fail ".venv cannot import PyTorch; delete .venv and try again"
  trap - EXIT
  touch "$stamp"
}

if [ "${1:-}" = test ]; then
  install requirements-dev.txt
  shift
  exec .venv/bin/python -m pytest -q -rs tests -n auto --dist loadfile --no-loadscope-reorder -m "not slow and not gpu" "$@"  # the last -m counts
fi

preset=
vocabulary=1024
tokenizer=sp1024  # of the speeches
words=()
while [ $# -gt 0 ]; do
  if [[ $1 = --preset || $1 = --preset=* ]]; then
    [[ $1 = --preset ]] || set -- --preset "${1#*=}" "${@:2}"
    preset=records/presets/${2:-}.env
    [ -e "$preset" ] || fail "there is no $preset. Presets: $(cd records/presets && ls -- *.env | sed 's/\.env$//' | xargs)"
    vocabulary=$(sed -n 's/^VOCAB_SIZE=//p' "$preset" | grep . || echo 1024)
    tokenizer=unigram$vocabulary
    shift
  elif [[ $1 = *=* ]]; then
    words+=("$1")
  else
    fail "$1 is not NAME=value, --preset NAME, --help or test"
  fi
  shift
done
set -- ${words[@]+"${words[@]}"}
install requirements.txt
given=" $* "
arguments=()

device=$(sed -n 's/.* DEVICE=\([a-z]*\) .*/\1/p' <<< "$given")
device=${device:-${DEVICE:-$(sed -n 's/^DEVICE=//p' "${preset:-/dev/null}")}}
gpus=0
if [ "$device" != cpu ]; then
  gpus=$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count())')
fi
smi() {  # a broken driver makes it hang
  timeout 20 nvidia-smi "$@" 2> /dev/null
}
if [ "$gpus" -eq 0 ] && [ -z "$device${CUDA_VISIBLE_DEVICES+hidden}" ] && command -v nvidia-smi > /dev/null &&
  smi -L | grep -q '^GPU 0'
then
  cuda=$(smi | sed -n 's/.*CUDA Version: *\([0-9.]*\).*/\1/p')
  fail "PyTorch cannot use this machine's GPUs: their driver supports CUDA $cuda or older. Install a PyTorch build for it into" \
    ".venv (see pytorch.org), or delete .venv and set PYTHON to a Python with one."
fi

default() {  # NAME=value words, unless the environment or the command line has another value
  local word name
  for word in "$@"; do
    name=${word%%=*}
    [[ -n ${!name+set} || "$given${arguments[*]-} " == *" $name="* ]] || arguments+=("$word")
  done
}

count_fineweb() {  # its training shards here
  (compgen -G "data/datasets/fineweb10B_sp$vocabulary/*_train_*.bin" || true) | wc -l
}

if [[ -z ${DATA_PATH+set} && $given != *" DATA_PATH="* ]]; then
  if [ "$gpus" -gt 0 ] && [ "$(count_fineweb)" -lt 10 ]; then  # 12 MB of speeches would be read dozens of times
    echo "fetching FineWeb's first ten shards, 2 GB"
    .venv/bin/python -m pip install -q --disable-pip-version-check huggingface_hub || true
    .venv/bin/python data/download.py --variant "sp$vocabulary" --train-shards 10 || [ $? -ne 130 ]  # Ctrl-C
  fi
  if [ "$(count_fineweb)" -eq 0 ]; then
    speeches=data/datasets/sotu_$tokenizer
    [ -e "$speeches/manifest.json" ] ||
      .venv/bin/python data/prepare.py sotu --tokenizer "$tokenizer" --out "$speeches"
    default "DATA_PATH=$speeches"
    if [ "$gpus" -gt 0 ]; then
      echo "FineWeb could not be fetched: training for two minutes on speeches instead"
      default MAX_WALLCLOCK_SECONDS=120 WARMDOWN_ITERS=300
    fi
  elif [ -n "$preset" ]; then
    default "DATA_PATH=data/datasets/fineweb10B_sp$vocabulary" \
      "TOKENIZER_PATH=data/tokenizers/fineweb_${vocabulary}_bpe.model"
  fi
fi

if [ -n "$preset" ]; then
  arguments+=("@$preset")
elif [ "$gpus" -eq 0 ]; then  # a small model, for two minutes
  default NUM_LAYERS=4 MODEL_DIM=192 NUM_HEADS=4 NUM_KV_HEADS=2 TRAIN_SEQ_LEN=256 TRAIN_BATCH_TOKENS=8192 \
    VAL_BATCH_SIZE=65536 MAX_WALLCLOCK_SECONDS=120 WARMUP_STEPS=2 WARMDOWN_ITERS=80 VAL_LOSS_EVERY=100 \
    TRAIN_LOG_EVERY=10 MUON_MOMENTUM=0.95 MUON_MOMENTUM_WARMUP_STEPS=50
fi
if [[ $PWD == *" "* ]]; then  # PyTorch does not quote its paths for the compiler
  default COMPILE=0
  echo "The path of this folder has a space, with which PyTorch cannot compile: training is slower."
fi
# A name of this run, by which the model is found below; a run that is resumed has one.
[ -n "${RESUME-}" ] || [[ $given == *" RESUME="* ]] || default "RUN_ID=$(date +%Y%m%d-%H%M%S)"
command=(.venv/bin/python train_gpt.py)
if [ "$gpus" -gt 0 ]; then  # --local-addr: of a host whose own name does not resolve
  command=(.venv/bin/python -m torch.distributed.run --standalone --local-addr=localhost --nproc_per_node="$gpus" train_gpt.py)
fi
command+=(${arguments[@]+"${arguments[@]}"} "$@")
printf '%q ' "${command[@]}"
echo
"${command[@]}"
run_id=${RUN_ID-}
for word in ${arguments[@]+"${arguments[@]}"} "$@"; do
  [[ $word != RUN_ID=* ]] || run_id=${word#*=}
done
summary=$(.venv/bin/python logs/events.py ${run_id:+"$run_id"})
if [[ $summary == *final_model* ]]; then
  printf '\nA sample of what it writes:\n'
  .venv/bin/python logs/sample.py ${run_id:+"$run_id"} --length 80 || true
fi
printf '\n%s\n' "$summary"
