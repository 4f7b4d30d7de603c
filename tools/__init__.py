"""Programs for those who work on this package. They are run from the checkout and are not in the wheel."""
