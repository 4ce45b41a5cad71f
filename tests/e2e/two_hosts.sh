#!/usr/bin/env bash
# Two hosts with a network of their own, 10.77.0.1 and 10.77.0.2 on fab0: on each a Ray node and a torchrun agent.
# With GPUS=1 each has a GPU of its own, and NCCL takes them for two machines.
# usage: unshare --user --map-root-user --net --mount --pid --fork --kill-child --mount-proc two_hosts.sh FOLDER OPTION...
# All of it ends with this script, the first process of its namespace. What each host printed is FOLDER/host{0,1}.log.
set -euo pipefail
folder=$1
shift
mount -t tmpfs tmpfs /run # where ip keeps the names of networks, and Ray its sockets, whose paths must be short
ip netns add other
ip link add fab0 type veth peer name fab0 netns other
ip address add 10.77.0.1/24 dev fab0
ip -n other address add 10.77.0.2/24 dev fab0
for interface in lo fab0; do
    ip link set "$interface" up
    ip -n other link set "$interface" up
done
mkdir /run/shm # what processes of one host share, those of the other do not see
# shellcheck disable=SC2016
second() { nsenter --net=/run/netns/other unshare --mount sh -c 'mount --bind /run/shm /dev/shm && exec "$@"' sh "$@"; }
own_gpu() {
    [ -z "${GPUS:-}" ] || export CUDA_VISIBLE_DEVICES="$1" NCCL_HOSTID="host$1"
    "${@:2}"
}

export RAY_ADDRESS=10.77.0.1:6379 RAY_AUTH_MODE=token
export RAY_raylet_start_wait_time_s=300
ray=("${PYTHON:?}" -m ray.scripts.scripts start --num-cpus 1 --disable-usage-stats)
"${ray[@]}" --head --node-ip-address 10.77.0.1 --port 6379 --include-dashboard false --temp-dir /run/ray \
    >"$folder/ray0.log" 2>&1
second "${ray[@]}" --address "$RAY_ADDRESS" --node-ip-address 10.77.0.2 >"$folder/ray1.log" 2>&1

agent=("$PYTHON" -m megatron_collab.launch.torchrun --nnodes 2 --nproc-per-node 1 --master-addr 10.77.0.1 --master-port 29400)
train=(-m megatron_collab.train launch.nodes=2 launch.nproc_per_node=1 launch.interface=fab0)
own_gpu 0 "${agent[@]}" --node-rank 0 "${train[@]}" "$@" >"$folder/host0.log" 2>&1 &
first=$!
own_gpu 1 second "${agent[@]}" --node-rank 1 "${train[@]}" "$@" >"$folder/host1.log" 2>&1 &
other=$!
wait "$first"
wait "$other"
