"""What a user can mend, apart from the ValueErrors of arguments and files."""


class UserError(RuntimeError):
    """Its message says what was given or found, and what to do; train.py shows it without a traceback and ends with
    status 2: started again as it is, the run would end so again."""
