"""Every private part of torch that the package leans on, said once: why, and what would replace it.

No other file imports a name of torch that begins with an underscore; `tests/test_torch_private.py` has a test of each
part here, whose failure says in a sentence what torch has changed.
"""
