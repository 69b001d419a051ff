#!/usr/bin/env sh
# The router inside vLLM's server, from two commands. Before them, once: build, profile, plan and apply, measure the
# LLM (hybridindex profile llm --url http://127.0.0.1:8000 --index "$INDEX") and plan with it (plan … --llm latest).
#
#   INDEX=idx MODEL=Qwen/Qwen3-8B DEVICE=cuda:0 sh examples/beside_vllm.sh
set -eu
: "${INDEX:?an index directory with a plan}" "${MODEL:?what vLLM shall serve}" "${DEVICE:=cuda:0}"
set --
if [ -d "$MODEL" ]; then # of a model that vLLM downloads by name the weights are not known yet; a note says so
  set -- --model "$MODEL"
fi
arguments=$(hybridindex vllm-args "$INDEX" --device "$DEVICE" "$@" --args-only)
# shellcheck disable=SC2086 - words, on purpose
VLLM_PLUGINS=hybridindex HYBRIDINDEX_INDEX="$INDEX" HYBRIDINDEX_DEVICES="$DEVICE" \
  exec vllm serve "$MODEL" --host 127.0.0.1 $arguments
