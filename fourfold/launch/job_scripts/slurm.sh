#!/bin/bash
# Written by `fourfold launch slurm` for the site @SITE@. Submit it with: sbatch FILE
@SBATCH@
# signal:    SLURM sends SIGUSR1 to the processes (not to this script) this many seconds before the wall time ends.
#            They save a checkpoint after their step and exit with code 3.
# requeue:   The job may restart under the same id.
# open-mode: The output of earlier starts is kept.

@SETUP@
# srun returns the highest exit code. When one process ends, srun gives all other processes some time (wait) to save or
# to report why the job hangs, and then kills them.
srun @SRUN@ \
    @COMMAND@
code=$?

# Count consecutive crashes, because their number is limited. A start that ended with a save resets the count.
restarts=${SLURM_RESTART_COUNT:-0}
last_save=$SLURM_JOB_NAME-$SLURM_JOB_ID.restarts
crashes=$((restarts - $(cat "$last_save" 2> /dev/null || echo 0)))

case $code in
    0) # done
        rm -f "$last_save"
        exit 0
        ;;
    3) # stopped by a signal, after saving
        echo $((restarts + 1)) > "$last_save"
        ;;
    2 | 126 | 127 | 130) # a mistake (see the message above), a missing command, or Ctrl-C
        echo "exit code $code: not restarted" >&2
        exit "$code"
        ;;
    *) # a crash: training resumes from the newest checkpoint
        if ((crashes >= @MAX_CRASHES@)); then
            echo "exit code $code, after $crashes restarts in a row without a save: not restarted" >&2
            exit "$code"
        fi
        ;;
esac

# scancel also ends this script, so a canceled job does not get here.
echo "exit code $code: restarting the job (restart $((restarts + 1)))" >&2
scontrol requeue "$SLURM_JOB_ID"
exit "$code"
