"""How the C++ operators are compiled, kept and loaded."""
