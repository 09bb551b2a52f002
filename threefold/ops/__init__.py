"""Faster CPU kernels than torch's for linear layers, attention and cross-entropy; and activation functions by name."""
