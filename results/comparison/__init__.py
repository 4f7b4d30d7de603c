"""How the rows of many runs are compared: groups, tables, pictures, a page."""
