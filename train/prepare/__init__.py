"""Writing of prepared data: text, or Megatron's token ids, -> token shards and a manifest; and training of a tokenizer.

May import: train.files, train.data, model; datatrove and the other packages of requirements-prep.txt. Nothing of
training imports this room. Others use of it: the commands prepare_data, train_tokenizer and import_megatron, each one
call. corpus, readers, output, tally, steps, tokenizer and megatron are importable without datatrove, all of it
without torch.
"""
