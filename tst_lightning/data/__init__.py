"""Prepared corpora and the exact order in which a run reads them."""
