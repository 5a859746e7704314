#!/usr/bin/env bash
# Filter two corpora with datatrove, and train a new model on 80 % web pages and 20 % code.
#
#   examples/datatrove_mixture.sh WEB CODE [--key value ...]
#
# WEB and CODE are folders of .parquet files. VOCAB_SIZE sets the size of the vocabulary. Repeat the command to resume.
set -euo pipefail
mix=data/mixture

python examples/datatrove_filter.py "$1" $mix/web-text
python examples/datatrove_filter.py "$2" $mix/code-text
[[ -d $mix/tokenizer ]] ||
  python train/train_tokenizer.py --input $mix/web-text $mix/code-text --vocab_size "${VOCAB_SIZE:-32000}" \
    --output $mix/tokenizer
for name in web code; do
  [[ -f $mix/$name/manifest.json ]] ||
    python train/prepare_data.py --input $mix/$name-text --tokenizer $mix/tokenizer --output $mix/$name \
      --eval_fraction 0.02
done
./run_training.sh examples/datatrove_mixture.json "${@:3}"
