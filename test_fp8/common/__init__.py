"""What all benchmarks share: a Row and the command line (rows, options), what becomes of results (report, timing), when
two models are the same (same_model), processes that are started (processes), what a later call goes on with (work_dir),
and prepared folders made by hand (folders), which tests use, too.

May import: model, train.data.format, train.config, train.files. rows, options and report do without torch until they
need it, so that --help and a bad argument are answered at once.
"""
