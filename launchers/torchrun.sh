#!/usr/bin/env bash
# One node, one process per GPU (or --nproc N), by torchrun.
# usage: launchers/torchrun.sh [--dry-run] [--nproc N] RECIPE [options of gptscale run]
set -euo pipefail

dry_run=
nproc=gpu
while [[ ${1-} == --* ]]; do
    case $1 in
        --dry-run) dry_run=1; shift ;;
        --nproc) nproc=${2:?--nproc needs a number}; shift 2 ;;
        *) echo "torchrun.sh: unknown option $1 before RECIPE" >&2; exit 2 ;;
    esac
done
recipe=${1:?usage: torchrun.sh [--dry-run] [--nproc N] RECIPE [options]}
shift

command=(torchrun --standalone --nproc-per-node "$nproc" -m gptscale.recipes "$recipe" "$@")
if [[ $dry_run ]]; then
    printf '%q ' "${command[@]}"
    echo
    exit
fi
exec "${command[@]}"
