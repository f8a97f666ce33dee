#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=01:00:00
#SBATCH --mem=64G
#SBATCH --reservation=course
#SBATCH --mail-user=me@x.org
#SBATCH --mail-type=END,FAIL
#SBATCH --output=runs/%x_%j.out
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --exclusive
# samestep submit --profile gpu-node --mem 64G --reservation course --exclusive --mail-user me@x.org --mail-type END,FAIL --gpu-option gpus-per-node --label --launcher samestep --nodes 2 --wait 60 --python python train.py

export SRUN_CPUS_PER_TASK=32
export OMP_NUM_THREADS=8

srun --kill-on-bad-exit=0 --label python -m samestep run -n 4 --wait=60 train.py
code=$?
if [ "$code" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "stopped after a commit; submit this script again to go on"
fi
exit "$code"
