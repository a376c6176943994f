#!/usr/bin/env bash
# Quick start: ./run.sh installs into .venv, fetches text, trains on this machine, exports and scores.
# NAME=value arguments reach train_gpt.py; like variables of the environment, they win over what this script sets.
# ./run.sh --preset NAME [NAME=value ...] takes the settings of records/presets/NAME.env.
# ./run.sh test runs the tests, with -m slow the slow ones, with -m gpu those that need a GPU.
# PYTHON names the interpreter that makes .venv.
[ -n "${BASH_VERSION:-}" ] || exec bash "$0" "$@"  # sh run.sh
set -euo pipefail
called_from=$PWD
script=$(readlink -f -- "$0" 2> /dev/null || echo "$0")  # which may be called by a link
CDPATH='' cd -- "$(dirname -- "$script")"
if [[ ${1:-} = --help || ${1:-} = -h ]]; then
  sed -n '2,6s/^# //p' run.sh
  exit
fi

# Of other programs: modules with the names of ours, another Python's library, another place for pip to install into.
unset PYTHONPATH PYTHONSAFEPATH PYTHONHOME PYTHONPLATLIBDIR __PYVENV_LAUNCHER__ PIP_USER PIP_TARGET PIP_PREFIX
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}  # seconds to save a checkpoint; torchrun allows 30
export TORCHINDUCTOR_VEC_ISA_OK=${TORCHINDUCTOR_VEC_ISA_OK:-1}  # skip PyTorch's trial builds: 10 s at the first start
# What is compiled is kept here, since /tmp is empty after a reboot; one folder for each kind of CPU that shares this one.
cpu=$( (grep -m 1 -E '^(flags|Features)' /proc/cpuinfo 2> /dev/null || uname -m) | cksum | cut -d' ' -f1)
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$PWD/.venv/compiled/$cpu}

fail() {
  echo "run.sh: $*" >&2
  exit 1
}

install() {  # a requirements file, once for each content of it
  local python=${PYTHON:-python3} stamp pip
  stamp=.venv/installed-$(cat requirements*.txt | cksum | cut -d' ' -f1)-$1
  if ! .venv/bin/python -c '' 2> /dev/null; then  # there is none, or its interpreter is gone
    "$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2> /dev/null ||
      fail "Python 3.11 or newer is needed, and $python is $("$python" --version 2> /dev/null || echo not there);" \
        "name one: PYTHON=python3.12 ./run.sh"
    rm -rf .venv
    trap 'rm -rf .venv' EXIT  # if it is only half made
    "$python" -m venv .venv
    trap - EXIT
  elif [ -e "$stamp" ]; then
    return
  fi
  .venv/bin/python -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2> /dev/null ||
    fail "Python 3.11 or newer is needed, and .venv has $(.venv/bin/python --version 2> /dev/null): delete .venv, and run this" \
      "again, if python3 is older, too, as PYTHON=python3.12 ./run.sh"
  .venv/bin/python -c 'import pip' 2> /dev/null ||
    fail "this .venv has no pip: run .venv/bin/python -m ensurepip, or delete .venv"
  echo "installing $1 into .venv"
  pip=(.venv/bin/python -m pip install -q --disable-pip-version-check)
  if [ "$(uname -sm)" = "Linux x86_64" ] && ! command -v nvidia-smi > /dev/null; then  # the usual build has gigabytes of CUDA
    "${pip[@]}" --no-deps --retries 0 --timeout 20 --index-url https://download.pytorch.org/whl/cpu \
      "$(grep '^torch=' requirements.txt)" 2> /dev/null ||
      echo "the CPU build of PyTorch cannot be fetched: installing the usual one"
  fi
  "${pip[@]}" -r "$1" || fail "pip could not install $1 into .venv; its messages above say why"
  touch "$stamp"
}

if [ "${1:-}" = test ]; then
  install requirements-dev.txt
  shift
  exec .venv/bin/python -m pytest -q -rs tests -n auto --dist loadfile --no-loadscope-reorder \
    -m "not slow and not gpu" "$@"  # the last -m counts
fi

MANY_TOKENS=2000000  # of a text on which two minutes of records/presets/quick.env do not overfit
FEW_TOKENS=600000
preset=
settings=()
tokenizer=sp1024  # of FineWeb, without a preset

read_preset() {  # as the trainer does: an editor may have added a byte order mark, or carriage returns
  LC_ALL=C sed $'1s/^\xef\xbb\xbf//; s/\r$//' "${preset:-/dev/null}"
}

use_preset() {  # NAME
  preset=records/presets/$1.env
  [ -e "$preset" ] ||
    fail "there is no $preset. Presets: $(grep -l '^# tokenizer: ' records/presets/*.env | sed 's,.*/,,; s/\.env$//' | xargs)"
  tokenizer=$(read_preset | sed -n 's/^# tokenizer: //p' | grep .) ||
    fail "$preset has no line like '# tokenizer: sp1024': add one, or if it only adds to a preset, give both to train_gpt.py"
}

has_fineweb() {  # VARIANT, as a whole: a download may have stopped, or had --train-shards 0
  local shards=data/datasets/fineweb10B_$1/fineweb
  [ -e "data/tokenizers/fineweb_${1#sp}_bpe.model" ] &&
    compgen -G "${shards}_train_*.bin" > /dev/null && compgen -G "${shards}_val_*.bin" > /dev/null
}

while [ $# -gt 0 ]; do
  if [ "$1" = --preset ]; then
    use_preset "${2:-}"
    shift
  elif [[ $1 = [!-]*=* ]]; then
    settings+=("$1")
  else
    fail "$1 is not NAME=value, --preset NAME, --help or test"
  fi
  shift
done
set -- ${settings[@]+"${settings[@]}"}
install requirements.txt
given=" $* "
data=${DATA_PATH-}
for word in "$@"; do
  [[ $word != DATA_PATH=* ]] || data=${word#*=}
done
home=~  # the user's, where HOME is not set
data=${data/#\~/$home}
[[ -z $data || -e $data || ! -e $called_from/$data ]] ||
  fail "DATA_PATH=$data does not exist in $PWD; you may mean DATA_PATH=$called_from/$data"
arguments=()

device=$(sed -n 's/.* DEVICE=\([A-Za-z]*\) .*/\1/p' <<< "$given")
device=$(tr A-Z a-z <<< "${device:-${DEVICE:-$(read_preset | sed -n 's/^DEVICE=//p')}}")
gpus=0
[ "$device" = cpu ] || gpus=$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus$device${CUDA_VISIBLE_DEVICES+hidden}" = 0 ] && timeout 20 nvidia-smi -L 2> /dev/null | grep -q '^GPU 0'; then
  fail "PyTorch cannot use this machine's GPUs: install a build for their driver into .venv (see pytorch.org), or set DEVICE=cpu"
fi
tokens=$MANY_TOKENS  # of the training text, if it is small
if [ -e "${data:-.}/manifest.json" ]; then
  tokens=$(.venv/bin/python -c 'import json, sys; print(int(json.load(open(sys.argv[1]))["splits"]["train"]["tokens"]))' \
    "$data/manifest.json" 2> /dev/null || echo "$MANY_TOKENS")
fi
if [[ -z $preset && ( $gpus -eq 0 || ( $tokens -lt $MANY_TOKENS && $given${INIT_FROM:+ INIT_FROM=} != *" INIT_FROM="* ) ) ]]; then
  use_preset quick
  gpus=$((gpus > 0))  # one is enough
  ! has_fineweb sp1024 || tokenizer=sp1024
fi

default() {  # NAME=value words, unless the environment or the command line has another value
  local word name
  for word in "$@"; do
    name=${word%%=*}
    [[ -n ${!name-} || "$given${arguments[*]-} " == *" $name="* ]] || arguments+=("$word")
  done
}

fineweb=data/datasets/fineweb10B_$tokenizer
model=data/tokenizers/fineweb_${tokenizer#sp}_bpe.model
speeches=data/datasets/sotu_$tokenizer
if [[ -z ${DATA_PATH-} && $given != *" DATA_PATH="* ]]; then
  shards=$(compgen -G "$fineweb/fineweb_train_*.bin" | wc -l || true)
  has_fineweb "$tokenizer" || shards=0
  if [[ $gpus -gt 0 && $shards -lt 10 && $tokenizer =~ ^sp(1024|4096|8192)$ ]]; then
    echo "fetching FineWeb's first ten shards, 2 GB"  # 12 MB of speeches would be read dozens of times
    .venv/bin/python -m pip install -q --disable-pip-version-check huggingface_hub || true
    .venv/bin/python data/download.py --variant "$tokenizer" --train-shards 10
  fi
  if has_fineweb "$tokenizer"; then
    default "DATA_PATH=$fineweb" "TOKENIZER_PATH=$model"
  else
    [ -e "$speeches/manifest.json" ] ||
      .venv/bin/python data/prepare.py sotu --tokenizer "$tokenizer" --out "$speeches" | sed '/^next: /d'
    default "DATA_PATH=$speeches"
  fi
fi

if [[ $preset = records/presets/quick.env && $tokens -lt $MANY_TOKENS ]]; then
  batch=$(sed -n 's/.* TRAIN_BATCH_TOKENS=\([0-9]*\) .*/\1/p' <<< "$given")
  steps=$((10 * tokens / ${batch:-${TRAIN_BATCH_TOKENS:-4096}} + 1))
  dropout=0.1
  [ "$tokens" -ge $FEW_TOKENS ] || dropout=0.3
  count=${#arguments[@]}
  default "DROPOUT=$dropout" "ITERATIONS=$steps" "VAL_LOSS_EVERY=$((steps / 10 + 1))"
  added=${arguments[*]+"${arguments[*]:$count}"}
  echo "The training text has $tokens tokens, few for this model. $steps steps read it 10 times. Added: ${added:-nothing}"
fi
if [ -n "$preset" ]; then
  arguments+=("@$preset")
fi
if [[ $PWD == *" "* ]]; then  # PyTorch does not quote its paths for the compiler
  default COMPILE=0
  echo "The path of this folder has a space, with which PyTorch cannot compile: training is slower."
fi
headers=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))')
if [ "$gpus$(uname)" = 0Linux ] &&
  { ! command -v "${CXX:-g++}" > /dev/null || [ -d "$headers" -a ! -e "$headers/Python.h" ]; }; then
  default COMPILE=0
  echo "PyTorch cannot compile without g++ and Python's headers (apt install g++ python3-dev): training is slower."
fi
# A name of this run, by which the model is found below; a run that is resumed has one.
[ -n "${RESUME-}" ] || [[ $given == *" RESUME="* ]] || default "RUN_ID=$(date +%Y%m%d-%H%M%S)-$$"
command=(.venv/bin/python train_gpt.py)
if [ "$gpus" = 0 ]; then  # glibc keeps freed memory for the next step and, from 2.35 on, takes huge pages: up to a fifth faster
  tunables=glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=0xffffffffffffffff
  export GLIBC_TUNABLES=${GLIBC_TUNABLES:-$tunables}
fi
if [ "$gpus" -gt 0 ]; then  # --local-addr: of a host whose own name does not resolve
  command=(.venv/bin/python -m torch.distributed.run --standalone --local-addr=localhost --nproc_per_node="$gpus" train_gpt.py)
fi
command+=(${arguments[@]+"${arguments[@]}"} "$@")
echo "Below come facts on machine and settings, then steps; tools/README.md explains the steps. val_bpb, bits per byte of unseen"
echo "text, should fall; a time limit ends most runs early."
printf '%q ' "${command[@]}"
echo
"${command[@]}"
run_id=$(sed -n 's/.* RUN_ID=\([^ ]*\) .*/\1/p' <<< "${command[*]} ")
run_id=${run_id:-${RUN_ID-}}
summary=$(.venv/bin/python tools/events.py ${run_id:+"$run_id"})
if [[ $summary == *final_model* ]]; then
  printf '\nA sample of what it writes:\n'
  .venv/bin/python tools/sample.py ${run_id:+"$run_id"} --length 80 || true
fi
printf '\n%s\n' "$summary"
