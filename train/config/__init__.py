"""The configuration of a run.

`arguments` declares the keys. `load` reads, checks and resolves the file and the command line. `schema` describes the
allowed values, as JSON schema and in words. `schedule` has the phases of the precision, `ds_config` the DeepSpeed
configuration, and `differences` compares configurations on a resume.

May import train.files, train.data, and the parts of model that do not need torch. Other packages use TrainingArguments
and ConfigurationError from arguments; load_arguments, build_arguments and resolve_arguments from load;
resolve_ds_config from ds_config; and differences.
"""
