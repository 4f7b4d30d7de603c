"""How far foresight is off: its predictions beside what was measured, here and by others."""
