"""Measurements of this package beside others. They are run from the checkout and are not in the wheel."""
