#!/bin/bash
# Train in a Slurm job that goes on after each time limit or preemption, until the run is done:
#     sbatch tools/slurm.sh ITERATIONS=100000 NUM_LAYERS=12
# Three minutes before the limit, Slurm sends SIGTERM. The trainer saves a checkpoint and exits with status 143.
#SBATCH --nodes=1 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12
#SBATCH --time=04:00:00 --signal=TERM@180 --requeue --open-mode=append

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not take it from sbatch
srun --kill-on-bad-exit=1 tools/ranks.sh "${PYTHON:-.venv/bin/python}" train_gpt.py RUN_ID="$SLURM_JOB_ID" RESUME=auto \
  CHECKPOINT_EVERY=1000 MAX_WALLCLOCK_SECONDS=0 "$@"
status=$?
if [ $status = 143 ]; then
  run_id=$SLURM_JOB_ID
  for word in "$@"; do
    [[ $word != RUN_ID=* ]] || run_id=${word#*=}
  done
  if grep -q '"event": "checkpoint"' "logs/$run_id.jsonl"; then
    scontrol requeue "$SLURM_JOB_ID"
  else
    echo "this job saved no checkpoint; without one, the next job would repeat it" >&2
  fi
fi
exit $status
