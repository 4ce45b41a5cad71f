#!/usr/bin/env bash
# wheels_alone.sh COMMAND…: runs COMMAND as on a node that has CUDA's wheels alone, and none of its toolkits or libraries.
#
# In a mount namespace of its own the toolkits are empty folders, CUDA's libraries and compilers elsewhere are removed
# from what the command sees, and the loader's cache does not know them. The command's LD_LIBRARY_PATH is
# DRIVER_LIBRARIES, the folder of what stands in for the driver's libraries. Needs root, or user namespaces.
set -euo pipefail

TOOLKITS="/usr/local/cuda* /opt/cuda* /opt/nvidia/hpc_sdk*"
LIBRARIES='^lib(cuda|cudart|cublas(Lt)?|cudnn.*|nvrtc.*|nvJitLink|nccl|cufft|curand|cusolver|cusparse(Lt)?|cupti|nvToolsExt|nvvm|nvidia-ml)\.so'

if [ -z "${WHEELS_ALONE:-}" ]; then
    root=()
    [ "$(id -u)" = 0 ] || root=(--map-root-user)
    WHEELS_ALONE=$(mktemp -d)
    export WHEELS_ALONE
    trap 'rm -rf "$WHEELS_ALONE"' EXIT # the mounts on it end with the namespace
    unshare --mount "${root[@]}" "${BASH_SOURCE[0]}" "$@"
    exit
fi

# Remove FILE… in FOLDER for this namespace: what is written there goes to a folder in memory.
remove() {
    local folder=$1 layer
    shift
    layer=$(mktemp -d -p "$WHEELS_ALONE")
    mkdir "$layer/upper" "$layer/work"
    mount -t overlay overlay -o "lowerdir=$folder,upperdir=$layer/upper,workdir=$layer/work" "$folder"
    (cd "$folder" && rm -f "$@")
}

mount -t tmpfs wheels-alone "$WHEELS_ALONE"
for toolkit in $TOOLKITS; do
    if [ -d "$toolkit" ] && [ ! -L "$toolkit" ]; then mount -t tmpfs none "$toolkit"; fi
done
# Folders that the loader searches by itself or by its cache, and those of programs.
while read -r folder; do
    [ -d "$folder" ] || continue # of a toolkit
    mapfile -t files < <(ls -U "$folder" | grep -E "$LIBRARIES" || true)
    if ((${#files[@]})); then remove "$folder" "${files[@]}"; fi
done < <(ldconfig -p | sed -n 's|.* => \(/.*\)/[^/]*$|\1|p' | xargs -r realpath -m | sort -u)
while read -r program; do
    remove "$(dirname "$program")" nvcc
done < <(type -ap nvcc | xargs -r realpath -s | sort -u)
ldconfig -C "$WHEELS_ALONE/ld.so.cache" 2>/dev/null
mount --bind "$WHEELS_ALONE/ld.so.cache" /etc/ld.so.cache

for name in WHEELS_ALONE CUDA_HOME CUDA_PATH CUDNN_HOME CUDNN_PATH LD_PRELOAD; do unset "$name"; done
export LD_LIBRARY_PATH=${DRIVER_LIBRARIES:-}
exec "$@"
