# Node check: what a job's batch script does on a first node that lacks something.  Sourced by it: see plan.shell_lines.
#
#     . node_check.sh RUN_DIR PYTHON
#
# There may be no interpreter here: bash, coreutils, grep, sed and Slurm's commands have to do.  A run that has trained
# with the same keys elsewhere is not ended by such a node: the job goes back into the queue without it.
# Source: bash(1), 4.2 and newer; scontrol(1), requeue and ExcNodeList, Slurm 22.05 and 24.11.

node_check_run=$1 node_check_python=$2

# Whether an attempt under these conditions has done a step; conditions.py makes the same digest.
has_trained() {
  local conditions number events=$node_check_run/events.jsonl
  conditions=$({ cat "$node_check_run/spec.yaml"; echo "$node_check_python"; } | sha256sum | cut -c-16)
  for number in $(sed -n "s/.*\"event\": \"attempt_started\", \"attempt\": \([0-9]*\),.*\"conditions\": \"$conditions\".*/\1/p" "$events"); do
    if grep -q "\"event\": \"first_step\", \"attempt\": $number," "$events"; then return 0; fi
  done
  return 1
}

# How many nodes in a row were unfit since the last step.
count_unfit() {
  tac "$node_check_run/events.jsonl" | sed '/"event": "first_step"/q' | grep -c '"event": "node_unfit"' || :
}

# unfit WHY: have the job start elsewhere, where that may help; returns where it may not.
unfit() {
  local job=$SLURM_JOB_ID why excluded
  if [ -z "$job" ] || ! command -v scontrol > /dev/null || ! has_trained || [ "$(count_unfit)" -ge 5 ]; then return; fi
  if [ -n "$SLURM_ARRAY_JOB_ID" ]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
  why=$(printf %s "$1" | tr -d '"\\' | tr -s '[:cntrl:]' ' ')
  printf '{"time": "%s", "event": "node_unfit", "attempt": 0, "job_id": "%s", "node": "%s", "reason": "%s"}\n' \
    "$(date -u +%Y-%m-%dT%H:%M:%S.000Z)" "$job" "$SLURMD_NODENAME" "$why" >> "$node_check_run/events.jsonl" || :
  excluded=$(scontrol show job "$job" | sed -n 's/.* ExcNodeList=\([^ (][^ ]*\).*/\1/p')
  trap '' TERM USR2  # a requeue sends TERM to this shell, which has a node to exclude still
  if scontrol requeue "$job"; then
    scontrol update JobId="$job" ExcNodeList="${excluded:+$excluded,}$SLURMD_NODENAME" || :
    echo "$SLURMD_NODENAME is left out, and the job goes back into the queue" >&2
  fi
}
