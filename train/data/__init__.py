"""Prepared data: format, sample order, and batches.

File format and manifest (`format`), shards of a folder as windows (`source`), sample order (`order`), batches of a rank
(`stream`), tokenizer (`encoder`) and `inspection`.

May import: train.files. Training uses open_stream, MicroBatches and NO_LABEL from stream, and DataError and the
manifest from format. The preparation writes with format, and inspect_data prints with inspection. Only stream imports
torch.
"""
