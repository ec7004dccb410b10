"""Measurements: one prefill an example serves every method and budget."""
