#!/usr/bin/env bash
# What the scripts beside it share: Ray on every node of the job, then the ranks, until one of them ends.
# --dry-run prints the commands and runs none, in a job or out of one. See docs/howto/cluster.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${VENV:-.venv}/bin/python
first_port=${PORT:-11000}         # node i has the ports from here + 100 i, to here + 100 i + 99
servers_port=20000                # SGLang's servers take free ones from here on (megatron_collab/runtime/network.py)
ray_timeout=${RAY_TIMEOUT:-300}   # seconds
rank_wait=60                      # seconds from the end of one node's ranks until the others' are killed
save_seconds=${SAVE_SECONDS:-210} # from USR1 on; what --signal leaves, less the two below
end_wait=30                       # seconds for what is killed at the end
log_wait=60                       # seconds to keep Ray's logs
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
[ -z "${CACHE_DIR:-}" ] || export XDG_CACHE_HOME=$CACHE_DIR # kernels, which take minutes to compile
export RAY_worker_niceness=0 # else 15: workers would starve beside ranks that are busy
export RAY_raylet_start_wait_time_s=$ray_timeout # else 30 until a process has found its node, and Ray gives up by itself
ulimit -n "$(ulimit -Hn)" # a connection a conversation; srun hands the limit on
ulimit -l "$(ulimit -Hl)" # what NCCL registers with InfiniBand

preempted=75 # of megatron_collab/runtime/process.py
dry_run=false overrides=()
for argument in "$@"; do
  if [ "$argument" = --dry-run ]; then dry_run=true; else overrides+=("$argument"); fi
done
[ -z "${SLURM_JOB_ID:-}" ] || overrides+=("launch.nodes=$SLURM_NNODES")

# Slurm wants the nodes back. Who is told, and how, is below; until then the signal must not end this script.
wanted=false
trap 'wanted=true' USR1

say() { echo "$(date +%T) $*"; }
refuse() { echo "megatron-collab: $*" >&2; exit 2; }

# --- What runs where ---------------------------------------------------------------------------------------------

# Every program of ours on a node is a `step`, in a container where one is asked for: by pyxis, which is an option of
# srun, or by apptainer, which stands before the command (`inside`). What this script itself asks runs `here`. A step
# gets the whole environment, whatever sbatch was told to export, and shares the nodes with the other steps.
plain=(srun --export=ALL --overlap --cpu-bind=none --ntasks-per-node=1)
step=("${plain[@]}") inside=() here=()
image=${CONTAINER_IMAGE:-${APPTAINER_IMAGE:-}}
mounts=$PWD:$PWD,/tmp:/tmp${CACHE_DIR:+,$CACHE_DIR:$CACHE_DIR}${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS} # Ray's sockets and logs are in /tmp
case ${CACHE_DIR:-/} in /*) ;; *) refuse "CACHE_DIR=$CACHE_DIR: set an absolute path, which is the same on every node" ;; esac
if [ -n "${CONTAINER_IMAGE:-}" ] && [ -n "${APPTAINER_IMAGE:-}" ]; then
  refuse "CONTAINER_IMAGE and APPTAINER_IMAGE: one container only; unset the one that is not meant"
elif [ -n "${CONTAINER_IMAGE:-}" ]; then
  case $image in
    /* | ./* | *.sqsh) [ -e "$image" ] || refuse "CONTAINER_IMAGE=$image: no such file; import it with enroot import" ;;
  esac
  step+=(--container-image="$image" --container-mounts="$mounts" --container-workdir="$PWD")
  here=("${step[@]}" --nodes=1 --ntasks=1 --relative=0)
elif [ -n "${APPTAINER_IMAGE:-}" ]; then
  [ -e "$image" ] || refuse "APPTAINER_IMAGE=$image: no such file; make it with apptainer build"
  $dry_run || command -v apptainer >/dev/null || refuse "APPTAINER_IMAGE=$image: apptainer is not in PATH"
  inside=(apptainer exec --nv --bind "$mounts" --pwd "$PWD" "$image")
  here=("${inside[@]}")
elif [ -n "${CONTAINER_MOUNTS:-}" ]; then
  refuse "CONTAINER_MOUNTS=$CONTAINER_MOUNTS: there is no container; set CONTAINER_IMAGE or APPTAINER_IMAGE"
fi

make_cache=("${plain[@]}" mkdir -p "${CACHE_DIR:-}") # on every node: no container starts if a mounted folder is missing
$dry_run || [ -z "${CACHE_DIR:-}" ] || "${make_cache[@]}"

# A dry run starts no container.
if $dry_run || [ -z "$image" ]; then
  asked=()
  [ -x "$python" ] || refuse "no $python in $PWD; call sbatch in the checkout, or set CHECKOUT and VENV"
else
  asked=("${here[@]}")
fi
settings=$("${asked[@]}" "$python" -m megatron_collab.launch.slurm settings "${overrides[@]}")
{ read -r run_dir; read -r node_count; read -r ranks_per_node; read -r ray_cpus; } <<<"$settings"

if [ -n "${SLURM_JOB_ID:-}" ]; then
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
else
  $dry_run || refuse "not in a job of Slurm; use sbatch, or --dry-run"
  for ((i = 0; i < node_count; i++)); do nodes+=("node$i"); done
fi

read -r ephemeral _ </proc/sys/net/ipv4/ip_local_port_range
below=$((ephemeral < servers_port ? ephemeral : servers_port))
((first_port + 100 * node_count <= below)) ||
  refuse "PORT=$first_port: $node_count nodes need 100 ports each below $below: SGLang has those from $servers_port on," \
    "the kernel hands out those from $ephemeral on"

attempt=0
while [ -e "$run_dir/logs/attempt-$attempt" ]; do attempt=$((attempt + 1)); done
logs=$run_dir/logs/attempt-$attempt
ray_dir=/tmp/ray-${SLURM_JOB_ID:-JOB} # node i: -i behind it; short, since sockets lie in it

# --- Running, or printing ------------------------------------------------------------------------------------------

# A command as it could be pasted. What only the nodes know stands there as a variable: a mark until then, which nobody
# types.
mark=__ADDRESS_OF_NODE_
show() {
  local line
  printf -v line '%q ' "$@"
  sed -E "s/$mark([0-9]+)/\"\${address[\1]}\"/g" <<<"${line% }"
}

# start LOG COMMAND…: in the background; its process id is `started`.
start() {
  if $dry_run; then echo "$(show "${@:2}") >$(show "$1") 2>&1 &"; else "${@:2}" >"$1" 2>&1 & started=$!; fi
}

# Until one of these processes ends: it is `ended`, its exit code `code`. The first of them counts where several have
# ended. A signal that is trapped interrupts the sleep. Where they do not end in time after USR1, neither does the job.
until_one_ends() {
  while true; do
    for ended in "$@"; do
      if ! kill -0 "$ended" 2>/dev/null; then code=0; wait "$ended" || code=$?; return; fi
    done
    if [ -n "$save_until" ] && ((SECONDS >= save_until)); then
      say "not saved $save_seconds s after USR1 (SAVE_SECONDS): the last checkpoint counts"
      finish "$preempted"
    fi
    sleep 1 & wait $! || true
  done
}

# What was killed may write for a moment longer.
keep_logs=(timeout --kill-after=5 "$log_wait" "${plain[@]}" --nodes="$node_count" --ntasks="$node_count" bash -c
  'dir=$0-$SLURM_NODEID; cp -r "$dir/session_latest/logs" "$1/ray-$SLURM_NODEID"; sleep 2; rm -rf "$dir"'
  "$ray_dir" "$logs")
requeue=(scontrol requeue "${SLURM_JOB_ID:-JOB}")

# End the job's processes, keep Ray's logs, and exit. All of it has a deadline, since Slurm may want the nodes at once;
# what has not ended by then ends with the job. The logs come before the requeue, after which no step can be started.
finish() {
  local processes=(${ranks:+"$ranks"} "${ray[@]}") deadline=$((SECONDS + end_wait))
  trap '' USR1
  kill "${processes[@]}" 2>/dev/null || true
  while ((SECONDS < deadline)) && kill -0 "${processes[@]}" 2>/dev/null; do sleep 0.2; done # true while any is there
  "${keep_logs[@]}" || true
  if [ "$1" = "$preempted" ] && $wanted; then # else it was SIGTERM, by someone who ends the job
    say "preempted: job $SLURM_JOB_ID goes back into the queue"
    "${requeue[@]}" && sleep infinity # Slurm ends this script
  fi
  exit "$1"
}

# One of Ray's nodes has ended: say which.
lost_ray() {
  local i
  for i in "${!ray[@]}"; do
    if [ "${ray[i]}" = "$ended" ]; then say "Ray on ${nodes[i]} ended with $code, $1; see $logs/ray-$i.log"; fi
  done
  finish 1
}

# await_ray NODE…: until these are Ray's nodes, and no others.
await_ray() {
  local waiting=("${here[@]}" "$python" -m megatron_collab.launch.slurm wait "${address[0]}:$first_port" "$ray_timeout" "$@")
  if $dry_run; then show "${waiting[@]}"; return; fi
  "${waiting[@]}" & started=$!
  until_one_ends "$started" "${ray[@]}"
  if [ "$ended" != "$started" ]; then lost_ray "before all were there"; fi
  if ((code != 0)); then finish "$code"; fi
  say "Ray has $# of $node_count nodes"
}

# The preemption notice goes to the ranks alone; they save and end. Without ranks there is nothing to save.
give_back() {
  trap : USR1 # once is enough
  wanted=true save_until=$((SECONDS + save_seconds))
  say "received a preemption notice (USR1)"
  if [ -z "$ranks" ]; then finish "$preempted"; fi
  kill -USR1 "$ranks" 2>/dev/null || true
}

# No client asks a node of the job through a proxy; each node is an entry, as megatron_collab/runtime/network.py says.
bypass_proxies() {
  local hosts
  hosts=localhost,127.0.0.1,::1,$(IFS=,; echo "${address[*]}")
  export no_proxy="${no_proxy-${NO_PROXY-}},$hosts" NO_PROXY="${NO_PROXY-${no_proxy-}},$hosts"
}

# --- The job -------------------------------------------------------------------------------------------------------

ranks='' ray=() save_until=''
trap give_back USR1
if $wanted; then give_back; fi

addresses=("${step[@]}" --nodes="$node_count" --ntasks="$node_count" --label "${inside[@]}" "$python"
  -m megatron_collab.launch.slurm address "${overrides[@]}")
if $dry_run; then
  for ((i = 0; i < node_count; i++)); do address+=("$mark$i"); done
  [ -z "${CACHE_DIR:-}" ] || show "${make_cache[@]}"
  show mkdir -p "$logs"
  echo "mapfile -t address < <($(show "${addresses[@]}") | sort -n | sed 's/.*: //')"
  declare -f bypass_proxies
  echo bypass_proxies
  show export OMP_NUM_THREADS="$OMP_NUM_THREADS" ${CACHE_DIR:+XDG_CACHE_HOME="$CACHE_DIR"} RAY_worker_niceness=0 \
    RAY_raylet_start_wait_time_s="$RAY_raylet_start_wait_time_s"
  echo "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=\"\$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')\""
  echo "export RAY_ADDRESS=$(show "${address[0]}:$first_port")"
else
  mkdir -p "$logs"
  found=$("${addresses[@]}") || refuse "the nodes have no address to talk over; see above"
  mapfile -t address < <(sort -n <<<"$found" | sed 's/.*: //')
  bypass_proxies
  RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN RAY_ADDRESS=${address[0]}:$first_port
  say "attempt $attempt, logs in $logs"
  for i in "${!nodes[@]}"; do say "node $i: ${nodes[i]} at ${address[i]}"; done
fi

for i in "${!nodes[@]}"; do
  port=$((first_port + 100 * i))
  if ((i == 0)); then
    role=(--head --port="$port" --ray-client-server-port=$((port + 8)) --include-dashboard=false)
  else
    role=(--address="${address[0]}:$first_port")
  fi
  start "$logs/ray-$i.log" "${step[@]}" --nodes=1 --ntasks=1 --nodelist="${nodes[i]}" \
    "${inside[@]}" "${python%python}ray" start "${role[@]}" --block --disable-usage-stats --log-style=record --num-cpus="$ray_cpus" \
    --node-name="${nodes[i]}" --node-ip-address="${address[i]}" --temp-dir="$ray_dir-$i" \
    --node-manager-port=$((port + 2)) --object-manager-port=$((port + 3)) --runtime-env-agent-port=$((port + 4)) \
    --dashboard-agent-grpc-port=$((port + 5)) --metrics-export-port=$((port + 6)) \
    --dashboard-agent-listen-port=$((port + 7)) --min-worker-port=$((port + 10)) --max-worker-port=$((port + 99))
  $dry_run || ray+=("$started")
  if ((i == 0)); then await_ray "${nodes[0]}"; fi # a node that meets a head which is half there gives up
done
if ((node_count > 1)); then await_ray "${nodes[@]}"; fi

# A signal waits until the ranks can heed it. Where the ranks of one node fail alone, the others wait for them in vain.
start "$logs/ranks.log" "${step[@]}" --nodes="$node_count" --ntasks="$node_count" --wait="$rank_wait" \
  --output="$logs/ranks-%n.log" \
  "${inside[@]}" env --block-signal=USR1 bash -c \
  'exec "$0" -m megatron_collab.launch.torchrun --node-rank="$SLURM_NODEID" --log-dir="$1/ranks-$SLURM_NODEID" "${@:2}"' \
  "$python" "$logs" --nnodes="$node_count" --nproc-per-node="$ranks_per_node" --max-restarts=0 \
  --master-addr="${address[0]}" --master-port=$((first_port + 1)) --rdzv-id="${SLURM_JOB_ID:-JOB}" --tee=3 \
  -m megatron_collab.train "${overrides[@]}"
if $dry_run; then
  echo "# once the ranks or a node of Ray have ended, and the others were killed:"
  echo "# $(show "${keep_logs[@]}")"
  echo "# and where the ranks ended with $preempted:"
  echo "# $(show "${requeue[@]}")"
  exit 0
fi
ranks=$started

until_one_ends "$ranks" "${ray[@]}"
if [ "$ended" != "$ranks" ]; then lost_ray "and the ranks with it"; fi
say "the ranks ended with $code; see $logs/ranks*.log"
if ((code != 0)); then tail -n 20 "$logs/ranks.log" "$logs/ranks-0.log" || true; fi
# 138: the signal met srun before it could pass it on.
if $wanted && ((code == 138)); then code=$preempted; fi
finish "$code"
