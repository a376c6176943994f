#!/bin/bash
# Train in PBS jobs, each of which submits the next one until the run is done:
#     qsub -v SETTINGS="ITERATIONS=100000 NUM_LAYERS=12" tools/pbs.sh
# `timeout` sends SIGTERM three minutes before the walltime ends. The trainer saves a checkpoint and exits with status
# 143. Change the resources in this file: the next job would not have those of qsub's command line. If you change the
# walltime, change 237m too: it must be three minutes less. No value in SETTINGS may contain a comma: qsub -v splits there.
#PBS -l select=1:ncpus=96:mpiprocs=8:ngpus=8
#PBS -l walltime=04:00:00
#PBS -r y

cd "$PBS_O_WORKDIR" || exit
RUN_ID=${RUN_ID:-$PBS_JOBID}
PYTHON=${PYTHON:-.venv/bin/python}
STOP_AFTER=${STOP_AFTER:-237m}
mpiexec tools/ranks.sh timeout --preserve-status "$STOP_AFTER" "$PYTHON" train_gpt.py RUN_ID="$RUN_ID" \
  RESUME=auto CHECKPOINT_EVERY=1000 MAX_WALLCLOCK_SECONDS=0 $SETTINGS
status=$?
if [ $status = 143 ]; then
  run_id=$RUN_ID
  for word in $SETTINGS; do
    [[ $word != RUN_ID=* ]] || run_id=${word#*=}
  done
  if ! grep -q '"event": "checkpoint"' "logs/$run_id.jsonl"; then
    echo "this job saved no checkpoint; without one, the next job would repeat it" >&2
    exit $status
  fi
  exec qsub -v RUN_ID="$RUN_ID",PYTHON="$PYTHON",STOP_AFTER="$STOP_AFTER",SETTINGS="$SETTINGS" tools/pbs.sh
fi
exit $status
