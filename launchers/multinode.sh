#!/usr/bin/env bash
# Start a recipe under torchrun, one process per GPU (or --nproc N), on this node or on several.
# Several nodes: run the same line on each of them. The endpoint is one node that all can reach.
# usage: launchers/multinode.sh [--dry-run] [--nodes N --endpoint HOST[:PORT] [--id NAME]] [--nproc N] RECIPE [options of gptscale run]
set -euo pipefail

dry_run=
nodes=
endpoint=
id=gptscale
nproc=gpu
while [[ ${1-} == --* ]]; do
    case $1 in
        --dry-run) dry_run=1; shift ;;
        --nodes) nodes=${2:?--nodes needs a number}; shift 2 ;;
        --endpoint) endpoint=${2:?--endpoint needs HOST[:PORT]}; shift 2 ;;
        --id) id=${2:?--id needs a name}; shift 2 ;;
        --nproc) nproc=${2:?--nproc needs a number}; shift 2 ;;
        *) echo "multinode.sh: unknown option $1 before RECIPE" >&2; exit 2 ;;
    esac
done
if [[ -z ${1-} || ( -n $nodes && -z $endpoint ) || ( -z $nodes && -n $endpoint ) ]]; then
    echo "usage: multinode.sh [--dry-run] [--nodes N --endpoint HOST[:PORT] [--id NAME]] [--nproc N] RECIPE [options]" >&2
    exit 2
fi
recipe=$1
shift

if [[ -z $nodes ]]; then
    command=(torchrun --standalone)
else
    [[ $endpoint == *:* ]] || endpoint=$endpoint:29400
    # c10d: whichever process finds that the endpoint is its own machine serves the rendezvous, which numbers the nodes.
    command=(torchrun --nnodes "$nodes" --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "$id")
fi
command+=(--nproc-per-node "$nproc" -m gptscale.recipes "$recipe" "$@")
if [[ $dry_run ]]; then
    printf '%q ' "${command[@]}"
    echo
    exit
fi
exec "${command[@]}"
