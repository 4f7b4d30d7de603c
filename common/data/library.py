"""Read the standard library when this module is imported, so that processes which are forked later need not."""

from gptscale.common.data.sources import library_ids

library_ids()
