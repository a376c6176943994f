#!/bin/bash
# Give each process of Open MPI, MPICH, PALS or Slurm the variables that torchrun would set, then run a command:
#     mpiexec -n 16 tools/ranks.sh python train_gpt.py
#     srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 tools/ranks.sh python train_gpt.py
# Where neither Slurm nor PBS knows the first machine, set MASTER_ADDR to the address of rank 0.
for names in "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE" \
  "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS" "PMI_RANK PMI_SIZE PMI_LOCAL_RANK PMI_LOCAL_SIZE" \
  "SLURM_PROCID SLURM_STEP_NUM_TASKS SLURM_LOCALID SLURM_STEP_TASKS_PER_NODE"; do
  read -r rank size local_rank local_size <<< "$names"
  [[ -n ${!rank-} && -n ${!size-} && -n ${!local_rank-} && -n ${!local_size-} ]] && break
done
export RANK=${!rank:?tools/ranks.sh knows only Open MPI, MPICH, PALS and srun} WORLD_SIZE=${!size:?must be set} LOCAL_RANK=${!local_rank}
: "${!local_size:?must be set}"
export LOCAL_WORLD_SIZE=${!local_size%%[!0-9]*}  # Slurm writes 4(x2)
[[ ${CUDA_VISIBLE_DEVICES-,} = *,* ]] || LOCAL_RANK=0  # the process sees one GPU only
if [ "$rank" = SLURM_PROCID ] && [ -n "${SLURM_CPUS_PER_TASK-}" ]; then  # The process has these cores for itself.
  export OMP_NUM_THREADS=${OMP_NUM_THREADS-$SLURM_CPUS_PER_TASK}
fi
if [ -z "${MASTER_ADDR-}" ]; then
  nodes=${SLURM_JOB_NODELIST-}
  [ "$rank" != SLURM_PROCID ] || nodes=$SLURM_STEP_NODELIST
  if [ "$WORLD_SIZE" = "$LOCAL_WORLD_SIZE" ]; then
    MASTER_ADDR=127.0.0.1
  elif [ -e "${PBS_NODEFILE-}" ]; then
    read -r MASTER_ADDR < "$PBS_NODEFILE"
  elif [ -n "$nodes" ]; then
    MASTER_ADDR=$(scontrol show hostnames "$nodes" | head -n 1)
  fi
fi
export MASTER_ADDR=${MASTER_ADDR:?must be set to the address of rank 0}
job=$(cksum <<< "${SLURM_JOB_ID-}${PBS_JOBID-}${PMIX_NAMESPACE-}")  # two jobs on a machine have two ports
export MASTER_PORT=${MASTER_PORT:-$((29500 + ${job%% *} % 1000))}
exec "$@"
