#!/usr/bin/env bash
# Continue training a Mistral, Llama or Qwen3 model on your own text, and compare it with the original model.
#
#   examples/continue_hf_model.sh MODEL TEXT [--key value ...]
#
# MODEL is a repository on the Hugging Face Hub, such as HuggingFaceTB/SmolLM2-135M, or a local folder. TEXT is a file or
# folder that train/prepare_data.py accepts. Repeat the command to resume.
set -euo pipefail
model="$1" text="$2"

[[ -f data/continued/manifest.json ]] ||
  python train/prepare_data.py --input "$text" --tokenizer "$model" --output data/continued --eval_fraction 0.05
./run_training.sh examples/continue_hf_model.json --model.config "$model" --model.init_from "$model" "${@:3}"
python train/evaluate.py "$model" data/continued
