#!/bin/bash
# Trains on one node or many:  sbatch --nodes=4 scripts/slurm/train.sh experiment=2b run.name=large
#
# Options of the sbatch command override the lines below. Submit from the folder that holds runs/ and data/, on a file
# system that all nodes share, with the environment active. Submitting the job again resumes the run; if the run is
# complete, the job ends at once.
#SBATCH --job-name=sparsellm-train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Seconds that torchrun gives ranks to save after a signal; before torch 2.13 always 30.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}"
port=$((20000 + SLURM_JOB_ID % 10000)) # a different port for each job, because jobs may share a node

# One torchrun on each node, which starts a rank on each GPU. If a rank fails, all ranks are restarted.
# srun (SLURM 22.05 and later) does not take a task's number of CPUs from the lines above.
exec srun --cpus-per-task="$SLURM_CPUS_PER_TASK" python -m torch.distributed.run \
    --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$SLURM_GPUS_ON_NODE" --max-restarts=3 \
    --rdzv-backend=c10d --rdzv-endpoint="$first:$port" --rdzv-id="$SLURM_JOB_ID" \
    -m sparsellm.train "$@"
