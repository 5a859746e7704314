"""Prepared data: `format` (files and manifest), `source` (the shards of a folder as windows), `order` (which sample is
where: mixture, shuffling, skipped positions), `stream` (batches of a rank), `encoder` (its tokenizer), `inspection`.

May import: train.files. Others use open_stream, MicroBatches and NO_LABEL of stream, DataError and the manifest of
format; preparation writes with format, and inspect_data prints with inspection. Only stream imports torch.
"""
