"""Prepared data: file format, tokenizer, sample order and batches.

    format        file format and manifest
    source        read the shards of a folder as windows
    order         order of the samples
    stream        batches for each rank
    encoder       tokenizer

May import: train.files. Training uses SampleStream, MicroBatches and NO_LABEL from stream, and DataError and the
manifest from format. The data preparation writes files with format. Only stream imports torch.
"""
