"""Text to token files to batches: everything between the user's corpus and the step.

`python_text` and `prepare` make token files (`threefold data sample`, `threefold data prepare`); `files` opens them,
`split` divides their documents, `samples` cuts them into samples, `order` shuffles those and `loader` hands them out.
"""
