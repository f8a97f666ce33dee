#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=7
#SBATCH --time=01:00:00
#SBATCH --account=project_1
#SBATCH --partition=standard-g
#SBATCH --output=runs/%x_%j.out
#SBATCH --open-mode=append
#SBATCH --signal=USR1@120
#SBATCH --requeue
# samestep submit --profile lumi-g --nodes 2 --account project_1 --container a.sif train.py

# what `samestep runs` reads
export SAMESTEP_RUN=/home/me/runs/train_"$SLURM_JOB_ID"
mkdir -p -m 700 "$SAMESTEP_RUN" && rm -f "$SAMESTEP_RUN/result.json"
printf '{"argv": %s, "size": %d, "slurm_job": "%s", "host": "%s", "pid": %d, "started": %d}\n' \
    '["python", "train.py"]' 16 "$SLURM_JOB_ID" "$HOSTNAME" $$ "$(date +%s)" > "$SAMESTEP_RUN/run.json"
note_end() {
    echo "{\"exit_code\": $1, \"seconds\": $SECONDS}" > "$SAMESTEP_RUN/result.json"
    return "$1"
}
export SRUN_CPUS_PER_TASK=7
export OMP_NUM_THREADS=7
export NCCL_SOCKET_IFNAME=hsn
export MIOPEN_USER_DB_PATH=/tmp/miopen
export MIOPEN_CUSTOM_CACHE_DIR=/tmp/miopen

srun --kill-on-bad-exit=1 --cpu-bind=mask_cpu:fe000000000000,fe00000000000000,fe0000,fe000000,fe,fe00,fe00000000,fe0000000000 singularity exec a.sif python train.py
code=$?
note_end "$code"
if [ "$code" -eq 75 ] && [ ! -e "$SAMESTEP_RUN/stop" ]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "stopped after a commit; submit this script again to go on"
fi
exit "$code"
