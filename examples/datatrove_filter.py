"""Filter documents with your own datatrove pipeline: python examples/datatrove_filter.py INPUT OUTPUT

INPUT is a folder of .parquet files with a column `text`. OUTPUT is a new folder of .parquet files for
train/prepare_data.py. Replace the filter, or add other blocks of datatrove between the reader and the writer.
"""

import sys

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.filters import LambdaFilter
from datatrove.pipeline.readers import ParquetReader
from datatrove.pipeline.writers import ParquetWriter

if __name__ == "__main__":
    source, output = sys.argv[1:]
    has_enough_words = LambdaFilter(lambda document: len(document.text.split()) >= 10)
    pipeline = [ParquetReader(source), has_enough_words, ParquetWriter(output)]
    # logging_dir marks completed tasks, which a repeated command skips
    LocalPipelineExecutor(pipeline, tasks=8, workers=4, logging_dir=f"{output}-logs").run()
