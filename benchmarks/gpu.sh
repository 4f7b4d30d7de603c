#!/usr/bin/env bash
# Measure what one GPU does with 1.6b, by default in ten minutes. Stages that find no time are left for the next call.
# usage: benchmarks/gpu.sh [--list] [--images DATA] FOLDER [MINUTES]
# FOLDER gets CSVs, pictures and logs. Stages that are done are not repeated. --list prints the commands and runs none.
# DATA is what the vision experiments train on: digits (the default, which is embedded), or a folder with MNIST's files.
# The stage that was tried least often begins, so that one that fails or takes too long does not keep the others from their turn.
set -uo pipefail

list='' images=digits
while [[ ${1-} == --* ]]; do
    case $1 in
        --list) list=1 ;;
        --images) images=${2:?usage: gpu.sh --images DATA FOLDER}; shift ;;
        *) echo "gpu.sh: unknown option $1" >&2; exit 2 ;;
    esac
    shift
done
out=${1:?usage: gpu.sh [--list] [--images DATA] FOLDER [MINUTES]}
[[ $out$images$0 == *" "* ]] && { echo "gpu.sh: a path with a space in it" >&2; exit 2; }
ends=$((SECONDS + 60 * ${2:-10} - 15))
failed=0 not_done=()
root=$(cd "$(dirname "$0")/.." && pwd)
# The benches are found from whatever folder this is called in.
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
((gpus)) || gpus=1
# This limits one process that a bench starts. It is less than the whole time, so that the bench itself can report a process that
# hangs, before it is killed with it.
export GPTSCALE_WORKER_LIMIT_S=$((60 * ${2:-10} * 4 / 5))

vision="--data $images --device cuda --out $out/vision"
# The same work by each recipe on one GPU: what its engine adds where there is nothing to split.
one="--nproc 1 --model 1.6b --precision bf16 --data synthetic --global-batch-size 8 --micro-batch-size 4 --steps 20 --out $out/recipes"

# In the order of their worth. By estimate the first five take ten minutes of an H200. The ratio that counts most comes first in each
# list of contenders, and what takes minutes to tune comes last, in case time is up.
stages=(
    "model   python -m benchmarks.model --contenders single_compiled,minimal_compiled,single,single_epilogues,single_autotuned --rounds 1 --steps 50 --csv $out/model.csv --png $out/model.png"
    "handout python -m benchmarks.model --batch-size 8 --contenders single_compiled,handout,handout_best,minimal_compiled --rounds 1 --steps 50 --csv $out/handout.csv"
    "on_single gptscale run single $one"
    "on_zero3 gptscale run zero3 $one"
    "on_fsdp gptscale run fsdp $one"
    "fp8     python -m benchmarks.model --contenders single_compiled,single_fp8 --rounds 1 --steps 50 --csv $out/fp8.csv"
    "strategies gptscale lenet strategies $vision --nproc $gpus --repeats 1 --csv $out/strategies.csv --png $out/strategies.png"
    "precision gptscale lenet precision $vision --repeats 1 --csv $out/precision.csv --png $out/precision.png"
    "fused   gptscale lenet fused $vision --repeats 1 --csv $out/fused.csv --png $out/fused.png"
    "ops     python -m benchmarks.ops --device cuda --csv $out/ops.csv --pictures $out"
    "minigrad gptscale lenet minigrad --model LeNet --pool-backward triton --data $images --device cuda --epochs 2 --csv $out/minigrad.csv"
    "heads25 python -m benchmarks.model --heads 25 --contenders single_compiled --rounds 1 --steps 50 --csv $out/heads25.csv"
    "text    python -m benchmarks.model --data text --contenders single_compiled --rounds 1 --steps 50 --csv $out/text.csv"
    "graphs  python -m benchmarks.model --contenders single_compiled,single_graphs --rounds 1 --steps 50 --csv $out/graphs.csv"
)
for recipe in ddp zero1 zero2 fsdp_offload zero_offload zero_infinity accelerate_fsdp lightning_fabric fairscale_sdp fairscale_fsdp \
    tensor_parallel context_parallel pipeline hybrid_3d colossal_tensor colossal_pipeline colossal_zero colossal_gemini; do
    stages+=("on_$recipe gptscale run $recipe $one")
done
stages+=(
    "on_handout gptscale run handout --same-work $one"
    "baseline gptscale lenet baseline $vision --csv $out/baseline.csv --png $out/baseline.png"
    "workers gptscale lenet workers $vision --repeats 1 --csv $out/workers.csv --png $out/workers.png"
    "snapshot gptscale lenet memory $vision --csv $out/memory-lenet-128.csv --snapshot $out/snapshot.pickle --png $out/snapshot.png"
    "batch   gptscale lenet batch $vision --nproc $gpus --repeats 1 --csv $out/batch.csv --png $out/batch.png"
    "seq     python -m benchmarks.model --scale seq --contenders single_compiled --steps 10 --csv $out/seq.csv --png $out/seq.png"
    "layers  python -m benchmarks.model --scale layers --contenders single_compiled --steps 10 --csv $out/layers.csv --png $out/layers.png"
    "losses  gptscale run single --model gpt2 --steps 300 --precision bf16 --compile --out $out/losses"
    "losses8 gptscale run single --model gpt2 --steps 300 --precision fp8 --compile --out $out/losses"
    # It goes on from its own CSV, so that it never counts as done.
    "memory  python -m benchmarks.memory --minutes MINUTES --csv $out/memory.csv --md $out/memory.md --png $out/memory.png"
    "tests   python -m pytest -q -m gpu $root/tests"
)
# NCCL does not let two ranks share a GPU.
((gpus > 1)) && stages+=("backend gptscale lenet backend $vision --nproc $gpus --csv $out/backend.csv --png $out/backend.png")
mapfile -t stages < <(
    for stage in "${stages[@]}"; do
        echo "$(cat "$out/${stage%% *}.tried" 2>/dev/null | wc -l) $stage"
    done | sort --stable --numeric-sort --key 1,1 | cut --delimiter " " --fields 2-
)

for stage in "${stages[@]}"; do
    read -r name command <<<"$stage"
    [[ -n $list ]] && { echo "$command"; continue; }
    mkdir -p "$out"
    [[ -e $out/$name.done ]] && continue
    seconds=$((ends - SECONDS))
    if ((seconds < 45)); then not_done+=("$name"); continue; fi
    command=${command/MINUTES/$((seconds / 60))}
    # Keep what an earlier try measured, because this one may get less far.
    [[ -e $out/$name.csv && $name != memory ]] && mv --backup=numbered "$out/$name.csv" "$out/$name.earlier.csv"
    echo "$name, at most $seconds s: $command" | tee -a "$out/$name.tried"
    # The words of a stage hold no quotes, and paths hold no spaces.
    # shellcheck disable=SC2086
    timeout --kill-after 10 "$seconds" $command >"$out/$name.log" 2>&1
    status=$?
    tail -n 40 "$out/$name.log"
    case $status in
        0) [[ $name == memory ]] || touch "$out/$name.done" ;;
        124 | 137) not_done+=("$name") ;;
        *) failed=1; echo "gpu.sh: $name ended with status $status, see $out/$name.log" >&2 ;;
    esac
done
[[ -z $list && -e $out/recipes/summary.csv ]] && gptscale compare "$out/recipes" --csv "$out/recipes.csv" --png "$out/recipes.png"
((${#not_done[@]})) && echo "not done for want of time: ${not_done[*]}; the same command again carries on"
exit $failed
