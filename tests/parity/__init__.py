"""Tests of `threefold.parity`."""
