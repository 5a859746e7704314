"""Data preparation: convert text or Megatron datasets to token shards with a manifest, and train tokenizers.

May import: train.files, train.data and model; datatrove and the other packages of requirements-prep.txt. The training
code does not import this package. The commands prepare_data, train_tokenizer and import_megatron make one call each.
corpus, readers, output, tally, tokenizer and megatron can be imported without datatrove, and the whole package
without torch.
"""
