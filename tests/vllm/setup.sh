#!/usr/bin/env bash
# Environments and models of the suite on real vLLM replicas. Idempotent: a step is done again only when its inputs changed.
#   .venv-vllm       vLLM's CPU build (2.4 GB, ~3 min)      .venv-verifiers   verifiers and its tokenizers (0.6 GB, ~1 min)
#   .models/tiny     random weights on disk: outputs depend on the prompt      .models/small, .models/slim   for --load-format dummy
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
data=tests/data/vllm_cpu
log=.models/setup.log
mkdir -p .models
: > "$log"

# Commands run in a condition: errexit does not reach into them, so each ends at its first failure by itself.
step() { # step STAMP "what" INPUT... -- COMMAND: runs COMMAND unless STAMP holds the hash of it and of the inputs
  local stamp=$1 what=$2 hash started=$SECONDS
  shift 2
  local inputs=()
  while [ "$1" != -- ]; do inputs+=("$1"); shift; done
  shift
  hash=$({ cat "${inputs[@]}" && echo "$@"; } | sha256sum | cut -d' ' -f1)
  [ "$(cat "$stamp" 2>/dev/null || true)" = "$hash" ] && return 0
  if ! "$@" >> "$log" 2>&1; then
    echo "$what: failed; the end of $log:" >&2
    grep -v '^WARNING' "$log" | tail -n 20 >&2
    return 1
  fi
  echo "$hash" > "$stamp"
  echo "$what: done in $((SECONDS - started)) s"
}

environment() { # environment DIR REQUIREMENTS PACKAGE...: a fresh venv; the packages first, then the pinned rest as it is
  local dir=$1 requirements=$2
  shift 2
  local install=("$dir/bin/pip" install --quiet --disable-pip-version-check)
  rm -rf "$dir" && "$python" -m venv "$dir" || return
  for package in "$@"; do "${install[@]}" "$package" || return; done
  "${install[@]}" --no-deps --requirement "$requirements"
}

model() { # model DIR WEIGHTS_STD SIZE...: no WEIGHTS_STD (-), no weights on disk
  local dir=$1 deviation=$2
  shift 2
  rm -rf "$dir" && .venv-vllm/bin/python $data/make_model.py "$dir" "$@" || return
  [ "$deviation" = - ] || .venv-vllm/bin/python $data/real_weights.py "$dir" "$deviation"
}

step .venv-vllm/.stamp ".venv-vllm" $data/requirements.txt -- environment .venv-vllm $data/requirements.txt torch==2.13.0
step .venv-verifiers/.stamp ".venv-verifiers" tests/data/verifiers/requirements.txt -- \
  environment .venv-verifiers tests/data/verifiers/requirements.txt
step .models/tiny/.stamp ".models/tiny" $data/make_model.py $data/real_weights.py -- model .models/tiny 0.3
step .models/small/.stamp ".models/small" $data/make_model.py -- model .models/small - \
  --hidden 512 --layers 8 --heads 8 --kv-heads 4 --head-dim 64 --ffn 1536 --vocab 4096
step .models/slim/.stamp ".models/slim" $data/make_model.py -- model .models/slim - \
  --hidden 256 --layers 3 --heads 4 --kv-heads 2 --head-dim 64 --ffn 768 --vocab 4096
