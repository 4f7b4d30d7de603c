#!/usr/bin/env bash
# What one GPU does with 1.6b, the most telling first, in ten minutes; what did not fit into the time is left for the next call.
# usage: launchers/bench_gpu.sh [--list] FOLDER [MINUTES]      (FOLDER: CSVs, pictures and logs; done stages are not repeated)
set -uo pipefail

list=
[[ ${1-} == --list ]] && { list=1; shift; }
out=${1:?usage: bench_gpu.sh [--list] FOLDER [MINUTES]}
[[ $out$0 == *" "* ]] && { echo "bench_gpu.sh: a path with a space in it" >&2; exit 2; }
ends=$((SECONDS + 60 * ${2:-10} - 15))
failed=0 left=()
tests=$(dirname "$0")/../tests

# Ten minutes of an H200 by estimate: the first six stages. Loss curves and the ladder take further calls.
stages=(
    "model   gptscale bench model --contenders single,single_compiled,single_autotuned,single_epilogues,minimal_compiled --rounds 1 --steps 50 --csv $out/model.csv --png $out/model.png"
    "parts   gptscale bench parts --csv $out/parts.csv"
    "handout gptscale bench model --batch-size 8 --contenders single_compiled,handout,handout_best,minimal_compiled --rounds 1 --steps 50 --csv $out/handout.csv"
    "fp8     gptscale bench model --contenders single_compiled,single_fp8 --rounds 1 --steps 50 --csv $out/fp8.csv"
    "heads25 gptscale bench model --heads 25 --contenders single_compiled --rounds 1 --steps 50 --csv $out/heads25.csv"
    "text    gptscale bench model --data text --contenders single_compiled --rounds 1 --steps 50 --csv $out/text.csv"
    "graphs  gptscale bench model --contenders single_compiled,single_graphs --rounds 1 --steps 50 --csv $out/graphs.csv"
    "ops     gptscale bench ops --csv $out/ops.csv --pictures $out"
    "tests   python -m pytest -q -m gpu $tests"
    "seq     gptscale bench model --scale seq --contenders single_compiled --steps 10 --csv $out/seq.csv --png $out/seq.png"
    "layers  gptscale bench model --scale layers --contenders single_compiled --steps 10 --csv $out/layers.csv --png $out/layers.png"
    "losses  gptscale run single --model gpt2 --steps 300 --precision bf16 --compile --out $out/losses"
    "losses8 gptscale run single --model gpt2 --steps 300 --precision fp8 --compile --out $out/losses"
    # carries on from its own CSV, so that it is never done here
    "memory  gptscale bench memory --minutes MINUTES --csv $out/memory.csv --md $out/memory.md --png $out/memory.png"
)

for stage in "${stages[@]}"; do
    read -r name command <<<"$stage"
    [[ -n $list ]] && { echo "$command"; continue; }
    mkdir -p "$out"
    [[ -e $out/$name.done ]] && continue
    seconds=$((ends - SECONDS))
    if ((seconds < 45)); then left+=("$name"); continue; fi
    command=${command/MINUTES/$((seconds / 60))}
    echo "$name, at most $seconds s: $command"
    # the words of a stage hold no quotes, and paths no spaces
    # shellcheck disable=SC2086
    timeout --kill-after 10 "$seconds" $command >"$out/$name.log" 2>&1
    status=$?
    tail -n 40 "$out/$name.log"
    case $status in
        0) [[ $name == memory ]] || touch "$out/$name.done" ;;
        124 | 137) left+=("$name") ;;
        *) failed=1; echo "bench_gpu.sh: $name ended with status $status, see $out/$name.log" >&2 ;;
    esac
done
((${#left[@]})) && echo "not done for want of time: ${left[*]}; the same command again carries on"
exit $failed
