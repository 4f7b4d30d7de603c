"""The words of the command line that belong to this lab, one module each."""
