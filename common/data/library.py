"""Reads the standard library as it is imported, so that all processes forked from the one that imports it have it."""

from gptscale.common.data.sources import library_ids

library_ids()
