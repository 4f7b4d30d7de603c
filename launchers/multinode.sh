#!/usr/bin/env bash
# Start a recipe under torchrun, one process per GPU (or --nproc N), on this node or on several.
# Several nodes: run the same line on each of them. The endpoint is one node that all can reach.
# --nodes 1:2 begins with two and goes on with one. --max-restarts N starts ranks again when one has died: add --resume auto.
# usage: launchers/multinode.sh [--dry-run] [--nodes N|LEAST:MOST --endpoint HOST[:PORT] [--id NAME]] [--nproc N] [--max-restarts N]
#            RECIPE [options of gptscale run]
set -euo pipefail

dry_run=
nodes=
endpoint=
id=gptscale
nproc=gpu
restarts=0
while [[ ${1-} == --* ]]; do
    case $1 in
        --dry-run) dry_run=1; shift ;;
        --nodes) nodes=${2:?--nodes needs a number}; shift 2 ;;
        --endpoint) endpoint=${2:?--endpoint needs HOST[:PORT]}; shift 2 ;;
        --id) id=${2:?--id needs a name}; shift 2 ;;
        --max-restarts) restarts=${2:?--max-restarts needs a number}; shift 2 ;;
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
[[ $restarts == 0 ]] || command+=(--max-restarts "$restarts")
command+=(--nproc-per-node "$nproc" -m gptscale.recipes "$recipe" "$@")
if [[ $dry_run ]]; then
    printf '%q ' "${command[@]}"
    echo
    exit
fi
if [[ -z $(command -v torchrun) ]]; then
    echo "gptscale: error: there is no torchrun, in PATH, activate the environment of gptscale" >&2
    exit 2
fi
if [[ -n $nodes ]]; then
    # Ranks that start again open a store of their own. torchrun's would still have the addresses of the dead.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    host=${endpoint%:*} port=${endpoint##*:}
    if ! address=$(getent ahosts "$host" | awk 'NR == 1 {print $1}') || [[ -z $address ]]; then
        echo "gptscale: error: nobody knows the machine $host, in --endpoint, give one that this node can reach" >&2
        exit 2
    fi
    own=" localhost 127.0.0.1 127.0.1.1 $(hostname) $(hostname -I 2>/dev/null) "
    # A machine that drops what it is sent would hold a single attempt for minutes.
    answers() { timeout 4 bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$host" "$port" 2>/dev/null; }
    until answers; do
        # The machine of the endpoint opens the port itself, and may start later than this one.
        [[ $own != *" $host "* && $own != *" $address "* ]] || exec "${command[@]}"
        if ((SECONDS >= 25)); then
            echo "gptscale: error: $host:$port did not answer for 25 s, in --endpoint, start the same line on $host" >&2
            exit 2
        fi
        sleep 0.2
    done
    python=$(dirname "$(command -v torchrun)")/python
    [[ -x $python ]] || python=python
    # torchrun, once it is known that another torchrun has the port.
    command=("$python" -m gptscale.launchers.endpoint "$host" "$port" "${command[@]:1}")
fi
exec "${command[@]}"
