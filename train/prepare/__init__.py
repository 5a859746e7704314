"""Data preparation: convert text to token shards with a manifest, and train tokenizers.

May import: train.files, train.rank_env, train.data and model; datatrove and the other packages of
requirements-prep.txt. The training code does not import this package. The commands prepare_data and train_tokenizer
make one call each, and import_megatron writes with output. corpus, readers, output, tally and tokenizer can be imported
without datatrove, and the whole package without torch.
"""
