"""Checkpoints: the tensors of a whole model under their whole names, so that any layout reads what another wrote.

`folder` knows where they lie and which are whole, `tensors` moves the numbers, `save` makes one all at once, and
`resume` decides whether a run may go on from one.
"""
