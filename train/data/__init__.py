"""Reading of prepared data: what it is on disk (format, index), and which tokens a sample of training has (stream).

May import: train.files. Others use of it: open_stream, MicroBatches and NO_LABEL of stream, DataError and the manifest
of format; preparation writes by format, and inspect_data prints by inspection. Only stream imports torch.
"""
